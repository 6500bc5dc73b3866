"""transformers' own continuous batching, for real, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.backends import GenerationSettings, create
from harness.record import Outcome
from workloads.workload import ScheduledRequest

Requests = Callable[..., list[ScheduledRequest]]
SMALL = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 32, "auto_switch_to_flash": False}
PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8]]


def test_tokens_config_and_counters(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    expected = [reference(llama, p, n) for p, n in zip(PROMPTS, (6, 1, 9), strict=True)]
    backend = create("transformers", llama, SMALL)
    backend.warm_up([ScheduledRequest("w0", 0.0, (8, 8, 8), 3)])
    backend.start(sink)
    for r in requests(PROMPTS, (6, 1, 9)):
        backend.submit(r)
    backend.close_input()
    seen = sink.wait(3)
    assert [seen[f"r{k}"].tokens for k in range(3)] == expected
    assert {s.outcome for s in seen.values()} == {Outcome.OK_LENGTH}
    for s in seen.values():
        assert s.admit_ns is not None
        assert s.admit_ns <= s.token_ns[0]
        assert len(s.token_ns) == len(s.tokens)
    rows = {row.field: row for row in backend.config()}
    assert (rows["num_blocks"].value, rows["num_blocks"].source) == (32, "user")
    assert (rows["scheduler_type"].value, rows["scheduler_type"].source) == ("fifo", "default")
    assert rows["max_requests_per_batch"].value == 32
    assert rows["max_requests_per_batch"].source.startswith("derived")
    assert rows["attn_implementation_in_use"].value == "paged|eager"
    counters = backend.counters()
    assert counters["kv_blocks_total"] == 32
    assert 9 <= (counters["steps"] or 0) <= 12
    assert (backend.memory()["kv_cache_bytes"] or 0) > 0
    backend.stop()
    assert llama.config._attn_implementation == "eager"


def test_eos(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    free = reference(llama, PROMPTS[0], 12)
    llama.generation_config.eos_token_id = free[4]
    backend = create("transformers", llama, SMALL, GenerationSettings(ignore_eos=False))
    backend.start(sink)
    backend.submit(requests(PROMPTS[:1], [12])[0])
    seen = sink.wait(1)["r0"]
    assert seen.tokens == free[: free.index(free[4]) + 1]
    assert seen.outcome is Outcome.OK_EOS
    backend.stop()


def test_a_crash_of_its_loop_ends_every_request(llama: Any, sink: Any, requests: Requests) -> None:
    """An id outside the vocabulary kills its loop; nobody may wait for ever."""
    backend = create("transformers", llama, SMALL)
    backend.start(sink)
    reqs = requests([PROMPTS[0], [5, 500, 3]], [400, 3])
    for r in reqs:
        backend.submit(r)
    seen = sink.wait(2)
    assert {s.outcome for s in seen.values()} == {Outcome.ENGINE_ERROR}
    assert all(s.error for s in seen.values())
    backend.stop()


def test_stop_leaves_open_requests_unfinished(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("transformers", llama, SMALL)
    backend.start(sink)
    backend.submit(requests(PROMPTS[:1], [400])[0])
    sink.wait_tokens(1)
    backend.stop()
    assert sink.seen["r0"].outcome is Outcome.UNFINISHED


def test_a_value_it_refuses_is_an_error(llama: Any) -> None:
    with pytest.raises(ValueError, match="page_size"):
        create("transformers", llama, {"page_size": 3})


def test_it_serves_another_run_under_the_same_ids(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    expected = [reference(llama, p, 4) for p in PROMPTS]
    backend = create("transformers", llama, SMALL)
    for _ in range(2):
        sink.seen.clear()
        backend.start(sink)
        for r in requests(PROMPTS, (4, 4, 4)):
            backend.submit(r)
        sink.wait(3)
        assert [sink.seen[f"r{k}"].tokens for k in range(3)] == expected
        counted = backend.counters()["steps"]
        assert counted is not None
        assert 4 <= counted <= 20  # of this run alone
    backend.stop()
