"""A stand-in for libcublasLt that computes on the host what the real one would on the device.

It keeps the real one's conventions: columns first, transposition and epilogue from the operation's attributes, sizes
and leading dimensions from the layouts. The binding is thereby tested to the bit that decides which matrix is which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

SUCCESS, NOT_SUPPORTED = 0, 15
TYPES = {2: torch.float16, 14: torch.bfloat16}


def _address(pointer: Any) -> int:
    return pointer if isinstance(pointer, int) else pointer.value


def _matrix(address: int, layout: dict[int, int]) -> torch.Tensor:
    """[rows, columns] view of a matrix that lies columns first."""
    dtype, rows, columns, leading = (layout[name] for name in (0, 2, 3, 4))
    raw = (ctypes.c_char * (leading * columns * 2)).from_address(address)
    return torch.frombuffer(raw, dtype=TYPES[dtype]).view(columns, leading)[:, :rows].T


class HostLt:
    """Functions by name, as `ctypes.CDLL` gives them.

    Args:
        algorithms: the first word of each algorithm that the heuristic returns.
        workspace: bytes each says it needs.
        accepts: which first words `cublasLtMatmulAlgoCheck` takes, by (word, rows of y).
        wrong: first words of algorithms that compute something else.
    """

    def __init__(
        self,
        algorithms: tuple[int, ...] = (1, 2, 3),
        workspace: int = 64,
        accepts: Callable[[int, int], bool] = lambda word, rows: True,
        wrong: tuple[int, ...] = (),
    ) -> None:
        self.objects: dict[int, dict[int, int]] = {}
        self.launched: list[int] = []
        self.preference: dict[int, int] = {}
        self.asked = 0

        def create(**given: int) -> int:
            number = 1 + max(self.objects, default=0)
            self.objects[number] = {int(k[1:]): v for k, v in given.items()}
            return number

        def make(target: Any, **given: int) -> int:
            target._obj.value = create(**given)
            return SUCCESS

        def put(pointer: Any, attribute: int, value: Any, size: int) -> int:
            assert ctypes.sizeof(value._obj) == size
            self.objects[_address(pointer)][attribute] = value._obj.value
            return SUCCESS

        def destroy(pointer: Any) -> int:
            del self.objects[_address(pointer)]
            return SUCCESS

        def heuristic(handle, operation, a, b, c, d, preference, most, results, count) -> int:
            self.asked += 1
            self.preference = dict(self.objects[_address(preference)])
            for result, word in zip(results, algorithms, strict=False):
                result.algorithm.data[0], result.workspace, result.state = word, workspace, SUCCESS
            count._obj.value = min(most, len(algorithms))
            return SUCCESS if algorithms else NOT_SUPPORTED

        def check(handle, operation, a, b, c, d, algorithm, result) -> int:
            if not accepts(algorithm._obj.data[0], self.objects[_address(d)][3]):
                return NOT_SUPPORTED
            result._obj.workspace, result._obj.state = workspace, SUCCESS
            return SUCCESS

        def matmul(handle, operation, one, a, la, b, lb, zero, c, lc, d, ld, algorithm, scratch, size, stream) -> int:
            attributes = self.objects[_address(operation)]
            if size < workspace:
                return 7
            left, right, result = (
                _matrix(address, self.objects[_address(layout)]) for address, layout in ((a, la), (b, lb), (d, ld))
            )
            left = left.T if attributes.get(3) == 1 else left
            product = one._obj.value * (left.float() @ right.float())
            if attributes.get(7) == 4:
                bias = (ctypes.c_char * (2 * left.shape[0])).from_address(attributes[8])
                product += torch.frombuffer(bias, dtype=result.dtype).float()[:, None]
            word = algorithm._obj.data[0]
            result.copy_(product + (100.0 if word in wrong else 0.0))
            self.launched.append(word)
            return SUCCESS

        def config(algorithm, attribute, value, size, written) -> int:
            value._obj.value = 10 * attribute + algorithm._obj.data[0]
            return SUCCESS

        self.cublasLtCreate = lambda handle: make(handle)
        self.cublasLtGetVersion = lambda: 130100
        self.cublasLtGetStatusName = lambda status: b"CUBLAS_STATUS_NOT_SUPPORTED"
        self.cublasLtMatmulDescCreate = lambda target, compute, scale: make(target, _100=compute, _101=scale)
        self.cublasLtMatmulDescSetAttribute = put
        self.cublasLtMatmulDescDestroy = lambda pointer: destroy(pointer)
        self.cublasLtMatrixLayoutCreate = lambda target, kind, rows, columns, leading: make(
            target, _0=kind, _2=rows, _3=columns, _4=leading
        )
        self.cublasLtMatrixLayoutDestroy = lambda pointer: destroy(pointer)
        self.cublasLtMatmulPreferenceCreate = lambda target: make(target)
        self.cublasLtMatmulPreferenceSetAttribute = lambda *arguments: put(*arguments)
        self.cublasLtMatmulPreferenceDestroy = lambda pointer: destroy(pointer)
        self.cublasLtMatmulAlgoGetHeuristic = heuristic
        self.cublasLtMatmulAlgoCheck = check
        self.cublasLtMatmulAlgoConfigGetAttribute = config
        self.cublasLtMatmul = matmul


@pytest.fixture
def host_lt() -> type[HostLt]:
    return HostLt
