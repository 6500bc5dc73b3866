"""These tests run in Triton's interpreter, in a process of their own: ``tests/kernels/test_interpreted.py`` starts it.

To run them directly: ``TRITON_INTERPRET=1 pytest tests/parity/interpreted``.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]
