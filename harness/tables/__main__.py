"""``python -m harness.tables`` writes ``results/README.md``."""

from __future__ import annotations

from harness.tables.document import main

raise SystemExit(main())
