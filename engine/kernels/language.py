"""Triton where it is installed, a stand-in that lets the modules be imported where it is not, and why it cannot run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

MINIMUM_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability the kernels are written for (Ampere: bfloat16 and asynchronous copies)."""


class _NotInstalled:
    """Takes the place of `triton`; a kernel decorated with it says what is missing when it is launched."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def jit(self, function: Any = None, **options: Any) -> Any:
        return self if callable(function) else self.jit

    def cdiv(self, numerator: int, denominator: int) -> int:
        return cdiv(numerator, denominator)

    def next_power_of_2(self, number: int) -> int:
        return next_power_of_2(number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"this kernel needs triton: {self._reason}; install triton or use the torch twin")

    def __getitem__(self, grid: Any) -> Any:
        return self


triton: Any
tl: Any
TritonError: type[Exception]
_missing: str | None
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
    from triton.errors import TritonError  # type: ignore[no-redef]
    from triton.tools.tensor_descriptor import TensorDescriptor

    _missing = None
except ImportError as error:
    _missing = f"triton cannot be imported ({error})"
    triton, tl, TritonError = _NotInstalled(_missing), None, RuntimeError

INTERPRETED = _missing is None and bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter on the host (TRITON_INTERPRET=1 when this module was imported)."""


def _let_interpreter_count() -> None:
    """Triton 3.6's interpreter turns loop bounds, arrays of one element, into integers by ``int()``, which numpy 2.4 no
    longer does; take the element instead."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    _let_interpreter_count()


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up. Triton's own, which kernels may call too, takes the host 4 us, as does its
    ``next_power_of_2``: more than all else that a launch has to work out."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def why_no_triton(device: torch.device) -> str | None:
    """The reason why the kernels cannot run on a device, or None if they can."""
    if _missing is not None:
        return _missing
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, the tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, MINIMUM_CAPABILITY))
        return f"Triton kernels need compute capability {need}, {torch.cuda.get_device_name(device)} has {have}"
    return None


def dot_operand(dtype: torch.dtype) -> Any:
    """Type of a dot's operands: the tensors' own, but fp32 for bf16 in the interpreter, whose numpy knows no bf16."""
    if INTERPRETED and dtype == torch.bfloat16:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    """A matrix as the tensor memory accelerator takes it: a kernel reads blocks of it, zeros where it has ended.

    Args:
        tensor: two-dimensional, the last dimension contiguous, its address and rows multiples of 16 bytes.
        block: sizes of a block, powers of two.
    """
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@functools.cache
def after_predecessor(device: torch.device) -> Mapping[str, bool]:
    """Launch options of a kernel that calls `wait_for_predecessor`. Where the device can (compute capability 9) it is
    a programmatic dependent launch, also inside a CUDA graph: its programs are set up while the kernel before it runs.
    """
    dependent = device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)
    return MappingProxyType({"PDL": True, "launch_pdl": True} if dependent else {"PDL": False})


@triton.jit
def release_successor(PDL: tl.constexpr):
    """Let the kernel behind this one be set up as soon as every program of this one has come here or returned."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr, RELEASE: tl.constexpr = True):
    """Let the kernel behind this one be set up, unless ``RELEASE`` is False because `release_successor` comes later,
    and wait until those before it are done and their writes visible.

    Every program of a kernel launched with `after_predecessor` must come through here before it reads, writes or
    returns: its predecessor may have written any of its inputs, and a later kernel takes this one's end for the end of
    all before it.
    """
    if RELEASE:
        release_successor(PDL)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the cache lines of ``pointers`` into the L2 cache. Not a read: it may come before `wait_for_predecessor`,
    whoever writes there. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_rows(pointers, elements):
    """`prefetch` for as many ``elements`` of two bytes behind each pointer; a multiple of 16 bytes, as its address."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers, elements * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
