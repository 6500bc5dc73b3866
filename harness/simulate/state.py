"""What a simulated engine is at a moment of its clock: requests, steps under way, what it has logged.

:mod:`harness.simulate.replica` lets it run turn by turn, :mod:`harness.simulate.leap` over many equal turns at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.requests import Request
from engine.scheduler import StepRows
from harness.record import Outcome
from harness.simulate.setup import EngineSetup, step_shape
from harness.simulate.step_log import StepLog
from harness.simulate.step_time import Cost, Kind, Spread, StepTimeModel, Work


@dataclass(slots=True)
class Served:
    """What became of a request; times in s on the virtual clock: sent, and ended as its client sees it."""

    number: int
    request: Request
    sent_s: float
    admitted_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome = Outcome.UNFINISHED
    error: str | None = None


@dataclass(slots=True)
class Launched:
    """A step that was launched and not collected yet."""

    rows: StepRows
    numbers: np.ndarray
    started_s: float
    ready_s: float
    log: list[float]


class EngineState:
    """A simulated engine between two turns.

    Args:
        setup: its settings.
        model: how long its steps take.
        rng: draws what the model does not explain; None = every step takes its expected time.

    Attributes:
        now_s: its clock.
        free_s: when the device has nothing left to do.
        inbox: requests that were sent and not taken in yet.
        launched: steps that were launched and not collected yet, ``depth`` of them between two turns.
        served, by_id: by number, what became of each request sent to it; by id, those that have not ended.
        ended: numbers of the requests that ended, in order.
        token_numbers, token_times: of every token, in parts, its request and when the client had it.
    """

    def __init__(self, setup: EngineSetup, model: StepTimeModel, rng: np.random.Generator | None = None) -> None:
        self.setup, self.model, self.scheduler = setup, model, setup.scheduler()
        self.now_s = self.free_s = 0.0
        self.log = StepLog()
        self.served: dict[int, Served] = {}
        self.by_id: dict[str, Served] = {}
        self.ended: list[int] = []
        self.launched: deque[Launched] = deque()
        self.depth = 1 if setup.overlapped else 0
        self.inbox: deque[Served] = deque()
        self.buckets = setup.buckets()
        self.spread = Spread(rng)
        costs = [*model.host.values(), *model.device.values(), model.between]
        self.means = {cost: cost.mean_ratio for cost in costs}
        self.largest = model.largest()
        self.token_numbers: list[np.ndarray] = []
        self.token_times: list[np.ndarray] = []
        self._handed_s = -np.inf  # when clients had the last tokens

    def ms(self, cost: Cost, work: Work) -> float:
        """Time of a part of a step, spread included."""
        return cost.fitted_ms(work) * self.spread.draw(cost, self.means[cost])

    def beyond(self, kind: Kind, work: Work) -> bool:
        """Whether a step is larger than any of its kind that was measured."""
        tokens, rows, keys = self.largest[kind]
        return work.tokens > tokens or work.rows > rows or work.keys > keys

    def numbers_of(self, requests: Sequence[Request]) -> np.ndarray:
        """[requests] the numbers they were sent with."""
        return np.array([self.by_id[r.request_id].number for r in requests], dtype=np.int64)

    def kind_of(self, rows: StepRows) -> tuple[Kind, int, int, int]:
        """Kind of a step, query tokens it is padded by, pages of its block tables, and decode rows that it has room for
        beside prompt tokens (0 for any other than a replayed step with those)."""
        shape = step_shape(rows, len(self.setup.layout.groups))
        bucket = None if self.buckets is None else self.buckets.find(shape)
        prefill = rows.num_decode < len(rows)
        if bucket is None:
            return Kind(prefill, False), 0, shape.width, 0
        return Kind(prefill, True), bucket.tokens - shape.tokens, bucket.width, bucket.decodes if prefill else 0

    def hand_over(self, numbers: np.ndarray, collected_s: np.ndarray) -> np.ndarray:
        """The rows of equal steps get a token in each of them: [steps] when clients have those, no step's before those
        of the step before it."""
        got = np.maximum.accumulate(collected_s + self.model.late_s(len(numbers)))
        got = np.maximum(got, self._handed_s)
        self._handed_s = float(got[-1])
        self.token_numbers.append(np.tile(numbers, len(got)))
        self.token_times.append(np.repeat(got, len(numbers)))
        return got
