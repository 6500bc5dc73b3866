"""Which backend a model runs on, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend
from engine.attention.eager import EagerAttention
from engine.attention.flash import FLASH_PAGE_MULTIPLE, FlashAttention2, why_not_flash
from engine.attention.sdpa import SdpaAttention
from engine.attention.triton_paged import TritonAttention, why_not_triton

_ALL: tuple[type[AttentionBackend], ...] = (EagerAttention, SdpaAttention, FlashAttention2, TritonAttention)
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
        auto_switch_to_flash: switch an eager or sdpa model to flash where it can serve, and to the engine's own kernels
            where only the page size keeps flash from it.

    Raises:
        ValueError: an unknown name, or flash asked for by name where it cannot serve.
    """
    name = (requested or "sdpa").removeprefix("paged|")
    if name not in BACKENDS:
        raise ValueError(
            f"attn_implementation={requested!r} is not supported by the engine; load the model with one of "
            f"{', '.join(BACKENDS)}"
        )
    obstacle = why_not_flash(device, dtype, head_dim, page_size)
    own = why_not_triton(device, dtype, head_dim, page_size)
    only_pages = obstacle is not None and why_not_flash(device, dtype, head_dim, FLASH_PAGE_MULTIPLE) is None
    if name == FlashAttention2.name:
        if obstacle is None:
            return BackendChoice(name, "the model was loaded with it")
        if only_pages:
            chosen = TritonAttention.name if own is None else SdpaAttention.name
            return BackendChoice(chosen, f"flash_attention_2 was asked for, but {obstacle}")
        raise ValueError(f"attn_implementation='flash_attention_2' cannot be used: {obstacle}")
    if auto_switch_to_flash and model_supports_flash and obstacle is None:
        return BackendChoice(FlashAttention2.name, f"switched from {name} (auto_switch_to_flash)")
    if auto_switch_to_flash and model_supports_flash and only_pages and own is None:
        return BackendChoice(TritonAttention.name, f"switched from {name}: flash_attention_2 would do, but {obstacle}")
    return BackendChoice(name, "the model was loaded with it" if requested else "default")
