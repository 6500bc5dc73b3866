from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.backends import GenerationSettings, create
from harness.clock import RealClock
from harness.driver import drive
from harness.record import Outcome
from harness.recorder import Recorder
from workloads.workload import ScheduledRequest, Workload

Requests = Callable[..., list[ScheduledRequest]]
PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [90, 3]]
CAPS = [6, 3, 9, 1]


def run(backend: Any, sink: Any, reqs: list[ScheduledRequest]) -> Any:
    backend.start(sink)
    for r in reqs:
        backend.submit(r)
    backend.close_input()
    return sink.wait(len(reqs))


@pytest.mark.parametrize("wave", [None, 1, 3])
def test_tokens_equal_generate_of_each_prompt_alone(
    model: Any, sink: Any, requests: Requests, reference: Any, wave: int | None
) -> None:
    expected = [reference(model, p, n) for p, n in zip(PROMPTS, CAPS, strict=True)]
    backend = create("static", model, {"wave": wave})
    seen = run(backend, sink, requests(PROMPTS, CAPS))
    assert [seen[f"r{k}"].tokens for k in range(4)] == expected
    assert {s.outcome for s in seen.values()} == {Outcome.OK_LENGTH}
    assert {s.ends for s in seen.values()} == {1}
    assert backend.counters()["waves"] == {None: 1, 1: 4, 3: 2}[wave]
    backend.stop()


def test_eos_ends_a_row_and_is_delivered(model: Any, sink: Any, requests: Requests, reference: Any) -> None:
    free = [reference(model, p, 12) for p in PROMPTS]
    eos = free[0][4]
    expected = [t[: t.index(eos) + 1] if eos in t else t for t in free]
    model.generation_config.eos_token_id = eos
    backend = create("static", model, {}, GenerationSettings(ignore_eos=False))
    seen = run(backend, sink, requests(PROMPTS, [12] * 4))
    assert [seen[f"r{k}"].tokens for k in range(4)] == expected
    computed = max(len(t) for t in expected)
    for k, tokens in enumerate(expected):
        assert seen[f"r{k}"].outcome is (Outcome.OK_EOS if tokens[-1] == eos else Outcome.OK_LENGTH)
        assert seen[f"r{k}"].facts["padding_output_tokens"] == computed - len(tokens)
    assert Outcome.OK_EOS in {s.outcome for s in seen.values()}
    backend.stop()
    assert model.generation_config.eos_token_id == eos


def test_a_rows_end_is_its_own_and_the_wave_ends_with_its_last(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama)
    seen = run(backend, sink, requests(PROMPTS, CAPS))
    for k, cap in enumerate(CAPS):
        assert seen[f"r{k}"].end_ns == seen[f"r{k}"].token_ns[cap - 1]
    assert seen["r3"].end_ns < seen["r1"].end_ns < seen["r0"].end_ns < seen["r2"].end_ns  # type: ignore[operator]
    steps = backend.steps()
    assert len(steps) == backend.counters()["steps"] == max(CAPS)
    assert [s["kind"] for s in steps] == ["prefill"] + ["decode"] * 8
    assert steps[0]["prefill_tokens"] == 18
    assert [s["running"] for s in steps] == [4, 3, 3, 2, 2, 2, 1, 1, 1]
    assert [s["kv_tokens"] for s in steps] == [4 * (8 + k) for k in range(9)]
    backend.stop()


class ScriptedModel:
    """Stands in for a model: ``generate`` streams hand-made tokens through transformers' own calling convention."""

    def __init__(self, script: list[list[int]]) -> None:
        self.script = script
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(vocab_size=100, pad_token_id=0, eos_token_id=99),
            _attn_implementation="none",
        )
        self.generation_config = SimpleNamespace(eos_token_id=99)
        self.device = torch.device("cpu")
        self.given: dict[str, Any] = {}

    def parameters(self) -> list[Any]:
        return []

    def generate(self, ids: torch.Tensor, *, attention_mask: torch.Tensor, streamer: Any, **kwargs: Any) -> None:
        self.given = {"ids": ids, "mask": attention_mask, **kwargs}
        streamer.put(ids)
        for step in zip(*self.script, strict=True):
            streamer.put(torch.tensor(step))
        streamer.end()


