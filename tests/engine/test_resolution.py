"""What an open setting becomes, and where the value came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import engine
import engine.attention.selection as selection
from engine import ContinuousBatchingConfig, WorkloadHints
from engine.cache.layout import CacheLayout
from engine.model_shape import ModelShape
from engine.resolution import ResolvedConfig, resolve

MiB, GiB = 2**20, 2**30

SHAPE = ModelShape(
    windows=(None,) * 28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=1024,
    intermediate_size=3072,
    vocab_size=151_936,
    max_positions=40_960,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    weight_bytes=1_192_099_840,
    supports_flash=True,
)


def resolved(
    free: int = 64 * GiB,
    shape: ModelShape = SHAPE,
    hints: WorkloadHints | None = None,
    attn: str = "sdpa",
    **config: Any,
) -> ResolvedConfig:
    return resolve(
        ContinuousBatchingConfig(**config), shape, hints or WorkloadHints(), attn, memory_probe=lambda _: free
    )


def test_every_field_has_a_value_and_a_source() -> None:
    r = resolved(num_blocks=100, page_size=16)
    assert {name for name, *_ in r.rows()} >= set(ContinuousBatchingConfig.__slots__)
    assert (r.num_blocks, r.source("num_blocks")) == (100, "user")
    assert (r.page_size, r.source("page_size")) == (16, "user")
    assert r.source("scheduler_type") == "default"
    assert r.source("safety_margin").startswith("derived: ")
    assert {row["field"] for row in json.loads(r.to_json())} == {name for name, *_ in r.rows()}


def test_the_result_does_not_change() -> None:
    r = resolved()
    with pytest.raises(AttributeError, match="does not change"):
        r.num_blocks = 3
    with pytest.raises(AttributeError, match="no setting 'blocks'"):
        r.blocks  # noqa: B018


def test_the_users_objects_are_not_written_to() -> None:
    config, hints = ContinuousBatchingConfig(), WorkloadHints(1, 2, 3)
    before = ContinuousBatchingConfig.adopt(config)
    resolve(config, SHAPE, hints, "sdpa", memory_probe=lambda _: GiB * 64)
    assert config == before


@pytest.mark.parametrize(
    ("given", "value", "source"),
    [
        ({}, 0.15, "derived: default of scheduler_type=fifo"),
        ({"scheduler_type": "prefill_first"}, 0.0, "derived: default of scheduler_type=prefill_first"),
        ({"safety_margin": 0.4}, 0.4, "user"),
        ({"safety_margin": 0.0}, 0.0, "user"),
    ],
)
def test_the_margin_is_the_schedulers_own(given: dict[str, Any], value: float, source: str) -> None:
    """A-margin-03."""
    r = resolved(**given)
    assert (r.safety_margin, r.source("safety_margin")) == (value, source)


def test_max_batch_tokens_is_8192_less_with_little_memory_and_never_under_256() -> None:
    """A-mbt-02."""
    plenty, little = resolved(256 * GiB), resolved(24 * GiB)
    assert (plenty.max_batch_tokens, plenty.source("max_batch_tokens")) == (8192, "default")
    assert 256 < little.max_batch_tokens < 8192
    assert "tenth of the memory budget" in little.source("max_batch_tokens")
    assert resolved(1 * GiB).max_batch_tokens == 256


def test_no_room_at_all_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"no room for a KV cache.*max_batch_tokens=256.*max_memory_percent"):
        resolved(64 * MiB)


def test_max_batch_tokens_falls_monotonously_with_memory() -> None:
    tokens = [resolved(n * GiB).max_batch_tokens for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert tokens == sorted(tokens)
    assert (tokens[0], tokens[-1]) == (256, 8192)


def test_an_explicit_max_batch_tokens_is_used_as_given() -> None:
    """A-mbt-05."""
    r = resolved(max_batch_tokens=16_384)
    assert (r.max_batch_tokens, r.source("max_batch_tokens")) == (16_384, "user")
    with pytest.raises(ValueError, match="num_blocks=1000 and max_batch_tokens=16384 need more"):
        resolved(4 * GiB, max_batch_tokens=16_384, num_blocks=1000)


def test_a_larger_token_budget_leaves_fewer_blocks() -> None:
    """A-mbt-04: strictly fewer; the ledger stays in the budget, and what it leaves unassigned would not do for another
    block and another request's row of logits."""
    blocks = []
    for tokens in (256, 1024, 4096):
        r = resolved(32 * GiB, max_batch_tokens=tokens)
        blocks.append(r.num_blocks)
        spent = r.ledger.kv_cache + r.ledger.step_buffers + r.ledger.activations
        budget = int(32 * GiB * 0.6)
        assert 0 <= budget - spent < r.layout.block_bytes + SHAPE.vocab_size * 10 + 4096
        assert "fills 60% of 32.0 GiB" in r.source("num_blocks")
    assert blocks[0] > blocks[1] > blocks[2] > 0


