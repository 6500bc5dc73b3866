"""How steps are run: order of work, attention, forward pass, captured steps, sharing of prefixes."""

from __future__ import annotations

import logging

from engine.attention.selection import BACKENDS, choose_backend
from engine.resolution.resolution import Resolution
from engine.scheduler import SCHEDULERS

DEFAULT_BLOCKS_PER_REQUEST = 32


def refuse_what_is_not_there(r: Resolution) -> None:
    config = r.config
    if config.default_compile_level or config.varlen_compile_config or config.decode_compile_config:
        raise ValueError("torch.compile (default_compile_level, *_compile_config) is not available yet; leave it at 0")
    if config.q_padding_interval_size or config.kv_padding_interval_size:
        raise ValueError(
            "q_/kv_padding_interval_size are not available yet; leave them at 0 (the engine's own buckets)"
        )


def scheduler(r: Resolution) -> None:
    if r.is_open("safety_margin"):
        default = SCHEDULERS[r["scheduler_type"]].default_safety_margin
        r.set("safety_margin", default, f"derived: default of scheduler_type={r['scheduler_type']}")


def attention(r: Resolution) -> None:
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


def forward(r: Resolution) -> None:
    obstacle = r.shape.not_fusible
    if r.is_open("use_fused_forward"):
        why = "derived: the model's family is known" if obstacle is None else f"derived: {obstacle}"
        r.set("use_fused_forward", obstacle is None, why)
    elif r["use_fused_forward"] and obstacle is not None:
        raise ValueError(f"use_fused_forward=True cannot be met: {obstacle}; leave it at None")


def graphs_and_async(r: Resolution) -> None:
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


def sharing(r: Resolution) -> None:
    if r["allow_block_sharing"] and not r.layout.can_share_prefixes:
        r.set("allow_block_sharing", False, "derived: off, the model has sliding-window layers")
        r.note(logging.INFO, "prefix sharing is off: the model has sliding-window layers")


def decode_table(r: Resolution) -> None:
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
