"""Requests without a model, and a hand on the steps of an engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, generate_batch
from engine.requests import Request
from engine.runner import LaunchedStep, ModelRunner
from engine.sampling import SamplingParams
from engine.scheduler import StepPlan
from harness.models import ModelSpec, load_model


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """A request as admission would hand it to the scheduler."""
    numbers = itertools.count()

    def build(prompt: Sequence[int], max_new_tokens: int = 4, **options: Any) -> Request:
        options.setdefault("request_id", f"r{next(numbers)}")
        return Request.create(
            prompt_ids=list(prompt),
            max_new_tokens=max_new_tokens,
            eos_token_ids=frozenset(),
            sampling=options.pop("sampling", SamplingParams()),
            **options,
        )

    return build


@pytest.fixture
def everything() -> Callable[[Any], dict[str, Any]]:
    """The terminal outputs of a manager by request id, once all it was given have ended."""
    return lambda manager: {output.request_id: output for output in manager if output.is_finished()}


@pytest.fixture
def started_thread() -> Callable[[Callable[[], Any]], threading.Thread]:
    """A client thread that runs a function; it does not outlive the tests."""

    def start(function: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        return thread

    return start


class Steps:
    """Stands in front of the runner: every step of an engine passes through here before it is launched."""

    calls = 0

    def before_launch(self) -> None:
        raise AssertionError("a subclass says what stands before a launch")


class Gate(Steps):
    """Holds all steps from the ``after``-th on until `open` is called."""

    def __init__(self, after: int) -> None:
        self.reached = threading.Event()
        self._after = after
        self._open = threading.Event()

    def before_launch(self) -> None:
        self.calls += 1
        if self.calls > self._after:
            self.reached.set()
            assert self._open.wait(20), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


class Failure(Steps):
    """Raises at the ``n``-th step."""

    def __init__(self, n: int, error: Exception) -> None:
        self._n, self._error = n, error

    def before_launch(self) -> None:
        self.calls += 1
        if self.calls == self._n:
            raise self._error


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Steps]:
    """What stands in front of the runner in this test."""
    active: list[Steps] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        for each in active:
            each.before_launch()
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    return active


@pytest.fixture
def gate(steps: list[Steps]) -> Iterator[Callable[..., Gate]]:
    """Stop the engine at a chosen step, so that a test can act in the middle of a generation."""
    gates: list[Gate] = []

    def build(after: int = 0) -> Gate:
        gates.append(Gate(after))
        steps.append(gates[-1])
        return gates[-1]

    yield build
    for each in gates:
        each.open()


@pytest.fixture
def fail_step(steps: list[Steps]) -> Callable[[int, Exception], None]:
    """Let the ``n``-th step from now raise."""
    return lambda n, error: steps.append(Failure(n, error))


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """A preset of random weights; another one with each call."""
    return lambda name="tiny-llama": load_model(ModelSpec(name=name), "cpu").model


@pytest.fixture
def config() -> Callable[..., ContinuousBatchingConfig]:
    """A small cache and small steps."""
    small = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64}
    return lambda **changes: ContinuousBatchingConfig(**{**small, **changes})


@pytest.fixture
def generation() -> Callable[..., GenerationConfig]:
    """Eight tokens, the likeliest ones."""
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return lambda **changes: GenerationConfig(**{**greedy, **changes})


@pytest.fixture
def generate_now(generation: Callable[..., GenerationConfig]) -> Callable[..., list[int]]:
    """What transformers' ``generate`` makes of a prompt with these settings; unlike ``reference`` it keeps no answer,
    for models that change."""

    def generate(model: Any, ids: Sequence[int]) -> list[int]:
        prompt = torch.tensor([list(ids)])
        with torch.no_grad():
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=generation())
        return list(out[0, len(ids) :].tolist())

    return generate


@pytest.fixture
def batch(
    config: Callable[..., ContinuousBatchingConfig], generation: Callable[..., GenerationConfig]
) -> Callable[..., Any]:
    """``generate_batch`` with these defaults."""

    def run(model: Any, prompts: Any, g: Any = None, c: Any = None, **options: Any) -> Any:
        return generate_batch(model, prompts, g or generation(), c or config(), progress_bar=False, **options)

    return run
