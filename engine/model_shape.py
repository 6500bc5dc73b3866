"""What the engine must know of a transformers model, and which models it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.cache import CacheLayout
from engine.models.families import why_not_fused


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Attributes:
        windows: by layer, the sliding window in tokens or None for full attention.
        not_fusible: why the fused forward pass cannot run it; None if it can.
        max_positions: longest sequence the model was made for; None if it states none.
    """

    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    supports_flash: bool
    not_fusible: str | None = None

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Read the sizes of ``model``.

        Raises:
            ValueError: the model cannot run on a paged cache; the message says why.
        """
        for attribute in ("config", "device", "dtype"):
            if not hasattr(model, attribute):
                raise ValueError(f"{type(model).__name__} has no .{attribute}; a transformers causal LM is needed")
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder model; only decoder-only models are served")
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        name = type(model).__name__
        if getattr(config, "kv_lora_rank", None):
            raise ValueError(f"{name} uses multi-head latent attention, whose cache the engine does not have")
        if not getattr(model, "_supports_attention_backend", False):
            raise ValueError(f"{name} does not go through transformers' AttentionInterface, so it cannot be served")
        devices = {p.device for p in model.parameters()}
        if len(devices) > 1:
            raise ValueError(
                f"{name} is spread over {', '.join(sorted(map(str, devices)))}; load it on one device "
                "(device_map={'': 0})"
            )
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            windows=_windows(name, config, layers),
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=getattr(config, "max_position_embeddings", None),
            dtype=model.dtype,
            device=torch.device(model.device),
            weight_bytes=sum(p.nbytes for p in model.parameters()),
            supports_flash=bool(
                getattr(model, "_supports_flash_attn", getattr(model, "_supports_flash_attn_2", False))
            ),
            not_fusible=why_not_fused(model),
        )

    def cache_layout(self, page_size: int) -> CacheLayout:
        return CacheLayout.build(self.windows, page_size, self.num_kv_heads, self.head_dim, self.dtype.itemsize)


def _windows(name: str, config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{name} has {kind} layers; only full and sliding-window attention are served")
    if window is None and "sliding_attention" in kinds:
        raise ValueError(f"{name} has sliding_attention layers but config.sliding_window is None")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])
