"""Numbers of a workload against values computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import ScheduledRequest, Workload
from workloads.describe import describe, prefix_reuse


def workload(prompts: Sequence[Sequence[int]], due_s: Sequence[float] | None = None, output: int = 3) -> Workload:
    due = due_s or [0.0] * len(prompts)
    return Workload(
        "w",
        tuple(ScheduledRequest(f"r{k}", due[k], tuple(p), output) for k, p in enumerate(prompts)),
        spec={"notes": ["x"]},
    )


def test_numbers_by_hand() -> None:
    """Gaps 1, 3, 2: mean 2, deviation sqrt(2/3)."""
    d = describe(workload([[1] * n for n in (1, 2, 3, 10)], [1.0, 2.0, 5.0, 7.0]))
    assert (d.requests, d.sessions, d.concurrency, d.waiting_requests, d.duration_s) == (4, 4, None, 0, 6.0)
    assert d.rate_request_s == 0.5
    assert d.gap_cv == pytest.approx(math.sqrt(2 / 3) / 2)
    assert (d.prompt_tokens.total, d.prompt_tokens.mean, d.prompt_tokens.p50, d.prompt_tokens.max) == (16, 4.0, 2.5, 10)
    assert d.prompt_tokens.p95 == pytest.approx(3 + 0.85 * 7)  # linear
    assert d.output_tokens.p95 == 3
    assert d.notes == ("x",)
    json.dumps(d.as_dict())


def test_a_burst_has_no_rate() -> None:
    d = describe(workload([[1], [2]]))
    assert d.rate_request_s is None is d.gap_cv
    d = describe(workload([[1], [2]], [0.0, 4.0]))
    assert (d.rate_request_s, d.gap_cv) == (0.25, None)  # one gap has no deviation
    with pytest.raises(ValueError, match="no request"):
        describe(Workload("w", ()))


def test_reuse_in_whole_blocks_and_never_the_last_token() -> None:
    twelve = list(range(12))
    # B21's lengths, page 4: of 12 known ids 8 are served, of 13 12, of 11 8
    for n, served in ((12, 8), (13, 12), (11, 8), (4, 0), (5, 4)):
        prompt = [*twelve, 99][:n]
        assert prefix_reuse(workload([prompt, prompt]), 4) == served / (2 * n)
    # B12: 48 shared of 64, page 16, eight prompts
    shared = [[*range(48), *([100 + k] * 16)] for k in range(8)]
    assert prefix_reuse(workload(shared), 16) == pytest.approx(7 * 48 / 512)
    # the same block after another one is another block
    assert prefix_reuse(workload([[1, 2, 3, 4, 9], [5, 6, 1, 2, 3, 4, 9]]), 2) == 0
    with pytest.raises(ValueError, match="block size is 0"):
        prefix_reuse(workload([[1]]), 0)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8),
    size=st.integers(1, 5),
)
@settings(deadline=None)
def test_reuse_is_what_comparing_every_prefix_says(prompts: list[list[int]], size: int) -> None:
    served = 0
    for k, prompt in enumerate(prompts):
        whole = (n for n in range(size, len(prompt), size) if any(p[:n] == prompt[:n] for p in prompts[:k]))
        served += max(whole, default=0)
    assert prefix_reuse(workload(prompts), size) == pytest.approx(served / sum(map(len, prompts)))
