"""A million token events: the whole path in arrays, checked against plain Python on a sample."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics import compute_tables
from harness.metrics.inter_token import pool_gaps
from harness.metrics.observations import observe
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk


def _plain_gaps(record: RunRecord) -> list[tuple[str, int, float]]:
    gaps = []
    for r in record.requests:
        chunks = [c for c in r.chunks if c.token_ids]
        index = 0
        for before, chunk in zip([None, *chunks], chunks, strict=False):
            for _ in chunk.token_ids:
                if before is not None and r.outcome.ok:
                    gaps.append((r.request_id, index, (chunk.time_ns - before.time_ns) / 1e6 / len(chunk.token_ids)))
                index += 1
    return gaps


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([Outcome.OK_EOS, Outcome.OK_LENGTH, Outcome.CANCELLED, Outcome.ENGINE_ERROR]),
            st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 4)), max_size=6),
        ),
        max_size=5,
    )
)
def test_pooled_gaps_equal_plain_python(shape: list[tuple[Outcome, list[tuple[int, int]]]]) -> None:
    requests = []
    for i, (outcome, deliveries) in enumerate(shape):
        times = np.cumsum([gap for gap, _ in deliveries]).tolist()
        chunks = [TokenChunk(int(t), tuple(range(n))) for t, (_, n) in zip(times, deliveries, strict=True)]
        requests.append(RequestRecord(f"q{i}", 1, 64, t_submit_ns=0, chunks=chunks, outcome=outcome))
    record = RunRecord({"run_id": "r", "engine": "ours"}, requests, t_start_ns=0, t_end_ns=10**10)
    gaps = pool_gaps(observe(record))
    names = [f"q{i}" for i in gaps.request]
    assert list(zip(names, gaps.index, gaps.itl_ms, strict=True)) == _plain_gaps(record)


def test_a_million_token_events() -> None:
    per_request, n = 1000, 1000
    ids = (5,)
    requests = [
        RequestRecord(
            f"q{i}",
            8,
            per_request,
            t_sched_ns=0,
            t_submit_ns=0,
            t_done_ns=per_request * 1_000_000,
            chunks=[TokenChunk((j + 1) * 1_000_000, ids) for j in range(per_request)],
            outcome=Outcome.OK_LENGTH,
        )
        for i in range(n)
    ]
    record = RunRecord({"run_id": "r", "engine": "ours"}, requests, t_start_ns=0, t_end_ns=10**9)
    tables = compute_tables(record)
    assert len(tables["itl"]) == n * (per_request - 1)
    row = tables["runs"].iloc[0]
    assert (row.generated_tokens, row.gen_tok_s, row.itl_p99_ms, row.ttft_p50_ms) == (10**6, 1e6, 1.0, 1.0)
