"""From what the user left open to what runs: every setting with its value and where it came from.

Resolution is a list of small steps in a fixed order; each reads what was settled before it. The result is frozen.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from engine.attention.selection import BACKENDS, choose_backend
from engine.cache.budget import Ledger, activation_bytes, available_ram, free_memory, step_buffer_bytes
from engine.cache.layout import CacheLayout
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.model_shape import ModelShape
from engine.scheduler import SCHEDULERS

DEFAULT_MAX_BATCH_TOKENS = 8192
MIN_MAX_BATCH_TOKENS = 256
DEFAULT_MAX_REQUESTS = 1024
DEFAULT_BLOCKS_PER_REQUEST = 32


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value and its source: "user", "default", or "derived: from what"."""

    value: Any
    source: str


class ResolvedConfig:
    """Every field of `ContinuousBatchingConfig` decided, and what was derived besides; immutable.

    Fields are attributes (``resolved.num_blocks``); ``resolved.source("num_blocks")`` says where a value came from.
    ``notes`` are the choices that a user may not expect, as (logging level, sentence).
    """

    notes: tuple[tuple[int, str], ...]

    def __init__(
        self,
        values: Mapping[str, Resolved],
        layout: CacheLayout,
        ledger: Ledger,
        notes: Sequence[tuple[int, str]] = (),
    ) -> None:
        object.__setattr__(self, "notes", tuple(notes))
        object.__setattr__(self, "_values", MappingProxyType(dict(values)))
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "ledger", ledger)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_values")[name].value
        except (KeyError, AttributeError):
            raise AttributeError(f"ResolvedConfig has no setting {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a resolved configuration does not change; make a new manager")

    def source(self, name: str) -> str:
        return self._values[name].source

    def rows(self) -> list[tuple[str, Any, str]]:
        """(field, value, source) of every setting, in order of the fields."""
        return [(name, r.value, r.source) for name, r in self._values.items()]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={r.value!r}" for name, r in self._values.items())
        return f"ResolvedConfig({shown})"

    def to_json(self) -> str:
        return json.dumps([{"field": f, "value": v, "source": s} for f, v, s in self.rows()], default=str)


class _Resolution:
    """The values settled so far, and what they are settled from."""

    def __init__(
        self,
        config: ContinuousBatchingConfig,
        shape: ModelShape,
        hints: WorkloadHints,
        attn: str | None,
        free: int,
        ram_probe: Callable[[], int | None],
    ) -> None:
        self.config, self.shape, self.hints, self.attn, self.free = config, shape, hints, attn, free
        self.ram_probe = ram_probe
        defaults = ContinuousBatchingConfig()
        self.values: dict[str, Resolved] = {}
        self.notes: list[tuple[int, str]] = []
        for f in fields(ContinuousBatchingConfig):
            value = getattr(config, f.name)
            self.values[f.name] = Resolved(value, "default" if value == getattr(defaults, f.name) else "user")
        self.layout = shape.cache_layout(config.page_size)

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def set(self, name: str, value: Any, why: str) -> None:
        self.values[name] = Resolved(value, why)

    def note(self, level: int, sentence: str) -> None:
        self.notes.append((level, sentence))

    def is_open(self, name: str) -> bool:
        return self[name] is None


def resolve(
    config: ContinuousBatchingConfig,
    shape: ModelShape,
    hints: WorkloadHints,
    attn_implementation: str | None,
    memory_probe: Callable[[torch.device], int] = free_memory,
    ram_probe: Callable[[], int | None] = available_ram,
) -> ResolvedConfig:
    """Decide every setting.

    Args:
        config: the user's settings, unchanged by this.
        shape: the model's sizes.
        hints: what is known of the requests.
        attn_implementation: what the model was loaded with.
        memory_probe: free bytes of a device; an argument so that tests can state it.
        ram_probe: available bytes of host memory, None = unknown; asked only if blocks may be offloaded.

    Raises:
        ValueError: settings that cannot be met together or on this device, with the field, its value and what to do.
    """
    r = _Resolution(config, shape, hints, attn_implementation, memory_probe(shape.device), ram_probe)
    for step in (
        _refuse_what_is_not_there,
        _scheduler,
        _attention,
        _forward,
        _graphs_and_async,
        _sharing,
        _decode_table,
        _memory_percent,
        _requests_before_memory,
        _batch_tokens,
        _num_blocks,
        _fit_requests,
        _offload,
    ):
        step(r)
    return ResolvedConfig(r.values, r.layout, _ledger(r, r["num_blocks"]), r.notes)


def _refuse_what_is_not_there(r: _Resolution) -> None:
    config = r.config
    if config.default_compile_level or config.varlen_compile_config or config.decode_compile_config:
        raise ValueError("torch.compile (default_compile_level, *_compile_config) is not available yet; leave it at 0")
    if config.q_padding_interval_size or config.kv_padding_interval_size:
        raise ValueError(
            "q_/kv_padding_interval_size are not available yet; leave them at 0 (the engine's own buckets)"
        )


