"""Prompts that a run would share with an earlier one of its process: the engine's prefix cache would know them.

The measured process refuses them once it has built its workloads; :mod:`harness.companions` looks before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from workloads.workload import Workload

_SAME_BEGIN = 16
"""Two prompts with so many equal first ids, or two shorter ones that are equal, are taken for the same."""


def refuse_shared_prompts(workloads: Sequence[Workload]) -> None:
    """Check workloads that one process measures in this order.

    Raises:
        ValueError: a prompt of one begins like one of an earlier one.
    """
    seen: dict[tuple[int, ...], str] = {}
    for workload in workloads:
        begins = {r.prompt_ids[:_SAME_BEGIN] for r in workload.requests}
        if again := next((b for b in begins if b in seen), None):
            raise ValueError(
                f"a prompt of the workload {workload.name!r} begins like one of {seen[again]!r}, measured before it in "
                "the same process, so a prefix cache would know it: give one of them another workload.seed, or set "
                "measure.runs_per_process=1 and measure.share_process=false"
            )
        seen |= dict.fromkeys(begins, workload.name)
