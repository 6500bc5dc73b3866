"""The table of steps: what each forward pass of the engine did."""

from __future__ import annotations

from harness.tables.table import HIDDEN, NO_GPU, RUN_ID, UNSENT, Column, Table

STEPS = Table(
    "steps",
    "One row a forward pass of the engine, where it keeps a step log.",
    (
        RUN_ID,
        Column("step", "Int64", "", "index of the forward pass, from 0"),
        Column("t_s", "Float64", "s", "start of the step after the start of the run", UNSENT),
        Column("kind", "string", "", "decode, prefill or mixed", HIDDEN),
        Column("decode_rows", "Int64", "rows", "requests that decoded one token", HIDDEN),
        Column("prefill_rows", "Int64", "rows", "requests that computed prompt tokens", HIDDEN),
        Column("prefill_tokens", "Int64", "tokens", "prompt tokens computed", HIDDEN),
        Column("padded_rows", "Int64", "tokens", "query tokens added to reach a captured size", HIDDEN),
        Column(
            "table_pages", "Int64", "pages", "width of the block tables, padding to a captured width included", HIDDEN
        ),
        Column("decode_kernel_rows", "Int64", "rows", "rows that took the decode fast path", HIDDEN),
        Column("kv_tokens", "Int64", "tokens", "KV entries read by attention", HIDDEN),
        Column("prefill_pairs", "Int64", "pairs", "query-key pairs of prompt rows, causal, windows left aside", HIDDEN),
        Column("running", "Int64", "requests", "requests holding a place after scheduling", HIDDEN),
        Column("waiting", "Int64", "requests", "requests queued after scheduling", HIDDEN),
        Column("free_blocks", "Int64", "blocks", "KV blocks free or reclaimable after scheduling", HIDDEN),
        Column("allocated_blocks", "Int64", "blocks", "KV blocks given out for this step", HIDDEN),
        Column("evicted_blocks", "Int64", "blocks", "those of them whose cached prefix was given up", HIDDEN),
        Column("unused_slots", "Int64", "tokens", "room left in the last KV pages of the step's requests", HIDDEN),
        Column("preempted", "Int64", "requests", "requests evicted by this step", HIDDEN),
        Column("admission_held", "boolean", "", "whether the safety margin kept a waiting request out", HIDDEN),
        Column("graph", "boolean", "", "whether a captured graph was replayed", HIDDEN),
        Column("schedule_ms", "Float64", "ms", "host time to choose the batch and build its inputs", HIDDEN),
        Column("step_ms", "Float64", "ms", "start of scheduling to tokens on the host", HIDDEN),
        Column(
            "offloaded", "Int64", "requests", "requests whose KV blocks went to host memory before this step", HIDDEN
        ),
        Column("restored", "Int64", "requests", "requests whose KV blocks came back before this step", HIDDEN),
        Column("offloaded_bytes", "Int64", "bytes", "how much that was going out", HIDDEN),
        Column("restored_bytes", "Int64", "bytes", "how much that was coming back", HIDDEN),
        Column(
            "mask_bytes",
            "Int64",
            "bytes",
            "attention masks alive at once; 0 where the backend's kernels see lengths (flash attention, triton)",
            HIDDEN,
        ),
        Column("gpu_ms", "Float64", "ms", "time on the device from its first work to its tokens (CUDA events)", NO_GPU),
        Column("restore_ms", "Float64", "ms", "time on the device of restoring", "none restored, or not reported"),
    ),
)
