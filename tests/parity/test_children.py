"""Several sequences of one prompt: forked children give what they would have given as requests of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus

Models = Callable[[str, str], Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
Serve = Callable[..., tuple[dict[str, Any], dict[str, Any]]]
NEW = 10
SAMPLED = {"do_sample": True, "temperature": 1.2}


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Outputs by id and counters of requests given as (prompt, keywords)."""
    managers = []

    def run(
        model: Any,
        requests: Sequence[tuple[list[int], dict[str, Any]]],
        generation: dict[str, Any] | None = None,
        ahead: bool = False,
        **config: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        base = {"page_size": 4, "num_blocks": 120, "max_batch_tokens": 24, "safety_margin": 0.0, "seed": 3}
        manager = ContinuousBatchingManager(
            model,
            GenerationConfig(max_new_tokens=NEW, **(generation or {})),
            ContinuousBatchingConfig(auto_switch_to_flash=False, **{**base, **config}),
        )
        managers.append(manager)
        for i, (ids, options) in enumerate(requests):
            manager.add_request(ids, request_id=str(i), **options)
        manager.warmup()
        assert manager._core is not None
        manager._core._depth = int(ahead)
        manager.start()
        done = {o.request_id: o for o in manager}
        assert {o.status for o in done.values()} == {RequestStatus.FINISHED}, done
        return done, manager.counters()

    yield run
    for manager in managers:
        manager.destroy()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [5, 24, 200])
@pytest.mark.parametrize(
    ("preset", "attention"),
    [
        ("tiny-llama", "eager"),
        ("tiny-llama", "sdpa"),
        ("tiny-gpt2", "sdpa"),
        ("tiny-mistral", "sdpa"),
        ("tiny-gemma2", "eager"),
    ],
)
def test_greedy_children_equal_their_parent(
    preset: str, attention: str, budget: int, ahead: bool, tiny_model: Models, reference: Reference, serve: Serve
) -> None:
    """Prompts of one token, on page borders, of several windows; full, sliding and hybrid layers."""
    model = tiny_model(preset, attention)
    prompts = [prompt(n, 7 * n) for n in (1, 4, 5, 9, 40)]
    done, counters = serve(
        model, [(p, {"num_return_sequences": 3}) for p in prompts], ahead=ahead, max_batch_tokens=budget,
        num_blocks=300, max_requests_per_batch=15 if budget > 15 else budget,
    )  # fmt: skip
    for i, p in enumerate(prompts):
        for name in (str(i), f"{i}__child#0", f"{i}__child#1"):
            assert done[name].generated_tokens == reference(model, p, NEW), name
            assert done[name].prompt_ids == p
    if budget > 15:
        assert counters["forks"] == 10
    else:
        assert 0 < counters["forks"] < 10, "some forked, some found no slot"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [6, 8, 9, 30])
def test_sampled_children_do_not_depend_on_forking(length: int, ahead: bool, m1: Any, serve: Serve) -> None:
    requests = [(prompt(length, 3), {"num_return_sequences": 4, "seed": 11}), (prompt(7, 5), {})]
    forked, counters = serve(m1, requests, SAMPLED, ahead, max_batch_tokens=9)
    assert counters["forks"] == 3
    queued, counters = serve(m1, requests, SAMPLED, ahead, max_requests_per_batch=1)
    assert counters["forks"] == 0
    preempted, counters = serve(m1, requests, SAMPLED, ahead, num_blocks=13, allow_block_sharing=False)
    assert counters["preemptions"] > 0
    tokens = {name: o.generated_tokens for name, o in forked.items()}
    assert {name: o.generated_tokens for name, o in queued.items()} == tokens
    assert {name: o.generated_tokens for name, o in preempted.items()} == tokens
    family = [tokens["0"], *(tokens[f"0__child#{i}"] for i in range(3))]
    assert len({tuple(t) for t in family}) == 4, "children differ from each other"
    again, _ = serve(m1, [(prompt(length, 3), {"num_return_sequences": 2, "seed": 11})], SAMPLED)
    assert again["0__child#0"].generated_tokens == tokens["0__child#0"], "whatever the number of children"


def test_children_share_the_prompts_blocks(m1: Any, serve: Serve) -> None:
    """A prompt of 40 tokens and four children fit a pool that could not hold it twice."""
    done, counters = serve(m1, [(prompt(40, 1), {"num_return_sequences": 5})], num_blocks=30)
    assert counters["forks"] == 4
    assert counters["preemptions"] == 0
    assert {o.cached_tokens for name, o in done.items() if "child" in name} == {39}
    assert counters["prefill_tokens"] == 40 + 4, "each child computes the last prompt token"


def test_processors_logprobs_and_streaming_of_children(m1: Any, serve: Serve) -> None:
    options = {"num_return_sequences": 3, "repetition_penalty": 1.4, "top_logprobs": 2, "record_timestamps": True}
    done, counters = serve(
        m1, [(prompt(9, 2), {**options, "streaming": True})], per_request_processors=True, return_logprobs=True
    )
    assert counters["forks"] == 2
    tokens = {tuple(o.generated_tokens) for o in done.values()}
    assert len(tokens) == 1
    for output in done.values():
        assert len(output.logprobs) == len(output.top_logprobs) == len(output.timestamps) == NEW
        assert output.logprobs == pytest.approx(done["0"].logprobs, abs=1e-5)
        assert output.created_time <= output.lifespan[0] <= output.timestamps[0] <= output.lifespan[1]
