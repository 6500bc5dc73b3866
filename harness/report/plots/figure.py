"""One look for all plots: palette, axes, and saving as png, svg and as svg inside a page.

Text and axes are drawn in one ink colour, which becomes ``currentColor`` in svg: a page in dark mode shows them in its
own text colour. The palette is Okabe and Ito's (2008) without yellow, told apart by people with colour-vision
deficiencies and readable on white and on near-black; series also differ in marker and line style.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import product
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from rich.cells import cell_len

INK = "#1b1d21"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 5.2  # inches: at this size the text is still read when a phone shows the picture at its own width
_DPI = 150
_MOST_COLUMNS = 4  # of a legend
_EDGE = 10  # points that stay free beside a legend: what the layout keeps at the edges of a figure
_NAME_WIDTH = 24  # of a line of a bar's name, in characters; longer ones take more lines: the bars keep their room
_SETTINGS: Any = {  # matplotlib types the keys one by one
    "svg.fonttype": "none",
    "svg.hashsalt": "cb-report",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
}


@dataclass(frozen=True)
class Plot:
    """A saved picture.

    Attributes:
        name: file name without suffix.
        caption: what is shown, with units and how it was reduced.
        svg: an ``<svg>`` element for a page.
    """

    name: str
    caption: str
    svg: str


@contextmanager
def look() -> Iterator[None]:
    """The settings of all plots, for the time of drawing only."""
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` panels that share their x axis, ``height`` inches in all."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for ax in axes:
        ax.grid(True, color=INK, alpha=0.15, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.patch.set_alpha(0)
    return figure, list(axes)


def series_colours(series: Sequence[str]) -> dict[str, str]:
    """One colour a series, the same in every plot of a report; a ramp where there are more than the palette holds."""
    names = list(dict.fromkeys(series))
    if len(names) <= len(PALETTE):
        return dict(zip(names, PALETTE, strict=False))
    ramp = mpl.colormaps["viridis"]
    # the ends of the ramp vanish on black or on white
    return {n: mpl.colors.to_hex(ramp(0.2 + 0.6 * i / (len(names) - 1))) for i, n in enumerate(names)}


def from_zero(ax: Axes) -> None:
    """The y axis from 0 to a little above what is drawn: a cut axis makes small differences look large."""
    ax.set_ylim(0, max(ax.dataLim.y1 * 1.08, 1e-9))


def time_axis(ax: Axes, until_s: float | None) -> None:
    """Seconds of a run on the x axis, from its start to ``until_s``, or to its end if None."""
    ax.set_xlim(0, until_s)
    ax.xaxis.set_major_locator(MaxNLocator(7))
    ax.set_xlabel("seconds after the start of the run")


def log_scale(ax: Axes, which: Literal["x", "y"], subs: Sequence[int] = (1, 2, 5)) -> None:
    """A logarithmic axis with marks and plain numbers at ``subs`` of each decade; over more than three decades, where
    the numbers would run into each other, only the powers of ten have theirs."""
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    axis = ax.xaxis if which == "x" else ax.yaxis

    def number(value: float, _: int | None) -> str:
        low, high = axis.get_view_interval()
        power = math.log10(value)
        return f"{value:g}" if high <= 1000 * low or math.isclose(power, round(power), abs_tol=1e-6) else ""

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_locator(NullLocator())


def legend_above(ax: Axes, handles: Sequence[Artist] | None = None) -> None:
    """A legend over the axes, where it covers no data, in as many columns as fit between axis and edge of the figure.

    Called last: the ticks and the label of the y axis say how much room is left.
    """
    shown = list(ax.get_legend_handles_labels()[0] if handles is None else handles)
    if not shown:
        return
    room = _room_beside(ax)
    labels = [str(h.get_label()) for h in shown]
    for columns in range(min(_MOST_COLUMNS, len(shown)), 0, -1):
        if _legend(ax, shown, labels, columns) <= room:
            return
    longest = max(map(len, labels))
    for characters in range(longest - 1, 9, -1):
        lines = [textwrap.fill(label, characters) for label in labels]
        if _legend(ax, shown, lines, 1) <= room:
            return


def _legend(ax: Axes, handles: Sequence[Artist], labels: Sequence[str], columns: int) -> float:
    """Draw it and return its width in points."""
    legend = ax.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, markerscale=1.6
    )
    figure = ax.get_figure(root=True)
    assert figure is not None
    return float(legend.get_window_extent().width) * 72 / figure.dpi


def _room_beside(ax: Axes) -> float:
    """Points from the y axis to the right edge of the figure: what stands left of the axis is as wide in any layout."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    left = max((_left_of(a) for a in figure.axes), default=0.0)
    return (float(figure.bbox.width) - left) * 72 / figure.dpi - 2 * _EDGE


