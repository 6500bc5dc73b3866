"""The counters of running requests that a request itself reads and writes, as arrays by slot."""

from __future__ import annotations

import numpy as np


class SlotCounters:
    """Counters by slot.

    Args:
        max_requests: slots.

    Attributes:
        num_computed, num_in_flight: [slots] int64, as in `engine.requests.Request`.
        tenancy: [slots] int64, number of the slot's present owner, different for each stay of each request; 0 in an
            empty slot.
    """

    def __init__(self, max_requests: int) -> None:
        self.num_computed = np.zeros(max_requests, dtype=np.int64)
        self.num_in_flight = np.zeros(max_requests, dtype=np.int64)
        self.tenancy = np.zeros(max_requests, dtype=np.int64)
