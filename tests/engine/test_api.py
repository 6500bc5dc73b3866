"""Entry points: a batch, a context manager, a manager kept on the model, and the binding on the model."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig as TransformersConfig

import engine.intake
from engine import (
    ContinuousBatchingConfig,
    RequestStatus,
    attach,
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    detach,
    generate_batch,
    init_continuous_batching,
)

C1 = Callable[..., ContinuousBatchingConfig]
Reference = Callable[[Any, Sequence[int], int], list[int]]

PROMPTS = [[5, 9, 11], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [3, 1, 4, 1, 6], [6]]
GREEDY = GenerationConfig(max_new_tokens=7)


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "continuous-batching"]


def test_a_batch_of_unequal_prompts(m1: Any, c1: C1, reference: Reference) -> None:
    """A-gb-01, A-gb-02: in order of the inputs though sorted inside, prompts excluded, nothing left running."""
    outputs = generate_batch(m1, PROMPTS, GREEDY, c1())
    assert list(outputs) == [f"req_{i}" for i in range(5)]
    assert [o.prompt_ids for o in outputs.values()] == PROMPTS
    assert [o.generated_tokens for o in outputs.values()] == [reference(m1, p, 7) for p in PROMPTS]
    assert {o.finish_reason for o in outputs.values()} == {"length"}
    assert engine_threads() == []


def test_eos_is_the_last_token(m1: Any, c1: C1, reference: Reference) -> None:
    """A-gb-03."""
    free = reference(m1, PROMPTS[0], 7)
    eos = free[3]
    outputs = generate_batch(m1, [PROMPTS[0]], GenerationConfig(max_new_tokens=7, eos_token_id=eos), c1())
    assert outputs["req_0"].generated_tokens == free[: free.index(eos) + 1]
    assert outputs["req_0"].finish_reason == "stop"


def test_keywords_have_effect_or_are_refused(m1: Any, c1: C1, reference: Reference) -> None:
    """A-gb-05."""
    outputs = generate_batch(m1, PROMPTS[:1], GREEDY, c1(), max_new_tokens=3, record_timestamps=True)
    assert outputs["req_0"].generated_tokens == reference(m1, PROMPTS[0], 3)
    times = outputs["req_0"].timestamps
    assert len(times) == 3
    assert times == sorted(times)
    assert GREEDY.max_new_tokens == 7
    with pytest.raises(TypeError, match="foo"):
        generate_batch(m1, PROMPTS, GREEDY, c1(), foo=1)
    with pytest.raises(ValueError, match="do_sample"):
        generate_batch(m1, PROMPTS, GREEDY, c1(), temperature=0.3)


def test_the_models_own_generation_config_is_the_default(m1: Any, c1: C1, reference: Reference) -> None:
    before = m1.generation_config
    m1.generation_config = GenerationConfig(max_new_tokens=2)
    try:
        assert generate_batch(m1, PROMPTS[:1], continuous_batching_config=c1())["req_0"].generated_tokens == reference(
            m1, PROMPTS[0], 2
        )
    finally:
        m1.generation_config = before


def test_bad_requests_fail_beside_the_others(m1: Any, c1: C1, reference: Reference) -> None:
    """B01, B02 through `generate_batch`: FAILED with the cause, the others are right."""
    bad: list[tuple[Any, str]] = [
        ([], "empty"),
        ([5, 500], "outside the vocabulary"),
        ([5, "x"], "not a token id"),
        (None, "must be a list"),
        ([1] * 200, "KV blocks"),
    ]
    outputs = generate_batch(m1, [PROMPTS[0], *[p for p, _ in bad], PROMPTS[1]], GREEDY, c1())
    results = list(outputs.values())
    assert list(outputs) == [f"req_{i}" for i in range(7)]
    assert results[0].generated_tokens == reference(m1, PROMPTS[0], 7)
    assert results[-1].generated_tokens == reference(m1, PROMPTS[1], 7)
    for output, (_, cause) in zip(results[1:-1], bad, strict=True):
        assert output.status is RequestStatus.FAILED
        assert cause in output.error
        assert output.generated_tokens == []


def test_no_inputs_no_outputs(m1: Any) -> None:
    assert generate_batch(m1, []) == {}


def test_a_failure_of_the_loop_is_in_every_result(m1: Any, c1: C1, fail_step: Any) -> None:
    for n in (1, 4):
        fail_step(n, RuntimeError("no luck"))
        outputs = generate_batch(m1, PROMPTS, GREEDY, c1())
        assert [o.error for o in outputs.values()] == ["RuntimeError: no luck"] * 5


def test_the_number_of_prompts_sizes_the_batch(m1: Any, c1: C1) -> None:
    """A-mrb-02."""
    with continuous_batching_context_manager(m1, GREEDY, continuous_batching_config=c1(num_blocks=None)) as manager:
        assert manager.resolved_config.max_requests_per_batch == 16  # 1024, fitted to max_batch_tokens
        assert manager.resolved_config.num_blocks > 16


def test_a_small_queue_does_not_end_a_slow_batch(
    m1: Any, c1: C1, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager's clients are refused when they have waited in vain; the batch waits for itself."""
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(engine.intake, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    prompts = [[1, 2, i] for i in range(6)]
    out = generate_batch(m1, prompts, GREEDY, c1(max_queue_size=1, max_requests_per_batch=1), progress_bar=False)
    assert [o.generated_tokens for o in out.values()] == [reference(m1, prompt, 7) for prompt in prompts]


def test_settings_in_the_place_of_a_flag_are_refused(m1: Any, c1: C1) -> None:
    with (
        pytest.raises(TypeError, match="block must be True or False, got ContinuousBatchingConfig; pass settings as"),
        continuous_batching_context_manager(m1, GenerationConfig(max_new_tokens=4), c1()),
    ):
        pass
    with pytest.raises(TypeError, match="progress_bar must be True or False, got int"):
        generate_batch(m1, [[5, 6]], GenerationConfig(max_new_tokens=4), c1(), progress_bar=1)


def test_leaving_the_context_stops_and_destroys(m1: Any, c1: C1, reference: Reference) -> None:
    """A-mgr-02, A-stop-08: requests still open are finished first."""
    with continuous_batching_context_manager(m1, GREEDY, continuous_batching_config=c1()) as manager:
        assert manager.is_running()
        manager.add_request(PROMPTS[0])
    assert not manager.is_running()
    assert manager.get_result().generated_tokens == reference(m1, PROMPTS[0], 7)
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_an_exception_in_the_context_propagates_and_ends_open_requests(m1: Any, c1: C1) -> None:
    managers = []

    def body() -> None:
        with continuous_batching_context_manager(m1, GREEDY, continuous_batching_config=c1()) as manager:
            managers.append(manager)
            manager.add_request(PROMPTS[0], max_new_tokens=100)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        body()
    assert engine_threads() == []
    assert managers[0].get_result().status is RequestStatus.FAILED


def test_a_persistent_manager_is_used_again_and_never_with_stale_settings(
    m1: Any, c1: C1, reference: Reference
) -> None:
    """A-stop-08, A-stop-09."""
    try:
        with continuous_batching_context_manager(
            m1, GREEDY, continuous_batching_config=c1(), persistent_manager=True
        ) as first:
            first.add_request(PROMPTS[0])
            core = first._core
        assert next(iter(first)).generated_tokens == reference(m1, PROMPTS[0], 7)
        with continuous_batching_context_manager(m1, persistent_manager=True) as second:  # no settings: any will do
            assert second is first
            assert second._core is core, "the cache and what was warmed up is kept"
            assert second.is_running()
        with continuous_batching_context_manager(
            m1, copy.deepcopy(GREEDY), continuous_batching_config=c1(), persistent_manager=True
        ) as third:  # equal settings
            assert third is first
        other = GenerationConfig(max_new_tokens=3)
        with continuous_batching_context_manager(
            m1, other, continuous_batching_config=c1(page_size=8), persistent_manager=True
        ) as fourth:
            assert fourth is not first
            assert fourth.resolved_config.page_size == 8
            fourth.add_request(PROMPTS[0])
            assert fourth.get_result(timeout=10).num_generated == 3
        with pytest.raises(RuntimeError, match="destroyed"):
            first.start()
        assert init_continuous_batching(m1) is fourth
        fourth.destroy()
        assert init_continuous_batching(m1) is not fourth
    finally:
        destroy_cached_continuous_batching_manager(m1)


def test_generate_batch_can_keep_its_manager(m1: Any, c1: C1, reference: Reference) -> None:
    try:
        for n in (2, 5):
            outputs = generate_batch(m1, PROMPTS[:n], GREEDY, c1(), persistent_manager=True)
            assert [o.generated_tokens for o in outputs.values()] == [reference(m1, p, 7) for p in PROMPTS[:n]]
            manager = init_continuous_batching(m1)
            assert manager.counters()["finished"] == {2: 2, 5: 7}[n], "the same manager served both"
    finally:
        destroy_cached_continuous_batching_manager(m1)


def test_a_config_inside_the_generation_config_is_deprecated(m1: Any, c1: C1) -> None:
    """A-cfg-02: a FutureWarning; the argument wins."""
    generation = GenerationConfig(max_new_tokens=3)
    generation.continuous_batching_config = c1(page_size=8)
    with pytest.warns(FutureWarning, match="pass continuous_batching_config"):
        assert init_continuous_batching(m1, generation).resolved_config.page_size == 8
    with pytest.warns(FutureWarning):
        assert init_continuous_batching(m1, generation, c1(page_size=16)).resolved_config.page_size == 16


def test_transformers_own_config_drives_the_engine(m1: Any, reference: Reference) -> None:
    """A-cfg-01."""
    config = TransformersConfig(page_size=8, num_blocks=40, max_batch_tokens=6, return_logprobs=True)
    outputs = generate_batch(m1, PROMPTS, GREEDY, config)
    assert [o.generated_tokens for o in outputs.values()] == [reference(m1, p, 7) for p in PROMPTS]
    assert all(len(o.logprobs) == 7 for o in outputs.values())
    manager = init_continuous_batching(m1, GREEDY, continuous_batching_config=config)
    assert (manager.resolved_config.page_size, manager.resolved_config.num_blocks) == (8, 40)


def test_log_probabilities_are_those_of_the_chosen_tokens(m1: Any, c1: C1) -> None:
    """A-lp-01, A-lp-02: log-softmax of the logits of a plain forward pass over prompt and answer."""
    import torch

    (output,) = generate_batch(m1, PROMPTS[2:3], GREEDY, c1(return_logprobs=True)).values()
    ids = torch.tensor([output.prompt_ids + output.generated_tokens])
    with torch.no_grad():
        expected = m1(ids).logits[0].log_softmax(-1)
    for i, (token, logprob) in enumerate(zip(output.generated_tokens, output.logprobs, strict=True)):
        assert logprob == pytest.approx(expected[len(output.prompt_ids) - 1 + i, token].item(), abs=1e-5)
    assert next(iter(generate_batch(m1, PROMPTS[:1], GREEDY, c1()).values())).logprobs == []


def test_attach_binds_and_detach_gives_the_model_back(m1: Any, c1: C1, reference: Reference) -> None:
    before = dict(m1.__dict__)
    own = type(m1).generate_batch
    assert attach(m1) is m1
    assert m1.generate_batch.func is generate_batch
    outputs = m1.generate_batch(inputs=PROMPTS[:2], generation_config=GREEDY, continuous_batching_config=c1())
    assert [o.generated_tokens for o in outputs.values()] == [reference(m1, p, 7) for p in PROMPTS[:2]]
    with m1.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=c1(), persistent_manager=True
    ) as manager:
        pass
    assert m1.init_continuous_batching() is manager
    attach(m1)  # twice is once
    assert detach(m1) is m1
    assert m1.__dict__ == before
    assert m1.generate_batch.__func__ is own
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()
    detach(m1)


def test_nothing_keeps_a_destroyed_manager_alive(m1: Any, c1: C1) -> None:
    with continuous_batching_context_manager(m1, GREEDY, continuous_batching_config=c1()) as manager:
        manager.add_request(PROMPTS[0])
    alive = weakref.ref(manager)
    del manager
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("inputs", ["hello", ["hello"], [[1, 2], "hello"]])
def test_text_is_refused_before_anything_runs(m1: Any, inputs: Any) -> None:
    with pytest.raises(TypeError, match="lists of token ids, not text"):
        engine.generate_batch(m1, inputs)


@pytest.mark.parametrize("inputs", [None, 5, iter([[1]])])
def test_what_is_no_list_of_prompts_is_refused_by_name(m1: Any, inputs: Any) -> None:
    with pytest.raises(TypeError, match=f"inputs must be a list of prompts, got {type(inputs).__name__}"):
        generate_batch(m1, inputs)


def test_failed_requests_are_said(m1: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="engine.api"):
        engine.generate_batch(m1, [[1, 2], [9999]], progress_bar=False, max_new_tokens=2)
    assert "1 of 2 requests failed, first req_1: " in caplog.text