def _scheduler(r: _Resolution) -> None:
    if r.is_open("safety_margin"):
        default = SCHEDULERS[r["scheduler_type"]].default_safety_margin
        r.set("safety_margin", default, f"derived: default of scheduler_type={r['scheduler_type']}")


def _attention(r: _Resolution) -> None:
    shape = r.shape
    choice = choose_backend(
        r.attn,
        r["auto_switch_to_flash"],
        shape.supports_flash,
        shape.device,
        shape.dtype,
        shape.head_dim,
        r["page_size"],
    )
    r.set("attention_backend", choice.name, f"derived: {choice.reason}")
    if r.attn is not None and choice.name != r.attn.removeprefix("paged|"):
        r.note(logging.WARNING, f"attention runs on {choice.name}: {choice.reason}")


def _forward(r: _Resolution) -> None:
    obstacle = r.shape.not_fusible
    if r.is_open("use_fused_forward"):
        why = "derived: the model's family is known" if obstacle is None else f"derived: {obstacle}"
        r.set("use_fused_forward", obstacle is None, why)
    elif r["use_fused_forward"] and obstacle is not None:
        raise ValueError(f"use_fused_forward=True cannot be met: {obstacle}; leave it at None")


def _graphs_and_async(r: _Resolution) -> None:
    wanted = r["use_cuda_graph"]
    possible = r.shape.device.type == "cuda" and BACKENDS[r["attention_backend"]].capturable
    off = "no CUDA device" if r.shape.device.type != "cuda" else f"{r['attention_backend']} cannot be captured"
    if wanted is None:
        r.set("use_cuda_graph", (possible, possible), f"derived: {'where the device can' if possible else off}")
    else:
        pair = (wanted, wanted) if isinstance(wanted, bool) else tuple(wanted)
        if any(pair) and not possible:
            raise ValueError(f"use_cuda_graph={wanted!r}: {off}; leave it at None or set it to False")
        r.set("use_cuda_graph", pair, "user")
    captured = any(r["use_cuda_graph"])
    if r.is_open("use_async_batching"):
        r.set("use_async_batching", captured, "derived: follows use_cuda_graph")
    elif r["use_async_batching"] and not captured:
        raise ValueError("use_async_batching=True needs CUDA graphs: set use_cuda_graph=True on a device that has them")


def _sharing(r: _Resolution) -> None:
    if r["allow_block_sharing"] and not r.layout.can_share_prefixes:
        r.set("allow_block_sharing", False, "derived: off, the model has sliding-window layers")
        r.note(logging.INFO, "prefix sharing is off: the model has sliding-window layers")


