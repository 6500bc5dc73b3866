"""What the engine must know of a transformers model, and which models it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import AttentionCall, observe_attention
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

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the linear layers of a model that the fused forward pass can run, lm_head included."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # queries and output, keys and values
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return (len(self.windows) * layer + self.vocab_size * self.hidden_size) * self.dtype.itemsize

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Read the sizes of ``model``.

        Raises:
            ValueError: the model cannot run on a paged cache; the message says why.
        """
        for attribute in ("config", "device", "dtype"):
            if not hasattr(model, attribute):
                raise ValueError(f"{type(model).__name__} has no .{attribute}; a transformers causal LM is needed")
        name = type(model).__name__
        _refuse_by_kind(name, model)
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = _same_in_all_layers(name, config, "num_key_value_heads") or heads
        head_dim = _same_in_all_layers(name, config, "head_dim") or config.hidden_size // heads
        windows = _windows(name, config, config.num_hidden_layers)
        not_fusible = why_not_fused(model)
        if not_fusible is not None:
            call = _observed(name, model, windows)
            heads, kv_heads, head_dim = call.num_heads, call.num_kv_heads, call.head_dim
        return cls(
            windows=windows,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=_max_positions(config),
            dtype=model.dtype,
            device=torch.device(model.device),
            weight_bytes=sum(p.nbytes for p in model.parameters()),
            supports_flash=bool(
                getattr(model, "_supports_flash_attn", getattr(model, "_supports_flash_attn_2", False))
            ),
            not_fusible=not_fusible,
        )

    def cache_layout(self, page_size: int) -> CacheLayout:
        return CacheLayout.build(self.windows, page_size, self.num_kv_heads, self.head_dim, self.dtype.itemsize)


def _refuse_by_kind(name: str, model: Any) -> None:
    """What a model's class and config tell: no paged cache of keys and values could serve it."""
    config = model.config.get_text_config()
    if not getattr(model, "can_generate", lambda: True)():
        raise ValueError(f"{name} has no language-model head to generate with; load an AutoModelForCausalLM")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; only decoder-only models are served")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} carries a recurrent state (linear attention or state-space layers); only full and sliding-window "
            "attention are served"
        )
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name} uses multi-head latent attention, whose cache the engine does not have")
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"{name} has layers that read the keys and values of others, which the cache does not offer")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not go through transformers' AttentionInterface, so it cannot be served")
    _refuse_several_devices(name, model)


def _refuse_several_devices(name: str, model: Any) -> None:
    shards = getattr(model, "_tp_size", None) or 1
    if shards > 1:
        raise ValueError(
            f"{name} is sharded over {shards} processes (tensor parallel), which is not available; load it whole"
        )
    # Of a DTensor, whose module takes seconds to import.
    sharded = next((n for n, p in model.named_parameters() if hasattr(p, "placements")), None)
    if sharded is not None:
        raise ValueError(
            f"{name} has sharded parameters ({sharded} is a DTensor), which are not available; load it whole"
        )
    # Where accelerate moves weights between devices as they are needed, they are not all where the map says.
    mapped = {_device(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(p.device) for p in model.parameters()} | (mapped if len(mapped) > 1 else set())
    if devices == {"meta"}:
        raise ValueError(f"{name} has no weights, it is on the meta device; load them first")
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over {', '.join(sorted(devices))}; load it on one device (device_map={{'': 0}})"
        )


def _device(of_map: Any) -> str:
    """Device of an entry of a device map: an accelerator's index, or a name ("cpu", "disk", "cuda:1")."""
    return f"cuda:{of_map}" if isinstance(of_map, int) else str(of_map)


def _same_in_all_layers(name: str, config: Any, field: str) -> int | None:
    """A field of the config, None if it has none; transformers' config raises if layers differ in it."""
    try:
        return getattr(config, field, None)
    except Exception as error:
        raise ValueError(f"{name} has layers of different {field}; the cache's blocks have one shape") from error


def _observed(name: str, model: Any, windows: tuple[int | None, ...]) -> AttentionCall:
    """How every layer calls its attention, or ValueError if that is nothing the cache can answer."""
    try:
        calls = observe_attention(model)
    except Exception as error:
        raise ValueError(f"{name} cannot be run over packed sequences: {type(error).__name__}: {error}") from error
    if [call.layer for call in calls] != list(range(len(windows))):
        raise ValueError(
            f"{name} does not call transformers' AttentionInterface once in each of its {len(windows)} layers "
            f"(it called it {len(calls)} times), so it cannot be served"
        )
    for call in calls:
        layer = f"layer {call.layer} of {name}"
        if call.sinks:
            raise ValueError(f"{layer} has attention sinks, which the attention backends do not have")
        if not call.causal:
            raise ValueError(f"{layer} attends in both directions; only causal attention is served")
        if call.bias:
            raise ValueError(f"{layer} adds a mask or bias of its own to the attention scores; none can be given")
        if call.value_dim != call.head_dim:
            raise ValueError(
                f"{layer} has keys of {call.head_dim} and values of {call.value_dim} elements; the cache "
                "needs them alike"
            )
        if call.says_window and call.window != windows[call.layer or 0]:
            raise ValueError(
                f"{layer} attends with sliding_window={call.window}, its config says {windows[call.layer or 0]}"
            )
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        raise ValueError(f"{name} has layers of different heads {sorted(shapes)}; the cache's blocks have one shape")
    return calls[0]


def _max_positions(config: Any) -> int | None:
    """Longest sequence. LongRoPE changes the rotation of all tokens once one sequence of the batch is longer than the
    model was first trained for, so sequences up to there are served: what is beside a request must not change it."""
    longest = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return longest
    first = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return longest if first is None else min(first, longest or first)


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
