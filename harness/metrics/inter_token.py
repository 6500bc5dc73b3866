"""Inter-token gaps, pooled over the ok requests of one run.

Timeline of a request whose deliveries hold 1, 1 and 3 tokens::

    time    10        13                  22
    tokens  a         b                   c d e
    icl               3                   9
    itl               3                   3 3 3

Tokens of the first delivery have no delivery before them, so they have no gap: a speculative first delivery of k
tokens does not add k - 1 zeros to the pool. A delivery of an unknown number of tokens has one entry, with its ``icl``
and without ``itl``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.deliveries import UNKNOWN
from harness.metrics.observations import FloatArray, IntArray, Observations


@dataclass(frozen=True)
class Gaps:
    """One entry an observed gap, in the order of requests and tokens.

    Attributes:
        request: [gaps] index of the request.
        index: [gaps] index of the later token within its request; -1 where deliveries of unknown size leave it open.
        t_ns: [gaps] when the later token became usable, ns after the start of the run.
        itl_ms: [gaps] the delivery's gap divided by its number of tokens, NaN where that is unknown.
        icl_ms: [gaps] the delivery's whole gap on its first token, NaN on the others.
    """

    request: IntArray
    index: IntArray
    t_ns: IntArray
    itl_ms: FloatArray
    icl_ms: FloatArray


def pool_gaps(observations: Observations) -> Gaps:
    """Gaps of all ok requests of a run."""
    request, time, size = observations.chunk_request, observations.chunk_time, observations.chunk_size
    at = _later_deliveries(observations)
    icl = (time[at] - time[at - 1]) / 1e6
    index, k = _first_index(request, size)[at], size[at]
    unknown = k == UNKNOWN
    itl = np.where(unknown, np.nan, icl / k)
    if bool((k == 1).all()):  # nearly always: an entry a delivery
        return Gaps(request=request[at], index=index, t_ns=time[at], itl_ms=itl, icl_ms=icl)
    k = k.clip(1)
    first_of_chunk = np.cumsum(k) - k
    within = np.arange(int(k.sum()), dtype=np.int64) - np.repeat(first_of_chunk, k)
    icl_ms = np.full(len(within), np.nan)
    icl_ms[first_of_chunk] = icl
    return Gaps(
        request=np.repeat(request[at], k),
        index=np.where(np.repeat(index == UNKNOWN, k), -1, np.repeat(index, k) + within),
        t_ns=np.repeat(time[at], k),
        itl_ms=np.repeat(itl, k),
        icl_ms=icl_ms,
    )


def _later_deliveries(o: Observations) -> IntArray:
    """Indices of the deliveries of ok requests that have one of the same request before them."""
    later = o.chunk_request[1:] == o.chunk_request[:-1]
    return np.flatnonzero(later & o.ok[o.chunk_request[1:]]) + 1


def _first_index(request: IntArray, size: IntArray) -> IntArray:
    """[deliveries] index of each one's first token within its request; UNKNOWN if a size of the request is."""
    before = np.cumsum(size.clip(1)) - size.clip(1)  # over all requests
    before -= before[np.searchsorted(request, request)]  # since the request's own first delivery
    before[np.isin(request, request[size == UNKNOWN])] = UNKNOWN
    return before
