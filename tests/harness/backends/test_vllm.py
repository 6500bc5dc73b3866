"""The vLLM backend against a stand-in of its engine: what is asked for, and what is made of its answers."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.backends import create, uses_device
from harness.record import Outcome
from workloads.workload import ScheduledRequest


class _Engine:
    """Answers ``n`` tokens in deliveries of two, then as the prompt's first id says."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.prompts: list[list[int]] = []
        self.sampling: list[Any] = []
        self.prefix_resets, self.closed, self.busy_resets = 0, False, 0
        self.ids: list[str] = []
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype="bfloat16", max_model_len=4096, enforce_eager=False),
            cache_config=SimpleNamespace(
                block_size=16, num_gpu_blocks=1234, gpu_memory_utilization=0.9, enable_prefix_caching=True
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        )

    async def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return self.prefix_resets > self.busy_resets

    async def generate(self, prompt: dict[str, Any], sampling: Any, request_id: str) -> Any:
        ids = prompt["prompt_token_ids"]
        self.prompts.append(ids)
        self.sampling.append(sampling)
        self.ids.append(request_id)
        if ids[0] == 1:
            raise ValueError("the prompt is too long")
        left = sampling.max_tokens
        while left:
            await asyncio.sleep(30 if ids[0] == 3 else 0)
            if ids[0] == 2:
                raise RuntimeError("CUDA out of memory")
            count = min(2, left)
            left -= count
            answer = SimpleNamespace(
                token_ids=list(range(count)), finish_reason=None if left else "abort" if ids[0] == 4 else "length"
            )
            yield SimpleNamespace(outputs=[answer], finished=not left, num_cached_tokens=4)

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[_Engine]:
    made: list[_Engine] = []

    def from_engine_args(arguments: SimpleNamespace) -> _Engine:
        made.append(_Engine(vars(arguments)))
        return made[-1]

    parts: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.0", "SamplingParams": SimpleNamespace},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
    }
    for name, attributes in parts.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def request(name: str, first: int = 9, tokens: int = 5) -> ScheduledRequest:
    return ScheduledRequest(name, 0.0, (first, 8, 7), tokens)


def opened(**settings: Any) -> Any:
    return create("vllm", None, {"model": "tiny-llama", "load_format": "dummy", **settings})


def test_tokens_ends_and_settings(engines: list[_Engine], sink: Any) -> None:
    backend = opened(max_num_seqs=64)
    try:
        backend.warm_up([request("w")])
        (engine,) = engines
        assert engine.arguments["load_format"] == "dummy"
        assert engine.arguments["model"].endswith("tiny-llama")
        assert engine.arguments["max_num_seqs"] == 64
        assert "block_size" not in engine.arguments
        backend.start(sink)
        assert engine.prefix_resets == 1
        for r in (request("ok"), request("refused", 1), request("dead", 2)):
            backend.submit(r)
        sink.wait(3)
        assert [sink.seen[n].outcome for n in ("ok", "refused", "dead")] == [
            Outcome.OK_LENGTH,
            Outcome.REJECTED,
            Outcome.OOM_PREFILL,
        ]
        assert sink.seen["ok"].tokens == [0, 1, 0, 1, 0]
        assert engine.prompts[1] == [9, 8, 7]
        assert (engine.sampling[1].temperature, engine.sampling[1].ignore_eos) == (0.0, True)
        config = {c.field: (c.value, c.source) for c in backend.config()}
        assert config["max_num_seqs"] == (64, "user")
        assert config["block_size_in_use"] == (16, "derived: vllm 0.0")
        assert backend.counters() == {"kv_blocks_total": 1234}
    finally:
        backend.stop()
    assert engines[0].closed


def test_open_requests_are_unfinished_when_it_stops(engines: list[_Engine], sink: Any) -> None:
    backend = opened()
    backend.warm_up([])
    backend.start(sink)
    backend.submit(request("slow", 3))
    backend.stop()
    backend.stop()
    assert sink.seen["slow"].outcome is Outcome.UNFINISHED


def test_without_vllm_the_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    backend = opened()
    with pytest.raises(RuntimeError, match="vLLM cannot be imported"):
        backend.warm_up([])
    backend.stop()


def test_it_runs_on_the_device_in_a_process_of_its_own() -> None:
    assert uses_device("vllm")
    assert uses_device("ours")
    assert not uses_device("null")
    with pytest.raises(ValueError, match=r"engine\.model is not set"):
        create("vllm", None, {})


def test_it_serves_another_run_with_a_cold_cache_and_ids_of_its_own(engines: list[_Engine], sink: Any) -> None:
    backend = opened()
    backend.warm_up([request("w")])
    (engine,) = engines
    engine.busy_resets = 2  # the last step's blocks are given back a little later
    for _ in range(2):
        backend.prepare([request("a")])
        backend.start(sink)
        backend.submit(request("a"))
        sink.wait(1)
        sink.seen.clear()
    backend.stop()
    assert engine.prefix_resets == 4
    assert engine.ids == ["0-w", "1-a", "2-a"]


def test_a_cache_that_stays_in_use_is_an_error(
    engines: list[_Engine], monkeypatch: pytest.MonkeyPatch, sink: Any
) -> None:
    monkeypatch.setattr("harness.backends.vllm._FORGET_S", 0.05)
    backend = opened()
    backend.warm_up([])
    engines[0].busy_resets = 10**6
    with pytest.raises(RuntimeError, match="still in use"):
        backend.start(sink)
    backend.stop()


def test_a_warm_up_that_does_not_finish_is_an_error(engines: list[_Engine]) -> None:
    backend = opened()
    with pytest.raises(RuntimeError, match=r"warm-up failed.*finish reason 'abort'"):
        backend.warm_up([request("w", 4)])
    backend.stop()
