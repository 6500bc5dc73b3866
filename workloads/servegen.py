"""Workloads of a ServeGen pool (Xiang et al. 2025, arXiv:2505.09999): production clients, each with its own habits.

A pool is a folder with two files a client. ``chunk-N-trace.csv`` has no header and a line a window (of ten minutes):
start in seconds, requests a second, coefficient of variation, ``Gamma`` or ``Weibull`` (nothing in a silent window) and
that distribution's shape and scale. ``chunk-N-dataset.json`` maps starts of longer windows (six hours) to
``input_tokens`` and ``output_tokens``, each a Python dict of probabilities by length as a string.

Requests are drawn from it, client by client: gaps of the recorded family and shape, scaled to the mean of the recorded
rate; lengths from the last window that has any. Prompt and output lengths are independent, because a pool holds
their distributions only.
"""

from __future__ import annotations

import ast
import bisect
import csv
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workloads.config import ServeGenWorkload
from workloads.content import Content
from workloads.replay import check, replayed
from workloads.streams import stream
from workloads.traces.rows import MAX_COUNT, SourceText, Trace, TraceError, TraceRow, ordered, read_text

MAX_REQUESTS = 5_000_000
"""Most requests that are drawn; a window of a whole pool can hold hundreds of millions."""

_SHAPES = {"Gamma": (1e-4, 1e4), "Weibull": (0.01, 100.0)}
_FIELDS = ("input_tokens", "output_tokens")


def servegen_content(cfg: ServeGenWorkload, *, vocab_size: int, seed: int, special_ids: Collection[int]) -> Content:
    """Requests of the clients of ``cfg.path`` between ``window_start_s`` and ``window_end_s`` of the recording."""
    check_servegen(cfg)
    return replayed(draw_trace(read_pool(cfg.path), cfg, seed), cfg, vocab_size, seed, special_ids)


def check_servegen(cfg: ServeGenWorkload) -> None:
    """ValueError for settings that mean nothing."""
    check(cfg)
    if cfg.window_end_s is None:
        raise ValueError("workload.window_end_s is null: a pool spans weeks, so give the end of the part to draw from")
    if cfg.rate is not None and not (math.isfinite(cfg.rate) and cfg.rate > 0):
        raise ValueError(
            f"workload.rate is {cfg.rate}: give requests per second above 0, or null for the recorded rates"
        )


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals of a client from ``start_s`` to ``end_s``: mean rate in requests/s, family of gaps and its shape."""

    start_s: float
    end_s: float
    rate: float
    family: str
    shape: float


@dataclass(frozen=True)
class Lengths:
    """Lengths with cumulative probabilities."""

    tokens: Sequence[int]
    cumulative: Sequence[float]

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self.tokens, cum_weights=self.cumulative)[0]


class Client:
    """One client of a pool. Its length windows are parsed when they are asked for: a pool has thousands."""

    def __init__(self, name: str, windows: Sequence[Window], source: SourceText) -> None:
        self.name = name
        self.windows = windows
        self._path = source.path
        self._texts = dict(_length_windows(source))
        self._starts = sorted(self._texts)
        self._parsed: dict[float, tuple[Lengths, Lengths]] = {}

    def lengths_at(self, t: float) -> tuple[Lengths, Lengths] | None:
        """Prompt and output lengths of the last window that began by ``t`` and has any; None if none has."""
        position = bisect.bisect_right(self._starts, t) - 1
        if position < 0:
            return None
        start = self._starts[position]
        if start not in self._parsed:
            prompt, output = (_lengths(text, self._path, start) for text in self._texts[start])
            self._parsed[start] = (prompt, output)
        return self._parsed[start]


@dataclass(frozen=True)
class Pool:
    """The clients of a folder that have both files.

    Attributes:
        without_lengths: clients that have arrivals only.
        sha256: over the names and bytes of all files read.
    """

    path: str
    clients: tuple[Client, ...]
    without_lengths: int
    sha256: str

    @property
    def notes(self) -> tuple[str, ...]:
        """What is left out, one sentence each."""
        if not self.without_lengths:
            return ()
        total = self.without_lengths + len(self.clients)
        return (f"{self.path}: {self.without_lengths} of {total} clients are left out: they have no dataset.json",)


def read_pool(path: str | None) -> Pool:
    """Read a pool's folder. TraceError names file, line and column."""
    folder = Path(path) if path else None
    if folder is None or not folder.is_dir():
        raise TraceError(
            f"workload.path is {path!r}: give the folder of a ServeGen pool (with chunk-N-trace.csv and "
            "chunk-N-dataset.json), workload.path=…"
        )
    numbers = sorted(int(m[1]) for p in folder.iterdir() if (m := re.fullmatch(r"chunk-(\d+)-trace\.csv", p.name)))
    clients, missing, digest = [], 0, hashlib.sha256()
    for n in numbers:
        dataset = folder / f"chunk-{n}-dataset.json"
        if not dataset.is_file():
            missing += 1
            continue
        trace, lengths = (read_text(str(p), "ServeGen client") for p in (folder / f"chunk-{n}-trace.csv", dataset))
        digest.update(f"{n} {trace.sha256} {lengths.sha256}\n".encode())
        clients.append(Client(str(n), _windows(trace), lengths))
    if not clients:
        raise TraceError(f"{folder}: no client with both chunk-N-trace.csv and chunk-N-dataset.json")
    return Pool(str(folder), tuple(clients), missing, digest.hexdigest())


