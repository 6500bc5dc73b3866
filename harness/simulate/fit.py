"""From measured step logs to a step-time model.

A step's log says when its scheduling began, how long it took until it was launched, and when its tokens were on the
host. With async batching steps overlap: a step owns the device from the end of the one before it, or from its launch if
that was later. On a GPU the device's own clock says how long it ran; a step that was launched kernel by kernel and was
done as soon as its last launch says only how long launching takes, so the work's time is fitted to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from engine.runner.buckets import mixed_decodes
from harness.metrics.observations import BoolArray, FloatArray
from harness.report.read import Results
from harness.simulate.client_times import delivery_ms, floats, longest_prompt, send_ms, wake_ms
from harness.simulate.nnls import nonnegative_least_squares
from harness.simulate.setup import attention_of, setting
from harness.simulate.step_time import KINDS, Cost, Kind, ModelError, Residual, StepTimeModel

MIN_STEPS = 5
"""A kind with fewer measured steps has no cost of its own."""
STALL = 5.0
"""Times its usual length: such a step has met something that no work explains (a compilation)."""
_SEGMENTS = 6
_PER_SEGMENT = 10  # distinct token counts a segment of the piecewise part needs at least
_ROUNDS = 8
_RANKS = 200  # of the spread that is kept
_KEPT = 0.998  # share of the steps whose spread is kept: the slowest 2 of 1000 are stated, not repeated
_OUTLASTS = 1.1  # a device that ran for less than so many times the host's part waited for it, or the host for it
_SOON = 0.2  # of a step's time on the device: from its last launch to its end, if launching bounds it


@dataclass(frozen=True)
class Observed:
    """Steps of one run, in the order of their ends, as [steps] arrays in ms and units of work."""

    prefill: BoolArray
    graph: BoolArray
    tokens: FloatArray
    rows: FloatArray
    prefills: FloatArray  # rows with prompt tokens
    places: FloatArray  # decode rows that a replayed step with prompt tokens has room for; 0 for any other
    keys: FloatArray
    pairs: FloatArray  # NaN where the log does not say
    host: FloatArray
    device: FloatArray
    between: FloatArray  # until the next turn; NaN where the engine may have waited for requests
    timed: BoolArray  # whether `device` is the device's time alone, as it is on a GPU
    tail: FloatArray  # from the launch (or the end of the step before) to the tokens on the host

    @classmethod
    def read(cls, steps: pd.DataFrame, overlapped: bool, max_rows: int) -> Observed:
        """The steps of one run's table.

        Args:
            overlapped: whether the engine plans a step while the one before it runs (async batching).
            max_rows: ``max_requests_per_batch``, which the sizes of captured steps depend on.
        """
        known = steps.dropna(subset=["t_s", "step_ms", "schedule_ms", "kind", "kv_tokens"])
        start = floats(known["t_s"]) * 1000
        order = np.argsort(start, kind="stable")
        known, start = known.iloc[order], start[order]
        host, end = floats(known["schedule_ms"]), start + floats(known["step_ms"])
        before = np.concatenate(([-np.inf], end[:-1]))
        decode, prefill_tokens = floats(known["decode_rows"]), floats(known["prefill_tokens"])
        prefill_rows = floats(known["prefill_rows"])
        graph = np.nan_to_num(floats(known["graph"])) > 0
        tokens = decode + prefill_tokens + np.nan_to_num(floats(known["padded_rows"]))
        between = np.full(len(known), np.nan)
        ahead = 2 if overlapped else 1
        if len(known) > ahead:
            gap = start[ahead:] - end[:-ahead]
            # Whoever decodes was there all the time, so the loop never waited.
            between[:-ahead] = np.where((decode[ahead:] > 0) & (gap >= 0), gap, np.nan)
        tail = np.maximum(end - np.maximum(before, start + host), 1e-6)
        # Where steps overlap the host sees a step's end only when it looks for it, after its next launch: the events on
        # the device tell better. A step that is replayed with none before it has its own launch between its events, and
        # there the host, which waits for it, tells better; unless the step before gave no token, since then the host
        # waits for both.
        gpu = floats(known["gpu_ms"])
        timed = np.isfinite(gpu)
        queued = np.concatenate(([False], ~timed[:-1]))
        events = timed & (overlapped | ~graph | queued)
        return cls(
            prefill=prefill_rows > 0,
            graph=graph,
            tokens=tokens,
            rows=decode + prefill_rows,
            prefills=prefill_rows,
            places=_places(graph & (prefill_rows > 0), tokens, decode, max_rows),
            keys=floats(known["kv_tokens"]),
            pairs=np.where(prefill_rows > 0, floats(known["prefill_pairs"]), 0.0),
            host=host,
            device=np.where(events, np.maximum(np.nan_to_num(gpu), 1e-6), tail),
            between=between,
            timed=timed,
            tail=tail,
        )

    @classmethod
    def joined(cls, parts: Sequence[Observed]) -> Observed:
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))

    def of_kind(self, kind: Kind) -> BoolArray:
        """[steps] which are of a kind."""
        found: BoolArray = (self.prefill == kind.prefill) & (self.graph == kind.graph)
        return found

    @property
    def launch_bound(self) -> BoolArray:
        """[steps] that were done as soon as they were launched, kernel by kernel: the device waited for the host, and
        its time is not that of the work."""
        found: BoolArray = self.outlasted & (self.tail <= _SOON * self.device)
        return found

    @property
    def blocked(self) -> BoolArray:
        """[steps] whose launch waited for the device (a full queue, an allocation): its time is not that of the host's
        work."""
        found: BoolArray = self.outlasted & (self.tail > _SOON * self.device)
        return found

    @property
    def outlasted(self) -> BoolArray:
        """[steps] launched kernel by kernel for about as long as the device ran: which of the two waited for the other
        cannot always be told, since an end is only seen after the next launch. The work took no longer than that."""
        found: BoolArray = self.timed & ~self.graph & (self.device <= _OUTLASTS * self.host)
        return found


def fit_steps(results: Results, run_ids: Iterable[str]) -> StepTimeModel:
    """Fit to the step logs of some runs of this project's engine.

    Raises:
        ModelError: they have no step log, or none that tells a decode step, or are of several models or devices.
    """
    chosen, notes = _of_one_engine(results, list(run_ids))
    parts, untold = [], Counter[str]()
    for run_id in chosen:
        steps = results.of_run("steps", run_id)
        if steps.empty:
            notes.append(f"{run_id} has no step log and was left out")
            continue
        lengths = np.concatenate([floats(steps[name]) for name in ("step_ms", "schedule_ms")])
        if (lengths < 0).any() or np.isinf(lengths).any():
            raise ModelError(f"{run_id} has steps of negative or infinite length: its step log is damaged")
        untold.update(_untold(results, run_id, steps))
        overlapped = bool(setting(results, run_id, "use_async_batching", False))
        parts.append(Observed.read(steps, overlapped, int(setting(results, run_id, "max_requests_per_batch", 1))))
    notes += [f"{count} of {len(chosen)} runs: {what}" for what, count in untold.items()]
    if not parts:
        raise ModelError(f"no step log in {results.directory}: measure with engine=ours, whose runs keep one")
    seen = Observed.joined(parts)
    if not len(seen.host):
        raise ModelError(f"no step in {results.directory} has all of its times: the step logs are damaged")
    if np.isnan(seen.pairs).any():
        notes.append("the step logs do not tell prompt attention apart (older version): long prompts cost by the token")
        seen = replace(seen, pairs=np.zeros_like(seen.pairs))
    timed = bool(seen.timed.mean() > 0.5)  # not all: a step without a token has no events
    seen = replace(seen, device=np.where(seen.timed, seen.device, np.nan) if timed else seen.tail)
    counts = {kind: int(seen.of_kind(kind).sum()) for kind in KINDS}
    kinds = [kind for kind, count in counts.items() if count >= MIN_STEPS]
    notes += [
        f"only {count} steps of kind '{kind}': too few for a cost of its own, others stand for it"
        for kind, count in counts.items()
        if 0 < count < MIN_STEPS
    ]
    if not kinds:
        raise ModelError(f"too few steps in {results.directory} ({len(seen.host)}): measure a run with more requests")
    if timed:  # what is known of a start and of a work is enough for both together
        starts, works = {k.graph for k in kinds}, {k.prefill for k in kinds}
        kinds = [kind for kind in KINDS if kind.graph in starts and kind.prefill in works]
    host: dict[Kind, Cost] = {}
    device: dict[Kind, Cost] = {}
    residuals: list[Residual] = []
    for kind in kinds:
        here = seen.of_kind(kind) if counts[kind] >= MIN_STEPS else seen.graph == kind.graph
        free = here & ~seen.blocked
        told = free if free.sum() >= MIN_STEPS else here
        host[kind], residual = cost_of(kind, seen, regress("host", seen, seen.host, told, constant=timed))
        residuals.append(residual)
    # By the device's clock a forward pass of so many tokens over so many keys takes what it takes, whatever kind of
    # step it is in and however it was started: what was measured in one kind holds for the others.
    free = seen.timed & ~seen.outlasted
    told = free if free.sum() >= MIN_STEPS else seen.timed
    shared = regress("device", seen, seen.device, told) if timed else None
    for kind in kinds:
        of_work = shared or regress("device", seen, seen.device, seen.of_kind(kind))
        device[kind], residual = cost_of(kind, seen, of_work)
        residuals.append(residual)
    known = ~np.isnan(seen.between)
    if known.sum() >= MIN_STEPS:
        of_turns = regress("between", seen, seen.between, known, constant=True)
        between, residual = cost_of(Kind(False, False), seen, of_turns)
        residuals.append(residual)
    else:
        between = Cost(0.0)
        notes.append("no two steps in a row: the time between steps is taken as none")
    runs = results.runs[results.runs["run_id"].isin(chosen)]
    source = {
        "runs": chosen,
        "steps": len(seen.host),
        "attention": attention_of(results, chosen[0]),
        **{name: sorted({str(v) for v in runs[name].dropna()}) for name in ("model", "device")},
    }
    bound = seen.launch_bound
    delivery, delivery_row = delivery_ms(results, chosen)
    sending = send_ms(results, chosen)
    return StepTimeModel(
        host,
        device,
        between,
        delivery,
        tuple(residuals),
        source,
        tuple(notes),
        launch_tail_ms=None if not timed else float(np.quantile(seen.tail[bound], 0.1)) if bound.any() else 0.0,
        send_ms=sending,
        wake_ms=wake_ms(results, chosen, sending),
        delivery_row_ms=delivery_row,
        longest_prompt=longest_prompt(results, chosen),
    )


def _of_one_engine(results: Results, run_ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """The runs that can teach one model of step times, and what is to be said of those that are left out: all compute
    attention as the first does.

    Raises:
        ModelError: they are of several models or devices.
    """
    runs = results.runs[results.runs["run_id"].isin(run_ids)]
    for name in ("model", "device"):
        if len(found := sorted({str(v) for v in runs[name].dropna()})) > 1:
            raise ModelError(
                f"runs of several {name}s ({', '.join(found)}) have no step times in common: name those of one"
            )
    attention = {run_id: attention_of(results, run_id) for run_id in run_ids}
    planned = attention[run_ids[0]] if run_ids else None
    kept = [run_id for run_id in run_ids if attention[run_id] == planned]
    if len(kept) == len(run_ids):
        return kept, []
    return kept, [f"{len(run_ids) - len(kept)} runs with other attention than {planned} are left out of the fit"]


def _untold(results: Results, run_id: str, steps: pd.DataFrame) -> list[str]:
    """What a run's tables do not hold of what a model is fitted to (older version, a table that was left out)."""
    on_gpu = str(results.runs.set_index("run_id").loc[run_id, "device"]).startswith("cuda")
    found = []
    if steps["graph"].isna().all():
        found.append("the step log does not tell replayed steps from launched ones: all count as launched")
    if on_gpu and steps["gpu_ms"].isna().all():
        found.append("the step log has no times of the device: launching and computing are not told apart")
    if results.of_run("requests", run_id).empty:
        found.append("the table of requests is missing: sending, waking and delivering count as nothing")
    return found


