"""Tables of what the clients saw: requests, their gaps and their tokens."""

from __future__ import annotations

from harness.record import COUNTED_BY
from harness.tables.table import HIDDEN, NO_GAP, NO_SLO, REQUEST_ID, RUN_ID, UNSENT, UNTOLD, Column, Table

_NOT_OK = "request not ok"

REQUESTS = Table(
    "requests",
    "One row a request, whatever its end. Latencies are null unless it ended ok.",
    (
        RUN_ID,
        REQUEST_ID,
        Column("outcome", "string", "", "how it ended (harness.record.Outcome); ok without a token is empty"),
        Column("error", "string", "", "one line: why it failed", "none given"),
        Column("prompt_tokens", "Int64", "tokens", "real prompt tokens: the server's own count where it states one"),
        Column("planned_prompt_tokens", "Int64", "tokens", "prompt tokens the workload asked for", "not stated"),
        Column("cached_tokens", "Int64", "tokens", "prompt tokens served from the prefix cache", HIDDEN),
        Column("recomputed_tokens", "Int64", "tokens", "tokens computed again after a preemption", HIDDEN),
        Column("max_new_tokens", "Int64", "tokens", "cap on generated tokens"),
        Column(
            "output_tokens", "Int64", "tokens", "tokens generated: as delivered, or as the server states", "unstated"
        ),
        Column(
            "output_counted_by",
            "string",
            "",
            "how that is known: " + "; ".join(f"{name} ({what})" for name, what in COUNTED_BY.items()),
        ),
        Column("padding_prompt_tokens", "Int64", "tokens", "padded prompt positions computed for it", HIDDEN),
        Column("padding_output_tokens", "Int64", "tokens", "rows computed after it had ended", HIDDEN),
        Column("prefix_group", "Int64", "", "group sharing a prefix", "no shared prefix"),
        Column("phase", "Int64", "", "phase of the workload that it belongs to, from 0", "the workload has no phases"),
        Column("holds_answer_of", "string", "", "request whose answer is part of the prompt (a session)", "none is"),
        Column("t_sched_s", "Float64", "s", "due time after the start of the run", UNSENT),
        Column("t_submit_s", "Float64", "s", "handed to the backend, after the start of the run", "not sent"),
        Column("t_admit_s", "Float64", "s", "first placed in a batch", "never placed, or the backend hides it"),
        Column(
            "t_first_s", "Float64", "s", "first token usable by the consumer; empty deliveries are none", "no token"
        ),
        Column("t_last_s", "Float64", "s", "last token usable by the consumer", "no token"),
        Column("t_done_s", "Float64", "s", "terminal output usable by the consumer", "not ended"),
        Column(
            "statuses",
            "string",
            "",
            "life cycle in the engine: pending (t_pending_s), prefilling (t_admit_s), decoding (t_decoding_s), then "
            "finished, failed or cancelled (t_over_s); each when first entered, pending again once a preemption",
            UNTOLD,
        ),
        Column("t_pending_s", "Float64", "s", "taken in by the engine", UNTOLD),
        Column(
            "t_decoding_s", "Float64", "s", "the step was launched that samples its first token", f"never, or {UNTOLD}"
        ),
        Column("t_over_s", "Float64", "s", "ended inside the engine", UNTOLD),
        Column("preemptions", "Int64", "events", "how often it lost its place", UNTOLD),
        Column(
            "prefill_steps", "Int64", "steps", "steps that computed its prompt, or what a preemption had lost", UNTOLD
        ),
        Column("kv_blocks", "Int64", "blocks", "KV blocks it held when it ended", f"it held none, or {UNTOLD}"),
        Column("sched_lag_ms", "Float64", "ms", "t_submit - t_sched", "not sent"),
        Column("ttft_ms", "Float64", "ms", "t_first - t_submit", _NOT_OK),
        Column(
            "ttft_sched_ms", "Float64", "ms", "t_first - t_sched: with the sender's lag; drives SLO verdicts", _NOT_OK
        ),
        Column("queue_ms", "Float64", "ms", "t_admit - t_submit", f"{_NOT_OK}, or admission hidden"),
        Column("prefill_ms", "Float64", "ms", "t_first - t_admit", f"{_NOT_OK}, or admission hidden"),
        Column(
            "prefill_delay_ms",
            "Float64",
            "ms",
            "part of queue_ms in steps in which the safety margin kept prefills out",
            f"{_NOT_OK}, admission hidden, or no step log",
        ),
        Column("tpot_ms", "Float64", "ms", "(t_last - t_first) / (n - 1)", f"{_NOT_OK}, or all tokens in one delivery"),
        Column("itl_mean_ms", "Float64", "ms", "mean of its inter-token gaps", f"{_NOT_OK}, or {NO_GAP}"),
        Column("itl_max_ms", "Float64", "ms", "largest of its inter-token gaps", f"{_NOT_OK}, or {NO_GAP}"),
        Column("e2e_ms", "Float64", "ms", "t_last - t_submit", _NOT_OK),
        Column("slo_met", "boolean", "", "whether it ended ok within every limit of the SLO on one request", NO_SLO),
    ),
)

ITL = Table(
    "itl",
    "One row an observed gap between two consecutive tokens, of ok requests.",
    (
        RUN_ID,
        REQUEST_ID,
        Column(
            "index",
            "Int64",
            "",
            "index of the later token of the gap; tokens of the first delivery have no row",
            "a delivery to the request held an unknown number of tokens",
        ),
        Column("t_s", "Float64", "s", "when the later token became usable, after the start of the run", UNSENT),
        Column(
            "itl_ms",
            "Float64",
            "ms",
            "gap to the token before it; k tokens of one delivery give k gaps of gap / k",
            "k unknown",
        ),
        Column("icl_ms", "Float64", "ms", "raw gap between the two deliveries", "token not the first of its delivery"),
    ),
)

_NOT_ALL = "a request of the phase was not ok, or no gap was seen"

PHASES = Table(
    "phases",
    "One row a phase of a workload of bursts: what a step takes with so many requests in it. No rows without phases.",
    (
        RUN_ID,
        Column("phase", "Int64", "", "index of the phase, from 0"),
        Column("n_requests", "Int64", "requests", "requests of the phase: rows of its decode steps"),
        Column("context_tokens", "Float64", "tokens", "median of prompt and generated tokens read in them", _NOT_ALL),
        Column(
            "n_gaps",
            "Int64",
            "gaps",
            "gaps that count: of the workload's measured_gaps, those while every request of the phase was generating",
        ),
        Column("itl_p50_ms", "Float64", "ms", "median of these gaps", _NOT_ALL),
        Column("itl_p95_ms", "Float64", "ms", "95th percentile (linear) of these gaps", _NOT_ALL),
    ),
)

TOKENS = Table(
    "tokens",
    "One row a request whose token ids were visible: what was generated.",
    (
        RUN_ID,
        REQUEST_ID,
        Column("token_ids", "object", "", "generated token ids, in order, as an integer array"),
    ),
)
