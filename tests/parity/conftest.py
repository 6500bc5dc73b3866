"""Run prompts through the engine and keep what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Run:
    """Tokens by prompt, counters, step log and the settings that were in force."""

    tokens: list[list[int]]
    counters: dict[str, Any]
    steps: list[Any]
    resolved: Any
    cached: list[int]


@pytest.fixture(scope="session")
def run() -> Callable[..., Run]:
    def run(model: Any, prompts: Sequence[Sequence[int]], n: int, one_by_one: bool = False, **settings: Any) -> Run:
        from transformers import GenerationConfig

        from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus

        config = ContinuousBatchingConfig(auto_switch_to_flash=False, **settings)
        manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=n), config)
        done: dict[str, Any] = {}
        for i, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(i))
            if one_by_one:
                if not manager.is_running():
                    manager.start()
                done.update({o.request_id: o for o in manager})
        if not one_by_one:
            manager.start()
            done = {o.request_id: o for o in manager}
        assert manager._core._check, "the invariants are checked after every step"
        manager.stop()
        assert {o.status for o in done.values()} == {RequestStatus.FINISHED}, done
        outputs = [done[str(i)] for i in range(len(prompts))]
        result = Run(
            [o.generated_tokens for o in outputs],
            manager.counters(),
            manager.step_log,
            manager.resolved_config,
            [o.cached_tokens for o in outputs],
        )
        manager.destroy()
        return result

    return run
