"""The SLO's verdict on the arms, and where a broken one was broken: by prompt length and by time of arrival.

An arm whose throughput is up and whose SLO is broken is not to be adopted, whatever its means say; the breakdown shows
which requests paid for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd

from harness.report.arms import Arm, baseline_of, by_facet
from harness.report.page import section, text_table
from harness.report.quantity import UNKNOWN, number, times
from harness.report.read import Results

# What each limit of a run limits, by column of runs.
_MEASURED = {
    "ttft_p50_ms": "ttft_sched_p50_ms",
    "ttft_p95_ms": "ttft_sched_p95_ms",
    "ttft_p99_ms": "ttft_sched_p99_ms",
    "itl_p95_ms": "itl_p95_ms",
    "itl_p99_ms": "itl_p99_ms",
    "e2e_p95_ms": "e2e_p95_ms",
}
_LISTED = 4  # more arms than these are not listed one by one where all kept it
_WORSE = 1.1  # a group's figure above this multiple of the baseline's got worse


def slo_met(arm: Arm) -> bool | None:
    """Whether every measured run of the arm kept its SLO; None without one."""
    known = arm.measured["slo_met"].dropna()
    return bool(known.all()) if len(known) else None


def slo_sentences(arms: Sequence[Arm]) -> list[str]:
    """The SLO in the verdict, in words; [] if no limit of a run was decided before the runs."""
    judged = [a for a in arms if slo_met(a) is not None]
    sentences = []
    for facet, members in by_facet(judged).items():
        where = f"{facet}: " if facet else ""
        if kept := [a.series for a in members if slo_met(a)]:
            by = f"all {len(kept)} arms" if len(kept) == len(members) > _LISTED else ", ".join(kept)
            sentences.append(f"{where}{'the' if where else 'The'} SLO {_name(members[0])} is kept by {by}.")
        for arm in members:
            if not slo_met(arm):
                sentences.append(
                    f"{where}{arm.series} breaks the SLO {_name(arm)} ({_broken(arm)}){_not_adopted(arm, members)}."
                )
    return sentences


def _not_adopted(arm: Arm, members: Sequence[Arm]) -> str:
    """Said of an arm that looks better by throughput: it is not."""
    baseline = baseline_of(members)
    own, base = arm.spread("gen_tok_s"), baseline.spread("gen_tok_s") if baseline else None
    if baseline is arm or own is None or base is None or own.median <= base.median:
        return ""
    return ", so its higher throughput is no reason to adopt it"


def _slo(arm: Arm) -> Mapping[str, object]:
    texts = arm.measured["slo"].dropna()
    found: Mapping[str, object] = json.loads(texts.iloc[0]) if len(texts) else {}
    return found


def _name(arm: Arm) -> str:
    return str(_slo(arm).get("name", "?"))


def _broken(arm: Arm) -> str:
    """The limits that its runs broke, worst run first named."""
    texts = arm.measured["slo_broken"].dropna()
    runs = f" in {len(texts)} of {len(arm.measured)} runs" if len(arm.measured) > 1 else ""
    return f"{texts.iloc[0]}{runs}"


def slo_section(results: Results, arms: Sequence[Arm]) -> str:
    """Limits and what was measured, goodput, and for a broken SLO where it was broken."""
    limited = [a for a in arms if _slo(a)]
    if not limited:
        return section(
            "Service level",
            "<p>No SLO was decided before the runs (<code>slo=chat</code>, <code>slo.ttft_p95_ms=500</code>), so no "
            "verdict speaks of one.</p>",
        )
    rows = []
    for arm in limited:
        met = slo_met(arm)
        goodput, served = arm.spread("goodput_request_s"), arm.spread("request_s")
        rows.append(
            [
                arm.label,
                {None: "no limit of the run", True: "kept", False: "BROKEN"}[met],
                "; ".join(_limit(arm, name, value) for name, value in _slo(arm).items() if name in _MEASURED),
                number(goodput.median if goodput else None),
                number(served.median if served else None),
                _good_share(arm),
            ]
        )
    header = ["arm", "SLO", "measured, of at most [ms]", "goodput [requests/s]", "requests/s", "good requests"]
    limits = ", ".join(f"{k} {_plain(v)}" for k, v in _slo(limited[0]).items() if k != "name")
    return section(
        "Service level",
        f"<p>Decided before the runs: <strong>{escape(_name(limited[0]))}</strong> ({escape(limits)}). Times to first "
        "token count from when a request was due; a failed request never answered. Goodput counts requests within "
        "every limit on one request.</p>",
        text_table(header, rows),
        *(_breakdown(results, arm, arms) for arm in limited if slo_met(arm) is False),
    )


def _limit(arm: Arm, name: str, limit: object) -> str:
    measured = arm.spread(_MEASURED[name])
    return (
        f"{name.removesuffix('_ms').replace('_', ' ')} {number(measured.high if measured else None)} of {_plain(limit)}"
    )


def _plain(limit: object) -> str:
    """A limit as it was written: 200, not 200.0."""
    return f"{limit:g}" if isinstance(limit, int | float) else str(limit)


def _good_share(arm: Arm) -> str:
    good, n = arm.total("n_good"), arm.total("n_requests")
    return UNKNOWN if good is None or not n else f"{good} of {n}"


def _breakdown(results: Results, arm: Arm, arms: Sequence[Arm]) -> str:
    members = [a for a in arms if a.facet == arm.facet]
    baseline = baseline_of(members)
    groups = breakdown(results, arm)
    other = {} if baseline is None or baseline is arm else breakdown(results, baseline)
    if not groups:
        return ""
    rows = []
    for name, (n, ttft, itl) in groups.items():
        base = other.get(name)
        cells = [name, str(n)]
        for value, reference in ((ttft, base and base[1]), (itl, base and base[2])):
            worse = " ▲" if value and reference and value > _WORSE * reference else ""
            against = f" ({times(value / reference)}{worse})" if value and reference else ""
            cells.append(number(value) + against)
        rows.append(cells)
    against = f"; in brackets against {escape(baseline.series)}, ▲ got worse" if other and baseline else ""
    return (
        f"<h3>Where {escape(arm.label)} was slow</h3>"
        f"<p>By thirds of the prompt lengths and of the arrivals{against}.</p>"
        + text_table(["requests", "n", "TTFT p95 [ms]", "longest gap p95 [ms]"], rows)
    )


def breakdown(results: Results, arm: Arm) -> dict[str, tuple[int, float | None, float | None]]:
    """For thirds of prompt lengths and of arrivals: requests, 95th percentile of TTFT (from the due time) and of the
    longest gap of a request, over all measured runs of the arm."""
    table = results.tables["requests"]
    rows = table[table["run_id"].isin(arm.measured["run_id"]) & table["ttft_sched_ms"].notna()]
    if len(rows) < 3:
        return {}
    found = {}
    for column, what, names in (
        ("prompt_tokens", "prompts", ("short", "middle", "long")),
        ("t_sched_s", "arrivals", ("first", "middle", "last")),
    ):
        values = rows[column].astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan)
        edges = np.nanquantile(values, (1 / 3, 2 / 3))
        thirds = np.searchsorted(edges, values, side="left")
        for third, name in enumerate(names):
            chosen = rows[(thirds == third) & ~np.isnan(values)]
            if len(chosen):
                inside = values[(thirds == third) & ~np.isnan(values)]
                unit = "tokens" if what == "prompts" else "s"
                label = f"{name} {what} ({number(float(inside.min()))}–{number(float(inside.max()))} {unit})"
                found[label] = (len(chosen), _p95(chosen["ttft_sched_ms"]), _p95(chosen["itl_max_ms"]))
    return found


def _p95(values: pd.Series) -> float | None:
    known = values.dropna().to_numpy(dtype=np.float64)
    return float(np.percentile(known, 95)) if len(known) else None
