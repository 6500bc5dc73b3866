"""What attention needs to know about one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where one layer group's keys and values lie.

    Attributes:
        block_table: [rows, pages] int32, block of each page of each row's sequence.
        kv_slots: [tokens] int64, ``block * page_size + offset`` where each token's keys and values are written.
        window: sliding window in tokens, None = full attention.
    """

    block_table: torch.Tensor
    kv_slots: torch.Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Rows of one step. Decode rows (one query token each) come first, prefill rows after them.

    In a captured step there may be room for more decode rows than it has. Those are padding; the query tokens by their
    numbers may be a prefill row's, and then the result is what the prefill row says.

    Attributes:
        num_decode: decode rows; row i < num_decode is query token i.
        kv_lengths: [rows] int32, keys visible to the row's last query, itself included.
        groups: block tables by layer group.
        cu_query, cu_kv: [prefill rows + 1] int32, None without prefill rows. Prefill row r's query tokens are those
            from ``cu_query[r]`` to ``cu_query[r + 1] - 1``, so the first sum is the number of decode rows that are not
            padding; ``cu_kv`` are running sums of key lengths, from 0.
        max_query, max_kv: their largest lengths.
        host_kv_lengths: the same as ``kv_lengths`` on the host; empty inside a captured graph.
        host_query_lengths: query tokens of each prefill row.
        host_tables: by group, [rows, pages] block ids on the host (CPU backends slice the cache with them).
        memo: what a backend derives once a step and reuses in every layer.
    """

    num_decode: int
    kv_lengths: torch.Tensor
    groups: tuple[GroupTables, ...]
    cu_query: torch.Tensor | None = None
    cu_kv: torch.Tensor | None = None
    max_query: int = 0
    max_kv: int = 0
    host_kv_lengths: Sequence[int] = ()
    host_query_lengths: Sequence[int] = ()
    host_tables: tuple[Sequence[Sequence[int]], ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict)

    def as_varlen(self) -> AttentionMetadata:
        """The same step with every row a prefill row: how steps are run without the decode fast path.

        What lies on the device is derived there, so this may be part of a captured step.
        """
        decodes = self.num_decode
        if not decodes:
            return self
        device = self.kv_lengths.device
        cu_query = torch.arange(decodes + 1, dtype=torch.int32, device=device)
        if self.cu_query is not None:
            cu_query = torch.cat((torch.minimum(cu_query[:-1], self.cu_query[0]), self.cu_query))
        cu_kv = torch.nn.functional.pad(self.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return replace(
            self,
            num_decode=0,
            cu_query=cu_query,
            cu_kv=cu_kv,
            max_query=max(self.max_query, 1),
            max_kv=max((self.max_kv, *self.host_kv_lengths)),
            host_query_lengths=[1] * decodes + list(self.host_query_lengths),
            memo={},
        )
