"""The tidy tables: every column with its type, unit, definition and null rule, once.

``results/README.md`` is generated from this module (``python -m harness.tables``), the writers check their frames
against it, and the report takes its labels from it. One row is one thing; units are in the names; null = unknown.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.record import COUNTED_BY

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Column:
    """A column: ``dtype`` is a pandas dtype name (nullable ones for counts), ``unit`` "" if it has none.

    ``null`` says when the value is unknown; "" if it is always there.
    """

    name: str
    dtype: str
    unit: str
    definition: str
    null: str = ""


def _c(name: str, dtype: str, unit: str, definition: str, null: str = "") -> Column:
    return Column(name, dtype, unit, definition, null)


MIN_P99_SAMPLES = 662
"""Below so many samples a 99th percentile is shown greyed: too few values lie beyond it to state it."""

_RUN_ID = _c("run_id", "string", "", "the run this row belongs to (key of the runs table)")
_REQUEST_ID = _c("request_id", "string", "", "the request this row belongs to (key of the requests table with run_id)")

_UNSENT = "run not started"
_NO_WALL = "wall_s unknown or 0"
_NO_OK = "no ok request"
_NOT_OK = "request not ok"
_UNCOUNTED = "n_uncounted above 0"
_HIDDEN = "not reported by the backend"
_NO_GAP = "no gap observed"
_NO_GPU = "no GPU, or not sampled"
_NO_WINDOW = "no steady window: see steady_state"
_NO_SLO = "no SLO was decided before the run, or it has no such limit"
_BY_REQUEST = "sum over ok requests; the backend's own count over all requests if it does not report it by request"

TABLES: dict[str, tuple[Column, ...]] = {
    "runs": (
        _RUN_ID,
        _c("experiment", "string", "", "experiment the run is part of", "single run"),
        _c("variable", "string", "", "the one setting the experiment varies", "single run"),
        _c("arm", "string", "", "value of the variable in this run, as text", "single run"),
        _c("arm_index", "Int64", "", "place of the arm in the sweep as it was written, from 0", "block unknown"),
        _c("repeat", "Int64", "", "index of the repeat within its arm, from 0; in a sweep its block", "not stated"),
        _c("block", "Int64", "", "block of a sweep, which holds every arm once", "single run, or a sweeper of its own"),
        _c("position", "Int64", "", "place of the run in the order of its block, from 0", "block unknown"),
        _c("replica", "Int64", "", "1 if the run repeats an arm beside itself (A/A), else 0", "block unknown"),
        _c("engine", "string", "", "backend: ours, transformers, static, openai_http, null"),
        _c("model", "string", "", "model preset or path", "not stated"),
        _c("workload", "string", "", "name of the workload", "not stated"),
        _c("workload_hash", "string", "", "SHA-256 of all requests, due times and caps", "workload not built"),
        _c("device", "string", "", "device the model ran on", "not stated"),
        _c("seed", "Int64", "", "seed of the workload", "not stated"),
        _c("source", "string", "", "measured, or simulated: the engine's scheduler under a virtual clock"),
        _c("status", "string", "", "ok, failed or timeout: the run as a whole"),
        _c("error", "string", "", "one line: why the run failed", "run ok"),
        _c("n_requests", "Int64", "requests", "requests in the workload", "workload not built"),
        _c("n_ok", "Int64", "requests", "requests that ended by EOS or at their cap with at least one token"),
        _c("n_failed", "Int64", "requests", "requests that failed: neither ok nor cancelled nor unfinished"),
        _c("n_timed_out", "Int64", "requests", "those of n_failed that ended by the client's timeout"),
        _c("n_cancelled", "Int64", "requests", "requests cancelled by the client"),
        _c("n_unfinished", "Int64", "requests", "requests still open when the run ended: censored, no latency"),
        _c("n_uncounted", "Int64", "requests", "ok requests of which the server does not say how many tokens they got"),
        _c("outcomes", "string", "", "requests by outcome (harness.record.Outcome), as a JSON object"),
        _c("wall_s", "Float64", "s", "start of the schedule to the last terminal output", "run not finished"),
        _c("load_s", "Float64", "s", "time to load the model", "not loaded"),
        _c("warmup_s", "Float64", "s", "compile, capture and warm-up requests; not part of wall_s", "no warm-up"),
        _c("prompt_tokens", "Int64", "tokens", "real prompt tokens of all requests that were answered ok"),
        _c("cached_tokens", "Int64", "tokens", f"prompt tokens served from the prefix cache: {_BY_REQUEST}", _HIDDEN),
        _c("recomputed_tokens", "Int64", "tokens", f"tokens computed again after a preemption: {_BY_REQUEST}", _HIDDEN),
        _c(
            "generated_tokens",
            "Int64",
            "tokens",
            "tokens delivered by ok requests, EOS counted, nothing after it",
            _UNCOUNTED,
        ),
        _c(
            "padding_prompt_tokens",
            "Int64",
            "tokens",
            f"padded prompt positions computed, never in a headline: {_BY_REQUEST}",
            _HIDDEN,
        ),
        _c(
            "padding_output_tokens",
            "Int64",
            "tokens",
            f"rows computed after their request had ended, never in a headline: {_BY_REQUEST}",
            _HIDDEN,
        ),
        _c("gen_tok_s", "Float64", "tokens/s", "generated_tokens / wall_s", f"{_NO_WALL}, or {_UNCOUNTED}"),
        _c("prompt_tok_s", "Float64", "tokens/s", "prompt_tokens / wall_s", _NO_WALL),
        _c("request_s", "Float64", "requests/s", "n_ok / wall_s", _NO_WALL),
        _c("offered_request_s", "Float64", "requests/s", "(n - 1) / (last due time - first)", "burst, or one request"),
        _c("sent_request_s", "Float64", "requests/s", "(n - 1) / (last t_submit - first)", "fewer than two sent"),
        _c(
            "steady_state",
            "string",
            "",
            "steady; or why there is no window: saturated (the queue grows), non_stationary, burst (all sent within a "
            "tenth of the run), too_short (under 50 requests, or sent within two lives of a request)",
        ),
        _c(
            "steady_start_s",
            "Float64",
            "s",
            "start of the steady window: where the first request was sent that MSER-5 on the TTFTs' ranks keeps",
            _NO_WINDOW,
        ),
        _c("steady_end_s", "Float64", "s", "its end: the last request sent, or where CUSUM finds a change", _NO_WINDOW),
        _c("steady_n", "Int64", "requests", "requests sent inside it", _NO_WINDOW),
        _c(
            "steady_gen_tok_s", "Float64", "tokens/s", "tokens of ok requests delivered inside / its length", _NO_WINDOW
        ),
        _c(
            "steady_prompt_tok_s",
            "Float64",
            "tokens/s",
            "prompt tokens of ok requests whose first token came inside / its length",
            _NO_WINDOW,
        ),
        _c("steady_request_s", "Float64", "requests/s", "ok requests that ended inside / its length", _NO_WINDOW),
        _c("steady_ttft_p50_ms", "Float64", "ms", "median of ttft_ms over ok requests sent inside", _NO_WINDOW),
        _c(
            "steady_ttft_p95_ms", "Float64", "ms", "95th percentile of ttft_ms over ok requests sent inside", _NO_WINDOW
        ),
        _c("steady_itl_p50_ms", "Float64", "ms", "median of the gaps that ended inside", _NO_WINDOW),
        _c("steady_itl_p99_ms", "Float64", "ms", "99th percentile of the gaps that ended inside", _NO_WINDOW),
        _c("slo", "string", "", "limits decided before the run, as a JSON object", "no SLO was decided"),
        _c(
            "slo_met", "boolean", "", "whether every limit of the run was kept; failed requests never answered", _NO_SLO
        ),
        _c("slo_broken", "string", "", "limits of the run that were not kept, with what was measured", "none broken"),
        _c("n_good", "Int64", "requests", "ok requests within every limit on one request (slo_met)", _NO_SLO),
        _c("goodput_request_s", "Float64", "requests/s", "n_good / wall_s", f"{_NO_SLO}, or {_NO_WALL}"),
        _c("ttft_mean_ms", "Float64", "ms", "mean of ttft_ms over ok requests", _NO_OK),
        _c("ttft_p50_ms", "Float64", "ms", "median of ttft_ms over ok requests", _NO_OK),
        _c("ttft_p95_ms", "Float64", "ms", "95th percentile (linear) of ttft_ms over ok requests", _NO_OK),
        _c("ttft_p99_ms", "Float64", "ms", "99th percentile (linear) of ttft_ms over ok requests", _NO_OK),
        _c("ttft_sched_p50_ms", "Float64", "ms", "median of ttft_sched_ms over ok requests", _NO_OK),
        _c("ttft_sched_p95_ms", "Float64", "ms", "95th percentile (linear) of ttft_sched_ms over ok requests", _NO_OK),
        _c("ttft_sched_p99_ms", "Float64", "ms", "99th percentile (linear) of ttft_sched_ms over ok requests", _NO_OK),
        _c("itl_n", "Int64", "gaps", "number of inter-token gaps pooled over ok requests"),
        _c("itl_mean_ms", "Float64", "ms", "mean of the pooled inter-token gaps", _NO_GAP),
        _c("itl_p50_ms", "Float64", "ms", "median of the pooled inter-token gaps", _NO_GAP),
        _c("itl_p95_ms", "Float64", "ms", "95th percentile (linear) of the pooled inter-token gaps", _NO_GAP),
        _c("itl_p99_ms", "Float64", "ms", "99th percentile (linear) of the pooled inter-token gaps", _NO_GAP),
        _c("icl_p50_ms", "Float64", "ms", "median of the raw gaps between deliveries", _NO_GAP),
        _c("icl_p99_ms", "Float64", "ms", "99th percentile (linear) of the raw gaps between deliveries", _NO_GAP),
        _c("tpot_p50_ms", "Float64", "ms", "median of tpot_ms over ok requests", "tpot_ms null in every request"),
        _c(
            "tpot_p95_ms",
            "Float64",
            "ms",
            "95th percentile of tpot_ms over ok requests",
            "tpot_ms null in every request",
        ),
        _c("e2e_p50_ms", "Float64", "ms", "median of e2e_ms over ok requests", _NO_OK),
        _c("e2e_p95_ms", "Float64", "ms", "95th percentile (linear) of e2e_ms over ok requests", _NO_OK),
        _c("e2e_p99_ms", "Float64", "ms", "99th percentile (linear) of e2e_ms over ok requests", _NO_OK),
        _c("queue_p50_ms", "Float64", "ms", "median of queue_ms over ok requests", "the backend hides admission"),
        _c(
            "queue_p95_ms",
            "Float64",
            "ms",
            "95th percentile of queue_ms over ok requests",
            "the backend hides admission",
        ),
        _c("prefill_p50_ms", "Float64", "ms", "median of prefill_ms over ok requests", "the backend hides admission"),
        _c(
            "prefill_p95_ms",
            "Float64",
            "ms",
            "95th percentile of prefill_ms over ok requests",
            "the backend hides admission",
        ),
        _c("sched_lag_p99_ms", "Float64", "ms", "99th percentile of t_submit - t_sched over all sent", "none sent"),
        _c("peak_rss_bytes", "Int64", "bytes", "largest resident memory of the measured process", "not sampled"),
        _c("peak_gpu_allocated_bytes", "Int64", "bytes", "torch.cuda.max_memory_allocated while measuring", _NO_GPU),
        _c("peak_gpu_reserved_bytes", "Int64", "bytes", "torch.cuda.max_memory_reserved while measuring", _NO_GPU),
        _c("peak_gpu_used_bytes", "Int64", "bytes", "largest device memory in use (NVML), all processes", _NO_GPU),
        _c("ledger_residual_bytes", "Int64", "bytes", "line residual of the memory ledger", "no ledger, or no peak"),
        _c("throttled_share", "Float64", "", "share of the samples in which clocks were held down (NVML)", _NO_GPU),
        _c("preemptions", "Int64", "events", "requests evicted to be recomputed or restored later", _HIDDEN),
        _c("offloads", "Int64", "events", "requests whose KV blocks were moved to host memory", _HIDDEN),
        _c("soft_resets", "Int64", "events", "requests sent back to the queue with their output kept", _HIDDEN),
        _c("steps", "Int64", "steps", "forward passes while measuring", _HIDDEN),
        _c("running_max", "Int64", "requests", "most requests holding a place in one step", "no step log"),
        _c("waiting_max", "Int64", "requests", "most requests queued after scheduling", "no step log"),
        _c("kv_blocks_total", "Int64", "blocks", "blocks of the KV pool", _HIDDEN),
        _c("kv_blocks_free_min", "Int64", "blocks", "fewest free or reclaimable blocks after scheduling", _HIDDEN),
        _c("graph_replays", "Int64", "steps", "steps that replayed a CUDA graph", _HIDDEN),
        _c(
            "tokens_match",
            "boolean",
            "",
            "token ids and ends of every compared request are the reference's",
            "not compared",
        ),
        _c(
            "gate",
            "string",
            "",
            "correctness: equal; explained (differs only where the model's own logits, in float32, lie within "
            "the margin of its dtype); failed",
            "not compared",
        ),
        _c(
            "n_compared",
            "Int64",
            "requests",
            "requests that this run and the reference run both answered",
            "not compared",
        ),
        _c("n_diverged", "Int64", "requests", "those with other token ids or another end", "not compared"),
    ),
    "requests": (
        _RUN_ID,
        _REQUEST_ID,
        _c("outcome", "string", "", "how it ended (harness.record.Outcome); ok without a token is empty"),
        _c("error", "string", "", "one line: why it failed", "none given"),
        _c("prompt_tokens", "Int64", "tokens", "real prompt tokens: the server's own count where it states one"),
        _c("planned_prompt_tokens", "Int64", "tokens", "prompt tokens the workload asked for", "not stated"),
        _c("cached_tokens", "Int64", "tokens", "prompt tokens served from the prefix cache", _HIDDEN),
        _c("recomputed_tokens", "Int64", "tokens", "tokens computed again after a preemption", _HIDDEN),
        _c("max_new_tokens", "Int64", "tokens", "cap on generated tokens"),
        _c("output_tokens", "Int64", "tokens", "tokens generated: as delivered, or as the server states", "unstated"),
        _c(
            "output_counted_by",
            "string",
            "",
            "how that is known: " + "; ".join(f"{name} ({what})" for name, what in COUNTED_BY.items()),
        ),
        _c("padding_prompt_tokens", "Int64", "tokens", "padded prompt positions computed for it", _HIDDEN),
        _c("padding_output_tokens", "Int64", "tokens", "rows computed after it had ended", _HIDDEN),
        _c("prefix_group", "Int64", "", "group sharing a prefix", "no shared prefix"),
        _c("holds_answer_of", "string", "", "request whose answer is part of the prompt (a session)", "none is"),
        _c("t_sched_s", "Float64", "s", "due time after the start of the run", _UNSENT),
        _c("t_submit_s", "Float64", "s", "handed to the backend, after the start of the run", "not sent"),
        _c("t_admit_s", "Float64", "s", "first placed in a batch", "never placed, or the backend hides it"),
        _c("t_first_s", "Float64", "s", "first token usable by the consumer; empty deliveries are none", "no token"),
        _c("t_last_s", "Float64", "s", "last token usable by the consumer", "no token"),
        _c("t_done_s", "Float64", "s", "terminal output usable by the consumer", "not ended"),
        _c("sched_lag_ms", "Float64", "ms", "t_submit - t_sched", "not sent"),
        _c("ttft_ms", "Float64", "ms", "t_first - t_submit", _NOT_OK),
        _c("ttft_sched_ms", "Float64", "ms", "t_first - t_sched: with the sender's lag; drives SLO verdicts", _NOT_OK),
        _c("queue_ms", "Float64", "ms", "t_admit - t_submit", f"{_NOT_OK}, or admission hidden"),
        _c("prefill_ms", "Float64", "ms", "t_first - t_admit", f"{_NOT_OK}, or admission hidden"),
        _c("tpot_ms", "Float64", "ms", "(t_last - t_first) / (n - 1)", f"{_NOT_OK}, or all tokens in one delivery"),
        _c("itl_mean_ms", "Float64", "ms", "mean of its inter-token gaps", f"{_NOT_OK}, or {_NO_GAP}"),
        _c("itl_max_ms", "Float64", "ms", "largest of its inter-token gaps", f"{_NOT_OK}, or {_NO_GAP}"),
        _c("e2e_ms", "Float64", "ms", "t_last - t_submit", _NOT_OK),
        _c("slo_met", "boolean", "", "whether it ended ok within every limit of the SLO on one request", _NO_SLO),
    ),
    "itl": (
        _RUN_ID,
        _REQUEST_ID,
        _c(
            "index",
            "Int64",
            "",
            "index of the later token of the gap; tokens of the first delivery have no row",
            "a delivery to the request held an unknown number of tokens",
        ),
        _c("t_s", "Float64", "s", "when the later token became usable, after the start of the run", _UNSENT),
        _c(
            "itl_ms",
            "Float64",
            "ms",
            "gap to the token before it; k tokens of one delivery give k gaps of gap / k",
            "k unknown",
        ),
        _c("icl_ms", "Float64", "ms", "raw gap between the two deliveries", "token not the first of its delivery"),
    ),
    "tokens": (
        _RUN_ID,
        _REQUEST_ID,
        _c("token_ids", "object", "", "generated token ids, in order, as an integer array"),
    ),
    "steps": (
        _RUN_ID,
        _c("step", "Int64", "", "index of the forward pass, from 0"),
        _c("t_s", "Float64", "s", "start of the step after the start of the run", _UNSENT),
        _c("kind", "string", "", "decode, prefill or mixed", _HIDDEN),
        _c("decode_rows", "Int64", "rows", "requests that decoded one token", _HIDDEN),
        _c("prefill_rows", "Int64", "rows", "requests that computed prompt tokens", _HIDDEN),
        _c("prefill_tokens", "Int64", "tokens", "prompt tokens computed", _HIDDEN),
        _c("padded_rows", "Int64", "tokens", "query tokens added to reach a captured size", _HIDDEN),
        _c("table_pages", "Int64", "pages", "width of the block tables, padding to a captured width included", _HIDDEN),
        _c("decode_kernel_rows", "Int64", "rows", "rows that took the decode fast path", _HIDDEN),
        _c("kv_tokens", "Int64", "tokens", "KV entries read by attention", _HIDDEN),
        _c("prefill_pairs", "Int64", "pairs", "query-key pairs of prompt rows, causal, windows left aside", _HIDDEN),
        _c("running", "Int64", "requests", "requests holding a place after scheduling", _HIDDEN),
        _c("waiting", "Int64", "requests", "requests queued after scheduling", _HIDDEN),
        _c("free_blocks", "Int64", "blocks", "KV blocks free or reclaimable after scheduling", _HIDDEN),
        _c("allocated_blocks", "Int64", "blocks", "KV blocks given out for this step", _HIDDEN),
        _c("evicted_blocks", "Int64", "blocks", "those of them whose cached prefix was given up", _HIDDEN),
        _c("unused_slots", "Int64", "tokens", "room left in the last KV pages of the step's requests", _HIDDEN),
        _c("preempted", "Int64", "requests", "requests evicted by this step", _HIDDEN),
        _c("admission_held", "boolean", "", "whether the safety margin kept a waiting request out", _HIDDEN),
        _c("graph", "boolean", "", "whether a captured graph was replayed", _HIDDEN),
        _c("schedule_ms", "Float64", "ms", "host time to choose the batch and build its inputs", _HIDDEN),
        _c("step_ms", "Float64", "ms", "start of scheduling to tokens on the host", _HIDDEN),
        _c("offloaded", "Int64", "requests", "requests whose KV blocks went to host memory before this step", _HIDDEN),
        _c("restored", "Int64", "requests", "requests whose KV blocks came back before this step", _HIDDEN),
        _c("gpu_ms", "Float64", "ms", "time on the device from its first work to its tokens (CUDA events)", _NO_GPU),
        _c("restore_ms", "Float64", "ms", "time on the device of restoring", "none restored, or not reported"),
    ),
    "divergences": (
        _RUN_ID,
        _c("reference_run_id", "string", "", "the run it was compared with"),
        _REQUEST_ID,
        _c("index", "Int64", "", "number of equal tokens before the first difference"),
        _c("kind", "string", "", "token (another id), length (one stops there), end (another cause of the same end)"),
        _c("token", "Int64", "", "id in this run", "this run had stopped"),
        _c("reference_token", "Int64", "", "id in the reference run", "that run had stopped"),
        _c("margin", "Float64", "", "how far below the best logit (float32) the lower of the two is", "not scored"),
        _c(
            "limit",
            "Float64",
            "",
            "margin up to which it is explained: 1e-2 in bfloat16, 2e-3 in float16, 1e-4 in float32, times the best "
            "logit where that is above 1; or twice the most that the dtype moves a logit there, if that is more",
            "not scored",
        ),
        _c("verdict", "string", "", "explained or failed"),
        _c("note", "string", "", "what differed, or why it was not scored", "nothing to add"),
    ),
    "gc_pauses": (
        _RUN_ID,
        _c("t_s", "Float64", "s", "start of the collection after the start of the run", _UNSENT),
        _c("duration_ms", "Float64", "ms", "how long nothing else ran in the measuring process"),
        _c("generation", "Int64", "", "oldest generation collected: 0, 1 or 2"),
    ),
    "tails": (
        _RUN_ID,
        _c("kind", "string", "", "ttft or itl: what was slow"),
        _REQUEST_ID,
        _c("index", "Int64", "", "index of the token that came late", "deliveries of unknown size"),
        _c("t_s", "Float64", "s", "when it became usable, after the start of the run"),
        _c("value_ms", "Float64", "ms", "ttft_ms of the request, or icl_ms of the delivery"),
        _c("typical_ms", "Float64", "ms", "median of that in this run"),
        _c(
            "cause",
            "string",
            "",
            "what explains at least half of the TTFT, or of the gap beyond the median: large prefill in step, "
            "preemption, offload or restore, admission held by margin, graph miss, garbage collection, queueing (for a "
            "place in a batch), harness lag (tokens there, not yet taken), between steps, no step log, unknown; "
            "ordinary: within 1.5 x the median",
        ),
        _c("explained_ms", "Float64", "ms", "the part that the cause explains", "ordinary, unknown or no step log"),
        _c("step", "Int64", "", "step that owned most of the time (key of steps with run_id)", "no step ran then"),
        _c("evidence", "string", "", "that step in words", "no step ran then"),
    ),
    "config": (
        _RUN_ID,
        _c("field", "string", "", "setting of the engine"),
        _c("value", "string", "", "resolved value, as JSON"),
        _c("source", "string", "", "user, default, or derived: from what"),
    ),
    "environment": (
        _RUN_ID,
        _c("key", "string", "", "what is described; identity.* is what the run was called beyond the runs table"),
        _c("value", "string", "", "as JSON"),
    ),
    "counters": (
        _RUN_ID,
        _c("name", "string", "", "what the backend counted while measuring, in its own words"),
        _c("value", "Float64", "", "the count or gauge", "counter known but not read"),
    ),
    "memory_ledger": (
        _RUN_ID,
        _c(
            "line",
            "string",
            "",
            "what the memory is for, or which peak; planned: sum of the engine's lines; residual: the allocator's peak "
            "(on a CPU: of resident memory, with interpreter and libraries) beyond it; outside_torch: this process on "
            "the GPU (NVML) beyond torch's reserve",
        ),
        _c("bytes", "Int64", "bytes", "its size", "line known but not read"),
    ),
    "calibration": (
        _RUN_ID,
        _c("tokens", "Int64", "tokens", "tokens that the known schedule delivered, right before the run was measured"),
        _c("gen_tok_s", "Float64", "tokens/s", "at what rate"),
        _c(
            "ttft_error_p50_ms",
            "Float64",
            "ms",
            "median absolute error of the time to first token, measured against scheduled",
        ),
        _c("ttft_error_p99_ms", "Float64", "ms", "99th percentile of the same"),
        _c("itl_error_p50_ms", "Float64", "ms", "median absolute error of the gaps between tokens"),
        _c("itl_error_p99_ms", "Float64", "ms", "99th percentile of the same"),
        _c("sched_lag_p99_ms", "Float64", "ms", "99th percentile of the sender's lag"),
        _c("last_lag_ms", "Float64", "ms", "lag of the last request: whether lateness adds up"),
        _c("overhead_us_per_token", "Float64", "µs", "processor time of recording one token"),
    ),
    "telemetry": (
        _RUN_ID,
        _c("t_s", "Float64", "s", "after the start of the run"),
        _c("rss_bytes", "Int64", "bytes", "resident memory of the process", "not sampled"),
        _c("gpu_used_bytes", "Int64", "bytes", "device memory in use, all processes (NVML)", _NO_GPU),
        _c(
            "gpu_own_bytes",
            "Int64",
            "bytes",
            "device memory of this process (NVML)",
            "no GPU, or hidden by a container",
        ),
        _c("gpu_util_percent", "Float64", "%", "share of time in which a kernel ran (NVML)", _NO_GPU),
        _c(
            "gpu_memory_util_percent",
            "Float64",
            "%",
            "share of time in which memory was read or written (NVML)",
            _NO_GPU,
        ),
        _c("sm_clock_mhz", "Int64", "MHz", "SM clock (NVML)", _NO_GPU),
        _c("memory_clock_mhz", "Int64", "MHz", "memory clock (NVML)", _NO_GPU),
        _c("power_w", "Float64", "W", "board power (NVML)", _NO_GPU),
        _c("throttle", "string", "", "what holds the clocks down (NVML), joined by commas; empty: nothing", _NO_GPU),
    ),
}

_UNPAIRED = "no pairs"
_ONE_PAIR = "fewer than two pairs"

BESIDE: dict[str, tuple[Column, ...]] = {
    "comparison": (
        _c("facet", "string", "", "what the two arms have in common; empty if all runs do"),
        _c("baseline", "string", "", "arm that ratios are taken to"),
        _c("arm", "string", "", "arm that is judged"),
        _c("metric", "string", "", "column of runs that is compared"),
        _c("better", "string", "", "higher or lower: which value of the metric is better"),
        _c("pairs", "Int64", "", "pairs of runs with the same requests, seed and repeat; 0 if arms are not compared"),
        _c(
            "baseline_median", "Float64", "", "median over the baseline's ok runs, in the unit of metric", "never known"
        ),
        _c("arm_median", "Float64", "", "median over the arm's ok runs, in the unit of metric", "never known"),
        _c("ratio", "Float64", "", "geometric mean of arm / baseline over the pairs", _UNPAIRED),
        _c("ratio_smallest", "Float64", "", "smallest ratio of a pair", _UNPAIRED),
        _c("ratio_largest", "Float64", "", "largest ratio of a pair", _UNPAIRED),
        _c(
            "ratio_low",
            "Float64",
            "",
            "lower end of the 95 % interval (expanded percentile bootstrap over the pairs)",
            _ONE_PAIR,
        ),
        _c("ratio_high", "Float64", "", "upper end of that interval", _ONE_PAIR),
        _c("p", "Float64", "", "two-sided, paired t test on the log ratios", _ONE_PAIR),
        _c("p_holm", "Float64", "", "p after Holm's correction over arms and metrics of the facet", "not tested"),
        _c("noise_floor", "Float64", "", "largest difference an arm showed to itself (A/A), as a share", "no A/A arm"),
        _c("verdict", "string", "", "better, worse, indistinguishable or confounded", "none can be given: see reason"),
        _c("reason", "string", "", "why this verdict, or why none"),
    ),
}
"""Tables that a comparison of runs adds; a result folder is complete without them."""

_ONE_ROW = {
    "runs": "One row a run: everything summed up.",
    "requests": "One row a request, whatever its end. Latencies are null unless it ended ok.",
    "itl": "One row an observed gap between two consecutive tokens, of ok requests.",
    "tokens": "One row a request whose token ids were visible: what was generated.",
    "steps": "One row a forward pass of the engine, where it keeps a step log.",
    "tails": "One row a slow thing: the worst 1 % (at most 1,000) of the TTFTs and of the gaps between deliveries.",
    "divergences": "One row a request whose answer is not the reference's: where it first differs, and why.",
    "gc_pauses": "One row a garbage collection of the measuring process, which holds the engine's loop too.",
    "config": "One row a resolved setting of a run.",
    "environment": "One row a fact about machine, software or run.",
    "counters": "One row a count of the backend.",
    "memory_ledger": "One row a line of the memory ledger.",
    "calibration": "One row a calibrated run: what the harness itself adds here, by a known schedule.",
    "telemetry": "One row a sample.",
    "comparison": "One row a metric of an arm against its baseline. Only in sweeps and in what `cb-compare` writes.",
}


class SchemaError(ValueError):
    """A frame that is not what :data:`TABLES` says."""


def column(table: str, name: str) -> Column:
    """The column ``name`` of ``table``; KeyError naming both if there is none."""
    for c in TABLES[table]:
        if c.name == name:
            return c
    raise KeyError(f"table {table!r} has no column {name!r}")


def check_frame(table: str, frame: pd.DataFrame) -> None:
    """Raise SchemaError unless ``frame`` has exactly the columns of ``table``, in order and with their dtypes."""
    wanted = [c.name for c in TABLES[table]]
    given = [str(name) for name in frame.columns]
    if given != wanted:
        missing = [n for n in wanted if n not in given]
        unknown = [n for n in given if n not in wanted]
        raise SchemaError(
            f"table {table!r}: missing columns {missing}, unknown columns {unknown}; "
            f"the columns must be those of harness.tables in their order"
        )
    for c in TABLES[table]:
        if str(frame[c.name].dtype) != c.dtype:
            raise SchemaError(f"table {table!r}: column {c.name!r} is {frame[c.name].dtype}, must be {c.dtype}")


def readme() -> str:
    """Text of ``results/README.md``."""
    lines = [
        "# Results: the tables and what every column means",
        "",
        "<!-- Generated by `python -m harness.tables` from harness/tables.py. Do not edit. -->",
        "",
        "A result folder holds these tables as parquet and csv; a sweep's root folder holds the same tables of all its",
        "runs, joined. `manifest.jsonl` lists the jobs of a sweep, `plots/` the pictures, `report.html` the report.",
        "`reference/` is committed; `runs/` and `sweeps/` are what your own runs write.",
        "",
        textwrap.fill(
            "One clock for everything: `time.perf_counter_ns` of the measuring process, read when the consumer could "
            "use the token. Units are in the names. Null is unknown, never 0. Percentiles interpolate linearly "
            "(numpy's default). Failed and cancelled requests are counted and have no latencies. A 99th percentile of "
            f"fewer than {MIN_P99_SAMPLES} samples is shown greyed. A delivery without tokens (a role-only chunk) is "
            "no token. The k tokens of one delivery give k gaps of gap / k; tokens of a request's first delivery have "
            "no delivery before them, so no gap.",
            width=118,
        ),
    ]
    for name, columns in (TABLES | BESIDE).items():
        lines += ["", f"## {name}", "", _ONE_ROW[name], "", "| column | type | unit | definition | null if |"]
        lines.append("|---|---|---|---|---|")
        lines += [f"| `{c.name}` | {c.dtype} | {c.unit} | {c.definition} | {c.null} |" for c in columns]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``results/README.md`` (or, with ``--check``, exit 1 if it is not current)."""
    parser = argparse.ArgumentParser(prog="python -m harness.tables", description="Write the README of the tables.")
    parser.add_argument("--path", type=Path, default=Path(__file__).parents[1] / "results" / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is not current")
    args = parser.parse_args(argv)
    if args.check:
        current = args.path.is_file() and args.path.read_text(encoding="utf-8") == readme()
        if not current:
            print(f"{args.path} is not current: run python -m harness.tables")
        return 0 if current else 1
    args.path.write_text(readme(), encoding="utf-8")
    print(args.path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
