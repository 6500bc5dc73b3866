"""How a model's layers map to cache blocks: layer groups, bytes a block, pages a request needs.

Layers with the same kind of attention form groups of one size, so that a block can serve any group: a block holds
``page_size`` tokens of keys and values for each layer of *one* group. A full-attention model has a single group; a
hybrid one has several, padded to the same number of layers. Pure arithmetic, no torch: the capacity planner and the
simulator use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table.

    Attributes:
        layers: indices of the model's layers.
        window: sliding window in tokens (a query sees itself and the ``window - 1`` tokens before it); None = full.
    """

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shape of the paged cache.

    Attributes:
        groups: layer groups, all cut to at most ``layers_per_block`` layers.
        layers_per_block: layers whose pages a block holds.
        page_size: tokens a page.
        num_kv_heads, head_dim: shape of one token's keys (and values) in one layer.
        itemsize: bytes of one element.
    """

    groups: tuple[LayerGroup, ...]
    layers_per_block: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @classmethod
    def build(
        cls, windows: Sequence[int | None], page_size: int, num_kv_heads: int, head_dim: int, itemsize: int
    ) -> CacheLayout:
        """Group layers by window. ``windows[i]`` is layer i's sliding window, None for full attention."""
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            by_window.setdefault(window, []).append(layer)
        per_block = min(len(layers) for layers in by_window.values())
        groups = tuple(
            LayerGroup(tuple(layers[i : i + per_block]), window)
            for window, layers in by_window.items()
            for i in range(0, len(layers), per_block)
        )
        return cls(groups, per_block, page_size, num_kv_heads, head_dim, itemsize)

    @property
    def windows(self) -> list[int | None]:
        """By layer, its sliding window in tokens, None for full attention: what `build` was given."""
        by_layer = {layer: group.window for group in self.groups for layer in group.layers}
        return [by_layer[layer] for layer in sorted(by_layer)]

    @property
    def page_bytes(self) -> int:
        """Keys and values of one page of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize * self.page_size

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.layers_per_block

    @property
    def can_share_prefixes(self) -> bool:
        """Prefix sharing needs every layer to keep the whole prefix."""
        return all(group.window is None for group in self.groups)

    def blocks_needed(self, num_tokens: int, chunk: int) -> int:
        """Most blocks a request holds at once while it grows to ``num_tokens`` positions.

        Args:
            num_tokens: positions whose keys and values are needed at the end.
            chunk: most tokens computed in one step; a sliding layer keeps its window and the chunk being computed.
        """
        total = 0
        for group in self.groups:
            pages = -(-num_tokens // self.page_size)
            if group.window is not None:
                span = group.window - 1 + min(chunk, num_tokens)
                pages = min(pages, -(-span // self.page_size) + 1)
            total += pages
        return total
