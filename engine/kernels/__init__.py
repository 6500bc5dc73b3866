"""Triton kernels, each in a module of its own with its torch twin beside it (``X`` and ``X_torch``).

Nothing here needs triton to be imported: the twins run anywhere, and `why_no_triton` says whether the kernels do.
Kernels launch on the current device and stream, allocate with ``torch.empty`` only and never read a device value on
the host, so that each may be captured in a CUDA graph. Where an operation has a counterpart in transformers, it rounds
where transformers rounds, and its module says where that is.
"""

from engine.kernels.activation import gelu_tanh_mul, gelu_tanh_mul_torch, silu_mul, silu_mul_torch
from engine.kernels.argmax import greedy_argmax, greedy_argmax_torch
from engine.kernels.filters import Cuts, filter_cuts, filter_cuts_torch, kept_torch
from engine.kernels.gumbel import gumbel_argmax, gumbel_argmax_torch, gumbel_noise
from engine.kernels.language import why_no_triton
from engine.kernels.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from engine.kernels.paged_decode import paged_decode, paged_decode_torch
from engine.kernels.paged_prefill import paged_prefill, paged_prefill_torch
from engine.kernels.rope import rope_and_write, rope_and_write_torch
from engine.kernels.write_kv import write_kv, write_kv_torch

__all__ = [
    "Cuts",
    "add_rms_norm",
    "add_rms_norm_torch",
    "filter_cuts",
    "filter_cuts_torch",
    "gelu_tanh_mul",
    "gelu_tanh_mul_torch",
    "greedy_argmax",
    "greedy_argmax_torch",
    "gumbel_argmax",
    "gumbel_argmax_torch",
    "gumbel_noise",
    "kept_torch",
    "paged_decode",
    "paged_decode_torch",
    "paged_prefill",
    "paged_prefill_torch",
    "rms_norm",
    "rms_norm_torch",
    "rope_and_write",
    "rope_and_write_torch",
    "silu_mul",
    "silu_mul_torch",
    "why_no_triton",
    "write_kv",
    "write_kv_torch",
]
