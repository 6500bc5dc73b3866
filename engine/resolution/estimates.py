"""What a device and the host have free, and estimates of what the engine takes of it before the cache is sized.

They are rather too high than too low: the cache is what they leave.
"""

from __future__ import annotations

import torch

from engine.model_shape import ModelShape

WORKSPACE = 32 << 20
"""Bytes of scratch that torch gives cuBLAS on a Hopper GPU, once for each thread and stream (less on others)."""


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
