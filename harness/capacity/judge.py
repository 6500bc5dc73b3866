"""What a trial shows of a rate that lasts: judged after it has filled, with an eye on what piles up, if long enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.metrics import run_values
from harness.metrics.observations import observe
from harness.metrics.steady import DEVIATIONS, FILLED, Growth, growth, life_ns
from harness.record import Outcome, RunRecord

STAYS = 5.0
"""A trial is as long as so many of the longest stays (99th percentile): shorter ones mostly fill and drain."""

RESOLVED = 0.05
"""Share of the arrivals that may pile up unseen: a trial is so long that more would show beyond the noise."""

PILED = 0.1
"""A share of the arrivals that piles up counts against a rate even where it may be noise."""


@dataclass(frozen=True)
class Judged:
    """A simulated run at one rate, seen after its filling.

    Attributes:
        values: the row of ``runs`` of the requests that came after the filling, by column.
        failed: whether any request of the whole run failed.
        growth: requests sent and ended between the filling and the last request.
        offered_tok_s, generated_tok_s: tokens that the requests ask for which come after the filling, and tokens that
            are generated in that time, each per second of it; None = no time is left.
        stays: how many of its longest stays it spans.
        wanted: requests of a run that would be long enough, at least those it has; equal to them = it is.
    """

    values: Mapping[str, Any]
    failed: bool
    growth: Growth
    offered_tok_s: float | None
    generated_tok_s: float | None
    stays: float
    wanted: int

    @property
    def falls_behind(self) -> bool:
        """Whether requests end slower than they come: no such rate lasts, whatever the latencies so far. A trial too
        short to tell is not given the benefit of the doubt where much piles up."""
        change = self.growth
        piled = change.sent - change.ended
        return change.beyond_noise or piled > max(change.noise, PILED * change.sent)


def judge(record: RunRecord) -> Judged:
    """Judge a simulated run.

    It has filled after the 95th percentile of the stays, at the latest when half of the requests' time is over.
    """
    o = observe(record)
    first, last = float(np.nanmin(o.t_sched)), float(np.nanmax(o.t_sched))
    filled = first + min(life_ns(o, FILLED), (last - first) / 2)
    late = np.flatnonzero(o.t_sched >= filled)
    chosen = set(late.tolist())
    values = run_values(replace(record, requests=[r for i, r in enumerate(record.requests) if i in chosen]))
    change = growth(o, filled, last)
    longest = life_ns(o, 99)
    span, seconds, sent = last - first, (last - filled) / 1e9, int((~np.isnan(o.t_submit)).sum())
    stays = span / longest if longest else math.inf
    # What piles up grows with the length of a run, the noise does not.
    longer = [STAYS / stays if stays else math.inf]
    if change.sent:
        longer.append(DEVIATIONS * change.noise / (RESOLVED * change.sent))
    given_up = (str(Outcome.CANCELLED), str(Outcome.UNFINISHED))
    inside = (o.chunk_time >= filled) & (o.chunk_time < last)
    asked = sum(record.requests[i].max_new_tokens for i in late if o.t_sched[i] < last)
    return Judged(
        values,
        any(not ok and outcome not in given_up for ok, outcome in zip(o.ok, o.outcomes, strict=True)),
        change,
        asked / seconds if seconds > 0 else None,
        int(o.chunk_size[inside].sum()) / seconds if seconds > 0 else None,
        stays,
        max(sent, math.ceil(min(max(longer), 1e6) * sent)),
    )
