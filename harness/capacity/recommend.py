"""Settings for the planned load, each with the reason for its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from harness.capacity.search import Capacity, NothingMeets
from harness.simulate import EngineSetup

WORTH = 0.05
"""A change of a setting is taken if it raises the capacity by this share: more than bisection and model can blur."""


@dataclass(frozen=True)
class Setting:
    """A value of ContinuousBatchingConfig, why it is recommended, and whether others were tried."""

    name: str
    value: Any
    reason: str
    tried: bool = False


def candidates(setup: EngineSetup) -> list[dict[str, Any]]:
    """Single changes that are tried, one variable each."""
    tokens = setup.max_batch_tokens
    sizes = [n for n in (tokens // 8, tokens // 4, tokens // 2, tokens * 2) if 256 <= n <= 16384]
    other = "prefill_first" if setup.scheduler_type == "fifo" else "fifo"
    return [*({"max_batch_tokens": n} for n in sizes), {"scheduler_type": other}]


def improve(
    setup: EngineSetup,
    base: float,
    meets: Callable[[EngineSetup, str, float], bool],
    capacity_of: Callable[[EngineSetup, str], Capacity],
) -> tuple[EngineSetup, dict[str, str]]:
    """Try each candidate alone; take the best of each variable that is worth it.

    Args:
        base: capacity of ``setup`` under the same seed, requests/s.
        meets: whether another setup, shown in words, carries a rate, with the same requests.
        capacity_of: finds the capacity of another setup; asked only of one that carries a rate worth the change.

    Returns:
        The setup to use, and by variable what trying it showed.
    """
    best: dict[str, tuple[float, Any]] = {}
    seen: dict[str, list[str]] = {}
    for change in candidates(setup):
        ((name, value),) = change.items()
        if not meets(setup.changed(**change), f"{name}={value}", base * (1 + WORTH)):
            seen.setdefault(name, []).append(f"{value}: not {base * (1 + WORTH):.3g}/s")
            continue
        try:
            rate = capacity_of(setup.changed(**change), f"{name}={value}").rate
        except NothingMeets:
            seen.setdefault(name, []).append(f"{value}: no rate keeps the SLO")
            continue
        seen.setdefault(name, []).append(f"{value}: {rate:.3g}/s")
        if rate > base * (1 + WORTH) and rate > best.get(name, (0.0, None))[0]:
            best[name] = (rate, value)
    changes = {name: value for name, (_, value) in best.items()}
    reasons = {
        name: f"capacity {best[name][0]:.3g}/s instead of {base:.3g}/s ({'; '.join(tried)})"
        if name in best
        else f"no other value is {WORTH:.0%} better than its {base:.3g}/s ({'; '.join(tried)})"
        for name, tried in seen.items()
    }
    return (setup.changed(**changes) if changes else setup), reasons


def recommended(
    setup: EngineSetup,
    sources: Mapping[str, str],
    tried: Mapping[str, str],
    peak_running: int,
    longest: int,
) -> list[Setting]:
    """The whole configuration.

    Args:
        sources: by setting, where the measured run's value came from.
        tried: by variable, what simulations of other values showed.
        peak_running: most requests at once at the capacity.
        longest: positions of the longest request.
    """

    def because(name: str, otherwise: str) -> str:
        return tried.get(name) or f"{otherwise} (measured with it; {sources.get(name, 'its source was not recorded')})"

    page = setup.layout.page_size
    pages = -(-longest // page) + 1
    places = (
        f"at the capacity at most {peak_running} run at once: {setup.max_requests_per_batch} places do not bind"
        if peak_running < setup.max_requests_per_batch
        else f"all {peak_running} places are taken at the capacity; more would need memory for their logits"
    )
    return [
        Setting("page_size", page, because("page_size", "not varied")),
        Setting("num_blocks", setup.num_blocks, because("num_blocks", "what the device's memory holds")),
        Setting(
            "max_batch_tokens",
            setup.max_batch_tokens,
            because("max_batch_tokens", "not varied"),
            tried="max_batch_tokens" in tried,
        ),
        Setting("max_requests_per_batch", setup.max_requests_per_batch, places),
        Setting(
            "max_blocks_per_request",
            max(pages, 1),
            f"the longest request has {longest} positions: {pages - 1} pages and one",
        ),
        Setting("scheduler_type", setup.scheduler_type, because("scheduler_type", "not varied")),
        Setting("safety_margin", setup.safety_margin, because("safety_margin", "the scheduler's own")),
        Setting(
            "allow_block_sharing",
            setup.share_prefixes,
            because("allow_block_sharing", "costs nothing where nothing is shared"),
        ),
        Setting("use_cuda_graph", list(setup.graphs), because("use_cuda_graph", "as the device allows")),
        Setting("use_async_batching", setup.overlapped, because("use_async_batching", "follows the graphs")),
    ]


def as_yaml(settings: Sequence[Setting]) -> str:
    """The configuration as YAML for ``engine=ours``, the reason behind each value."""
    lines = ["# ContinuousBatchingConfig; behind each value why."]
    for s in settings:
        value = yaml.safe_dump(s.value, default_flow_style=True, width=1000).replace("\n...", "").strip()
        lines.append(f"{s.name}: {value}  # {s.reason}")
    return "\n".join(lines) + "\n"
