"""The service-level objective (SLO): what was decided before a run about how long answers may take.

Two kinds of limits. Those of the whole run are percentiles over its requests (or pooled gaps) and decide its verdict.
Those of a single request decide whether it counts as good: goodput is good requests per second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms; None = not limited. Times to first token count from the due time (``ttft_sched_ms``).

    Attributes:
        name: what the limits are called.
        ttft_p50_ms, ttft_p95_ms, ttft_p99_ms: of the run: this percentile of its requests' times to first token. A
            failed request counts as one that never answered.
        itl_p95_ms, itl_p99_ms: of the run: this percentile of the gaps between tokens.
        e2e_p95_ms: of the run: this percentile of its requests' times from submission to last token.
        request_ttft_ms: of one request: time to its first token.
        request_itl_ms: its longest gap between tokens.
        request_tpot_ms: its mean time per token after the first.
        request_e2e_ms: its time from submission to its last token.
    """

    name: str = "unnamed"
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_p95_ms: float | None = None
    request_ttft_ms: float | None = None
    request_itl_ms: float | None = None
    request_tpot_ms: float | None = None
    request_e2e_ms: float | None = None

    def __post_init__(self) -> None:
        limits = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        for name, limit in limits.items():
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"slo.{name} must be above 0 ms and finite, or null for no limit, got {limit}")

    @property
    def run_limits(self) -> dict[str, float]:
        """Limits of the run by name."""
        return {name: limit for name, limit in self._limits().items() if not name.startswith("request_")}

    @property
    def request_limits(self) -> dict[str, float]:
        """Limits of one request by name, without ``request_``."""
        return {
            name.removeprefix("request_"): limit
            for name, limit in self._limits().items()
            if name.startswith("request_")
        }

    def _limits(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items() if name != "name" and value is not None}

    def as_json(self) -> str:
        """Name and limits that are set, as a JSON object."""
        return json.dumps({"name": self.name, **self._limits()})


def read_slo(settings: Mapping[str, Any]) -> Slo | None:
    """The SLO of a config's ``slo`` group; None if it limits nothing. Limits beside the preset ``none`` are "custom".

    Raises:
        ValueError: a limit that is not above 0.
    """
    slo = Slo(**settings)
    if not slo.run_limits and not slo.request_limits:
        return None
    return replace(slo, name="custom") if slo.name == "none" else slo
