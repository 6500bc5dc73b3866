"""Any transformers model on the paged cache, through transformers' own AttentionInterface.

For the time of one forward pass the model's attention setting names our function; before and after, the model is
exactly as its owner left it. The setting is swapped under a lock, so that several managers may share a model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.base import AttentionBackend, write_kv
from engine.attention.metadata import AttentionMetadata
from engine.attention.opaque import opaque, padded

ATTENTION_NAME = "cb_paged"
"""Under this name our function is known to transformers. transformers builds no mask for a name it has no mask
function for, which is what we want: the block tables say what is visible."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the attention calls of one forward pass share.

    Attributes:
        backend: attention backend.
        metadata: the step's rows.
        layer_caches: by layer, (group index, keys, values); keys and values are
            [blocks, page_size, kv_heads, head_dim].
    """

    backend: AttentionBackend
    metadata: AttentionMetadata
    layer_caches: tuple[tuple[int, torch.Tensor, torch.Tensor], ...]


_active = threading.local()
_locks: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def _model_lock(model: torch.nn.Module) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


@contextmanager
def left_alone(model: Any) -> Iterator[None]:
    """Inside, the model is as its owner left it: no other thread is in the middle of a forward pass of a manager's."""
    with _model_lock(model):
        yield


def attention_setting(model: Any) -> str | None:
    """The attention implementation that the model's owner has chosen, also while managers run on it."""
    with left_alone(model):
        setting: str | None = model.config._attn_implementation
        return setting


@contextmanager
def attention_named(model: Any, name: str) -> Iterator[None]:
    """Inside, and in no other thread, the model is in eval mode and its attention setting is ``name``."""
    config = model.config
    with _model_lock(model):
        # Setting a config's implementation sets that of the configs inside it, which may have had another.
        originals = [(each, each._attn_implementation) for each in (config, *_inner_configs(config))]
        # A model that is being trained is not to drop out; its owner finds it in training mode again.
        training = [module for module in model.modules() if module.training] if model.training else []
        for module in training:
            module.training = False
        config._attn_implementation = name
        try:
            yield
        finally:
            for each, original in originals:
                each._attn_implementation = original
            for module in training:
                module.training = True


def _inner_configs(config: Any) -> list[Any]:
    inner = [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return [each for each in inner if each is not None]


@contextmanager
def paged_attention(model: Any, context: ForwardContext) -> Iterator[None]:
    """Inside, the model's forward passes in this thread attend over the paged cache."""
    with attention_named(model, ATTENTION_NAME):
        _active.context = context
        try:
            yield
        finally:
            _active.context = None


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function signature: query [1, heads, tokens, head_dim], key and value
    [1, kv_heads, tokens, head_dim]; returns [1, tokens, heads, head_dim]."""
    if kwargs.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        raise ValueError("attention sinks are not supported")
    call = _attend_operator if torch.compiler.is_compiling() else _attend
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return call(query, key, value, int(module.layer_idx), scale, softcap), None  # type: ignore[arg-type]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, softcap: float | None
) -> torch.Tensor:
    """Keys and values into the cache, then attention; shapes as in `paged_attention_forward`."""
    context: ForwardContext | None = getattr(_active, "context", None)
    if context is None:
        raise RuntimeError(
            "the model is being used by a running continuous batching manager; call it from another thread only "
            "after manager.stop()"
        )
    group, key_cache, value_cache = context.layer_caches[layer]
    kv_slots = context.metadata.groups[group].kv_slots
    tokens, count = query.shape[2], kv_slots.shape[0]
    if tokens != count:  # a compiled pass may carry padding behind the step's tokens
        query, key, value = (each[:, :, :count] for each in (query, key, value))
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), key_cache, value_cache, kv_slots)
    output = context.backend.attend(
        query[0].transpose(0, 1).contiguous(),
        key_cache,
        value_cache,
        context.metadata,
        group,
        scale,
        softcap,
    )
    return padded(output, tokens).unsqueeze(0)


def _attended_like(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float, softcap: float | None
) -> torch.Tensor:
    _, heads, tokens, dim = query.shape
    return query.new_empty((1, tokens, heads, dim))


_attend_operator = opaque(
    "paged_attention",
    "(Tensor query, Tensor key, Tensor value, int layer, float scale, float? softcap) -> Tensor",
    _attended_like,
)(_attend)

ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
