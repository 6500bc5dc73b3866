"""Bursts of equal requests, one after the other: how long a step takes by the number of requests in it.

Within a burst all requests are as long, so once the last prompt is done every step decodes one token of each.
"""

from __future__ import annotations

from collections.abc import Collection

from workloads.arrivals import Arrival, Burst, check_seconds
from workloads.config import BurstsWorkload
from workloads.content import Content, Turn
from workloads.prompts import Prompt, allowed_ids, draw
from workloads.streams import stream


def bursts_content(cfg: BurstsWorkload, *, vocab_size: int, seed: int, special_ids: Collection[int]) -> Content:
    """The requests of all bursts in order, each with a prompt of its own."""
    ids, rng = allowed_ids(vocab_size, special_ids), stream(seed, "prompt_ids")
    phases = [phase for phase, size in enumerate(cfg.sizes) for _ in range(size)]
    return Content(
        [Prompt(draw(rng, ids, cfg.prompt_tokens)) for _ in phases],
        [cfg.output_tokens] * len(phases),
        stream(seed, "arrivals"),
        turns=[Turn(k, think_s=cfg.pause_s if phase else 0.0, phase=phase) for k, phase in enumerate(phases)],
    )


def check_bursts(cfg: BurstsWorkload, arrival: Arrival) -> None:
    """ValueError for settings that mean nothing, and for arrivals other than all at once."""
    if not isinstance(arrival, Burst):
        raise ValueError("a workload of bursts says itself when requests are sent: set arrival=burst")
    if not cfg.sizes or min(cfg.sizes) < 1:
        raise ValueError(f"workload.sizes is {list(cfg.sizes)}: give the requests of each burst, at least 1")
    for name in ("prompt_tokens", "output_tokens"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"workload.{name} is {getattr(cfg, name)}: give at least 1")
    check_seconds(cfg.pause_s, "workload.pause_s", zero=True)
    gaps = cfg.measured_gaps
    if gaps is not None and not (len(gaps) == 2 and 1 <= gaps[0] <= gaps[1] < cfg.output_tokens):
        raise ValueError(
            f"workload.measured_gaps is {list(gaps)}: give the first and last token index, from 1 to below "
            f"workload.output_tokens={cfg.output_tokens}"
        )
