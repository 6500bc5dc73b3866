"""Inter-token gaps by phase: what a decode step takes with so many requests in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.metrics.inter_token import Gaps
from harness.metrics.observations import Observations
from harness.record import RunRecord


def phase_rows(record: RunRecord, o: Observations, gaps: Gaps) -> list[dict[str, Any]]:
    """Rows of the table ``phases``; [] for a workload without phases.

    Only gaps count in which every request of the phase was generating: from the latest first token on, until the first
    request had its last. Where a request did not end ok, or no such gap was seen, the times are null.
    """
    phases = np.array([-1 if r.phase is None else r.phase for r in record.requests], dtype=np.int64)
    prompt = np.array([r.prompt_tokens for r in record.requests], dtype=np.int64)
    first, last = record.measured_gaps or (1, np.iinfo(np.int64).max)
    at = (gaps.index >= first) & (gaps.index <= last)
    rows = []
    for phase in sorted(set(phases.tolist()) - {-1}):
        own = phases == phase
        began, ended = o.t_first[own].max(), o.t_last[own].min()  # NaN without a token: nothing compares with it
        chosen = at & own[gaps.request] & (gaps.t_ns <= ended) & (gaps.t_ns - gaps.itl_ms * 1e6 >= began - 1)
        itl = gaps.itl_ms[chosen] if o.ok[own].all() else np.zeros(0)
        known = len(itl) > 0
        context = prompt[gaps.request[chosen]] + gaps.index[chosen] if known else None
        rows.append(
            {
                "phase": phase,
                "n_requests": int(own.sum()),
                "context_tokens": float(np.median(context)) if context is not None else None,
                "n_gaps": len(itl),
                "itl_p50_ms": float(np.median(itl)) if known else None,
                "itl_p95_ms": float(np.percentile(itl, 95)) if known else None,
            }
        )
    return rows
