"""Attention over the paged cache: backends, their selection, and the bridge into transformers models."""

from engine.attention.base import AttentionBackend, write_kv
from engine.attention.bridge import ForwardContext, attention_setting, left_alone, paged_attention
from engine.attention.metadata import AttentionMetadata, GroupTables
from engine.attention.observe import AttentionCall, observe_attention
from engine.attention.selection import BACKENDS, BackendChoice, choose_backend

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionCall",
    "AttentionMetadata",
    "BackendChoice",
    "ForwardContext",
    "GroupTables",
    "attention_setting",
    "choose_backend",
    "left_alone",
    "observe_attention",
    "paged_attention",
    "write_kv",
]