def _left_of(ax: Axes) -> float:
    box = ax.yaxis.get_tightbbox()
    return 0.0 if box is None else float(ax.bbox.x0 - box.x0)


def bar_names(ax: Axes, names: Sequence[str]) -> None:
    """Names of horizontal bars at 0, 1, 2 … on the y axis, the first one on top."""
    ax.set_yticks(range(len(names)), ["\n".join(_name_lines(name)) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(False, axis="y")


def bars_height(names: Sequence[str]) -> float:
    """Inches for as many bars, each with room for its name."""
    return sum(max(0.36, 0.05 + 0.17 * len(_name_lines(name))) for name in names)


def _name_lines(name: str) -> list[str]:
    """A bar's name in lines; a character as wide as two (Chinese, Japanese, Korean) counts as two."""
    filled = "".join(c + "\0" * (cell_len(c) - 1) for c in name)
    return [text for line in textwrap.wrap(filled, _NAME_WIDTH) if (text := line.replace("\0", ""))]


def texts_outside(figure: Figure) -> list[str]:
    """What of a figure's texts runs over its edge and would be cut off; [] in a figure that may be saved."""
    figure.draw_without_rendering()
    boxes: list[tuple[str, Bbox | None]] = []
    for ax in figure.axes:
        boxes += [
            (f"{name} axis {axis.get_label_text()!r}", axis.get_tightbbox())
            for name, axis in (("x", ax.xaxis), ("y", ax.yaxis))
        ]
        boxes += [(text.get_text(), text.get_window_extent()) for text in ax.texts]
        legend = ax.get_legend()
        boxes += [] if legend is None else [(t.get_text(), t.get_window_extent()) for t in legend.get_texts()]
    edge = figure.bbox
    return [
        name
        for name, box in boxes
        if box is not None and not (edge.x0 <= box.x0 and edge.y0 <= box.y0 and box.x1 <= edge.x1 and box.y1 <= edge.y1)
    ]


def annotate_apart(ax: Axes, names: Sequence[tuple[str, tuple[float, float]]]) -> list[str]:
    """Write names beside their points, the first ones first, and return those that would have covered another.

    The limits of the axes must be final.
    """
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # only then is it known where a point is
    placed: list[Bbox] = []
    left_out: list[str] = []
    for name, point in names:
        for dy, (dx, side) in product((4, -11, 14, -21), ((5, "left"), (-5, "right"))):
            text = ax.annotate(name, point, xytext=(dx, dy), textcoords="offset points", fontsize=8, ha=side)
            text.set_in_layout(False)  # room for a name would move the points
            box = text.get_window_extent()
            wide = ax.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            inside = wide and ax.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
            if inside and not any(box.overlaps(other) for other in placed):
                placed.append(box)
                break
            text.remove()
        else:
            left_out.append(name)
    return left_out


def save(figure: Figure, directory: Path, name: str, caption: str) -> Plot:
    """Write ``name``.png and ``name``.svg into ``directory`` and return the picture for a page."""
    name = re.sub(r"[^\w.=-]+", "-", name).strip("-")
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = BytesIO(), StringIO()
    with look():  # the canvases are asked directly: savefig draws everything once more beforehand
        figure.set_dpi(_DPI)
        figure.set_facecolor("white")
        FigureCanvasAgg(figure).print_png(png)
        figure.set_layout_engine("none")  # it has settled; finding it once more is a third of the time of a report
        figure.set_facecolor("none")
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
    text = _in_ink(svg.getvalue())
    _replace(directory / f"{name}.png", png.getvalue())
    _replace(directory / f"{name}.svg", text.encode())
    return Plot(name, caption, _inline(text, name, caption))


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    os.replace(aside, path)


def _in_ink(svg: str) -> str:
    svg = re.sub(re.escape(INK), "currentColor", svg, flags=re.IGNORECASE)
    # matplotlib lists every fallback font in every text; the reader's own interface font is near enough in width
    return re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)


def _inline(svg: str, name: str, caption: str) -> str:
    """The svg element alone: no prolog, scaled by the page, ids unique among the pictures of a page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]+"', head)
    prefix = f"{name}-"
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}\1"', body)
    label = caption.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg {view[0] if view else ""} role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">{body}'
