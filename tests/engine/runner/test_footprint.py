"""The measuring of a warmed-up runner, on an allocator that is made up and on the ledger's lines."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import ContinuousBatchingConfig
from engine.bench.oracle import StepwiseEngine
from engine.bench.tiny_models import tiny_model
from engine.ledger import Footprint, Ledger
from engine.runner.batch import StepShape
from engine.runner.footprint import FootprintMeter, largest_step, measure_activations
from engine.scheduler import StepRows

VOCAB = 97


class MadeUpAllocator:
    def __init__(self, held: int) -> None:
        self.held = self.high = held

    def allocate(self, size: int) -> None:
        self.held += size
        self.high = max(self.high, self.held)

    def free(self, size: int) -> None:
        self.held -= size

    def allocated(self) -> int:
        return self.held

    def peak(self) -> int:
        return self.high

    def reset_peak(self) -> None:
        self.high = self.held


class MadeUpRunner:
    """Its steps take 5,000 bytes beside their inputs, and the first one leaves a workspace of 700 behind."""

    device = torch.device("cpu")

    def __init__(self, allocator: MadeUpAllocator, config: Any, fits: bool = True) -> None:
        self.allocator, self.config, self.windows, self.fits = allocator, config, [None], fits
        self.shapes: list[StepShape] = []
        self.threads: set[str] = set()
        self.released = 0

    def upload(self, shape: StepShape, rows: StepRows, target: torch.Tensor | None = None) -> torch.Tensor:
        self.allocator.allocate(4 * shape.size)
        self.shapes.append(shape)
        self.threads.add(threading.current_thread().name)
        return torch.zeros(shape.size, dtype=torch.int32)

    def padding_metadata(self, shape: StepShape, views: dict[str, torch.Tensor]) -> Any:
        return None

    def forward(self, shape: StepShape, views: dict[str, torch.Tensor], metadata: Any) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        if not self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        if len(self.shapes) == 1:
            self.allocator.allocate(700)
        self.allocator.allocate(5000)
        self.allocator.free(5000)
        return torch.zeros(shape.samples, VOCAB)

    def synchronize(self) -> None:
        self.allocator.free(4 * self.shapes[-1].size)

    def release_unused(self) -> None:
        self.released += 1


@pytest.fixture
def config() -> Any:
    settings = ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=64, max_requests_per_batch=8)
    engine = StepwiseEngine(tiny_model("tiny-llama"), settings)
    yield engine.core.config
    engine.core.close()


def test_the_largest_step_samples_every_row(config: Any) -> None:
    shape = largest_step(config, groups=1)
    assert (shape.decodes, shape.prefills, shape.prefill_tokens, shape.samples) == (7, 1, 57, 8)
    assert (shape.tokens, shape.width) == (64, config.table_pages)


def test_activations_are_a_steps_peak_without_inputs_and_without_what_stays(config: Any) -> None:
    allocator = MadeUpAllocator(1_000_000)
    allocator.high = 9_000_000  # of whatever came before
    meter = FootprintMeter(allocator)
    allocator.allocate(20_000 + 300)  # the cache, rotary tables
    runner = MadeUpRunner(allocator, config)
    assert measure_activations(runner, meter) == 5000
    # The first run leaves what stays, the second is measured, the third takes again what serving needs.
    assert runner.shapes == [largest_step(config, 1)] * 3
    assert runner.released == 1
    assert len(runner.threads) == 1
    assert threading.current_thread().name not in runner.threads
    assert not any(thread.name in runner.threads for thread in threading.enumerate()), "the thread has ended"
    allocator.allocate(40)  # logits' tokens and the like in the graphs' pool of 900 bytes, of which 860 are free
    footprint = meter.footprint(20_000, 5000, 900, 860)
    assert footprint == Footprint(activations=5000, workspaces=1000, graph_pool=900, graph_pool_reused=860)
    assert meter.footprint(20_000, None, None, None) == Footprint(None, 1040, None, None)


def test_a_largest_step_that_does_not_fit_leaves_the_estimate(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    allocator = MadeUpAllocator(0)
    runner = MadeUpRunner(allocator, config, fits=False)
    with caplog.at_level(logging.WARNING):
        assert measure_activations(runner, FootprintMeter(allocator)) is None
    assert "(64 tokens, 8 rows sampled in every way) does not fit into memory (CUDA out of memory." in caplog.text
    assert runner.released == 1


def test_another_error_is_not_swallowed(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = MadeUpRunner(MadeUpAllocator(0), config)
    monkeypatch.setattr(runner, "padding_metadata", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_activations(runner, FootprintMeter(runner.allocator))


def test_the_ledger_takes_what_was_found_and_says_so() -> None:
    planned = Ledger(1000, 2000, 30, 400, workspaces=50, decode_reserve=600, host_cache=7)
    assert planned.as_dict() == {
        "weights_bytes": 1000,
        "kv_cache_bytes": 2000,
        "step_buffers_bytes": 30,
        "activations_bytes": 400,
        "workspaces_bytes": 50,
        "of_kv_cache_decode_reserve_bytes": 600,
        "host_cache_bytes": 7,
    }
    assert {name for name, source in planned.sources().items() if source == "estimated"} == {
        "activations_bytes",
        "workspaces_bytes",
    }
    found = planned.with_measured(Footprint(300, 60, 90, 80))
    assert found.as_dict() == planned.as_dict() | {
        "activations_bytes": 300,
        "workspaces_bytes": 60,
        "graph_pool_bytes": 90,
        "of_graph_pool_reused_bytes": 80,
    }
    measured = {"activations_bytes", "workspaces_bytes", "graph_pool_bytes", "of_graph_pool_reused_bytes"}
    assert {name for name, source in found.sources().items() if source == "measured"} == measured
    unmeasured = planned.with_measured(Footprint(None, 60))
    assert replace(unmeasured, measured=frozenset()) == replace(planned, workspaces=60)
    assert unmeasured.sources()["activations_bytes"] == "estimated"
    assert unmeasured.sources()["workspaces_bytes"] == "measured"


def test_replayed_steps_are_in_the_sum_once() -> None:
    """What the allocator sees at the peak: everything but what captured steps use without owning it."""
    lines = Ledger(1000, 2000, 30, 400).with_measured(Footprint(300, 60, 90, 80)).as_dict()
    device = sum(size for name, size in lines.items() if not name.startswith(("of_", "host_")))
    assert device == 1000 + 2000 + 30 + 300 + 60 + 90
    held_at_the_peak = 1000 + 2000 + 60 + (90 - 80) + 30 + 300
    assert device - lines["of_graph_pool_reused_bytes"] == held_at_the_peak
