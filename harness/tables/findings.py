"""Tables of what was found in a run: answers that differ, slow things and what held them up."""

from __future__ import annotations

from harness.tables.table import REQUEST_ID, RUN_ID, UNSENT, Column, Table

DIVERGENCES = Table(
    "divergences",
    "One row a request whose answer is not the reference's: where it first differs, and why.",
    (
        RUN_ID,
        Column("reference_run_id", "string", "", "the run it was compared with"),
        REQUEST_ID,
        Column("index", "Int64", "", "number of equal tokens before the first difference"),
        Column(
            "kind", "string", "", "token (another id), length (one stops there), end (another cause of the same end)"
        ),
        Column("token", "Int64", "", "id in this run", "this run had stopped"),
        Column("reference_token", "Int64", "", "id in the reference run", "that run had stopped"),
        Column("margin", "Float64", "", "how far below the best logit (float32) the lower of the two is", "not scored"),
        Column(
            "limit",
            "Float64",
            "",
            "margin up to which it is explained: 1e-2 in bfloat16, 2e-3 in float16, 1e-4 in float32, times the best "
            "logit where that is above 1; or twice the most that the dtype moves a logit there, if that is more",
            "not scored",
        ),
        Column("verdict", "string", "", "explained or failed"),
        Column("note", "string", "", "what differed, or why it was not scored", "nothing to add"),
    ),
)

GC_PAUSES = Table(
    "gc_pauses",
    "One row a garbage collection of the measuring process, which holds the engine's loop too.",
    (
        RUN_ID,
        Column("t_s", "Float64", "s", "start of the collection after the start of the run", UNSENT),
        Column("duration_ms", "Float64", "ms", "how long nothing else ran in the measuring process"),
        Column("generation", "Int64", "", "oldest generation collected: 0, 1 or 2"),
    ),
)

TAILS = Table(
    "tails",
    "One row a slow thing: the worst 1 % (at most 1,000) of the TTFTs and of the gaps between deliveries.",
    (
        RUN_ID,
        Column("kind", "string", "", "ttft or itl: what was slow"),
        REQUEST_ID,
        Column("index", "Int64", "", "index of the token that came late", "deliveries of unknown size"),
        Column("t_s", "Float64", "s", "when it became usable, after the start of the run"),
        Column("value_ms", "Float64", "ms", "ttft_ms of the request, or icl_ms of the delivery"),
        Column("typical_ms", "Float64", "ms", "median of that in this run"),
        Column(
            "cause",
            "string",
            "",
            "what explains at least half of the TTFT, or of the gap beyond the median: large prefill in step, "
            "preemption, offload or restore, admission held by margin, graph miss, garbage collection, queueing (for a "
            "place in a batch), harness lag (tokens there, not yet taken), between steps, no step log, unknown; "
            "ordinary: within 1.5 x the median",
        ),
        Column("explained_ms", "Float64", "ms", "the part that the cause explains", "ordinary, unknown or no step log"),
        Column("step", "Int64", "", "step that owned most of the time (key of steps with run_id)", "no step ran then"),
        Column("evidence", "string", "", "that step in words", "no step ran then"),
    ),
)
