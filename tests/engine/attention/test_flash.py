"""flash-attn 2 and 3 in the engine, with modules in their place that record their calls and compute them by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import engine.attention.flash3 as flash3
from engine.attention import AttentionMetadata, choose_backend
from engine.attention.eager import EagerAttention
from engine.attention.flash import FlashAttention2
from engine.attention.flash3 import FlashAttention3, why_not_flash3
from engine.attention.metadata import GroupTables
from engine.bench.paged import random_rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DECODE = [(1, 1), (77, 1), (20, 1)]
PREFILL = [(30, 30), (90, 26), (17, 2)]


def attend_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> torch.Tensor:
    """What `flash_attn_with_kvcache` of flash-attn 3 says it returns: [rows, 1, heads, dim], or packed [tokens, …] with
    ``cu_seqlens_q``, where tokens of no row are left as they were; the causal mask is aligned to the bottom right."""
    assert causal
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    if cu_seqlens_q is None:
        rows = list(q)
    else:
        assert cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q is not None
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert len(cu_seqlens_q) == len(cache_seqlens) + 1
        first, last = cu_seqlens_q[0], cu_seqlens_q[-1]
        rows = list(q[first:last].split(cu_seqlens_q.diff().tolist()))
    outputs = []
    for query, length, table in zip(rows, cache_seqlens.tolist(), page_table.long(), strict=True):
        keys, values = (cache[table].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        positions = torch.arange(length - len(query), length)[:, None]
        seen = torch.arange(length)[None] <= positions
        if window_size != (-1, -1):
            assert window_size[1] == 0
            seen &= torch.arange(length)[None] >= positions - window_size[0]
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (keys, values))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    if cu_seqlens_q is None:
        return torch.stack(outputs)
    result = torch.full_like(q, float("nan"))
    result[first:last] = torch.cat(outputs)
    return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """flash-attn 3 as if it were installed; the arguments of each call."""
    seen: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **named: Any) -> Any:
        seen.append({"q": q, **named})
        return attend_paged(q, k_cache, v_cache, **named)

    module = ModuleType("flash_attn_interface")
    vars(module)["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return seen


def step(
    rows: list[tuple[int, int]], page_size: int, window: int | None, generator: torch.Generator
) -> tuple[Any, AttentionMetadata]:
    lengths, counts = zip(*rows, strict=True)
    num_decode = len(DECODE) if rows[0] == DECODE[0] else 0
    paged = random_rows(lengths, counts, 6, 2, 64, page_size, torch.float32, generator, window, 1)
    prefills = counts[num_decode:]
    metadata = AttentionMetadata(
        num_decode=num_decode,
        kv_lengths=paged.kv_lengths,
        groups=(GroupTables(paged.block_table, torch.zeros(sum(counts), dtype=torch.int64), window),),
        cu_query=torch.tensor([num_decode, *prefills]).cumsum(0).int() if prefills else None,
        cu_kv=torch.tensor([0, *lengths[num_decode:]]).cumsum(0).int() if prefills else None,
        max_query=max(prefills, default=0),
        max_kv=max(lengths[num_decode:], default=0),
        host_kv_lengths=lengths,
        host_query_lengths=prefills,
    )
    return paged, metadata


@pytest.mark.parametrize("rows", [DECODE, PREFILL, DECODE + PREFILL])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, 10.0)])
@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("fast", [True, False])
def test_equals_eager(
    fast: bool,
    page_size: int,
    window: int | None,
    softcap: float | None,
    rows: list[tuple[int, int]],
    calls: list[dict[str, Any]],
) -> None:
    """A-attn-01, A-fast-04: decode rows by themselves, then the others; all in one call without the fast path."""
    paged, metadata = step(rows, page_size, window, torch.Generator().manual_seed(0))
    caches = (paged.query, paged.key_cache, paged.value_cache)
    want = EagerAttention().attend(*caches, metadata, 0, 0.125, softcap)
    got = FlashAttention3().attend(*caches, metadata if fast else metadata.as_varlen(), 0, 0.125, softcap)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    decodes = metadata.num_decode if fast else 0
    packed = ["cu_seqlens_q" in call for call in calls]
    assert packed == [False] * (decodes > 0) + [True] * (decodes < len(rows))
    assert {call["window_size"] for call in calls} == {(-1, -1) if window is None else (23, 0)}
    assert {call["softcap"] for call in calls} == {softcap or 0.0}


@pytest.mark.parametrize("rows", [DECODE, PREFILL, DECODE + PREFILL])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, 10.0)])
def test_version_2_equals_eager(
    window: int | None, softcap: float | None, rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own names of arguments, and sums of key lengths for packed rows."""
    seen: list[str] = []

    def kvcache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_table: torch.Tensor, **named: Any) -> Any:
        seen.append("kvcache")
        return attend_paged(q, k, v, page_table=block_table, **named)

    def varlen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_table: torch.Tensor, cu_seqlens_k: torch.Tensor,
        max_seqlen_k: int, **named: Any,
    ) -> Any:  # fmt: skip
        seen.append("varlen")
        lengths = cu_seqlens_k.diff().int()
        assert max_seqlen_k >= int(lengths.max())
        return attend_paged(q, k, v, page_table=block_table, cache_seqlens=lengths, **named)

    module = ModuleType("flash_attn")
    vars(module).update(flash_attn_with_kvcache=kvcache, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    paged, metadata = step(rows, 16, window, torch.Generator().manual_seed(0))
    caches = (paged.query, paged.key_cache, paged.value_cache)
    want = EagerAttention().attend(*caches, metadata, 0, 0.125, softcap)
    torch.testing.assert_close(
        FlashAttention2().attend(*caches, metadata, 0, 0.125, softcap), want, rtol=1e-5, atol=1e-5
    )
    assert seen == ["kvcache"] * (rows[0] == DECODE[0]) + ["varlen"] * (rows[-1] == PREFILL[-1])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.usefixtures("calls")
def test_a_captured_step_has_room_for_rows_that_are_not_there(fast: bool) -> None:
    """3 decode rows where 5 have room: the tokens by the numbers of the others are the first prefill row's."""
    paged, exact = step(DECODE + PREFILL, 16, None, torch.Generator().manual_seed(0))
    want = EagerAttention().attend(paged.query, paged.key_cache, paged.value_cache, exact, 0, 0.125, None)
    order = torch.tensor([0, 1, 2, 0, 0, 3, 4, 5, 0])
    lengths = paged.kv_lengths[order]
    lengths[3:5], lengths[8] = 1, 0
    cu_query = torch.cat((paged.cu_query[3:], paged.cu_query[-1:]))
    cu_kv = torch.cat((torch.zeros(1), lengths[5:].cumsum(0))).int()
    groups = (replace(exact.groups[0], block_table=paged.block_table[order]),)
    captured = AttentionMetadata(5, lengths, groups, cu_query, cu_kv, len(paged.query) + 10, 160)
    captured = captured if fast else captured.as_varlen()
    query = torch.cat((paged.query, torch.zeros(10, *paged.query.shape[1:])))
    got = FlashAttention3().attend(query, paged.key_cache, paged.value_cache, captured, 0, 0.125, None)
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-5, atol=1e-5)


