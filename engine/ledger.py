"""The memory ledger: what the engine's memory is spent on, in bytes.

Before the cache is sized, and wherever nothing can be measured (on a CPU, or with a backend that needs a step's real
rows), activations and workspaces are estimates (`engine.resolution.estimates`). After the warm-up on a GPU the ledger
holds what was found instead (`Footprint`), and names those lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
