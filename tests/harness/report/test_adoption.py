"""M-adopt-01: five checks, each yes, no or unknown, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.record import Outcome, RunRecord
from harness.report.adoption import Check, adopt, adoption_checks, adoption_section, idle_share
from harness.report.arms import baseline_of, group_arms
from harness.report.html import write_report
from harness.report.read import Results, read_results
from harness.report.verdicts import compare_arms
from harness.slo import Slo


@pytest.fixture
def measured(
    tmp_path: Path, record_maker: Callable[..., RunRecord], writer: Callable[..., Path]
) -> Callable[..., Results]:
    """Six repeats of two settings on a GPU; ``change(record, is_new)`` makes them what the test is about."""

    def make(change: Callable[[RunRecord, bool], None] | None = None) -> Results:
        records = []
        for repeat in range(6):
            for arm, speed in (("256", 1.0), ("512", 1.5)):
                identity: dict[str, Any] = {
                    "workload": "w",
                    "arm": arm,
                    "repeat": repeat,
                    "variable": "engine.max_batch_tokens",
                }
                record = record_maker(f"{arm}-{repeat}", speed=speed * (1 + 0.01 * repeat), **identity)
                record.slo = Slo(ttft_p95_ms=100_000)
                record.identity["gate"] = "equal"
                record.environment["gpu.memory_bytes"] = 100 * 2**30
                record.telemetry = [
                    {"t_s": 0.1, "gpu_used_bytes": 60 * 2**30, "gpu_util_percent": 90.0 if arm == "512" else 70.0}
                ]
                record.memory["peak_gpu_used_bytes"] = 60 * 2**30
                if change is not None:
                    change(record, arm == "512")
                records.append(record)
        return read_results(writer(tmp_path, records))

    return make


def checks_of(results: Results) -> list[Check]:
    arms = group_arms(results)
    baseline = baseline_of(arms)
    new = next(a for a in arms if a.value == "512")
    assert baseline is not None
    return adoption_checks(results, new, baseline, compare_arms(results, arms))


def test_all_five_hold(measured: Callable[..., Results]) -> None:
    results = measured()
    checks = checks_of(results)
    assert [c.holds for c in checks] == [True] * 5, checks
    assert adopt(checks) == "adopt"
    assert "idle 10% of the time, baseline 30%" in checks[1].evidence
    assert "adopt" in adoption_section(results, group_arms(results), compare_arms(results, group_arms(results)))
    assert "Before adopting" in write_report(results.directory).read_text()


def wrong_tokens(record: RunRecord, new: bool) -> None:
    if new:
        record.identity["gate"] = "failed"


def more_idle(record: RunRecord, new: bool) -> None:
    if new:
        record.telemetry = [{"t_s": 0.1, "gpu_util_percent": 40.0}]


def tight_slo(record: RunRecord, new: bool) -> None:
    record.slo = Slo(ttft_p95_ms=1.0)


def out_of_memory(record: RunRecord, new: bool) -> None:
    if new:
        record.requests[0].outcome, record.requests[0].chunks = Outcome.OOM_DECODE, []


@pytest.mark.parametrize(
    ("change", "name"),
    [(wrong_tokens, "correctness"), (more_idle, "GPU idle"), (tight_slo, "SLO"), (out_of_memory, "memory")],
)
def test_one_that_does_not_hold_is_enough(
    measured: Callable[..., Results], change: Callable[[RunRecord, bool], None], name: str
) -> None:
    checks = checks_of(measured(change))
    assert [c.name for c in checks if c.holds is False] == [name]
    assert adopt(checks) == f"do not adopt: {name}"


def test_what_was_not_measured_leaves_it_open(measured: Callable[..., Results]) -> None:
    def forget(record: RunRecord, new: bool) -> None:
        record.telemetry, record.slo = [], None
        del record.memory["peak_gpu_used_bytes"], record.identity["gate"]

    checks = checks_of(measured(forget))
    assert [c.name for c in checks if c.holds is None] == ["correctness", "GPU idle", "SLO", "memory"]
    assert adopt(checks) == "not decided: correctness, GPU idle, SLO, memory"


def test_device_times_of_steps_tell_idle_time_before_samples_do(measured: Callable[..., Results]) -> None:
    def timed(record: RunRecord, new: bool) -> None:
        wall_ms = ((record.t_end_ns or 0) - (record.t_start_ns or 0)) / 1e6
        record.steps = [{**step, "gpu_ms": 0.8 * wall_ms / len(record.steps)} for step in record.steps]

    results = measured(timed)
    assert idle_share(results, group_arms(results)[0]) == pytest.approx(0.2, abs=1e-6)
