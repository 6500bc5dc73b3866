"""What memory is spent on: tokens and requests of a step, blocks of the cache on the device and on the host."""

from __future__ import annotations

import bisect
import logging
import math

from engine.ledger import Ledger
from engine.models.cpu_linear import onednn_linear_available
from engine.resolution.estimates import activation_bytes, step_buffer_bytes, workspace_bytes
from engine.resolution.execution import DEFAULT_BLOCKS_PER_REQUEST
from engine.resolution.resolution import Resolution

DEFAULT_MAX_BATCH_TOKENS = 8192
MIN_MAX_BATCH_TOKENS = 256
DEFAULT_MAX_REQUESTS = 1024


def memory_percent(r: Resolution) -> None:
    if r.is_open("max_memory_percent"):
        percent = 0.9 if r.shape.device.type == "cuda" else 0.6
        r.set("max_memory_percent", percent, f"derived: device is {r.shape.device.type}")


def packed_weights(r: Resolution) -> None:
    """Whether linear layers run on copies of the weights in oneDNN's layout: a fourth of the budget may go to them."""
    if not (r["use_fused_forward"] and onednn_linear_available(r.shape.device, r.shape.dtype)):
        r.set("packed_weights", False, "derived: packed is what the fused forward pass computes on in fp32 on a CPU")
    elif r["varlen_compile_config"] is not None and (r["decode_compile_config"] is not None or not r["decode_kernel"]):
        r.set("packed_weights", False, "derived: Inductor compiles every path")
    elif r.shape.matrix_bytes > _budget(r) // 4:
        r.set("packed_weights", False, "derived: copies would take more than a fourth of the memory budget")
    else:
        r.set("packed_weights", True, "derived: faster products, copies within a fourth of the memory budget")


def _packed_bytes(r: Resolution) -> int:
    return r.shape.matrix_bytes if r["packed_weights"] else 0


def requests_before_memory(r: Resolution) -> None:
    if not r.is_open("max_requests_per_batch"):
        return
    if r.hints.num_requests:
        r.set("max_requests_per_batch", r.hints.num_requests, "derived: requests submitted")
    else:
        r.set("max_requests_per_batch", DEFAULT_MAX_REQUESTS, "default")


def _budget(r: Resolution) -> int:
    return int(r.free * r["max_memory_percent"])


def _pages_per_request(r: Resolution) -> int:
    """Width of the widest block table that a step may have to carry."""
    longest = r.shape.max_positions or DEFAULT_BLOCKS_PER_REQUEST * r["page_size"]
    if r.hints.max_prompt_length and r.hints.max_generated_length:
        longest = min(longest, r.hints.max_prompt_length + r.hints.max_generated_length)
    return -(-longest // r["page_size"]) + 1


def _step_bytes(r: Resolution, max_batch_tokens: int, max_requests: int) -> tuple[int, int]:
    requests = min(max_requests, max_batch_tokens)
    buffers = step_buffer_bytes(len(r.layout.groups), max_batch_tokens, requests, _pages_per_request(r))
    return buffers, activation_bytes(r.shape, max_batch_tokens, requests)


def _workspaces(r: Resolution) -> int:
    return workspace_bytes(r.shape.device, any(r["use_cuda_graph"]))


def batch_tokens(r: Resolution) -> None:
    """8192, halved until a step's tensors take at most a tenth of the budget, but never under 256."""
    if not r.is_open("max_batch_tokens"):
        return
    tokens, requests, budget = DEFAULT_MAX_BATCH_TOKENS, r["max_requests_per_batch"], _budget(r)
    while tokens > MIN_MAX_BATCH_TOKENS and sum(_step_bytes(r, tokens, requests)) > budget // 10:
        tokens //= 2
    why = "default" if tokens == DEFAULT_MAX_BATCH_TOKENS else "derived: a step may take a tenth of the memory budget"
    r.set("max_batch_tokens", tokens, why)


def num_blocks(r: Resolution) -> None:
    budget, block = _budget(r), r.layout.block_bytes
    held = _workspaces(r) + _packed_bytes(r)
    tokens, requests = r["max_batch_tokens"], r["max_requests_per_batch"]

    def room_beside(running: int) -> int:
        return (budget - held - sum(_step_bytes(r, tokens, running))) // block - 1  # one block is the trash block

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


def fit_requests(r: Resolution) -> None:
    fitted = min(r["max_requests_per_batch"], r["max_batch_tokens"], r["num_blocks"])
    if fitted < r["max_requests_per_batch"]:
        r.set("max_requests_per_batch", fitted, "derived: fitted to max_batch_tokens and num_blocks")


def offload(r: Resolution) -> None:
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


def ledger(r: Resolution) -> Ledger:
    buffers, activations = _step_bytes(r, r["max_batch_tokens"], r["max_requests_per_batch"])
    block = r.layout.block_bytes
    return Ledger(
        r.shape.weight_bytes,
        (r["num_blocks"] + 1) * block,
        buffers,
        activations,
        _workspaces(r),
        decode_reserve=math.ceil(r["safety_margin"] * r["num_blocks"]) * block,
        host_cache=r["num_host_blocks"] * block,
        packed_weights=_packed_bytes(r) or None,
        host_is_pinned=r.shape.device.type == "cuda",
    )
