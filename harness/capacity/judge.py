"""What a trial shows of a rate that lasts: latencies after it has filled, what piles up in its second half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.capacity.backlog import Backlog, backlog
from harness.metrics import run_values
from harness.metrics.arrival_rate import DEVIATIONS
from harness.metrics.observations import observe
from harness.metrics.steady import FILLED, life_ns
from harness.record import Outcome, RunRecord

STAYS = 5.0
"""A trial is as long as so many of the longest stays (99th percentile): shorter ones mostly fill and drain."""

RESOLVED = 0.05
"""Share of the arrivals that may pile up unseen: a trial is so long that more would show beyond the noise."""


@dataclass(frozen=True)
class Judged:
    """A simulated run at one rate, seen after its filling.

    Attributes:
        values: the row of ``runs`` of the requests that came after the filling, by column.
        failed: whether any request of the whole run failed.
        backlog: what piles up.
        offered_tok_s, generated_tok_s: tokens that the requests of the second half ask for, and tokens that are
            generated in that time, each per second; None = all requests came at once.
        stays: how many of its longest stays it spans.
        wanted: requests of a run that would be long enough, at least those it has; equal to them = it is.
    """

    values: Mapping[str, Any]
    failed: bool
    backlog: Backlog
    offered_tok_s: float | None
    generated_tok_s: float | None
    stays: float
    wanted: int

    @property
    def falls_behind(self) -> bool:
        """Whether requests pile up: no such rate lasts, whatever the latencies so far."""
        return self.backlog.grows


def judge(record: RunRecord) -> Judged:
    """Judge a simulated run.

    It has filled after the 95th percentile of the stays, at the latest when half of the requests' time is over.
    """
    o = observe(record)
    first, last = float(np.nanmin(o.t_sched)), float(np.nanmax(o.t_sched))
    middle = (first + last) / 2
    filled = min(first + life_ns(o, FILLED), middle)
    late = np.flatnonzero(o.t_sched >= filled)
    chosen = set(late.tolist())
    values = run_values(replace(record, requests=[r for i, r in enumerate(record.requests) if i in chosen]))
    piled = backlog(o, filled, last)
    longest = life_ns(o, 99)
    span, seconds, sent = last - first, (last - middle) / 1e9, int((~np.isnan(o.t_submit)).sum())
    stays = span / longest if longest else math.inf
    # What piles up grows with the length of a run, the noise does not.
    longer = [STAYS / stays if stays else math.inf]
    if piled.system.sent:
        longer.append(DEVIATIONS * piled.system.noise / (RESOLVED * piled.system.sent))
    given_up = (str(Outcome.CANCELLED), str(Outcome.UNFINISHED))
    inside = (o.chunk_time >= middle) & (o.chunk_time < last)
    judged = np.flatnonzero((o.t_sched >= middle) & (o.t_sched < last))
    asked = sum(record.requests[i].max_new_tokens for i in judged)
    return Judged(
        values,
        any(not ok and outcome not in given_up for ok, outcome in zip(o.ok, o.outcomes, strict=True)),
        piled,
        asked / seconds if seconds > 0 else None,
        int(o.chunk_size[inside].sum()) / seconds if seconds > 0 else None,
        stays,
        max(sent, math.ceil(min(max(longer), 1e6) * sent)),
    )
