"""The manager driver against a fake engine: every way a request can end, and the engine's death."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from engine import QueueFull
from harness.backends.ours import OursBackend
from harness.record import ConfigValue, Outcome
from workloads.workload import ScheduledRequest

Requests = Callable[..., list[ScheduledRequest]]


class Status(IntEnum):
    PENDING = 0
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


@dataclass
class Output:
    request_id: str
    generated_tokens: list[int] = field(default_factory=list)
    status: Status = Status.DECODING
    error: str | None = None
    lifespan: tuple[float, float] = (-1, -1)
    finish_reason: str | None = None
    cached_tokens: int | None = None
    preemptions: int = 0
    prefill_steps: int = 1
    kv_blocks: int | None = 3
    recomputed_tokens: int | None = None

    @property
    def status_times(self) -> list[tuple[Any, float]]:
        return [(Status.PENDING, 12.0), (self.status, self.lifespan[1])]

    def is_finished(self) -> bool:
        return self.status >= Status.FINISHED

    def tokens_since(self, index: int) -> list[int]:
        return self.generated_tokens[index:]


@dataclass(frozen=True)
class Step:
    step: int
    t_ns: int
    free_blocks: int


class FakeManager:
    """The public API, driven by the test: it puts outputs in the queue itself, or lets ``script`` answer a request."""

    def __init__(self, script: Callable[[FakeManager, str, list[int], int], None] | None = None) -> None:
        self.outputs: queue.Queue[Output] = queue.Queue()
        self.added: list[tuple[str, list[int], int, bool]] = []
        self.running = False
        self.stopped_hard: bool | None = None
        self.destroyed = False
        self.fatal_error: Exception | None = None
        self.step_log: list[Step] = []
        self.count = 0
        self.script = script
        self.resolved_config = SimpleNamespace(
            rows=lambda: [("num_blocks", 8, "user"), ("page_size", 4, "default")],
            layout=SimpleNamespace(windows=[None, 16], num_kv_heads=2, head_dim=8, itemsize=4),
            attention_backend="sdpa",
        )

    def measured_settings(self) -> list[tuple[str, Any, str]]:
        return [("linear_kernels", "torch 3", "derived: fastest on this device")] if self.running else []

    def start(self) -> None:
        self.running = True

    def is_running(self) -> bool:
        return self.running

    def stop(self, block: bool = True, hard_stop: bool = False) -> None:
        self.running, self.stopped_hard = False, hard_stop

    def destroy(self) -> None:
        self.destroyed = True

    def add_request(
        self, input_ids: list[int], request_id: str, max_new_tokens: int, streaming: bool = False
    ) -> str | None:
        if not input_ids:
            raise ValueError("the prompt is empty")
        if not self.running:
            return None
        self.added.append((request_id, input_ids, max_new_tokens, streaming))
        if self.script is not None:
            self.script(self, request_id, input_ids, max_new_tokens)
        return request_id

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Output | None:
        try:
            return self.outputs.get(timeout=timeout) if timeout else self.outputs.get_nowait()
        except queue.Empty:
            return None

    def counters(self) -> dict[str, int]:
        return {"preemptions": self.count, "kv_blocks_total": 8}

    def reset_counters(self) -> None:
        self.count, self.step_log = 0, []

    def ledger(self) -> dict[str, int]:
        return {"weights": 100, "kv_pool": 200}


def answer(manager: FakeManager, request_id: str, prompt: list[int], n: int) -> None:
    """One streamed output a token, then the terminal one with the last token."""
    for k in range(1, n):
        manager.outputs.put(Output(request_id, list(range(k)), lifespan=(12.5, -1)))
    manager.outputs.put(Output(request_id, list(range(n)), Status.FINISHED, lifespan=(12.5, 13), cached_tokens=2))


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def backend(manager: FakeManager) -> Any:
    backend = OursBackend(object(), manager, frozenset({50}))
    yield backend
    backend.stop()


def test_tokens_are_deltas_of_cumulative_outputs(
    backend: Any, manager: FakeManager, sink: Any, requests: Requests
) -> None:
    manager.script = answer
    backend.start(sink)
    before = time.perf_counter_ns()
    backend.submit(requests([[1, 2, 3]], [4])[0])
    seen = sink.wait(1)["r0"]
    assert manager.added == [("r0", [1, 2, 3], 4, True)]
    assert seen.tokens == [0, 1, 2, 3]
    assert len(seen.token_ns) == 4
    assert before <= seen.token_ns[0] <= seen.token_ns[-1] == seen.end_ns
    assert seen.admit_ns == 12_500_000_000
    assert seen.outcome is Outcome.OK_LENGTH
    assert seen.facts == {
        "cached_tokens": 2,
        "statuses": "pending > finished",
        "t_pending_ns": 12_000_000_000,
        "t_decoding_ns": None,
        "t_over_ns": 13_000_000_000,
        "preemptions": 0,
        "prefill_steps": 1,
        "kv_blocks": 3,
    }


@pytest.mark.parametrize(
    ("output", "outcome"),
    [
        (Output("r0", [1, 2, 50], Status.FINISHED), Outcome.OK_EOS),
        (Output("r0", [1, 2, 3, 50], Status.FINISHED), Outcome.OK_EOS),
        (Output("r0", [1, 2, 3, 4], Status.FINISHED), Outcome.OK_LENGTH),
        (Output("r0", [1, 2], Status.FINISHED, finish_reason="stop"), Outcome.OK_EOS),
        (Output("r0", [1, 2], Status.FINISHED), Outcome.STREAM_TRUNCATED),
        (Output("r0", [], Status.FINISHED), Outcome.EMPTY),
        (Output("r0", [1], Status.CANCELLED, error="cancelled"), Outcome.CANCELLED),
        (Output("r0", [], Status.FAILED, error="CUDA out of memory"), Outcome.OOM_PREFILL),
        (Output("r0", [1], Status.FAILED, error="CUDA out of memory"), Outcome.OOM_DECODE),
        (Output("r0", [1], Status.FAILED, error="No requests can be scheduled"), Outcome.CACHE_EXHAUSTED),
        (Output("r0", [1], Status.FAILED, error="list index out of range"), Outcome.ENGINE_ERROR),
        (Output("r0", [1], Status.FAILED), Outcome.ENGINE_ERROR),
    ],
)
def test_every_end_has_its_outcome(
    backend: Any, manager: FakeManager, sink: Any, requests: Requests, output: Output, outcome: Outcome
) -> None:
    backend.start(sink)
    backend.submit(requests([[1]], [4])[0])
    manager.outputs.put(output)
    seen = sink.wait(1)["r0"]
    assert seen.outcome is outcome
    assert seen.tokens == output.generated_tokens
    assert (seen.error is not None) == (outcome not in (Outcome.EMPTY, Outcome.STREAM_TRUNCATED) and not outcome.ok)


def test_refusals_are_rejected_at_once(backend: Any, sink: Any, requests: Requests) -> None:
    backend.start(sink)
    backend.submit(requests([[]], [4])[0])
    assert sink.seen["r0"].outcome is Outcome.REJECTED
    assert sink.seen["r0"].error == "the prompt is empty"


def test_a_full_queue_is_a_refusal(
    backend: Any, manager: FakeManager, sink: Any, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise QueueFull("4 requests already wait")

    monkeypatch.setattr(manager, "add_request", full)
    backend.start(sink)
    backend.submit(requests([[1]], [4])[0])
    assert sink.seen["r0"].outcome is Outcome.REJECTED
    assert "max_queue_size" in (sink.seen["r0"].error or "")


def test_death_of_the_loop_ends_every_open_request_with_its_cause(
    backend: Any, manager: FakeManager, sink: Any, requests: Requests
) -> None:
    backend.start(sink)
    for r in requests([[1], [2], [3]], [4, 4, 4]):
        backend.submit(r)
    manager.outputs.put(Output("r1", [8]))
    sink.wait_tokens(1)
    manager.fatal_error = KeyError("slot 7")
    manager.running = False
    seen = sink.wait(3, timeout=5)
    assert {s.outcome for s in seen.values()} == {Outcome.ENGINE_ERROR}
    assert all("KeyError: 'slot 7'" in (s.error or "") for s in seen.values())
    assert seen["r1"].tokens == [8]
    backend.submit(ScheduledRequest("late", 0.0, (1,), 2))
    assert sink.seen["late"].outcome is Outcome.ENGINE_ERROR
    assert {s.ends for s in seen.values()} == {1}


def test_outputs_before_the_death_are_not_lost(
    backend: Any, manager: FakeManager, sink: Any, requests: Requests
) -> None:
    backend.start(sink)
    backend.submit(requests([[1]], [2])[0])
    with manager.outputs.mutex:
        manager.running = False
    manager.outputs.put(Output("r0", [4, 5], Status.FINISHED))
    assert sink.wait(1)["r0"].ends == 1


def test_stop_ends_open_requests_unfinished(backend: Any, manager: FakeManager, sink: Any, requests: Requests) -> None:
    backend.start(sink)
    backend.submit(requests([[1]], [4])[0])
    backend.stop()
    assert sink.seen["r0"].outcome is Outcome.UNFINISHED
    assert (manager.stopped_hard, manager.destroyed) == (True, True)


def test_warm_up_is_apart_and_counts_begin_at_start(
    backend: Any, manager: FakeManager, sink: Any, requests: Requests
) -> None:
    manager.script = answer
    backend.warm_up(requests([[1], [2]], [2, 2]))
    assert sink.seen == {}
    assert len(manager.added) == 2
    manager.count, manager.step_log = 3, [Step(0, 10, 1), Step(1, 20, 1)]
    backend.start(sink)
    manager.count += 2
    manager.step_log += [Step(0, 30, 6), Step(1, 40, 5)]
    assert backend.counters() == {"preemptions": 2, "kv_blocks_total": 8}
    assert backend.steps() == [
        {"step": 0, "t_ns": 30, "free_blocks": 6},
        {"step": 1, "t_ns": 40, "free_blocks": 5},
    ]
    assert backend.config()[0] == ConfigValue("num_blocks", 8, "user")
    assert ConfigValue("linear_kernels", "torch 3", "derived: fastest on this device") in backend.config()
    assert ConfigValue("cache.windows", [None, 16], "derived: the model's attention layers") in backend.config()
    assert backend.memory() == {"weights": 100, "kv_pool": 200}


def test_failed_warm_up_says_why(backend: Any, manager: FakeManager, requests: Requests) -> None:
    manager.script = lambda m, request_id, *_: m.outputs.put(Output(request_id, [], Status.FAILED, error="boom"))
    with pytest.raises(RuntimeError, match="warm-up failed: r0 ended engine_error: boom"):
        backend.warm_up(requests([[1]], [2]))


def test_submitting_does_not_wait_for_answers(backend: Any, sink: Any, requests: Requests) -> None:
    backend.start(sink)
    done = threading.Event()

    def send() -> None:
        for r in requests([[1]] * 50, [4] * 50):
            backend.submit(r)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert done.wait(5)
    assert sink.seen == {}
