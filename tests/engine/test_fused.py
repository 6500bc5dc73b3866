"""The fused forward pass: tokens of single-prompt generation, and a model that is given back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import engine
from engine import ContinuousBatchingConfig
from engine.models import FAMILIES, why_not_fused
from engine.models.weights import release, take_layers
from harness.models import ModelSpec, load_model

FUSED = ("tiny-llama", "tiny-qwen3", "tiny-mistral", "tiny-gemma2")


def _load(name: str) -> Any:
    return load_model(ModelSpec(name=name, attn_implementation="eager"), "cpu").model


@pytest.fixture(scope="module", params=FUSED)
def model(request: pytest.FixtureRequest) -> Any:
    return _load(request.param)


def _prompts(model: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in (5, 40, 13, 1)]


def _reference(model: Any, prompt: list[int], count: int = 12) -> list[int]:
    ids = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("page_size", [4, 16])
def test_tokens_equal_generate(model: Any, page_size: int) -> None:
    config = ContinuousBatchingConfig(page_size=page_size, num_blocks=64, max_batch_tokens=16, use_fused_forward=True)
    prompts = _prompts(model)
    outputs = engine.generate_batch(model, prompts, None, config, progress_bar=False, max_new_tokens=12)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == _reference(model, prompt)


def test_model_works_while_fused_and_is_given_back(model: Any) -> None:
    prompt = _prompts(model)[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = _reference(model, prompt)
    first, second = take_layers(model), take_layers(model)  # two managers on one model
    attention = model.model.layers[0].self_attn
    shared = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == shared
    assert first[0].qkv.weight.untyped_storage().data_ptr() == second[0].qkv.weight.untyped_storage().data_ptr()
    assert _reference(model, prompt) == expected
    release(model)
    assert attention.v_proj.weight.untyped_storage().data_ptr() == shared, "the other user still needs it"
    release(model)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_weight_written_through_the_model_is_seen(model: Any) -> None:
    layers = take_layers(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(1.0)
    start = model.model.layers[0].self_attn.q_proj.weight.shape[0]
    assert torch.equal(layers[0].qkv.weight[start], model.model.layers[0].self_attn.k_proj.weight[0])
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.sub_(1.0)
    release(model)


def test_what_is_not_known_keeps_its_own_forward_pass() -> None:
    gpt2 = _load("tiny-gpt2")
    assert "GPT2LMHeadModel" in (why_not_fused(gpt2) or "")
    manager = engine.init_continuous_batching(gpt2, None, ContinuousBatchingConfig(num_blocks=8))
    assert manager.resolved_config.use_fused_forward is False
    with pytest.raises(ValueError, match="use_fused_forward=True cannot be met"):
        engine.init_continuous_batching(gpt2, None, ContinuousBatchingConfig(num_blocks=8, use_fused_forward=True))


def test_hooks_and_replaced_layers_keep_the_models_forward_pass() -> None:
    llama = _load("tiny-llama")
    assert why_not_fused(llama) is None
    handle = llama.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hooks" in (why_not_fused(llama) or "")
    handle.remove()

    class Adapter(torch.nn.Linear):
        pass

    down = llama.model.layers[0].mlp.down_proj
    llama.model.layers[0].mlp.down_proj = Adapter(down.in_features, down.out_features, bias=False)
    assert "Adapter" in (why_not_fused(llama) or "")
    assert set(FAMILIES) >= {"LlamaForCausalLM", "Gemma2ForCausalLM"}
