"""The user's settings: field for field transformers' ContinuousBatchingConfig, checked when it is made.

What a setting left at None becomes is decided in `engine.resolution`; this object is never written to.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from engine.compilation import compile_config
from engine.names import unknown_name
from engine.scheduler import SCHEDULERS

MIN_PAGE_SIZE = 4
ATTENTION_BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "triton")
"""By name; the classes are in `engine.attention.selection`, which needs torch."""

_Settings = TypeVar("_Settings")


def _says_what_was_meant(settings: type[_Settings]) -> type[_Settings]:
    """A dataclass whose constructor answers a name it does not have with the nearest one it has."""
    made: Callable[..., None] = settings.__init__
    names = [f.name for f in fields(settings)]  # type: ignore[arg-type]

    @functools.wraps(made)
    def init(self: _Settings, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in names:
                raise unknown_name(f"setting of {settings.__name__}", name, names)
        made(self, *args, **given)

    settings.__init__ = init  # type: ignore[assignment]
    return settings


@_says_what_was_meant
@dataclass(slots=True)
class ContinuousBatchingConfig:
    """Settings of the engine. Names, order and defaults follow transformers 5.24; None = decided from model and device.

    Attributes:
        page_size: tokens a page of one layer holds, at least 4.
        num_blocks: blocks of the KV cache; None = what the memory budget leaves.
        max_batch_tokens: query tokens of one forward pass; None = 8192, less if memory is short, never under 256.
        max_memory_percent: share of free memory, in (0, 1], for cache, buffers, activations and workspaces. Captured
            steps have theirs in what it leaves.
        max_requests_per_batch: requests in one forward pass; None = the number submitted, or 1024.
        max_blocks_per_request: pages of the block tables of captured steps; a step with a longer request is launched
            kernel by kernel. None = from the hints, or 32. 0 = no decode fast path: every row takes the varlen path.
        allow_block_sharing: reuse cached prefixes where every layer allows it.
        use_async_batching: schedule and launch step N+1 while step N runs. Needs CUDA graphs.
        use_cuda_graph: a bool or a pair (varlen, decode); None = on where backend and device can.
        q_padding_interval_size: captured steps with prefills have multiples of so many query tokens; 0 = the engine's
            own sizes.
        kv_padding_interval_size: captured steps exist for block tables of multiples of so many tokens, and a step is
            replayed on the narrowest that fits; 0 = one width.
        varlen_compile_config, decode_compile_config: explicit transformers CompileConfig of a path, or a mapping of its
            fields.
        default_compile_level: 0 to 3, how much torch.compile does for a path without an explicit config (see
            `engine.compilation`).
        scheduler_type: "fifo" or "prefill_first".
        safety_margin: share of free blocks, 0 to 1, under which no new prefill starts; None = the scheduler's own.
        return_logprobs: give the log probability of each generated token.
        seed: base of the random streams of requests without a seed of their own; None = drawn at start.
        auto_switch_to_flash: use flash attention for a model loaded with eager or sdpa, where it can serve.
        cpu_offload_space: GiB of host memory for evicted blocks; 0 = off, None = sized by the threshold.
        cpu_offload_space_safety_threshold: share of available host memory the offload space may take.
        max_queue_size: requests waiting for admission; 0 = no limit.
        per_request_processors: requests may set their own temperature, filters, penalties and bias.
        drop_unsupported_processors: accepted for compatibility; the engine refuses what it cannot do, it drops nothing.
        disable_nccl_graph_mixing, cpu_group_timeout: of tensor parallelism; without effect on one process.
        use_fused_forward: run known families (Llama, Mistral, Qwen2, Qwen3, Gemma2) through the engine's own fused
            forward pass; None = where the model allows it, False = transformers' forward pass. Not in transformers.
        attention_backend: eager, sdpa, flash_attention_2, flash_attention_3 or triton (the engine's own paged kernels),
            whatever the model was loaded with; None = by that and ``auto_switch_to_flash``. Not in transformers.
        use_default_compile_configs, max_cached_graphs, block_size: deprecated.
    """

    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    default_compile_level: int = 0
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    return_logprobs: bool = False
    seed: int | None = None
    auto_switch_to_flash: bool = True
    cpu_offload_space: float | None = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    max_queue_size: int = 0
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True
    disable_nccl_graph_mixing: bool = True
    cpu_group_timeout: float | None = 300.0
    use_fused_forward: bool | None = None
    attention_backend: str | None = None
    use_default_compile_configs: bool | None = None
    max_cached_graphs: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None:
            warnings.warn("block_size is deprecated, use page_size", FutureWarning, stacklevel=4)
            if self.page_size not in (_DEFAULT_PAGE_SIZE, self.block_size):
                raise ValueError(
                    f"block_size={self.block_size!r} contradicts page_size={self.page_size!r}; set page_size only"
                )
            self.page_size = self.block_size
            self.block_size = None
        if self.use_default_compile_configs is not None:
            warnings.warn(
                "use_default_compile_configs is deprecated, use default_compile_level", FutureWarning, stacklevel=4
            )
            self.default_compile_level = 3 if self.use_default_compile_configs else 0
            self.use_default_compile_configs = None
        if self.max_cached_graphs is not None:
            warnings.warn("max_cached_graphs is deprecated and has no effect", FutureWarning, stacklevel=4)
            self.max_cached_graphs = None
        self.varlen_compile_config = compile_config("varlen_compile_config", self.varlen_compile_config)
        self.decode_compile_config = compile_config("decode_compile_config", self.decode_compile_config)
        self.validate()

    def validate(self) -> None:
        """Raise ValueError naming the field, its value and what is allowed."""
        _check_int(self, "page_size", MIN_PAGE_SIZE)
        for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
            _check_int(self, name, 1, optional=True)
        _check_int(self, "max_blocks_per_request", 0, optional=True)
        for name in ("q_padding_interval_size", "kv_padding_interval_size", "max_queue_size"):
            _check_int(self, name, 0)
        _check_int(self, "default_compile_level", 0, 3)
        _check_int(self, "seed", 0, optional=True)
        _check_number(self, "max_memory_percent", 0, 1, optional=True, above=True)
        _check_number(self, "safety_margin", 0, 1, optional=True)
        _check_number(self, "cpu_offload_space", 0, None, optional=True)
        _check_number(self, "cpu_offload_space_safety_threshold", 0, 1)
        _check_number(self, "cpu_group_timeout", 0, None, optional=True, above=True)
        for name in (
            "allow_block_sharing",
            "return_logprobs",
            "auto_switch_to_flash",
            "per_request_processors",
            "drop_unsupported_processors",
            "disable_nccl_graph_mixing",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("use_async_batching", "use_fused_forward"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        if self.attention_backend is not None and self.attention_backend not in ATTENTION_BACKENDS:
            raise ValueError(
                f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)} or None, "
                f"got {self.attention_backend!r}"
            )
        if not isinstance(self.scheduler_type, str) or self.scheduler_type not in SCHEDULERS:
            raise ValueError(f"scheduler_type must be one of {', '.join(SCHEDULERS)}, got {self.scheduler_type!r}")
        graphs = self.use_cuda_graph
        pair = isinstance(graphs, tuple | list) and len(graphs) == 2 and all(isinstance(g, bool) for g in graphs)
        if not (graphs is None or isinstance(graphs, bool) or pair):
            raise ValueError(f"use_cuda_graph must be a bool, a pair of bools or None, got {graphs!r}")

    @classmethod
    def adopt(cls, other: Any) -> ContinuousBatchingConfig:
        """A copy of our config or of transformers' (any version: fields it lacks keep our defaults).

        Raises:
            TypeError: not a continuous batching config.
        """
        if other is None:
            return cls()
        names = {f.name for f in fields(cls)}
        if not isinstance(other, cls) and not hasattr(other, "scheduler_type"):
            raise TypeError(
                f"continuous_batching_config must be a ContinuousBatchingConfig, got {type(other).__name__}"
            )
        values = {name: getattr(other, name) for name in names if hasattr(other, name)}
        # transformers has already moved block_size into page_size; carrying both over would contradict nothing.
        for deprecated in ("block_size", "use_default_compile_configs", "max_cached_graphs"):
            values.pop(deprecated, None)
        return cls(**values)


_DEFAULT_PAGE_SIZE = 256


@_says_what_was_meant
@dataclass(frozen=True, slots=True)
class WorkloadHints:
    """What is known of the requests before they come; 0 = unknown. Names follow transformers 5.24."""

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_int(self, f.name, 0)

    @classmethod
    def adopt(cls, other: Any) -> WorkloadHints:
        """Our hints or transformers'; None = nothing is known.

        Raises:
            TypeError: no workload hints.
        """
        if other is None or isinstance(other, cls):
            return other or cls()
        try:
            values = [getattr(other, f.name) for f in fields(cls)]
        except AttributeError:
            raise TypeError(f"workload_hints must be WorkloadHints, got {type(other).__name__}") from None
        return cls(*values)


def _check_int(config: Any, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
    value = getattr(config, name)
    if optional and value is None:
        return
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {allowed}{' or None' if optional else ''}, got {value!r}")


def _check_number(
    config: Any, name: str, low: float, high: float | None, optional: bool = False, above: bool = False
) -> None:
    value = getattr(config, name)
    if optional and value is None:
        return
    sign = ">" if above else ">="
    allowed = f"a number {sign} {low}" + ("" if high is None else f" and <= {high}")
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not (value > low if above else value >= low) or (high is not None and not value <= high):
        raise ValueError(f"{name} must be {allowed}{' or None' if optional else ''}, got {value!r}")
