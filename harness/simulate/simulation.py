"""A workload served by a simulated engine, recorded as a measured run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.deliveries import split
from harness.record import ConfigValue, Outcome, RequestRecord, RunRecord
from harness.simulate.clients import Sent, serve
from harness.simulate.replica import Replica
from harness.simulate.setup import EngineSetup
from harness.simulate.state import Served
from harness.simulate.step_time import StepTimeModel
from harness.slo import Slo
from workloads.workload import Workload


def simulate(
    workload: Workload,
    setup: EngineSetup,
    model: StepTimeModel,
    rng: np.random.Generator | None = None,
    *,
    slo: Slo | None = None,
    output_tokens: Mapping[str, int] | None = None,
    identity: Mapping[str, Any] | None = None,
    leap: bool = True,
) -> RunRecord:
    """Serve ``workload`` on one simulated engine; the tables of the result are those of a measured run.

    Args:
        rng: draws what the model does not explain; None = every step takes its expected time.
        output_tokens: by request id, tokens until its end where it is known to end before its cap.
        identity: columns of the runs table (run_id, model, arm …) beside those that are known here.
        leap: pass over equal decode steps at once; the result is the same.

    Raises:
        ModelError: a step of a kind that was never measured.
    """
    replica = Replica(setup, model, rng, leap)
    sent = serve(
        workload,
        [replica],
        lambda wanted, replicas: 0,
        output_tokens or {},
        model.send_ms / 1000,
    )
    return recorded(workload, [replica], sent, model, slo=slo, identity=identity)


def recorded(
    workload: Workload,
    replicas: Sequence[Replica],
    sent: Sent,
    model: StepTimeModel,
    *,
    slo: Slo | None = None,
    identity: Mapping[str, Any] | None = None,
) -> RunRecord:
    """What clients of one or several replicas saw; the step log is that of the first, counters are sums."""
    served: dict[int, Served] = {}
    for replica in replicas:
        served |= replica.served
    numbers = np.concatenate([n for r in replicas for n in r.token_numbers] or [np.empty(0, np.int64)])
    times_s = np.concatenate([t for r in replicas for t in r.token_times] or [np.empty(0)])
    none = np.zeros(len(numbers), dtype=np.int64)
    columns = {"requests": numbers, "times_ns": _ns(times_s), "sizes": none + 1, "ids_seen": none, "ids": none}
    columns["ids"] = none[:0]
    deliveries = split(len(workload), columns)
    requests = []
    for number, wanted in enumerate(workload.requests):
        if number in sent.given_up:
            planned = RequestRecord(wanted.request_id, len(wanted.prompt_ids), wanted.max_new_tokens)
            requests.append(replace(planned, outcome=Outcome.CANCELLED, error=sent.given_up[number]))
            continue
        s = served[number]
        requests.append(
            RequestRecord(
                wanted.request_id,
                prompt_tokens=sent.prompt_tokens[number],
                planned_prompt_tokens=len(wanted.prompt_ids),
                max_new_tokens=wanted.max_new_tokens,
                prefix_group=wanted.prefix_group,
                t_sched_ns=sent.due_ns[number],
                t_submit_ns=round(s.sent_s * 1e9),
                t_admit_ns=None if s.admitted_s is None else round(s.admitted_s * 1e9),
                t_done_ns=None if s.ended_s is None else round(s.ended_s * 1e9),
                chunks=deliveries[number],
                outcome=s.outcome,
                error=s.error,
                cached_tokens=s.request.cached_tokens,
                recomputed_tokens=s.request.recomputed_tokens,
                output_counted_by="counts",
            )
        )
    frame = replicas[0].log.frame()
    steps = frame.assign(t_ns=_ns(frame.pop("t_s").to_numpy()))
    ends = [r.t_done_ns for r in requests if r.t_done_ns is not None]
    known = {"engine": "ours", "workload": workload.name, "workload_hash": None, "device": "simulated"}
    return RunRecord(
        identity={"run_id": "simulated", **known, **(identity or {}), "n_requests": len(workload)},
        requests=requests,
        t_start_ns=0,
        t_end_ns=max(ends, default=0),
        config=[ConfigValue(name, value, "simulated") for name, value in _settings(replicas[0].setup).items()],
        environment={"workload.spec": dict(workload.spec), "step_time_model.source": dict(model.source)},
        steps=steps,
        counters=_counters(replicas),
        slo=slo,
        source="simulated",
    )


def _ns(seconds: np.ndarray) -> np.ndarray:
    return np.rint(seconds * 1e9).astype(np.int64)


def _settings(setup: EngineSetup) -> dict[str, Any]:
    return {
        "page_size": setup.layout.page_size,
        "num_blocks": setup.num_blocks,
        "max_batch_tokens": setup.max_batch_tokens,
        "max_requests_per_batch": setup.max_requests_per_batch,
        "scheduler_type": setup.scheduler_type,
        "safety_margin": setup.safety_margin,
        "allow_block_sharing": setup.share_prefixes,
        "use_async_batching": setup.overlapped,
        "use_cuda_graph": list(setup.graphs),
    }


def _counters(replicas: Sequence[Replica]) -> dict[str, float | int | None]:
    free = [float(r.log.column("free_blocks").min()) for r in replicas if len(r.log.array())]
    return {
        "steps": sum(len(r.log.array()) for r in replicas),
        "preemptions": sum(r.preemptions for r in replicas),
        "prefix_query_tokens": sum(r.prefix_query_tokens for r in replicas),
        "prefix_hit_tokens": sum(r.prefix_hit_tokens for r in replicas),
        "kv_blocks_total": sum(r.setup.num_blocks for r in replicas),
        "kv_blocks_free_min": int(min(free)) if free else None,
        "extrapolated_steps": sum(int(r.log.column("beyond").sum()) for r in replicas),
    }
