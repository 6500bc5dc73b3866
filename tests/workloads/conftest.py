"""Recorded traces, where this machine has them.

``CB_TRACES`` names a folder with ``azure_2023/`` and ``mooncake_fast25/``; without it the folder ``shared/traces`` next
to the checkout is looked at. Without either, tests of the real files are skipped; small fixtures test the readers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces() -> Path:
    folder = Path(os.environ.get("CB_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip("no recorded traces here: set CB_TRACES to their folder")
    return folder
