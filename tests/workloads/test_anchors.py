"""The anchors against an independent reading of their definition."""

from __future__ import annotations

import math
import random

import pytest

from workloads import build_workload
from workloads.arrivals import Burst, Constant, Poisson
from workloads.config import NanoWorkload, StagedWorkload


def nano_by_definition(n: int, lo: int, hi: int, vocab: int, seed: int) -> tuple[list[list[int]], list[int]]:
    generator = random.Random(seed)
    prompts: list[list[int]] = []
    while len(prompts) < n:
        length = generator.randint(lo, hi)
        prompt: list[int] = []
        while len(prompt) < length:
            prompt.append(generator.randrange(0, vocab))
        prompts.append(prompt)
    outputs: list[int] = []
    while len(outputs) < n:
        outputs.append(generator.randint(lo, hi))
    return prompts, outputs


def staged_by_definition(
    n: int, rate: float, lo: int, hi: int, vocab: int, seed: int
) -> tuple[list[list[int]], list[int], list[float]]:
    generator = random.Random(seed)
    prompts: list[list[int]] = []
    while len(prompts) < n:
        length = int(math.exp(generator.uniform(math.log(lo), math.log(hi))))
        prompt: list[int] = []
        while len(prompt) < length:
            prompt.append(generator.randrange(0, vocab))
        prompts.append(prompt)
    outputs: list[int] = []
    while len(outputs) < n:
        outputs.append(max(16, int(math.exp(generator.uniform(math.log(lo), math.log(hi)))) // 2))
    times: list[float] = []
    now = 0.0
    while len(times) < n:
        now += generator.expovariate(rate)
        times.append(now)
    return prompts, outputs, times


def test_nano_defaults_are_the_anchor() -> None:
    prompts, outputs = nano_by_definition(256, 100, 1024, 100_000, 0)
    built = build_workload(NanoWorkload(), Burst(), vocab_size=100_000, seed=99)
    assert [list(r.prompt_ids) for r in built.requests] == prompts
    assert [r.max_new_tokens for r in built.requests] == outputs
    assert {r.due_s for r in built.requests} == {0.0}


@pytest.mark.parametrize("rate", [20.0, 40.0])
def test_staged_with_poisson_is_the_anchor(rate: float) -> None:
    prompts, outputs, times = staged_by_definition(256, rate, 64, 1024, 100_000, 1)
    built = build_workload(StagedWorkload(), Poisson(rate), vocab_size=151_936, seed=99)
    assert [list(r.prompt_ids) for r in built.requests] == prompts
    assert [r.max_new_tokens for r in built.requests] == outputs
    assert [r.due_s for r in built.requests] == times


def test_other_sizes_and_seeds_follow_the_definition_too() -> None:
    prompts, outputs, times = staged_by_definition(7, 3.0, 8, 40, 500, 12)
    cfg = StagedWorkload(seed=None, requests=7, low=8, high=40, vocab=500)
    built = build_workload(cfg, Poisson(3.0), vocab_size=500, seed=12)
    assert [(list(r.prompt_ids), r.max_new_tokens, r.due_s) for r in built.requests] == list(
        zip(prompts, outputs, times, strict=True)
    )


def test_smaller_vocabulary_takes_ids_modulo() -> None:
    prompts, _ = nano_by_definition(5, 100, 1024, 100_000, 0)
    built = build_workload(NanoWorkload(requests=5), Burst(), vocab_size=97, seed=0)
    assert [list(r.prompt_ids) for r in built.requests] == [[i % 97 for i in p] for p in prompts]


def test_other_arrivals_leave_content_as_it_is() -> None:
    poisson = build_workload(StagedWorkload(requests=9), Poisson(2.0), vocab_size=100_000, seed=0)
    constant = build_workload(StagedWorkload(requests=9), Constant(2.0), vocab_size=100_000, seed=0)
    assert [r.prompt_ids for r in poisson.requests] == [r.prompt_ids for r in constant.requests]
    assert [r.due_s for r in constant.requests] == [k / 2 for k in range(9)]
