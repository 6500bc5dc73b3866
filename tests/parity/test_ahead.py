"""A-async-04: tokens are those of single prompts, and of a synchronous run, when a step is planned before the tokens of
the one before it are known: through EOS, stop sequences, cancels, preemption with and without offload, forks and
penalties. Captured graphs, which async batching also needs, replay the same inputs; `tests/gpu` has them.
"""

from __future__ import annotations

import random

import pytest

from engine import ContinuousBatchingConfig, RequestStatus
from engine.bench.oracle import Deliveries, Oracle, StepwiseEngine
from engine.bench.tiny_models import tiny_model
from engine.model_shape import ModelShape


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3"])
def test_twenty_mixed_requests(name: str, offload: bool, scheduler: str) -> None:
    model = tiny_model(name)
    oracle, rng = Oracle(model), random.Random(11)
    wishes = [oracle.draw(rng) for _ in range(20)]
    groups = len(ModelShape.of(model).cache_layout(4).groups)
    space = 100.5 * ModelShape.of(model).cache_layout(4).block_bytes / 2**30 if offload else 0.0
    finished: dict[bool, dict[str, list[int]]] = {}
    for ahead in (False, True):
        config = ContinuousBatchingConfig(
            page_size=4, num_blocks=13 * groups, max_batch_tokens=24, max_requests_per_batch=8, safety_margin=0.0,
            scheduler_type=scheduler, cpu_offload_space=space, per_request_processors=True, auto_switch_to_flash=False,
        )  # fmt: skip
        engine = StepwiseEngine(model, config, ahead)
        deliveries = Deliveries(oracle)
        for i, wish in enumerate(wishes):
            deliveries.expect(f"r{i}", wish)
            engine.add(f"r{i}", wish)
        wasted, cancelled = 0, []
        while engine.core.has_work:
            engine.core.step()
            wasted += sum(row.request.is_over for step, *_ in engine.core._launched for row in step.rows)
            on_its_way = [r for r in engine.core.scheduler.running.values() if r.num_in_flight]
            if engine.stats.steps in (6, 14) and len(cancelled) < 2 and on_its_way:
                cancelled.append(on_its_way[0].request_id)
                engine.core.cancel(cancelled[-1])
        for output in engine.outputs:
            deliveries.take(output)
        assert deliveries.violations == []
        assert deliveries.open == []
        assert engine.core.cache.pool.num_available == 13 * groups
        assert engine.stats.preemptions > 0
        assert (engine.stats.restores > 0) is offload
        assert (wasted > 0) is ahead, "a row whose request has ended is computed in vain, a step ahead only"
        assert len(cancelled) == 2 * ahead, "cancelled with a token on its way"
        assert {deliveries.ended[each] for each in cancelled} <= {RequestStatus.CANCELLED}
        finished[ahead] = {
            o.request_id: o.generated_tokens for o in engine.outputs if o.status is RequestStatus.FINISHED
        }
        engine.core.close()
    assert sum(bool(w.stop) or w.eos >= 0 for w in wishes) > 4
    assert len(finished[True]) > 20
    assert finished[True] == {i: t for i, t in finished[False].items() if i in finished[True]}
    oracle.close()
