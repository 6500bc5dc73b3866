"""The plan as one HTML page that stands alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from harness.capacity import words
from harness.capacity.plan import Plan
from harness.capacity.recommend import as_yaml
from harness.capacity.search import Capacity
from harness.report import plots
from harness.report.page import page, section, text_table
from harness.report.plots.figure import (
    INK,
    LINES,
    MARKERS,
    PALETTE,
    from_zero,
    legend_above,
    log_scale,
    look,
    new_figure,
)
from harness.slo import Slo

_PANELS = (("ttft_p95_ms", "TTFT p95, ms"), ("itl_p99_ms", "ITL p99, ms"))


def plan_page(plan: Plan, folder: Path, command: Sequence[str]) -> str:
    """The page; its pictures are also written into ``folder``."""
    title = f"Capacity plan: {plan.workload.name}"
    runs = ", ".join(str(v) for v in plan.model.source.get("model", ())) or "model not recorded"
    device = ", ".join(str(v) for v in plan.model.source.get("device", ())) or "device not recorded"
    count = len(plan.model.source.get("runs", ()))
    head = [f"<h1>{escape(title)}</h1>"]
    head.append(
        '<p class="question">How much can one GPU carry within the limits, what stops it, and how many are needed?</p>'
    )
    head.append(
        f'<p class="soft">{escape(runs)} · {escape(device)} · simulated, step times from {count} measured runs</p>'
    )
    head += [f'<p class="headline">{escape(line)}</p>' for line in words.headline(plan)]
    items = "".join(f"<li>{escape(_title(line))}</li>" for line in words.remarks(plan))
    head.append(f'<div class="notes"><strong>Before you believe the numbers</strong><ul>{items}</ul></div>')
    return page(
        title,
        [
            "\n".join(head),
            _rates_section(plan, folder),
            *(section(_title(title), text_table(*words.seed_rows(found))) for title, found in words.capacities(plan)),
            section("Predicted and measured", text_table(*words.validation_rows(plan.validation.rows))),
            section("Room in the KV cache", f"<p>{escape(plan.kv.note)}</p>", text_table(*words.kv_rows(plan))),
            section("Behind a router", text_table(*words.fleet_rows(plan.fleet))) if len(plan.fleet) else "",
            section("Recommended settings", f"<pre>{escape(as_yaml(plan.recommended))}</pre>")
            if plan.recommended
            else "",
            _model_section(plan),
            section("Run it again", f"<pre>{escape(shlex.join(command))}</pre>"),
        ],
    )


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def _rates_section(plan: Plan, folder: Path) -> str:
    if plan.capacity is None:
        return ""
    figure, caption = latency_over_rate(plan.capacity, plan.settings.slo)
    plot = plots.save(figure, folder / "plots", "latency-over-rate", caption)
    return section("Latency over rate", f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>")


def latency_over_rate(capacity: Capacity, slo: Slo) -> tuple[Figure, str]:
    """Every simulated run: latency against rate, with the limits and the capacity."""
    with look():
        figure, axes = new_figure(4.6, rows=len(_PANELS))
        for ax, (metric, label) in zip(axes, _PANELS, strict=True):
            for i, seed in enumerate(sorted({p.seed for p in capacity.points})):
                points = sorted(
                    (p.rate, p.values[metric])
                    for p in capacity.points
                    if p.seed == seed and p.values[metric] is not None
                )
                x, y = [p[0] for p in points], [p[1] for p in points]
                ax.plot(
                    x,
                    y,
                    LINES[i % 4],
                    marker=MARKERS[i % 6],
                    markersize=4,
                    color=PALETTE[i % len(PALETTE)],
                    label=f"seed {seed}",
                )
            behind = [p for p in capacity.points if p.falls_behind and p.values[metric] is not None]
            if behind:
                ax.plot(
                    [p.rate for p in behind],
                    [p.values[metric] for p in behind],
                    "x",
                    markersize=9,
                    color=INK,
                    label="falls behind",
                )
            limit = slo.run_limits.get(metric)
            if limit is not None:
                ax.axhline(limit, color=INK, linewidth=1, linestyle="--")
                kept = [p.values[metric] for p in capacity.kept if p.values[metric] is not None]
                ax.set_ylim(0, max([limit * 3, *kept]) * 1.05)
            else:
                from_zero(ax)
            ax.axvline(capacity.rate, color=INK, linewidth=1, linestyle=":")
            ax.set_ylabel(label)
        axes[-1].set_xlabel("requests/s")
        log_scale(axes[-1], "x")
        legend_above(axes[0])
    caption = (
        "Simulated runs of the search, one line a seed. Dashed: the limit; dotted: the capacity found (mean over "
        "seeds); crossed: requests end slower than they come. Where a limit is drawn the axis ends at three times it."
    )
    return figure, caption


def _model_section(plan: Plan) -> str:
    header = (
        "part",
        "kind of step",
        "steps",
        "median error",
        "90th percentile",
        "time in outliers",
        "largest: tokens, rows, keys",
    )
    rows = [
        [
            r.part,
            r.kind if r.part != "between" else "all",
            f"{r.steps:,}",
            f"{r.median_error:.1%}",
            f"{r.p90_error:.1%}",
            f"{r.trimmed_share:.1%}",
            f"{r.max_tokens:,}, {r.max_rows:,}, {r.max_keys:,}",
        ]
        for r in plan.model.residuals
    ]
    text = (
        "Errors of single steps. Their spread is drawn again in the simulation; the slowest 2 of 1,000 steps are not "
        "(column: time in outliers)."
    )
    return section("Step-time model", f"<p>{text}</p>", text_table(header, rows))
