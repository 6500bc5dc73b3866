"""The memory ledger: what the engine's memory is spent on, in bytes, before it is spent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Ledger:
    """Planned use of memory in bytes.

    Attributes:
        weights: the model's parameters (there before the engine).
        kv_cache: keys and values of all blocks, the trash block included.
        step_buffers: inputs of a step on the device.
        activations: peak of temporary tensors in a forward pass over ``max_batch_tokens``, logits included.
        graph_pool: what captured steps hold besides; measured once they are captured, None before and without any.
        decode_reserve: the part of ``kv_cache`` that the safety margin keeps for requests that decode: so much must be
            free for a prefill to be admitted.
        host_cache: blocks of preempted requests in host memory.
        host_is_pinned: whether that is pinned, as it is beside a GPU.
    """

    weights: int
    kv_cache: int
    step_buffers: int
    activations: int
    graph_pool: int | None = None
    decode_reserve: int = 0
    host_cache: int = 0
    host_is_pinned: bool = False

    def as_dict(self) -> dict[str, int]:
        """Bytes by name; what is not known is left out. ``of_*`` is part of another line, ``pinned_*`` and ``host_*``
        lie in host memory: neither adds to what the device holds."""
        lines = {
            "weights_bytes": self.weights,
            "kv_cache_bytes": self.kv_cache,
            "step_buffers_bytes": self.step_buffers,
            "activations_bytes": self.activations,
            "of_kv_cache_decode_reserve_bytes": self.decode_reserve,
            f"{'pinned_host' if self.host_is_pinned else 'host'}_cache_bytes": self.host_cache,
        }
        return lines if self.graph_pool is None else lines | {"graph_pool_bytes": self.graph_pool}


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
