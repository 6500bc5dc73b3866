"""The section "What caused the slowest": causes of the worst gaps and first tokens, counted, and the worst of each."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.report.arms import Arm
from harness.report.page import details, section, text_table
from harness.report.quantity import UNKNOWN, number
from harness.report.read import Results

_KINDS = {"ttft": "first tokens", "itl": "gaps between tokens"}
_SHOWN = 10  # single tails an arm, folded away


def slowest_section(results: Results, arms: Sequence[Arm]) -> str:
    """Which causes the worst 1 % had, by arm; "" if no tails are known."""
    tails = results.tables["tails"]
    rows, singles = [], []
    for arm in arms:
        own = tails[tails["run_id"].isin(arm.measured["run_id"])]
        for kind, name in _KINDS.items():
            of_kind = own[own["kind"] == kind]
            for cause, group in _by_cause(of_kind):
                worst = group.loc[group["value_ms"].idxmax()]
                rows.append(
                    [
                        arm.label,
                        name,
                        cause,
                        f"{len(group)} of {len(of_kind)}",
                        number(float(worst["value_ms"])),
                        number(float(worst["typical_ms"])),
                        _text(worst["evidence"]),
                    ]
                )
        singles += [
            [arm.label, _KINDS[t["kind"]], t["request_id"], number(t["value_ms"]), t["cause"], _text(t["evidence"])]
            for t in own.nlargest(_SHOWN, "value_ms").to_dict("records")
        ]
    if not rows:
        return ""
    header = ["arm", "of the worst 1 %", "cause", "how many", "worst [ms]", "median [ms]", "the worst one"]
    return section(
        "What caused the slowest",
        "<p>Each of the worst 1 % of first tokens and of gaps is laid over the step log; a cause is named if it "
        "explains at least half of what is unusual. The tails table has every one with its step.</p>",
        text_table(header, rows),
        details(
            f"The {_SHOWN} worst of each arm", text_table(["arm", "what", "request", "ms", "cause", "step"], singles)
        ),
    )


def _by_cause(tails: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    groups = [(str(cause), group) for cause, group in tails.groupby("cause", sort=False)]
    return sorted(groups, key=lambda item: -len(item[1]))


def _text(value: object) -> str:
    return value if isinstance(value, str) else UNKNOWN