@dataclass(frozen=True)
class Regression:
    """What a part of the steps costs: ``columns @ weights`` is fitted to ``ms``.

    Attributes:
        here: [all steps] which are among them.
        knots: where the piecewise part bends.
        places: numbers of places at which it jumps.
        weights: constant, by segment, row, key, pair and row with prompt tokens, then by jump.
    """

    part: str
    here: BoolArray
    ms: FloatArray
    columns: FloatArray
    knots: FloatArray
    places: FloatArray
    weights: FloatArray


def regress(part: str, seen: Observed, ms: FloatArray, here: BoolArray, constant: bool = False) -> Regression:
    """Relative errors count; steps far off (a pause, a first launch) count less (Huber).

    Args:
        here: [steps] which are fitted to.
        constant: whether only the number of rows counts, not what is computed for them.
    """
    y = ms[here]
    names = ("tokens", "rows", "keys", "pairs", "prefills", "places")
    tokens, rows, keys, pairs, prefills, room = (getattr(seen, name)[here] for name in names)
    knots = np.zeros(1) if constant else _knots(tokens, seen.graph[here] & (part == "device"))
    work, planned = 0.0 if constant else 1.0, 1.0 if part == "host" else 0.0
    # Room for more decode rows is other attention kernels: the smallest room measured is part of what tokens cost.
    sizes, counts = np.unique(room[room > 0], return_counts=True)
    places = np.empty(0) if constant else sizes[1:][counts[1:] >= MIN_STEPS]
    columns = [np.ones_like(y), *(work * s for s in _segments(tokens, knots)), rows, work * keys, work * pairs]
    columns.append(planned * prefills)
    columns += [(room >= jump).astype(np.float64) for jump in places]
    a = np.stack(columns, axis=1)
    size = np.maximum(np.abs(a).mean(axis=0), 1e-12)
    scale = np.maximum(y, 0.1 * float(np.median(y)) + 1e-9)
    weights = np.ones_like(y)
    for _ in range(_ROUNDS):
        x = nonnegative_least_squares(a / size * (weights / scale)[:, None], y * weights / scale) / size
        error = np.abs(a @ x - y) / scale
        limit = 1.5 * max(float(np.median(error)), 1e-3)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(error, 1e-12)))
    return Regression(part, here, y, a, knots, places, x)


