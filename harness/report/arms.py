"""Runs grouped into arms that may be compared: repeats side by side, never pooled.

A *facet* is what must be equal for a comparison to mean something (workload and its rate, model, kind of device); a
*series* is what is compared inside it (engine, value of the variable). An arm is one series in one facet: its runs are
repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pandas as pd

from harness.gate import EQUAL, EXPLAINED, FAILED
from harness.report.model_names import model_labels
from harness.report.read import Results
from harness.sweep import as_number, config_hashes
from harness.tables import MIN_P99_SAMPLES

_FACET = ("workload", "load", "model", "device")
_SERIES = ("engine", "arm", "replica")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one metric over the runs in which it is known."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None without values."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known), len(known)) if known else None


@dataclass(frozen=True)
class Arm:
    """One series in one facet.

    Attributes:
        facet, series: labels made of what differs in this set of results; ``facet`` is "" if nothing differs.
        engine, value: of the runs; ``value`` is the arm's text or None.
        variable: the setting that is varied, or None.
        runs: rows of the runs table, every repeat.
        is_replica: whether it repeats another arm beside it (A/A), for the noise floor.
        is_baseline: whether ratios of this facet are taken to this arm.
    """

    facet: str
    series: str
    engine: str
    value: str | None
    variable: str | None
    runs: pd.DataFrame
    is_replica: bool = False
    is_baseline: bool = False

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Runs that ended ok: only they enter numbers."""
        return self.runs[self.runs["status"] == "ok"]

    @property
    def label(self) -> str:
        return f"{self.facet} · {self.series}" if self.facet else self.series

    @property
    def varies_requests(self) -> bool:
        """Whether the requests or their times are what the experiment varies."""
        return any(name.partition(".")[0] in ("workload", "arrival") for name in (self.variable or "").split(","))

    @property
    def number(self) -> float | None:
        """The variable's value if it is a number."""
        return as_number(self.value)

    @property
    def repeats(self) -> int:
        """Independent ones that ended ok: the runs that one process made of the arm are one."""
        return int(self.measured["iteration"].fillna(0).eq(0).sum())

    def spread(self, metric: str) -> Spread | None:
        return Spread.of(float(v) for v in self.measured[metric].dropna())

    def total(self, metric: str) -> int | None:
        """Sum of a count over all runs, failed ones too; None if no run knows it."""
        known = self.runs[metric].dropna()
        return int(known.sum()) if len(known) else None

    def samples(self, metric: str) -> int | None:
        """Fewest samples behind a latency metric in one run."""
        counts = self.measured["itl_n" if metric.startswith("itl") else "n_ok"].dropna()
        return int(counts.min()) if len(counts) else None

    def has_few_samples(self, metric: str) -> bool:
        """Whether a 99th percentile rests on too few samples to be stated."""
        n = self.samples(metric)
        return "_p99_" in metric and n is not None and n < MIN_P99_SAMPLES

    @property
    def gate(self) -> str | None:
        """The worst verdict of the correctness gate on its runs; None if no run was compared."""
        known = set(self.runs["gate"].dropna())
        return next((verdict for verdict in (FAILED, EXPLAINED, EQUAL) if verdict in known), None)

    @property
    def tokens_match(self) -> bool | None:
        """False if one run gave other tokens than the reference; None if no run was compared."""
        known = self.runs["tokens_match"].dropna()
        return bool(known.all()) if len(known) else None


