"""Every preset is a valid shape; the large ones have the published sizes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.models import DEMO_MODEL, ModelSpec, load_model, preset_names
from harness.models.presets import nearest_names, preset_folder, preset_hub_id

TINY = [name for name in preset_names() if name.startswith("tiny-")]
# Parameters of the published checkpoints, tied embeddings counted once.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "gemma-2-2b": 2_614_341_888,
}


def test_names() -> None:
    assert set(preset_names()) == {*PARAMETERS, *TINY}
    assert TINY == ["tiny-gemma2", "tiny-gpt2", "tiny-llama", "tiny-mistral", "tiny-qwen3"]
    assert DEMO_MODEL not in preset_names()


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_size(name: str) -> None:
    config = AutoConfig.from_pretrained(preset_folder(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert preset_hub_id(name) is not None


def test_facts_that_shape_the_cache() -> None:
    configs = {name: AutoConfig.from_pretrained(preset_folder(name)) for name in preset_names()}
    assert configs["qwen3-4b"].rope_parameters["rope_theta"] == 1_000_000
    assert configs["llama-3.1-8b"].rope_parameters["rope_type"] == "llama3"
    assert configs["mistral-7b"].sliding_window == 4096
    assert configs["gemma-2-2b"].layer_types[:2] == ["sliding_attention", "full_attention"]
    assert configs["tiny-gemma2"].num_hidden_layers == 4
    assert configs["tiny-mistral"].sliding_window == 16


@pytest.mark.parametrize("name", TINY)
def test_tiny_is_random_and_never_ends_by_itself(name: str) -> None:
    loaded = load_model(ModelSpec(name), "cpu")
    assert "random weights" in loaded.facts.source
    assert loaded.tokenizer is None
    assert 97 <= loaded.vocab_size <= 256
    assert loaded.model.generation_config.eos_token_id is None
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    out = loaded.model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 8:]
    assert len(out) == 24
    assert len(set(out.tolist())) > 2, "degenerate text would hide errors from token comparisons"


def test_nearest_names() -> None:
    assert nearest_names("qwen3-4")[0] == "qwen3-4b"
    assert nearest_names("Smollm") == ("smollm2",)
    assert nearest_names("zzzzzz") == ()
