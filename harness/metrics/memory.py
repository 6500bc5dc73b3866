"""Peak memory and throttling of a run: the process's own peaks and the samples' maxima, each where it was observed."""

from __future__ import annotations

from functools import partial

from harness.ledger import RESIDUAL
from harness.metrics.metric import LOWER, RunMetric, RunView

# Peak by name, and the telemetry column whose samples also bound it from below (None: torch's own peak only).
_PEAKS = {
    "peak_rss_bytes": "rss_bytes",
    "peak_gpu_allocated_bytes": None,
    "peak_gpu_reserved_bytes": None,
    "peak_gpu_used_bytes": "gpu_used_bytes",
}


def _peak(run: RunView, name: str, sampled: str | None) -> int | None:
    """The largest of the reported peak and the samples: sparse samples miss peaks, so neither alone is trusted."""
    seen = [run.record.memory.get(name)]
    if sampled is not None:
        seen += [sample.get(sampled) for sample in run.record.telemetry]
    known = [int(value) for value in seen if value is not None]
    return max(known) if known else None


def _better(name: str) -> str | None:
    """What torch allocated is part of what it reserved: one verdict for both."""
    return None if name == "peak_gpu_allocated_bytes" else LOWER


def _residual(run: RunView) -> int | None:
    return run.record.memory.get(RESIDUAL)


def _throttled(run: RunView) -> float | None:
    known = [sample["throttle"] for sample in run.record.telemetry if sample.get("throttle") is not None]
    return sum(bool(reasons) for reasons in known) / len(known) if known else None


METRICS = (
    *(RunMetric(name, partial(_peak, name=name, sampled=sampled), _better(name)) for name, sampled in _PEAKS.items()),
    RunMetric("ledger_residual_bytes", _residual),
    RunMetric("throttled_share", _throttled),
)
