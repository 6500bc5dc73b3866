"""Saved pictures on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from harness.report.plots.figure import Plot


def figures(shown: Sequence[tuple[str, Plot]]) -> str:
    """Pictures with their headings, two in a row, on a phone one."""
    return f'<div class="plots">{"".join(_figure(head, plot) for head, plot in shown)}</div>'


def _figure(head: str, plot: Plot) -> str:
    title = f"<h3>{escape(head)}</h3>" if head else ""
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
    return f"<figure>{title}{plot.svg}{caption}</figure>"


def slug(kind: str, label: str) -> str:
    """A picture's file name."""
    text = re.sub(r"[^\w.=-]+", "-", label).strip("-")
    return f"{kind}-{text}" if text else kind
