"""Whatever clients do and in whatever order, step by step: every request ends in one terminal output with the tokens it
has when served alone, and every block comes back. Weights change under way: what holds nothing computed by the old
ones has the tokens of the new ones, what goes on across the change keeps what it had generated.

The engine is driven without a thread, so a failing sequence of actions can be replayed. A longer run:
``ENGINE_SOAK=500 pytest tests/parity/test_state_machine.py`` (examples a model).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import ContinuousBatchingConfig, RequestStatus
from engine.bench.oracle import (
    LONGEST_OUTPUT,
    Deliveries,
    Oracle,
    StepwiseEngine,
    what_a_change_finds,
    with_other_weights,
)
from engine.bench.tiny_models import tiny_model
from engine.model_shape import ModelShape

SOAK = int(os.environ.get("ENGINE_SOAK", "0"))
PROFILE = settings(
    max_examples=SOAK or 5,
    stateful_step_count=120 if SOAK else 28,
    derandomize=not SOAK,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@cache
def model_and_versions(name: str) -> tuple[Any, tuple[Any, Any], tuple[Oracle, Oracle]]:
    """The model that is served, and two sets of weights for it with what they generate."""
    versions = tiny_model(name), with_other_weights(tiny_model(name), 3)
    return tiny_model(name), versions, (Oracle(versions[0]), Oracle(versions[1]))


class Clients(RuleBasedStateMachine):
    """Actions of clients on one engine.

    Attributes:
        model_name: which model is served.
        seen: what happened over all examples, so that the paths this is about can be asserted.
    """

    model_name: str
    seen: Counter[str]

    @initialize(
        ahead=st.booleans(),
        page_size=st.sampled_from([4, 16]),
        blocks=st.integers(0, 4),
        scheduler=st.sampled_from(["fifo", "prefill_first"]),
        max_batch_tokens=st.sampled_from([5, 16, 64]),
        max_requests=st.integers(2, 6),
        safety_margin=st.sampled_from([0.0, 0.15, 0.5]),
        sharing=st.booleans(),
        host_blocks=st.sampled_from([0, 4, 40]),
        fused=st.sampled_from([None, False]),
    )
    def serve(self, ahead: bool, page_size: int, blocks: int, fused: bool | None, **options: Any) -> None:
        self.model, self.versions, self.oracles = model_and_versions(self.model_name)
        self.version = 0
        self.model.load_state_dict(self.versions[0].state_dict())
        groups = 2 if "gemma" in self.model_name else 1
        # From just enough for the longest request alone to a little more.
        smallest = groups * -(-(24 + LONGEST_OUTPUT) // page_size)
        self.blocks = smallest + blocks * groups * 4 // page_size
        self.ahead = ahead
        self.config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=self.blocks,
            scheduler_type=options["scheduler"],
            max_batch_tokens=options["max_batch_tokens"],
            max_requests_per_batch=options["max_requests"],
            safety_margin=options["safety_margin"],
            allow_block_sharing=options["sharing"],
            use_fused_forward=fused,
            cpu_offload_space=self.host_bytes(page_size, options["host_blocks"]) / 2**30,
            per_request_processors=True,
            auto_switch_to_flash=False,
        )
        self.deliveries = Deliveries(self.oracles[0], ("RuntimeError: something broke", "oom_"))
        self.submitted = 0
        self.start()

    def host_bytes(self, page_size: int, blocks: int) -> int:
        return blocks * ModelShape.of(self.model).cache_layout(page_size).block_bytes

    def start(self) -> None:
        self.engine = StepwiseEngine(self.model, self.config, self.ahead)
        self.core = self.engine.core
        assert self.core._check, "the engine checks itself after every step"

    def receive(self) -> None:
        outputs, self.engine.outputs[:] = list(self.engine.outputs), []
        for output in outputs:
            self.deliveries.take(output)
            self.seen[output.status.name] += 1
            self.seen["streamed"] += not output.is_finished()
            self.seen["stopped"] += output.finish_reason == "stop"

    @rule(seed=st.integers(0, 2**20), burst=st.integers(1, 5))
    def add(self, seed: int, burst: int) -> None:
        rng = random.Random(seed)
        for _ in range(burst):
            wish, name = self.oracles[self.version].draw(rng), f"c{self.submitted}"
            self.submitted += 1
            self.deliveries.expect(name, wish)
            self.engine.add(name, wish)
            self.seen["sampled"] += wish.temperature > 0

    @precondition(lambda self: self.core.has_work)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.core.has_work:
                self.core.step()
            self.receive()
            self.core.scheduler.check()

    @precondition(lambda self: self.core.requests)
    @rule(which=st.integers(0, 2**16))
    def cancel(self, which: int) -> None:
        """Wherever it is: queued, waiting for its parent, prefilling, decoding, with a token on its way."""
        names = list(self.core.requests)
        name = names[which % len(names)]
        self.core.cancel(name)
        self.receive()
        assert self.deliveries.ended[name] is RequestStatus.CANCELLED

    @rule(name=st.sampled_from(["never", "c0"]))
    def cancel_what_may_be_over(self, name: str) -> None:
        self.core.cancel(name)

    @rule()
    def forget_prefixes(self) -> None:
        """As after a weight update; here the weights stay, so the outputs do."""
        self.core.drain()
        self.core.forget_prefixes()
        assert self.core.cache.pool.num_cached == 0

    @rule(rarely=st.integers(0, 2))
    def change_weights(self, rarely: int) -> None:
        """What a pause does between two steps, and its caller inside it."""
        if rarely:
            return
        self.core.drain()
        self.receive()
        live, anew = what_a_change_finds(self.core)
        self.version ^= 1
        self.model.load_state_dict(self.versions[self.version].state_dict())
        self.core.runner.refuse_replaced_parameters()
        self.core.forget_prefixes()
        self.deliveries.change_weights(self.oracles[self.version], live, anew)
        self.seen["changed under way"] += len(live) > len(anew)
        self.seen["changed before it ran"] += any(not live[name] for name in anew)
        self.seen["changed while preempted"] += any(live[name] for name in anew)

    @precondition(lambda self: self.core.requests)
    @rule(times=st.integers(1, 2), rarely=st.integers(0, 2))
    def run_out_of_memory(self, times: int, rarely: int) -> None:
        """The next launch fails and is tried again, smaller; if that fails too, one request does."""
        if rarely:
            return
        runner, left = self.core.runner, [times]

        def launch(plan: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return type(runner).launch(runner, plan)

        runner.launch = launch  # type: ignore[method-assign]
        self.core.step()
        del runner.launch
        self.seen["out of memory"] += times - left[0]

    @precondition(lambda self: self.core.requests)
    @rule(restart=st.booleans(), rarely=st.integers(0, 3))
    def fail_all(self, restart: bool, rarely: int) -> None:
        if rarely:
            return
        self.core.fail_all("RuntimeError: something broke")
        self.receive()
        assert self.deliveries.open == []
        self.whole()
        if restart:
            self.finish_counting()
            self.start()

    @rule(rarely=st.integers(0, 2))
    def drain(self, rarely: int) -> None:
        if rarely:
            return
        self.engine.drain(20_000)
        self.receive()
        assert self.deliveries.open == []
        self.whole()

    def whole(self) -> None:
        scheduler = self.core.scheduler
        assert self.core.cache.pool.num_available == self.blocks, "blocks leaked"
        assert scheduler.slots.num_free == scheduler.limits.max_requests, "slots leaked"
        assert scheduler.host.num_free == scheduler.host.num_blocks, "host blocks leaked"
        assert scheduler._num_held == 0, "children are held that nobody waits for"
        assert not self.core.cache._identities

    def finish_counting(self) -> None:
        for name in ("preemptions", "forks", "prefix_hit_tokens", "offloads", "restores"):
            self.seen[name] += getattr(self.engine.stats, name)
        self.seen["ahead"] += self.ahead and self.engine.stats.steps
        self.core.close()

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "core"):  # before the first rule
            return
        self.receive()
        self.core.scheduler.check()
        assert self.deliveries.violations == []
        assert sorted(self.core.requests) == sorted(self.deliveries.open), "live is what has had no terminal output"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.engine.drain(20_000)
        self.consistent()
        assert self.deliveries.open == []
        self.whole()
        self.finish_counting()


MODELS = ["tiny-llama", "tiny-mistral", "tiny-gemma2"]


def clients_of(model_name: str) -> type[Clients]:
    return type("Clients", (Clients,), {"model_name": model_name, "seen": Counter()})


@pytest.mark.parametrize("model_name", MODELS)
def test_whatever_clients_do(model_name: str) -> None:
    machine = clients_of(model_name)
    run_state_machine_as_test(machine, settings=PROFILE)
    assert machine.seen["FINISHED"] > 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("model_name", MODELS)
def test_the_actions_reach_every_path(model_name: str, ahead: bool) -> None:
    """One fixed sequence of actions, independent of Hypothesis' choices."""
    clients, rng = clients_of(model_name)(), random.Random(7)
    clients.serve(
        ahead=ahead,
        page_size=4,
        blocks=3,
        scheduler="fifo",
        max_batch_tokens=16,
        max_requests=6,
        safety_margin=0.0,
        sharing=True,
        host_blocks=12,
        fused=None,
    )
    for turn in range(60):
        if len(clients.core.requests) < 8:
            clients.add(seed=rng.randrange(1000), burst=3)
        clients.step(count=rng.randint(1, 5))
        if turn % 6 == 5 and clients.core.requests:
            clients.cancel(which=rng.randrange(100))
        if turn in (20, 40):
            clients.forget_prefixes()
        preempted = [
            r for r in clients.core.scheduler.waiting.values() if r.preemptions and r.num_tokens > r.num_prompt
        ]
        if turn in (10, 30, 50) or (preempted and not clients.seen["changed while preempted"]):
            clients.change_weights(rarely=0)
        if turn in (25, 45) and clients.core.requests:
            clients.run_out_of_memory(times=1 + (turn == 45), rarely=0)
        if turn == 35 and clients.core.requests:
            clients.fail_all(restart=True, rarely=0)
        clients.consistent()
    clients.teardown()
    paths = {"FINISHED", "CANCELLED", "FAILED", "streamed", "stopped", "sampled", "preemptions", "forks"}
    paths |= {"offloads", "restores", "out of memory"} | ({"ahead"} if ahead else set())
    paths |= {"changed under way", "changed before it ran", "changed while preempted"}
    if model_name == "tiny-llama":
        paths.add("prefix_hit_tokens")
    assert {path for path in paths if not clients.seen[path]} == set(), clients.seen
