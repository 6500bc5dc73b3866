"""``python -m harness`` is ``cb-bench``. What that needs is imported here: Ctrl-C meanwhile ends in one line, too."""

from __future__ import annotations

import sys

from harness.streams import open_closed


def main() -> int:
    """Run ``cb-bench``; its exit code."""
    open_closed()
    try:
        from harness.app import main as run
    except KeyboardInterrupt:
        print("cb-bench: interrupted by Ctrl-C; nothing had begun", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
