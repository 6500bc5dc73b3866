"""Which path is compiled and how: levels, explicit configs, and values that torch.compile would not take."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import CompileConfig
from transformers.generation import ContinuousBatchingConfig as TheirConfig

import engine
import engine.attention.selection as selection
from engine import ContinuousBatchingConfig, WorkloadHints
from engine.compilation import choose_compilation
from engine.model_shape import ModelShape
from engine.resolution import ResolvedConfig, resolve

MINE = CompileConfig(mode="default", dynamic=True)
OTHER = CompileConfig(mode="max-autotune-no-cudagraphs", dynamic=False)
SHAPE = ModelShape(
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
ON_CPU = replace(SHAPE, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where Triton works and flash attention is not installed."""
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(selection, "why_not_flash", lambda *_: "not installed")
    monkeypatch.setattr(selection, "why_not_flash3", lambda *_: "not installed")


def resolved(shape: ModelShape = ON_CPU, attn: str = "sdpa", fallback: Any = None, **config: Any) -> ResolvedConfig:
    given = {"page_size": 256, "num_blocks": 50, "max_batch_tokens": 1024}
    return resolve(
        ContinuousBatchingConfig(**given | config),
        shape,
        WorkloadHints(),
        attn,
        memory_probe=lambda _: 64 * 2**30,
        compile_fallback=fallback,
    )


def modes(config: Any) -> tuple[Any, ...] | None:
    return None if config is None else (config.mode, config.dynamic, config.fullgraph, config.backend)


DEFAULT = ("default", True, False, "inductor")
TUNED = ("max-autotune-no-cudagraphs", True, False, "inductor")
STATIC = ("max-autotune-no-cudagraphs", False, False, "inductor")


@pytest.mark.parametrize(("level", "expected"), [(0, None), (1, DEFAULT), (2, TUNED), (3, STATIC)])
def test_levels_are_those_of_transformers(level: int, expected: tuple[Any, ...] | None) -> None:
    """A-comp-01, A-comp-02: the same configs as transformers 5.24 resolves for a backend without masks."""
    from transformers.generation.continuous_batching.initialization import resolve_compile_configs

    theirs = TheirConfig(default_compile_level=level)
    resolve_compile_configs(theirs, None, is_flash_attn=False, decode_fast_path_available=True)
    varlen, decode = choose_compilation(level, None, None, None, flash=False, decode_path=True)
    for ours, reference in ((varlen, theirs.varlen_compile_config), (decode, theirs.decode_compile_config)):
        assert modes(ours.config) == modes(reference) == expected
        assert ours.source == (f"derived: default_compile_level={level}" if level else "default")


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("varlen", [None, MINE])
@pytest.mark.parametrize("decode", [None, OTHER])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("decode_path", [False, True])
def test_the_level_fills_only_what_is_left_open(
    level: int, varlen: Any, decode: Any, flash: bool, decode_path: bool
) -> None:
    """A-comp-03, A-comp-04: level x explicit configs x flash x decode path."""
    chosen_varlen, chosen_decode = choose_compilation(level, varlen, decode, None, flash, decode_path)
    if varlen is not None:
        assert (chosen_varlen.config, chosen_varlen.source) == (varlen, "user")
    else:
        assert (chosen_varlen.config is not None) is (level > 0 and not flash)
    if not decode_path:
        assert chosen_decode.config is None
        assert "no decode path" in chosen_decode.source
    elif decode is not None:
        assert (chosen_decode.config, chosen_decode.source) == (decode, "user")
    else:
        assert (chosen_decode.config is not None) is (level > 0)


@pytest.mark.parametrize(("level", "expected"), [(0, MINE), (1, None)])
def test_the_generation_config_comes_last(level: int, expected: Any) -> None:
    """As in transformers: explicit, then level, then ``GenerationConfig.compile_config``."""
    varlen, decode = choose_compilation(level, None, OTHER, MINE, flash=False, decode_path=True)
    assert (varlen.config is MINE) is (expected is MINE)
    assert decode.config is OTHER
    assert resolved(fallback=MINE).varlen_compile_config == MINE
    assert resolved(fallback=MINE).source("varlen_compile_config") == "derived: compile_config of the generation config"


