"""Random requests through a running engine, every token checked: ``python -m engine.bench.soak --requests 2000``.

Requests are added, streamed, forked, cancelled, preempted by a pool that is far too small, and now and then cut off by
a hard stop or paused to change the model's weights. Each must end in one terminal output with the tokens it has when it
is served alone, and at the end every block must be free again. The engine checks its invariants after every step
(ENGINE_CHECK=1). Prints one line; exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.bench.oracle import Deliveries, Oracle, sampling_defaults, what_a_change_finds, with_other_weights
from engine.bench.tiny_models import TINY_MODELS, tiny_model
from engine.config import ContinuousBatchingConfig
from engine.loop import HARD_STOP
from engine.manager import ContinuousBatchingManager

_SILENCE_S = 60.0
"""An engine that delivers nothing for so long while requests are open is stuck."""


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What a soak found.

    Attributes:
        violations: in words; empty if all is well.
        ended: sequences (requests and their children) by terminal status.
        counters: the engine's.
    """

    model: str
    requests: int
    violations: tuple[str, ...]
    ended: dict[str, int]
    partial: int
    weight_changes: int
    counters: dict[str, Any]
    seconds: float

    @property
    def line(self) -> str:
        c = self.counters
        ended = ", ".join(f"{n} {name}" for name, n in sorted(self.ended.items()))
        return (
            f"soak {self.model}: {self.requests} requests, {sum(self.ended.values())} sequences ({ended}), "
            f"{self.partial} partial outputs, {self.weight_changes} weight changes, "
            f"{c['kv_blocks_total']} blocks, {c['steps']} steps, "
            f"{c['preemptions']} preemptions, {c['forks']} forks, {c['prefix_hit_tokens']} prefix hit tokens, "
            f"{len(self.violations)} violations, {self.seconds:.1f} s"
        )


def soak(
    model: Any,
    name: str,
    requests: int,
    blocks: int,
    seed: int = 0,
    live: int = 32,
    hard_stops: int | None = None,
    weight_changes: int | None = None,
    **settings: Any,
) -> SoakResult:
    """Run ``requests`` random requests, about ``live`` of them at a time.

    Args:
        model: a causal LM of fp32 weights (rounding decides no token).
        name: of the model, for the report.
        blocks: KV blocks of ``page_size`` tokens.
        seed: of the requests and of what happens to them.
        hard_stops: how often the engine is stopped in the middle and started again; None = once in 600 requests.
        weight_changes: how often the engine is paused and the model gets other weights; None = once in 400 requests.
        settings: further fields of ContinuousBatchingConfig.
    """
    os.environ["ENGINE_CHECK"] = "1"
    rng = random.Random(seed)
    base: dict[str, Any] = {"page_size": 4, "max_batch_tokens": 24, "safety_margin": 0.0, "max_requests_per_batch": 8}
    config = ContinuousBatchingConfig(
        **{**base, **settings}, num_blocks=blocks, per_request_processors=True, auto_switch_to_flash=False
    )
    manager = ContinuousBatchingManager(model, sampling_defaults(), config)
    versions = [copy.deepcopy(model), with_other_weights(model, seed)]
    oracles = [Oracle(version) for version in versions]
    deliveries = Deliveries(oracles[0], (HARD_STOP,))
    started = time.perf_counter()
    hard_stops = max(1, requests // 600) if hard_stops is None else hard_stops
    weight_changes = max(1, requests // 400) if weight_changes is None else weight_changes
    stops_at = {round(requests * (i + 1) / (hard_stops + 1)) for i in range(hard_stops)}
    changes_at = {round(requests * (i + 0.5) / weight_changes) for i in range(weight_changes)}
    sent = changed = 0
    manager.start()
    try:
        while sent < requests or deliveries.open:
            if sent < requests and len(deliveries.open) <= live // 2:
                oracle = oracles[changed % 2]
                burst = [oracle.draw(rng) for _ in range(min(live // 2, requests - sent))]
                for wish in burst:  # known before they run, so that the check does not hold up the engine
                    oracle.know(wish)
                for wish in burst:
                    deliveries.expect(f"s{sent}", wish)
                    manager.add_request(list(wish.prompt), request_id=f"s{sent}", **wish.arguments())
                    sent += 1
                    if sent in stops_at:
                        manager.stop(hard_stop=True)
                        _take_all(manager, deliveries)
                        manager.start()
                    if sent in changes_at:
                        changed += 1
                        _change_weights(manager, deliveries, model, versions[changed % 2], oracles[changed % 2])
            if rng.random() < 0.04 and deliveries.open:
                manager.cancel_request(rng.choice(deliveries.open))
            output = manager.get_result(timeout=_SILENCE_S)
            if output is None or manager.fatal_error is not None:
                deliveries.violations.append(f"{len(deliveries.open)} requests are not over: {manager.fatal_error!r}")
                break
            deliveries.take(output)
        manager.stop(keep_for_next_session=True)
        _take_all(manager, deliveries)
        deliveries.violations += _blocks_lost(manager)
    except RuntimeError as error:  # a manager whose loop died takes no more requests
        deliveries.violations.append(f"{len(deliveries.open)} requests are not over: {error}")
    finally:
        counters = manager.counters()
        manager.destroy()
        for each in oracles:
            each.close()
    ended = Counter(status.name.lower() for status in deliveries.ended.values())
    seconds = time.perf_counter() - started
    return SoakResult(
        name, sent, tuple(deliveries.violations), dict(ended), deliveries.partial, changed, counters, seconds
    )


def _take_all(manager: ContinuousBatchingManager, deliveries: Deliveries) -> None:
    while (output := manager.get_result(timeout=0.0)) is not None:
        deliveries.take(output)


def _change_weights(
    manager: ContinuousBatchingManager, deliveries: Deliveries, model: Any, version: Any, oracle: Oracle
) -> None:
    with manager.pause():
        _take_all(manager, deliveries)
        core = manager._core
        assert core is not None, "a pause needs a running engine"
        live, anew = what_a_change_finds(core)
        queued: dict[str, list[int]] = {
            name: [] for name in deliveries.open if name not in live
        }  # the loop has not taken them in yet
        model.load_state_dict(version.state_dict())
        deliveries.change_weights(oracle, {**live, **queued}, {*anew, *queued})


def _blocks_lost(manager: ContinuousBatchingManager) -> list[str]:
    core = manager._core
    if core is None:
        return ["the engine was released before its blocks could be counted"]
    pool = core.cache.pool
    lost = pool.num_blocks - pool.num_available
    return [f"{lost} of {pool.num_blocks} blocks are not free at the end"] if lost else []


def _load(name: str) -> Any:
    if name in TINY_MODELS:
        return tiny_model(name)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype="float32").eval()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.soak", description=__doc__.split(":")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=24, help="KV blocks; few, so that requests are preempted")
    parser.add_argument("--model", default="tiny-llama", help=f"{', '.join(TINY_MODELS)}, or a path for transformers")
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--scheduler", default="fifo", choices=["fifo", "prefill_first"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.requests < 1 or given.blocks < 1:
        parser.error("--requests and --blocks must be at least 1")
    result = soak(
        _load(given.model),
        given.model,
        given.requests,
        given.blocks,
        given.seed,
        page_size=given.page_size,
        scheduler_type=given.scheduler,
    )
    print(result.line)
    for violation in result.violations[:20]:
        print(f"  {violation}", file=sys.stderr)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
