"""When a longer warm-up pays: for a process that lives minutes and one that serves for days, not the same answer."""

from __future__ import annotations

from collections.abc import Sequence

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


def warm_up_section(arms: Sequence[Arm]) -> str:
    """Warm-up and rate of each arm against the baseline's, and from how many tokens on it pays; "" if warm-ups are
    alike. Arms that differ by their requests or arrivals are left out: there the load makes the rate."""
    rows = []
    for facet, members in by_facet([a for a in arms if not a.varies_requests]).items():
        known = [
            (a, w.median, r.median) for a in members if (w := a.spread("warmup_s")) and (r := a.spread("gen_tok_s"))
        ]
        base = next((k for k in known if k[0] is baseline_of(members)), None)
        if base is None or base[2] <= 0 or _alike([warmup for _, warmup, _ in known]):
            continue
        for arm, warmup, rate in known:
            if arm.is_replica or rate <= 0:
                continue
            tokens = None if arm is base[0] else break_even_tokens(warmup, rate, base[1], base[2])
            pays = "baseline" if arm is base[0] else "never" if tokens is None else f"{number(tokens)} tokens"
            after = UNKNOWN if not tokens else f"{number((warmup + tokens / rate) / 60)} min"
            rows.append([*([facet] if facet else []), arm.series, number(warmup), number(rate), pays, after])
    if not rows:
        return ""
    header = ["arm", "warm-up [s]", "generated [tokens/s]", "pays after", "that is, at full load, after"]
    return section(
        "Warm-up",
        "<p>A process that ends before has lost by the longer warm-up; one that goes on gains by the higher rate. "
        "Medians; loading the model is not in them.</p>",
        text_table([*(["what"] if len(rows[0]) > len(header) else []), *header], rows),
    )


def _alike(warmups: Sequence[float]) -> bool:
    return len(warmups) < 2 or max(warmups) <= _LONGER * min(warmups)
