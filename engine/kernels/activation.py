"""Gated activations of a fused gate_up projection: ``act(gate) * up``.

Source: GLU variants (Shazeer 2020, arXiv 2002.05202). The activation is computed in fp32 and rounded to the tensors'
dtype before the product, as transformers' unfused MLP does.

Bytes: ``3 * tokens * intermediate * itemsize`` (two read, one written).
"""

from __future__ import annotations

import torch

from engine.kernels.language import after_predecessor, cdiv, tl, triton, wait_for_predecessor

BLOCK = 1024


@triton.jit
def _gated_kernel(
    gate_up,
    output,
    gate_up_stride,
    output_stride,
    INTERMEDIATE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < INTERMEDIATE
    dtype: tl.constexpr = output.dtype.element_ty
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + INTERMEDIATE + column, mask=live, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), which does not cancel in the left tail.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        activated = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    tl.store(output + row * output_stride + column, activated.to(dtype).to(tl.float32) * up, mask=live)


def _launch(gate_up: torch.Tensor, gelu: bool, out: torch.Tensor | None) -> torch.Tensor:
    tokens, width = gate_up.shape
    if width % 2 or gate_up.stride(-1) != 1:
        raise ValueError(
            f"gate_up has width {width} and stride {gate_up.stride(-1)}; it must be gate and up side by side"
        )
    out = gate_up.new_empty((tokens, width // 2)) if out is None else out
    if tokens:
        _gated_kernel[(tokens, cdiv(width // 2, BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            INTERMEDIATE=width // 2,
            GELU=gelu,
            BLOCK=BLOCK,
            num_warps=4,
            **after_predecessor(gate_up.device),
        )
    return out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: [tokens, 2 * intermediate], last dimension contiguous.
        out: [tokens, intermediate] to write to.

    Raises:
        ValueError: odd width, or a strided last dimension.
    """
    return _launch(gate_up, False, out)


def gelu_tanh_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation (Gemma); arguments as `silu_mul`."""
    return _launch(gate_up, True, out)


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Twin of `silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Twin of `gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
