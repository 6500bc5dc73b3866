"""A recording sink and tiny models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from harness.record import Outcome
from workloads.workload import ScheduledRequest


@dataclass
class Seen:
    """What a sink was told about one request."""

    tokens: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    admit_ns: int | None = None
    outcome: Outcome | None = None
    end_ns: int | None = None
    error: str | None = None
    hidden: list[int | None] = field(default_factory=list)
    facts: dict[str, int | str | None] = field(default_factory=dict)
    ends: int = 0


class ListeningSink:
    """Keeps everything; ``wait`` blocks until ``n`` requests ended."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self._changed = threading.Condition()

    def _of(self, request_id: str) -> Seen:
        return self.seen.setdefault(request_id, Seen())

    def on_admit(self, request_id: str, time_ns: int) -> None:
        with self._changed:
            self._of(request_id).admit_ns = time_ns

    def on_tokens(self, request_id: str, token_ids: Sequence[int], time_ns: int) -> None:
        with self._changed:
            self._of(request_id).tokens += list(token_ids)
            self._of(request_id).token_ns.append(time_ns)
            self._changed.notify_all()

    def on_hidden_tokens(self, request_id: str, count: int | None, time_ns: int) -> None:
        with self._changed:
            self._of(request_id).hidden.append(count)
            self._of(request_id).token_ns.append(time_ns)
            self._changed.notify_all()

    def on_end(
        self, request_id: str, outcome: Outcome, time_ns: int, error: str | None = None, **facts: int | str | None
    ) -> None:
        with self._changed:
            s = self._of(request_id)
            s.outcome, s.end_ns, s.error, s.facts = outcome, time_ns, error, facts
            s.ends += 1
            self._changed.notify_all()

    def wait(self, n: int, timeout: float = 60) -> dict[str, Seen]:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(s.ends for s in self.seen.values()) >= n, timeout), self.seen
        return self.seen

    def wait_tokens(self, n: int, timeout: float = 60) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(len(s.tokens) for s in self.seen.values()) >= n, timeout)

    def wait_deliveries(self, n: int, timeout: float = 60) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(len(s.token_ns) for s in self.seen.values()) >= n, timeout)


@pytest.fixture
def sink() -> ListeningSink:
    return ListeningSink()


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.3,
        )
    ).eval()


@pytest.fixture
def llama(tiny_llama: Callable[[], Any]) -> Any:
    return tiny_llama()


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tiny_llama: Callable[[], Any]) -> Any:
    return tiny_llama() if request.param == "llama" else tiny_gpt2()


@pytest.fixture
def reference() -> Callable[..., list[int]]:
    """Greedy ``generate`` of one prompt alone."""

    def run(model: Any, prompt: Sequence[int], n: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    return run


def requests(prompts: Sequence[Sequence[int]], caps: Sequence[int]) -> list[ScheduledRequest]:
    return [ScheduledRequest(f"r{k}", 0.0, tuple(p), n) for k, (p, n) in enumerate(zip(prompts, caps, strict=True))]


@pytest.fixture(name="requests")
def requests_fixture() -> Callable[[Sequence[Sequence[int]], Sequence[int]], list[ScheduledRequest]]:
    return requests
