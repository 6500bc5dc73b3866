"""What the engine counts while it runs. Owned by the manager, so it outlives the loop that fills it."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

STEP_LOG_LENGTH = 1_000_000


@dataclass(slots=True)
class StepRecord:
    """One forward pass. Times: ``t_ns`` is ``time.perf_counter_ns`` at the start of scheduling; durations in ms.

    Attributes:
        kind: "decode", "prefill" or "mixed".
        padded_rows: query tokens added to reach a captured size (one a row in a decode step).
        table_pages: pages of its block tables, those added to reach a captured width included.
        decode_kernel_rows: rows that took the decode fast path.
        kv_tokens: keys read by attention, summed over rows.
        prefill_pairs: pairs of a query and a key it sees, summed over prefill rows (as if no layer had a window).
        schedule_ms: host time to choose the batch, build its inputs and launch it.
        step_ms: start of scheduling to tokens on the host.
        allocated_blocks: KV blocks given out for it; evicted_blocks: those of them whose prefix was given up for it.
        unused_slots: places for tokens in the last pages of its rows that hold none yet, summed over layer groups.
        admission_held: whether the safety margin stopped a prefill.
        offloaded, restored: requests whose blocks were copied to the host, and back, before this step.
        offloaded_bytes, restored_bytes: how much that was.
        mask_bytes: attention masks that were alive at once; 0 with backends whose kernels need none.
        gpu_ms: time on the device from its first work to its tokens; None without a GPU.
        restore_ms: time on the device of the latter; None if there were none.
    """

    step: int
    t_ns: int
    kind: str
    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    padded_rows: int
    table_pages: int
    decode_kernel_rows: int
    kv_tokens: int
    prefill_pairs: int
    running: int
    waiting: int
    free_blocks: int
    allocated_blocks: int
    evicted_blocks: int
    unused_slots: int
    preempted: int
    admission_held: bool
    graph: bool
    schedule_ms: float
    step_ms: float | None = None
    offloaded: int = 0
    restored: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0
    mask_bytes: int = 0
    gpu_ms: float | None = None
    restore_ms: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class EngineStats:
    """Counters since the last `reset`, and the log of the last million steps.

    Attributes:
        offloads, restores: requests whose blocks were copied to the host, and back.
        offloaded_tokens: computed positions of the former.
        kv_blocks_allocated: blocks given out; kv_blocks_evicted: those of them whose cached prefix was given up.
        unused_slots_max: of all steps.
        oom_retries: steps planned again, smaller, because device memory ran out.
        captured_steps: CUDA graphs there are.
        graph_pool_bytes: device memory they hold; None without graphs.
        compile_s: seconds that torch.compile took before serving; None if nothing is compiled.
    """

    steps: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    preemptions: int = 0
    offloads: int = 0
    restores: int = 0
    offloaded_tokens: int = 0
    oom_retries: int = 0
    forks: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    graph_replays: int = 0
    captured_steps: int = 0
    graph_pool_bytes: int | None = None
    compile_s: float | None = None
    decode_kernel_rows: int = 0
    padded_rows: int = 0
    max_running: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free_min: int | None = None
    kv_blocks_allocated: int = 0
    kv_blocks_evicted: int = 0
    unused_slots_max: int = 0
    host_blocks_total: int = 0
    host_blocks_free_min: int | None = None
    log: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEP_LOG_LENGTH))

    def reset(self) -> None:
        """Start counting anew (after a warm-up)."""
        kept = ("kv_blocks_total", "host_blocks_total", "captured_steps", "graph_pool_bytes", "compile_s")
        fresh = EngineStats(**{name: getattr(self, name) for name in kept})
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def record(self, step: StepRecord) -> None:
        self.steps += 1
        self.preemptions += step.preempted
        self.prefill_tokens += step.prefill_tokens
        self.graph_replays += step.graph
        self.padded_rows += step.padded_rows
        self.decode_kernel_rows += step.decode_kernel_rows
        self.unused_slots_max = max(self.unused_slots_max, step.unused_slots)
        self.max_running = max(self.max_running, step.running)
        low = self.kv_blocks_free_min
        self.kv_blocks_free_min = step.free_blocks if low is None else min(low, step.free_blocks)
        self.log.append(step)

    def counters(self) -> dict[str, int | float | None]:
        """All counters by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "log"}