def _decode_table(r: _Resolution) -> None:
    """Width of the captured steps' block tables; a step with a longer request is launched instead."""
    if not any(r["use_cuda_graph"]):
        if r["max_blocks_per_request"]:
            r.set("max_blocks_per_request", 0, "derived: 0, no captured steps")
            r.note(logging.WARNING, "max_blocks_per_request is set to 0: no step is captured on this device or backend")
        elif r.is_open("max_blocks_per_request"):
            r.set("max_blocks_per_request", 0, "derived: no captured steps")
        return
    if r["max_blocks_per_request"] == 0:
        r.set("use_cuda_graph", (False, False), "derived: off, max_blocks_per_request=0")
        r.set("use_async_batching", False, "derived: off, max_blocks_per_request=0")
        return
    if r.is_open("max_blocks_per_request"):
        prompt, generated = r.hints.max_prompt_length, r.hints.max_generated_length
        if prompt and generated:
            width = -(-(prompt + generated) // r["page_size"]) + 1
            r.set("max_blocks_per_request", width, "derived: longest prompt + longest generation")
        else:
            r.set("max_blocks_per_request", DEFAULT_BLOCKS_PER_REQUEST, "default")


def _memory_percent(r: _Resolution) -> None:
    if r.is_open("max_memory_percent"):
        percent = 0.9 if r.shape.device.type == "cuda" else 0.6
        r.set("max_memory_percent", percent, f"derived: device is {r.shape.device.type}")


def _requests_before_memory(r: _Resolution) -> None:
    if not r.is_open("max_requests_per_batch"):
        return
    if r.hints.num_requests:
        r.set("max_requests_per_batch", r.hints.num_requests, "derived: requests submitted")
    else:
        r.set("max_requests_per_batch", DEFAULT_MAX_REQUESTS, "default")


def _budget(r: _Resolution) -> int:
    return int(r.free * r["max_memory_percent"])


def _pages_per_request(r: _Resolution) -> int:
    """Width of the widest block table that a step may have to carry."""
    longest = r.shape.max_positions or DEFAULT_BLOCKS_PER_REQUEST * r["page_size"]
    if r.hints.max_prompt_length and r.hints.max_generated_length:
        longest = min(longest, r.hints.max_prompt_length + r.hints.max_generated_length)
    return -(-longest // r["page_size"]) + 1


def _step_bytes(r: _Resolution, max_batch_tokens: int, max_requests: int) -> tuple[int, int]:
    requests = min(max_requests, max_batch_tokens)
    buffers = step_buffer_bytes(len(r.layout.groups), max_batch_tokens, requests, _pages_per_request(r))
    return buffers, activation_bytes(r.shape, max_batch_tokens, requests)


def _batch_tokens(r: _Resolution) -> None:
    """8192, halved until a step's tensors take at most a tenth of the budget, but never under 256."""
    if not r.is_open("max_batch_tokens"):
        return
    tokens, requests, budget = DEFAULT_MAX_BATCH_TOKENS, r["max_requests_per_batch"], _budget(r)
    while tokens > MIN_MAX_BATCH_TOKENS and sum(_step_bytes(r, tokens, requests)) > budget // 10:
        tokens //= 2
    why = "default" if tokens == DEFAULT_MAX_BATCH_TOKENS else "derived: a step may take a tenth of the memory budget"
    r.set("max_batch_tokens", tokens, why)


def _num_blocks(r: _Resolution) -> None:
    budget, block = _budget(r), r.layout.block_bytes
    tokens, requests = r["max_batch_tokens"], r["max_requests_per_batch"]

    def room_beside(running: int) -> int:
        return (budget - sum(_step_bytes(r, tokens, running))) // block - 1  # one block is the trash block

    # A running request holds at least a block, so no more than num_blocks of them need rows in a step's tensors.
    if not r.is_open("num_blocks"):
        room = room_beside(min(requests, r["num_blocks"]))
        if r["num_blocks"] > room:
            raise ValueError(
                f"num_blocks={r['num_blocks']} and max_batch_tokens={r['max_batch_tokens']} need more than the memory "
                f"budget of {budget / 2**30:.2f} GiB, which has room for {max(room, 0)} blocks; lower one of them or "
                f"raise max_memory_percent ({r['max_memory_percent']})"
            )
        return
    room = max(room_beside(requests), bisect.bisect_right(range(1, requests + 1), 0, key=lambda n: n - room_beside(n)))
    if room < 1:
        raise ValueError(
            f"no room for a KV cache: budget {budget / 2**30:.2f} GiB (max_memory_percent={r['max_memory_percent']}), "
            f"max_batch_tokens={r['max_batch_tokens']}; lower max_batch_tokens or raise max_memory_percent"
        )
    why = f"derived: fills {r['max_memory_percent']:.0%} of {r.free / 2**30:.1f} GiB free memory"
    # More blocks than every request at full length could hold would only make the pool slow to manage.
    if r.shape.max_positions:
        per_request = r.layout.blocks_needed(r.shape.max_positions, r["max_batch_tokens"])
        useful = per_request * r["max_requests_per_batch"]
        if useful < room:
            room, why = useful, "derived: max_requests_per_batch requests of the model's longest sequence"
    r.set("num_blocks", room, why)


def _fit_requests(r: _Resolution) -> None:
    fitted = min(r["max_requests_per_batch"], r["max_batch_tokens"], r["num_blocks"])
    if fitted < r["max_requests_per_batch"]:
        r.set("max_requests_per_batch", fitted, "derived: fitted to max_batch_tokens and num_blocks")


def _offload(r: _Resolution) -> None:
    """Whole blocks of host memory: what the user asks for, at most the threshold's share of what is available."""
    space, share = r["cpu_offload_space"], r["cpu_offload_space_safety_threshold"]
    if space == 0:
        r.set("num_host_blocks", 0, "derived: cpu_offload_space=0")
        return
    available = r.ram_probe()
    if available is None:
        if space is None:
            raise ValueError("cpu_offload_space=None needs psutil to see the available RAM; install it or state GiB")
        r.note(
            logging.WARNING,
            f"cpu_offload_space={space} GiB is not held against the available RAM: psutil is missing",
        )
    else:
        limit = available * share / 2**30
        why = f"{share:.0%} of {available / 2**30:.1f} GiB available RAM (cpu_offload_space_safety_threshold)"
        if space is None:
            r.set("cpu_offload_space", limit, f"derived: {why}")
        elif space > limit:
            r.note(logging.WARNING, f"cpu_offload_space={space} GiB is cut to {limit:.2f} GiB: {why}")
            r.set("cpu_offload_space", limit, f"derived: cut to {why}")
    blocks = int(r["cpu_offload_space"] * 2**30) // r.layout.block_bytes
    if blocks < 1:
        raise ValueError(
            f"cpu_offload_space={space!r} (resolved to {r['cpu_offload_space']:.3g} GiB) does not hold one block of "
            f"{r.layout.block_bytes / 2**20:.3g} MiB; raise it or its safety threshold, or set it to 0 (off)"
        )
    r.set("num_host_blocks", blocks, "derived: whole blocks within cpu_offload_space")


def _ledger(r: _Resolution, num_blocks: int) -> Ledger:
    buffers, activations = _step_bytes(r, r["max_batch_tokens"], r["max_requests_per_batch"])
    return Ledger(r.shape.weight_bytes, (num_blocks + 1) * r.layout.block_bytes, buffers, activations)
