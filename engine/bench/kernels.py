"""How close the kernels come to the machine's limits: ``python -m engine.bench.kernels`` on a CUDA device.

Shapes are Qwen3-4B's in bf16. Every number is a median over replays of a CUDA graph whose calls rotate over buffers, so
that each finds the L2 cache cold, beside the copy bandwidth and the matmul rate measured in the same process; attention
also beside flash-attn 2 where it can be imported and the pages suit it. ``--sweep`` tries other tiles.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine import kernels
from engine.bench.arguments import integers
from engine.bench.ceilings import Ceilings
from engine.bench.paged import PagedRows, random_rows
from engine.bench.timing import buffer_sets, seconds_per_call
from engine.kernels.tiles import Tile

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 32, 8, 128, 2560, 9728, 151936
SCALE = HEAD_DIM**-0.5
DTYPE, ITEM = torch.bfloat16, 2
PREFILLS = (((1024,), (1024,)), ((1024,) * 8, (1024,) * 8), ((8192,), (8192,)), ((4096,) * 4, (512,) * 4))
"""Key and query lengths: one prompt, eight, a long one, chunks of 512 at the end of 4096."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operation at one shape.

    Attributes:
        name, shape: what was measured.
        make: makes the call on buffers of its own.
        bytes, flops: of one call; the larger share of the two ceilings is what bounds it.
    """

    name: str
    shape: str
    make: Callable[[], Callable[[], object]]
    bytes: float
    flops: float = 0.0


def line(measurement: Measurement, seconds: float, ceilings: Ceilings) -> str:
    """A row of the table."""
    work = measurement.bytes, measurement.flops
    if ceilings.bound_by_arithmetic(*work):
        achieved = f"{measurement.flops / seconds / 1e12:7.1f} TFLOP/s"
    else:
        achieved = f"{measurement.bytes / seconds / 1e12:7.3f} TB/s   "
    where = f"{measurement.name:24} {measurement.shape:34}"
    return f"{where} {seconds * 1e6:9.2f} us {achieved} {100 * ceilings.floor(*work) / seconds:5.1f} % of the bound"


def measure(measurement: Measurement, ceilings: Ceilings) -> float:
    """Time a measurement and print its row."""
    calls = [measurement.make() for _ in range(buffer_sets(int(measurement.bytes)))]
    seconds = seconds_per_call(calls)
    print(line(measurement, seconds, ceilings), flush=True)
    return seconds


def _rows(kv_lengths: Sequence[int], query_lengths: Sequence[int], page: int) -> PagedRows:
    generator = torch.Generator("cuda").manual_seed(len(kv_lengths) + page)
    return random_rows(kv_lengths, query_lengths, HEADS, KV_HEADS, HEAD_DIM, page, DTYPE, generator)


def _flash() -> Any:
    try:
        import flash_attn
    except ImportError as error:
        print(f"flash-attn 2 is left out: {error}")
        return None
    return flash_attn


def decode(batch: int, context: int, page: int, flash: Any, tile: Tile | None = None) -> Iterator[Measurement]:
    """Decode attention, ours and flash-attn 2's."""
    moved = 2 * batch * context * KV_HEADS * HEAD_DIM * ITEM + 2 * batch * HEADS * HEAD_DIM * ITEM
    flops = 4 * batch * context * HEADS * HEAD_DIM
    shape = f"batch {batch} context {context} page {page}"

    def ours() -> Callable[[], object]:
        r = _rows([context] * batch, [1] * batch, page)
        out = torch.empty_like(r.query)
        return lambda: kernels.paged_decode(
            r.query, r.key_cache, r.value_cache, r.block_table, r.kv_lengths, SCALE, out=out, tile=tile
        )

    def theirs() -> Callable[[], object]:
        r = _rows([context] * batch, [1] * batch, page)
        return lambda: flash.flash_attn_with_kvcache(
            r.query.unsqueeze(1),
            r.key_cache,
            r.value_cache,
            cache_seqlens=r.kv_lengths,
            block_table=r.block_table,
            softmax_scale=SCALE,
            causal=True,
        )

    yield Measurement("paged_decode", shape, ours, moved, flops)
    if flash is not None and page % 256 == 0:
        yield Measurement("  flash-attn 2", shape, theirs, moved, flops)


