"""A step's outputs are what they were when the step was collected, whenever they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.requests import GenerationOutput, Request, RequestStatus
from engine.scheduler import Collected, StepRows
from engine.step_outputs import StepOutputs

Make = Callable[..., Request]


def facts(output: GenerationOutput) -> dict[str, Any]:
    """All that an output says, but for what it reads of the request as that is when asked."""
    properties = [name for name, value in vars(GenerationOutput).items() if isinstance(value, property)]
    names = {*properties, *GenerationOutput.__slots__} - {"_request", "_length", "prefill_steps", "kv_blocks"}
    return {name: getattr(output, name) for name in names}


def test_read_late_they_are_what_they_were(make_request: Make) -> None:
    goes_on, ends = make_request([1, 2, 3], 9), make_request([4], 1)
    for request in (goes_on, ends):
        request.status = RequestStatus.DECODING
        request.append(7, 1.0)
    assert ends.comes_to_its_end()
    outputs = StepOutputs(
        [goes_on, ends], np.array([4, 2]), np.array([0, 0]), np.array([0, 0]), np.array([False, True])
    )
    ends.end(RequestStatus.FINISHED)
    then = [facts(GenerationOutput(request)) for request in (goes_on, ends)]
    goes_on.append(8, 2.0)
    goes_on.preemptions, goes_on.recomputed_tokens = 1, 5
    goes_on.end(RequestStatus.CANCELLED, "because")
    assert len(outputs) == 2
    assert [facts(output) for output in outputs] == then == [facts(output) for output in outputs]
    assert (then[0]["status"], then[0]["generated_tokens"]) == (RequestStatus.DECODING, [7])


@pytest.mark.parametrize("depth", [0, 1])
def test_all_through_preemptions_and_ends(
    depth: int, driver: Callable[..., Any], make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's outputs are made at once and once more after everything is over."""
    d = driver(num_blocks=6, max_batch_tokens=16, depth=depth, share=False)
    streams = [make_request([i] * 7, 8, streaming=True) for i in range(4)]
    silent = make_request([9] * 3, 4)
    made: list[tuple[StepOutputs, list[dict[str, Any]]]] = []
    collect = d.scheduler.collect

    def watched(rows: StepRows, *arguments: Any, **options: Any) -> Collected:
        collected: Collected = collect(rows, *arguments, **options)
        running = [r for r in rows.requests if r.slots is not None and (r.streaming or r in collected.ended)]
        assert len(collected.heard) == len(running)
        then = [facts(GenerationOutput(r)) for r in running if r not in collected.ended]
        made.append((collected.heard, then))
        return collected

    monkeypatch.setattr(d.scheduler, "collect", watched)
    for request in (*streams, silent):
        d.add(request)
    d.run()
    assert d.scheduler.preemptions > 0
    assert any(fact["recomputed_tokens"] for _, then in made for fact in then), "and some came back"
    for outputs, then in made:
        assert [facts(output) for output in outputs if not output.is_finished()] == then
    ends = [output.request_id for outputs, _ in made for output in outputs if output.is_finished()]
    assert len(ends) == len(set(ends))
    assert silent.request_id in ends
