from __future__ import annotations

from typing import Any

import pytest

from workloads import ScheduledRequest, Workload, build_warmup, build_workload
from workloads.arrivals import Burst, ClosedLoop, Poisson
from workloads.config import LengthConfig, PrefixConfig, SyntheticWorkload


def synthetic(**settings: Any) -> SyntheticWorkload:
    defaults: dict[str, Any] = {
        "requests": 50,
        "prompt_tokens": LengthConfig("uniform", low=1, high=128),
        "output_tokens": LengthConfig("uniform", low=4, high=40),
    }
    return SyntheticWorkload(**(defaults | settings))


@pytest.mark.parametrize("length", [1, 7, 32, 128])
def test_prompts_have_exactly_the_length_asked_for(length: int) -> None:
    built = build_workload(
        synthetic(prompt_tokens=LengthConfig("fixed", value=length)), Burst(), vocab_size=300, seed=0
    )
    assert {len(r.prompt_ids) for r in built.requests} == {length}
    assert len(built) == 50


def test_ids_are_in_the_vocabulary_and_not_special() -> None:
    built = build_workload(synthetic(), Burst(), vocab_size=20, seed=0, special_ids=(0, 7, 19, 500))
    assert {i for r in built.requests for i in r.prompt_ids} == set(range(20)) - {0, 7, 19}


def test_same_seed_same_hash_other_seed_other_hash() -> None:
    hashes = [build_workload(synthetic(), Burst(), vocab_size=300, seed=s).content_hash for s in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]
    pinned = [build_workload(synthetic(seed=5), Burst(), vocab_size=300, seed=s).content_hash for s in (0, 1)]
    assert pinned[0] == pinned[1]


def test_arrival_does_not_change_the_requests() -> None:
    burst = build_workload(synthetic(), Burst(), vocab_size=300, seed=0)
    slow = build_workload(synthetic(), Poisson(2), vocab_size=300, seed=0)
    fast = build_workload(synthetic(), Poisson(4), vocab_size=300, seed=0)
    assert [(r.prompt_ids, r.max_new_tokens) for r in burst.requests] == [
        (r.prompt_ids, r.max_new_tokens) for r in slow.requests
    ]
    assert [r.due_s for r in slow.requests] == pytest.approx([2 * r.due_s for r in fast.requests])


def test_closed_loop_concurrency_reaches_the_workload() -> None:
    assert build_workload(synthetic(), ClosedLoop(3), vocab_size=300, seed=0).concurrency == 3


def test_spec_states_every_resolved_setting() -> None:
    built = build_workload(synthetic(), {"kind": "poisson", "rate": 2.5}, vocab_size=300, seed=4)
    assert built.spec["workload"]["seed"] == 4
    assert built.spec["workload"]["prompt_tokens"]["high"] == 128
    assert built.spec["arrival"] == {"kind": "poisson", "rate": 2.5}
    assert built.spec["vocab_size"] == 300


def test_shared_prefix_is_the_constructed_share() -> None:
    """48 of 64 ids shared by 8 prompts: 7 x 48 of 512 tokens could come from a prefix cache."""
    cfg = synthetic(
        requests=8,
        prompt_tokens=LengthConfig("fixed", value=64),
        prefix=PrefixConfig(fraction=1.0, tokens=48, groups=1),
    )
    requests = build_workload(cfg, Burst(), vocab_size=5000, seed=0).requests
    assert len({r.prompt_ids[:48] for r in requests}) == 1
    assert len({r.prompt_ids[48:50] for r in requests}) == 8
    assert {(r.prefix_group, r.prefix_tokens, len(r.prompt_ids)) for r in requests} == {(0, 48, 64)}
    assert sum(r.prefix_tokens for r in requests[1:]) / 512 == pytest.approx(0.65625)


def test_fraction_and_groups() -> None:
    cfg = synthetic(
        requests=40,
        prompt_tokens=LengthConfig("fixed", value=20),
        prefix=PrefixConfig(fraction=0.75, tokens=10, groups=3),
    )
    requests = build_workload(cfg, Burst(), vocab_size=5000, seed=0).requests
    assert [sum(r.prefix_group == g for r in requests) for g in (None, 0, 1, 2)] == [10, 10, 10, 10]
    for g in range(3):
        assert len({r.prompt_ids[:10] for r in requests if r.prefix_group == g}) == 1
    assert len({r.prompt_ids[:10] for r in requests}) == 13


def test_prompt_shorter_than_the_prefix_keeps_one_id_of_its_own() -> None:
    cfg = synthetic(
        prompt_tokens=LengthConfig("uniform", low=1, high=12), prefix=PrefixConfig(fraction=1.0, tokens=10, groups=1)
    )
    for r in build_workload(cfg, Burst(), vocab_size=5000, seed=0).requests:
        assert r.prefix_tokens == min(10, len(r.prompt_ids) - 1)
        assert (r.prefix_group is None) == (r.prefix_tokens == 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests": 0}, r"workload\.requests"),
        ({"prefix": PrefixConfig(fraction=1.5, tokens=4)}, "0 to 1"),
        ({"prefix": PrefixConfig(fraction=0.5, tokens=0)}, "at least 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_workload(synthetic(**settings), Burst(), vocab_size=300, seed=0)


def test_unknown_settings_and_kinds_are_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'requests'"):
        build_workload({"kind": "synthetic", "request": 3}, Burst(), vocab_size=300, seed=0)
    with pytest.raises(ValueError, match="Did you mean 'staged'"):
        build_workload({"kind": "stagd"}, Burst(), vocab_size=300, seed=0)
    with pytest.raises(ValueError, match="no token id is left"):
        build_workload(synthetic(), Burst(), vocab_size=2, seed=0, special_ids=(0, 1))


class TestWarmup:
    def test_no_warm_up_prompt_begins_like_a_measured_one(self) -> None:
        measured = build_workload(synthetic(), Burst(), vocab_size=6, seed=0)
        warmup = build_warmup(measured.requests, 30, 6, 0)
        assert len(warmup) == 30
        assert not {r.prompt_ids[:4] for r in warmup} & {r.prompt_ids[:4] for r in measured.requests}
        assert not {r.request_id for r in warmup} & {r.request_id for r in measured.requests}

    def test_lengths_cover_the_workload_longest_first(self) -> None:
        measured = build_workload(synthetic(), Burst(), vocab_size=300, seed=0)
        warmup = build_warmup(measured.requests, 4, 300, 0, max_new_tokens=8)
        lengths = [len(r.prompt_ids) for r in warmup]
        assert lengths[0] == max(len(r.prompt_ids) for r in measured.requests)
        assert lengths == sorted(lengths, reverse=True)
        assert all(1 <= r.max_new_tokens <= 8 and r.due_s == 0 for r in warmup)

    def test_none_asked_for(self) -> None:
        assert build_warmup(build_workload(synthetic(), Burst(), vocab_size=300, seed=0).requests, 0, 300, 0) == ()

    def test_vocabulary_too_small_is_said(self) -> None:
        measured = Workload("w", (ScheduledRequest("a", 0.0, (0, 0, 0, 0), 2),))
        with pytest.raises(ValueError, match="too small"):
            build_warmup(measured.requests, 1, 1, 0)
