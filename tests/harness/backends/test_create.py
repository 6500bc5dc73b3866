from __future__ import annotations

from typing import Any

import pytest

from harness.backends import GenerationSettings, create
from harness.backends.generation import eos_ids, generation_config
from harness.backends.settings import engine_settings


def test_unknown_engine_names_the_nearest(llama: Any) -> None:
    with pytest.raises(ValueError, match="Did you mean 'static'"):
        create("statik", llama)


@pytest.mark.parametrize(
    ("name", "setting", "nearest"), [("static", "wav", "wave"), ("transformers", "num_block", "num_blocks")]
)
def test_unknown_setting_names_the_nearest(llama: Any, name: str, setting: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{nearest}'"):
        create(name, llama, {setting: 3})


def test_null_settings_are_left_to_the_engine(llama: Any) -> None:
    backend = create("static", llama, {"wave": None, "wave_timeout_s": 0.5, "attn_implementation": "eager"})
    sources = {row.field: (row.value, row.source) for row in backend.config()}
    assert sources["wave"] == (None, "default")
    assert sources["wave_timeout_s"] == (0.5, "user")


@pytest.mark.parametrize("settings", [{"wave": 0}, {"wave_timeout_s": -1}])
def test_bad_static_settings(llama: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"engine\.wave"):
        create("static", llama, settings)


def test_seeds_that_contradict_are_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"engine\.seed is 1, generation\.seed 2"):
        create("transformers", llama, {"seed": 1}, GenerationSettings(do_sample=True, seed=2))


def test_sampling_settings_need_sampling() -> None:
    with pytest.raises(ValueError, match="temperature set but do_sample is false"):
        GenerationSettings(temperature=0.5)


def test_eos_comes_from_the_model_unless_ignored(llama: Any) -> None:
    llama.generation_config.eos_token_id = [5, 7]
    assert eos_ids(llama, GenerationSettings()) == frozenset()
    assert eos_ids(llama, GenerationSettings(ignore_eos=False)) == {5, 7}
    assert generation_config(llama, GenerationSettings(ignore_eos=False)).eos_token_id == [5, 7]
    assert generation_config(llama, GenerationSettings(), no_eos=-1).eos_token_id == -1


def test_nothing_is_taken_over_from_the_models_own_settings(llama: Any) -> None:
    llama.generation_config.repetition_penalty = 1.5
    assert generation_config(llama, GenerationSettings()).repetition_penalty in (None, 1.0)


def test_engine_settings_leave_out_what_was_not_set_and_the_process_s_own():
    settings = {"name": "ours", "num_blocks": 8, "safety_margin": 0.0, "seed": None, "env": {"PYTHONPATH": "x"}}
    assert engine_settings(settings) == {"num_blocks": 8, "safety_margin": 0.0}
