"""cuBLASLt by its C interface: several algorithms for one matrix product, where torch takes the first.

torch asks ``cublasLtMatmulAlgoGetHeuristic`` for one candidate; which of the first dozen is fastest is a matter of
measurement (`engine.kernels.autotune`). Bound by ctypes to the library that torch has loaded, so nothing is compiled
and one version is in the process. Source of every number: cublasLt.h of cuBLAS 13.1 (the same since 11.4).

Numerics: inputs bf16 or fp16, products and sums in fp32, one rounding at the end. Algorithms that split the sum over K
are allowed only if they add the parts in fp32 (``CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORKSPACE_LIMIT = 32 << 20
"""Most bytes of scratch an algorithm may ask for; torch's own limit on Hopper."""
ALIGNMENT = 16
"""Bytes that every operand is aligned to."""

_SUCCESS = 0
_COMPUTE_32F, _REAL_32F = 68, 0  # cublasComputeType_t, cudaDataType_t
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
_OP_T, _EPILOGUE_BIAS = 1, 4
_PREF_WORKSPACE, _PREF_REDUCTION, _PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
_REDUCTION_COMPUTE_TYPE = 2
_CONFIG = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "stages": 6}  # cublasLtMatmulAlgoConfigAttributes_t


class _Words(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Words),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class CublasError(RuntimeError):
    """A call of cuBLASLt that did not succeed."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A configured algorithm of one version of the library.

    Attributes:
        words: cublasLtMatmulAlgo_t, 64 bytes; may be stored and used again with the same library.
        workspace: bytes of scratch it needs for the product that it was asked for.
    """

    words: bytes
    workspace: int


def loaded_library(maps: str | None = None) -> str:
    """Path of the cuBLASLt that this process has loaded.

    Args:
        maps: text of /proc/self/maps; None = read it.

    Raises:
        OSError: there is none.
    """
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    for line in text.splitlines():
        path = line.partition("/")[2]
        if "/libcublasLt.so" in f"/{path}":
            return f"/{path}"
    raise OSError("no libcublasLt is loaded: this torch does not use cuBLASLt")


class CublasLt:
    """A handle of the library on the current device.

    Args:
        library: the loaded library, as ctypes gives it; None = the one torch uses.

    Raises:
        OSError: there is no such library. CublasError: it refuses to start.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL(loaded_library()) if library is None else library
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self._library.cublasLtGetStatusName.restype = ctypes.c_char_p
        self._library.cublasLtGetStatusName.argtypes = [ctypes.c_int]
        handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(handle))
        self.handle = handle

    @property
    def version(self) -> int:
        """Of the library, such as 130100."""
        return int(self._library.cublasLtGetVersion())

    def function(self, name: str) -> Any:
        return getattr(self._library, name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Raises:
            CublasError: the status is not success.
        """
        status = self.function(name)(*arguments)
        if status != _SUCCESS:
            text = self._library.cublasLtGetStatusName(status)
            raise CublasError(f"{name}: {text.decode() if text else status}")

    def describe(self, algorithm: Algorithm) -> dict[str, int]:
        """What an algorithm's configuration says of itself: id, tile, split_k, reduction, stages."""
        words = _words(algorithm)
        found = {}
        for name, attribute in _CONFIG.items():
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            self.call(
                "cublasLtMatmulAlgoConfigGetAttribute",
                ctypes.byref(words),
                attribute,
                ctypes.byref(value),
                4,
                ctypes.byref(written),
            )
            found[name] = value.value
        return found


