"""``cb-report DIR``: the console table and the HTML report of a run or sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.report.console import print_summary
from harness.report.html import write_report
from harness.report.read import ResultsError
from harness.streams import open_closed


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on standard error if the directory holds nothing to report."""
    open_closed()
    parser = argparse.ArgumentParser(
        prog="cb-report", description="Print the summary of a run or sweep and write its HTML report and plots."
    )
    parser.add_argument("directory", type=Path, nargs="+", help="a run folder, or the root folder of a sweep")
    parser.add_argument("--no-html", action="store_true", help="print the table only, write nothing")
    args = parser.parse_args(argv)
    try:
        if len(args.directory) > 1:
            raise ResultsError("name one folder; to compare two: cb-compare A B")
        (directory,) = args.directory
        print_summary(directory)
        if not args.no_html:
            print(write_report(directory))
    except (ResultsError, OSError) as error:
        print(f"cb-report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
