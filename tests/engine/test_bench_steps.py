"""What the split of a step is made of; the measurement itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from engine.bench.ceilings import Ceilings
from engine.bench.steps import bound_ms, exclusive_times, part_of
from engine.bench.tiny_models import tiny_model
from engine.model_shape import ModelShape


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_decode_kernel", "attention"),
        ("void flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("nvjet_sm90_tst_192x8_64x8_4x1_v_bz_TNT", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
        ("_skinny_kernel", "GEMM"),
        ("_norm_kernel", "norm/rope/act"),
        ("_pick_kernel", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_kernels_are_sorted_by_what_they_do(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_a_kernel_that_waits_for_another_is_counted_from_its_end() -> None:
    spans = [("b", 5.0, 20.0), ("a", 0.0, 10.0), ("c", 12.0, 18.0), ("a", 25.0, 26.0)]
    assert exclusive_times(spans) == {"a": 11.0, "b": 10.0, "c": 0.0}


def test_the_bound_of_a_step() -> None:
    """By hand: weights without the input embedding, which is only looked up in, and a window's keys at most."""
    model = tiny_model("tiny-llama")
    shape = ModelShape.of(model)
    embedding = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    weights = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding)
    keys = 2 * len(shape.windows) * shape.num_kv_heads * shape.head_dim * 4
    bandwidth = 1e9
    expected = (weights * 4 + 3 * 50 * keys) / bandwidth * 1e3
    assert bound_ms(model, shape, 3, 50, Ceilings(bandwidth, 1e18)) == pytest.approx(expected)
    assert bound_ms(model, shape, 3, 50, Ceilings(1e18, 1e9)) == pytest.approx(2 * weights * 3 / 1e9 * 1e3)
    assert shape.dtype == torch.float32


def test_ceilings_bound_work_by_the_slower_of_two() -> None:
    ceilings = Ceilings(2e12, 8e14)
    assert ceilings.floor(4e12, 8e14) == 2.0
    assert ceilings.floor(2e12, 2.4e15) == 3.0
    assert [ceilings.bound_by_arithmetic(2e12, f) for f in (7e14, 9e14)] == [False, True]
    assert str(ceilings) == "copy 2.00 TB/s, bf16 matmul 800 TFLOP/s"
