"""The memory ledger: what the engine's memory is spent on, in bytes.

Before the cache is sized, and wherever nothing can be measured (on a CPU, or with a backend that needs a step's real
rows), activations and workspaces are estimates, of the kind that is rather too high: the cache is what they leave.
After the warm-up on a GPU the ledger holds what was found instead (`Footprint`), and names those lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.model_shape import ModelShape

WORKSPACE = 32 << 20
"""Bytes of scratch that torch gives cuBLAS on a Hopper GPU, once for each thread and stream (less on others)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the warm-up was found to take on a GPU, in bytes.

    Attributes:
        activations: peak of temporary tensors in a launched step of ``max_batch_tokens`` and as many sampled rows as
            there can be, its packed inputs left out; None if there was no such step or it did not fit.
        workspaces: held afterwards beside weights, cache and graph pool: scratch of matrix products, rotary tables, the
            slots' last tokens, the static inputs of captured steps.
        graph_pool: memory of the captured steps; None without any.
        graph_pool_reused: the part of it that torch does not count as allocated: temporaries, which all captured steps
            have in the same places.
    """

    activations: int | None
    workspaces: int
    graph_pool: int | None = None
    graph_pool_reused: int | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Use of memory in bytes: planned, and after a warm-up on a GPU as it was measured.

    Attributes:
        weights: the model's parameters (there before the engine).
        kv_cache: keys and values of all blocks, the trash block included.
        step_buffers: packed inputs of a launched step on the device.
        activations: peak of temporary tensors in a launched step of ``max_batch_tokens``, logits included. Captured
            steps have theirs in the graph pool, which no other step can use.
        workspaces: what is held besides; see `Footprint`.
        packed_weights: copies of the matrices in oneDNN's layout; None without any.
        graph_pool: what captured steps hold; None before they are captured and without any.
        graph_pool_reused: the part of it that torch does not count as allocated; None as ``graph_pool``.
        decode_reserve: the part of ``kv_cache`` that the safety margin keeps for requests that decode: so much must be
            free for a prefill to be admitted.
        host_cache: blocks of preempted requests in host memory.
        host_is_pinned: whether that is pinned, as it is beside a GPU.
        measured: attributes that were measured.
    """

    weights: int
    kv_cache: int
    step_buffers: int
    activations: int
    workspaces: int = 0
    packed_weights: int | None = None
    graph_pool: int | None = None
    graph_pool_reused: int | None = None
    decode_reserve: int = 0
    host_cache: int = 0
    host_is_pinned: bool = False
    measured: frozenset[str] = frozenset()

    def with_measured(self, footprint: Footprint) -> Ledger:
        """The ledger with what was found in place of what was estimated."""
        activations = footprint.activations
        pool = {"graph_pool", "graph_pool_reused"} if footprint.graph_pool is not None else set()
        return replace(
            self,
            activations=self.activations if activations is None else activations,
            workspaces=footprint.workspaces,
            graph_pool=footprint.graph_pool,
            graph_pool_reused=footprint.graph_pool_reused,
            measured=frozenset({"workspaces", *pool} if activations is None else {"activations", "workspaces", *pool}),
        )

    def as_dict(self) -> dict[str, int]:
        """Bytes by name; what is not known is left out. ``of_*`` is part of another line, ``pinned_*`` and ``host_*``
        lie in host memory: neither adds to what the device holds."""
        return {name: size for name, (size, _) in self._lines().items()}

    def sources(self) -> dict[str, str]:
        """Where each line of `as_dict` comes from: "exact" (sizes of tensors), "estimated" or "measured"."""
        return {name: source for name, (_, source) in self._lines().items()}

    def _lines(self) -> dict[str, tuple[int, str]]:
        host = f"{'pinned_host' if self.host_is_pinned else 'host'}_cache_bytes"
        names = {
            "weights": "weights_bytes",
            "kv_cache": "kv_cache_bytes",
            "step_buffers": "step_buffers_bytes",
            "activations": "activations_bytes",
            "workspaces": "workspaces_bytes",
            "decode_reserve": "of_kv_cache_decode_reserve_bytes",
            "host_cache": host,
            "packed_weights": "packed_weights_bytes",
            "graph_pool": "graph_pool_bytes",
            "graph_pool_reused": "of_graph_pool_reused_bytes",
        }
        lines = {}
        for attribute, name in names.items():
            size = getattr(self, attribute)
            otherwise = "estimated" if attribute in ("activations", "workspaces", "packed_weights") else "exact"
            if size is not None:
                lines[name] = size, "measured" if attribute in self.measured else otherwise
        return lines


def activation_bytes(shape: ModelShape, max_batch_tokens: int, max_requests: int) -> int:
    """Estimate of the largest set of temporary tensors that is alive at once in a forward pass.

    Per token: the residual and its norm, queries, keys, values and attention output, then the gated MLP's three
    intermediates. Per sampled row: logits in the model's dtype and in fp32, and one processed copy.
    """
    width = 4 * shape.hidden_size
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    mlp = 3 * shape.intermediate_size
    per_token = (width + max(2 * attention, mlp)) * shape.dtype.itemsize
    rows = min(max_requests, max_batch_tokens)
    return max_batch_tokens * per_token + rows * shape.vocab_size * (shape.dtype.itemsize + 8)


def step_buffer_bytes(num_groups: int, max_batch_tokens: int, max_requests: int, pages: int) -> int:
    """Bytes of one step's packed inputs: ids, positions, lengths and block tables of 4 bytes, cache slots and rows of
    8."""
    return 4 * (max_batch_tokens * (2 + 2 * num_groups) + max_requests * (9 + num_groups * pages))


def workspace_bytes(device: torch.device, captured: bool) -> int:
    """Estimate of what is held besides weights, cache and step buffers.

    Args:
        captured: whether steps are captured: then matrix products run on one more stream, and some may be cuBLASLt's
            with scratch of their own. Else they run in two threads, the one that warms up and the loop's.
    """
    if device.type != "cuda":
        return 0
    return WORKSPACE * (4 if captured else 2)


def available_ram() -> int | None:
    """Bytes of host memory that could be allocated now; None where psutil is missing."""
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on ``device`` now; on a CPU the available RAM."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
