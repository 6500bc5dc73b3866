"""How long a step takes: a cost for the host's part, one for the device's, and what lies between two turns.

A cost is a sum of what a step does, each with a weight that is never negative: a constant, query tokens (padding
included; piecewise linear, since a larger product of matrices is cheaper by the token), rows, keys read, pairs of a
prompt's query and key, rows with prompt tokens (of the host's part: planning one takes several times as long as a row
that decodes), and the decode rows that a captured step with prompt tokens has room for. Costs are fitted
(:mod:`harness.simulate.fit`) for each kind of step apart: with or without prompt tokens, replayed from a captured graph
or launched kernel by kernel.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.metrics.observations import FloatArray

FORMAT = 3
"""Of the model's JSON file."""


class ModelError(ValueError):
    """A step-time model that cannot be fitted, read or asked; one line that says what to do."""


class Kind(NamedTuple):
    """What kind of step it is: whether it computes prompt tokens, and whether a captured graph was replayed."""

    prefill: bool
    graph: bool

    def __str__(self) -> str:
        return f"{'prefill' if self.prefill else 'decode'}, {'replayed' if self.graph else 'launched'}"

    @classmethod
    def parse(cls, text: str) -> Kind:
        prefill, graph = text.split(", ")
        return cls(prefill == "prefill", graph == "replayed")


KINDS = tuple(Kind(prefill, graph) for prefill in (False, True) for graph in (False, True))


