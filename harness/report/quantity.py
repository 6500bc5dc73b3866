"""How numbers are written: three significant digits, units people read, a dash for unknown."""

from __future__ import annotations

import math

UNKNOWN = "–"


def number(value: float | None) -> str:
    """Three significant digits, integers above a thousand with separators; a dash if unknown."""
    if value is None or math.isnan(value):
        return UNKNOWN
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    decimals = 2 - math.floor(math.log10(size))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if value == int(value) else text


def memory(value: float | None) -> str:
    """Bytes as MiB or GiB."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{number(value / 2**30)} GiB" if value >= 2**30 else f"{number(value / 2**20)} MiB"


def in_unit(value: float | None, unit: str) -> str:
    """A value of a table's column, by the column's unit; the unit itself only where the scale depends on the value."""
    return memory(value) if unit == "bytes" else number(value)


def times(ratio: float) -> str:
    """A ratio to a baseline with two decimals, a small one with two significant digits: ``1.48×``, ``0.0052×``."""
    decimals = 2 if ratio <= 0 or ratio >= 0.1 else 1 - math.floor(math.log10(ratio))
    return f"{ratio:.{decimals}f}×"
