"""Random rows over a paged cache, as the attention kernels take them: for measurements and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows whose keys lie scattered over the blocks of a cache.

    Attributes:
        query: [tokens, heads, head_dim]; row r's tokens are ``cu_query[r]`` … ``cu_query[r + 1] - 1``, its last
            positions.
        key_cache, value_cache: [blocks, page_size, kv_heads, head_dim]; block 0 is the trash block, the last block
            belongs to nobody.
        block_table: [rows, pages] int32.
        cu_query: [rows + 1] int32.
        kv_lengths: [rows] int32.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    cu_query: torch.Tensor
    kv_lengths: torch.Tensor


def random_rows(
    kv_lengths: Sequence[int],
    query_lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    window: int | None = None,
    spare_pages: int = 0,
    poisoned: bool = False,
    interleaved: bool = False,
) -> PagedRows:
    """Draw rows from a standard normal distribution, their pages in random order.

    Args:
        kv_lengths, query_lengths: keys of each row, its queries' own included, and query tokens of each row.
        generator: of the device everything is made on.
        window: visible keys; pages that no query of a row sees any more are given up.
        spare_pages: columns of the block table beyond the longest row.
        poisoned: all positions that no query may see, trash block included, hold NaN, and the block table's dead
            entries name the block that belongs to nobody, NaN throughout.
        interleaved: keys and values of a block lie side by side, so that neither cache is contiguous.
    """
    device = generator.device
    pages = [-(-length // page_size) for length in kv_lengths]
    width = max(pages, default=0) + spare_pages
    blocks = sum(pages) + 2
    shape = (page_size, kv_heads, head_dim)
    if interleaved:
        store = torch.empty((blocks, 2, *shape), dtype=dtype, device=device)
        caches = [store[:, 0], store[:, 1]]
    else:
        caches = list(torch.empty((2, blocks, *shape), dtype=dtype, device=device))
    order = (torch.randperm(sum(pages), generator=generator, device=device) + 1).int()
    table = torch.full((len(pages), width), blocks - 1 if poisoned else 0, dtype=torch.int32, device=device)
    if not poisoned:
        for cache in caches:
            cache.normal_(generator=generator)
    else:
        for cache in caches:
            cache.fill_(float("nan"))
    taken = 0
    for row, (kv_length, count) in enumerate(zip(kv_lengths, query_lengths, strict=True)):
        first = 0 if window is None else max(0, kv_length - count - window + 1)
        dropped = first // page_size
        mine = order[taken : taken + pages[row]]
        taken += pages[row]
        table[row, dropped : pages[row]] = mine[dropped:]
        if poisoned and first < kv_length:
            token = torch.arange(first, kv_length, device=device)
            block, offset = mine[token // page_size].long(), token % page_size
            for cache in caches:
                live = torch.empty((len(token), kv_heads, head_dim), dtype=dtype, device=device)
                cache[block, offset] = live.normal_(generator=generator)
    cu_query = torch.zeros(len(pages) + 1, dtype=torch.int32, device=device)
    cu_query[1:] = torch.tensor(list(query_lengths), dtype=torch.int32).cumsum(0)
    query = torch.empty((sum(query_lengths), heads, head_dim), dtype=dtype, device=device)
    return PagedRows(
        query.normal_(generator=generator),
        caches[0],
        caches[1],
        table,
        cu_query,
        torch.tensor(list(kv_lengths), dtype=torch.int32, device=device),
    )
