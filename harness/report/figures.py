"""Saved pictures on the page."""

from __future__ import annotations

import hashlib
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


_LONGEST = 120
"""Bytes of a picture's file name: file systems allow 255, and a suffix and a temporary name come on top."""


def slug(kind: str, label: str) -> str:
    """A picture's file name without suffix; of a long label the beginning, told apart by a hash of all of it."""
    text = re.sub(r"[^\w.=-]+", "-", label).strip("-")
    name = f"{kind}-{text}" if text else kind
    if len(name.encode()) <= _LONGEST:
        return name
    mark = hashlib.sha256(label.encode()).hexdigest()[:8]
    return f"{name.encode()[: _LONGEST - 9].decode(errors='ignore')}-{mark}"
