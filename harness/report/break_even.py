"""When a longer warm-up pays: for a process that lives minutes and one that serves for days, not the same answer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.arms import Arm, baseline_of, by_facet
from harness.report.page import section, text_table
from harness.report.quantity import UNKNOWN, number

_LONGER = 1.1
"""Warm-ups that differ by less than this factor between all arms of a facet say nothing."""


def break_even_tokens(warmup_s: float, rate: float, base_warmup_s: float, base_rate: float) -> float | None:
    """Generated tokens after which the arm with the longer warm-up has caught up; None if it never does.

    A process spends ``warmup + tokens / rate`` seconds; the two are equal at the tokens returned.

    Args:
        rate, base_rate: generated tokens/s while measured.
    """
    saved_s = 1 / base_rate - 1 / rate
    extra_s = warmup_s - base_warmup_s
    if extra_s <= 0:
        return 0.0 if saved_s >= 0 else None
    return extra_s / saved_s if saved_s > 0 else None


@dataclass(frozen=True)
class Starts:
    """Warm-ups of the processes of one arm, in seconds.

    An arm's first process may also compile kernels, time candidates and read files, whose results stay on the disk for
    the later ones: it is not the like of theirs.
    """

    first: float
    later: tuple[float, ...]

    @classmethod
    def of(cls, arm: Arm) -> Starts | None:
        """In order of time; None where no warm-up is known."""
        rows = arm.measured.sort_values("run_id", kind="stable")  # ids begin with the time and the number of the job
        known = [float(v) for v in rows["warmup_s"].dropna()]
        return cls(known[0], tuple(known[1:])) if known else None

    @property
    def warm(self) -> float | None:
        """Median of the later ones; None if there is none."""
        return statistics.median(self.later) if self.later else None


def warm_up_section(arms: Sequence[Arm]) -> str:
    """Warm-up and rate of each arm against the baseline's, and from how many tokens on it pays.

    "" if warm-ups are alike, or if of no arm it is known when its own pays. Arms that differ by their requests or
    arrivals are left out: there the load makes the rate.
    """
    rows = []
    single = False
    for facet, members in by_facet([a for a in arms if not a.varies_requests]).items():
        known = [(a, s, r.median) for a in members if (s := Starts.of(a)) and (r := a.spread("gen_tok_s"))]
        base = next((k for k in known if k[0] is baseline_of(members)), None)
        if base is None or base[2] <= 0 or _alike([starts for _, starts, _ in known]):
            continue
        if base[1].warm is None or all(s.warm is None for a, s, _ in known if a is not base[0]):
            continue
        for arm, starts, rate in known:
            if arm.is_replica or rate <= 0:
                continue
            pays, after = _pays(starts, rate, base[1], base[2]) if arm is not base[0] else ("baseline", UNKNOWN)
            single |= starts.warm is None
            later = UNKNOWN if starts.warm is None else f"{number(starts.warm)} ({len(starts.later)})"
            cells = [arm.series, number(starts.first), later, number(rate), pays, after]
            rows.append([*([facet] if facet else []), *cells])
    if not rows:
        return ""
    header = [
        "arm",
        "first start [s]",
        "later starts, median [s] (number)",
        "generated [tokens/s]",
        "pays after",
        "that is, at full load, after",
    ]
    text = (
        "A process that ends before has lost by the longer warm-up; one that goes on gains by the higher rate. Later "
        "starts are compared: the first start of each arm is left out, because it may also compile kernels and read "
        "files that the later ones find. Loading the model is in neither."
    )
    if single:
        text += " Unknown after one start: whether it was a first one of its kind (measure.repeats=3 makes more)."
    return section(
        "Warm-up",
        f"<p>{text}</p>",
        text_table([*(["what"] if len(rows[0]) > len(header) else []), *header], rows),
    )


def _pays(starts: Starts, rate: float, base: Starts, base_rate: float) -> tuple[str, str]:
    """Tokens and minutes at full load until the arm has caught up with the baseline, in words."""
    if starts.warm is None or base.warm is None:
        return "unknown", UNKNOWN
    tokens = break_even_tokens(starts.warm, rate, base.warm, base_rate)
    if tokens is None:
        return "never", UNKNOWN
    if tokens == 0:
        return "at once", UNKNOWN
    return f"{number(tokens)} tokens", f"{number((starts.warm + tokens / rate) / 60)} min"


def _alike(starts: Sequence[Starts]) -> bool:
    """By the later starts, by the first ones of arms without any."""
    seconds = [s.first if s.warm is None else s.warm for s in starts]
    return len(seconds) < 2 or max(seconds) <= _LONGER * min(seconds)
