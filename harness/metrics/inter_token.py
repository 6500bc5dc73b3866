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
    later = np.zeros(len(request), dtype=np.bool_)
    later[1:] = request[1:] == request[:-1]
    later &= observations.ok[request] if len(request) else later
    gap_ms = np.zeros(len(request))
    gap_ms[1:] = np.diff(time) / 1e6

    unknown = size == UNKNOWN
    entries = size.clip(1)
    tokens_before = np.cumsum(entries) - entries  # over all requests
    first_chunk = np.searchsorted(request, request)  # of the chunk's own request
    start_index = tokens_before - tokens_before[first_chunk]
    uncertain = np.isin(request, request[unknown])

    k, icl = entries[later], gap_ms[later]
    first_of_chunk = np.cumsum(k) - k
    within = np.arange(int(k.sum()), dtype=np.int64) - np.repeat(first_of_chunk, k)
    icl_ms = np.full(len(within), np.nan)
    icl_ms[first_of_chunk] = icl
    return Gaps(
        request=np.repeat(request[later], k),
        index=np.where(np.repeat(uncertain[later], k), -1, np.repeat(start_index[later], k) + within),
        t_ns=np.repeat(time[later], k),
        itl_ms=np.repeat(np.where(unknown[later], np.nan, icl / k), k),
        icl_ms=icl_ms,
    )
