"""Tables of what the run took from its machine: memory, telemetry, and the cost of measuring itself."""

from __future__ import annotations

from harness.tables.table import NO_GPU, RUN_ID, Column, Table

MEMORY_LEDGER = Table(
    "memory_ledger",
    "One row a line of the memory ledger.",
    (
        RUN_ID,
        Column(
            "line",
            "string",
            "",
            "what the memory is for, or which peak; of_*: part of another line (of_kv_cache_decode_reserve: "
            "blocks that must be free for a prefill to be admitted; of_graph_pool_reused: what captured steps use of "
            "their pool without the allocator counting it); activations, workspaces and graph_pool of this engine are "
            "measured at its warm-up on a GPU, estimates elsewhere; host_*, pinned_*: in host memory; planned: "
            "sum of the engine's other lines; residual: the allocator's peak and of_graph_pool_reused "
            "(on a CPU: of resident memory, with interpreter and libraries) beyond it; outside_torch: this process on "
            "the GPU (NVML) beyond torch's reserve",
        ),
        Column("bytes", "Int64", "bytes", "its size", "line known but not read"),
    ),
)

CALIBRATION = Table(
    "calibration",
    "One row a calibrated run: what the harness itself adds here, by a known schedule.",
    (
        RUN_ID,
        Column(
            "tokens", "Int64", "tokens", "tokens that the known schedule delivered, right before the run was measured"
        ),
        Column("gen_tok_s", "Float64", "tokens/s", "at what rate"),
        Column(
            "ttft_error_p50_ms",
            "Float64",
            "ms",
            "median absolute error of the time to first token, measured against scheduled",
        ),
        Column("ttft_error_p99_ms", "Float64", "ms", "99th percentile of the same"),
        Column("itl_error_p50_ms", "Float64", "ms", "median absolute error of the gaps between tokens"),
        Column("itl_error_p99_ms", "Float64", "ms", "99th percentile of the same"),
        Column("sched_lag_p99_ms", "Float64", "ms", "99th percentile of the sender's lag"),
        Column("last_lag_ms", "Float64", "ms", "lag of the last request: whether lateness adds up"),
        Column("overhead_us_per_token", "Float64", "µs", "processor time of recording one token"),
    ),
)

TELEMETRY = Table(
    "telemetry",
    "One row a sample.",
    (
        RUN_ID,
        Column("t_s", "Float64", "s", "after the start of the run"),
        Column("rss_bytes", "Int64", "bytes", "resident memory of the process", "not sampled"),
        Column("gpu_used_bytes", "Int64", "bytes", "device memory in use, all processes (NVML)", NO_GPU),
        Column(
            "gpu_own_bytes",
            "Int64",
            "bytes",
            "device memory of this process (NVML)",
            "no GPU, or hidden by a container",
        ),
        Column("gpu_util_percent", "Float64", "%", "share of time in which a kernel ran (NVML)", NO_GPU),
        Column(
            "gpu_memory_util_percent",
            "Float64",
            "%",
            "share of time in which memory was read or written (NVML)",
            NO_GPU,
        ),
        Column("sm_clock_mhz", "Int64", "MHz", "SM clock (NVML)", NO_GPU),
        Column("memory_clock_mhz", "Int64", "MHz", "memory clock (NVML)", NO_GPU),
        Column("power_w", "Float64", "W", "board power (NVML)", NO_GPU),
        Column("throttle", "string", "", "what holds the clocks down (NVML), joined by commas; empty: nothing", NO_GPU),
    ),
)
