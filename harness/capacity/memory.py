"""How much the KV cache holds, by the engine's own layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.simulate import EngineSetup
from workloads.workload import Workload


@dataclass(frozen=True)
class Room:
    """What fits at once if every request has the same length.

    Attributes:
        tokens: positions of each request.
        blocks: KV blocks that each takes at the most.
        requests: that fit at once, limited by ``max_requests_per_batch`` where that is less.
        total_tokens: positions of all of them.
        bytes_per_token: of the blocks that a request takes, by its positions.
    """

    tokens: int
    blocks: int
    requests: int
    total_tokens: int
    bytes_per_token: float


@dataclass(frozen=True)
class KvCapacity:
    """Room by length of request.

    Attributes:
        kind: full, sliding or hybrid attention.
        rooms: ascending in tokens.
        note: how to read them.
    """

    kind: str
    rooms: tuple[Room, ...]
    note: str


def kv_capacity(setup: EngineSetup, lengths: Sequence[int]) -> KvCapacity:
    """Room for requests of each length. Prefix hits are never counted: they are luck, and sliding layers have none.

    A sliding layer keeps its window and the chunk being computed, so a longer request may need no more blocks; what a
    token costs then depends on the length, and one figure of bytes a token would be wrong.
    """
    windows = {group.window for group in setup.layout.groups}
    kind = "full" if windows == {None} else "hybrid" if None in windows else "sliding"
    rooms = tuple(_room(setup, tokens) for tokens in sorted(set(lengths)))
    if kind == "full":
        note = "Every layer keeps every position: the bytes of a token do not depend on the length, pages apart."
    else:
        window = min(w for w in windows if w is not None)
        note = (
            f"The model has {kind} attention: layers with a window of {window} tokens "
            "keep no more than that, so bytes a token fall with the length. Prefixes are not shared."
        )
    return KvCapacity(kind, rooms, note)


def _room(setup: EngineSetup, tokens: int) -> Room:
    if tokens < 1:
        raise ValueError(f"a request has at least 1 token, got {tokens}")
    blocks = setup.layout.blocks_needed(tokens, setup.max_batch_tokens)
    fit = min(setup.num_blocks // blocks, setup.max_requests_per_batch)
    per_token = blocks * setup.layout.block_bytes / tokens
    return Room(tokens, blocks, fit, fit * tokens, per_token)


def typical_lengths(workload: Workload) -> list[int]:
    """Positions that requests of a workload need: the median, the 95th percentile, and the most."""
    lengths = sorted(len(r.prompt_ids) + r.max_new_tokens - 1 for r in workload.requests)
    return [lengths[round(q * (len(lengths) - 1))] for q in (0.5, 0.95, 1.0)]