class Work(NamedTuple):
    """What a step does: query tokens with padding, rows without, keys read by all rows, pairs of prompt rows, decode
    rows that the captured step has room for beside prompt tokens (0 for any other step), rows with prompt tokens."""

    tokens: int
    rows: int
    keys: int
    pairs: int
    places: int = 0
    prefills: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step as a function of its work.

    Attributes:
        base_ms, row_ms, key_ms, pair_ms, prefill_ms: constant, and by unit of work.
        knots, slopes: ascending token counts from 0, and ms a token behind each.
        places, place_ms: ascending numbers of places, and the ms that so many or more cost beyond fewer.
        ratios: measured / fitted at evenly spaced ranks, ascending: the spread that the work does not explain.
    """

    base_ms: float
    knots: tuple[float, ...] = (0.0,)
    slopes: tuple[float, ...] = (0.0,)
    row_ms: float = 0.0
    key_ms: float = 0.0
    pair_ms: float = 0.0
    prefill_ms: float = 0.0
    places: tuple[int, ...] = ()
    place_ms: tuple[float, ...] = ()
    ratios: tuple[float, ...] = (1.0,)

    @property
    def mean_ratio(self) -> float:
        return float(np.mean(self.ratios))

    def of_tokens(self, tokens: float) -> float:
        """The part that query tokens cost, in ms."""
        last = bisect_right(self.knots, tokens) - 1
        total = 0.0
        for i in range(last):
            total += (self.knots[i + 1] - self.knots[i]) * self.slopes[i]
        return total + (tokens - self.knots[last]) * self.slopes[last]

    def fitted_ms(self, work: Work) -> float:
        """The fit, before any spread."""
        return (
            self.base_ms
            + self.of_tokens(work.tokens)
            + self.row_ms * work.rows
            + self.key_ms * work.keys
            + self.pair_ms * work.pairs
            + self.prefill_ms * work.prefills
            + sum(ms for places, ms in zip(self.places, self.place_ms, strict=True) if work.places >= places)
        )


@dataclass(frozen=True, slots=True)
class Residual:
    """How well a cost describes the steps it was fitted to.

    Attributes:
        part, kind: which cost.
        steps: how many of its kind it was fitted to; 0 if other kinds stand for it.
        median_error, p90_error: of |fitted - measured| / measured, as a share.
        trimmed_share: share of the measured time in steps beyond the spread that is kept (the slowest ones).
        max_tokens, max_rows, max_keys: largest step seen; beyond it the fit is extrapolated.
    """

    part: str
    kind: str
    steps: int
    median_error: float
    p90_error: float
    trimmed_share: float
    max_tokens: int
    max_rows: int
    max_keys: int


@dataclass(frozen=True)
class StepTimeModel:
    """Step times of one engine on one device with one model.

    Attributes:
        host: from the start of scheduling until the step is launched, by kind.
        device: from then (or from the end of the step before, if that is later) until its tokens are on the host.
        between: from there until the next turn of the loop begins: outputs handed over, requests taken in.
        delivery_ms, delivery_row_ms: from the tokens on the host to a client that can use them: constant, and by row
            of the step, since the outputs of a step are handed over one after the other.
        residuals: of every cost.
        source: what it was fitted to (run ids, model, device).
        notes: what the logs did not hold, in words.
        launch_tail_ms: from a step's last launch to its tokens on the host, if the device has nothing else to do: a
            step launched kernel by kernel begins with its first launch and ends no earlier. None where the device's
            time was not told apart from that of launching: it then begins after the launch.
        send_ms: what sending a request takes: so long until the engine can see it and the client can send the next.
        wake_ms: from a request that an idle engine can see until it begins its step.
        longest_prompt: tokens of the longest prompt among the measured ones; None if that is not known.
    """

    host: Mapping[Kind, Cost]
    device: Mapping[Kind, Cost]
    between: Cost
    delivery_ms: float
    residuals: tuple[Residual, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    launch_tail_ms: float | None = None
    send_ms: float = 0.0
    wake_ms: float = 0.0
    delivery_row_ms: float = 0.0
    longest_prompt: int | None = None

    def kind_for(self, kind: Kind) -> Kind:
        """The fitted kind that stands for ``kind``: itself, or the same work started the other way.

        Raises:
            ModelError: no such step was ever measured.
        """
        for candidate in (kind, Kind(kind.prefill, not kind.graph)):
            if candidate in self.device:
                return candidate
        which = "with" if kind.prefill else "without"
        raise ModelError(
            f"the step logs hold too few steps {which} prompt tokens to learn from, so none can be predicted: fit to "
            "runs with more requests"
        )

    def done_ms(self, kind: Kind, free_ms: float, begun_ms: float, launched_ms: float, device_ms: float) -> float:
        """When a step is done that takes the device ``device_ms``.

        Args:
            free_ms: when the device has done all before it.
            begun_ms, launched_ms: when the host began with the step and when it had launched it.
        """
        if self.launch_tail_ms is None or kind.graph:
            return max(free_ms, launched_ms) + device_ms
        return max(max(free_ms, begun_ms) + device_ms, launched_ms + self.launch_tail_ms)

    def late_s(self, rows: int) -> float:
        """From the tokens of a step on the host to clients that can use them, in s."""
        return (self.delivery_ms + self.delivery_row_ms * rows) / 1000

    def unseen_prompts(self, prompt_tokens: Sequence[int]) -> str | None:
        """A sentence about prompts longer than any measured one; None if there are none.

        What attention over a long prompt costs cannot be told from short ones, where it is lost in what a token costs.
        """
        longest = self.longest_prompt
        longer = [tokens for tokens in prompt_tokens if longest is not None and tokens > longest]
        if not longer:
            return None
        share = len(longer) / len(prompt_tokens)
        shown = "less than 1%" if share < 0.01 else f"{share:.0%}"
        return (
            f"{shown} of the prompts are longer ({max(longer):,} tokens at most) than any that was measured "
            f"({longest:,}): what attention over them costs is a guess, and a low one as a rule; measure a run with "
            "prompts as long"
        )

    def largest(self) -> dict[Kind, tuple[int, int, int]]:
        """By kind, most tokens, rows and keys of a measured step; beyond them the fit is extrapolated."""
        return {
            Kind.parse(r.kind): (r.max_tokens, r.max_rows, r.max_keys) for r in self.residuals if r.part == "device"
        }

    def to_json(self) -> str:
        """The model as a JSON document."""
        content = {
            "format": FORMAT,
            "host": {str(kind): asdict(cost) for kind, cost in self.host.items()},
            "device": {str(kind): asdict(cost) for kind, cost in self.device.items()},
            "between": asdict(self.between),
            "delivery_ms": self.delivery_ms,
            "residuals": [asdict(r) for r in self.residuals],
            "source": dict(self.source),
            "notes": list(self.notes),
            "launch_tail_ms": self.launch_tail_ms,
            "send_ms": self.send_ms,
            "wake_ms": self.wake_ms,
            "delivery_row_ms": self.delivery_row_ms,
            "longest_prompt": self.longest_prompt,
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> StepTimeModel:
        """Read :meth:`to_json`.

        Raises:
            ModelError: it is none, or of another version.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ModelError(f"step-time model of format {content['format']}, not {FORMAT}: fit it again")
            parts = {
                part: {Kind.parse(kind): _cost(values) for kind, values in content[part].items()}
                for part in ("host", "device")
            }
            return cls(
                parts["host"],
                parts["device"],
                _cost(content["between"]),
                content["delivery_ms"],
                tuple(Residual(**values) for values in content["residuals"]),
                content["source"],
                tuple(content["notes"]),
                content["launch_tail_ms"],
                content["send_ms"],
                content["wake_ms"],
                content["delivery_row_ms"],
                content.get("longest_prompt"),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ModelError(
                f"not a step-time model ({type(error).__name__}: {error}): fit one with cb-plan"
            ) from error

    @classmethod
    def read(cls, path: Path) -> StepTimeModel:
        """Read a file that :meth:`to_json` made."""
        return cls.from_json(path.read_text(encoding="utf-8"))


def _cost(values: Mapping[str, Any]) -> Cost:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Cost(**given)


class Spread:
    """Draws the ratios of steps: at random if there is a source of randomness, else their mean."""

    _AHEAD = 4096

    def __init__(self, rng: np.random.Generator | None) -> None:
        self._rng = rng
        self._drawn: FloatArray = np.empty(0)
        self._at = 0

    def draw(self, cost: Cost, mean: float) -> float:
        """Ratio of one step; ``mean`` is the cost's :attr:`Cost.mean_ratio`, kept by the caller for speed."""
        if self._rng is None:
            return mean
        rank = self._ahead(1)[0]
        self._at += 1
        return cost.ratios[int(rank * len(cost.ratios))]

    def peek(self, costs: Sequence[Cost], count: int) -> list[list[float]]:
        """By cost, the ratios that ``count`` rounds of draws, one of each cost in turn, are going to give."""
        if self._rng is None:
            return [[cost.mean_ratio] * count for cost in costs]
        ranks = self._ahead(len(costs) * count).reshape(count, len(costs))
        ratios = [np.array(cost.ratios) for cost in costs]
        return [r[(ranks[:, i] * len(r)).astype(np.int64)].tolist() for i, r in enumerate(ratios)]

    def skip(self, count: int) -> None:
        """Take ``count`` draws as done."""
        if self._rng is not None:
            self._at += count

    def _ahead(self, count: int) -> FloatArray:
        if self._at + count > len(self._drawn):
            assert self._rng is not None
            self._drawn = np.concatenate((self._drawn[self._at :], self._rng.random(max(count, self._AHEAD))))
            self._at = 0
        return self._drawn[self._at : self._at + count]
