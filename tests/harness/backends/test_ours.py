"""This project's engine behind the backend contract, for real, on a tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from harness.backends import GenerationSettings, create
from harness.record import Outcome
from harness.tables import TABLES
from workloads.workload import ScheduledRequest

Requests = Callable[..., list[ScheduledRequest]]
SMALL = {"page_size": 4, "num_blocks": 32, "max_batch_tokens": 16, "auto_switch_to_flash": False}
PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8]]


def test_tokens_steps_config_and_counters(model: Any, sink: Any, requests: Requests, reference: Any) -> None:
    expected = [reference(model, p, n) for p, n in zip(PROMPTS, (6, 1, 9), strict=True)]
    backend = create("ours", model, SMALL)
    backend.warm_up([ScheduledRequest("w0", 0.0, (8, 8, 8), 3)])
    backend.start(sink)
    for r in requests(PROMPTS, (6, 1, 9)):
        backend.submit(r)
    backend.close_input()
    seen = sink.wait(3)
    steps, counters = backend.steps(), backend.counters()
    assert [seen[f"r{k}"].tokens for k in range(3)] == expected
    assert {s.outcome for s in seen.values()} == {Outcome.OK_LENGTH}
    for k, n in enumerate((6, 1, 9)):
        s = seen[f"r{k}"]
        assert s.admit_ns is not None
        assert s.admit_ns <= s.token_ns[0]
        facts = dict(s.facts)
        times = [facts.pop("t_pending_ns"), s.admit_ns, facts.pop("t_decoding_ns"), facts.pop("t_over_ns")]
        assert times == sorted(times)
        assert facts == {
            "cached_tokens": 0,
            "recomputed_tokens": 0,
            "statuses": "pending > prefilling > decoding > finished",
            "preemptions": 0,
            "prefill_steps": 1,
            "kv_blocks": -(-(len(PROMPTS[k]) + n - 1) // SMALL["page_size"]),
        }
    assert sum(s["prefill_tokens"] for s in steps) == 16
    assert [s["step"] for s in steps] == list(range(len(steps)))
    assert counters["steps"] == len(steps)
    assert counters["kv_blocks_total"] == 32
    rows = {row.field: row for row in backend.config()}
    assert (rows["num_blocks"].value, rows["num_blocks"].source) == (32, "user")
    assert rows["scheduler_type"].source == "default"
    assert all(v is None or v >= 0 for v in backend.memory().values())
    backend.stop()
    columns = set(TABLES["steps"].dtypes)
    assert {name for s in steps for name in s} - {"t_ns"} <= columns  # a run with a step nobody knows could not be kept


def test_eos(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    free = reference(llama, PROMPTS[0], 12)
    llama.generation_config.eos_token_id = free[4]
    backend = create("ours", llama, SMALL, GenerationSettings(ignore_eos=False))
    backend.start(sink)
    backend.submit(requests(PROMPTS[:1], [12])[0])
    seen = sink.wait(1)["r0"]
    assert seen.tokens == free[: free.index(free[4]) + 1]
    assert seen.outcome is Outcome.OK_EOS
    backend.stop()


def test_bad_requests_are_rejected_alone(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    expected = reference(llama, PROMPTS[0], 9)
    backend = create("ours", llama, SMALL)
    backend.start(sink)
    for r in [*requests(PROMPTS[:1], [9]), ScheduledRequest("x", 0.0, (5, 500), 2), ScheduledRequest("y", 0.0, (), 2)]:
        backend.submit(r)
    backend.submit(ScheduledRequest("z", 0.0, (1,) * 100, 100))
    seen = sink.wait(4)
    assert [seen[k].outcome for k in "xyz"] == [Outcome.REJECTED] * 3
    assert all(seen[k].error for k in "xyz")
    assert seen["r0"].tokens == expected
    backend.stop()


def test_shared_prefixes_are_found_and_reported(llama: Any, sink: Any) -> None:
    backend = create("ours", llama, SMALL)
    backend.start(sink)
    shared = tuple(range(1, 13))
    for k in range(3):
        backend.submit(ScheduledRequest(f"r{k}", 0.0, (*shared, 20 + k, 30), 2))
        sink.wait(k + 1)
    assert [sink.seen[f"r{k}"].facts["cached_tokens"] for k in range(3)] == [0, 12, 12]
    backend.stop()


def test_b12_no_cell_of_a_sweep_finds_the_others_prompts(llama: Any, sink: Any) -> None:
    """Two identical cells of 8 prompts of 64 ids, one by one: no hit in either. 48 shared of 64: 7 * 48 / 512."""
    settings = SMALL | {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    rng = random.Random(0)
    distinct = [tuple(rng.randrange(97) for _ in range(64)) for _ in range(8)]
    sharing = [(*distinct[0][:48], *p[48:]) for p in distinct]
    hits = []
    for cell, prompts in enumerate((distinct, distinct, sharing)):
        backend = create("ours", llama, settings)  # as each measured process has an engine of its own
        backend.warm_up([ScheduledRequest("w", 0.0, tuple(range(1, 65)), 2)])
        backend.start(sink)
        for k, prompt in enumerate(prompts):
            backend.submit(ScheduledRequest(f"c{cell}-{k}", 0.0, prompt, 2))
            sink.wait(8 * cell + k + 1)
        backend.stop()
        hits.append([sink.seen[f"c{cell}-{k}"].facts["cached_tokens"] for k in range(8)])
    assert hits == [[0] * 8, [0] * 8, [0] + [48] * 7]
    assert sum(hits[2]) / (8 * 64) == 0.65625


def test_stop_leaves_open_requests_unfinished(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("ours", llama, SMALL)
    backend.start(sink)
    backend.submit(requests(PROMPTS[:1], [100])[0])
    sink.wait_tokens(1)
    backend.stop()
    assert sink.seen["r0"].outcome is Outcome.UNFINISHED


@pytest.mark.parametrize("settings", [{"page_size": 3}, {"scheduler_type": "lifo"}])
def test_a_value_it_refuses_is_an_error(llama: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        create("ours", llama, settings)


def test_it_serves_another_run_under_the_same_ids(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    expected = [reference(llama, p, 4) for p in PROMPTS]
    backend = create("ours", llama, SMALL)
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
