"""The shipped YAML: every file composes against its schema and builds; overrides and wrong keys behave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

import sweeps
from workloads import Workload, build_workload
from workloads.arrivals import Poisson
from workloads.config import StagedWorkload, hydra_schemas

FOLDER = Path(sweeps.__file__).parent
SYNTHETIC = [
    "quickstart",
    "uniform_burst",
    "long_decodes",
    "mixed_burst",
    "mixed_staged",
    "shared_prefix",
    "nano",
    "staged",
    "staged_20",
    "staged_40",
    "decode_steps",
    "sessions",
]
FILES = ["azure_2023", "burstgpt", "length_table", "mooncake", "own_trace", "prompts_file", "servegen"]
ARRIVALS = [
    "as_recorded",
    "burst",
    "closed_loop",
    "constant",
    "diurnal",
    "gamma",
    "on_off",
    "poisson",
    "poisson_20",
    "poisson_40",
    "ramp",
]


def composed(*overrides: str) -> DictConfig:
    store = ConfigStore.instance()
    for (group, name), schema in hydra_schemas().items():
        store.store(group=group, name=name, node=schema)
    root: dict[str, Any] = {"defaults": [{"arrival": "burst"}, {"workload": "quickstart"}]}
    store.store(name="workload_test_root", node=root)
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose("workload_test_root", overrides=list(overrides))


def built(*overrides: str) -> Workload:
    cfg = composed(*overrides)
    return build_workload(cfg.workload, cfg.arrival, vocab_size=49_152, seed=0)


def test_every_file_is_covered() -> None:
    assert {p.stem for p in (FOLDER / "workload").glob("*.yaml")} == {*SYNTHETIC, *FILES}
    assert sorted(p.stem for p in (FOLDER / "arrival").glob("*.yaml")) == ARRIVALS


@pytest.mark.parametrize("name", [name for name in ARRIVALS if name != "as_recorded"])
def test_every_arrival_builds(name: str) -> None:
    w = built(f"arrival={name}")
    assert w.spec["arrival"]["kind"] == name.removesuffix("_20").removesuffix("_40")
    assert [r.due_s for r in w.requests] == sorted(r.due_s for r in w.requests)


def test_the_same_requests_whatever_the_arrivals() -> None:
    ids = {tuple(r.prompt_ids for r in built(f"arrival={name}").requests) for name in ARRIVALS if name != "as_recorded"}
    assert len(ids) == 1


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_workloads_build(name: str) -> None:
    assert built(f"workload={name}").name == name


@pytest.mark.parametrize("name", FILES)
def test_file_workloads_ask_for_their_path(name: str) -> None:
    with pytest.raises(ValueError, match=r"workload\.path is (not set|None)"):
        built(f"workload={name}")


def test_quickstart_is_24_requests_of_about_1200_tokens() -> None:
    w = built()
    assert len(w) == 24
    assert 1100 <= sum(r.max_new_tokens for r in w.requests) <= 1300


def test_workloads_bring_their_arrival_and_the_command_line_wins() -> None:
    assert composed("workload=mixed_staged").arrival.kind == "poisson"
    assert composed("workload=azure_2023").arrival.kind == "as_recorded"
    assert composed("workload=mixed_staged", "arrival=constant").arrival.kind == "constant"


def test_mixed_staged_has_the_requests_of_mixed_burst() -> None:
    staged, burst = built("workload=mixed_staged"), built("workload=mixed_burst")
    assert [r.prompt_ids for r in staged.requests] == [r.prompt_ids for r in burst.requests]


def test_staged_from_the_command_line_is_the_anchor() -> None:
    w = built("workload=staged", "arrival=poisson", "arrival.rate=20")
    anchor = build_workload(StagedWorkload(), Poisson(20.0), vocab_size=49_152, seed=7)
    assert w.content_hash == anchor.content_hash


def test_sizes_scale_by_override() -> None:
    w = built("workload=uniform_burst", "workload.requests=3", "workload.prompt_tokens.value=5")
    assert [len(r.prompt_ids) for r in w.requests] == [5, 5, 5]
    assert built("arrival=closed_loop", "arrival.concurrency=2").concurrency == 2


@pytest.mark.parametrize("override", ["workload.request=3", "arrival.rate=3", "workload.prompt_tokens.hihg=3"])
def test_wrong_keys_are_errors(override: str) -> None:
    with pytest.raises(Exception, match=override.split("=")[0].rpartition(".")[2]):
        composed(override)


def test_the_workloads_of_peers_have_prompts_of_their_own() -> None:
    """One process measures them all, three times each: nothing of one may be in its prefix cache for another."""
    seeds = {"nano": 0, "decode_steps": 5, "staged_20": 51, "staged_40": 101}
    begins = [
        {r.prompt_ids[:16] for r in built(f"workload={name}", f"workload.seed={seed + iteration}").requests}
        for name, seed in seeds.items()
        for iteration in range(3)
    ]
    assert len(set().union(*begins)) == sum(map(len, begins))
    assert {name: composed(f"workload={name}").workload.seed for name in seeds} == seeds


def test_the_two_rates_of_staged_are_its_own() -> None:
    twenty, forty = built("workload=staged_20"), built("workload=staged_40")
    anchor = built("workload=staged", "arrival.rate=20", "workload.seed=51")
    assert twenty.content_hash == anchor.content_hash
    assert twenty.requests[-1].due_s > 1.5 * forty.requests[-1].due_s
