"""The sampling settings of a step's rows: gathered on the host, brought to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling.filters import FilterGroup, RandomRows
from engine.sampling.history import resolve_in_flight
from engine.sampling.packing import Pack, Packed
from engine.sampling.processors import BiasRows, Conditions, HistoryRows
from engine.sampling.random import stream_keys
from engine.sampling.slots import SampledRequest, SlotTable


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step's sampled rows ask for beyond the argmax.

    Attributes:
        processed: [s] int64 rows whose logits are changed, None if all are. The rows of the other fields count among
            these.
        bias, history, random: what is done to them, in this order; None = nothing.
        raw: [r] int64 rows of the step whose log probabilities are the model's own; None if none.
        top: [t] int64 rows of the step that ask for the most likely tokens; None if none.
        top_counts: how many of them, by row of the step.
    """

    processed: torch.Tensor | None
    bias: BiasRows | None
    history: HistoryRows | None
    random: RandomRows | None
    raw: torch.Tensor | None
    top: torch.Tensor | None
    top_counts: tuple[int, ...]

    @property
    def changes_logits(self) -> bool:
        """Whether any row's logits are changed other than by temperature and filters."""
        return self.bias is not None or (self.history is not None and self.history.changes_logits)


class SettingsGatherer:
    """Gathers the settings of steps.

    Args:
        device: where the settings go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = SlotTable()

    def gather(
        self,
        requests: Sequence[SampledRequest],
        ends: Sequence[int] | np.ndarray,
        vocab_size: int,
        last_token: torch.Tensor,
    ) -> StepSettings | None:
        """Settings of a step, None if every row is plain.

        Args:
            requests: of the sampled rows.
            ends: tokens before the one to be sampled, by row.
            last_token: [slots] int64, by slot the token that may not have reached the host.
        """
        if all(request.sampling.plain for request in requests):
            return None
        slots = [request.slot for request in requests]
        every = self._table.settings(requests, slots)
        rows = np.flatnonzero(every["processed"])
        own = every[rows]
        mine = [requests[row] for row in rows.tolist()]
        own_ends = np.asarray(ends, dtype=np.int64)[rows]
        generated = own_ends - own["num_prompt"]
        pack = Pack()
        where = None if len(rows) == len(requests) else pack.add(rows)
        raw, top = _add_rows(pack, every["raw"]), _add_rows(pack, every["top"] > 0)
        back = np.flatnonzero(own["looks_back"])
        bias = self._bias(pack, own, mine, generated, back)
        history = self._history(pack, own, mine, own_ends, back, vocab_size)
        random = _random(pack, own, generated, vocab_size)
        pack.upload(self._device)
        return StepSettings(
            processed=where() if where else None,
            bias=bias() if bias else None,
            history=history(last_token) if history else None,
            random=random() if random else None,
            raw=raw() if raw else None,
            top=top() if top else None,
            top_counts=tuple(every["top"].tolist()) if top else (),
        )

    def _bias(
        self, pack: Pack, own: np.ndarray, requests: Sequence[SampledRequest], generated: np.ndarray, back: np.ndarray
    ) -> Callable[[], BiasRows] | None:
        """Bias of the rows, the unconditional first."""
        biased = np.flatnonzero(own["biased"])
        if len(biased) == 0:
            return None
        rules = [self._table.rules(requests[row].slot) for row in biased.tolist()]
        now = [r.at(index) for r, index in zip(rules, generated[biased].tolist(), strict=True)]
        owner = dict(zip(back.tolist(), range(len(back)), strict=True))
        conditions = [(row, c) for row, r in zip(biased.tolist(), rules, strict=True) for c in r.conditional]
        if not conditions and not any(len(ids) for ids, _ in now):
            return None
        rows = np.repeat(biased, [len(ids) for ids, _ in now])
        packed_rows = pack.add(np.concatenate((rows, _ints(row for row, _ in conditions))))
        tokens = pack.add(np.concatenate((*(ids for ids, _ in now), _ints(c.token for _, c in conditions))))
        conditional_values = np.array([c.value for _, c in conditions], dtype=np.float32)
        values = pack.add(np.concatenate((*(values for _, values in now), conditional_values)))
        if not conditions:
            return lambda: BiasRows(packed_rows(), tokens(), values(), None)
        prefixes = np.zeros((len(conditions), max(len(c.prefix) for _, c in conditions)), dtype=np.int64)
        for line, (_, condition) in zip(prefixes, conditions, strict=True):
            line[: len(condition.prefix)] = condition.prefix[::-1]
        packed_prefixes = pack.add(prefixes)
        lengths = pack.add(_ints(len(c.prefix) for _, c in conditions))
        owners = pack.add(_ints(owner[row] for row, _ in conditions))
        return lambda: BiasRows(packed_rows(), tokens(), values(), Conditions(owners(), packed_prefixes(), lengths()))

    def _history(
        self,
        pack: Pack,
        own: np.ndarray,
        requests: Sequence[SampledRequest],
        ends: np.ndarray,
        back: np.ndarray,
        vocab_size: int,
    ) -> Callable[[torch.Tensor], HistoryRows] | None:
        """The rows that look back, with no more of their tokens than their rules look at."""
        if len(back) == 0:
            return None
        own, ends = own[back], ends[back]
        slots = _ints(requests[row].slot for row in back.tolist())
        for row, slot in zip(back.tolist(), slots.tolist(), strict=True):
            self._table.history.follow(slot, requests[row].tokens)
        starts = np.maximum(ends - own["longest_prefix"], 0)
        starts = np.where(own["from_output"], np.minimum(starts, own["num_prompt"]), starts)
        starts = np.where(own["from_prompt"], 0, starts)
        tokens = pack.add(self._table.history.windows(slots, starts, ends, vocab_size))
        packed_rows, packed_slots, lengths = pack.add(back), pack.add(slots), pack.add(ends - starts)
        generated_from = pack.add(np.maximum(own["num_prompt"] - starts, 0))
        repetition, presence = pack.add(own["repetition"]), pack.add(own["presence"])
        frequency, ngram = pack.add(own["frequency"]), pack.add(own["ngram"])
        return lambda last_token: HistoryRows(
            rows=packed_rows(),
            tokens=resolve_in_flight(tokens(), last_token[packed_slots()]),
            lengths=lengths(),
            generated_from=generated_from(),
            repetition=repetition(),
            presence=presence(),
            frequency=frequency(),
            ngram=ngram(),
            penalizes_all=bool((own["repetition"] != 1).any()),
            penalizes_generated=bool(own["from_output"].any()),
            largest_ngram=int(own["ngram"].max()),
        )


def _random(pack: Pack, own: np.ndarray, generated: np.ndarray, vocab_size: int) -> Callable[[], RandomRows] | None:
    """The rows that sample; those with a top-k and those with a top-p alone are sorted apart, since the latter need the
    whole vocabulary sorted."""
    rows = np.flatnonzero(own["random"])
    if len(rows) == 0:
        return None
    own = own[rows]
    top_k = np.where((own["top_k"] > 0) & (own["top_k"] < vocab_size), own["top_k"], vocab_size)
    narrow = top_k < vocab_size
    groups = []
    for members in (narrow, ~narrow & (own["top_p"] < 1)):
        if members.any():
            some = None if members.all() else pack.add(np.flatnonzero(members))
            groups.append((some, int(top_k[members].max())))
    packed_rows, packed_top_k = pack.add(rows), pack.add(top_k)
    keys = pack.add(stream_keys(own["seed_key"], generated[rows]))
    temperature, min_p = pack.add(own["temperature"]), pack.add(own["min_p"])
    top_p = pack.add(own["top_p"])
    return lambda: RandomRows(
        rows=packed_rows(),
        temperature=temperature(),
        top_p=top_p(),
        min_p=min_p(),
        top_k=packed_top_k(),
        keys=keys(),
        num_rows=len(rows),
        sorts=tuple(FilterGroup(some() if some else None, widest) for some, widest in groups),
        filtered=bool(groups) or bool((own["min_p"] > 0).any()),
    )


def _add_rows(pack: Pack, chosen: np.ndarray) -> Packed | None:
    rows = np.flatnonzero(chosen)
    return pack.add(rows) if len(rows) else None


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)
