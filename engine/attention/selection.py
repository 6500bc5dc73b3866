"""Which backend a model runs on, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend
from engine.attention.eager import EagerAttention
from engine.attention.flash import FLASH_PAGE_MULTIPLE, FlashAttention2, why_not_flash
from engine.attention.flash3 import FlashAttention3, why_not_flash3
from engine.attention.sdpa import SdpaAttention
from engine.attention.triton_paged import TritonAttention, why_not_triton

_ALL: tuple[type[AttentionBackend], ...] = (
    EagerAttention,
    SdpaAttention,
    FlashAttention2,
    FlashAttention3,
    TritonAttention,
)
BACKENDS = {backend.name: backend for backend in _ALL}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend by name and the reason for it, in words for the log and the run record."""

    name: str
    reason: str


def choose_backend(
    requested: str | None,
    auto_switch_to_flash: bool,
    model_supports_flash: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
) -> BackendChoice:
    """Resolve a model's ``attn_implementation``.

    Args:
        requested: what the model was loaded with; "paged|" prefixes mean the same backend.
        auto_switch_to_flash: switch an eager or sdpa model to flash 3, else flash 2, where they can serve, and to the
            engine's own kernels where only the page size keeps flash 2 from it.

    Raises:
        ValueError: an unknown name, or a backend asked for by name where it cannot serve.
    """
    name = (requested or "sdpa").removeprefix("paged|")
    if name not in BACKENDS:
        raise ValueError(
            f"attn_implementation={requested!r} is not supported by the engine; load the model with one of "
            f"{', '.join(BACKENDS)}"
        )
    obstacle = why_not_flash(device, dtype, head_dim, page_size)
    obstacle3 = why_not_flash3(device, dtype, head_dim)
    own = why_not_triton(device, dtype, head_dim, page_size)
    only_pages = obstacle is not None and why_not_flash(device, dtype, head_dim, FLASH_PAGE_MULTIPLE) is None
    if name == TritonAttention.name and own is not None:
        raise ValueError(f"attn_implementation='triton' cannot be used: {own}")
    if name == FlashAttention3.name and obstacle3 is not None:
        raise ValueError(f"attn_implementation='flash_attention_3' cannot be used: {obstacle3}")
    if name == FlashAttention2.name and obstacle is not None:
        if not only_pages:
            raise ValueError(f"attn_implementation='flash_attention_2' cannot be used: {obstacle}")
        chosen = TritonAttention.name if own is None else SdpaAttention.name
        return BackendChoice(chosen, f"flash_attention_2 was asked for, but {obstacle}")
    if name in (EagerAttention.name, SdpaAttention.name) and auto_switch_to_flash and model_supports_flash:
        if obstacle3 is None:
            return BackendChoice(FlashAttention3.name, f"switched from {name} (auto_switch_to_flash)")
        if obstacle is None:
            return BackendChoice(FlashAttention2.name, f"switched from {name} (auto_switch_to_flash)")
        if only_pages and own is None:
            reason = f"switched from {name}: flash_attention_2 would do, but {obstacle}"
            return BackendChoice(TritonAttention.name, reason)
    return BackendChoice(name, "the model was loaded with it" if requested else "default")
