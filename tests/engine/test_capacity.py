"""B22: what is predicted of memory and capacity is what the engine then takes and admits."""

from __future__ import annotations

from typing import Any

import pytest

from engine import ContinuousBatchingConfig
from engine.bench.oracle import StepwiseEngine, Wish
from engine.bench.tiny_models import TINY_MODELS, tiny_model
from engine.runner.batch import StepShape


def engine_of(model: Any, **settings: Any) -> StepwiseEngine:
    base = {"page_size": 4, "max_requests_per_batch": 64, "safety_margin": 0.0, "allow_block_sharing": False}
    return StepwiseEngine(
        model, ContinuousBatchingConfig(**{**base, **settings}, auto_switch_to_flash=False, per_request_processors=True)
    )


def allocated(engine: StepwiseEngine) -> int:
    """Bytes of the tensors that hold keys and values, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, *pair in engine.core.runner.layer_caches
        for tensor in pair
    }
    return sum(storages.values())


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("num_blocks", [1, 50])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_ledger_says_what_torch_allocates(name: str, num_blocks: int, page_size: int) -> None:
    """One block more than asked for, the trash block; Gemma 2's two groups share their tensors."""
    model = tiny_model(name)
    engine = engine_of(model, num_blocks=num_blocks, page_size=page_size, max_batch_tokens=16)
    ledger = engine.core.config.ledger
    assert ledger.kv_cache == (num_blocks + 1) * page_size * 2 * (2 * 2 * 8 * 4), "2 layers a block in all three"
    assert allocated(engine) == pytest.approx(ledger.kv_cache, rel=0.02)
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(weights.values()) == pytest.approx(ledger.weights, rel=0.02), "fused in place: no second copy"
    engine.core.close()


@pytest.mark.parametrize("max_requests", [1, 8, 64])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_the_ledger_says_what_a_step_carries(name: str, max_requests: int) -> None:
    """The largest step there can be: as many rows as are allowed, all of them prompts of the longest sequence."""
    engine = engine_of(
        tiny_model(name), num_blocks=600, max_batch_tokens=256, max_requests_per_batch=max_requests, page_size=16
    )
    config = engine.core.config
    pages = 1024 // 16 + 1
    groups = len(config.layout.groups)
    largest = StepShape(
        decodes=0, prefills=max_requests, prefill_tokens=256, samples=max_requests, width=pages, groups=groups
    )
    assert 4 * largest.size == pytest.approx(config.ledger.step_buffers, rel=0.02)
    engine.core.close()


def test_groups_of_unequal_size_are_padded_and_counted(tiny_model_of_five: Any) -> None:
    """3 sliding and 2 full layers make groups of 2, 1 and 2 layers in blocks of 2."""
    engine = engine_of(tiny_model_of_five, num_blocks=20, max_batch_tokens=16)
    assert [len(g.layers) for g in engine.core.config.layout.groups] == [2, 1, 2]
    assert allocated(engine) == pytest.approx(engine.core.config.ledger.kv_cache, rel=0.02)
    engine.core.close()


@pytest.fixture
def tiny_model_of_five(monkeypatch: pytest.MonkeyPatch) -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    five = {**TINY_MODELS["tiny-gemma2"], "num_hidden_layers": 5, "layer_types": kinds}
    monkeypatch.setitem(TINY_MODELS, "tiny-five", five)
    return tiny_model("tiny-five")


@pytest.mark.parametrize(("name", "each"), [("tiny-llama", 25), ("tiny-mistral", 25), ("tiny-gemma2", 50)])
def test_prompts_in_one_step_are_admitted_as_predicted(name: str, each: int) -> None:
    """Prompts of 100 tokens, all computed in one step: a sliding layer needs all pages of the chunk being computed."""
    engine = engine_of(tiny_model(name), num_blocks=7 * each + each // 2, max_batch_tokens=2000)
    layout = engine.core.config.layout
    assert layout.blocks_needed(100, 2000) == each
    for i in range(10):
        engine.add(f"r{i}", Wish(tuple((i + j) % 97 for j in range(100)), max_new_tokens=1))
    engine.core.step()
    assert engine.stats.log[0].prefill_rows == 7 == engine.core.cache.pool.num_blocks // each
    engine.drain(10)
    assert [o.status.name for o in engine.outputs] == ["FINISHED"] * 10
    engine.core.close()


@pytest.mark.parametrize(("name", "each"), [("tiny-llama", 10), ("tiny-mistral", 3), ("tiny-gemma2", 13)])
@pytest.mark.parametrize("more", [0, 1])
def test_as_many_as_predicted_decode_without_preemption(name: str, each: int, more: int) -> None:
    """Requests that grow from 1 to 40 positions in step. A window of 8 lies on up to 3 pages of 4; a full layer keeps
    all 10. One request more than predicted and somebody has to give way."""
    fit = 5
    engine = engine_of(tiny_model(name), num_blocks=fit * each, max_batch_tokens=64)
    assert engine.core.config.layout.blocks_needed(40, 1) == each
    assert engine.core.config.layout.blocks_needed(40, 1) * (fit + 1) > fit * each
    for i in range(fit + more):
        request = engine.add(f"r{i}", Wish((i,), max_new_tokens=16))
        request.max_new_tokens = 40
    engine.drain(500)
    assert engine.stats.finished == fit + more
    assert engine.stats.max_running == fit + more
    assert (engine.stats.preemptions > 0) is bool(more)
    if not more:
        assert engine.stats.kv_blocks_free_min == 0, "not a block was left over"
    assert engine.core.cache.pool.num_available == fit * each
    engine.core.close()