class LtProduct:
    """``y = x Wᵀ (+ b)`` with x [rows, depth], W [columns, depth], y [rows, columns], all contiguous.

    cuBLAS sees columns first: yᵀ = Wᵀᵀ xᵀ, that is A = W transposed, B = x, D = y, each with its own row as a column.

    Args:
        library: handle on the tensors' device.
        rows, columns, depth: sizes; depth and columns multiples of 8, so that every row is aligned.
        dtype: bf16 or fp16.
        biased: whether a bias [columns] of the same dtype is added, before rounding.

    Raises:
        ValueError: another dtype or unaligned sizes.
    """

    def __init__(
        self, library: CublasLt, rows: int, columns: int, depth: int, dtype: torch.dtype, biased: bool
    ) -> None:
        if dtype not in _DATA_TYPES or columns % 8 or depth % 8:
            raise ValueError(
                f"a cuBLASLt product has {dtype} and {columns} x {depth} weights; it takes bf16 or fp16 and multiples "
                "of 8: leave this one to torch"
            )
        self._library, self._biased = library, biased
        self._operation = self._create("cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", _COMPUTE_32F, _REAL_32F)
        self._set("cublasLtMatmulDescSetAttribute", self._operation, _DESC_TRANSA, ctypes.c_int32(_OP_T))
        if biased:
            self._set(
                "cublasLtMatmulDescSetAttribute", self._operation, _DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS)
            )
        kind = _DATA_TYPES[dtype]

        def layout(height: int, width: int) -> ctypes.c_void_p:
            return self._create(
                "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", kind, height, width, height
            )

        self._weight, self._input, self._output = layout(depth, columns), layout(depth, rows), layout(columns, rows)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._matmul = library.function("cublasLtMatmul")

    def candidates(self, most: int, bias: torch.Tensor | None = None) -> list[Algorithm]:
        """Up to ``most`` algorithms, what the library thinks fastest first.

        Args:
            most: how many to ask for.
            bias: a bias as it will be given, if there is one.
        """
        self._point_to(bias)
        preference = self._create("cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
        setter = "cublasLtMatmulPreferenceSetAttribute"
        self._set(setter, preference, _PREF_WORKSPACE, ctypes.c_uint64(WORKSPACE_LIMIT))
        self._set(setter, preference, _PREF_REDUCTION, ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE))
        for attribute in _PREF_ALIGNMENTS:
            self._set(setter, preference, attribute, ctypes.c_uint32(ALIGNMENT))
        results, count = (_Result * most)(), ctypes.c_int()
        self._library.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._library.handle,
            self._operation,
            *self._layouts(),
            preference,
            most,
            results,
            ctypes.byref(count),
        )
        found = [r for r in results[: count.value] if r.state == _SUCCESS and r.workspace <= WORKSPACE_LIMIT]
        return list(dict.fromkeys(Algorithm(bytes(r.algorithm), r.workspace) for r in found))

    def adopt(self, words: bytes) -> Algorithm | None:
        """An algorithm found for another number of rows, or stored by an earlier process, for this product; None if it
        does not suit."""
        if len(words) != ctypes.sizeof(_Words):
            return None
        algorithm, result = _Words.from_buffer_copy(words), _Result()
        status = self._library.function("cublasLtMatmulAlgoCheck")(
            self._library.handle, self._operation, *self._layouts(), ctypes.byref(algorithm), ctypes.byref(result)
        )
        if status != _SUCCESS or result.state != _SUCCESS or result.workspace > WORKSPACE_LIMIT:
            return None
        return Algorithm(words, result.workspace)

    def prepare(self, algorithm: Algorithm) -> Any:
        """The form of an algorithm that `run` takes."""
        return _words(algorithm)

    def run(
        self,
        algorithm: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        workspace: torch.Tensor,
        stream: int,
    ) -> None:
        """Launch the product; may be captured in a CUDA graph.

        Args:
            algorithm: from `prepare`.
            inputs, weight, bias, out: as the class says, aligned to `ALIGNMENT` bytes.
            workspace: uint8 scratch of at least the algorithm's bytes, which nothing else may use until this is over.
            stream: CUDA stream handle.

        Raises:
            CublasError: the library refuses.
        """
        self._point_to(bias)
        status = self._matmul(
            self._library.handle,
            self._operation,
            ctypes.byref(self._one),
            weight.data_ptr(),
            self._weight,
            inputs.data_ptr(),
            self._input,
            ctypes.byref(self._zero),
            out.data_ptr(),
            self._output,
            out.data_ptr(),
            self._output,
            ctypes.byref(algorithm),
            workspace.data_ptr(),
            workspace.numel(),
            stream,
        )
        if status != _SUCCESS:
            raise CublasError(f"cublasLtMatmul: status {status} for {tuple(inputs.shape)} x {tuple(weight.shape)}")

    def _layouts(self) -> Sequence[ctypes.c_void_p]:
        return self._weight, self._input, self._output, self._output

    def _point_to(self, bias: torch.Tensor | None) -> None:
        if (bias is not None) != self._biased:
            raise ValueError(f"this product was made {'with' if self._biased else 'without'} a bias")
        if bias is not None:
            pointer = ctypes.c_void_p(bias.data_ptr())
            self._set("cublasLtMatmulDescSetAttribute", self._operation, _DESC_BIAS_POINTER, pointer)

    def _create(self, create: str, destroy: str, *arguments: Any) -> _Owned:
        made = _Owned()
        self._library.call(create, ctypes.byref(made), *arguments)
        made.release = self._library.function(destroy)
        return made

    def _set(self, setter: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._library.call(setter, target, attribute, ctypes.byref(value), ctypes.sizeof(value))


class _Owned(ctypes.c_void_p):
    """A pointer to an object of the library, destroyed with it."""

    release: Any = None

    def __del__(self) -> None:
        if self.release is not None and self.value:
            self.release(self)


def _words(algorithm: Algorithm) -> _Words:
    return _Words.from_buffer_copy(algorithm.words)


_P, _I, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [_P],
    "cublasLtMatmulDescCreate": [_P, _I, _I],
    "cublasLtMatmulDescDestroy": [_P],
    "cublasLtMatmulDescSetAttribute": [_P, _I, _P, _SIZE],
    "cublasLtMatrixLayoutCreate": [_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutDestroy": [_P],
    "cublasLtMatmulPreferenceCreate": [_P],
    "cublasLtMatmulPreferenceDestroy": [_P],
    "cublasLtMatmulPreferenceSetAttribute": [_P, _I, _P, _SIZE],
    "cublasLtMatmulAlgoGetHeuristic": [_P, _P, _P, _P, _P, _P, _P, _I, _P, _P],
    "cublasLtMatmulAlgoCheck": [_P, _P, _P, _P, _P, _P, _P, _P],
    "cublasLtMatmulAlgoConfigGetAttribute": [_P, _I, _P, _SIZE, _P],
    "cublasLtMatmul": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _SIZE, _P],
}
