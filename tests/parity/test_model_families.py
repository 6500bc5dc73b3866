"""Families beside the shipped tiny models, with random weights: greedy tokens are those of ``model.generate`` on each
prompt alone, in fp32; each by the forward pass it is meant to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers

Reference = Callable[[Any, Sequence[int], int], list[int]]
NEW = 10
WINDOW = 16
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A model by the names of its classes, and whether the fused forward pass is to run it."""

    family: str
    fused: bool
    options: dict[str, Any]
    attentions: tuple[str, ...] = ("eager", "sdpa")
    windows: tuple[int | None, ...] = (None, None)

    def build(self, attention: str) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            config = getattr(transformers, self.config_class)(**{**TINY, **self.options})
            config._attn_implementation = attention
            model = getattr(transformers, f"{self.family}ForCausalLM")(config).eval()
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # transformers starts them at zero, where leaving one out goes unnoticed
                    torch.nn.init.normal_(parameter, std=0.3)
            return model

    @property
    def config_class(self) -> str:
        return {"Gemma3": "Gemma3TextConfig"}.get(self.family, f"{self.family}Config")


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8, "norm_topk_prob": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

CASES = {
    "qwen2": Case("Qwen2", True, {}),
    "qwen2-mixed": Case("Qwen2", True, {"use_sliding_window": True, **MIXED}, windows=(WINDOW, None)),
    "qwen3-moe": Case("Qwen3Moe", False, MOE),
    "gemma3": Case("Gemma3", False, {"head_dim": 8, "rope_parameters": BY_LAYER, **MIXED}, windows=(WINDOW, None)),
    "phi3": Case("Phi3", False, {}),
    "phi3-partial-rotary": Case("Phi3", False, {"partial_rotary_factor": 0.5}),
    "phi3-sliding": Case("Phi3", False, {"sliding_window": WINDOW}, windows=(WINDOW, WINDOW)),
    "phi3-longrope": Case("Phi3", False, {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "olmo2": Case("Olmo2", False, {}),
    "llama-llama3-rope": Case("Llama", True, {"rope_parameters": LLAMA3}),
    "llama-yarn": Case("Llama", True, {"rope_parameters": YARN}),
    "llama-biases": Case("Llama", True, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Case("Llama", True, {"tie_word_embeddings": True}),
    "gpt-bigcode-mqa": Case("GPTBigCode", False, {"n_positions": 256}),
}
ARMS = [(name, attention) for name, case in CASES.items() for attention in case.attentions]


@cache
def model_of(name: str, attention: str) -> Any:
    """Kept: the reference is remembered by model."""
    return CASES[name].build(attention)


def prompt(length: int, salt: int) -> list[int]:
    return [(salt + 31 * i + i * i) % 97 for i in range(length)]


PROMPTS = [prompt(1, 3), prompt(9, 5), prompt(16, 7), prompt(50, 13)]


@pytest.mark.parametrize(("name", "attention"), ARMS, ids=["-".join(a) for a in ARMS])
def test_tokens_equal_generate(name: str, attention: str, reference: Reference, run: Any) -> None:
    """Pages of 4 and 16, each in chunks of 7 tokens and with all prompts in one step."""
    case = CASES[name]
    model = model_of(name, attention)
    expected = [reference(model, p, NEW) for p in PROMPTS]
    assert len({tuple(e) for e in expected}) == len(PROMPTS), "the model tells prompts apart"
    assert max(len(set(e)) for e in expected) > 3, "it does not only repeat itself"
    for page_size, budget in ((4, 7), (16, 200), (16, 7), (4, 200)):
        result = run(model, PROMPTS, NEW, page_size=page_size, num_blocks=120, max_batch_tokens=budget)
        assert result.tokens == expected, (page_size, budget)
        assert result.resolved.attention_backend == attention
        assert result.resolved.use_fused_forward is case.fused
        windows = {layer: group.window for group in result.resolved.layout.groups for layer in group.layers}
        assert tuple(windows[i] for i in range(2)) == case.windows
        chunks = sum(s.prefill_rows for s in result.steps)
        assert chunks > 2 * len(PROMPTS) if budget == 7 else chunks <= len(PROMPTS)
    assert model.config._attn_implementation == attention


def test_two_models_differ_by_what_is_under_test(reference: Reference) -> None:
    """The options change the output, so that parity with them is not parity without them."""
    others = []  # kept alive: the reference is remembered by model
    for name, options in (
        ("llama-llama3-rope", {"rope_parameters": None}),
        ("llama-yarn", {"rope_parameters": None}),
        ("phi3-partial-rotary", {"partial_rotary_factor": 1.0}),
        ("gemma3", {"rope_parameters": {**BY_LAYER, "sliding_attention": BY_LAYER["full_attention"]}}),
        ("phi3-sliding", {"sliding_window": None}),
    ):
        case, model = CASES[name], model_of(name, "eager")
        plain = Case(case.family, case.fused, {**case.options, **options}).build("eager")
        assert [reference(model, p, NEW) for p in PROMPTS] != [reference(plain, p, NEW) for p in PROMPTS], name
        others.append(plain)


def test_partial_rotary_is_not_fused() -> None:
    """Frequencies of scaled variants cover the stated share of a head only; the fused rotation covers all of it."""
    from engine.models import why_not_fused

    model = Case("Llama", False, {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}).build("eager")
    assert why_not_fused(model) == "its rotary embedding turns 4 of 8 elements of a head"


def test_longrope_is_served_as_far_as_one_set_of_factors_reaches() -> None:
    from engine import ContinuousBatchingConfig, ContinuousBatchingManager

    model = model_of("phi3-longrope", "eager")
    config = ContinuousBatchingConfig(page_size=4, num_blocks=120)
    manager = ContinuousBatchingManager(model, transformers.GenerationConfig(), config)
    assert manager.shape.max_positions == 128
    manager.add_request(prompt(100, 1), max_new_tokens=29)
    with pytest.raises(ValueError, match="exceed the model's 128 positions"):
        manager.add_request(prompt(100, 1), max_new_tokens=30)
    manager.destroy()
