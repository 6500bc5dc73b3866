"""Which steps are captured, and which of them a step is replayed on. Sizes only: nothing here needs a GPU.

A captured step with prefills has room for a number of query tokens, whoever's they are: the tokens of its prefill rows
stand right behind those of its decode rows, wherever that is. So its tokens and its rows are rounded up apart from each
other, and padding stands behind them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.runner.batch import StepShape

MIXED_TOKENS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Query tokens of the smaller captured steps with prefills, which are always captured."""
SPACING = 8
"""From there on a size is at most an eighth above the one before."""
MIN_PREFILLS, TOKENS_A_PREFILL = 8, 16
"""Prefill rows there is room for: so many, or one for so many tokens."""


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the captured decode steps: 1, 2, 4, then by 8 to 256, then by 64, and ``max_rows`` itself."""
    sizes = [n for n in (1, 2, 4, *range(8, 257, 8), *range(320, max_rows + 1, 64)) if n < max_rows]
    return (*sizes, max_rows)


def mixed_sizes(max_tokens: int, interval: int = 0) -> tuple[int, ...]:
    """Query tokens of the captured steps with prefills, ascending.

    Args:
        max_tokens: query tokens of the largest step.
        interval: they are its multiples: all of them up to 1024, or itself if that is more, then such as are an eighth
            apart; 0 = `MIXED_TOKENS`, then multiples of 64 an eighth apart, and ``max_tokens`` itself.
    """
    step, limit = interval or MIXED_TOKENS[0], MIXED_TOKENS[-1]
    small = range(interval, max(interval, limit) + 1, interval) if interval else MIXED_TOKENS
    sizes = [n for n in small if n <= max_tokens]
    while sizes:
        size = max(sizes[-1] * (SPACING + 1) // SPACING // step * step, sizes[-1] + step)
        if size > max_tokens:
            break
        sizes.append(size)
    if not interval and (not sizes or sizes[-1] < max_tokens):
        sizes.append(max_tokens)
    return tuple(sizes)


def mixed_decodes(tokens: int, max_rows: int) -> tuple[int, ...]:
    """Decode rows that captured steps of so many tokens with prefills have room for, ascending. A row that is not there
    costs a program that looks at one key, next to nothing beside many tokens."""
    most = min(tokens, max_rows)
    sizes = (16, 64, 256) if tokens <= 512 else (32, 256) if tokens <= 2048 else (256,)
    return (*(n for n in sizes if 2 * n <= most), most)


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
        mixed_tokens: query tokens of steps with prefills; `mixed_decodes` of each.
        widths: pages of the block tables.
        groups: layer groups.
        max_rows: of a step.
        many_prefills: whether steps with prefills have room for more than `MIN_PREFILLS` prefill rows.
    """

    decodes: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    widths: tuple[int, ...]
    groups: int
    max_rows: int
    many_prefills: bool

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
        any_lengths: bool,
        q_interval: int = 0,
        kv_interval: int = 0,
    ) -> StepBuckets:
        """The sizes for a batch of at most ``max_rows`` rows and ``max_tokens`` query tokens.

        Args:
            table_pages: of the widest block table.
            mixed, decode: whether steps with prefills, and those without, are captured.
            any_lengths: `AttentionBackend.any_lengths`; without it steps with prefills have few rows of them, and at
                most 1024 tokens or ``q_interval``.
            q_interval, kv_interval: of query tokens in steps with prefills, and of the tokens a block table spans; 0 =
                own sizes.
        """
        sizes = mixed_sizes(max_tokens, q_interval) if mixed else ()
        if not any_lengths:
            sizes = tuple(n for n in sizes if n <= max(MIXED_TOKENS[-1], q_interval))
        return cls(
            decode_sizes(min(max_rows, max_tokens)) if decode else (),
            sizes,
            table_widths(table_pages, page_size, kv_interval),
            groups,
            max_rows,
            any_lengths,
        )

    def up_to(self, tokens: int) -> StepBuckets:
        """Without steps with prefills of more than ``tokens`` query tokens."""
        return replace(self, mixed_tokens=tuple(n for n in self.mixed_tokens if n <= tokens))

    @property
    def largest(self) -> int:
        """Query tokens of the largest captured step; 0 if none is."""
        return max((*self.decodes[-1:], *self.mixed_tokens[-1:]), default=0)

    def shapes(self) -> list[StepShape]:
        """Every step to capture, largest first."""
        shapes = [self._decode(rows, width) for rows in self.decodes for width in self.widths]
        shapes += [
            self.mixed(tokens, decodes, width)
            for tokens in self.mixed_tokens
            for decodes in mixed_decodes(tokens, self.max_rows)
            for width in self.widths
        ]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows, shape.width), reverse=True)

    def find(self, shape: StepShape) -> StepShape | None:
        """The smallest captured step with room for a step of this shape; None if there is none."""
        width = _at_least(self.widths, shape.width)
        if width is None:
            return None
        if not shape.prefills:
            rows = _at_least(self.decodes, shape.decodes)
            return None if rows is None else self._decode(rows, width)
        for tokens in self.mixed_tokens[bisect.bisect_left(self.mixed_tokens, shape.tokens) :]:
            decodes = _at_least(mixed_decodes(tokens, self.max_rows), shape.decodes)
            if decodes is not None and shape.prefills <= self.prefills(tokens):
                return self.mixed(tokens, decodes, width)
        return None

    def prefills(self, tokens: int) -> int:
        """Prefill rows that a captured step of so many tokens has room for."""
        rows = max(MIN_PREFILLS, tokens // TOKENS_A_PREFILL) if self.many_prefills else MIN_PREFILLS
        return min(rows, self.max_rows, tokens)

    def mixed(self, tokens: int, decodes: int, width: int) -> StepShape:
        """The captured step with prefills of these sizes. There is room for more rows than a step can have, since
        either kind may be most of them, but not for more samples."""
        prefills = self.prefills(tokens)
        samples = min(decodes + prefills, self.max_rows, tokens)
        return StepShape(decodes, prefills, tokens - decodes, samples, width, self.groups)

    def _decode(self, rows: int, width: int) -> StepShape:
        return StepShape(rows, 0, 0, rows, width, self.groups)


def _at_least(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of ascending ``sizes`` that is not below ``size``."""
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
