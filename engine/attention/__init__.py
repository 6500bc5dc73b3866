"""Attention over the paged cache: backends, their selection, and the bridge into transformers models."""

from engine.attention.base import AttentionBackend, write_kv
from engine.attention.bridge import ForwardContext, paged_attention
from engine.attention.metadata import AttentionMetadata, GroupTables
from engine.attention.selection import BACKENDS, BackendChoice, choose_backend

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionMetadata",
    "BackendChoice",
    "ForwardContext",
    "GroupTables",
    "choose_backend",
    "paged_attention",
    "write_kv",
]
