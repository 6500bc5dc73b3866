"""What the arms of a comparison of engines are, and what a single run was of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.report.arms import Arm, by_facet, names_engine
from harness.report.config_diff import (
    DERIVED,
    ENGINE_ONLY,
    REPEATS_DIFFER,
    Settings,
    config_differences,
    settings_by_run,
)
from harness.report.page import section, text_table
from harness.report.quantity import UNKNOWN
from harness.report.read import Results, decoded

_KINDS = {
    "ours": "this project's continuous batching",
    "static": "padded static batching: waves of model.generate",
    "transformers": "continuous batching of transformers",
    "vllm": "vLLM, in a process of its own",
    "openai_http": "a server with OpenAI's API, over HTTP",
    "null": "no engine: tokens come on a known schedule",
}
_MOST = 8
"""Settings that an arm lists here; the section Settings has all."""


def arms_section(results: Results, arms: Sequence[Arm]) -> str:
    """Each arm's engine, the settings it was given and those that tell it from the others; "" where the arms are values
    of a setting, which their names say."""
    if not all(names_engine(a.variable) for a in arms) and len(arms) > 1:
        return ""
    settings = settings_by_run(results)
    differing = _differing(results, arms, settings)
    rows = []
    for series, arm in {a.series: a for a in reversed(arms) if not a.is_replica}.items():
        told = differing.get(series, {}) | _given(arm, settings)
        is_known = any(r in settings for r in arm.runs["run_id"])
        rows.append([series, _KINDS.get(arm.engine, arm.engine), _listed(told) if is_known else UNKNOWN])
    what = "settings given, and those that differ" if len(rows) > 1 else "settings given"
    return section("Arms", text_table(["arm", "what it is", what], rows[::-1]))


def _differing(results: Results, arms: Sequence[Arm], settings: Settings) -> dict[str, dict[str, str]]:
    """By series and field the settings that differ: between all arms those that every engine has, and between the arms
    of one engine all of them. What an engine derived is left to the section Settings."""
    found: dict[str, dict[str, str]] = {}
    for members in by_facet([a for a in arms if not a.is_replica]).values():
        differing = [d for d in config_differences(results, members, settings) if d.kind != ENGINE_ONLY]
        for engine in dict.fromkeys(a.engine for a in members):
            differing += config_differences(results, [a for a in members if a.engine == engine], settings)
        for difference in differing:
            if difference.kind == DERIVED:
                continue
            for series, value in difference.values.items():
                if value is not None and REPEATS_DIFFER not in value:  # else an outcome, which no arm was given
                    found.setdefault(series, {}).setdefault(difference.field, value)
    return found


def _given(arm: Arm, settings: Settings) -> dict[str, str]:
    """What was set by hand of the arm's engine."""
    own: Mapping[str, tuple[str, str]] = next((settings[r] for r in arm.runs["run_id"] if r in settings), {})
    return {field: value for field, (value, source) in own.items() if source == "user"}


def _listed(values: Mapping[str, str]) -> str:
    told = [f"{field} = {_plain(value)}" for field, value in values.items()]
    more = f" and {len(told) - _MOST} more, see Settings" if len(told) > _MOST else ""
    return ", ".join(told[:_MOST]) + more or "its defaults"


def _plain(value: str) -> str:
    text = decoded(value)
    return text if isinstance(text, str) else value