def draw_trace(pool: Pool, cfg: ServeGenWorkload, seed: int) -> Trace:
    """Rows from ``cfg.window_start_s`` to ``window_end_s``, on the recording's own time scale.

    With ``cfg.rate`` the rates of all clients are multiplied by one number, so that all together have that rate on
    average over the window; their shares and their changes over time stay.
    """
    start, end = cfg.window_start_s, cfg.window_end_s
    assert end is not None  # check_servegen
    active: list[tuple[Client, list[Window]]] = []
    silent = 0
    for client in pool.clients:
        inside = [w for w in _clipped(client.windows, start, end) if w.rate > 0]
        usable = [w for w in inside if client.lengths_at(w.start_s) is not None]
        silent += len(inside) - len(usable)
        active.append((client, usable))
    expected = sum(w.rate * (w.end_s - w.start_s) for _, windows in active for w in windows)
    if expected == 0:
        last = max(w.end_s for c in pool.clients for w in c.windows)
        raise ValueError(f"{pool.path}: no client sends between {start:g} s and {end:g} s (it spans 0 to {last:g} s)")
    factor = 1.0 if cfg.rate is None else cfg.rate * (end - start) / expected
    if expected * factor > MAX_REQUESTS:
        raise ValueError(
            f"{pool.path}: about {expected * factor:.0f} requests between {start:g} s and {end:g} s, more than "
            f"{MAX_REQUESTS}: bring window_end_s nearer or set workload.rate"
        )
    rows = []
    for client, windows in active:
        arrivals, sizes = stream(seed, f"client_arrivals:{client.name}"), stream(seed, f"client_lengths:{client.name}")
        for t in _arrivals(windows, factor, arrivals):
            lengths = client.lengths_at(t)
            assert lengths is not None  # only windows with lengths are active
            prompt, output = (each.draw(sizes) for each in lengths)
            rows.append(TraceRow(round(t * 1e9), prompt, output, line=0))
    if not rows:
        raise ValueError(
            f"{pool.path}: none of the {expected * factor:.2g} requests expected between {start:g} s and {end:g} s was "
            "drawn: widen the window or set workload.rate"
        )
    notes = list(pool.notes)
    if silent:
        notes.append(f"{pool.path}: {silent} windows with arrivals but without lengths are left out")
    source = SourceText(pool.path, "", pool.sha256)
    drawn = ordered(source, sorted(rows, key=lambda r: r.t_ns), origin_ns=0)
    return Trace(drawn.path, drawn.rows, drawn.empty_rows, 0, drawn.sha256, further_notes=tuple(notes))


def _clipped(windows: Sequence[Window], start: float, end: float) -> list[Window]:
    """The parts of ``windows`` between ``start`` and ``end``."""
    return [
        Window(max(w.start_s, start), min(w.end_s, end), w.rate, w.family, w.shape)
        for w in windows
        if w.start_s < end and w.end_s > start
    ]


