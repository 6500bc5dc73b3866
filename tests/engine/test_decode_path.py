"""The decode fast path and the shapes of captured steps: what the settings become on each device and model."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import engine.attention.selection as selection
from engine import ContinuousBatchingConfig, WorkloadHints
from engine.model_shape import ModelShape
from engine.resolution import ResolvedConfig, resolve

GiB = 2**30
FULL = ModelShape(
    windows=(None,) * 4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    hidden_size=512,
    intermediate_size=1024,
    vocab_size=32_000,
    max_positions=8192,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    weight_bytes=10**8,
    supports_flash=True,
)
HYBRID = replace(FULL, windows=(64, None, 64, None))
ON_CPU = replace(FULL, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where Triton works and flash attention is not installed."""
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(selection, "why_not_flash", lambda *_: "not installed")
    monkeypatch.setattr(selection, "why_not_flash3", lambda *_: "not installed")


def resolved(
    shape: ModelShape = FULL, attn: str = "triton", hints: WorkloadHints | None = None, **config: Any
) -> ResolvedConfig:
    given = {"page_size": 16, "num_blocks": 500, "max_batch_tokens": 1024}
    settings = ContinuousBatchingConfig(**given | config)
    return resolve(settings, shape, hints or WorkloadHints(), attn, memory_probe=lambda _: 64 * GiB)


def said(r: ResolvedConfig, name: str) -> list[tuple[int, str]]:
    return [(level, text) for level, text in r.notes if name in text]


@pytest.mark.parametrize(
    ("hints", "given", "pages", "source"),
    [
        (WorkloadHints(max_prompt_length=100, max_generated_length=28), None, 9, "derived: longest prompt + longest"),
        (WorkloadHints(max_prompt_length=100), None, 32, "default"),
        (WorkloadHints(), None, 32, "default"),
        (WorkloadHints(max_prompt_length=100, max_generated_length=28), 64, 64, "user"),
    ],
)
def test_tables_are_as_wide_as_hinted_asked_for_or_32(
    hints: WorkloadHints, given: int | None, pages: int, source: str
) -> None:
    """A-fast-02, A-fast-03."""
    r = resolved(hints=hints, max_blocks_per_request=given)
    assert (r.max_blocks_per_request, r.table_pages, r.decode_kernel) == (pages, pages, True)
    assert r.source("max_blocks_per_request").startswith(source)
    assert r.use_cuda_graph == (True, True)
    assert not said(r, "max_blocks_per_request")


