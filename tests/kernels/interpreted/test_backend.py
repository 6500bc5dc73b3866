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
    cu_query = torch.tensor([num_decode, *prefills]).cumsum(0).int() if prefills else None
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


@pytest.mark.parametrize("all_varlen", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, 10.0)])
@pytest.mark.parametrize(("decodes", "prefills", "padding"), [(0, 3, 7), (2, 3, 0), (3, 1, 40), (1, 2, 300)])
def test_a_captured_step_serves_any_rows_that_fit(
    decodes, prefills, padding, window, softcap, all_varlen, generator
) -> None:
    """Eight decode rows and five prefill rows have room. What padding rows and tokens read is NaN but for a key of the
    trash block; what the step's own rows say is eager attention's."""
    rows = DECODE[:decodes] + PREFILL[:prefills]
    lengths, counts = zip(*rows, strict=True)
    paged = random_rows(lengths, counts, 6, 2, 64, 16, torch.float32, generator, window, 1)
    own = sum(counts)
    slots = torch.zeros(own, dtype=torch.int64)
    exact = AttentionMetadata(
        num_decode=decodes,
        kv_lengths=paged.kv_lengths,
        groups=(GroupTables(paged.block_table, slots, window),),
        host_kv_lengths=lengths,
        host_query_lengths=counts[decodes:],
    )
    want = EagerAttention().attend(paged.query, paged.key_cache, paged.value_cache, exact, 0, 0.125, softcap)

    caches = paged.key_cache.clone(), paged.value_cache.clone()
    for cache in caches:
        cache[0, 1:] = float("nan")  # of the trash block, padding rows see the first key only
    table, kv_lengths = torch.zeros(13, paged.block_table.shape[1], dtype=torch.int32), torch.ones(13).int()
    kv_lengths[8:] = 0
    for place, source in ((slice(0, decodes), slice(0, decodes)), (slice(8, 8 + prefills), slice(decodes, None))):
        table[place], kv_lengths[place] = paged.block_table[source], paged.kv_lengths[source]
    ends = torch.tensor(counts).cumsum(0).int()[decodes:]
    cu_query = torch.cat((torch.tensor([decodes]), ends, ends[-1:].expand(5 - prefills))).int()
    cu_kv = torch.cat((torch.zeros(1), kv_lengths[8:].cumsum(0))).int()
    query = torch.cat((paged.query, torch.full((8 + padding, 6, 64), float("nan"))))
    captured = AttentionMetadata(8, kv_lengths, (GroupTables(table, slots, window),), cu_query, cu_kv, len(query), 160)
    if all_varlen:
        captured = captured.as_varlen()
    got = TritonAttention().attend(query, *caches, captured, 0, 0.125, softcap)
    torch.testing.assert_close(got[:own], want, rtol=1e-5, atol=1e-5)