@dataclass(frozen=True)
class Ratio:
    """Geometric mean, as in :mod:`harness.analysis.paired`, and range of the ratios of paired runs."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Ratio:
        known = list(ratios)
        return cls(statistics.geometric_mean(known), min(known), max(known), len(known))


def ratio(arm: Arm, baseline: Arm, metric: str) -> Ratio | None:
    """``arm / baseline``: per pair of equal repeats where both have the same ones, else of the two medians."""
    pairs = [_by_repeat(a, metric) for a in (arm, baseline)]
    if pairs[0] and pairs[0].keys() == pairs[1].keys() and all(v > 0 for p in pairs for v in p.values()):
        return Ratio.of(pairs[0][r] / pairs[1][r] for r in pairs[0])
    own, base = arm.spread(metric), baseline.spread(metric)
    if own is None or base is None or own.median <= 0 or base.median <= 0:
        return None
    return Ratio.of([own.median / base.median])


def _by_repeat(arm: Arm, metric: str) -> dict[int, float]:
    rows = arm.measured[["repeat", metric]].dropna()
    return {} if rows["repeat"].duplicated().any() else {int(r): float(v) for r, v in rows.itertuples(index=False)}


def group_arms(results: Results) -> list[Arm]:
    """The arms of a set of results: facets in order of appearance, numeric values in their order inside."""
    groups: dict[tuple[str | None, ...], list[int]] = {}
    order = results.runs["arm_index"].argsort(kind="stable") if results.runs["arm_index"].notna().all() else None
    all_runs = results.runs if order is None else results.runs.iloc[order]
    rows = all_runs.to_dict("records")
    devices = {_text(row, "device") for row in rows} - {None}
    loads = _loads(rows)
    for position, row in enumerate(rows):
        if len(devices) == 1 and _text(row, "device") is None:  # it failed before it had one
            row["device"] = next(iter(devices))
        row["load"] = loads.get(_text(row, "workload_hash"))
        groups.setdefault(tuple(_text(row, name) for name in (*_FACET, *_SERIES)), []).append(position)
    keys = [dict(zip((*_FACET, *_SERIES), key, strict=True)) for key in groups]
    facet_names = _differing(keys, _FACET)
    series_names = _series_names(keys)
    labels = model_labels(key["model"] for key in keys if key["model"])
    arms = []
    for key, positions in zip(keys, groups.values(), strict=True):
        runs = all_runs.iloc[positions]
        shown = {**key, "model": labels.get(key["model"] or "")}
        variables = runs["variable"].dropna()
        variable = str(variables.iloc[0]) if len(variables) else None
        arms.append(
            Arm(
                facet=" · ".join(shown[n] or "?" for n in facet_names if shown[n] or n != "load"),
                series=_series_label(key, series_names, variable),
                engine=key["engine"] or "?",
                value=key["arm"],
                variable=variable,
                runs=runs,
                is_replica=_is_replica(key),
            )
        )
    return _with_baselines(_sorted(arms), _begun_with(results))


def _loads(rows: Sequence[Mapping[str, object]]) -> dict[str | None, str]:
    """By workload hash, the offered rate of a workload that one repeat saw at several rates, to two digits.

    Empty where the requests are what the experiment varies. A workload whose requests differ at the same rate is not
    told apart here: `harness.report.validity` says that such arms are not to be compared.
    """
    rates: dict[tuple[str | None, object], dict[str, str]] = {}
    first = {_text(row, "run_id"): _text(row, "workload_hash") for row in rows}
    later: dict[str, str | None] = {}  # requests of another iteration have the load of the first one
    for row in rows:
        if not pd.isna(row["iteration"]) and int(str(row["iteration"])) > 0:
            later[_text(row, "workload_hash") or ""] = first.get(f"{str(row['run_id']).rpartition('.')[0]}.0")
            continue
        variable, version, rate = _text(row, "variable") or "", _text(row, "workload_hash"), row["offered_request_s"]
        if version is not None and not pd.isna(rate) and not variable.startswith(("arrival", "workload")):
            rates.setdefault((_text(row, "workload"), row["repeat"]), {})[version] = f"{rate:.2g} requests/s"
    known: dict[str | None, str] = {
        v: rate for versions in rates.values() if len(set(versions.values())) > 1 for v, rate in versions.items()
    }
    return known | {version: known[same] for version, same in later.items() if same in known}


def _text(row: Mapping[str, object], name: str) -> str | None:
    value = row[name]
    if value is None or pd.isna(value):
        return None
    # cuda:0 and cuda:1 are the same kind of device: a sweep spread over GPUs is one facet
    return str(value).split(":")[0] if name == "device" else str(value)


def _differing(keys: Sequence[Mapping[str, str | None]], names: Sequence[str]) -> list[str]:
    return [n for n in names if len({key[n] for key in keys}) > 1]


def _series_names(keys: Sequence[Mapping[str, str | None]]) -> list[str]:
    """``arm`` is left out where the other columns already tell the arms apart (a sweep over engines or workloads)."""
    keys = [key for key in keys if not _is_replica(key)]
    others = {tuple(key[n] for n in (*_FACET, "engine")) for key in keys}
    names = _differing(keys, ("engine",))
    return [*names, "arm"] if len(others) < len(keys) or not names else names


def _is_replica(key: Mapping[str, str | None]) -> bool:
    return key["replica"] not in (None, "0")


def _series_label(key: Mapping[str, str | None], names: Sequence[str], variable: str | None) -> str:
    if _is_replica(key):
        return _series_label({**key, "replica": None}, names, variable) + " again"
    if key["arm"] is not None and names_engine(variable):  # as it was typed: ours_small, where the engine is ours
        return key["arm"]
    parts = []
    for name in names:
        if name == "engine":
            parts.append(key["engine"] or "?")
        elif key["arm"] is not None and key["arm"] != key["workload"]:
            parts.append(f"{variable.rpartition('.')[2]} = {key['arm']}" if variable else key["arm"])
    return " ".join(parts) or key["engine"] or "?"


def names_engine(variable: str | None) -> bool:
    """Whether the arm of a run with this ``variable`` is a choice of engine; of a single run, which has none, it is."""
    return variable in (None, "engine")


def _sorted(arms: Sequence[Arm]) -> list[Arm]:
    facets = list(dict.fromkeys(a.facet for a in arms))
    engines = list(dict.fromkeys(a.engine for a in arms))

    def order(arm: Arm) -> tuple[int, int, bool, float, bool]:
        # sorted() is stable, so values that are no numbers stay in order of appearance, after the numbers
        return facets.index(arm.facet), engines.index(arm.engine), arm.number is None, arm.number or 0.0, arm.is_replica

    return sorted(arms, key=order)


def _begun_with(results: Results) -> frozenset[str]:
    """Runs of the configs that a sweep was first planned with; empty where that is not known."""
    config_of = config_hashes(results.tables["environment"]) if results.begun_with else {}
    return frozenset(run_id for run_id, digest in config_of.items() if digest in results.begun_with)


def _with_baselines(arms: Sequence[Arm], begun_with: frozenset[str]) -> list[Arm]:
    """Padded static batching is the baseline of its facet; without it, the facet's first arm. Arms that a resume added
    to a sweep change no baseline."""
    result = []
    for members in by_facet(arms).values():
        if len(members) == 1:
            result += members
            continue
        first = [a for a in members if not begun_with.isdisjoint(a.runs["run_id"])] or members
        baseline = next((a for a in first if a.engine == "static"), first[0])
        result += [replace(a, is_baseline=a is baseline) for a in members]
    return result


def by_facet(arms: Iterable[Arm]) -> dict[str, list[Arm]]:
    """Arms by facet, both in order."""
    facets: dict[str, list[Arm]] = {}
    for arm in arms:
        facets.setdefault(arm.facet, []).append(arm)
    return facets


def baseline_of(members: Sequence[Arm]) -> Arm | None:
    """The baseline among the arms of one facet; None if there is only one arm."""
    return next((a for a in members if a.is_baseline), None)


def memory_metric(runs: pd.DataFrame) -> str:
    """The peak-memory column to show: what torch reserved on the GPU, else device use, else resident memory."""
    for name in ("peak_gpu_reserved_bytes", "peak_gpu_used_bytes"):
        if runs[name].notna().any():
            return name
    return "peak_rss_bytes"
