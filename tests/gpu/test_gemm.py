"""Tuned linear layers on a GPU: every candidate against fp32, outside and inside a CUDA graph, and the engine on them.

What must not be read or written holds NaN; what a product may use as scratch too.
"""

from __future__ import annotations

import bisect
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import engine
from engine import ContinuousBatchingConfig
from engine.kernels import gemm
from engine.kernels.autotune import Choice
from engine.kernels.cublaslt import WORKSPACE_LIMIT, CublasLt, LtProduct
from engine.kernels.gemm import ANCHORS, TunedLinear, tuned_linear
from engine.kernels.gemm_candidates import TORCH, Problem
from engine.kernels.skinny import SkinnyTile, skinny_linear, skinny_tiles
from engine.kernels.splitk import SplitScratch, parts_needed, splitk_linear, splitk_tiles, tickets_needed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = pytest.mark.parametrize(
    ("columns", "depth", "dtype", "biased"),
    [
        (6144, 2560, BF16, False),
        (2560, 9728, BF16, False),
        (1152, 896, BF16, True),
        (896, 4864, FP16, True),
        (1000, 520, BF16, False),
    ],
)
ROWS = (1, 2, 3, 4, 7, 8, 16, 33, 64, 130, 256, 300)


def operands(
    rows: int, columns: int, depth: int, dtype: torch.dtype, biased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inputs with rows of NaN before and behind them, weights, bias."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    padded = torch.full((rows + 2, depth), float("nan"), dtype=dtype, device="cuda")
    padded[1:-1] = random(rows, depth)
    return padded[1:-1], random(columns, depth) * depth**-0.5, random(columns) if biased else None


def exact(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = inputs.double() @ weight.double().T
    return result if bias is None else result + bias.double()


def assert_rounded(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within one rounding to the dtype, and fp32 sums (parts of a sum rounded to bf16 would be off by 1e-3 of it)."""
    assert torch.isfinite(got).all()
    error = (got.double() - want).abs()
    allowed = torch.finfo(got.dtype).eps * want.abs() + 1e-4 * want.abs().max()
    assert (error <= allowed).all(), f"{(error - allowed).max().item():.3e} over"


@SHAPES
def test_every_algorithm_of_cublaslt_rounds_once(columns: int, depth: int, dtype: torch.dtype, biased: bool) -> None:
    library = CublasLt()
    scratch = torch.full((WORKSPACE_LIMIT // 2,), float("nan"), dtype=BF16, device="cuda").view(torch.uint8)
    for rows in ROWS:
        inputs, weight, bias = operands(rows, columns, depth, dtype, biased)
        want = exact(inputs, weight, bias)
        product = LtProduct(library, rows, columns, depth, dtype, biased)
        algorithms = product.candidates(16, bias)
        assert algorithms
        for algorithm in algorithms:
            again = product.adopt(algorithm.words)
            assert again is not None
            assert again.words == algorithm.words
            described = library.describe(algorithm)
            assert described["reduction"] in (0, 2), described  # sums of parts in fp32
            buffer = torch.full((rows + 2, columns), float("nan"), dtype=dtype, device="cuda")
            stream = torch.cuda.current_stream().cuda_stream
            product.run(product.prepare(algorithm), inputs, weight, bias, buffer[1:-1], scratch, stream)
            assert_rounded(buffer[1:-1], want)
            assert buffer[0].isnan().all()
            assert buffer[-1].isnan().all()


@SHAPES
def test_skinny_rounds_once(columns: int, depth: int, dtype: torch.dtype, biased: bool) -> None:
    for rows in range(1, 9):
        inputs, weight, bias = operands(rows, columns, depth, dtype, biased)
        for tile in (*skinny_tiles(rows), SkinnyTile(1, 512, 2)):
            buffer = torch.full((rows + 2, columns), float("nan"), dtype=dtype, device="cuda")
            skinny_linear(inputs, weight, bias, tile, out=buffer[1:-1])
            assert_rounded(buffer[1:-1], exact(inputs, weight, bias))
            assert buffer[0].isnan().all()
            assert buffer[-1].isnan().all()


@SHAPES
def test_splitk_rounds_once_and_repeats_its_bits(columns: int, depth: int, dtype: torch.dtype, biased: bool) -> None:
    """Each tile as the splits fill the machine, and with others, some without any of the depth."""
    for rows in (3, 9, 16, 24, 33, 64, 100, 128):
        inputs, weight, bias = operands(rows, columns, depth, dtype, biased)
        want = exact(inputs, weight, bias)
        own = splitk_tiles(rows, columns, depth)
        assert own
        others = [dataclasses.replace(tile, splits=splits, ahead=4096) for tile in own for splits in (5, 16)]
        for tile in (*own, *others):
            scratch = SplitScratch(
                torch.full((parts_needed(rows, columns, tile),), float("nan"), device="cuda"),
                torch.zeros(tickets_needed(rows, columns, tile), dtype=torch.int32, device="cuda"),
            )
            buffer = torch.full((rows + 2, columns), float("nan"), dtype=dtype, device="cuda")
            splitk_linear(inputs, weight, bias, tile, scratch, out=buffer[1:-1])
            assert_rounded(buffer[1:-1], want)
            assert buffer[0].isnan().all()
            assert buffer[-1].isnan().all()
            first = buffer[1:-1].clone()
            for _ in range(3):  # whoever is last, and on what the launch before left in the scratch
                buffer.fill_(float("nan"))
                splitk_linear(inputs, weight, bias, tile, scratch, out=buffer[1:-1])
                assert torch.equal(buffer[1:-1], first), tile
            assert not scratch.tickets.any()


def tuned_over(count: int, columns: int, depth: int, dtype: torch.dtype, biased: bool, folder: Path) -> TunedLinear:
    pairs = [operands(1, columns, depth, dtype, biased)[1:] for _ in range(count)]
    tuned = tuned_linear(pairs, {"ENGINE_CACHE_DIR": str(folder)})
    assert tuned is not None
    return tuned


@SHAPES
def test_chosen_calls_equal_in_and_out_of_a_graph(
    columns: int, depth: int, dtype: torch.dtype, biased: bool, tmp_path: Path
) -> None:
    tuned = tuned_over(3, columns, depth, dtype, biased, tmp_path)
    _, weight, bias = operands(1, columns, depth, dtype, biased)
    with torch.inference_mode(), tuned.learning():
        for rows in ROWS:
            inputs = operands(rows, columns, depth, dtype, biased)[0]
            tuned(inputs, weight, bias)
            static = inputs.clone()
            stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                captured = tuned(static, weight, bias)
            for seed in range(2):
                static.copy_(torch.randn(static.shape, generator=torch.Generator().manual_seed(seed)))
                captured.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                assert_rounded(captured, exact(static, weight, bias))
                assert torch.equal(captured, tuned(static, weight, bias))
    report = tuned.report()
    anchors = {ANCHORS[bisect.bisect_left(ANCHORS, rows)] for rows in ROWS}
    assert report.measured == len(anchors), "a number of rows between two anchors runs on what won at the larger one"
    assert report.untimed == 0
    assert sum(report.winners.values()) == len(ROWS)


def test_every_candidate_can_be_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last contender is chosen at every number of rows, and a second start takes it from the disk."""
    monkeypatch.setattr(
        gemm, "choose", lambda baseline, contenders, measure: Choice([baseline, *contenders][-1], 1.0, 2.0)
    )
    columns, depth = 1152, 896
    inputs, weight, bias = operands(300, columns, depth, BF16, True)
    for start in range(2):
        tuned = tuned_over(2, columns, depth, BF16, True, tmp_path)
        with tuned.learning():
            for rows in ROWS:
                assert_rounded(tuned(inputs[:rows], weight, bias), exact(inputs[:rows], weight, bias))
        report = tuned.report()
        assert report.winners.get(TORCH, 0) <= 2  # 130 and 300, between two anchors, if their algorithms do not suit
        assert report.winners["skinny"] > 0
        assert report.winners["splitk"] > 0
        assert report.winners["cublaslt"] > 0
        assert (report.measured > 0) is (start == 0)
        assert (report.stored > 0) is (start == 1)


def test_measured_times_are_times_and_the_choice_is_kept(tmp_path: Path) -> None:
    tuned = tuned_over(4, 2560, 4096, BF16, False, tmp_path)
    _, weight, _ = operands(1, 2560, 4096, BF16, False)
    with tuned.learning():
        for rows in (1, 64, 40):
            tuned(torch.zeros(rows, 4096, dtype=BF16, device="cuda"), weight)
    choices = tuned.choices()
    for rows in (1, 40, 48, 64):  # 40 asks what won at 48
        choice = choices[Problem(rows, 2560, 4096, False)]
        assert 1e-6 < choice.seconds <= choice.baseline_seconds < 1e-3, choice
    before = dataclasses.asdict(tuned.report())
    got = tuned(torch.zeros(65, 4096, dtype=BF16, device="cuda"), weight)  # not rehearsed: torch's
    assert got.shape == (65, 2560)
    assert dataclasses.asdict(tuned.report()) == before
    again = tuned_over(4, 2560, 4096, BF16, False, tmp_path)
    with again.learning():
        for rows in (1, 64, 40):
            again(torch.zeros(rows, 4096, dtype=BF16, device="cuda"), weight)
    assert again.report().measured == 0
    assert again.report().digest == tuned.report().digest


def test_the_engine_rehearses_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM._from_config(config, dtype=BF16).to("cuda").eval()
    settings = ContinuousBatchingConfig(max_requests_per_batch=16, max_batch_tokens=256, num_blocks=64)
    prompts = [[7 * i + k for k in range(9)] for i in range(16)]
    seen, state = [], torch.cuda.get_rng_state()
    for start in range(2):
        manager = engine.init_continuous_batching(model, None, settings)
        manager.warmup()
        measured = {name: (value, source) for name, value, source in manager.measured_settings()}
        assert set(measured) == {"linear_kernels", "replayed_mixed_tokens"}
        value, source = measured["linear_kernels"]
        assert source == "derived: fastest on this device"
        seen.append(value)
        tuned = manager._core.runner.executor.tuned
        assert (tuned.report().measured > 0) is (start == 0)
        manager.start()
        manager.add_requests(prompts, max_new_tokens=8)
        outputs = list(manager)
        assert manager.counters()["graph_replays"] > 0
        assert all(len(output.generated_tokens) == 8 for output in outputs)
        manager.destroy()
    assert seen[0] == seen[1]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    monkeypatch.setenv("ENGINE_TUNE", "0")
    manager = engine.init_continuous_batching(model, None, settings)
    manager.warmup()
    assert manager.measured_settings() == [("replayed_mixed_tokens", 256, "derived: the largest step")]
    manager.destroy()
