"""What a run observed, before anything is computed from it.

One clock everywhere: ``time.perf_counter_ns`` of the measuring process. A value that was not observed is None,
never 0. Metrics (``harness.metrics``) turn these records into the tables of ``harness.tables``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from harness.deliveries import TokenChunk
from harness.slo import Slo

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COUNTED_BY", "ConfigValue", "Outcome", "RequestRecord", "RunRecord", "TokenChunk"]


class Outcome(StrEnum):
    """How a request ended, from the client's point of view.

    A server's refusal by status code is a member, too: ``Outcome("http_503")``, made when first asked for.
    """

    OK_EOS = "ok_eos"
    OK_LENGTH = "ok_length"
    EMPTY = "empty"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OOM_LOAD = "oom_load"
    OOM_PREFILL = "oom_prefill"
    OOM_DECODE = "oom_decode"
    CACHE_EXHAUSTED = "cache_exhausted"
    ENGINE_ERROR = "engine_error"
    STREAM_TRUNCATED = "stream_truncated"
    UNFINISHED = "unfinished"

    @property
    def ok(self) -> bool:
        return self in (Outcome.OK_EOS, Outcome.OK_LENGTH)

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        if not isinstance(value, str) or re.fullmatch(r"http_[1-9]\d\d", value) is None:
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = value.upper(), value
        known: Outcome = cls._value2member_map_.setdefault(value, member)  # type: ignore[assignment]
        return known


COUNTED_BY = {
    "ids": "every delivery has its token ids",
    "logprobs": "every delivery has one log probability a token",
    "counts": "every delivery states its number, or a server's usage so far",
    "total": "only the end states a number; deliveries held one token each if there were as many, else unknown numbers",
    "nothing": "the server states no number anywhere",
    "impossible": "the server's number cannot be true (above max_new_tokens, 0 although text came, falling, no "
    "whole number): not believed, and unknown",
}
"""How the number of generated tokens is known, by the value of ``output_counted_by``."""


@dataclass(slots=True)
class RequestRecord:
    """Everything observed about one request. Times are ``perf_counter_ns``; None = not observed.

    Attributes:
        prompt_tokens: of the prompt as sent; the server's own count where it states one.
        planned_prompt_tokens: what the workload asked for; differs where a server gets text, or adds tokens of its own.
        holds_answer_of: the request whose answer is part of its prompt (the turn before); None = no answer is.
        t_sched_ns: when the schedule said it should be sent; where it waited for another's end, when that made it due.
        t_submit_ns: when the sender called the backend.
        t_admit_ns: when the engine first gave it a place in a batch (None if the backend hides it).
        t_done_ns: when its terminal output reached the consumer.
        chunks: what was delivered, in order.
        cached_tokens: prompt tokens served from the prefix cache.
        padding_prompt_tokens, padding_output_tokens: padded positions computed for it (static batching), never part of
            a headline.
        statuses: states it went through in the engine, in order, " > " between them; None = the engine does not tell.
        t_pending_ns, t_decoding_ns, t_over_ns: when the engine took it, launched the step that samples its first token,
            and ended it. It prefills from ``t_admit_ns`` on.
        preemptions: how often it lost its place and was pending again.
        prefill_steps: steps that computed its prompt, or what a preemption had lost.
        kv_blocks: KV blocks it held when it ended.
        phase: of the workload, that it belongs to; None = the workload has none.
        output_tokens: how many tokens the server says it generated; None if it says nothing.
        output_counted_by: what tells how many tokens each delivery held (see :data:`COUNTED_BY`); None = their ids.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    prefix_group: int | None = None
    holds_answer_of: str | None = None
    t_sched_ns: int | None = None
    t_submit_ns: int | None = None
    t_admit_ns: int | None = None
    t_done_ns: int | None = None
    chunks: Sequence[TokenChunk] = field(default_factory=list)
    outcome: Outcome = Outcome.UNFINISHED
    error: str | None = None
    cached_tokens: int | None = None
    recomputed_tokens: int | None = None
    padding_prompt_tokens: int | None = None
    padding_output_tokens: int | None = None
    planned_prompt_tokens: int | None = None
    output_tokens: int | None = None
    output_counted_by: str | None = None
    statuses: str | None = None
    t_pending_ns: int | None = None
    t_decoding_ns: int | None = None
    t_over_ns: int | None = None
    preemptions: int | None = None
    prefill_steps: int | None = None
    kv_blocks: int | None = None
    phase: int | None = None


@dataclass(slots=True)
class ConfigValue:
    """One resolved setting of the backend: what it is and where it came from ("user", "default", "derived: …")."""

    field: str
    value: Any
    source: str


@dataclass
class RunRecord:
    """One measured run: the raw material of every table.

    Attributes:
        identity: run_id, experiment, variable, arm, repeat, engine, model, workload, workload_hash, seed …
        t_start_ns / t_end_ns: start of the schedule and last terminal output.
        warmup_s, load_s: time spent before measuring.
        steps: engine step log, one mapping a step (columns of the ``steps`` table), or all of them as a frame of such
            columns; empty if the backend has none.
        counters: run-level counts and gauges of the backend (preemptions, prefix_hit_tokens, graph_replays …).
        memory: peak and ledger figures in bytes by name.
        source: "measured", or "simulated" (see :mod:`harness.simulate`).
        measured_gaps: token indices of the gaps that the workload's phases are about, first and last; None = all.
        calibration: columns of the ``calibration`` table (see :mod:`harness.calibration`); None = not calibrated.
        telemetry: samples, one mapping each (``t_s``, ``rss_bytes``, ``gpu_used_bytes`` …).
        gc_pauses: when the interpreter collected garbage, one mapping each (``t_ns``, ``duration_ms``, ``generation``).
        slo: the limits that were decided before the run; None = none.
    """

    identity: dict[str, Any]
    requests: list[RequestRecord] = field(default_factory=list)
    t_start_ns: int | None = None
    t_end_ns: int | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    config: list[ConfigValue] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] | pd.DataFrame = field(default_factory=list)
    counters: dict[str, float | int | None] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    gc_pauses: list[dict[str, Any]] = field(default_factory=list)
    slo: Slo | None = None
    measured_gaps: tuple[int, int] | None = None
    calibration: dict[str, float] | None = None
    source: str = "measured"
    status: str = "ok"
    error: str | None = None
    traceback: str | None = None
