"""Greedy choice under each logits processor, and under all of them, is that of ``model.generate`` on each prompt alone
with the same GenerationConfig, in fp32: as shared settings and per request beside plain rows, in chunks, after
preemption, and with the newest token still on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus

Models = Callable[[str, str], Any]
Reference = Callable[[Any, Sequence[int], int], list[int]]
NEW = 14
PROMPTS = [[5, 9, 11, 2, 8, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8], [60, 61, 60, 61, 60, 61, 60, 61, 60]]


def settings_of(plain: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Settings that change the plain outputs: what they forbid or favour is taken from those."""
    third = sorted({tokens[2] for tokens in plain})
    pairs = [[tokens[3], tokens[4]] for tokens in plain]
    triples = [[PROMPTS[0][-1], plain[0][0], plain[0][1]], [plain[1][5], plain[1][6], plain[1][7]]]
    alone: dict[str, dict[str, Any]] = {
        "repetition": {"repetition_penalty": 1.4},
        "reward": {"repetition_penalty": 0.6},
        "unigram": {"no_repeat_ngram_size": 1},
        "bigram": {"no_repeat_ngram_size": 2},
        "trigram": {"no_repeat_ngram_size": 3, "repetition_penalty": 0.6},  # a reward, so that something repeats
        "bad words": {"bad_words_ids": [[t] for t in third]},
        "bad sequences": {"bad_words_ids": [*pairs, *triples, [1] * 30]},
        "min new": {"min_new_tokens": 6, "eos_token_id": third},
        "min length": {"min_length": 15, "eos_token_id": third},
        "suppress": {"suppress_tokens": third},
        "begin suppress": {"begin_suppress_tokens": sorted({tokens[0] for tokens in plain})},
        "bias": {"sequence_bias": {(t,): -6.0 for t in third} | {(7,): 1.5}},
        "sequence bias": {"sequence_bias": {tuple(p): -8.0 for p in pairs} | {(pairs[0][0], 9): 4.0, (3,): 0.5}},
    }
    return {
        **alone,
        "all": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [*pairs, [third[0]]],
            "min_new_tokens": 5,
            "eos_token_id": [*third, 30, 31, 32],
            "suppress_tokens": third[:2],
            "begin_suppress_tokens": [plain[1][0]],
            "sequence_bias": {(third[-1],): 2.0, tuple(pairs[1]): 1.0, (plain[2][5],): -3.0},
        },
    }


NAMES = list(settings_of([[i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7] for i in range(4)]))
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def model(tiny_model: Models) -> Any:
    return tiny_model("tiny-llama", "eager")


@pytest.fixture(scope="module")
def plain(model: Any, reference: Reference) -> list[list[int]]:
    return [reference(model, p, NEW) for p in PROMPTS]


@pytest.fixture(scope="module")
def alone(model: Any, plain: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """What ``model.generate`` gives under the named settings, prompt by prompt."""
    known: dict[str, list[list[int]]] = {}

    def run(name: str) -> list[list[int]]:
        if name not in known:
            config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, **settings_of(plain)[name])
            known[name] = []
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
                known[name].append(out[0, len(prompt) :].tolist())
            assert any(k != p for k, p in zip(known[name], plain, strict=True)), f"{name} changes nothing"
        return known[name]

    return run


@pytest.fixture
def serve(model: Any) -> Iterator[Callable[..., tuple[list[list[int]], ContinuousBatchingManager]]]:
    """Run (prompt, request settings) pairs; outputs and the manager. ``ahead``: launch a step before the last one is
    collected, as async batching does on a GPU."""
    managers = []

    def run(
        requests: Sequence[tuple[list[int], dict[str, Any]]],
        generation: dict[str, Any] | None = None,
        ahead: bool = False,
        **config: Any,
    ) -> tuple[list[list[int]], ContinuousBatchingManager]:
        base = {"page_size": 4, "num_blocks": 60, "max_batch_tokens": 6, "safety_margin": 0.0}
        manager = ContinuousBatchingManager(
            model,
            GenerationConfig(max_new_tokens=NEW, **(generation or {})),
            ContinuousBatchingConfig(auto_switch_to_flash=False, **{**base, **config}),
        )
        managers.append(manager)
        for i, (prompt, sampling) in enumerate(requests):
            manager.add_request(prompt, request_id=str(i), **sampling)
        manager.warmup()
        core = manager._core
        assert core is not None
        core._depth = int(ahead)
        manager.start()
        done = {o.request_id: o for o in manager}
        assert {o.status for o in done.values()} == {RequestStatus.FINISHED}, done
        return [done[str(i)].generated_tokens for i in range(len(requests))], manager

    yield run
    for manager in managers:
        manager.destroy()


