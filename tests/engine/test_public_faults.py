"""Faults that other engines have had, as tests: the stated right values.

Ids (B01 …) name the entry of the list of public faults. The ones of the cache's arithmetic (B22), of the packed inputs
(B24) and of a prompt that is all cached (B21, accounting) stand beside the modules concerned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import (
    ContinuousBatchingConfig,
    RequestStatus,
    continuous_batching_context_manager,
    generate_batch,
    init_continuous_batching,
)

Open = Callable[..., Any]
C1 = Callable[..., ContinuousBatchingConfig]
Reference = Callable[[Any, Sequence[int], int], list[int]]

P0, P1 = [5, 9, 11, 2, 8], [3, 1, 4, 1, 5, 9]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95}


def by_id(manager: Any) -> dict[str, Any]:
    return {output.request_id: output for output in manager if output.is_finished()}


@pytest.mark.parametrize("bad", [[], [5, 500, 3], [5, -1, 3]])
def test_a_malformed_request_is_refused_alone(
    bad: list[int], open_manager: Open, m1: Any, reference: Reference
) -> None:
    """B01: an empty prompt or an id outside the vocabulary never reaches the loop."""
    expected, later = reference(m1, P0, 30), reference(m1, P1, 5)
    manager = open_manager()
    manager.add_request(P0, request_id="good", max_new_tokens=30)
    with pytest.raises(ValueError, match=r"empty|outside the vocabulary"):
        manager.add_request(bad, request_id="bad")
    assert by_id(manager)["good"].generated_tokens == expected
    assert manager.is_running()
    manager.add_request(P1, request_id="bad", max_new_tokens=5)  # the refused id is free
    assert manager.get_result(timeout=10).generated_tokens == later


@pytest.mark.parametrize("length", [30, 40])
def test_a_request_larger_than_the_cache_stops_nobody(
    length: int, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """B02: 30 + 12 tokens need ceil(41 / 4) = 11 of 8 blocks, whatever is evicted."""
    expected = [reference(m1, P0, 12), reference(m1, P1, 12)]
    manager = open_manager(num_blocks=8, safety_margin=0.0)
    with pytest.raises(ValueError, match=r"need \d+ KV blocks of 4 tokens, the cache has 8"):
        manager.add_request([1] * length, max_new_tokens=12)
    manager.add_request(P0, request_id="r1", max_new_tokens=12)
    manager.add_request(P1, request_id="r2", max_new_tokens=12)
    done = by_id(manager)
    assert [done["r1"].generated_tokens, done["r2"].generated_tokens] == expected


def test_an_iterator_ends_soon_after_a_cancel(open_manager: Open, m1: Any, gate: Any) -> None:
    """B03: one terminal output with the partial tokens and a clear status; unknown and finished ids are ignored."""
    manager = open_manager(num_blocks=120)
    manager.add_request(P1, request_id="done", max_new_tokens=1)
    assert manager.get_result(timeout=10).request_id == "done"
    g = gate(after=5)
    manager.add_request(P0, request_id="c", max_new_tokens=400, streaming=True)
    chunks: list[Any] = []
    consumer = threading.Thread(target=lambda: chunks.extend(manager.request_id_iter("c")), daemon=True)
    consumer.start()
    assert g.reached.wait(10)
    for name in ("unknown", "done", "c"):
        manager.cancel_request(name)
    g.open()
    consumer.join(1)
    assert not consumer.is_alive()
    assert [c.is_finished() for c in chunks].count(True) == 1
    assert chunks[-1].status is RequestStatus.CANCELLED
    assert 0 < chunks[-1].num_generated < 400
    assert manager.get_result(timeout=0.05) is None


def test_results_made_before_a_stop_are_still_there_to_iterate(open_manager: Open) -> None:
    """B03: submit 3, stop, then iterate."""
    manager = open_manager()
    ids = manager.add_requests([P0, P1, [7]])
    manager.stop()
    assert sorted(o.request_id for o in manager) == sorted(ids)


def test_a_live_id_cannot_be_used_twice(open_manager: Open, m1: Any, reference: Reference) -> None:
    """B04: the second is refused, the first is right, and the id is free again afterwards."""
    expected, second = reference(m1, P0, 6), reference(m1, P1, 6)
    manager = open_manager(start=False)
    manager.add_request(P0, request_id="dup", max_new_tokens=6)
    with pytest.raises(ValueError, match="'dup' is in use by a live request"):
        manager.add_request(P1, request_id="dup", max_new_tokens=6)
    manager.start()
    assert manager.get_result(timeout=10).generated_tokens == expected
    manager.add_request(P1, request_id="dup", max_new_tokens=6)
    assert manager.get_result(timeout=10).generated_tokens == second


def test_a_generated_id_avoids_a_users(open_manager: Open) -> None:
    """B04: a user's id may look like a generated one."""
    manager = open_manager(start=False)
    ids = [manager.add_request(P0, request_id="req_1"), manager.add_request(P0), manager.add_request(P0)]
    assert len(set(ids)) == 3
    manager.start()
    assert set(by_id(manager)) == set(ids)


