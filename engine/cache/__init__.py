"""The paged KV cache as book-keeping: layout, block pool with prefix index, block tables of requests."""

from engine.cache.block_pool import TRASH_BLOCK, BlockPool
from engine.cache.layout import CacheLayout, LayerGroup
from engine.cache.offload import BlockPairs, HostBlocks
from engine.cache.paged_cache import PagedCache

__all__ = ["TRASH_BLOCK", "BlockPairs", "BlockPool", "CacheLayout", "HostBlocks", "LayerGroup", "PagedCache"]
