from __future__ import annotations

import gc

from harness.clock import RealClock
from harness.gc_log import GcLog


def test_collections_are_recorded_between_start_and_stop():
    log = GcLog(RealClock())
    gc.collect()
    log.start()
    gc.collect()
    log.stop()
    log.stop()
    gc.collect()
    pauses = [p for p in log.pauses() if p["generation"] == 2]
    assert len(pauses) == 1
    assert pauses[0]["duration_ms"] > 0
