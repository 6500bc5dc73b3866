"""Requests without a model, and a hand on the model's forward pass."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine.requests import Request
from engine.sampling import SamplingParams


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


class ForwardGate:
    """Holds a model's forward passes from the ``after``-th on until `open` is called."""

    def __init__(self, model: Any, after: int) -> None:
        self.calls = 0
        self.reached = threading.Event()
        self._after = after
        self._open = threading.Event()
        self._hook = model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.calls += 1
        if self.calls > self._after:
            self.reached.set()
            assert self._open.wait(20), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()

    def remove(self) -> None:
        self.open()
        self._hook.remove()


@pytest.fixture
def gate() -> Iterator[Callable[..., ForwardGate]]:
    """Stop the engine at a chosen step, so that a test can act in the middle of a generation."""
    gates: list[ForwardGate] = []

    def build(model: Any, after: int = 0) -> ForwardGate:
        gates.append(ForwardGate(model, after))
        return gates[-1]

    yield build
    for each in gates:
        each.remove()


@pytest.fixture
def fail_forward() -> Iterator[Callable[..., None]]:
    """Let a model's ``n``-th forward pass from now raise."""
    hooks = []

    def arm(model: Any, n: int, error: Exception) -> None:
        calls = itertools.count(1)

        def hook(*_: Any) -> None:
            if next(calls) == n:
                raise error

        hooks.append(model.register_forward_pre_hook(hook))

    yield arm
    for hook in hooks:
        hook.remove()