def cost_of(kind: Kind, seen: Observed, found: Regression) -> tuple[Cost, Residual]:
    """A kind's cost and its residual. Spread and residual are those of the kind's own steps, unless too few are."""
    here, knots, x = found.here, found.knots, found.weights
    between = found.part == "between"  # of any kind
    own = np.ones(len(found.ms), dtype=bool) if between else seen.of_kind(kind)[here]
    told = own if own.sum() >= MIN_STEPS else np.ones_like(own)
    y, fitted = found.ms[told], np.maximum(found.columns[told] @ x, 1e-6)
    ratio = y / fitted
    kept = ratio <= min(float(np.quantile(ratio, _KEPT)), STALL * float(np.median(ratio)))
    ranks = np.quantile(ratio[kept], (np.arange(_RANKS) + 0.5) / _RANKS)
    # The mean must be right, whatever the robust fit made of it: throughput is a sum of step times.
    total = float(y[kept].sum() / max(float((fitted[kept]).sum()) * float(ranks.mean()), 1e-12))
    n = len(knots)
    slopes = x[1 : 1 + n].copy()
    slopes[-1] = beyond(knots, slopes, float(seen.tokens[here].max()))
    row, key, pair, prefill = (float(v) * total for v in x[1 + n : 5 + n])
    cost = Cost(
        float(x[0]) * total,
        tuple(float(k) for k in knots),
        tuple(float(v) * total for v in slopes),
        row,
        key,
        pair,
        prefill,
        tuple(int(p) for p in found.places),
        tuple(float(v) * total for v in x[5 + n :]),
        tuple(float(r) for r in ranks),
    )
    off = np.abs(fitted * total * cost.mean_ratio - y) / np.maximum(y, 1e-9)
    same = seen.of_kind(kind)
    # Of a shared cost every step tells what was measured, whatever its kind.
    measured = same if found.part == "host" and same.any() else here
    largest = (int(getattr(seen, name)[measured].max()) for name in ("tokens", "rows", "keys"))
    spilled = float(y[~kept].sum() / y.sum()) if y.sum() > 0 else 0.0
    errors = float(np.median(off)), float(np.quantile(off, 0.9))
    return cost, Residual(found.part, str(kind), int(own.sum()), *errors, spilled, *largest)