def test_b20_padding_is_counted_apart(sink: Any, requests: Requests) -> None:
    """Prompts 3, 5, 8; ends at EOS after 2, 4, 6 tokens: 16 of 24 prompt and 12 of 18 output tokens are real."""
    model = ScriptedModel([[1, 99, 0, 0, 0, 0], [1, 2, 3, 99, 0, 0], [1, 2, 3, 4, 5, 99]])
    backend = create("static", model, {}, GenerationSettings(ignore_eos=False))
    reqs = requests([[7] * 3, [7] * 5, [7] * 8], [20] * 3)
    seen = run(backend, sink, reqs)
    rows = [seen[f"r{k}"] for k in range(3)]
    assert [len(s.tokens) for s in rows] == [2, 4, 6]
    assert {s.outcome for s in rows} == {Outcome.OK_EOS}
    assert sum(len(s.tokens) for s in rows) / 2.0 == 6.0
    assert sum(len(r.prompt_ids) for r in reqs) == 16
    assert [s.facts["padding_prompt_tokens"] for s in rows] == [5, 3, 0]
    assert [s.facts["padding_output_tokens"] for s in rows] == [4, 2, 0]
    assert [s.end_ns for s in rows] == [s.token_ns[-1] for s in rows]
    assert model.given["mask"].sum(dim=1).tolist() == [3, 5, 8]
    assert model.given["mask"][:, -1].tolist() == [1, 1, 1]
    assert model.given["generation_config"].max_new_tokens == 20


def test_a_full_wave_starts_without_waiting_for_the_input_to_close(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama, {"wave": 2})
    backend.start(sink)
    reqs = requests(PROMPTS[:3], [2, 2, 2])
    backend.submit(reqs[0])
    backend.submit(reqs[1])
    sink.wait(2)
    backend.submit(reqs[2])
    backend.close_input()
    sink.wait(3)
    assert backend.counters()["waves"] == 2
    backend.stop()


def test_a_timeout_starts_a_smaller_wave(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama, {"wave": 50, "wave_timeout_s": 0.02})
    backend.start(sink)
    backend.submit(requests(PROMPTS[:1], [2])[0])
    assert sink.wait(1)["r0"].outcome is Outcome.OK_LENGTH
    backend.stop()


def test_without_timeout_a_smaller_wave_waits(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama, {"wave": 2})
    backend.start(sink)
    backend.submit(requests(PROMPTS[:1], [2])[0])
    assert not threading.Event().wait(0.1)
    assert sink.seen == {}
    backend.stop()
    assert sink.seen["r0"].outcome is Outcome.UNFINISHED


@pytest.mark.parametrize(("prompt", "cause"), [((), "empty"), ((5, 97), "token id 97"), ((-1,), "token id -1")])
def test_bad_requests_are_rejected_alone(
    llama: Any, sink: Any, requests: Requests, prompt: tuple[int, ...], cause: str
) -> None:
    backend = create("static", llama)
    seen = run(backend, sink, [*requests(PROMPTS[:1], [2]), ScheduledRequest("bad", 0.0, prompt, 2)])
    assert seen["bad"].outcome is Outcome.REJECTED
    assert cause in (seen["bad"].error or "")
    assert seen["r0"].outcome is Outcome.OK_LENGTH
    backend.stop()