@pytest.fixture
def unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of each step's histories only the device knew."""
    from engine.sampling import settings

    counts: list[int] = []
    resolve = settings.resolve_in_flight

    def count(tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        counts.append(int((tokens < 0).sum()))
        return resolve(tokens, last)

    monkeypatch.setattr(settings, "resolve_in_flight", count)
    return counts


@each
def test_shared_settings(name: str, alone: Any, plain: list[list[int]], serve: Any) -> None:
    """A budget of 6 tokens is below most prompts, so they are computed in chunks, beside decoding rows."""
    tokens, manager = serve([(p, {}) for p in PROMPTS], settings_of(plain)[name])
    assert tokens == alone(name)
    assert any(s.kind == "mixed" for s in manager.step_log)
    if name == "trigram":
        assert tokens != alone("reward")


@each
def test_per_request_beside_plain_rows(name: str, alone: Any, plain: list[list[int]], serve: Any) -> None:
    settings = dict(settings_of(plain)[name])
    generation = {"min_length": settings.pop("min_length")} if "min_length" in settings else {}
    requests = [(p, s) for p in PROMPTS for s in (settings, {"eos_token_id": -1})]
    if generation:  # counts the prompt, so it is no setting of a request
        requests = [(p, settings) for p in PROMPTS]
    tokens, manager = serve(requests, generation, per_request_processors=True, max_batch_tokens=9)
    if generation:
        assert tokens == alone(name)
    else:
        assert tokens[::2] == alone(name)
        assert tokens[1::2] == plain
        assert max(s.decode_rows for s in manager.step_log) > 2, "rows of both kinds in one step"


@each
def test_after_preemption_and_ahead_of_the_host(
    name: str, alone: Any, plain: list[list[int]], serve: Any, unknown_tokens: list[int]
) -> None:
    tokens, manager = serve([(p, {}) for p in PROMPTS], settings_of(plain)[name], num_blocks=8, ahead=True)
    assert tokens == alone(name)
    assert manager.counters()["preemptions"] > 0
    looks_back = {"repetition_penalty", "no_repeat_ngram_size", "sequence_bias", "bad_words_ids"}
    if name not in ("bad words", "bias") and looks_back & settings_of(plain)[name].keys():
        assert sum(unknown_tokens) > 0, "the newest token was on the device only"


def test_every_request_its_own(alone: Any, plain: list[list[int]], serve: Any, unknown_tokens: list[int]) -> None:
    """All kinds of settings in the same steps."""
    cases = [n for n in NAMES if n != "min length"]
    requests = [(PROMPTS[i % 4], settings_of(plain)[n]) for i, n in enumerate(cases)]
    for ahead in (False, True):
        tokens, manager = serve(requests, ahead=ahead, per_request_processors=True, max_batch_tokens=40)
        assert tokens == [alone(n)[i % 4] for i, n in enumerate(cases)]
        assert max(s.decode_rows for s in manager.step_log) > 6
        assert (sum(unknown_tokens) > 0) is ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_presence_and_frequency_over_the_output(ahead: bool, model: Any, plain: list[list[int]], serve: Any) -> None:
    """OpenAI's definition, by a plain loop over full forward passes; transformers has neither."""
    requests = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {},
    ]
    expected = []
    for prompt, penalties in zip(PROMPTS, requests, strict=True):
        tokens = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            for token in set(tokens[len(prompt) :]):
                count = tokens[len(prompt) :].count(token)
                logits[token] -= count * penalties.get("frequency_penalty", 0) + penalties.get("presence_penalty", 0)
            tokens.append(int(logits.argmax()))
        expected.append(tokens[len(prompt) :])
    got, _ = serve(list(zip(PROMPTS, requests, strict=True)), ahead=ahead, per_request_processors=True)
    assert got == expected
    assert got[3] == plain[3]
    assert any(g != p for g, p in zip(got, plain, strict=True))


def test_logit_bias_is_a_sequence_bias_of_single_tokens(plain: list[list[int]], serve: Any) -> None:
    bias = {plain[0][2]: -100.0, 7: 1.5}
    requests = [
        (PROMPTS[0], {"logit_bias": bias}),
        (PROMPTS[0], {"logit_bias": {str(k): v for k, v in bias.items()}}),
        (PROMPTS[0], {"sequence_bias": {(k,): v for k, v in bias.items()}}),
    ]
    tokens, _ = serve(requests, per_request_processors=True)
    assert tokens[0] == tokens[1] == tokens[2] != plain[0]


def test_max_length_counts_the_prompt(model: Any, plain: list[list[int]]) -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=16, auto_switch_to_flash=False)
    from engine import generate_batch

    outputs = generate_batch(model, PROMPTS[:1], GenerationConfig(max_length=10), config)
    assert outputs["req_0"].generated_tokens == plain[0][:3]
    refused = generate_batch(model, PROMPTS[:1], GenerationConfig(max_length=7), config)["req_0"]
    assert "leave nothing of max_length=7" in refused.error


def test_stop_sequences(plain: list[list[int]], serve: Any, model: Any) -> None:
    """They need no per_request_processors, stay in the output, begin in the output, and come after min_new_tokens."""
    first, second = plain[1][4], plain[1][5]
    end = next(i for i in range(1, NEW) if plain[1][i - 1 : i + 1] == [first, second]) + 1
    crossing = [PROMPTS[1][-1], plain[1][0]]
    for ahead in (False, True):
        tokens, _ = serve(
            [
                (PROMPTS[1], {"stop_sequences": [[96, 95], [first, second]]}),
                (PROMPTS[1], {"stop_sequences": [crossing]}),
                (PROMPTS[1], {"stop_sequences": [[plain[1][0]]]}),
                (PROMPTS[1], {}),
            ],
            ahead=ahead,
        )
        assert tokens[0] == plain[1][:end]
        assert tokens[1][:NEW] == plain[1] or plain[1][:2] == crossing
        assert tokens[2] == plain[1][:1]
        assert tokens[3] == plain[1]
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=16, auto_switch_to_flash=False)
    from engine import generate_batch

    stop = {"stop_sequences": [[plain[1][0]], [plain[1][4]]]}
    generation = GenerationConfig(max_new_tokens=NEW, min_new_tokens=3, eos_token_id=96)
    (output,) = generate_batch(model, [PROMPTS[1]], generation, config, **stop).values()
    later = next(i for i in range(2, NEW) if plain[1][i] in (plain[1][0], plain[1][4])) + 1
    assert (output.generated_tokens, output.finish_reason) == (plain[1][:later], "stop")
