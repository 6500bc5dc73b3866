"""The step by which activations are measured, on a real runner with the engine's own kernels."""

from __future__ import annotations

from typing import Any

import pytest

from engine import ContinuousBatchingConfig
from engine.bench.oracle import StepwiseEngine
from engine.bench.tiny_models import tiny_model
from engine.runner.footprint import FootprintMeter, measure_activations


class Counted:
    """An allocator that had 100,000 bytes at its peak."""

    def __init__(self) -> None:
        self.resets = 0

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 100_000

    def reset_peak(self) -> None:
        self.resets += 1


@pytest.mark.parametrize(("name", "logprobs"), [("tiny-llama", False), ("tiny-gemma2", True)])
def test_it_runs_on_padding_and_leaves_requests_as_they_are(name: str, logprobs: bool) -> None:
    settings = ContinuousBatchingConfig(
        page_size=16, num_blocks=40, max_batch_tokens=8, max_requests_per_batch=3, attention_backend="triton",
        return_logprobs=logprobs, auto_switch_to_flash=False,
    )  # fmt: skip
    engine = StepwiseEngine(tiny_model(name, head_dim=32), settings)
    runner: Any = engine.core.runner
    try:
        assert engine.core.config.attention_backend == "triton"
        blocks = [store[1:].clone() for store in runner._stores]
        last = runner.last_token.clone()
        allocator = Counted()
        inputs = 100_000 - (measure_activations(runner, FootprintMeter(allocator)) or 0)
        assert inputs % 4 == 0
        assert 0 < inputs < 100_000
        assert allocator.resets == 1
        assert (runner.last_token == last).all()
        for now, before in zip(runner._stores, blocks, strict=True):
            assert (now[1:] == before).all(), "only the trash block is written to"
    finally:
        engine.core.close()
