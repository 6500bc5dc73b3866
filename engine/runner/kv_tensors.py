"""The memory behind the blocks."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.cache import CacheLayout


def allocate_kv(
    layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, torch.Tensor, torch.Tensor], ...]:
    """Allocate keys and values of ``num_blocks`` blocks and the trash block.

    Returns:
        By layer: (index of its group, keys, values), each [num_blocks + 1, page_size, kv_heads, head_dim]. Layers of
        different groups that have the same place in their group share tensors: a block belongs to one group at a time.
    """
    shape = (2, num_blocks + 1, layout.page_size, layout.num_kv_heads, layout.head_dim)
    stores = [_zeros(shape, dtype, device) for _ in range(layout.layers_per_block)]
    by_layer: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
    for index, group in enumerate(layout.groups):
        for store, layer in zip(stores, group.layers, strict=False):
            by_layer[layer] = (index, store[0], store[1])
    return tuple(by_layer[layer] for layer in range(len(by_layer)))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Kernels multiply what lies behind a sequence's end by zero, so it must be finite: pages start as zeros. On a CPU
    they come from calloc, which takes no memory before a page is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
