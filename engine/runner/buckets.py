"""Which steps are captured, and which of them a step is replayed on. Sizes only: nothing here needs a GPU."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from engine.runner.batch import StepShape

MIXED_PREFILLS = 8
"""Prefill rows of a captured mixed step."""
MIXED_TOKENS = (64, 128, 256, 512, 1024)
"""Prefill tokens of the captured mixed steps. Larger steps keep the device busy longer than their launches take."""
MIXED_DECODES = (0, 16, 32, 64, 128, 192, 256)
"""Decode rows beside them."""


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the captured decode steps: 1, 2, 4, then by 8 to 256, then by 64, and ``max_rows`` itself."""
    sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(320, max_rows + 1, 64)) if n < max_rows]
    return (*sizes, max_rows)


def prefill_sizes(max_tokens: int, interval: int = 0) -> tuple[int, ...]:
    """Prefill tokens of the captured mixed steps, ascending.

    Args:
        max_tokens: query tokens of the largest step.
        interval: they are its multiples, up to 1024 or to itself if that is more; 0 = `MIXED_TOKENS`.
    """
    if not interval:
        return tuple(n for n in MIXED_TOKENS if n <= max_tokens)
    limit = min(max_tokens, max(interval, MIXED_TOKENS[-1]))
    return tuple(range(interval, limit + 1, interval))


def table_widths(pages: int, page_size: int, interval: int = 0) -> tuple[int, ...]:
    """Pages of the captured steps' block tables, ascending; the last is ``pages``.

    Args:
        interval: tokens, in whole pages, that one width has more than the one before; 0 = ``pages`` only.
    """
    if not interval:
        return (pages,)
    step = -(-interval // page_size)
    return (*range(step, pages, step), pages)


@dataclass(frozen=True, slots=True)
class StepBuckets:
    """Sizes of captured steps, each ascending; every combination of them is captured.

    Attributes:
        decodes: decode rows of steps without prefills.
        prefill_tokens: prefill tokens of steps with up to `MIXED_PREFILLS` prefill rows.
        mixed_decodes: decode rows beside those.
        widths: pages of the block tables.
        groups: layer groups.
    """

    decodes: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    mixed_decodes: tuple[int, ...]
    widths: tuple[int, ...]
    groups: int

    @classmethod
    def plan(
        cls,
        *,
        max_rows: int,
        max_tokens: int,
        table_pages: int,
        page_size: int,
        groups: int,
        mixed: bool,
        decode: bool,
        q_interval: int = 0,
        kv_interval: int = 0,
    ) -> StepBuckets:
        """The sizes for a batch of at most ``max_rows`` rows and ``max_tokens`` query tokens.

        Args:
            table_pages: of the widest block table.
            mixed, decode: whether steps with prefills, and those without, are captured.
            q_interval, kv_interval: of prefill tokens, and of the tokens a block table spans; 0 = own sizes.
        """
        return cls(
            decode_sizes(min(max_rows, max_tokens)) if decode else (),
            prefill_sizes(max_tokens, q_interval) if mixed else (),
            tuple(n for n in MIXED_DECODES if n + MIXED_PREFILLS <= max_rows),
            table_widths(table_pages, page_size, kv_interval),
            groups,
        )

    @property
    def largest(self) -> int:
        """Query tokens of the largest captured step; 0 if none is."""
        return max((shape.tokens for shape in self.shapes()), default=0)

    def shapes(self) -> list[StepShape]:
        """Every step to capture, largest first."""
        shapes = [self._shape(n, 0, width) for n in self.decodes for width in self.widths]
        shapes += [
            self._shape(n, tokens, width)
            for tokens in self.prefill_tokens
            for n in self.mixed_decodes
            for width in self.widths
        ]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows, shape.width), reverse=True)

    def find(self, shape: StepShape) -> StepShape | None:
        """The smallest captured step with room for a step of this shape; None if there is none."""
        width = _at_least(self.widths, shape.width)
        if width is None or shape.prefills > MIXED_PREFILLS:
            return None
        tokens = _at_least(self.prefill_tokens, shape.prefill_tokens) if shape.prefills else 0
        decodes = _at_least(self.mixed_decodes if shape.prefills else self.decodes, shape.decodes)
        return None if tokens is None or decodes is None else self._shape(decodes, tokens, width)

    def _shape(self, decodes: int, tokens: int, width: int) -> StepShape:
        prefills = MIXED_PREFILLS if tokens else 0
        return StepShape(decodes, prefills, tokens, decodes + prefills, width, self.groups)


def _at_least(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of ascending ``sizes`` that is not below ``size``."""
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