def test_flash_attention_compiles_decode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-comp-04 through the whole resolution, with graphs and async beside it."""
    monkeypatch.setattr(selection, "why_not_flash", lambda *_: None)
    r = resolved(SHAPE, "flash_attention_2", default_compile_level=2)
    assert (r.attention_backend, r.decode_kernel) == ("flash_attention_2", True)
    assert r.varlen_compile_config is None
    assert r.source("varlen_compile_config") == "derived: default_compile_level=2 compiles decode only under flash"
    assert modes(r.decode_compile_config) == TUNED
    assert (r.use_cuda_graph, r.use_async_batching) == ((True, True), True)
    off = resolved(SHAPE, "flash_attention_2", default_compile_level=1, max_blocks_per_request=0)
    assert (off.varlen_compile_config, off.decode_compile_config) == (None, None)
    assert [level for level, text in off.notes if "compiles nothing" in text] == [logging.WARNING]
    both = resolved(SHAPE, "flash_attention_2", default_compile_level=1, varlen_compile_config=MINE)
    assert (both.varlen_compile_config, both.source("varlen_compile_config")) == (MINE, "user")


def test_without_a_decode_path_its_config_is_dropped_and_that_is_said() -> None:
    r = resolved(decode_compile_config=OTHER, varlen_compile_config=MINE)
    assert not r.decode_kernel
    assert (r.varlen_compile_config, r.decode_compile_config) == (MINE, None)
    assert [level for level, text in r.notes if text.startswith("decode_compile_config is ignored")] == [
        logging.WARNING
    ]
    assert not [text for _, text in resolved(default_compile_level=1).notes if "compile" in text]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (object(), "must be a transformers CompileConfig, a mapping of its fields or None"),
        ({"mod": "default"}, "has no field 'mod'; its fields are fullgraph, dynamic, backend, mode"),
        ({"mode": "fastest"}, r"\.mode must be one of default, .*got 'fastest'"),
        ({"backend": "nvcc"}, r"\.backend must be a callable or one of .*got 'nvcc'"),
        ({"dynamic": "yes"}, r"\.dynamic must be True, False or None, got 'yes'"),
        ({"dynamic": 1}, r"\.dynamic must be True, False or None, got 1"),
        ({"mode": ["default"]}, r"\.mode must be one of default, .*got \['default'\]"),
        ({"backend": "eager", "options": 5}, r"\.options must be a mapping or None, got 5"),
        ({"fullgraph": None}, r"\.fullgraph must be True or False, got None"),
        ({"options": {"max_autotune": True}}, "options beside mode='reduce-overhead'.*set mode=None"),
        ({"mode": None, "options": {"max_fun": 1}}, "options has 'max_fun', which Inductor does not know"),
    ],
)
@pytest.mark.parametrize("name", ["varlen_compile_config", "decode_compile_config"])
def test_what_torch_would_not_take_is_refused_when_it_is_set(name: str, given: Any, complaint: str) -> None:
    value = CompileConfig(**given) if isinstance(given, dict) and "mod" not in given else given
    with pytest.raises(ValueError, match=f"^{name}.*{complaint}"):
        ContinuousBatchingConfig(**{name: value})


@pytest.mark.parametrize(
    "own",
    [
        CompileConfig(),  # transformers' default mode is "reduce-overhead"
        CompileConfig(mode="max-autotune"),
        CompileConfig(mode=None, options={"triton.cudagraphs": True}),
        CompileConfig(backend="cudagraphs"),
    ],
)
def test_graphs_of_its_own_are_refused_on_a_gpu(own: CompileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(selection, "why_not_flash", lambda *_: "not installed")
    with pytest.raises(
        ValueError, match=r"varlen_compile_config .*CUDA graphs of its own.*'default' or 'max-autotune-no"
    ):
        resolved(SHAPE, "triton", varlen_compile_config=own)
    assert resolved(ON_CPU, varlen_compile_config=own).varlen_compile_config == own
    assert modes(resolved(SHAPE, "triton", default_compile_level=3).varlen_compile_config) == STATIC


def test_the_users_objects_stay_theirs(m1: Any) -> None:
    """Mappings become configs, transformers' config object is accepted, nothing is written to or shared."""
    mine = CompileConfig(backend="eager", mode="default", options={"a": 1})
    theirs = TheirConfig(varlen_compile_config=mine, num_blocks=8, page_size=16)
    manager = engine.init_continuous_batching(m1, GenerationConfig(max_new_tokens=2), theirs)
    settled = manager.resolved_config.varlen_compile_config
    manager.destroy()
    assert settled == mine
    assert settled is not mine
    assert settled.options is not mine.options
    config = ContinuousBatchingConfig(varlen_compile_config={"mode": "default", "dynamic": True})
    assert config.varlen_compile_config == MINE
