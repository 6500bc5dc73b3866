from __future__ import annotations

from harness.ledger import reconcile
from harness.metrics import compute_tables
from harness.record import RunRecord

LINES = {"weights_bytes": 8_000, "kv_cache_bytes": 4_000, "activations_bytes": 500, "host_blocks_bytes": 9_999}
LINES |= {"of_kv_cache_decode_reserve_bytes": 600, "pinned_host_cache_bytes": 7_777}  # part of a line; not there


def test_on_a_gpu_the_allocators_peak_is_held_against_the_plan():
    peaks = {"peak_gpu_allocated_bytes": 12_700, "peak_gpu_reserved_bytes": 13_000, "peak_rss_bytes": 99_000}
    assert reconcile(LINES | peaks, own_bytes=13_600) == {"planned": 12_500, "residual": 200, "outside_torch": 600}


def test_what_captured_steps_use_without_owning_it_is_no_residual():
    pool = {"graph_pool_bytes": 900, "of_graph_pool_reused_bytes": 700}
    peaks = {"peak_gpu_allocated_bytes": 12_700, "peak_gpu_reserved_bytes": 13_500}
    assert reconcile(LINES | pool | peaks, own_bytes=13_600) == {
        "planned": 13_400,
        "residual": 12_700 + 700 - 13_400,
        "outside_torch": 100,
    }


def test_on_a_cpu_resident_memory_is_and_the_gpu_stays_unknown():
    assert reconcile(LINES | {"peak_rss_bytes": 20_000}, None) == {
        "planned": 12_500,
        "residual": 7_500,
        "outside_torch": None,
    }


def test_unknown_stays_unknown():
    assert reconcile({"peak_rss_bytes": 20_000}, 5) == {}
    assert reconcile({"weights": 5}, None) == {"planned": 5, "residual": None, "outside_torch": None}


def test_the_residual_and_throttling_are_columns():
    telemetry = [{"t_s": 0.0, "throttle": ""}, {"t_s": 0.1, "throttle": "power cap"}, {"t_s": 0.2}]
    record = RunRecord({"run_id": "r", "engine": "ours"}, memory={"residual": 7}, telemetry=telemetry)
    run = compute_tables(record)["runs"].iloc[0]
    assert (run.ledger_residual_bytes, run.throttled_share) == (7, 0.5)
