"""Schemas of the benchmark's configuration; the values live in the YAML files of package ``sweeps``.

Each dataclass is registered with Hydra (:func:`harness.config.register`) under the name its YAML files inherit from
(``*_schema``), so an unknown key or a value of the wrong type is an error at composition, before anything runs. Null
always means "the default of whoever reads it"; those defaults are read back after the run and land in the ``config``
table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from harness.backends.generation import GenerationSettings


@dataclass
class EngineConfig:
    """What is measured; every key but ``name`` and ``env`` is handed to the backend.

    Attributes:
        name: the backend.
        env: environment variables of the measured process, on top of the command's own, for an engine that is installed
            apart (``PYTHONPATH``); ``+engine.env.NAME=VALUE`` on a command line.
        attn_implementation: the model's attention for this engine; null = ``model.attn_implementation``.
    """

    name: str = MISSING
    env: dict[str, str] = field(default_factory=dict)
    attn_implementation: str | None = None


@dataclass
class ContinuousEngineConfig(EngineConfig):
    """Fields of a ContinuousBatchingConfig (ours or transformers'); null = the engine's default.

    Units: sizes in tokens or blocks, ``cpu_offload_space`` in GiB, timeouts in seconds, shares between 0 and 1.
    ``use_cuda_graph`` is true, false, or a pair [varlen path, decode path]. The keys are explained where the engine
    has them, in ``engine.config``.
    """

    page_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool | None = None
    use_async_batching: bool | None = None
    use_cuda_graph: Any = None
    q_padding_interval_size: int | None = None
    kv_padding_interval_size: int | None = None
    varlen_compile_config: dict[str, Any] | None = None
    decode_compile_config: dict[str, Any] | None = None
    default_compile_level: int | None = None
    scheduler_type: str | None = None
    safety_margin: float | None = None
    return_logprobs: bool | None = None
    seed: int | None = None
    auto_switch_to_flash: bool | None = None
    cpu_offload_space: float | None = None
    cpu_offload_space_safety_threshold: float | None = None
    max_queue_size: int | None = None
    per_request_processors: bool | None = None
    drop_unsupported_processors: bool | None = None
    disable_nccl_graph_mixing: bool | None = None
    cpu_group_timeout: float | None = None


@dataclass
class OursEngineConfig(ContinuousEngineConfig):
    """What this project's engine has besides; see ``engine.ContinuousBatchingConfig``."""

    use_fused_forward: bool | None = None
    attention_backend: str | None = None


@dataclass
class StaticEngineConfig(EngineConfig):
    """Padded ``model.generate`` in waves.

    Attributes:
        wave: requests in one batch; null = all in one.
        wave_timeout_s: run a smaller wave when the first request of it has waited so long; null = wait for a full one.
        cache_implementation: as for ``generate``; null = its default.
        pad_to: tokens every prompt is padded to; null = the wave's longest.
    """

    wave: int | None = None
    wave_timeout_s: float | None = None
    cache_implementation: str | None = None
    pad_to: int | None = None


@dataclass
class OpenAiHttpEngineConfig(EngineConfig):
    """A server with OpenAI's API: see :class:`harness.backends.http.settings.HttpSettings`."""

    base_url: str = MISSING
    server_model: str | None = None
    api_key_env: str | None = MISSING
    endpoint: str = MISSING
    prompts: str = MISSING
    request_timeout_s: float | None = None
    connect_timeout_s: float = MISSING
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass
class NullEngineConfig(EngineConfig):
    """A known schedule instead of an engine: see :class:`harness.backends.null.NullSettings`."""

    ttft_ms: float = MISSING
    ttft_step_ms: float = MISSING
    itl_ms: float = MISSING
    itl_step_ms: float = MISSING
    tokens_per_delivery: int = MISSING


@dataclass
class VllmEngineConfig(EngineConfig):
    """Arguments of vLLM; see :class:`harness.backends.vllm.VllmSettings`. The first four follow the group ``model``."""

    model: str = MISSING
    load_format: str = MISSING
    revision: str | None = MISSING
    dtype: str = MISSING
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool | None = None


@dataclass
class ModelConfig:
    """Fields of :class:`harness.models.ModelSpec`, restated because OmegaConf makes frozen classes read-only, which
    would refuse every override. A test holds the two together."""

    name: str = MISSING
    load_format: str = "auto"
    dtype: str = "auto"
    attn_implementation: str | None = None
    revision: str | None = None
    seed: int = 0


@dataclass
class MeasureConfig:
    """How a run is measured; the same for every arm of a comparison.

    Attributes:
        warmup_requests: with prompts of their own, never measured; 0 = none.
        timeout_s: of the measured part; requests still open then end as unfinished.
        start_timeout_s: for building the workload, loading the model and warming up.
        repeats: runs of each config, each in a process of its own; in a sweep the blocks that hold every arm once.
        runs_per_process: of each repeat, with one start of the engine, each with the workload's seed one higher. They
            are no independent repeats: comparisons take their median.
        share_process: in a sweep, runs of a block that differ in workload and arrival alone share one process.
        aa: run the baseline twice in each block: what an arm differs from itself is the noise floor.
        order_seed: of the random order of arms inside the blocks.
        seed: of torch, numpy and random in the measured process, and of workloads without a seed of their own.
        device: auto, cpu, cuda or cuda:N.
        torch_threads: threads inside an operation; null = torch's choice.
        telemetry_interval_ms: between two looks at memory, power and load.
        reference_engine: whose greedy token ids the other arms are compared with; null = no comparison.
        calibrate: half a second before measuring: what the harness itself adds here and now.
    """

    warmup_requests: int = MISSING
    timeout_s: float = MISSING
    start_timeout_s: float = MISSING
    repeats: int = MISSING
    runs_per_process: int = MISSING
    share_process: bool = MISSING
    aa: bool = MISSING
    order_seed: int = MISSING
    seed: int = MISSING
    device: str = MISSING
    torch_threads: int | None = MISSING
    telemetry_interval_ms: float = MISSING
    reference_engine: str | None = MISSING
    calibrate: bool = MISSING


@dataclass
class SloConfig:
    """Fields of :class:`harness.slo.Slo`, restated as those of :class:`ModelConfig` are. A test holds them together."""

    name: str = "unnamed"
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_p95_ms: float | None = None
    request_ttft_ms: float | None = None
    request_itl_ms: float | None = None
    request_tpot_ms: float | None = None
    request_e2e_ms: float | None = None


@dataclass
class ExperimentConfig:
    """What a sweep is about; null in a single run.

    Attributes:
        name: of the sweep: the folder of its results.
        question: what it answers.
        variable: the one setting that differs between arms: a group or a dotted key.
        block, position, arm, replica, number: where the run stands in its sweep (``harness.blocks``); written by the
            command itself.
        companions: how many more jobs run in its process (``harness.companions``); likewise.
    """

    name: str | None = None
    question: str | None = None
    variable: str | None = None
    block: int | None = None
    position: int | None = None
    arm: int | None = None
    replica: int | None = None
    number: int | None = None
    companions: int = 0


@dataclass
class BenchConfig:
    """The whole configuration of one job.

    Attributes:
        engine: what is measured.
        model: which model, with which weights, in which precision.
        arrival: when requests are sent.
        workload: what is sent.
        generation: how tokens are chosen, the same for every engine.
        measure: how a run is measured.
        slo: limits decided before the run, in ms: ``slo=chat``, ``slo.ttft_p95_ms=500``.
        experiment: what a sweep is about; a file of this group sets the swept values too.
        mode: auto, or pinned: what the baseline's engine derives (cache size, margin) is fixed for every arm.
        allow_factorial: vary several declared variables at once, in all combinations.
        dry_run: list the runs with how long each may take, run nothing.
        resume: go on with the newest sweep of this name (or ``hydra.sweep.dir``): measured runs are kept.
        report: write the page too; false leaves it to ``cb-report``, for a machine that is paid by the second.
        results_dir: folder of results, below the current directory.
    """

    engine: EngineConfig = MISSING
    model: Any = MISSING
    arrival: Any = MISSING
    workload: Any = MISSING
    generation: GenerationSettings = MISSING
    measure: MeasureConfig = MISSING
    slo: SloConfig = MISSING
    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    mode: str = MISSING
    allow_factorial: bool = MISSING
    dry_run: bool = MISSING
    resume: bool = MISSING
    report: bool = MISSING
    results_dir: str = MISSING
