"""Up to which size steps with prefills are worth replaying.

A step that is launched kernel by kernel takes the host some time whatever its size, while the device takes time for
each token. Once the device takes longer the launches are hidden behind it, and the step is best run as it is: replayed,
it would be padded. Which of the two holds is measured on the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HIDDEN = 2.0
"""The host's launches count as hidden if the device takes this much longer. They are measured on an idle host: in
service it sends, delivers and schedules beside them, and steps that the device needed 1.1 to 1.7 times as long for were
still up to a tenth slower launched than replayed (docs/performance.md)."""


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """A step that was launched on an idle device.

    Attributes:
        tokens: its query tokens.
        host_s: until everything was launched, in seconds.
        done_s: until the device was done.
    """

    tokens: int
    host_s: float
    done_s: float

    @property
    def hidden(self) -> bool:
        """Whether the device was still busy long after the host was done."""
        return self.done_s > HIDDEN * self.host_s


@dataclass(frozen=True, slots=True)
class ReplayLimit:
    """Largest step with prefills that is replayed.

    Attributes:
        tokens: its query tokens.
        reason: what was measured.
    """

    tokens: int
    reason: str


def replay_limit(sizes: Sequence[int], always: int, measure: Callable[[int], LaunchTime | None]) -> ReplayLimit:
    """Find the largest of ``sizes`` whose launches the device does not hide, measuring as few as possible.

    Args:
        sizes: query tokens, ascending, at least one.
        always: sizes up to this one are replayed in any case.
        measure: launches a step; None = it does not fit into memory.
    """
    known = [size for size in sizes if size <= always]
    open_sizes = sizes[len(known) :]
    low, high = 0, len(open_sizes)
    exposed: LaunchTime | None = None
    beyond: tuple[int, LaunchTime | None] | None = None
    while low < high:
        # The largest first: often it alone decides. Then halves.
        middle = high - 1 if high == len(open_sizes) else (low + high) // 2
        time = measure(open_sizes[middle])
        if time is not None and not time.hidden:
            low, exposed = middle + 1, time
        else:
            high, beyond = middle, (open_sizes[middle], time)
    limit = open_sizes[low - 1] if low else known[-1] if known else 0
    reasons = [] if exposed is None else [_said(exposed)]
    if beyond is not None:
        size, time = beyond
        reasons.append(f"{size} tokens do not fit into memory" if time is None else _said(time))
    return ReplayLimit(limit, "derived: " + ("; ".join(reasons) or "the largest step"))


def _said(time: LaunchTime) -> str:
    return f"{time.tokens} tokens are launched in {1e3 * time.host_s:.1f} ms and done after {1e3 * time.done_s:.1f} ms"
