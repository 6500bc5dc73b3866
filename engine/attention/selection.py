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


def why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str | None:
    """The reason why a backend cannot serve, or None if it can.

    Raises:
        ValueError: an unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; the engine has {', '.join(BACKENDS)}")
    if name == FlashAttention2.name:
        return why_not_flash(device, dtype, head_dim, page_size)
    if name == FlashAttention3.name:
        return why_not_flash3(device, dtype, head_dim)
    if name == TritonAttention.name:
        return why_not_triton(device, dtype, head_dim, page_size)
    return None


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
        auto_switch_to_flash: switch an eager or sdpa model that flash attention could serve (on other pages at least)
            to the fastest there is: flash 3, else the engine's own kernels, else flash 2.

    Raises:
        ValueError: an unknown name, or a backend asked for by name where it cannot serve.
    """
    name = (requested or SdpaAttention.name).removeprefix("paged|")
    if name not in BACKENDS:
        raise ValueError(
            f"attn_implementation={requested!r} is not supported by the engine; load the model with one of "
            f"{', '.join(BACKENDS)}"
        )
    obstacles = {backend: why_not(backend, device, dtype, head_dim, page_size) for backend in BACKENDS}
    obstacle = obstacles[name]
    half = dtype in (torch.bfloat16, torch.float16)
    only_pages = obstacle is not None and why_not(name, device, dtype, head_dim, FLASH_PAGE_MULTIPLE) is None
    if name == FlashAttention2.name and only_pages:
        instead = TritonAttention.name if obstacles[TritonAttention.name] is None else SdpaAttention.name
        return BackendChoice(instead, f"flash_attention_2 was asked for, but {obstacle}")
    if obstacle is not None:
        raise ValueError(f"attn_implementation={name!r} cannot be used: {obstacle}")
    if name in (EagerAttention.name, SdpaAttention.name) and auto_switch_to_flash and model_supports_flash and half:
        for faster in (FlashAttention3.name, TritonAttention.name, FlashAttention2.name):
            if device.type == "cuda" and obstacles[faster] is None:
                return BackendChoice(faster, f"switched from {name} (auto_switch_to_flash)")
    return BackendChoice(name, "the model was loaded with it" if requested else "default")
