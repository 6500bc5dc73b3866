"""Linear layers on a CPU: copies in oneDNN's layout, when they are made, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from engine import ContinuousBatchingConfig, ContinuousBatchingManager
from engine.bench.tiny_models import tiny_model
from engine.config import WorkloadHints
from engine.model_shape import ModelShape
from engine.models.cpu_linear import PackedLinear, onednn_linear_available
from engine.resolution import resolve

pytestmark = pytest.mark.skipif(
    not onednn_linear_available(torch.device("cpu"), torch.float32), reason="torch without oneDNN"
)


@pytest.fixture
def model() -> Any:
    return tiny_model("tiny-llama")


@pytest.mark.parametrize("rows", [1, 3, 24, 600])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator) for size in ((96, 40), (7, 40))]
    packed = PackedLinear(weights)
    inputs = torch.randn(rows, 40, generator=generator)
    for weight in weights:
        offset = torch.randn(weight.shape[0], generator=generator) if bias else None
        torch.testing.assert_close(packed(inputs, weight, offset), linear(inputs, weight, offset))


def test_a_weight_written_in_place_is_read_again_by_refresh() -> None:
    weight, inputs = torch.ones(4, 8), torch.ones(2, 8)
    packed = PackedLinear([weight])
    weight.fill_(2)
    assert packed(inputs, weight).eq(8).all(), "a copy"
    packed.refresh()
    assert packed(inputs, weight).eq(16).all()


def test_the_fused_forward_pass_computes_on_copies_that_the_ledger_names(model: Any) -> None:
    manager = ContinuousBatchingManager(model, None, ContinuousBatchingConfig(num_blocks=8, page_size=16))
    manager.warmup()
    executor = manager._core.runner.executor
    assert isinstance(executor._op.linear, PackedLinear)
    layers = [layer for block in model.model.layers for layer in (block.self_attn, block.mlp)]
    matrices = [p for layer in layers for name, p in layer.named_parameters() if name.endswith("proj.weight")]
    expected = sum(p.nbytes for p in (*matrices, model.lm_head.weight))
    assert manager.ledger()["packed_weights_bytes"] == manager.shape.matrix_bytes == expected
    assert manager.ledger_sources()["packed_weights_bytes"] == "estimated"
    manager.destroy()


def test_copies_are_made_where_they_help_and_fit(model: Any) -> None:
    shape = ModelShape.of(model)

    def packed(free: int, of: ModelShape = shape, **settings: Any) -> tuple[bool, str, int]:
        config = ContinuousBatchingConfig(max_memory_percent=0.5, page_size=16, **settings)
        r = resolve(config, of, WorkloadHints(), "sdpa", memory_probe=lambda _: free)
        copies = r.ledger.as_dict().get("packed_weights_bytes", 0)
        return r.packed_weights, r.source("packed_weights"), copies

    small = {"max_batch_tokens": 16, "max_requests_per_batch": 1}
    just = 8 * shape.matrix_bytes  # half of it is the budget, a fourth of that the copies' share
    assert packed(just, **small)[::2] == (True, shape.matrix_bytes)
    assert packed(just - 2, **small) == (
        False, "derived: copies would take more than a fourth of the memory budget", 0,
    )  # fmt: skip
    assert "fp32 on a CPU" in packed(1 << 34, replace(shape, dtype=torch.bfloat16))[1]
    assert packed(1 << 34, use_fused_forward=False)[::2] == (False, 0)
    assert "Inductor" in packed(1 << 34, default_compile_level=1)[1]


def test_copies_leave_fewer_blocks(model: Any) -> None:
    shape = replace(ModelShape.of(model), max_positions=None)

    def blocks(**settings: Any) -> int:
        config = ContinuousBatchingConfig(
            max_memory_percent=0.5, page_size=16, max_batch_tokens=16, max_requests_per_batch=1, **settings
        )
        return resolve(config, shape, WorkloadHints(), "sdpa", memory_probe=lambda _: 1 << 28).num_blocks

    block = shape.cache_layout(16).block_bytes
    lost = blocks(use_fused_forward=False) - blocks()
    assert abs(lost * block - shape.matrix_bytes) < block
