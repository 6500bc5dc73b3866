from __future__ import annotations

import dataclasses

import pytest

from harness import config, config_schemas
from harness.models.spec import ModelSpec


def test_model_schema_and_model_spec_have_the_same_settings():
    schema = {f.name: f.type for f in dataclasses.fields(config_schemas.ModelConfig)}
    assert schema == {f.name: f.type for f in dataclasses.fields(ModelSpec)}
    values = {f.name: f.default for f in dataclasses.fields(config_schemas.ModelConfig) if f.name != "name"}
    assert values == {f.name: f.default for f in dataclasses.fields(ModelSpec) if f.name != "name"}


def test_continuous_schema_has_every_setting_of_the_reference():
    from transformers.generation import ContinuousBatchingConfig

    deprecated = {"use_default_compile_configs", "max_cached_graphs", "block_size"}
    reference = {f.name for f in dataclasses.fields(ContinuousBatchingConfig)} - deprecated
    ours = {f.name for f in dataclasses.fields(config_schemas.ContinuousEngineConfig)} - {"name", "attn_implementation"}
    assert reference <= ours


def test_hash_covers_what_is_measured_and_nothing_else():
    base = {"engine": {"name": "ours"}, "measure": {"seed": 0}, "results_dir": "a", "experiment": {"name": "x"}}
    assert config.config_hash(base) == config.config_hash({**base, "results_dir": "b", "experiment": {}})
    assert config.config_hash(base) != config.config_hash({**base, "measure": {"seed": 1}})


def test_slug_is_a_directory_name():
    overrides = ["experiment=x", "engine=ours", "+engine.varlen_compile_config={mode: default}", "results_dir=/a/b"]
    assert config.overrides_slug(overrides) == "engine=ours,engine.varlen_compile_config=_mode_default_-"
    assert config.overrides_slug(overrides, fixed=("engine.varlen_compile_config",)) == "engine=ours-"
    assert config.overrides_slug([]) == ""
    assert len(config.overrides_slug(["workload.path=" + "x" * 300])) == 101


@pytest.mark.parametrize(
    "key, value",
    [
        ("warmup_requests", -1),
        ("repeats", 0),
        ("runs_per_process", 0),
        ("timeout_s", 0),
        ("start_timeout_s", -3),
        ("telemetry_interval_ms", 0),
        ("torch_threads", 0),
        ("device", "gpu"),
    ],
)
def test_values_that_cannot_be_measured_with(key, value):
    measure = {
        "warmup_requests": 0,
        "repeats": 1,
        "runs_per_process": 1,
        "timeout_s": 1,
        "start_timeout_s": 1,
        "telemetry_interval_ms": 1,
        "torch_threads": None,
        "device": "cuda:1",
    }
    config.check({"generation": {}, "measure": measure})
    with pytest.raises(ValueError, match=f"measure.{key} must be"):
        config.check({"generation": {}, "measure": {**measure, key: value}})


def test_sampling_settings_without_sampling_are_refused():
    with pytest.raises(ValueError, match="do_sample is false"):
        config.check({"generation": {"temperature": 0.7}, "measure": {}})