@pytest.mark.parametrize("case", ["success", "bad config", "failed loop", "raise in the body", "refused request"])
def test_the_model_and_the_callers_objects_are_left_as_they_were(case: str, m1: Any, c1: C1, fail_step: Any) -> None:
    """B08: attention setting, logits and both configs, whatever happens."""
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        before = m1(ids).logits
    generation, config = GenerationConfig(max_new_tokens=4), c1()
    copies = generation.to_dict(), ContinuousBatchingConfig.adopt(config)

    if case == "success":
        generate_batch(m1, [P0], generation, config)
    elif case == "bad config":
        with pytest.raises(ValueError, match="page_size"):
            generate_batch(m1, [P0], generation, c1(page_size=3))
    elif case == "failed loop":
        manager = init_continuous_batching(m1, generation, config)
        manager.start()
        fail_step(2, RuntimeError("x"))
        manager.add_request(P0)
        assert manager.get_result(timeout=10).status is RequestStatus.FAILED
        manager.destroy()
    elif case == "refused request":
        manager = init_continuous_batching(m1, generation, config)
        manager.start()
        with pytest.raises(ValueError, match="outside the vocabulary"):
            manager.add_request([500])
        manager.destroy()
    else:

        def body() -> None:
            with continuous_batching_context_manager(m1, generation, continuous_batching_config=config) as manager:
                manager.add_request(P0)
                raise KeyError

        with pytest.raises(KeyError):
            body()

    assert m1.config._attn_implementation == "eager"
    with torch.no_grad():
        assert (m1(ids).logits - before).abs().max() == 0
    assert (generation.to_dict(), config) == copies


@pytest.mark.parametrize("num_blocks", [32, 9])
def test_history_based_penalties_see_the_requests_own_tokens(
    num_blocks: int, m1: Any, c1: C1, reference: Reference
) -> None:
    """B09: prompt and output of the request itself, also after a preemption; never the output without the penalty."""
    prompts = [[*P0, *P1], [*P1, 7, 7, 2, 30, 31], [8, 3, 3, 1, 60, 2, 2, 44, 45, 46]]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = m1.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, repetition_penalty=1.3, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    for generation, overrides in (
        (GenerationConfig(max_new_tokens=14, repetition_penalty=1.3), {}),
        (GenerationConfig(max_new_tokens=14), {"repetition_penalty": 1.3}),
    ):
        config = c1(num_blocks=num_blocks, safety_margin=0.0)
        outputs = generate_batch(m1, prompts, generation, config, **overrides)
        assert [o.generated_tokens for o in outputs.values()] == expected
        assert [o.generated_tokens for o in outputs.values()] != [reference(m1, p, 14) for p in prompts]
        assert any(o.preemptions for o in outputs.values()) is (num_blocks == 9)


def test_a_seeded_request_does_not_depend_on_its_batch(open_manager: Open) -> None:
    """B10: the same 16 tokens alone, with one or two mates, first or last, and after a preemption; 4 runs each."""
    generation = GenerationConfig(max_new_tokens=16, do_sample=True, temperature=0.8)
    results, preemptions = [], 0
    for _ in range(4):
        for mates, options in ((0, {}), (1, {}), (2, {}), (2, {"num_blocks": 9, "safety_margin": 0.0})):
            manager = open_manager(generation=generation, start=False, per_request_processors=True, **options)
            for i in range(mates):
                manager.add_request([i + 1] * 9, request_id=f"m{i}", max_new_tokens=16)
            manager.add_request(P0, request_id="R", temperature=0.8, seed=42)
            manager.start()
            output = by_id(manager)["R"]
            preemptions += output.preemptions
            results.append(output.generated_tokens)
            manager.stop()
    assert all(tokens == results[0] for tokens in results)
    assert len(results[0]) == 16
    assert preemptions >= 4, "the seeded request itself was preempted"