def prefill(
    kv: Sequence[int], counts: Sequence[int], page: int, flash: Any, tile: Tile | None = None
) -> Iterator[Measurement]:
    """Prefill attention, ours and flash-attn 2's."""
    pairs = sum(n * (2 * k - n + 1) // 2 for k, n in zip(kv, counts, strict=True))
    moved = 2 * sum(kv) * KV_HEADS * HEAD_DIM * ITEM + 2 * sum(counts) * HEADS * HEAD_DIM * ITEM
    shape = f"{len(counts)} x {counts[0]} of {kv[0]} page {page}"

    def ours() -> Callable[[], object]:
        r = _rows(kv, counts, page)
        out = torch.empty_like(r.query)
        return lambda: kernels.paged_prefill(
            r.query, r.key_cache, r.value_cache, r.block_table, r.cu_query, r.kv_lengths, SCALE, out=out, tile=tile
        )

    def theirs() -> Callable[[], object]:
        r = _rows(kv, counts, page)
        cu_kv = torch.zeros_like(r.cu_query)
        cu_kv[1:] = r.kv_lengths.cumsum(0)
        return lambda: flash.flash_attn_varlen_func(
            r.query,
            r.key_cache,
            r.value_cache,
            cu_seqlens_q=r.cu_query,
            cu_seqlens_k=cu_kv,
            max_seqlen_q=max(counts),
            max_seqlen_k=max(kv),
            block_table=r.block_table,
            softmax_scale=SCALE,
            causal=True,
        )

    yield Measurement("paged_prefill", shape, ours, moved, 4 * pairs * HEADS * HEAD_DIM)
    if flash is not None and page % 256 == 0:
        yield Measurement("  flash-attn 2", shape, theirs, moved, 4 * pairs * HEADS * HEAD_DIM)


def rowwise(tokens: int, page: int) -> Iterator[Measurement]:
    """Everything but attention, for one step of ``tokens`` tokens."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=DTYPE)

    def norm() -> Callable[[], object]:
        x, residual, weight, out = (
            random(tokens, HIDDEN),
            random(tokens, HIDDEN),
            random(HIDDEN),
            random(tokens, HIDDEN),
        )
        return lambda: kernels.add_rms_norm(x, residual, weight, 1e-6, out=out)

    def silu() -> Callable[[], object]:
        gate_up, out = random(tokens, 2 * INTERMEDIATE), random(tokens, INTERMEDIATE)
        return lambda: kernels.silu_mul(gate_up, out=out)

    def caches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks = -(-tokens // page) + 1
        slots = torch.randperm(blocks * page, device="cuda")[:tokens].int()
        return random(blocks, page, KV_HEADS, HEAD_DIM), random(blocks, page, KV_HEADS, HEAD_DIM), slots

    def rope() -> Callable[[], object]:
        key_cache, value_cache, slots = caches()
        qkv, norms = random(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM), random(2, HEAD_DIM)
        cos, sin = random(tokens, HEAD_DIM), random(tokens, HEAD_DIM)
        return lambda: kernels.rope_and_write(
            qkv, cos, sin, slots, key_cache, value_cache, query_norm=norms[0], key_norm=norms[1]
        )

    def write() -> Callable[[], object]:
        key_cache, value_cache, slots = caches()
        both = random(2, tokens, KV_HEADS, HEAD_DIM)
        return lambda: kernels.write_kv(both[0], both[1], key_cache, value_cache, slots)

    def argmax(choose: Callable[[torch.Tensor], object]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            logits = random(tokens, VOCAB)
            return lambda: choose(logits)

        return make

    shape = f"{tokens} tokens page {page}"
    yield Measurement("add_rms_norm", shape, norm, 4 * tokens * HIDDEN * ITEM)
    yield Measurement("silu_mul", shape, silu, 3 * tokens * INTERMEDIATE * ITEM)
    yield Measurement("rope_and_write", shape, rope, 2 * tokens * (HEADS + 2 * KV_HEADS) * HEAD_DIM * ITEM)
    yield Measurement("write_kv", shape, write, 4 * tokens * KV_HEADS * HEAD_DIM * ITEM)
    if tokens <= 256:  # rows that sample
        yield Measurement("greedy_argmax", shape, argmax(kernels.greedy_argmax), tokens * VOCAB * ITEM)
        yield Measurement("  torch argmax", shape, argmax(kernels.greedy_argmax_torch), tokens * VOCAB * ITEM)


def sampling(rows: int) -> Iterator[Measurement]:
    """Random choice of ``rows`` rows, ours and the torch operations; "peaked" logits are spread as a trained model's,
    the others as one's with random weights, of which top-p keeps most. Bytes: the logits read once."""

    def draw(spread: float, top_k: int, top_p: float, twins: bool) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            logits = torch.randn(rows, VOCAB, device="cuda", dtype=DTYPE) * spread
            keys = torch.randint(0, 2**31, (rows,), device="cuda")
            temperature, off = torch.full((rows,), 0.8, device="cuda"), torch.zeros(rows, device="cuda")
            k, p = torch.full((rows,), top_k, device="cuda"), torch.full((rows,), top_p, device="cuda")
            filtered = top_k < VOCAB or top_p < 1

            def ours() -> object:
                cuts = kernels.filter_cuts(logits, temperature, k, p, off) if filtered else None
                return kernels.gumbel_argmax(logits, temperature, keys, cuts)

            def theirs() -> object:
                cuts = kernels.filter_cuts_torch(logits, temperature, k, p, off, widest=top_k) if filtered else None
                return kernels.gumbel_argmax_torch(logits, temperature, keys, cuts)

            return theirs if twins else ours

        return make

    for name, settings in (
        ("temperature", (1.0, VOCAB, 1.0)),
        ("top_k 50", (1.0, 50, 1.0)),
        ("top_k 50, top_p 0.9", (1.0, 50, 0.9)),
        ("top_p 0.9", (1.0, VOCAB, 0.9)),
        ("top_p 0.9 peaked", (4.0, VOCAB, 0.9)),
    ):
        for twins in (False, True):
            title = "  torch sampling" if twins else "sampling"
            yield Measurement(title, f"{rows} rows {name}", draw(*settings, twins), rows * VOCAB * ITEM)


def sweep(batches: Sequence[int], pages: Sequence[int], context: int, ceilings: Ceilings) -> None:
    """Decode and prefill with other tiles; the best of each shape last."""

    from triton.runtime.errors import OutOfResources

    def best(title: str, tiles: Sequence[Tile], make: Callable[[Tile], Measurement]) -> None:
        seconds = {}
        for tile in tiles:
            print(tile)
            try:
                seconds[tile] = measure(make(tile), ceilings)
            except OutOfResources as error:
                print(f"  does not fit: {error}")
        winner = min(seconds, key=lambda tile: seconds[tile])
        print(f"BEST {title}: {winner} {seconds[winner] * 1e6:.2f} us", flush=True)

    decode_tiles = [Tile(16, n, w, s) for n, w, s in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 6))]
    decode_tiles = [tile for tile in decode_tiles if tile.keys * tile.stages <= 512]
    prefill_tiles = [Tile(m, n, w, s) for m, n, w, s in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4))]
    prefill_tiles = [
        tile for tile in prefill_tiles if tile.keys * tile.stages <= 384 and tile.queries // tile.warps <= 16
    ]
    for page in pages:
        for batch in batches:
            best(
                f"decode batch {batch} page {page}",
                decode_tiles,
                lambda tile, b=batch, p=page: next(decode(b, context, p, None, tile)),  # type: ignore[misc]
            )
        best(
            f"prefill page {page}",
            prefill_tiles,
            lambda tile, p=page: next(prefill(*PREFILLS[1], p, None, tile)),  # type: ignore[misc]
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where the kernels cannot run."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.kernels", description=__doc__)
    parser.add_argument("--batches", type=integers, default=[1, 8, 32, 64, 128, 256], help="decode rows, by comma")
    parser.add_argument("--pages", type=integers, default=[16, 256], help="page sizes, by comma")
    parser.add_argument("--context", type=int, default=592, help="keys of a decode row")
    parser.add_argument("--sweep", action="store_true", help="try other tiles instead of measuring every kernel")
    options = parser.parse_args(arguments)
    reason = kernels.why_no_triton(torch.device("cuda")) if torch.cuda.is_available() else "there is no CUDA device"
    if reason is not None:
        print(f"nothing to measure: {reason}")
        return 1
    device = torch.device("cuda")
    ceilings = Ceilings.measured(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings}", flush=True)
    with torch.inference_mode():
        if options.sweep:
            sweep(options.batches, options.pages, options.context, ceilings)
            return 0
        flash = _flash()
        for page, batch in itertools.product(options.pages, options.batches):
            for measurement in decode(batch, options.context, page, flash):
                measure(measurement, ceilings)
        for page, (kv, counts) in itertools.product(options.pages, PREFILLS):
            for measurement in prefill(kv, counts, page, flash):
                measure(measurement, ceilings)
        for tokens in (*options.batches, 8192):
            for measurement in rowwise(tokens, options.pages[0]):
                measure(measurement, ceilings)
        for rows in (1, 256):
            for measurement in sampling(rows):
                measure(measurement, ceilings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
