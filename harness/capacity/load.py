"""A workload at any rate: the same requests, nearer together or further apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from harness.simulate.source import built
from workloads.streams import stream
from workloads.workload import ScheduledRequest, Workload


@dataclass(frozen=True)
class Load:
    """What arrives, whatever the rate.

    Attributes:
        workload: its requests; the gaps between them, in units of their mean, are kept at every rate.
        spec: settings that built it, to draw other requests of the same kind; None = there are only these.
    """

    workload: Workload
    spec: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, workload: Workload) -> Load:
        """From a workload with the settings that built it (:attr:`Workload.spec`).

        Raises:
            ValueError: it is a closed loop, whose rate follows from the engine.
        """
        if workload.concurrency is not None:
            raise ValueError(
                "a closed loop has no rate of its own: plan with arrival=poisson arrival.rate=1, or a trace (the rate "
                "itself is found)"
            )
        spec = workload.spec
        sized = {"requests", "sessions"} & set(spec.get("workload", ()))
        redrawn = sized and {"arrival", "vocab_size"} <= set(spec)
        return cls(workload, spec if redrawn else None)

    def trial(self, requests: int, seed: int) -> Trial:
        """At most ``requests`` requests to be sent at any rate. Equal seeds give equal requests and equal gaps,
        whatever the rate (common random numbers).

        Another seed draws other requests of the same kind; those of a trace begin elsewhere in it, and a longer trial
        of the same seed holds the shorter one. A burst, which has no gaps, comes as a Poisson process.
        """
        rng = stream(seed, "capacity")
        if self.spec is not None:
            chosen = list(built(self.spec, **self._size(requests), seed=seed).requests)[:requests]
        else:
            everything = self.workload.requests
            first = int(rng.random() * max(1, len(everything) - requests + 1))
            chosen = list(everything[first : first + requests])
        present = {r.request_id for r in chosen}
        chosen = [r for r in chosen if r.follows is None or r.follows in present]  # sessions cut by a window
        openings = [k for k, r in enumerate(chosen) if r.follows is None]
        gaps = [chosen[b].due_s - chosen[a].due_s for a, b in pairwise(openings)]
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        if not mean:
            units = [rng.expovariate(1.0) for _ in openings]
        else:
            units = [1.0, *(gap / mean for gap in gaps)]
            if self.spec is None and len(openings) == len(chosen):  # also where the trace is no longer than one trial
                first = rng.randrange(len(chosen))
                units, chosen = units[first:] + units[:first], chosen[first:] + chosen[:first]
        return Trial(self.workload.name, tuple(chosen), tuple(units), self.workload.spec)

    def _size(self, requests: int) -> dict[str, int]:
        """The setting that makes the workload so long; of conversations, some more than have so many turns."""
        assert self.spec is not None
        if "sessions" not in self.spec["workload"]:
            return {"requests": requests}
        beginnings = sum(r.follows is None for r in self.workload.requests)
        return {"sessions": math.ceil(1.2 * requests * beginnings / len(self.workload)) + 1}


@dataclass(frozen=True)
class Trial:
    """Requests with the gaps between the beginnings of their sessions (a request that follows none is one) in units of
    the mean gap."""

    name: str
    requests: tuple[ScheduledRequest, ...]
    gaps: tuple[float, ...]
    spec: Mapping[str, Any]

    def at(self, rate: float) -> Workload:
        """The workload at ``rate`` requests/s, turns of sessions counted; the first is due after one gap."""
        if not rate > 0:
            raise ValueError(f"a rate is above 0 requests/s, got {rate}")
        sessions = rate * len(self.gaps) / len(self.requests)
        now, due, gaps = 0.0, dict[str, float](), iter(self.gaps)
        for request in self.requests:
            if request.follows is None:
                now += next(gaps) / sessions
            due[request.request_id] = now if request.follows is None else due[request.follows]
        timed = (replace(request, due_s=due[request.request_id]) for request in self.requests)
        return Workload(self.name, tuple(sorted(timed, key=lambda r: r.due_s)), None, self.spec)
