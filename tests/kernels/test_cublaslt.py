"""The binding of cuBLASLt, against a library of the same conventions on the host."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch

from engine.kernels.cublaslt import (
    WORKSPACE_LIMIT,
    Algorithm,
    CublasError,
    CublasLt,
    LtProduct,
    _Result,
    loaded_library,
)

SCRATCH = torch.empty(1024, dtype=torch.uint8)


def test_result_has_the_layout_of_the_header() -> None:
    """sizeof and offsetof of cublasLtMatmulHeuristicResult_t, as a C compiler gives them for cuBLAS 13.1."""
    assert ctypes.sizeof(_Result) == 96
    assert (_Result.workspace.offset, _Result.state.offset, _Result.waves.offset) == (64, 72, 76)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 8, 16), (3, 24, 8), (17, 16, 40)])
def test_product_is_a_linear_layer(
    rows: int, columns: int, depth: int, biased: bool, dtype: torch.dtype, host_lt: Any
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, depth), (columns, depth), (columns,))
    )
    bias = bias if biased else None
    host = host_lt()
    product = LtProduct(CublasLt(host), rows, columns, depth, dtype, biased)
    algorithms = product.candidates(16, bias)
    assert [int.from_bytes(a.words[:8], "little") for a in algorithms] == [1, 2, 3]
    assert all(a.workspace == 64 and len(a.words) == 64 for a in algorithms)
    out = torch.full((rows, columns), float("nan"), dtype=dtype)
    product.run(product.prepare(algorithms[1]), inputs, weight, bias, out, SCRATCH, 0)
    wanted = inputs.float() @ weight.float().T + (0.0 if bias is None else bias.float())
    torch.testing.assert_close(out, wanted.to(dtype), rtol=1e-2, atol=1e-3)
    assert host.launched == [2]


def test_sums_are_split_in_fp32_only_and_scratch_is_bounded(host_lt: Any) -> None:
    host = host_lt()
    LtProduct(CublasLt(host), 4, 8, 8, torch.bfloat16, False).candidates(8)
    assert host.preference == {1: WORKSPACE_LIMIT, 3: 2, 5: 16, 6: 16, 7: 16, 8: 16}
    greedy = LtProduct(CublasLt(host_lt(workspace=WORKSPACE_LIMIT + 1)), 4, 8, 8, torch.bfloat16, False)
    assert greedy.candidates(8) == []
    assert greedy.adopt(bytes(64)) is None


def test_an_algorithm_is_adopted_by_other_rows_only_if_the_library_agrees(host_lt: Any) -> None:
    library = CublasLt(host_lt(accepts=lambda word, rows: rows >= 8))
    (algorithm, *_) = LtProduct(library, 8, 8, 8, torch.bfloat16, False).candidates(1)
    assert LtProduct(library, 16, 8, 8, torch.bfloat16, False).adopt(algorithm.words) == algorithm
    assert LtProduct(library, 4, 8, 8, torch.bfloat16, False).adopt(algorithm.words) is None
    assert LtProduct(library, 16, 8, 8, torch.bfloat16, False).adopt(b"short") is None


def test_objects_of_the_library_are_destroyed_with_their_owner(host_lt: Any) -> None:
    host = host_lt()
    library = CublasLt(host)
    product = LtProduct(library, 4, 8, 8, torch.bfloat16, False)
    product.candidates(2)
    assert len(host.objects) == 5  # handle, operation, three layouts; the preference is gone
    del product
    gc.collect()
    assert len(host.objects) == 1


def test_what_is_not_supported_is_said(host_lt: Any) -> None:
    library = CublasLt(host_lt(algorithms=()))
    with pytest.raises(ValueError, match="bf16 or fp16"):
        LtProduct(library, 4, 8, 8, torch.float32, False)
    with pytest.raises(ValueError, match="multiples of 8"):
        LtProduct(library, 4, 8, 12, torch.bfloat16, False)
    product = LtProduct(library, 4, 8, 8, torch.bfloat16, False)
    with pytest.raises(CublasError, match="cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED"):
        product.candidates(4)
    with pytest.raises(ValueError, match="without a bias"):
        product.candidates(4, torch.zeros(8, dtype=torch.bfloat16))
    operands = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((4, 8), (8, 8))]
    with pytest.raises(CublasError, match=r"status 7 for \(4, 8\) x \(8, 8\)"):
        product.run(product.prepare(Algorithm(bytes(64), 0)), *operands, None, operands[0], SCRATCH[:8], 0)


def test_an_algorithm_describes_itself(host_lt: Any) -> None:
    described = CublasLt(host_lt()).describe(Algorithm(bytes([3, *[0] * 63]), 0))
    assert described == {"id": 3, "tile": 13, "split_k": 23, "reduction": 33, "stages": 63}


def test_the_library_is_the_one_that_is_loaded() -> None:
    maps = "7f1 r-xp 00 08:01 1  /opt/a/libcublas.so.13\n7f2 r-xp 00 08:01 2  /opt/my env/libcublasLt.so.13\n"
    assert loaded_library(maps) == "/opt/my env/libcublasLt.so.13"
    with pytest.raises(OSError, match="no libcublasLt is loaded"):
        loaded_library("7f1 r-xp 00 08:01 1 /opt/a/libcublas.so.13\n7f2 rw-p 00 00:00 0\n")