def _places(replayed: BoolArray, tokens: FloatArray, decodes: FloatArray, max_rows: int) -> FloatArray:
    """[steps] decode rows that replayed steps with prompt tokens have room for; 0 where it is none."""
    found = np.zeros(len(tokens))
    for i in np.flatnonzero(replayed):
        rooms = mixed_decodes(int(tokens[i]), max_rows)
        found[i] = next((room for room in rooms if room >= decodes[i]), rooms[-1])
    return found


def _knots(tokens: FloatArray, replayed: BoolArray) -> FloatArray:
    """Where the piecewise part bends: at every captured size that was replayed often enough, since each has kernels of
    its own; else at quantiles of the sizes seen, so that each segment rests on several of them."""
    sizes, counts = np.unique(tokens[replayed], return_counts=True)
    sizes = sizes[counts >= MIN_STEPS]
    distinct = np.unique(tokens[~replayed])
    segments = max(1, min(_SEGMENTS, len(distinct) // _PER_SEGMENT))
    inner = np.quantile(distinct, np.arange(1, segments) / segments) if segments > 1 else np.empty(0)
    return np.unique(np.concatenate(([0.0], inner, sizes)))


def beyond(knots: FloatArray, slopes: FloatArray, largest: float) -> float:
    """Slope from the last knot on: that of the upper half of the sizes seen. One size more or less says nothing: its
    kernels may be better suited than its neighbour's."""

    def total(tokens: float) -> float:
        return float((np.clip(tokens - knots, 0.0, np.append(np.diff(knots), np.inf)) * slopes).sum())

    return (total(largest) - total(largest / 2)) / (largest / 2)


def _segments(tokens: FloatArray, knots: FloatArray) -> list[FloatArray]:
    ends = np.concatenate((knots[1:], [np.inf]))
    return [np.clip(tokens - low, 0.0, high - low) for low, high in zip(knots, ends, strict=True)]
