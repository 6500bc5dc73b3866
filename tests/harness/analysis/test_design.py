"""One variable at a time, before anything runs (M-rule-02, M-s2-03, M-s3-01)."""

from __future__ import annotations

from copy import deepcopy

import pytest

from harness.analysis.design import ConfoundedSweep, by_facet, check_design, variable_of

BASE = {
    "engine": {"name": "ours", "num_blocks": None, "max_memory_percent": None, "page_size": 16,
               "max_batch_tokens": None, "max_requests_per_batch": None},
    "model": {"name": "m"},
    "arrival": {"kind": "poisson", "rate": 1.0},
    "workload": {"name": "w", "seed": None},
    "generation": {"do_sample": False},
    "measure": {"seed": 0},
}  # fmt: skip


def configs(*changes):
    found = []
    for change in changes:
        config = deepcopy(BASE)
        for key, value in change.items():
            group, _, name = key.partition(".")
            config[group][name] = value
        found.append(config)
    return found


@pytest.mark.parametrize(
    "swept, expected",
    [
        ([], None),
        (["engine"], "engine"),
        (["engine", "workload"], "engine"),
        (["engine", "measure.seed"], "engine"),
        (["arrival.rate"], "arrival.rate"),
        (["engine.num_blocks", "engine.page_size"], "engine.num_blocks,engine.page_size"),
        (["measure.seed"], "measure.seed"),
    ],
)
def test_the_variable_of_a_sweep_without_a_name(swept, expected):
    assert variable_of(swept) == expected


def test_one_variable_in_several_facets_and_seeds_is_a_sound_design():
    arms = configs(
        {"engine.page_size": 16}, {"engine.page_size": 32},
        {"engine.page_size": 16, "workload.name": "v", "measure.seed": 1},
        {"engine.page_size": 32, "workload.name": "v"},
    )  # fmt: skip
    check_design(arms, "engine.page_size", ["engine.page_size", "workload", "measure.seed"], False)
    assert [len(facet) for facet in by_facet(arms, ["engine.page_size"])] == [2, 2]
    assert [len(facet) for facet in by_facet(arms, ["workload"])] == [4]


def test_what_varies_besides_the_variable_is_named_with_both_ways_out():
    arms = configs({"engine.page_size": 16}, {"engine.page_size": 32, "engine.num_blocks": 8})
    with pytest.raises(ConfoundedSweep) as refused:
        check_design(arms, "engine.page_size", ["engine.page_size"], False)
    said = str(refused.value)
    assert said.startswith("engine.num_blocks varies besides the variable engine.page_size: ")
    assert "Pin it to one value for all arms" in said
    assert "or declare it: experiment.variable='engine.page_size,engine.num_blocks' allow_factorial=true" in said


def test_a_key_swept_below_a_declared_group_is_another_variable():
    arms = configs(
        *({"engine.name": name, "engine.page_size": size} for name in ("ours", "transformers") for size in (16, 32))
    )
    with pytest.raises(ConfoundedSweep, match=r"engine\.page_size varies besides the variable engine:"):
        check_design(arms, "engine", ["engine", "engine.page_size"], False)
    check_design(arms, "engine", ["engine"], False)  # choices of the group that bring other settings with them


def test_two_variables_need_allow_factorial():
    arms = configs(*({"engine.page_size": a, "measure.x": b} for a in (16, 32) for b in (1, 2)))
    keys = ["engine.page_size", "measure.x"]
    with pytest.raises(ConfoundedSweep, match=r"varies 2 variables at once .* allow_factorial=true"):
        check_design(arms, ",".join(keys), keys, False)
    check_design(arms, ",".join(keys), keys, True)


def test_both_sizes_of_the_cache_are_refused():
    arms = configs(*({"engine.num_blocks": 8, "engine.max_memory_percent": p} for p in (0.3, 0.5)))
    with pytest.raises(ConfoundedSweep, match=r"engine\.num_blocks=8 and engine\.max_memory_percent=0\.3 both size"):
        check_design(arms, "engine.max_memory_percent", ["engine.max_memory_percent"], False)


def test_requests_and_tokens_per_batch_never_vary_together():
    arms = configs(*({"engine.max_batch_tokens": n, "engine.max_requests_per_batch": n // 8} for n in (256, 512)))
    keys = ["engine.max_batch_tokens", "engine.max_requests_per_batch"]
    with pytest.raises(ConfoundedSweep, match="both vary: each moves the memory of a step"):
        check_design(arms, ",".join(keys), keys, True)
    peers = configs({}, {"engine.name": "x", "engine.max_batch_tokens": 256, "engine.max_requests_per_batch": 8})
    check_design(peers, "engine", ["engine"], False)  # another engine has other defaults: that is the variable
