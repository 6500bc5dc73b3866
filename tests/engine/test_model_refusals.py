"""Models that a paged cache cannot serve are refused with the reason, before anything is allocated for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from engine import ContinuousBatchingManager, generate_batch
from engine.model_shape import ModelShape

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
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DELTA = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
SHARED = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": None,
}
REFUSED = [
    ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64}, "encoder-decoder"),
    ("JambaConfig", "JambaForCausalLM", {"mamba_d_state": 4, "num_experts": 2, "attn_layer_period": 2,
     "attn_layer_offset": 1}, "recurrent state"),
    ("Qwen3NextConfig", "Qwen3NextForCausalLM", DELTA, "recurrent state"),
    ("MambaConfig", "MambaForCausalLM", {}, "recurrent state"),
    ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "has conv layers"),
    ("Llama4TextConfig", "Llama4ForCausalLM", {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 64},
     "has chunked_attention layers"),
    ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT, "multi-head latent attention"),
    ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}, "does not go through .* AttentionInterface"),
    ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
     "layer 0 of .* has attention sinks"),
    ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "use_bidirectional_attention": True},
     "attends in both directions"),
    ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "use_bidirectional_attention": True},
     "attends in both directions"),
    ("BertConfig", "BertLMHeadModel", {}, "attends in both directions"),
    ("DiffLlamaConfig", "DiffLlamaForCausalLM", {}, r"once in each of its 2 layers \(it called it 4 times\)"),
    ("Gemma3nTextConfig", "Gemma3nForCausalLM", SHARED, "read the keys and values of others"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "model", "options", "reason"), REFUSED, ids=[r[1] for r in REFUSED])
def test_refused_with_the_reason(
    config: str, model: str, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = getattr(transformers, model)(getattr(transformers, config)(**{**TINY, **options})).train()
    before = built.config._attn_implementation
    monkeypatch.setattr("engine.manager.EngineCore", lambda *_: pytest.fail("something was allocated"))
    with pytest.raises(ValueError, match=reason) as refusal:
        ContinuousBatchingManager(built, None)
    assert model in str(refusal.value)
    assert built.config._attn_implementation == before
    assert built.training, "the model is left as it was"
    assert all(module.training for module in built.modules())


def test_a_model_without_a_head_or_without_weights_is_refused(m1: Any) -> None:
    config = copy.deepcopy(m1.config)
    config.pad_token_id = 0
    for kind in ("LlamaModel", "LlamaForSequenceClassification"):
        with pytest.raises(ValueError, match=f"{kind} has no language-model head"):
            generate_batch(getattr(transformers, kind)(config), [[1]], transformers.GenerationConfig(max_new_tokens=2))
    with pytest.raises(ValueError, match="LlamaModel has no generation_config; a transformers causal LM is needed"):
        generate_batch(transformers.LlamaModel(config), [[1]])
    with pytest.raises(ValueError, match="NoneType has no generation_config"):
        generate_batch(None, [[1]])
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no weights, it is on the meta device"):
        ContinuousBatchingManager(empty, None)


def test_heads_are_what_the_layers_say() -> None:
    """One KV head for all queries, which this family's config does not state as such."""
    config = transformers.GPTBigCodeConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    shape = ModelShape.of(transformers.GPTBigCodeForCausalLM(config).eval())
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 1, 8)
    assert shape.cache_layout(4).page_bytes == 2 * 1 * 8 * 4 * 4


def test_a_model_that_cannot_run_packed_sequences_is_refused_with_its_own_words(m1: Any) -> None:
    class Picky(type(m1)):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, past: Any = None) -> None:
            raise AssertionError

    with pytest.raises(ValueError, match=r"Picky cannot be run over packed sequences: TypeError: .*position_ids"):
        ModelShape.of(Picky(m1.config))


@pytest.fixture
def own(m1: Any) -> Any:
    """A model that a test may change."""
    return copy.deepcopy(m1)


@pytest.mark.parametrize(
    ("device_map", "named"),
    [
        ({"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}, "cpu, cuda:0, cuda:1"),
        ({"model.embed_tokens": "cuda:0", "model.layers": "disk"}, "cpu, cuda:0, disk"),
    ],
)
def test_a_model_on_several_devices_is_refused_naming_them(device_map: dict[str, Any], named: str, own: Any) -> None:
    """A-gb-04: by its map; these weights lie on the CPU, as accelerate leaves what it offloads."""
    own.hf_device_map = device_map
    with pytest.raises(ValueError, match=f"LlamaForCausalLM is spread over {named}; load it on one device"):
        ContinuousBatchingManager(own, None)
    own.hf_device_map = {"": "cpu"}
    assert ModelShape.of(own).device.type == "cpu"


def test_parameters_on_several_devices_are_refused_without_a_map(own: Any) -> None:
    own.lm_head.to("meta")
    with pytest.raises(ValueError, match="spread over cpu, meta"):
        ModelShape.of(own)


def test_a_sharded_model_is_refused(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-tp-01: tensor parallelism is not available, and said before anything is allocated."""
    monkeypatch.setattr("engine.manager.EngineCore", lambda *_: pytest.fail("something was allocated"))
    own._tp_size = 2
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is sharded over 2 processes \(tensor parallel\)"):
        ContinuousBatchingManager(own, None)
    own._tp_size = None

    class Shard(torch.Tensor):
        """Stands for a DTensor, which only a process group can make."""

        placements = ()

    assert hasattr(DTensor, "placements")
    shard = own.model.norm.weight.detach().as_subclass(Shard)
    own.model.norm.weight = torch.nn.Parameter(shard, requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is a DTensor"):
        ContinuousBatchingManager(own, None)