def test_a_larger_token_budget_lets_fewer_requests_run_at_once() -> None:
    """M-mem-03: what is taken for a step's input is not there for requests of 4,096 tokens."""
    at_once = []
    for tokens in (512, 8192, 32_768):
        r = resolved(8 * GiB, max_batch_tokens=tokens)
        at_once.append(r.num_blocks // r.layout.blocks_needed(4096, tokens))
    assert at_once[0] > at_once[1] > at_once[2] > 0


def test_few_blocks_need_few_rows_of_logits() -> None:
    """8 blocks run at most 8 requests, so room for the logits of 1024 is not asked for."""
    r = resolved(1 * GiB, num_blocks=8, max_batch_tokens=1024)
    assert (r.num_blocks, r.max_requests_per_batch) == (8, 8)
    assert r.ledger.activations < 1024 * SHAPE.vocab_size * 10


def test_blocks_never_exceed_what_all_requests_could_use() -> None:
    small = replace(SHAPE, max_positions=512)
    r = resolved(256 * GiB, small, max_requests_per_batch=4)
    assert r.num_blocks == 4 * 2
    assert "longest sequence" in r.source("num_blocks")


@pytest.mark.parametrize(("percent", "share"), [(None, 0.6), (0.3, 0.3)])
def test_the_memory_percentage_bounds_the_budget(percent: float | None, share: float) -> None:
    """A-cfg-04."""
    r = resolved(32 * GiB, max_memory_percent=percent)
    assert r.max_memory_percent == share
    assert r.ledger.kv_cache + r.ledger.step_buffers + r.ledger.activations <= 32 * GiB * share


@pytest.mark.parametrize("free", [16 * GiB, 140 * GiB])
@pytest.mark.parametrize("graphs", [True, False])
def test_what_a_gpu_may_use_is_used(free: int, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has all that step buffers, activations and workspaces leave; on a large GPU that is 95 % and more."""
    monkeypatch.setattr(selection, "why_not_triton", lambda *_: None)
    r = resolved(free, replace(SHAPE, device=torch.device("cuda")), attn="triton", use_cuda_graph=graphs)
    ledger, budget = r.ledger, int(free * 0.9)
    assert "fills 90%" in r.source("num_blocks")
    assert ledger.workspaces == (4 if graphs else 2) * 32 * MiB
    spent = ledger.kv_cache + ledger.step_buffers + ledger.activations + ledger.workspaces
    assert 0 <= budget - spent < r.layout.block_bytes + SHAPE.vocab_size * 10 + 4096 * 4
    if free == 140 * GiB:
        assert ledger.kv_cache >= 0.95 * budget


def test_the_ledger_counts_the_trash_block() -> None:
    r = resolved(num_blocks=10, page_size=16)
    assert r.ledger.kv_cache == 11 * 28 * 2 * 8 * 128 * 2 * 16
    assert r.ledger.weights == SHAPE.weight_bytes


@pytest.mark.parametrize(
    ("hints", "config", "value", "source"),
    [
        (WorkloadHints(), {}, 1024, "default"),
        (WorkloadHints(num_requests=3), {}, 3, "derived: requests submitted"),
        (WorkloadHints(num_requests=2000), {}, 2000, "derived: requests submitted"),
        (WorkloadHints(num_requests=3), {"max_requests_per_batch": 7}, 7, "user"),
        (WorkloadHints(), {"max_batch_tokens": 16}, 16, "derived: fitted to max_batch_tokens and num_blocks"),
        (WorkloadHints(), {"num_blocks": 8}, 8, "derived: fitted to max_batch_tokens and num_blocks"),
        (
            WorkloadHints(),
            {"max_requests_per_batch": 64, "num_blocks": 8, "max_batch_tokens": 16},
            8,
            "derived: fitted to max_batch_tokens and num_blocks",
        ),
    ],
)
def test_requests_are_those_submitted_then_fitted(
    hints: WorkloadHints, config: dict[str, Any], value: int, source: str
) -> None:
    """A-mrb-02, A-mrb-03."""
    r = resolved(512 * GiB, hints=hints, **config)
    assert (r.max_requests_per_batch, r.source("max_requests_per_batch")) == (value, source)


def test_on_a_cpu_nothing_is_captured() -> None:
    """A-graph-02."""
    r = resolved()
    assert r.use_cuda_graph == (False, False)
    assert r.source("use_cuda_graph") == "derived: no CUDA device"
    assert (r.use_async_batching, r.max_blocks_per_request) == (False, 0)


@pytest.mark.parametrize("graphs", [True, (True, True), (False, True)])
def test_graphs_asked_for_without_a_device_are_an_error(graphs: Any) -> None:
    with pytest.raises(ValueError, match=r"use_cuda_graph=.*no CUDA device"):
        resolved(use_cuda_graph=graphs)


@pytest.mark.parametrize("graphs", [None, False])
def test_async_needs_graphs(graphs: Any) -> None:
    """A-async-02."""
    with pytest.raises(ValueError, match="use_async_batching=True needs CUDA graphs"):
        resolved(use_cuda_graph=graphs, use_async_batching=True)


@pytest.mark.parametrize("windows", [(8,) * 28, (8, None) * 14])
def test_sharing_is_off_with_sliding_layers_and_says_so(windows: tuple[int | None, ...]) -> None:
    """A-prefix-02."""
    r = resolved(shape=replace(SHAPE, windows=windows))
    assert r.allow_block_sharing is False
    assert "sliding-window layers" in r.source("allow_block_sharing")
    assert resolved().allow_block_sharing is True


@pytest.mark.parametrize(
    ("attn", "name"), [("sdpa", "sdpa"), ("eager", "eager"), ("paged|eager", "eager"), ("paged|sdpa", "sdpa")]
)
def test_the_backend_is_what_the_model_was_loaded_with(attn: str, name: str) -> None:
    """A-attn-01, A-attn-04."""
    assert resolved(attn=attn).attention_backend == name


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"attn_implementation='flex_attention'.*eager, sdpa, flash_attention_2"):
        resolved(attn="flex_attention")
    with pytest.raises(ValueError, match="flash_attention_2' cannot be used: it needs a CUDA device"):
        resolved(attn="flash_attention_2")


def test_the_shape_is_read_from_the_model(m1: Any, tiny_model: Callable[..., Any]) -> None:
    """A-swa-03: windows come from the model's configuration."""
    shape = ModelShape.of(m1)
    assert (shape.windows, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == ((None, None), 2, 8, 97)
    assert shape.weight_bytes == sum(p.nbytes for p in m1.parameters())
    assert shape.cache_layout(4) == CacheLayout.build([None, None], 4, 2, 8, 4)
    assert ModelShape.of(tiny_model("tiny-mistral")).windows == (16, 16)
    assert ModelShape.of(tiny_model("tiny-gemma2")).windows == (16, None, 16, None)
    assert ModelShape.of(tiny_model("tiny-gpt2")).num_kv_heads == 4


def test_a_model_that_cannot_be_served_is_refused_by_name() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        ModelShape.of(T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match=r"Linear has no \.config"):
        ModelShape.of(torch.nn.Linear(1, 1))


def test_choices_that_a_user_may_not_expect_are_said_once(caplog: pytest.LogCaptureFixture, tiny_model: Any) -> None:
    """A-prefix-02, A-fast-05: a forced setting is a warning only if it was set."""
    model = tiny_model("tiny-mistral")
    with caplog.at_level("INFO", logger="engine"):
        engine.init_continuous_batching(model, None, ContinuousBatchingConfig(num_blocks=8, max_blocks_per_request=64))
    said = [(record.levelname, record.message) for record in caplog.records]
    assert ("INFO", "prefix sharing is off: the model has sliding-window layers") in said
    assert [level for level, text in said if "max_blocks_per_request" in text] == ["WARNING"]
    caplog.clear()
    with caplog.at_level("INFO", logger="engine"):
        engine.init_continuous_batching(model, None, ContinuousBatchingConfig(num_blocks=8))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def offload(available: int | None = 100 * GiB, **config: Any) -> ResolvedConfig:
    return resolve(
        ContinuousBatchingConfig(page_size=16, **config),
        SHAPE,
        WorkloadHints(),
        "sdpa",
        memory_probe=lambda _: 64 * GiB,
        ram_probe=lambda: available,
    )


BLOCK = 16 * 28 * 2 * 8 * 128 * 2
"""Bytes of a block of `SHAPE`: 16 tokens, 28 layers, keys and values, 8 heads of 128, bf16."""


def test_offload_is_off_and_silent_by_default() -> None:
    """A-off-01: RAM is not even looked at."""

    def never() -> int:
        raise AssertionError("nobody asked for host memory")

    r = resolve(ContinuousBatchingConfig(), SHAPE, WorkloadHints(), "sdpa", lambda _: 64 * GiB, never)
    assert (r.cpu_offload_space, r.num_host_blocks) == (0.0, 0)
    assert not [text for _, text in r.notes if "offload" in text]


def test_offload_space_is_whole_blocks() -> None:
    """A-off-01."""
    r = offload(cpu_offload_space=8.0)
    assert (r.cpu_offload_space, r.source("cpu_offload_space")) == (8.0, "user")
    assert r.num_host_blocks == 8 * GiB // BLOCK
    assert r.source("num_host_blocks") == "derived: whole blocks within cpu_offload_space"
    assert not [text for _, text in r.notes if "offload" in text]


def test_offload_space_is_cut_to_the_share_of_available_ram() -> None:
    """A-off-04."""
    r = offload(cpu_offload_space=1e5)
    assert r.cpu_offload_space == pytest.approx(80.0)
    assert r.source("cpu_offload_space").startswith("derived: cut to 80% of 100.0 GiB available RAM")
    assert r.num_host_blocks == 80 * GiB // BLOCK
    assert [text for _, text in r.notes if "is cut to 80.00 GiB" in text]
    assert offload(cpu_offload_space=1e5, cpu_offload_space_safety_threshold=1.0).cpu_offload_space == 100.0


def test_offload_space_from_the_threshold() -> None:
    """A-off-05."""
    r = offload(cpu_offload_space=None, cpu_offload_space_safety_threshold=0.5)
    assert r.cpu_offload_space == 50.0
    assert r.source("cpu_offload_space").startswith("derived: 50% of 100.0 GiB")


def test_offload_without_psutil() -> None:
    """A-off-04, A-off-05."""
    with pytest.raises(ValueError, match="cpu_offload_space=None needs psutil"):
        offload(None, cpu_offload_space=None)
    r = offload(None, cpu_offload_space=2.0)
    assert r.num_host_blocks == 2 * GiB // BLOCK
    assert [text for _, text in r.notes if "psutil is missing" in text]


@pytest.mark.parametrize(
    "given", [{"cpu_offload_space": 1e-6}, {"cpu_offload_space": 4.0, "cpu_offload_space_safety_threshold": 0.0}]
)
def test_an_offload_space_without_a_block_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"does not hold one block of 1.75 MiB"):
        offload(**given)


def test_a_backend_asked_for_in_the_config_is_taken_or_refused() -> None:
    config = ContinuousBatchingConfig(attention_backend="eager", num_blocks=8)
    found = resolve(config, SHAPE, WorkloadHints(), "sdpa", lambda _: 64 * GiB)
    assert (found.attention_backend, found.source("attention_backend")) == ("eager", "user")
    config = ContinuousBatchingConfig(attention_backend="flash_attention_2", num_blocks=8)
    with pytest.raises(ValueError, match="attention_backend='flash_attention_2' cannot be met: it needs a CUDA device"):
        resolve(config, SHAPE, WorkloadHints(), "sdpa", lambda _: 64 * GiB)
