"""The Triton backend equals eager attention on steps of decode rows, prefill rows and both."""

from __future__ import annotations

import pytest
import torch

from engine.attention.eager import EagerAttention
from engine.attention.metadata import AttentionMetadata, GroupTables
from engine.attention.triton_paged import TritonAttention, why_not_triton
from engine.bench.paged import random_rows

DECODE = [(1, 1), (77, 1), (20, 1)]
PREFILL = [(30, 30), (90, 26), (17, 1)]


@pytest.mark.parametrize("rows", [DECODE, PREFILL, DECODE + PREFILL])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, 10.0)])
@pytest.mark.parametrize("page_size", [5, 16])
def test_equals_eager(rows, window, softcap, page_size, generator) -> None:
    lengths, counts = zip(*rows, strict=True)
    num_decode = len(DECODE) if rows[0] == DECODE[0] else 0
    # Eager attention multiplies masked keys too, so only what lies outside the rows is left out of its sight.
    paged = random_rows(lengths, counts, 6, 2, 64, page_size, torch.float32, generator, window, 1)
    prefills = counts[num_decode:]
    cu_query = torch.tensor([0, *prefills]).cumsum(0).int() if prefills else None
    cu_kv = torch.tensor([0, *lengths[num_decode:]]).cumsum(0).int() if prefills else None
    slots = torch.zeros(sum(counts), dtype=torch.int64)
    metadata = AttentionMetadata(
        num_decode=num_decode,
        kv_lengths=paged.kv_lengths,
        groups=(GroupTables(paged.block_table, slots, window),),
        cu_query=cu_query,
        cu_kv=cu_kv,
        max_query=max(prefills, default=0),
        max_kv=max(lengths[num_decode:], default=0),
        host_kv_lengths=lengths,
        host_query_lengths=prefills,
    )
    arguments = (paged.query, paged.key_cache, paged.value_cache, metadata, 0, 0.125, softcap)
    got, want = TritonAttention().attend(*arguments), EagerAttention().attend(*arguments)
    assert got.shape == want.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_serves_any_page_size_of_at_least_4() -> None:
    cpu = torch.device("cpu")  # in the interpreter
    assert TritonAttention.name == "triton"
    assert TritonAttention.capturable
    assert why_not_triton(cpu, torch.float32, 128, 4) is None
    assert why_not_triton(cpu, torch.bfloat16, 80, 23) is None
    assert "at least 4 tokens" in str(why_not_triton(cpu, torch.float32, 128, 3))
    assert "32 to 256" in str(why_not_triton(cpu, torch.float32, 16, 16))
    assert "float64" in str(why_not_triton(cpu, torch.float64, 128, 16))
