"""RMSNorm, alone or with the residual sum before it.

Source: Zhang and Sennrich 2019 (arXiv 1910.07467). Rounding is transformers': the residual sum is rounded to the
tensors' dtype and normalised from there in fp32; Llama's form rounds the normalised value before it is multiplied by
the weight, Gemma's form multiplies by ``1 + weight`` in fp32 and rounds once.

Bytes with a residual: ``4 * tokens * hidden * itemsize`` (two read, two written), half that without one.
"""

from __future__ import annotations

import torch

from engine.kernels.language import after_predecessor, next_power_of_2, tl, triton, wait_for_predecessor


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    output,
    x_stride,
    residual_stride,
    output_stride,
    eps,
    HIDDEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < HIDDEN
    dtype: tl.constexpr = output.dtype.element_ty
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    hidden = tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    if RESIDUAL:
        place = residual + row * residual_stride + column
        summed = (hidden + tl.load(place, mask=live, other=0.0).to(tl.float32)).to(dtype)
        tl.store(place, summed, mask=live)
        hidden = summed.to(tl.float32)
    hidden = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / HIDDEN + eps)
    if UNIT_OFFSET:
        hidden = hidden * (1.0 + w)
    else:
        hidden = hidden.to(dtype).to(tl.float32) * w
    tl.store(output + row * output_stride + column, hidden.to(dtype), mask=live)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        if tensor is not None and (tensor.shape != x.shape or tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; all must be [tokens, hidden] "
                f"= {tuple(x.shape)} with a contiguous last dimension"
            )
    if tokens == 0:
        return out
    block = next_power_of_2(hidden)
    _norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        HIDDEN=hidden,
        RESIDUAL=residual is not None,
        UNIT_OFFSET=unit_offset,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **after_predecessor(x.device),
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """``x / rms(x) * weight``.

    Args:
        x: [tokens, hidden].
        weight: [hidden].
        eps: added to the mean square.
        unit_offset: multiply by ``1 + weight`` (Gemma).

    Raises:
        ValueError: shapes differ or a last dimension is not contiguous.
    """
    return _launch(x, None, weight, eps, unit_offset, None)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place and return the normalised sum.

    Args:
        x, residual: [tokens, hidden] of one dtype.
        weight, eps, unit_offset: as in `rms_norm`.
        out: [tokens, hidden] to write to; may be ``x``.
    """
    return _launch(x, residual, weight, eps, unit_offset, out)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Twin of `rms_norm`."""
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (hidden * (1.0 + weight.float())).to(x.dtype)
    return hidden.to(x.dtype) * weight


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Twin of `add_rms_norm`."""
    residual += x
    return rms_norm_torch(residual, weight, eps, unit_offset)
