"""The table of runs: everything that one run sums up to."""

from __future__ import annotations

from harness.tables.table import HIDDEN, NO_GAP, NO_GPU, NO_SLO, NO_STEP_LOG, RUN_ID, UNTOLD, Column, Table

MIN_P99_SAMPLES = 662
"""Below so many samples a 99th percentile is shown greyed: too few values lie beyond it to state it. From 662 on, at
least two lie above the true one with a probability of 99 % (0.99^n + 0.01 n 0.99^(n-1) is at most 0.01)."""

_NO_WALL = "wall_s unknown or 0"
_NO_OK = "no ok request"
_UNCOUNTED = "n_uncounted above 0"
_NO_WINDOW = "no steady window: see steady_state"
_BY_REQUEST = "sum over ok requests; the backend's own count over all requests if it does not report it by request"

RUNS = Table(
    "runs",
    "One row a run: everything summed up.",
    (
        RUN_ID,
        Column("experiment", "string", "", "experiment the run is part of", "single run"),
        Column("variable", "string", "", "the one setting the experiment varies", "single run"),
        Column(
            "arm",
            "string",
            "",
            "value of the variable in this run, as text; of a single run its choice of engine",
            "no variable",
        ),
        Column("arm_index", "Int64", "", "place of the arm in the sweep as it was written, from 0", "block unknown"),
        Column("repeat", "Int64", "", "index of the repeat within its arm, from 0; in a sweep its block", "not stated"),
        Column(
            "iteration",
            "Int64",
            "",
            "which of the runs that one process made of its arm and repeat, from 0; they are no independent repeats",
            "an older result",
        ),
        Column("process", "string", "", "the measured process; its runs share one start of the engine", "not started"),
        Column(
            "block", "Int64", "", "block of a sweep, which holds every arm once", "single run, or a sweeper of its own"
        ),
        Column("position", "Int64", "", "place of the run in the order of its block, from 0", "block unknown"),
        Column("replica", "Int64", "", "1 if the run repeats an arm beside itself (A/A), else 0", "block unknown"),
        Column("engine", "string", "", "backend: ours, transformers, vllm, static, openai_http, null"),
        Column("model", "string", "", "model preset or path", "not stated"),
        Column("workload", "string", "", "name of the workload", "not stated"),
        Column("workload_hash", "string", "", "SHA-256 of all requests, due times and caps", "workload not built"),
        Column("device", "string", "", "device the model ran on", "not stated"),
        Column("seed", "Int64", "", "seed of the workload", "not stated"),
        Column("source", "string", "", "measured, or simulated: the engine's scheduler under a virtual clock"),
        Column("status", "string", "", "ok, failed, timeout or interrupted: the run as a whole"),
        Column("error", "string", "", "one line: why the run failed", "run ok"),
        Column("n_requests", "Int64", "requests", "requests in the workload", "workload not built"),
        Column("n_ok", "Int64", "requests", "requests that ended by EOS or at their cap with at least one token"),
        Column("n_failed", "Int64", "requests", "requests that failed: neither ok nor cancelled nor unfinished"),
        Column("n_timed_out", "Int64", "requests", "those of n_failed that ended by the client's timeout"),
        Column("n_cancelled", "Int64", "requests", "requests cancelled by the client"),
        Column("n_unfinished", "Int64", "requests", "requests still open when the run ended: censored, no latency"),
        Column(
            "n_uncounted", "Int64", "requests", "ok requests of which the server does not say how many tokens they got"
        ),
        Column("outcomes", "string", "", "requests by outcome (harness.record.Outcome), as a JSON object"),
        Column("wall_s", "Float64", "s", "start of the schedule to the last terminal output", "run not finished"),
        Column("load_s", "Float64", "s", "time to load the model", "not loaded, or by an earlier run of the process"),
        Column(
            "warmup_s",
            "Float64",
            "s",
            "compile, capture and warm-up requests; not part of wall_s",
            "no warm-up, or before an earlier run of the process",
        ),
        Column("prompt_tokens", "Int64", "tokens", "real prompt tokens of all requests that were answered ok"),
        Column(
            "cached_tokens", "Int64", "tokens", f"prompt tokens served from the prefix cache: {_BY_REQUEST}", HIDDEN
        ),
        Column(
            "recomputed_tokens", "Int64", "tokens", f"tokens computed again after a preemption: {_BY_REQUEST}", HIDDEN
        ),
        Column(
            "generated_tokens",
            "Int64",
            "tokens",
            "tokens delivered by ok requests, EOS counted, nothing after it",
            _UNCOUNTED,
        ),
        Column(
            "padding_prompt_tokens",
            "Int64",
            "tokens",
            f"padded prompt positions computed, never in a headline: {_BY_REQUEST}",
            HIDDEN,
        ),
        Column(
            "padding_output_tokens",
            "Int64",
            "tokens",
            f"rows computed after their request had ended, never in a headline: {_BY_REQUEST}",
            HIDDEN,
        ),
        Column("gen_tok_s", "Float64", "tokens/s", "generated_tokens / wall_s", f"{_NO_WALL}, or {_UNCOUNTED}"),
        Column("prompt_tok_s", "Float64", "tokens/s", "prompt_tokens / wall_s", _NO_WALL),
        Column("request_s", "Float64", "requests/s", "n_ok / wall_s", _NO_WALL),
        Column(
            "offered_request_s", "Float64", "requests/s", "(n - 1) / (last due time - first)", "burst, or one request"
        ),
        Column("sent_request_s", "Float64", "requests/s", "(n - 1) / (last t_submit - first)", "fewer than two sent"),
        Column(
            "steady_state",
            "string",
            "",
            "steady; or why there is no window: saturated (the queue grows), non_stationary (the load or the rate of "
            "arrivals changes, as measured or as planned: a trend, or a rise and fall), burst (all sent within a tenth "
            "of the run), too_short (under 50 requests, sent within two lives of a request, or the number in flight "
            "still grows or falls)",
        ),
        Column("steady_reason", "string", "", "why there is no steady window, in words", "it has one"),
        Column(
            "steady_start_s",
            "Float64",
            "s",
            "start of the steady window: where the first request was sent that MSER-5 on the TTFTs' ranks keeps, not "
            "before the 95th percentile of the requests' lives",
            _NO_WINDOW,
        ),
        Column(
            "steady_end_s", "Float64", "s", "its end: the last request sent, or where CUSUM finds a change", _NO_WINDOW
        ),
        Column("steady_n", "Int64", "requests", "requests sent inside it", _NO_WINDOW),
        Column(
            "steady_gen_tok_s", "Float64", "tokens/s", "tokens of ok requests delivered inside / its length", _NO_WINDOW
        ),
        Column(
            "steady_prompt_tok_s",
            "Float64",
            "tokens/s",
            "prompt tokens of ok requests whose first token came inside / its length",
            _NO_WINDOW,
        ),
        Column("steady_request_s", "Float64", "requests/s", "ok requests that ended inside / its length", _NO_WINDOW),
        Column("steady_ttft_p50_ms", "Float64", "ms", "median of ttft_ms over ok requests sent inside", _NO_WINDOW),
        Column(
            "steady_ttft_p95_ms", "Float64", "ms", "95th percentile of ttft_ms over ok requests sent inside", _NO_WINDOW
        ),
        Column("steady_itl_p50_ms", "Float64", "ms", "median of the gaps that ended inside", _NO_WINDOW),
        Column("steady_itl_p99_ms", "Float64", "ms", "99th percentile of the gaps that ended inside", _NO_WINDOW),
        Column("slo", "string", "", "limits decided before the run, as a JSON object", "no SLO was decided"),
        Column(
            "slo_met", "boolean", "", "whether every limit of the run was kept; failed requests never answered", NO_SLO
        ),
        Column(
            "slo_broken", "string", "", "limits of the run that were not kept, with what was measured", "none broken"
        ),
        Column("n_good", "Int64", "requests", "ok requests within every limit on one request (slo_met)", NO_SLO),
        Column("goodput_request_s", "Float64", "requests/s", "n_good / wall_s", f"{NO_SLO}, or {_NO_WALL}"),
        Column("ttft_mean_ms", "Float64", "ms", "mean of ttft_ms over ok requests", _NO_OK),
        Column("ttft_p50_ms", "Float64", "ms", "median of ttft_ms over ok requests", _NO_OK),
        Column("ttft_p95_ms", "Float64", "ms", "95th percentile (linear) of ttft_ms over ok requests", _NO_OK),
        Column("ttft_p99_ms", "Float64", "ms", "99th percentile (linear) of ttft_ms over ok requests", _NO_OK),
        Column("ttft_sched_p50_ms", "Float64", "ms", "median of ttft_sched_ms over ok requests", _NO_OK),
        Column(
            "ttft_sched_p95_ms", "Float64", "ms", "95th percentile (linear) of ttft_sched_ms over ok requests", _NO_OK
        ),
        Column(
            "ttft_sched_p99_ms", "Float64", "ms", "99th percentile (linear) of ttft_sched_ms over ok requests", _NO_OK
        ),
        Column("itl_n", "Int64", "gaps", "number of inter-token gaps pooled over ok requests"),
        Column("itl_mean_ms", "Float64", "ms", "mean of the pooled inter-token gaps", NO_GAP),
        Column("itl_p50_ms", "Float64", "ms", "median of the pooled inter-token gaps", NO_GAP),
        Column("itl_p95_ms", "Float64", "ms", "95th percentile (linear) of the pooled inter-token gaps", NO_GAP),
        Column("itl_p99_ms", "Float64", "ms", "99th percentile (linear) of the pooled inter-token gaps", NO_GAP),
        Column("icl_p50_ms", "Float64", "ms", "median of the raw gaps between deliveries", NO_GAP),
        Column("icl_p99_ms", "Float64", "ms", "99th percentile (linear) of the raw gaps between deliveries", NO_GAP),
        Column("tpot_p50_ms", "Float64", "ms", "median of tpot_ms over ok requests", "tpot_ms null in every request"),
        Column(
            "tpot_p95_ms",
            "Float64",
            "ms",
            "95th percentile of tpot_ms over ok requests",
            "tpot_ms null in every request",
        ),
        Column("e2e_p50_ms", "Float64", "ms", "median of e2e_ms over ok requests", _NO_OK),
        Column("e2e_p95_ms", "Float64", "ms", "95th percentile (linear) of e2e_ms over ok requests", _NO_OK),
        Column("e2e_p99_ms", "Float64", "ms", "99th percentile (linear) of e2e_ms over ok requests", _NO_OK),
        Column("queue_p50_ms", "Float64", "ms", "median of queue_ms over ok requests", "the backend hides admission"),
        Column(
            "queue_p95_ms",
            "Float64",
            "ms",
            "95th percentile of queue_ms over ok requests",
            "the backend hides admission",
        ),
        Column(
            "prefill_p50_ms", "Float64", "ms", "median of prefill_ms over ok requests", "the backend hides admission"
        ),
        Column(
            "prefill_p95_ms",
            "Float64",
            "ms",
            "95th percentile of prefill_ms over ok requests",
            "the backend hides admission",
        ),
        Column("prefill_delay_p50_ms", "Float64", "ms", "median of prefill_delay_ms over ok requests", NO_STEP_LOG),
        Column(
            "prefill_delay_p95_ms", "Float64", "ms", "95th percentile of prefill_delay_ms over ok requests", NO_STEP_LOG
        ),
        Column("sched_lag_p99_ms", "Float64", "ms", "99th percentile of t_submit - t_sched over all sent", "none sent"),
        Column("peak_rss_bytes", "Int64", "bytes", "largest resident memory of the measured process", "not sampled"),
        Column("peak_gpu_allocated_bytes", "Int64", "bytes", "torch.cuda.max_memory_allocated while measuring", NO_GPU),
        Column(
            "peak_gpu_reserved_bytes",
            "Int64",
            "bytes",
            "torch.cuda.max_memory_reserved while measuring",
            f"{NO_GPU}, or its process had measured before: what it reserved then is kept",
        ),
        Column("peak_gpu_used_bytes", "Int64", "bytes", "largest device memory in use (NVML), all processes", NO_GPU),
        Column(
            "ledger_residual_bytes", "Int64", "bytes", "line residual of the memory ledger", "no ledger, or no peak"
        ),
        Column("throttled_share", "Float64", "", "share of the samples in which clocks were held down (NVML)", NO_GPU),
        Column("preemptions", "Int64", "events", "requests evicted to be recomputed or restored later", HIDDEN),
        Column("offloads", "Int64", "events", "requests whose KV blocks were moved to host memory", HIDDEN),
        Column("soft_resets", "Int64", "events", "requests sent back to the queue with their output kept", HIDDEN),
        Column("steps", "Int64", "steps", "forward passes while measuring", HIDDEN),
        Column("running_max", "Int64", "requests", "most requests holding a place in one step", NO_STEP_LOG),
        Column("waiting_max", "Int64", "requests", "most requests queued after scheduling", NO_STEP_LOG),
        Column("kv_blocks_total", "Int64", "blocks", "blocks of the KV pool", HIDDEN),
        Column("kv_blocks_free_min", "Int64", "blocks", "fewest free or reclaimable blocks after scheduling", HIDDEN),
        Column("graph_replays", "Int64", "steps", "steps that replayed a CUDA graph", HIDDEN),
        Column("held_steps", "Int64", "steps", "steps in which the safety margin kept prefills out", NO_STEP_LOG),
        Column("chunked_requests", "Int64", "requests", "ok requests with prefill_steps above 1", UNTOLD),
        Column("prefill_steps_max", "Int64", "steps", "largest prefill_steps of an ok request", UNTOLD),
        Column("kv_blocks_p50", "Float64", "blocks", "median of kv_blocks over ok requests", UNTOLD),
        Column("kv_blocks_max", "Int64", "blocks", "largest kv_blocks of an ok request", UNTOLD),
        Column(
            "unused_slots_mean",
            "Float64",
            "tokens",
            "mean of unused_slots over steps: waste inside blocks",
            NO_STEP_LOG,
        ),
        Column("unused_slots_max", "Int64", "tokens", "largest unused_slots of a step", NO_STEP_LOG),
        Column("table_pages_max", "Int64", "pages", "widest block tables of a step", NO_STEP_LOG),
        Column("peak_mask_bytes", "Int64", "bytes", "largest mask_bytes of a step", NO_STEP_LOG),
        Column("restores", "Int64", "events", "requests whose KV blocks came back from host memory", HIDDEN),
        Column("offloaded_bytes", "Int64", "bytes", "copied to host memory by offloads", NO_STEP_LOG),
        Column("restored_bytes", "Int64", "bytes", "copied back by restores", NO_STEP_LOG),
        Column(
            "restore_mean_ms",
            "Float64",
            "ms",
            "mean of restore_ms over the steps that restored",
            "nothing was restored, or not reported",
        ),
        Column(
            "restore_max_ms", "Float64", "ms", "largest restore_ms of a step", "nothing was restored, or not reported"
        ),
        Column(
            "restore_gb_s",
            "Float64",
            "GB/s",
            "restored_bytes / sum of restore_ms: on a GPU over PCIe or NVLink, on a CPU inside its memory",
            "nothing was restored, or not reported",
        ),
        Column(
            "tokens_match",
            "boolean",
            "",
            "token ids and ends of every compared request are the reference's",
            "not compared",
        ),
        Column(
            "gate",
            "string",
            "",
            "correctness: equal; explained (differs only where the model's own logits, in float32, lie within "
            "the margin of its dtype); failed",
            "not compared",
        ),
        Column(
            "n_compared",
            "Int64",
            "requests",
            "requests that this run and the reference run both answered",
            "not compared",
        ),
        Column("n_diverged", "Int64", "requests", "those with other token ids or another end", "not compared"),
    ),
)