def test_different_seeds_and_unseeded_twins_differ(open_manager: Open) -> None:
    """B10."""
    manager = open_manager(generation=GenerationConfig(max_new_tokens=16, do_sample=True, temperature=0.8))
    for seed in (42, 43, None, None):
        manager.add_request(P0, seed=seed)
    assert len({tuple(o.generated_tokens) for o in manager}) == 4


def test_the_managers_seed_makes_a_run_repeatable(open_manager: Open) -> None:
    generation = GenerationConfig(max_new_tokens=12, do_sample=True)
    runs = []
    for seed in (7, 7, 8, None, None):
        manager = open_manager(generation=generation, seed=seed)
        manager.add_requests([P0, P1])
        runs.append(sorted(o.generated_tokens for o in manager))
    assert runs[0] == runs[1]
    assert len({str(run) for run in runs[1:]}) == 4


@pytest.mark.parametrize("policy", ["fifo", "prefill_first"])
def test_nothing_is_lost_or_doubled_by_a_preemption(
    policy: str, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """B13: tokens, log probabilities, timestamps, streamed lengths, prompt and creation time of preempted requests."""
    prompts = [[(7 * i + j) % 97 for j in range(10 + i)] for i in range(5)]
    expected = [reference(m1, p, 14) for p in prompts]
    manager = open_manager(start=False, num_blocks=9, safety_margin=0.0, return_logprobs=True, scheduler_type=policy)
    earliest = time.perf_counter()
    for i, prompt in enumerate(prompts):
        manager.add_request(prompt, request_id=f"r{i}", max_new_tokens=14, streaming=True, record_timestamps=True)
    submitted = time.perf_counter()
    manager.start()
    chunks: dict[str, list[Any]] = {}
    for output in manager:
        chunks.setdefault(output.request_id, []).append(output)
    assert manager.counters()["preemptions"] >= 1
    for i, prompt in enumerate(prompts):
        stream = chunks[f"r{i}"]
        last = stream[-1]
        assert last.generated_tokens == expected[i]
        assert len(last.logprobs) == len(last.timestamps) == 14
        assert all(a < b for a, b in zip(last.timestamps, last.timestamps[1:], strict=False))
        assert last.prompt_ids == prompt
        assert [c.num_generated for c in stream] == list(range(1, 15))
        assert earliest <= last.created_time <= submitted < last.lifespan[0] < last.timestamps[0]
        assert len({c.created_time for c in stream}) == 1
    preempted = [c[-1] for c in chunks.values() if c[-1].preemptions]
    assert preempted
    assert any(o.recomputed_tokens > 0 for o in preempted)
    assert manager.counters()["recomputed_tokens"] == sum(c[-1].recomputed_tokens for c in chunks.values())


@pytest.mark.parametrize(
    ("one", "two"),
    [({"temperature": 1}, {"temperature": 1.0}), ({"top_p": 1}, {"top_p": 1.0}), ({"top_k": 0}, {"top_k": -1})],
)
def test_equal_values_of_another_type_give_equal_tokens(
    one: dict[str, Any], two: dict[str, Any], open_manager: Open
) -> None:
    """B14, A-pp-03: 1 is 1.0, and a top_k of 0 or -1 is off."""
    manager = open_manager(generation=GenerationConfig(max_new_tokens=12, **SAMPLED), per_request_processors=True)
    for i, given in enumerate((one, two)):
        manager.add_request(P0, request_id=f"r{i}", seed=5, **given)
    done = by_id(manager)
    assert done["r0"].generated_tokens == done["r1"].generated_tokens
    assert done["r0"].num_generated == 12


@pytest.mark.parametrize(
    "given", [{"temperature": 0}, {"temperature": 0.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 1000}, {"top_k": 1}]
)
def test_an_extreme_value_harms_nobody_else(
    given: dict[str, Any], open_manager: Open, m1: Any, reference: Reference
) -> None:
    """B14: temperature 0 is greedy, top_k beyond the vocabulary is all of it; the 40-token neighbour is unharmed."""
    good, greedy = reference(m1, P1, 40), reference(m1, P0, 20)
    manager = open_manager(generation=GenerationConfig(max_new_tokens=40, **SAMPLED), per_request_processors=True)
    manager.add_request(P1, request_id="good", temperature=0.0)
    manager.add_request(P0, request_id="x", max_new_tokens=20, seed=1, **given)
    done = by_id(manager)
    assert done["good"].generated_tokens == good
    is_greedy = given.get("temperature") == 0 or given.get("top_k") == 1
    assert (done["x"].generated_tokens == greedy) is is_greedy


def test_a_filter_that_is_off_reaches_the_whole_vocabulary(open_manager: Open) -> None:
    """B14: top_k 0 is not top-1, at a temperature where everything is likely."""
    manager = open_manager(generation=GenerationConfig(max_new_tokens=60, **SAMPLED), per_request_processors=True)
    for name, top_k in (("off", 0), ("one", 1)):
        manager.add_request(P0, request_id=name, temperature=1000.0, top_k=top_k, top_p=1.0, seed=3)
    done = by_id(manager)
    assert len(set(done["off"].generated_tokens)) > 30
    assert len(set(done["one"].generated_tokens)) < 30


@pytest.mark.parametrize(("limit", "reason", "length"), [(3, "length", 3), (6, "stop", 6), (20, "stop", 6)])
def test_the_finish_reason_tells_the_limit_from_eos(
    limit: int, reason: str, length: int, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """B18: EOS at position 6; EOS on the last allowed token is a stop; EOS is kept as the last token."""
    prompt, free = next(
        (p, r) for p in ([k, k + 1, k + 2] for k in range(1, 90)) for r in [reference(m1, p, 20)] if r[5] not in r[:5]
    )
    manager = open_manager()
    manager.add_request(prompt, max_new_tokens=limit, streaming=True, eos_token_id=free[5])
    outputs = list(manager)
    assert [o.finish_reason for o in outputs] == [None] * (length - 1) + [reason]
    assert outputs[-1].generated_tokens == free[:length]


@pytest.mark.parametrize(("length", "hit"), [(12, 8), (11, 8), (13, 12), (4, 0)])
def test_a_prompt_that_is_all_cached_still_computes_a_token(
    length: int, hit: int, open_manager: Open, m1: Any, reference: Reference
) -> None:
    """B21: the same prompt 3 times one after another, then 4 at once."""
    prompt = [(3 * i + length) % 97 for i in range(length)]
    expected = reference(m1, prompt, 6)
    manager = open_manager()
    hits = []
    for _ in range(3):
        manager.add_request(prompt, max_new_tokens=6)
        output = manager.get_result(timeout=10)
        assert output.generated_tokens == expected
        hits.append(output.cached_tokens)
    assert hits == [0, hit, hit]
    for i in range(4):
        manager.add_request(prompt, request_id=f"c{i}", max_new_tokens=6)
    done = by_id(manager)
    assert [done[f"c{i}"].generated_tokens for i in range(4)] == [expected] * 4
    assert [done[f"c{i}"].cached_tokens for i in range(4)] == [hit] * 4
    assert manager._core.cache.pool.num_available == 32


def test_a_shared_prefix_is_computed_once(open_manager: Open, m1: Any, reference: Reference) -> None:
    """A-prefix-01: 8 prompts of 64 tokens, 48 of them shared, pages of 16: 48 hit tokens from the second on."""
    shared = [(5 * i) % 97 for i in range(48)]
    prompts = [[*shared, *[(i + 7 * j) % 97 for j in range(16)]] for i in range(8)]
    expected = [reference(m1, p, 4) for p in prompts]
    for sharing in (True, False):
        manager = open_manager(page_size=16, num_blocks=60, max_batch_tokens=64, allow_block_sharing=sharing)
        outputs = []
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=4)
            outputs.append(manager.get_result(timeout=10))
        assert [o.cached_tokens for o in outputs] == ([0] + [48] * 7 if sharing else [0] * 8)
        assert [o.generated_tokens for o in outputs] == expected
        assert manager.counters()["prefix_hit_tokens"] == (7 * 48 if sharing else 0)


def test_no_padding_row_exists_without_graphs(open_manager: Open, caplog: pytest.LogCaptureFixture) -> None:
    """B24, CPU part: launched steps hold real rows only; captured ones are tested by their packed inputs."""
    with caplog.at_level(logging.ERROR):
        manager = open_manager()
        manager.add_requests([P0, P1, [7]])
        assert len(by_id(manager)) == 3
    assert manager.counters()["padded_rows"] == 0
    assert caplog.records == []