def test_the_varlen_view_of_a_step() -> None:
    _, metadata = step(DECODE + PREFILL, 16, None, torch.Generator().manual_seed(0))
    varlen = metadata.as_varlen()
    assert varlen.cu_query is not None
    assert varlen.cu_kv is not None
    assert varlen.cu_query.tolist() == [0, 1, 2, 3, 33, 59, 61]
    assert varlen.cu_kv.tolist() == [0, 1, 78, 98, 128, 218, 235]
    assert (varlen.num_decode, varlen.max_query, varlen.max_kv) == (0, 30, 90)
    assert varlen.host_query_lengths == [1, 1, 1, 30, 26, 2]
    assert varlen.as_varlen() is varlen
    decodes, _ = step(DECODE, 16, None, torch.Generator().manual_seed(0))
    alone = replace(metadata, kv_lengths=decodes.kv_lengths, cu_query=None, cu_kv=None, max_query=0, max_kv=0)
    alone = replace(alone, host_kv_lengths=[1, 77, 20], host_query_lengths=[]).as_varlen()
    assert alone.cu_query is not None
    assert (alone.cu_query.tolist(), alone.max_query, alone.max_kv) == ([0, 1, 2, 3], 1, 77)


@pytest.mark.usefixtures("calls")
def test_models_are_switched_to_flash_3_before_flash_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-attn-03: 3 and 2, only 2, none, and a class without support."""
    import engine.attention.selection as selection

    def chosen(requested: str, supports: bool = True, page_size: int = 256) -> str:
        return choose_backend(requested, True, supports, CUDA, torch.bfloat16, 64, page_size).name

    monkeypatch.setattr(selection, "why_not_triton", lambda *_: "not here")
    monkeypatch.setattr(selection, "why_not_flash", lambda *_: None)
    assert chosen("sdpa") == chosen("eager", page_size=16) == "flash_attention_3"
    assert chosen("sdpa", supports=False) == "sdpa"
    assert chosen("flash_attention_2") == "flash_attention_2"
    assert chosen("flash_attention_3", page_size=4) == "flash_attention_3"
    monkeypatch.setattr(selection, "why_not_flash3", lambda *_: "not installed")
    assert chosen("sdpa") == "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_3' cannot be used: not installed"):
        chosen("flash_attention_3")
    monkeypatch.setattr(selection, "why_not_flash", lambda *_: "not installed")
    assert chosen("sdpa") == "sdpa"


@pytest.mark.parametrize(
    ("arguments", "capability", "words"),
    [
        ((CPU, torch.bfloat16, 64), (9, 0), "needs a CUDA device, the model is on cpu"),
        ((CUDA, torch.float32, 64), (9, 0), "the model is float32"),
        ((CUDA, torch.bfloat16, 264), (9, 0), "the model has 264"),
        ((CUDA, torch.bfloat16, 64), (10, 0), "compute capability 10.0"),
        ((CUDA, torch.bfloat16, 64), (9, 0), None),
    ],
)
@pytest.mark.usefixtures("calls")
def test_the_obstacle_is_named(
    arguments: Any, capability: tuple[int, int], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    obstacle = why_not_flash3(*arguments)
    assert (obstacle is None) if words is None else (words in str(obstacle))


def test_where_it_is_not_installed_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert "flash_attn_interface cannot be imported" in str(why_not_flash3(CUDA, torch.bfloat16, 64))
    assert flash3.FlashAttention3.name == "flash_attention_3"
