"""The sampling settings of a step's rows: gathered on the host, brought to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.sampling.filters import NO_TOP_P, FilterGroup, RandomRows
from engine.sampling.history import HostHistory, pad_histories, resolve_in_flight
from engine.sampling.packing import Pack
from engine.sampling.params import SamplingParams
from engine.sampling.processors import BiasRows, Conditions, HistoryRows
from engine.sampling.random import stream_key
from engine.sampling.rules import BiasRules

if TYPE_CHECKING:
    from engine.requests import Request


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step's sampled rows ask for beyond the argmax.

    Attributes:
        processed: [s] int64 rows whose logits are changed, None if all are. The rows of the other fields count among
            these.
        num_processed: ``s``.
        bias, history, random: what is done to them, in this order; None = nothing.
        raw: [r] int64 rows of the step whose log probabilities are the model's own; None if none.
        top: [t] int64 rows of the step that ask for the most likely tokens; None if none.
        top_counts: how many of them, by row of the step.
    """

    processed: torch.Tensor | None
    num_processed: int
    bias: BiasRows | None
    history: HistoryRows | None
    random: RandomRows | None
    raw: torch.Tensor | None
    top: torch.Tensor | None
    top_counts: tuple[int, ...]


class _Slot:
    """What is kept of a request from step to step."""

    __slots__ = ("history", "request", "rules")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.history = HostHistory()
        self.rules = BiasRules.of(request.sampling, request.eos_token_ids)


class SettingsGatherer:
    """Gathers the settings of steps; keeps what does not change, by slot.

    Args:
        device: where the settings go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, _Slot] = {}

    def gather(
        self, requests: Sequence[Request], ends: Sequence[int], vocab_size: int, last_token: torch.Tensor
    ) -> StepSettings | None:
        """Settings of a step, None if every row is plain.

        Args:
            requests: of the sampled rows.
            ends: tokens before the one to be sampled, by row.
            last_token: [slots] int32, by slot the token that may not have reached the host.
        """
        params = [request.sampling for request in requests]
        if all(p.plain for p in params):
            return None
        pack = Pack()
        processed = [i for i, p in enumerate(params) if p.processed]
        rows = [(requests[i], params[i], ends[i]) for i in processed]
        bias = _Bias(pack)
        history = _History(pack)
        random = _Random(pack, vocab_size)
        for row, (request, p, end) in enumerate(rows):
            if p.biased or p.counts_tokens:
                kept = self._slot(request)
                if p.counts_tokens or kept.rules.longest_prefix:
                    bias.add_conditional(row, history.add(row, kept, p, end), kept.rules)
                if p.biased:
                    bias.add(row, *kept.rules.at(end - request.num_prompt))
            if not p.greedy:
                random.add(row, p, stream_key(p.seed, end - request.num_prompt))
        where = None if len(processed) == len(requests) else pack.ints(processed)
        raw = [i for i, p in enumerate(params) if p.logprobs_mode == "raw" and p.processed]
        top = [i for i, p in enumerate(params) if p.top_logprobs]
        raw_at, top_at = pack.ints(raw), pack.ints(top)
        bias.pack()
        history.pack(vocab_size)
        random.pack()
        pack.upload(self._device)
        return StepSettings(
            processed=None if where is None else pack[where],
            num_processed=len(processed),
            bias=bias.rows(),
            history=history.rows(last_token),
            random=random.rows(),
            raw=pack[raw_at] if raw else None,
            top=pack[top_at] if top else None,
            top_counts=tuple(p.top_logprobs for p in params) if top else (),
        )

    def _slot(self, request: Request) -> _Slot:
        kept = self._slots.get(request.slot)
        if kept is None or kept.request is not request:
            kept = self._slots[request.slot] = _Slot(request)
        return kept


class _Bias:
    """Bias of the rows, the unconditional first."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._rows: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._conditional: list[tuple[int, int, BiasRules]] = []
        self._at: dict[str, int] = {}

    def add(self, row: int, tokens: np.ndarray, values: np.ndarray) -> None:
        if len(tokens):
            self._rows.append(np.full(len(tokens), row, dtype=np.int64))
            self._tokens.append(tokens)
            self._values.append(values)

    def add_conditional(self, row: int, owner: int, rules: BiasRules) -> None:
        if rules.conditional:
            self._conditional.append((row, owner, rules))

    def pack(self) -> None:
        conditions = [(row, owner, c) for row, owner, rules in self._conditional for c in rules.conditional]
        if conditions:
            longest = max(rules.longest_prefix for _, _, rules in self._conditional)
            prefixes = np.zeros((len(conditions), longest), dtype=np.int64)
            for line, (_, _, condition) in zip(prefixes, conditions, strict=True):
                line[: len(condition.prefix)] = condition.prefix[::-1]
            self._at["prefixes"] = self._pack.add(prefixes)
            self._at["lengths"] = self._pack.ints([len(c.prefix) for _, _, c in conditions])
            self._at["owners"] = self._pack.ints([owner for _, owner, _ in conditions])
            self._rows.append(np.array([row for row, _, _ in conditions], dtype=np.int64))
            self._tokens.append(np.array([c.token for _, _, c in conditions], dtype=np.int64))
            self._values.append(np.array([c.value for _, _, c in conditions], dtype=np.float32))
        if self._rows:
            for name, parts in (("rows", self._rows), ("tokens", self._tokens), ("values", self._values)):
                self._at[name] = self._pack.add(np.concatenate(parts))

    def rows(self) -> BiasRows | None:
        if not self._rows:
            return None
        got = {name: self._pack[at] for name, at in self._at.items()}
        conditions = None
        if "owners" in got:
            conditions = Conditions(got["owners"], got["prefixes"], got["lengths"])
        return BiasRows(got["rows"], got["tokens"], got["values"], conditions)


