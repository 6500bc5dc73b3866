"""How steps are run: order of work, attention, forward pass, captured steps, sharing of prefixes."""

from __future__ import annotations

import logging

from engine.attention.selection import BACKENDS, choose_backend, why_not
from engine.compilation import choose_compilation, refuse_own_graphs
from engine.resolution.resolution import Resolution
from engine.scheduler import SCHEDULERS

DEFAULT_BLOCKS_PER_REQUEST = 32
"""Pages in the block tables of captured steps where nothing is known of the requests."""


def scheduler(r: Resolution) -> None:
    if r.is_open("safety_margin"):
        default = SCHEDULERS[r["scheduler_type"]].default_safety_margin
        r.set("safety_margin", default, f"derived: default of scheduler_type={r['scheduler_type']}")


def attention(r: Resolution) -> None:
    shape, chosen = r.shape, r["attention_backend"]
    if chosen is not None:
        obstacle = why_not(chosen, shape.device, shape.dtype, shape.head_dim, r["page_size"])
        if obstacle is not None:
            raise ValueError(f"attention_backend={chosen!r} cannot be met: {obstacle}; leave it at None")
        return
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


def decode_path(r: Resolution) -> None:
    """Whether rows with one query token take a kernel of their own (the decode fast path), and how many pages the
    block tables of captured steps have; a step with a longer request is launched kernel by kernel."""
    wanted, backend, device = r["max_blocks_per_request"], BACKENDS[r["attention_backend"]], r.shape.device.type
    prompt, generated = r.hints.max_prompt_length, r.hints.max_generated_length
    if wanted:
        width, why = wanted, "user"
    elif prompt and generated:
        width, why = -(-(prompt + generated) // r["page_size"]) + 1, "derived: longest prompt + longest generation"
    else:
        width, why = DEFAULT_BLOCKS_PER_REQUEST, "default"
    # Prompts that will be refused count in the hints, too; no table is ever wider than the longest sequence served.
    longest = r.shape.max_positions
    if (wanted or (prompt and generated)) and longest is not None and width > -(-longest // r["page_size"]) + 1:
        width, why = -(-longest // r["page_size"]) + 1, f"derived: the model's {longest} positions"
    r.set("table_pages", width, why)
    if wanted == 0:
        r.set("decode_kernel", False, "derived: max_blocks_per_request=0, every row takes the varlen path")
        return
    kernel = f"kernel of {backend.name}" if backend.decode_kernel else f"{backend.name} on {device} has none"
    r.set("decode_kernel", backend.decode_kernel, f"derived: {kernel}")
    if not r.layout.can_share_prefixes:
        reason = "the model has sliding-window layers"
        if backend.decode_kernel:
            reason += f"; the decode kernel of {backend.name} serves them nonetheless"
        r.note(logging.WARNING if wanted else logging.INFO, f"max_blocks_per_request is set to 0: {reason}")
    elif not backend.decode_kernel:
        reason = f"{backend.name} on {device} has no decode kernel"
        if wanted:
            r.note(logging.WARNING, f"max_blocks_per_request is set to 0: {reason}")
    else:
        r.set("max_blocks_per_request", width, why)
        if wanted and wanted > width:
            r.note(logging.INFO, f"max_blocks_per_request={wanted} is cut to {width}: the model's {longest} positions")
        return
    r.set("max_blocks_per_request", 0, f"derived: {reason}")


def graphs_and_async(r: Resolution) -> None:
    """(steps with varlen rows, steps of decode rows only); without a decode kernel all steps are of the first kind."""
    wanted = r["use_cuda_graph"]
    possible = r.shape.device.type == "cuda" and BACKENDS[r["attention_backend"]].capturable
    off = "no CUDA device" if r.shape.device.type != "cuda" else f"{r['attention_backend']} cannot be captured"
    decode = r["decode_kernel"]
    if wanted is None:
        r.set(
            "use_cuda_graph", (possible, possible and decode), f"derived: {'where the device can' if possible else off}"
        )
    else:
        pair = (wanted, wanted) if isinstance(wanted, bool) else tuple(wanted)
        if any(pair) and not possible:
            raise ValueError(f"use_cuda_graph={wanted!r}: {off}; leave it at None or set it to False")
        if pair[1] and not decode:
            if not pair[0]:
                r.note(
                    logging.WARNING,
                    f"use_cuda_graph={wanted!r} captures nothing: without a decode kernel every step is a varlen step",
                )
            r.set("use_cuda_graph", (pair[0], False), "derived: no decode kernel, every step is a varlen step")
        else:
            r.set("use_cuda_graph", pair, "user")
    captured = any(r["use_cuda_graph"])
    if r.is_open("use_async_batching"):
        r.set("use_async_batching", captured, "derived: follows use_cuda_graph")
    elif r["use_async_batching"] and not captured:
        raise ValueError("use_async_batching=True needs CUDA graphs: set use_cuda_graph=True on a device that has them")


def compilation(r: Resolution) -> None:
    """What torch.compile compiles on the two paths of a step."""
    level, flash = r["default_compile_level"], r["attention_backend"].startswith("flash_attention")
    given = {name: r[f"{name}_compile_config"] for name in ("varlen", "decode")}
    varlen, decode = choose_compilation(
        level, given["varlen"], given["decode"], r.compile_fallback, flash, r["decode_kernel"]
    )
    for name, choice in (("varlen", varlen), ("decode", decode)):
        r.set(f"{name}_compile_config", choice.config, choice.source)
        if choice.config is not None and r.shape.device.type == "cuda":
            refuse_own_graphs(f"{name}_compile_config", choice.config)
        if given[name] is not None and choice.config is None:
            r.note(logging.WARNING, f"{name}_compile_config is ignored: {choice.source.removeprefix('derived: ')}")
    if level and varlen.config is None and decode.config is None:
        r.note(
            logging.WARNING,
            f"default_compile_level={level} compiles nothing: under flash attention it compiles decode steps only, and "
            "there is no decode path (max_blocks_per_request=0)",
        )


def padding(r: Resolution) -> None:
    """The intervals shape captured steps; where they shape none, that is said."""
    mixed, decode = r["use_cuda_graph"]
    q, kv = r["q_padding_interval_size"], r["kv_padding_interval_size"]
    spanned = r["table_pages"] * r["page_size"]
    obstacles = {
        "q_padding_interval_size": None if mixed else "no step with prefills is captured",
        "kv_padding_interval_size": None if mixed or decode else "no step is captured",
    }
    if mixed and q > r["max_batch_tokens"]:
        text = f"it exceeds max_batch_tokens={r['max_batch_tokens']}: no step with prefills is captured"
        obstacles["q_padding_interval_size"] = text
    if (mixed or decode) and kv >= spanned:
        text = f"the block tables of captured steps span {spanned} tokens (max_blocks_per_request): they have one width"
        obstacles["kv_padding_interval_size"] = text
    for name, obstacle in obstacles.items():
        if r[name] and obstacle is not None:
            r.set(name, r[name], f"user; without effect: {obstacle}")
            r.note(logging.WARNING, f"{name}={r[name]} has no effect: {obstacle}")


def parallel(r: Resolution) -> None:
    """Settings of tensor parallelism change nothing on the one process that the engine runs in."""
    for name in ("cpu_group_timeout", "disable_nccl_graph_mixing"):
        if r.source(name) == "user":
            r.set(name, r[name], "user; without effect: one process")
            r.note(logging.INFO, f"{name}={r[name]} has no effect: the engine runs in one process")


def sharing(r: Resolution) -> None:
    if r["allow_block_sharing"] and not r.layout.can_share_prefixes:
        r.set("allow_block_sharing", False, "derived: off, the model has sliding-window layers")
        r.note(logging.INFO, "prefix sharing is off: the model has sliding-window layers")
