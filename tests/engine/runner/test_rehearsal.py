"""What a runner does on a GPU before it serves, as far as it can be seen without one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.runner import ModelRunner


def test_a_step_that_does_not_fit_is_said_and_does_not_keep_the_engine_from_starting(
    open_manager: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(start=False, max_batch_tokens=16)
    runner = ModelRunner(manager.model, manager.shape, manager.resolved_config)
    sizes: list[int] = []

    def forward(shape: Any, views: Any, metadata: Any) -> None:
        sizes.append(shape.tokens)
        if shape.tokens > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(runner, "forward", forward)
    caplog.set_level(logging.WARNING)
    runner._rehearse()
    runner.close()
    assert sizes[:6] == [4, 4, 8, 8, 16, 16]
    assert len(sizes) > 6  # and decode rows, where nothing is captured
    assert "a step of 16 tokens does not fit into memory (CUDA out of memory. Tried to allocate 2 GiB)" in caplog.text