def test_a_failing_wave_fails_its_own_requests_only(
    llama: Any, sink: Any, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = llama.generate, []

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return generate(*args, **kwargs)

    monkeypatch.setattr(llama, "generate", sometimes)
    backend = create("static", llama, {"wave": 2})
    seen = run(backend, sink, requests(PROMPTS, CAPS))
    assert [seen[f"r{k}"].outcome for k in range(4)] == [Outcome.OOM_PREFILL] * 2 + [Outcome.OK_LENGTH] * 2
    assert "9 GiB" in (seen["r0"].error or "")
    backend.stop()


def test_stop_in_the_middle_of_a_wave(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama, {"wave": 1})
    backend.start(sink)
    for r in requests(PROMPTS[:2], [400, 400]):
        backend.submit(r)
    sink.wait_tokens(1)
    backend.stop()
    assert {s.outcome for s in sink.seen.values()} == {Outcome.UNFINISHED}
    assert 1 <= len(sink.seen["r0"].tokens) < 400
    assert sink.seen["r1"].tokens == []
    backend.stop()


def test_warm_up_is_not_measured(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama)
    backend.warm_up(requests(PROMPTS[:2], [3, 3]))
    assert sink.seen == {}
    run(backend, sink, requests(PROMPTS[:1], [2]))
    assert backend.counters()["steps"] == 2
    backend.stop()


def test_the_models_own_generation_settings_do_not_leak_in(
    llama: Any, sink: Any, requests: Requests, reference: Any
) -> None:
    expected = reference(llama, PROMPTS[0], 12)
    llama.generation_config.repetition_penalty = 5.0
    own = llama.generation_config
    assert reference(llama, PROMPTS[0], 12) != expected
    backend = create("static", llama)
    assert run(backend, sink, requests(PROMPTS[:1], [12]))["r0"].tokens == expected
    backend.stop()
    assert llama.generation_config is own


def test_static_cache_gives_the_same_tokens(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    expected = [reference(llama, p, n) for p, n in zip(PROMPTS, CAPS, strict=True)]
    backend = create("static", llama, {"cache_implementation": "static"})
    seen = run(backend, sink, requests(PROMPTS, CAPS))
    assert [seen[f"r{k}"].tokens for k in range(4)] == expected
    assert {row.field: row.value for row in backend.config()}["cache_implementation"] == "static"
    backend.stop()


def test_prompts_padded_to_a_fixed_length(llama: Any, sink: Any, requests: Requests, reference: Any) -> None:
    """B20's prompts of 3, 5 and 8 in rows of 12: 36 positions for 16 tokens, and the tokens of each prompt alone."""
    prompts = [[7, 8, 9], [1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18]]
    expected = [reference(llama, p, 4) for p in prompts]
    backend = create("static", llama, {"pad_to": 12})
    too_long = ScheduledRequest("long", 0.0, tuple(range(1, 14)), 4)
    seen = run(backend, sink, [*requests(prompts, [4] * 3), too_long])
    assert [seen[f"r{k}"].tokens for k in range(3)] == expected
    assert [seen[f"r{k}"].facts["padding_prompt_tokens"] for k in range(3)] == [9, 7, 4]
    assert backend.steps()[0]["kv_tokens"] == 36
    assert backend.steps()[0]["prefill_tokens"] == 16
    assert seen["long"].outcome is Outcome.REJECTED
    assert "13 tokens is longer than engine.pad_to=12" in (seen["long"].error or "")
    backend.stop()
    with pytest.raises(ValueError, match=r"engine\.pad_to is 0"):
        create("static", llama, {"pad_to": 0})


def test_latency_of_a_wave_holds_the_waiting_for_it_to_form(llama: Any) -> None:
    """Arrivals 0 and 150 ms, waves of 2: the first is placed only when the second is there; its TTFT holds the wait."""
    arrivals = tuple(ScheduledRequest(f"r{k}", 0.15 * k, tuple(PROMPTS[k]), 2) for k in range(2))
    for settings, waits in (({"wave": 2}, True), ({"wave": 2, "wave_timeout_s": 0.0}, False)):
        # In the second case one at a time, so that no slow machine makes them wait for each other.
        workload = Workload("staged", arrivals, concurrency=None if waits else 1)
        recorder = Recorder(workload)
        backend = create("static", llama, settings)
        backend.warm_up(arrivals)
        result = drive(workload, backend, recorder, RealClock(), timeout_s=60)
        backend.stop()
        assert not result.timed_out
        first, second = recorder.records()
        assert first.t_admit_ns is not None
        assert second.t_submit_ns is not None
        assert (first.t_admit_ns >= second.t_submit_ns) == waits
        assert backend.counters()["waves"] == (1 if waits else 2)
        if waits:
            assert first.t_admit_ns == second.t_admit_ns
            assert first.chunks[0].time_ns > second.t_submit_ns > (first.t_submit_ns or 0)


def test_it_serves_another_run_with_waves_of_its_own(llama: Any, sink: Any, requests: Any) -> None:
    backend = create("static", llama, {"wave": 2})
    for k in range(2):
        backend.start(sink)
        for r in requests([[5, 9, 11], [3, 1], [4]], (2, 3, 1)):
            backend.submit(replace(r, request_id=f"{k}-{r.request_id}"))
        backend.close_input()
        sink.wait(3 * (k + 1))
        assert backend.counters()["waves"] == 2
    backend.stop()
    assert [len(sink.seen[f"1-r{k}"].tokens) for k in range(3)] == [2, 3, 1]


def test_the_ledger_holds_the_cache_of_the_largest_wave(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama, {"wave": 2})
    backend.warm_up(requests(PROMPTS, [40] * 4))  # larger than any that is measured
    assert backend.memory()["kv_cache_bytes"] is not None
    run(backend, sink, requests(PROMPTS, CAPS))
    config = llama.config
    position = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # fp32
    # Rows padded to the longer prompt; the last token of the longer answer is not computed on.
    assert backend.memory()["kv_cache_bytes"] == max(2 * (5 + 6 - 1), 2 * (8 + 9 - 1)) * position
    backend.stop()


def test_a_cache_of_fixed_size_counts_whole(llama: Any, sink: Any, requests: Requests) -> None:
    backend = create("static", llama, {"cache_implementation": "static"})
    run(backend, sink, requests(PROMPTS, CAPS))
    config = llama.config
    position = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert backend.memory()["kv_cache_bytes"] >= 4 * (8 + 9 - 1) * position
    backend.stop()
