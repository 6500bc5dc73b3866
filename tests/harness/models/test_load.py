"""Loading: dtype and seed rules, facts, and one-line refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError
from safetensors.torch import load_file, save_file

from harness.models import ModelLoadError, ModelOutOfMemoryError, ModelSpec, load_model, outline_model
from harness.models import load as load_module
from harness.models.facts import SAMPLED_ELEMENTS, weight_hash


def refusal(spec: ModelSpec, device: str = "cpu") -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(spec, device)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_specification_needs_no_torch() -> None:
    code = "import sys, harness.models; sys.exit(sum(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_spec_is_a_hydra_schema() -> None:
    schema = OmegaConf.structured(ModelSpec)
    spec = OmegaConf.to_object(OmegaConf.merge(schema, {"name": "tiny-llama", "attn_implementation": "eager"}))
    assert spec == ModelSpec("tiny-llama", attn_implementation="eager")
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(schema, {"nmae": "tiny-llama"})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("load_format", "dumy", "dummy"), ("dtype", "fp32", "float32"), ("name", "", "preset")],
)
def test_spec_refuses_unknown_values(field: str, value: str, allowed: str) -> None:
    with pytest.raises(ModelLoadError, match=allowed):
        ModelSpec(**{field: value})


def test_seed_decides_random_weights_and_nothing_else_is_touched() -> None:
    torch.manual_seed(7)
    expected_next = torch.rand(3)
    torch.manual_seed(7)
    first = load_model(ModelSpec("tiny-llama", seed=1), "cpu")
    assert torch.equal(torch.rand(3), expected_next), "the caller's random state moved"
    assert torch.get_default_dtype() == torch.float32
    again = load_model(ModelSpec("tiny-llama", seed=1), "cpu")
    other = load_model(ModelSpec("tiny-llama", seed=2), "cpu")
    assert first.facts.weight_hash == again.facts.weight_hash
    assert first.facts.weight_hash != other.facts.weight_hash
    assert first.facts.config_hash == other.facts.config_hash


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_dtype(dtype: str, expected: torch.dtype) -> None:
    loaded = load_model(ModelSpec("tiny-qwen3", dtype=dtype), "cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {expected}
    assert loaded.facts.dtype == str(expected).removeprefix("torch.")
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32, "RoPE must not be rounded"


def test_facts_counted_by_hand() -> None:
    loaded = load_model(ModelSpec("tiny-llama", attn_implementation="eager"), "cpu")
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32
    layer = attention + 3 * 64 * 32 + 2 * 32
    parameters = 2 * 97 * 32 + 2 * layer + 32
    assert loaded.facts.parameters == parameters
    assert loaded.facts.weight_bytes == 4 * parameters
    assert loaded.facts.attn_implementation == "eager"
    assert loaded.facts.tokenizer_hash is None
    assert loaded.facts.chat_template_hash is None
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.facts.as_dict()["parameters"] == parameters


def test_weight_hash_says_what_it_covers() -> None:
    layer = torch.nn.Linear(SAMPLED_ELEMENTS, 3, bias=False)
    before, covers = weight_hash(layer)
    assert covers.startswith(f"names, shapes, dtypes and {SAMPLED_ELEMENTS} of {3 * SAMPLED_ELEMENTS} elements")
    with torch.no_grad():
        layer.weight.view(-1)[1] += 1.0
    assert weight_hash(layer)[0] == before, "index 1 is not sampled: every third is"
    with torch.no_grad():
        layer.weight.view(-1)[3] += 1.0
    assert weight_hash(layer)[0] != before


def test_local_folder_round_trip(tmp_path: Path) -> None:
    made = load_model(ModelSpec("tiny-mistral", seed=5), "cpu")
    made.model.save_pretrained(tmp_path)
    read = load_model(ModelSpec(str(tmp_path)), "cpu")
    assert read.facts.weight_hash == made.facts.weight_hash
    assert read.facts.config_hash == made.facts.config_hash
    assert str(tmp_path) not in read.facts.source
    random = load_model(ModelSpec(str(tmp_path), load_format="dummy", seed=6), "cpu")
    assert random.facts.weight_hash != made.facts.weight_hash


def test_incomplete_weights_are_refused_not_drawn(tmp_path: Path) -> None:
    load_model(ModelSpec("tiny-llama"), "cpu").model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    message = refusal(ModelSpec(str(tmp_path)))
    assert "model.layers.1.mlp.up_proj.weight" in message
    assert "dummy" in message


def test_wrong_names() -> None:
    assert "Did you mean 'qwen3-4b'" in refusal(ModelSpec("qwen3-4"))
    assert "tiny-llama" in refusal(ModelSpec("zzzzzz"))
    assert "does not exist" in refusal(ModelSpec("./nowhere"))
    assert "does not exist" in refusal(ModelSpec("nowhere.gguf"))
    assert "device 'gpu' is not known" in refusal(ModelSpec("tiny-llama"), "gpu")
    assert "revision" in refusal(ModelSpec("tiny-llama", revision="main"))


def test_unusable_folders(tmp_path: Path) -> None:
    assert "without a config.json" in refusal(ModelSpec(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    assert "no-such-architecture" in refusal(ModelSpec(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be loaded" in refusal(ModelSpec(str(tmp_path)))
    assert "not a .gguf" in refusal(ModelSpec(str(tmp_path / "config.json")))


def test_unknown_attention_is_named() -> None:
    assert "no_such_attention" in refusal(ModelSpec("tiny-llama", attn_implementation="no_such_attention"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device() -> None:
    assert "no CUDA device" in refusal(ModelSpec("tiny-llama"), "cuda")


def test_preset_with_real_weights_goes_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(repo_id: str, *, revision: str | None, **_: object) -> str:
        asked.append((repo_id, revision))
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "model.name=qwen3-4b model.load_format=dummy" in refusal(ModelSpec("qwen3-4b"))
    assert "'Qwen/Qwen3-4B'" in refusal(ModelSpec("Qwen/Qwen3-4B", revision="abc"))
    assert asked == [("Qwen/Qwen3-4B", None), ("Qwen/Qwen3-4B", "abc")]

    snapshot = tmp_path / "0123abcd"
    load_model(ModelSpec("tiny-llama"), "cpu").model.save_pretrained(snapshot)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **_: os.fspath(snapshot))
    assert load_model(ModelSpec("owner/model", revision="v1"), "cpu").facts.revision == "0123abcd"


def test_out_of_memory_has_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB.")

    monkeypatch.setattr(load_module, "_random_model", full)
    with pytest.raises(ModelOutOfMemoryError, match="does not fit on cpu"):
        load_model(ModelSpec("tiny-llama"), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dummy_is_drawn_on_the_gpu_in_bfloat16() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_model(ModelSpec("qwen3-0.6b", load_format="dummy"), "cuda")
    assert loaded.facts.dtype == "bfloat16"
    assert {p.device.type for p in loaded.model.parameters()} == {"cuda"}
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.5 * loaded.facts.weight_bytes, "a second copy of the weights was made"


def test_an_outline_has_the_models_facts_and_no_weights() -> None:
    """Same configuration, vocabulary and parameter count as loaded, so the same workload; nothing is allocated."""
    outline, loaded = outline_model(ModelSpec("tiny-llama")), load_model(ModelSpec("tiny-llama"), "cpu")
    assert {p.device.type for p in outline.model.parameters()} == {"meta"}
    assert outline.vocab_size == loaded.vocab_size
    for fact in ("parameters", "config_hash", "tokenizer_hash", "source"):
        assert getattr(outline.facts, fact) == getattr(loaded.facts, fact)
    for fact in ("weight_bytes", "weight_hash", "dtype", "device", "attn_implementation"):
        assert getattr(outline.facts, fact) is None
    with pytest.raises(ModelLoadError, match="nowhere"):
        outline_model(ModelSpec("./nowhere"))


def test_quantisation_comes_from_the_configuration() -> None:
    """M-fix-03."""
    from types import SimpleNamespace

    from harness.models.facts import quantisation

    assert quantisation(SimpleNamespace()) == "none"
    stated = {"quant_method": "gptq", "bits": 4}
    assert quantisation(SimpleNamespace(quantization_config=stated)) == '{"bits": 4, "quant_method": "gptq"}'
    typed = SimpleNamespace(to_dict=lambda: stated)
    assert quantisation(SimpleNamespace(quantization_config=typed)) == quantisation(
        SimpleNamespace(quantization_config=stated)
    )
