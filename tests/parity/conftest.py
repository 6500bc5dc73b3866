"""Run prompts through the engine and keep what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    def run(
        model: Any,
        prompts: Sequence[Sequence[int]],
        n: int,
        one_by_one: bool = False,
        leading: int = 0,
        ahead: bool = False,
        **settings: Any,
    ) -> Run:
        """``leading`` prompts (all if ``one_by_one``) one after another, then the others at once; with ``ahead`` a step
        is launched before the one before it is collected, as async batching does."""
        from transformers import GenerationConfig

        from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus

        config = ContinuousBatchingConfig(auto_switch_to_flash=False, **settings)
        manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=n), config)
        manager.warmup()
        assert manager._core is not None
        manager._core._depth = int(ahead)
        done: dict[str, Any] = {}
        alone = len(prompts) if one_by_one else leading
        for i, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(i))
            if i < alone:
                if not manager.is_running():
                    manager.start()
                done.update({o.request_id: o for o in manager})
        if not manager.is_running():
            manager.start()
        done.update({o.request_id: o for o in manager})
        assert manager._core._check, "the invariants are checked after every step"
        assert not manager._core._launched, "nothing is left on its way"
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


NEW = 10


@pytest.fixture
def check_case(
    run: Callable[..., Run], reference: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """Serve prompts under one combination of settings: tokens are those of ``generate``, and each setting had its
    effect.

    The prompts have a page and a bit in common, and each comes to a page's end while it decodes.
    """

    def check(
        model: Any,
        backend: str,
        page_size: int,
        chunks: bool,
        scheduler: str,
        sharing: bool,
        memory: str,
        ahead: bool,
        fused: bool | None,
        requests: int = 5,
    ) -> Run:
        from engine.model_shape import ModelShape

        common = [(5 * i + i * i) % 97 for i in range(page_size + 3)]
        lengths = [max(2 * page_size - 1 - i, page_size + 4) for i in range(requests)]
        prompts = [[*common, *((7 * i + 3 * j) % 97 for j in range(n - len(common)))] for i, n in enumerate(lengths)]
        budget = page_size // 3 + 4 if chunks else sum(lengths)
        layout = ModelShape.of(model).cache_layout(page_size)
        alone = layout.blocks_needed(max(lengths) + NEW, budget)
        tight = alone + layout.blocks_needed(max(lengths), 1) - 1
        expected = [reference(model, prompt, NEW) for prompt in prompts]
        # transformers does not know the engine's own kernels, so a model is not loaded with their name.
        monkeypatch.setattr(model.config, "_attn_implementation", backend)
        result = run(
            model, prompts, NEW, leading=1, ahead=ahead, page_size=page_size, max_batch_tokens=budget,
            num_blocks=6 * alone if memory == "ample" else tight, scheduler_type=scheduler, safety_margin=0.0,
            allow_block_sharing=sharing, use_fused_forward=fused,
            cpu_offload_space=100.5 * layout.block_bytes / 2**30 if memory == "offload" else 0.0,
        )  # fmt: skip
        assert result.tokens == expected
        counters, steps, resolved = result.counters, result.steps, result.resolved
        assert (resolved.attention_backend, resolved.page_size) == (backend, page_size)
        assert resolved.scheduler_type == scheduler
        fusible = ModelShape.of(model).not_fusible is None
        assert resolved.use_fused_forward is (fusible and fused is None)
        assert (sum(step.prefill_rows for step in steps) > len(prompts)) or not chunks, "prompts came in chunks"
        assert all(step.decode_rows + step.prefill_tokens <= budget for step in steps)
        assert max(step.decode_rows for step in steps) > 1, "requests decode together"
        shareable = all(group.window is None for group in layout.groups)
        assert (counters["prefix_hit_tokens"] >= page_size) is (sharing and shareable)
        assert (counters["preemptions"] > 0) is (memory != "ample")
        assert (counters["restores"] > 0) is (memory == "offload")
        if memory == "recompute" and not (sharing and shareable):  # else the prefix cache may still hold all of it
            assert counters["recomputed_tokens"] > 0
        early = [after.t_ns < before.t_ns + before.step_ms * 1e6 for before, after in pairwise(steps)]
        assert any(early) is ahead, "a step is planned before the one before it is collected, or never"
        return result

    return check
