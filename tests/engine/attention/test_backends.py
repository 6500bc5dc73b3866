"""The CPU backends against attention over contiguous keys, written out in float64."""

from __future__ import annotations

import pytest
import torch

from engine.attention import BACKENDS, AttentionMetadata, GroupTables, write_kv
from engine.attention.sdpa import plan_decode

HEADS, KV_HEADS, DIM = 4, 2, 8


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Position by position: query [q, heads, dim] are the last q of k positions."""
    q, k = len(query), len(keys)
    output = torch.empty(q, HEADS, DIM)
    for i in range(q):
        position = k - q + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = keys[first : position + 1, kv].double() @ query[i, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[i, head] = (scores.softmax(0) @ values[first : position + 1, kv].double()).float()
    return output


def step(
    rows: list[tuple[int, int]], page_size: int, window: int | None, seed: int, neighbours: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, list[tuple[torch.Tensor, ...]]]:
    """A step of rows (queries, keys), decode rows first, over a cache full of other numbers.

    Args:
        neighbours: give single pages blocks at even distances, as a pool that was just filled does.
    """
    random = torch.Generator().manual_seed(seed)
    pages = [-(-k // page_size) for _, k in rows]
    num_blocks = sum(pages) + 3
    key_cache, value_cache = (
        torch.randn(num_blocks + 1, page_size, KV_HEADS, DIM, generator=random) * 10 for _ in range(2)
    )
    free = list(range(1, num_blocks + 1)) if neighbours else (torch.randperm(num_blocks, generator=random) + 1).tolist()
    tables, truth, queries, slots, new_keys, new_values = [], [], [], [], [], []
    for (q, k), n in zip(rows, pages, strict=True):
        table, free = free[:n], free[n:]
        keys, values = (torch.randn(k, KV_HEADS, DIM, generator=random) for _ in range(2))
        where = torch.tensor([table[i // page_size] * page_size + i % page_size for i in range(k)])
        write_kv(keys[: k - q], values[: k - q], key_cache, value_cache, where[: k - q])
        if window is not None:  # pages out of sight have been given away
            for page in range(max(0, k - q - window + 1) // page_size):
                table[page] = 0
        tables.append(table)
        truth.append((keys, values))
        queries.append(torch.randn(q, HEADS, DIM, generator=random))
        slots.append(where[k - q :])
        new_keys.append(keys[k - q :])
        new_values.append(values[k - q :])
    write_kv(torch.cat(new_keys), torch.cat(new_values), key_cache, value_cache, torch.cat(slots))
    decode = sum(q == 1 for q, _ in rows)
    block_table = torch.zeros(len(rows), max(pages), dtype=torch.int32)
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = torch.tensor(table)
    metadata = AttentionMetadata(
        num_decode=decode,
        kv_lengths=torch.tensor([k for _, k in rows], dtype=torch.int32),
        groups=(GroupTables(block_table, torch.cat(slots), window),),
        host_kv_lengths=[k for _, k in rows],
        host_query_lengths=[q for q, _ in rows[decode:]],
        host_tables=(tables,),
    )
    return torch.cat(queries), key_cache, value_cache, metadata, truth


ROWS = [
    pytest.param([(1, 5)], id="one decode"),
    pytest.param([(1, 3), (1, 1), (1, 4), (1, 2)], id="decodes in one page each"),
    pytest.param([(1, 3), (1, 30), (1, 17), (1, 4)], id="decodes of any length"),
    pytest.param([(9, 9)], id="a prompt"),
    pytest.param([(5, 23), (7, 7)], id="a later chunk and a prompt"),
    pytest.param([(1, 4), (1, 19), (6, 6), (3, 40)], id="mixed"),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 20.0), (6, 20.0)])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_backends_equal_attention_written_out(
    name: str, page_size: int, window: int | None, softcap: float | None, rows: list[tuple[int, int]]
) -> None:
    for neighbours in (False, True):
        query, key_cache, value_cache, metadata, truth = step(rows, page_size, window, 7, neighbours)
        backend = BACKENDS[name]()
        got = backend.attend(query, key_cache, value_cache, metadata, 0, 0.3, softcap)
        again = backend.attend(query, key_cache, value_cache, metadata, 0, 0.3, softcap)  # the next layer's call
        torch.testing.assert_close(got, again)
        start = 0
        for (q, _), (keys, values) in zip(rows, truth, strict=True):
            expected = dense(query[start : start + q], keys, values, 0.3, window, softcap)
            torch.testing.assert_close(got[start : start + q], expected, atol=1e-5, rtol=1e-5)
            start += q


def test_decode_rows_in_evenly_spaced_pages_share_a_call() -> None:
    """The path that the tests above compare was taken: 3 rows in one call, with a mask where lengths differ."""
    query = torch.empty(0)
    runs, alone = plan_decode([3, 4, 2, 9], [[5], [1], [3], [7, 8, 9]], None, 4, query)
    assert alone == [3]
    (run,) = runs
    assert run.rows.tolist() == [1, 2, 0]
    assert list(range(10))[run.blocks] == [1, 3, 5]
    assert run.longest == 4
    assert run.hidden is not None
    assert (run.hidden[:, 0, 0] == 0).tolist() == [[True] * 4, [True, True, False, False], [True, True, True, False]]
    (equal,), _ = plan_decode([3, 3], [[2], [9]], None, 4, query)
    assert equal.hidden is None


def test_rows_that_share_a_page_or_outgrow_the_window_stand_apart() -> None:
    runs, alone = plan_decode([3, 3], [[2], [2]], None, 4, torch.empty(0))
    assert (runs, sorted(alone)) == ([], [0, 1])
    runs, alone = plan_decode([3, 4, 3], [[1], [2], [3]], 3, 16, torch.empty(0))
    assert alone == [1]
    assert [run.rows.tolist() for run in runs] == [[0, 2]]


def test_mask_bytes_by_hand() -> None:
    """M-mem-02: of a chunk of 5 behind 18 others, a whole prompt of 7, and decode rows of 3 and 2 keys in a page."""
    query, key_cache, value_cache, metadata, _ = step([(1, 3), (1, 2), (5, 23), (7, 7)], 32, None, 7, True)
    for name in ("eager", "sdpa"):
        BACKENDS[name]().attend(query, key_cache, value_cache, metadata, 0, 0.3, None)
    assert BACKENDS["eager"].mask_bytes(metadata) == 2 * 5 * 23  # the largest row's, and the same inverted
    # sdpa: a bool a pair for the chunk; none for the prompt, which is causal; floats of the two rows' longest, if the
    # two lie where one call reads them
    (runs, _singles) = metadata.memo[0]
    hidden = sum(run.hidden.nbytes for run in runs if run.hidden is not None)
    assert hidden == 2 * 3 * 4
    assert BACKENDS["sdpa"].mask_bytes(metadata) == 5 * 23 + hidden
    capped = step([(5, 23)], 32, None, 7, True)
    BACKENDS["sdpa"]().attend(*capped[:4], 0, 0.3, 20.0)
    assert BACKENDS["sdpa"].mask_bytes(capped[3]) == 2 * 5 * 23
    assert [BACKENDS[n].mask_bytes(metadata) for n in ("flash_attention_2", "flash_attention_3", "triton")] == [0, 0, 0]
