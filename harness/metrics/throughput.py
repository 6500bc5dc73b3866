"""Token counts and rates of a run. Padding is counted apart and never enters a rate."""

from __future__ import annotations

from functools import partial

import numpy as np

from harness.metrics.metric import HIGHER, RunMetric, RunView, rate
from harness.metrics.observations import FloatArray


def _prompt_tokens(run: RunView) -> int:
    return sum(r.prompt_tokens for r, ok in zip(run.record.requests, run.observations.ok, strict=True) if ok)


def _uncounted(run: RunView) -> int:
    return int((run.observations.ok & ~run.observations.counted).sum())


def _generated_tokens(run: RunView) -> int | None:
    """None if a server left open how many tokens some request got: a sum over the others would be too small."""
    return None if _uncounted(run) else int(run.observations.n_tokens[run.observations.ok].sum())


def _gen_tok_s(run: RunView) -> float | None:
    generated = _generated_tokens(run)
    return None if generated is None else rate(generated, run.wall_s)


def _by_request(run: RunView, name: str) -> int | None:
    """Sum of a request fact over the ok requests; else the backend's own count; None if neither is known."""
    values = [getattr(r, name) for r, ok in zip(run.record.requests, run.observations.ok, strict=True) if ok]
    if values and all(v is not None for v in values):
        return int(sum(values))
    counted = run.record.counters.get(name)
    return None if counted is None else int(counted)


def _arrival_rate(times: FloatArray) -> float | None:
    known = times[~np.isnan(times)]
    if len(known) < 2:
        return None
    return rate(len(known) - 1, float(known.max() - known.min()) / 1e9)


METRICS = (
    RunMetric("wall_s", lambda run: run.wall_s),
    RunMetric("prompt_tokens", _prompt_tokens),
    RunMetric("generated_tokens", _generated_tokens),
    *(
        RunMetric(name, partial(_by_request, name=name))
        for name in ("cached_tokens", "recomputed_tokens", "padding_prompt_tokens", "padding_output_tokens")
    ),
    RunMetric("n_uncounted", _uncounted),
    RunMetric("gen_tok_s", _gen_tok_s, HIGHER),
    RunMetric("prompt_tok_s", lambda run: rate(_prompt_tokens(run), run.wall_s)),
    RunMetric("request_s", lambda run: rate(int(run.observations.ok.sum()), run.wall_s)),
    RunMetric("offered_request_s", lambda run: _arrival_rate(run.observations.t_sched)),
    RunMetric("sent_request_s", lambda run: _arrival_rate(run.observations.t_submit)),
)
