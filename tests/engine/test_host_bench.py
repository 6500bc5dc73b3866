"""The host benchmark drives the real scheduler, packing and collecting."""

from __future__ import annotations

import torch

from engine.bench.host import measure, open_core


def test_a_steady_state_of_decode_steps() -> None:
    with torch.inference_mode():
        core = open_core(running=4, waiting=3, context=32)
        before = core.stats.steps
        assert measure(core, 5) > 0
    assert core.stats.steps == before + 5
    last = core.stats.log[-1]
    assert (last.kind, last.decode_rows, last.running, last.waiting) == ("decode", 4, 4, 3)
