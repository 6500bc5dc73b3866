"""``python -m harness`` is ``cb-bench``."""

from harness.app import main

raise SystemExit(main())