def _arrivals(windows: Sequence[Window], factor: float, rng: random.Random) -> Iterator[float]:
    """Times of a renewal process with unit gaps on a clock that advances by one an expected request.

    Its first gap is what is left of one that began before (the distribution of the remaining life in equilibrium), so
    that the mean rate is exact from the first second on however bursty a client is.
    """
    left = math.nan  # of the current gap, in expected requests; not drawn yet
    for w in windows:
        rate, t = w.rate * factor, w.start_s
        if math.isnan(left):
            left = _remaining(w.family, w.shape, rng)
        while (due := t + left / rate) < w.end_s:
            yield due
            t, left = due, _gap(w.family, w.shape, rng)
        left -= (w.end_s - t) * rate


def _gap(family: str, shape: float, rng: random.Random) -> float:
    """A gap of mean 1."""
    if family == "Gamma":
        return rng.gammavariate(shape, 1 / shape)
    return rng.weibullvariate(1 / math.gamma(1 + 1 / shape), shape)


def _remaining(family: str, shape: float, rng: random.Random) -> float:
    """What is left of the gap of mean 1 in which one arrives at random: a uniform part of a length-biased one."""
    if family == "Gamma":
        biased = rng.gammavariate(shape + 1, 1 / shape)
    else:
        biased = rng.gammavariate(1 + 1 / shape, 1.0) ** (1 / shape) / math.gamma(1 + 1 / shape)
    return rng.random() * biased


def _windows(source: SourceText) -> list[Window]:
    """The lines of a trace csv; a window lasts until the next, the last one as long as the one before it."""
    lines = [(n, fields) for n, fields in enumerate(csv.reader(source.text.splitlines()), start=1) if fields]
    parsed = []
    for n, fields in lines:
        if len(fields) != 6:
            raise TraceError.at(
                source.path, n, "start", "6 fields: start, rate, cv, distribution, shape, scale", fields
            )
        start, rate, shape = (
            _number(fields[i], source.path, n, name) for i, name in ((0, "start"), (1, "rate"), (4, "shape"))
        )
        family = fields[3].strip()
        if family not in _SHAPES and (family or rate):
            raise TraceError.at(source.path, n, "distribution", " or ".join(_SHAPES), family)
        if rate:
            low, high = _SHAPES[family]
            if not low <= shape <= high:
                raise TraceError.at(source.path, n, "shape", f"{low:g} to {high:g} of {family}", fields[4])
        parsed.append((n, start, rate, family, shape))
    if len(parsed) < 2:
        raise TraceError(f"{source.path}: {len(parsed)} windows: expected at least 2")
    for (_, before, *_), (n, after, *_) in itertools.pairwise(parsed):
        if after <= before:
            raise TraceError.at(source.path, n, "start", f"a start after {before:g}", after)
    ends = [start for _, start, *_ in parsed[1:]]
    ends.append(2 * ends[-1] - parsed[-2][1])
    return [
        Window(start, end, rate, family, shape)
        for (_, start, rate, family, shape), end in zip(parsed, ends, strict=True)
    ]


def _number(text: str, path: str, line: int, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e12:
        raise TraceError.at(path, line, column, "a number from 0", text)
    return value


def _length_windows(source: SourceText) -> Iterator[tuple[float, tuple[str, str]]]:
    """Start and texts of the windows that have lengths."""
    try:
        windows = json.loads(source.text)
    except (ValueError, RecursionError):
        windows = None
    if not isinstance(windows, dict):
        raise TraceError(f"{source.path}: expected a JSON object of windows")
    for start, fields in windows.items():
        prompt, output = (fields.get(name) if isinstance(fields, Mapping) else None for name in _FIELDS)
        if not (isinstance(prompt, str) and isinstance(output, str) and start.isdigit()):
            raise TraceError(f"{source.path}: window {start!r}: expected {' and '.join(_FIELDS)} as text")
        if "{}" not in (prompt.strip(), output.strip()):
            yield float(start), (prompt, output)


def _lengths(text: str, path: str, start: float) -> Lengths:
    try:
        shares = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        shares = None
    good = isinstance(shares, dict) and all(
        type(n) is int and 0 <= n <= MAX_COUNT and type(share) in (int, float) and 0 <= share < math.inf
        for n, share in shares.items()
    )
    if not good or sum(shares.values()) <= 0:
        raise TraceError(f"{path}: window {start:g}: expected a dict of probabilities by length, got {text[:60]!r}")
    return Lengths(list(shares), list(itertools.accumulate(shares.values())))
