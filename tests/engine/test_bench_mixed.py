"""What `engine.bench.mixed` measures, on a CPU, where every step is launched."""

from __future__ import annotations

import pytest

from engine import ContinuousBatchingConfig
from engine.bench.mixed import MixedBench, split
from engine.bench.tiny_models import tiny_model


def test_steps_of_the_size_asked_for_beside_rows_that_decode() -> None:
    config = ContinuousBatchingConfig(
        page_size=16, num_blocks=100, max_batch_tokens=64, max_requests_per_batch=16, safety_margin=0.0,
        allow_block_sharing=False,
    )  # fmt: skip
    bench = MixedBench(tiny_model("tiny-llama"), config, decodes=3, room=60)
    measured = bench.measure([20, 10], 4, replayed=False)
    assert (measured.tokens, measured.padding, measured.gpu) == (33, 0, None)
    assert 0 < measured.host <= measured.wall
    with pytest.raises(RuntimeError, match="launched"):
        bench.measure([20, 10], 4, replayed=True)
    with pytest.raises(RuntimeError, match="max_batch_tokens"):
        bench.measure([90], 4, replayed=False)
    bench.core.close()


def test_prompts_of_a_step() -> None:
    assert split(1024, 512) == [512, 512]
    assert split(1025, 512) == [342, 342, 341]
    assert split(5, 512) == [5]
