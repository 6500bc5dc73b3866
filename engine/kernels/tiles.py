"""Tile sizes of the attention kernels by head size, page size and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch shape of an attention kernel.

    Attributes:
        queries: rows of the query tile (query tokens x query heads of one key head); at least 16, what a tensor core
            takes.
        keys: keys of one step of the loop. Pages that are a multiple of it are looked up once a step.
        warps: warps of a program.
        stages: depth of the software pipeline of key and value loads.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def decode_tile(head_dim: int, page_size: int, dtype: torch.dtype, programs: float = 1.0) -> Tile:
    """Tile of the decode kernel.

    With half-precision heads of 128, keys and values of a step are 32 KB; the look-up of the page inside the loop costs
    the pipeline stages, so that it takes 5 of them to hold two such buffers, and a multiprocessor has room for three
    programs. A fourth would be alone in a second round; with half the keys it finds room in the first.

    Args:
        programs: programs for each multiprocessor, one a row and key head.
    """
    if dtype == torch.float32:
        return Tile(16, 16 if head_dim > 128 else 32, 8, 2)
    if head_dim > 128 or (page_size % 32 == 0 and page_size % 64):
        return Tile(16, 32, 4, 5)
    if 3 < programs <= 4 and page_size % 32 == 0:
        return Tile(16, 32, 4, 6)
    return Tile(16, 64, 2 if head_dim <= 128 else 4, 5)


def prefill_tile(head_dim: int, page_size: int, dtype: torch.dtype) -> Tile:
    """Tile of the prefill kernel."""
    if dtype == torch.float32:
        return Tile(32, 16 if head_dim > 64 else 32, 8, 2)
    if head_dim > 128:
        return Tile(64, 32, 8, 3)
    keys = 32 if page_size % 32 == 0 and page_size % 64 else 64
    return Tile(128, keys, 8, 3)
