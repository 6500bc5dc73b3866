"""Steps of the sampler without an engine, and a twin of it that goes row by row and token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest
import torch

from engine.requests import Request
from engine.sampling import Choice, Sampler, SamplingParams

History = tuple[Sequence[int], Sequence[int]]
"""Prompt and output so far."""


def _choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    index: int | Sequence[int] = 0,
    histories: Sequence[History] | None = None,
    eos: Sequence[frozenset[int]] | None = None,
    in_flight: bool = False,
    return_logprobs: bool = False,
) -> Choice:
    """The tokens that requests with ``params`` get as their ``index``-th one (one number for all rows, or one a row).

    Args:
        logits: a row for each, or one for all.
        histories: what the requests look back on, for settings that do; states the index as well.
        in_flight: the last token of each output has not reached the host.
    """
    n = len(params)
    indices = [index] * n if isinstance(index, int) else list(index)
    if histories is not None:
        indices = [len(output) for _, output in histories]
    requests, ends = [], []
    last_token = torch.full((n,), 10**6)
    for slot, (p, i) in enumerate(zip(params, indices, strict=True)):
        prompt, output = histories[slot] if histories else ([0], [])
        request = Request.create(f"r{slot}", prompt, 10**6, eos[slot] if eos else frozenset(), p)
        request.slot = slot
        known = list(output)
        if in_flight and known:
            last_token[slot] = known.pop()
        request.tokens.extend(known)
        requests.append(request)
        ends.append(len(prompt) + i)
    if len(logits) == 1:
        logits = logits.expand(n, -1)
    choice = Sampler(torch.device("cpu"), return_logprobs).choose(logits, requests, ends, torch.arange(n), last_token)
    assert last_token.tolist() == choice.tokens.tolist()
    return choice


@pytest.fixture(scope="session")
def choose() -> Callable[..., Choice]:
    return _choose


@pytest.fixture(scope="session")
def draw() -> Callable[..., list[int]]:
    """``n`` draws at consecutive token indices of one request's stream."""

    def run(logits: torch.Tensor, params: SamplingParams, n: int) -> list[int]:
        return _choose(logits, [params] * n, range(n)).tokens.tolist()

    return run


MINUS_INF = float("-inf")


def _processed_row(
    logits: torch.Tensor,
    p: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Collection[int] = (),
) -> torch.Tensor:
    """One row of logits after everything ``p`` asks for."""
    row = [float(x) for x in logits]
    history = [*prompt, *output]
    bias = dict.fromkeys(range(len(row)), 0.0)
    for ids, value in [*p.sequence_bias, *(((i,), b) for i, b in p.logit_bias)]:
        if history[len(history) - len(ids) + 1 :] == list(ids[:-1]) and len(ids) - 1 <= len(history):
            bias[ids[-1]] += value
    row = [x + bias[i] for i, x in enumerate(row)]
    for token in set(history):
        row[token] = row[token] * p.repetition_penalty if row[token] < 0 else row[token] / p.repetition_penalty
    for token in set(output):
        row[token] -= p.frequency_penalty * list(output).count(token) + p.presence_penalty
    n = p.no_repeat_ngram_size
    if n:
        last = tuple(history[len(history) - n + 1 :])
        for start in range(len(history) - n + 1):
            if tuple(history[start : start + n - 1]) == last:
                row[history[start + n - 1]] = MINUS_INF
    for word in p.bad_words_ids:
        if len(word) == 1 and word[0] in eos:
            continue
        if len(word) - 1 <= len(history) and history[len(history) - len(word) + 1 :] == list(word[:-1]):
            row[word[-1]] = MINUS_INF
    if len(output) < p.min_new_tokens:
        for token in eos:
            row[token] = MINUS_INF
    for token in p.suppress_tokens:
        row[token] = MINUS_INF
    if not output:
        for token in p.begin_suppress_tokens:
            row[token] = MINUS_INF
    kept = torch.tensor(row)
    return kept if p.greedy else _filtered_row(kept / p.temperature, p.top_k, p.top_p, p.min_p)


def _filtered_row(row: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Top-k, top-p and min-p of one row."""
    kept = row.clone()
    if 0 < top_k < len(row):
        kept[kept < sorted(row.tolist(), reverse=True)[top_k - 1]] = MINUS_INF
    if top_p < 1:
        probabilities = kept.softmax(-1)
        reached = 0.0
        for token in probabilities.argsort(descending=True, stable=True).tolist():
            if reached >= top_p:
                kept[token] = MINUS_INF
            reached += probabilities[token].item()
    if min_p > 0:
        probabilities = kept.softmax(-1)
        kept[probabilities < min_p * probabilities.max()] = MINUS_INF
    return kept


@pytest.fixture(scope="session")
def processed_row() -> Callable[..., torch.Tensor]:
    return _processed_row


@pytest.fixture(scope="session")
def filtered_row() -> Callable[..., torch.Tensor]:
    return _filtered_row
