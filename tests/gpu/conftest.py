"""Tiny models on a GPU, runs of the engine on them, and a cache folder of the session's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Linear layers are tuned neither from nor into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@dataclass(frozen=True)
class Run:
    """Tokens by prompt, counters, step log and the settings that were in force."""

    tokens: list[list[int]]
    counters: dict[str, Any]
    steps: list[Any]
    resolved: Any

    @property
    def overlapped(self) -> bool:
        """Whether a step was planned before the tokens of the one before it were on the host."""
        return any(after.t_ns < before.t_ns + before.step_ms * 1e6 for before, after in pairwise(self.steps))


@pytest.fixture(scope="session")
def gpu_model() -> Callable[[str], Any]:
    """fp32 models of `engine.bench.tiny_models` with heads of 64, each built once (references are kept by model)."""

    @cache
    def build(name: str) -> Any:
        from engine.bench.tiny_models import tiny_model

        return tiny_model(name, head_dim=64).to("cuda")

    return build


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    def run(model: Any, backend: str, prompts: Sequence[Sequence[int]], n: int, **settings: Any) -> Run:
        """All prompts at once, ``n`` new tokens each. Eight places and 64 tokens a step: few graphs to capture."""
        from transformers import GenerationConfig

        from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus

        base = {"page_size": 16, "num_blocks": 200, "max_batch_tokens": 64, "max_requests_per_batch": 8}
        config = ContinuousBatchingConfig(**{**base, **settings}, auto_switch_to_flash=False)
        # transformers does not know the engine's own kernels, so a model is not loaded with their name.
        monkeypatch.setattr(model.config, "_attn_implementation", backend)
        manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=n), config)
        monkeypatch.undo()
        try:
            for i, prompt in enumerate(prompts):
                manager.add_request(list(prompt), request_id=str(i))
            manager.start()
            done = {o.request_id: o for o in manager}
            assert {o.status for o in done.values()} == {RequestStatus.FINISHED}, done
            tokens = [done[str(i)].generated_tokens for i in range(len(prompts))]
            result = Run(tokens, manager.counters(), manager.step_log, manager.resolved_config)
        finally:
            manager.destroy()
        assert result.resolved.attention_backend == backend
        return result

    return run
