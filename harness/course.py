"""How far a command is: runs that ended, runs to go, and how long they may take by those that ended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import manifest

_OVER = ("ok", "failed", "timeout")


@dataclass(frozen=True, slots=True)
class Course:
    """Where a command stands while one of its runs is going on.

    Attributes:
        ended: runs that are over, not counting this one.
        total: runs in all.
        at_once: runs that go on side by side, this one included.
        this_s: seconds that this run may take; None if nothing like it has ended.
        others_s: seconds that the runs which have not ended may take one after the other, without this one; None as
            above.
    """

    ended: int
    total: int
    at_once: int = 1
    this_s: float | None = None
    others_s: float | None = None

    def during_this(self, elapsed_s: float) -> str:
        """``run 2 of 4, about 3 min to go``, while this run has taken ``elapsed_s``; "" where it is the only one."""
        if self.total == 1:
            return ""
        number = f"run {min(self.ended + 1, self.total)} of {self.total}"
        if self.this_s is None or self.others_s is None:
            return f"{number}, time to go unknown until one has ended"
        left_s = (self.others_s + max(self.this_s - elapsed_s, 0.0)) / self.at_once
        return f"{number}, about {duration(left_s)} to go"

    def after_this(self, well: bool = True) -> str:
        """``2 of 4 runs, about 2 min to go``, when this run has ended; "" where it was the only one.

        Args:
            well: whether it ended well; how long one took that did not is no measure of those to come.
        """
        if self.total == 1:
            return ""
        done = f"{min(self.ended + 1, self.total)} of {self.total} runs"
        if self.ended + 1 >= self.total or self.others_s is None or (self.this_s is None and not well):
            return done
        return f"{done}, about {duration(self.others_s / self.at_once)} to go"


def duration(seconds: float) -> str:
    """For people: ``40 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def of_sweep(root: Path, job: str, elapsed_s: float) -> Course:
    """Where a sweep stands, by its manifest, which its jobs share wherever they run.

    A job to come is taken to last as long as the ended ones of the same config did, else as long as all ended ones.

    Args:
        job: directory of the job that asks, relative to ``root``.
        elapsed_s: seconds it has taken: with none before it, the measure of the others once it is over.
    """
    states = manifest.latest(root)
    known: dict[str, list[float]] = {}
    for state, seconds in manifest.durations(root):
        known.setdefault(state.config_hash, []).append(seconds)
    own = next((s.config_hash for s in states if s.job == job), None)
    lasted = [s for durations in known.values() for s in durations]
    usual = statistics.fmean(lasted or [elapsed_s])

    def expected(config_hash: str | None) -> float:
        return statistics.fmean(known[config_hash]) if config_hash in known else usual

    others = [s for s in states if s.job != job]
    left = [expected(s.config_hash) for s in others if s.state not in _OVER]
    return Course(
        ended=sum(s.state in _OVER for s in others),
        total=len(states),
        at_once=max(1, sum(s.state == "running" for s in others) + 1),
        this_s=expected(own) if lasted else None,
        others_s=sum(left),
    )


def of_repeats(ended_s: Sequence[float], total: int, elapsed_s: float) -> Course:
    """Where a run with repeats stands, by the seconds that the ended ones took."""
    usual = statistics.fmean(ended_s or [elapsed_s])
    return Course(
        ended=len(ended_s),
        total=total,
        this_s=usual if ended_s else None,
        others_s=usual * (total - len(ended_s) - 1),
    )
