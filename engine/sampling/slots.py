"""Sampling settings of the running requests as arrays by slot, so that a step picks its rows' without a Python loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.sampling.history import HistoryTable
from engine.sampling.params import SamplingParams
from engine.sampling.random import seed_key
from engine.sampling.rules import BiasRules

SLOT = np.dtype(
    [
        ("processed", "?"),  # the logits are changed before the token is chosen
        ("random", "?"),
        ("biased", "?"),
        ("looks_back", "?"),
        ("raw", "?"),  # log probabilities of the model's own logits, where they differ from the processed ones
        ("top", "i8"),  # most likely tokens asked for
        ("num_prompt", "i8"),
        ("seed_key", "i8"),
        ("from_prompt", "?"),  # looks back at all tokens
        ("from_output", "?"),  # looks back at the generated ones
        ("longest_prefix", "i8"),  # looks back at so many, for conditional bias
        ("top_k", "i8"),  # 0 = off
        ("ngram", "i8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
    ]
)
"""What is kept of a slot's owner."""


class SampledRequest(Protocol):
    """What sampling needs of a request; its attributes are those of `engine.requests.Request`."""

    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    tokens: list[int]
    num_prompt: int
    slot: int


class SlotTable:
    """Follows the owners of slots.

    Attributes:
        history: tokens of those that look back.
    """

    def __init__(self) -> None:
        self.history = HistoryTable()
        self._settings = np.zeros(0, dtype=SLOT)
        self._owners: list[SampledRequest | None] = []
        self._rules: list[BiasRules | None] = []

    def settings(self, requests: Sequence[SampledRequest], slots: Sequence[int]) -> np.ndarray:
        """[rows] records of `SLOT`."""
        for slot, request in zip(slots, requests, strict=True):
            if slot >= len(self._owners) or self._owners[slot] is not request:
                self._take(slot, request)
        return self._settings[slots]

    def rules(self, slot: int) -> BiasRules:
        """Of the owner of a slot whose record is ``biased``."""
        rules = self._rules[slot]
        assert rules is not None
        return rules

    def _take(self, slot: int, request: SampledRequest) -> None:
        if slot >= len(self._owners):
            more = 2 * slot + 8 - len(self._owners)
            self._settings = np.concatenate((self._settings, np.zeros(more, dtype=SLOT)))
            self._owners += [None] * more
            self._rules += [None] * more
        p = request.sampling
        rules = BiasRules.of(p, request.eos_token_ids) if p.biased else None
        self._owners[slot], self._rules[slot] = request, rules
        self._settings[slot] = _record(p, request.num_prompt, rules.longest_prefix if rules else 0)
        if self._settings[slot]["looks_back"]:
            self.history.restart(slot)


def _record(p: SamplingParams, num_prompt: int, longest_prefix: int) -> np.ndarray:
    record = np.zeros((), dtype=SLOT)
    record["processed"], record["random"], record["biased"] = p.processed, not p.greedy, p.biased
    record["looks_back"] = p.counts_tokens or longest_prefix > 0
    record["raw"] = p.logprobs_mode == "raw" and p.processed
    record["top"], record["num_prompt"], record["longest_prefix"] = p.top_logprobs, num_prompt, longest_prefix
    record["from_prompt"] = p.repetition_penalty != 1 or p.no_repeat_ngram_size > 0
    record["from_output"] = p.presence_penalty != 0 or p.frequency_penalty != 0
    record["seed_key"] = seed_key(p.seed)
    record["top_k"], record["ngram"] = p.top_k, p.no_repeat_ngram_size
    record["temperature"], record["top_p"], record["min_p"] = p.temperature, p.top_p, p.min_p
    record["repetition"] = p.repetition_penalty
    record["presence"], record["frequency"] = p.presence_penalty, p.frequency_penalty
    return record