@pytest.mark.parametrize(
    ("hints", "given"), [(WorkloadHints(10**9, 28), None), (WorkloadHints(100, 28), 10**12), (WorkloadHints(), 10**12)]
)
def test_no_table_is_wider_than_the_longest_sequence_served(hints: WorkloadHints, given: int | None) -> None:
    """A prompt that will be refused makes nobody's tables wider, nor does a number that no request could need."""
    r = resolved(hints=hints, max_blocks_per_request=given)
    pages = -(-FULL.max_positions // 16) + 1
    assert (r.max_blocks_per_request, r.table_pages) == (pages, pages)
    assert r.source("table_pages") == f"derived: the model's {FULL.max_positions} positions"
    assert bool(said(r, "is cut to")) == (given is not None)


def test_hints_may_be_given_to_the_manager(m1: Any) -> None:
    """A-fast-02: by the guide they belong to it. Ours and transformers' class."""
    from transformers.generation.continuous_batching.utils import WorkloadHints as Theirs

    import engine

    config = ContinuousBatchingConfig(page_size=4, num_blocks=100)
    for hints in (WorkloadHints(100, 28, 3), Theirs(100, 28, 3)):
        manager = engine.init_continuous_batching(m1, None, config, workload_hints=hints)
        assert (manager.resolved_config.table_pages, manager.resolved_config.max_requests_per_batch) == (33, 3)
        manager.destroy()


def test_zero_turns_the_fast_path_off_and_nothing_else() -> None:
    """A-fast-04: every step is a varlen step, captured and asynchronous all the same."""
    r = resolved(max_blocks_per_request=0)
    assert (r.max_blocks_per_request, r.source("max_blocks_per_request")) == (0, "user")
    assert (r.decode_kernel, r.table_pages) == (False, 32)
    assert (r.use_cuda_graph, r.use_async_batching) == ((True, False), True)
    assert not r.notes


@pytest.mark.parametrize(
    ("graphs", "resolved_graphs", "warned"),
    [(True, (True, False), False), ((True, True), (True, False), False), ((False, True), (False, False), True)],
)
def test_graphs_of_decode_steps_need_the_fast_path(graphs: Any, resolved_graphs: Any, warned: bool) -> None:
    r = resolved(max_blocks_per_request=0, use_cuda_graph=graphs)
    assert r.use_cuda_graph == resolved_graphs
    assert r.source("use_cuda_graph").startswith("derived: no decode kernel")
    assert bool(said(r, "captures nothing")) is warned
    assert r.use_async_batching is any(resolved_graphs)
    if warned:
        with pytest.raises(ValueError, match="use_async_batching=True needs CUDA graphs"):
            resolved(max_blocks_per_request=0, use_cuda_graph=graphs, use_async_batching=True)


@pytest.mark.parametrize(("shape", "attn"), [(ON_CPU, "sdpa"), (ON_CPU, "eager"), (FULL, "sdpa")])
def test_without_a_decode_kernel_it_is_off_and_a_warning_only_if_asked_for(shape: ModelShape, attn: str) -> None:
    """A-fast-05."""
    device = shape.device.type
    for wanted, warnings in ((None, 0), (0, 0), (64, 1)):
        r = resolved(replace(shape, supports_flash=False), attn, max_blocks_per_request=wanted)
        assert (r.max_blocks_per_request, r.decode_kernel) == (0, False)
        notes = said(r, "max_blocks_per_request")
        assert [level for level, _ in notes] == [logging.WARNING] * warnings
        if wanted != 0:
            reason = f"{attn} on {device} has no decode kernel"
            assert r.source("max_blocks_per_request") == f"derived: {reason}"
            assert all(text.endswith(reason) for _, text in notes)


@pytest.mark.parametrize("shape", [HYBRID, replace(FULL, windows=(64,) * 4)])
def test_sliding_layers_force_the_field_to_zero_while_the_own_kernels_serve_them(shape: ModelShape) -> None:
    """A-fast-06."""
    for wanted, level in ((None, logging.INFO), (64, logging.WARNING)):
        r = resolved(shape, max_blocks_per_request=wanted)
        assert r.max_blocks_per_request == 0
        reason = "the model has sliding-window layers; the decode kernel of triton serves them nonetheless"
        assert r.source("max_blocks_per_request") == f"derived: {reason}"
        assert said(r, "max_blocks_per_request") == [(level, f"max_blocks_per_request is set to 0: {reason}")]
        assert (r.decode_kernel, r.table_pages) == (True, wanted or 32)
        assert r.use_cuda_graph == (True, True)
    off = resolved(shape, max_blocks_per_request=0)
    assert (off.decode_kernel, off.source("max_blocks_per_request")) == (False, "user")
    cpu = resolved(replace(shape, device=torch.device("cpu")), "eager", max_blocks_per_request=64)
    assert cpu.source("max_blocks_per_request") == "derived: the model has sliding-window layers"
    assert not cpu.decode_kernel


@pytest.mark.parametrize("name", ["q_padding_interval_size", "kv_padding_interval_size"])
def test_an_interval_that_shapes_nothing_says_so(name: str) -> None:
    """A-graph-04."""
    assert resolved(**{name: 64}).source(name) == "user"
    assert not said(resolved(**{name: 64}), name)
    for arguments, words in (
        ({"shape": ON_CPU, "attn": "sdpa"}, "is captured"),
        ({"use_cuda_graph": False}, "is captured"),
    ):
        r = resolved(**arguments, **{name: 64})  # type: ignore[arg-type]
        assert getattr(r, name) == 64
        assert r.source(name).startswith("user; without effect: no step")
        ((level, text),) = said(r, name)
        assert level == logging.WARNING
        assert words in text
    assert resolved(ON_CPU, "sdpa").source(name) == "default"


def test_an_interval_beyond_the_largest_step_says_so() -> None:
    q = resolved(q_padding_interval_size=2000)
    assert "exceeds max_batch_tokens=1024" in q.source("q_padding_interval_size")
    kv = resolved(kv_padding_interval_size=16_384)
    assert "span 512 tokens" in kv.source("kv_padding_interval_size")
    only_decode = resolved(use_cuda_graph=(False, True), q_padding_interval_size=64, kv_padding_interval_size=64)
    assert [name for _, name in only_decode.notes if "no step with prefills" in name]
    assert not said(only_decode, "kv_padding_interval_size")


@pytest.mark.parametrize("timeout", [600.0, None])
def test_settings_of_tensor_parallelism_say_that_they_do_nothing_here(timeout: float | None) -> None:
    """A-tpt-02, A-tpt-03: accepted on one process."""
    r = resolved(cpu_group_timeout=timeout)
    assert r.cpu_group_timeout == timeout
    assert r.source("cpu_group_timeout") == "user; without effect: one process"
    assert said(r, "cpu_group_timeout") == [
        (logging.INFO, f"cpu_group_timeout={timeout} has no effect: the engine runs in one process")
    ]
    assert not said(resolved(), "cpu_group_timeout")
