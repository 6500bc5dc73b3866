"""What a manager says happened: counters, step log, ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine import RequestStatus

Open = Callable[..., Any]
Everything = Callable[[Any], dict[str, Any]]

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [6], [31, 41, 59, 26]]


def test_counters_and_step_log(open_manager: Open, everything: Everything) -> None:
    """A-over-01: membership is decided anew at every step, and nothing is padded."""
    manager = open_manager(start=False)
    for i in range(3):
        manager.add_request(PROMPTS[i], request_id=f"r{i}", max_new_tokens=2 + 2 * i)
    manager.start()
    everything(manager)
    manager.stop()
    log = manager.step_log
    assert [(s.kind, s.decode_rows, s.prefill_rows, s.prefill_tokens) for s in log] == [
        ("prefill", 0, 3, 3 + 5 + 8),
        ("decode", 3, 0, 0),
        ("decode", 2, 0, 0),
        ("decode", 2, 0, 0),
        ("decode", 1, 0, 0),
        ("decode", 1, 0, 0),
    ]
    assert [s.step for s in log] == list(range(6))
    assert [s.kv_tokens for s in log] == [3 + 5 + 8, 4 + 6 + 9, 7 + 10, 8 + 11, 12, 13]
    assert [s.prefill_pairs for s in log] == [6 + 15 + 36, 0, 0, 0, 0, 0]  # causal: n (n + 1) / 2 of a whole prompt
    assert all(s.step_ms is not None and s.step_ms >= s.schedule_ms >= 0 for s in log)
    assert all(s.padded_rows == 0 and not s.graph for s in log)
    counters = manager.counters()
    assert counters["steps"] == 6
    assert counters["prefill_tokens"] == 16
    assert (counters["finished"], counters["failed"], counters["cancelled"]) == (3, 0, 0)
    assert (counters["kv_blocks_total"], counters["max_running"]) == (32, 3)
    assert counters["kv_blocks_free_min"] == min(s.free_blocks for s in log)
    manager.reset_counters()
    assert manager.step_log == []
    assert manager.counters()["kv_blocks_total"] == 32
    assert manager.counters()["kv_blocks_free_min"] is None


def test_a_terminal_output_tells_its_life(open_manager: Open, everything: Everything) -> None:
    """M-mech-01, M-s2-01, M-mem-05: states with times, chunks of the prompt, blocks at the end."""
    manager = open_manager(start=False, max_batch_tokens=16, page_size=4)
    manager.add_request([7] * 40, request_id="long", max_new_tokens=3)
    manager.add_request([7, 8], request_id="gone", max_new_tokens=9)
    manager.cancel_request("gone")
    manager.start()
    done = everything(manager)
    manager.stop()
    states, times = zip(*done["long"].status_times, strict=True)
    assert [s.name for s in states] == ["PENDING", "PREFILLING", "DECODING", "FINISHED"]
    assert list(times) == sorted(times)
    assert done["long"].prefill_steps == sum(s.prefill_rows for s in manager.step_log) == 3  # 16 + 16 + 8
    assert done["long"].kv_blocks == 11  # 42 positions in pages of 4
    assert [s.name for s, _ in done["gone"].status_times] == ["PENDING", "CANCELLED"]
    assert (done["gone"].prefill_steps, done["gone"].kv_blocks) == (0, None)
    unused = [(4 - end % 4) % 4 for end in (16, 32, 40, 41, 42)]
    assert [s.unused_slots for s in manager.step_log] == unused == [0, 0, 0, 3, 2]


def test_the_ledger_names_the_reserve_and_the_host(open_manager: Open) -> None:
    """M-mem-01, M-s4-05: 0.15 of 32 blocks is a little under 5; a block is 4 KiB a token here by the test below."""
    manager = open_manager(start=False, safety_margin=0.15)
    ledger = manager.ledger()
    block = manager.resolved_config.layout.block_bytes
    assert ledger["of_kv_cache_decode_reserve_bytes"] == 5 * block
    assert ledger["host_cache_bytes"] == 0
    assert open_manager(start=False, safety_margin=0.0).ledger()["of_kv_cache_decode_reserve_bytes"] == 0


def test_prefix_counters_survive_a_restart_and_a_reset(open_manager: Open) -> None:
    manager = open_manager()
    prompt = list(range(1, 14))

    def twice() -> None:
        for _ in range(2):
            manager.add_request(prompt, max_new_tokens=1)
            assert manager.get_result(timeout=10).status is RequestStatus.FINISHED

    twice()
    assert (manager.counters()["prefix_hit_tokens"], manager.counters()["prefix_query_tokens"]) == (12, 26)
    manager.stop()
    manager.start()  # a new cache, the same counters
    twice()
    assert (manager.counters()["prefix_hit_tokens"], manager.counters()["prefix_query_tokens"]) == (24, 52)
    manager.reset_counters()
    twice()  # all cached
    assert manager.counters()["prefix_hit_tokens"] == 24


def test_the_ledger_is_the_resolved_one(open_manager: Open) -> None:
    manager = open_manager(start=False)
    assert manager.ledger()["kv_cache_bytes"] == 33 * 4 * 256
    assert manager.ledger()["weights_bytes"] == sum(p.nbytes for p in manager.model.parameters())
    planned = manager.ledger()
    manager.start()
    assert manager.ledger() == planned, "nothing measures a CPU's allocator"
    sources = manager.ledger_sources()
    assert sources.keys() == planned.keys()
    assert (sources["kv_cache_bytes"], sources["activations_bytes"]) == ("exact", "estimated")
