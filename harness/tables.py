"""The tidy tables: every column with its type, unit and definition, once.

``results/README.md`` is generated from this module (``python -m harness.tables``), the writers check their frames
against it, and the report takes its labels from it. One row is one thing; units are in the names; null = unknown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column: ``dtype`` is a pandas dtype name (nullable ones for counts), ``unit`` "" if it has none."""

    name: str
    dtype: str
    unit: str
    definition: str


def _c(name: str, dtype: str, unit: str, definition: str) -> Column:
    return Column(name, dtype, unit, definition)


_RUN_ID = _c("run_id", "string", "", "the run this row belongs to (key of the runs table)")
_REQUEST_ID = _c("request_id", "string", "", "the request this row belongs to (key of the requests table with run_id)")

TABLES: dict[str, tuple[Column, ...]] = {
    "runs": (
        _RUN_ID,
        _c("experiment", "string", "", "experiment the run is part of; null for a single run"),
        _c("variable", "string", "", "the one setting the experiment varies; null for a single run"),
        _c("arm", "string", "", "value of the variable in this run, as text"),
        _c("repeat", "Int64", "", "index of the repeat within its arm, from 0"),
        _c("engine", "string", "", "backend: ours, transformers, static"),
        _c("model", "string", "", "model preset or path"),
        _c("workload", "string", "", "name of the workload"),
        _c("workload_hash", "string", "", "SHA-256 of all requests, due times and caps"),
        _c("device", "string", "", "device the model ran on"),
        _c("status", "string", "", "ok, failed or timeout: the run as a whole"),
        _c("error", "string", "", "one line: why the run failed"),
        _c("n_requests", "Int64", "requests", "requests in the workload"),
        _c("n_ok", "Int64", "requests", "requests that ended by EOS or at their cap with at least one token"),
        _c("n_failed", "Int64", "requests", "requests that ended any other way, cancelled ones apart"),
        _c("n_cancelled", "Int64", "requests", "requests cancelled by the client"),
        _c("wall_s", "Float64", "s", "start of the schedule to the last terminal output"),
        _c("load_s", "Float64", "s", "time to load the model"),
        _c("warmup_s", "Float64", "s", "compile, capture and warm-up requests; not part of wall_s"),
        _c("prompt_tokens", "Int64", "tokens", "real prompt tokens of all requests that were answered ok"),
        _c("cached_tokens", "Int64", "tokens", "prompt tokens served from the prefix cache"),
        _c("recomputed_tokens", "Int64", "tokens", "tokens computed again after a preemption"),
        _c("generated_tokens", "Int64", "tokens", "tokens delivered by ok requests, EOS counted, nothing after it"),
        _c("padding_prompt_tokens", "Int64", "tokens", "padded prompt positions computed; never in a headline"),
        _c("padding_output_tokens", "Int64", "tokens", "rows computed after their request had ended; never in a headline"),
        _c("gen_tok_s", "Float64", "tokens/s", "generated_tokens / wall_s"),
        _c("prompt_tok_s", "Float64", "tokens/s", "prompt_tokens / wall_s"),
        _c("request_s", "Float64", "requests/s", "n_ok / wall_s"),
        _c("offered_request_s", "Float64", "requests/s", "(n_requests - 1) / (last due time - first); null for a burst"),
        _c("ttft_mean_ms", "Float64", "ms", "mean of ttft_ms over ok requests"),
        _c("ttft_p50_ms", "Float64", "ms", "median of ttft_ms over ok requests"),
        _c("ttft_p95_ms", "Float64", "ms", "95th percentile (linear) of ttft_ms over ok requests"),
        _c("ttft_p99_ms", "Float64", "ms", "99th percentile (linear) of ttft_ms over ok requests"),
        _c("itl_n", "Int64", "gaps", "number of inter-token gaps pooled over ok requests"),
        _c("itl_mean_ms", "Float64", "ms", "mean of the pooled inter-token gaps"),
        _c("itl_p50_ms", "Float64", "ms", "median of the pooled inter-token gaps"),
        _c("itl_p95_ms", "Float64", "ms", "95th percentile of the pooled inter-token gaps"),
        _c("itl_p99_ms", "Float64", "ms", "99th percentile of the pooled inter-token gaps; read with care if itl_n < 662"),
        _c("tpot_p50_ms", "Float64", "ms", "median over ok requests of (t_last - t_first) / (n - 1)"),
        _c("e2e_p50_ms", "Float64", "ms", "median of e2e_ms over ok requests"),
        _c("e2e_p95_ms", "Float64", "ms", "95th percentile of e2e_ms over ok requests"),
        _c("e2e_p99_ms", "Float64", "ms", "99th percentile of e2e_ms over ok requests"),
        _c("queue_p50_ms", "Float64", "ms", "median of queue_ms over ok requests; null if the backend hides admission"),
        _c("sched_lag_p99_ms", "Float64", "ms", "99th percentile of t_submit - t_sched over all sent requests"),
        _c("peak_rss_bytes", "Int64", "bytes", "largest resident memory of the measured process while measuring"),
        _c("peak_gpu_allocated_bytes", "Int64", "bytes", "torch.cuda.max_memory_allocated while measuring"),
        _c("peak_gpu_reserved_bytes", "Int64", "bytes", "torch.cuda.max_memory_reserved while measuring"),
        _c("peak_gpu_used_bytes", "Int64", "bytes", "largest device memory in use by NVML samples, all processes"),
        _c("preemptions", "Int64", "events", "requests evicted to be recomputed or restored later"),
        _c("steps", "Int64", "steps", "forward passes while measuring"),
        _c("kv_blocks_total", "Int64", "blocks", "blocks of the KV pool"),
        _c("kv_blocks_free_min", "Int64", "blocks", "fewest free blocks seen at the end of a step"),
        _c("graph_replays", "Int64", "steps", "steps that replayed a CUDA graph"),
        _c("tokens_match", "boolean", "", "token ids equal to the reference arm's for every request; null if not compared"),
    ),
    "requests": (
        _RUN_ID,
        _REQUEST_ID,
        _c("outcome", "string", "", "how it ended (harness.record.Outcome)"),
        _c("error", "string", "", "one line: why it failed"),
        _c("prompt_tokens", "Int64", "tokens", "real prompt tokens"),
        _c("cached_tokens", "Int64", "tokens", "prompt tokens served from the prefix cache"),
        _c("recomputed_tokens", "Int64", "tokens", "tokens computed again after a preemption"),
        _c("max_new_tokens", "Int64", "tokens", "cap on generated tokens"),
        _c("output_tokens", "Int64", "tokens", "tokens delivered"),
        _c("padding_prompt_tokens", "Int64", "tokens", "padded prompt positions computed for it"),
        _c("padding_output_tokens", "Int64", "tokens", "rows computed after it had ended"),
        _c("prefix_group", "Int64", "", "group sharing a prefix; null if none"),
        _c("t_sched_s", "Float64", "s", "due time after the start of the run"),
        _c("t_submit_s", "Float64", "s", "handed to the backend, after the start of the run"),
        _c("t_admit_s", "Float64", "s", "first placed in a batch; null if the backend hides it"),
        _c("t_first_s", "Float64", "s", "first token usable by the consumer"),
        _c("t_done_s", "Float64", "s", "terminal output usable by the consumer"),
        _c("sched_lag_ms", "Float64", "ms", "t_submit - t_sched"),
        _c("ttft_ms", "Float64", "ms", "t_first - t_submit"),
        _c("ttft_sched_ms", "Float64", "ms", "t_first - t_sched: includes the sender's lag; drives SLO verdicts"),
        _c("queue_ms", "Float64", "ms", "t_admit - t_submit"),
        _c("prefill_ms", "Float64", "ms", "t_first - t_admit"),
        _c("tpot_ms", "Float64", "ms", "(t_last - t_first) / (n - 1); null for a single token"),
        _c("itl_mean_ms", "Float64", "ms", "mean of its inter-token gaps; null for a single token"),
        _c("itl_max_ms", "Float64", "ms", "largest of its inter-token gaps"),
        _c("e2e_ms", "Float64", "ms", "t_last - t_submit"),
    ),
    "itl": (
        _RUN_ID,
        _REQUEST_ID,
        _c("index", "Int64", "", "index of the later token of the gap, from 1"),
        _c("t_s", "Float64", "s", "when the later token became usable, after the start of the run"),
        _c("itl_ms", "Float64", "ms", "gap to the token before it; k tokens of one chunk share the chunk's gap in k parts"),
        _c("icl_ms", "Float64", "ms", "raw gap between the two deliveries; null for tokens inside one chunk"),
    ),
    "tokens": (
        _RUN_ID,
        _REQUEST_ID,
        _c("token_ids", "object", "", "generated token ids, in order"),
    ),
    "steps": (
        _RUN_ID,
        _c("step", "Int64", "", "index of the forward pass, from 0"),
        _c("t_s", "Float64", "s", "start of the step after the start of the run"),
        _c("kind", "string", "", "decode, prefill or mixed"),
        _c("decode_rows", "Int64", "rows", "requests that decoded one token"),
        _c("prefill_rows", "Int64", "rows", "requests that computed prompt tokens"),
        _c("prefill_tokens", "Int64", "tokens", "prompt tokens computed"),
        _c("padded_rows", "Int64", "rows", "padding rows added to reach a graph's size"),
        _c("kv_tokens", "Int64", "tokens", "KV entries read by attention"),
        _c("running", "Int64", "requests", "requests holding a place after scheduling"),
        _c("waiting", "Int64", "requests", "requests queued after scheduling"),
        _c("free_blocks", "Int64", "blocks", "KV blocks free or reclaimable after scheduling"),
        _c("preempted", "Int64", "requests", "requests evicted by this step"),
        _c("graph", "boolean", "", "whether a captured graph was replayed"),
        _c("schedule_ms", "Float64", "ms", "host time to choose the batch and build its inputs"),
        _c("step_ms", "Float64", "ms", "start of scheduling to tokens on the host"),
    ),
    "config": (
        _RUN_ID,
        _c("field", "string", "", "setting of the engine"),
        _c("value", "string", "", "resolved value, as JSON"),
        _c("source", "string", "", "user, default, or derived: from what"),
    ),
    "environment": (
        _RUN_ID,
        _c("key", "string", "", "what is described"),
        _c("value", "string", "", "as JSON"),
    ),
    "telemetry": (
        _RUN_ID,
        _c("t_s", "Float64", "s", "after the start of the run"),
        _c("rss_bytes", "Int64", "bytes", "resident memory of the process"),
        _c("gpu_used_bytes", "Int64", "bytes", "device memory in use, all processes (NVML)"),
        _c("gpu_util_percent", "Float64", "%", "GPU utilisation (NVML)"),
        _c("sm_clock_mhz", "Int64", "MHz", "SM clock (NVML)"),
        _c("power_w", "Float64", "W", "board power (NVML)"),
    ),
}


def column(table: str, name: str) -> Column:
    """The column ``name`` of ``table``; KeyError naming both if there is none."""
    for c in TABLES[table]:
        if c.name == name:
            return c
    raise KeyError(f"table {table!r} has no column {name!r}")