class _History:
    """The rows that look back."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._rows: list[int] = []
        self._slots: list[int] = []
        self._params: list[SamplingParams] = []
        self._windows: list[tuple[np.ndarray, int]] = []
        self._generated_from: list[int] = []
        self._at: dict[str, int] = {}

    def add(self, row: int, kept: _Slot, params: SamplingParams, end: int) -> int:
        """Take a row and no more of its tokens than its rules look at; returns its number."""
        request = kept.request
        if params.repetition_penalty != 1 or params.no_repeat_ngram_size:
            start = 0
        else:
            start = max(0, end - kept.rules.longest_prefix)
            if params.counts_tokens:  # presence and frequency look at the output only
                start = min(start, request.num_prompt)
        self._rows.append(row)
        self._slots.append(request.slot)
        self._params.append(params)
        self._windows.append((kept.history.follow(request.tokens)[start:end], end - start))
        self._generated_from.append(max(0, request.num_prompt - start))
        return len(self._rows) - 1

    def pack(self, vocab_size: int) -> None:
        if not self._rows:
            return
        pack, params = self._pack, self._params
        tokens, lengths = pad_histories(self._windows, vocab_size)
        self._at = {
            "rows": pack.ints(self._rows),
            "slots": pack.ints(self._slots),
            "lengths": pack.add(lengths.astype(np.int64)),
            "generated_from": pack.ints(self._generated_from),
            "ngram": pack.ints([p.no_repeat_ngram_size for p in params]),
            "repetition": pack.floats([p.repetition_penalty for p in params]),
            "presence": pack.floats([p.presence_penalty for p in params]),
            "frequency": pack.floats([p.frequency_penalty for p in params]),
            "tokens": pack.add(tokens),
        }

    def rows(self, last_token: torch.Tensor) -> HistoryRows | None:
        if not self._rows:
            return None
        got = {name: self._pack[at] for name, at in self._at.items()}
        return HistoryRows(
            rows=got["rows"],
            tokens=resolve_in_flight(got["tokens"], last_token[got["slots"]]),
            lengths=got["lengths"],
            generated_from=got["generated_from"],
            repetition=got["repetition"],
            presence=got["presence"],
            frequency=got["frequency"],
            ngram=got["ngram"],
            penalizes_all=any(p.repetition_penalty != 1 for p in self._params),
            penalizes_generated=any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in self._params),
            largest_ngram=max(p.no_repeat_ngram_size for p in self._params),
        )


class _Random:
    """The rows that sample; those with a top-k and those with a top-p alone are filtered apart, since the latter need
    the whole vocabulary sorted."""

    def __init__(self, pack: Pack, vocab_size: int) -> None:
        self._pack, self._vocab = pack, vocab_size
        self._rows: list[int] = []
        self._params: list[SamplingParams] = []
        self._keys: list[int] = []
        self._groups: list[tuple[list[int], int]] = []
        self._at: dict[str, int] = {}
        self._group_at: list[int] = []

    def add(self, row: int, params: SamplingParams, key: int) -> None:
        self._rows.append(row)
        self._params.append(params)
        self._keys.append(key)

    def pack(self) -> None:
        if not self._rows:
            return
        pack, params = self._pack, self._params
        top_k = [p.top_k if 0 < p.top_k < self._vocab else self._vocab for p in params]
        narrow = [i for i, k in enumerate(top_k) if k < self._vocab]
        wide = [i for i, k in enumerate(top_k) if k == self._vocab and params[i].top_p < 1]
        self._groups = [(rows, max(top_k[i] for i in rows)) for rows in (narrow, wide) if rows]
        self._group_at = [pack.ints(rows) for rows, _ in self._groups]
        self._at = {
            "rows": pack.ints(self._rows),
            "top_k": pack.ints(top_k),
            "keys": pack.ints(self._keys),
            "temperature": pack.floats([p.temperature for p in params]),
            "top_p": pack.floats([p.top_p if p.top_p < 1 else NO_TOP_P for p in params]),
            "min_p": pack.floats([p.min_p for p in params]),
        }

    def rows(self) -> RandomRows | None:
        if not self._rows:
            return None
        got = {name: self._pack[at] for name, at in self._at.items()}
        filters = tuple(
            FilterGroup(None if len(rows) == len(self._rows) else self._pack[at], widest)
            for (rows, widest), at in zip(self._groups, self._group_at, strict=True)
        )
        return RandomRows(
            **got, num_rows=len(self._rows), filters=filters, uses_min_p=any(p.min_p > 0 for p in self._params)
        )
