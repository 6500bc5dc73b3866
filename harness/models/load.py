"""Load a model: find its source, build or read it in the target dtype on the device, and state its facts.

torch and transformers are imported inside the functions here and in the modules below: a command line that only reads
:class:`ModelSpec` starts without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.models.facts import chat_template_hash, config_hash, quantisation, tokenizer_hash, weight_hash
from harness.models.gguf import cache_root, dequantise_apart, dequantised_folder, gguf_config, gguf_tokenizer, read_gguf
from harness.models.sources import ModelSource, find_source, has_tokenizer_files
from harness.models.spec import LoadedModel, ModelFacts, ModelLoadError, ModelOutOfMemoryError, ModelSpec

if TYPE_CHECKING:
    import torch


def load_model(spec: ModelSpec, device: str | torch.device) -> LoadedModel:
    """Load the model that ``spec`` names onto ``device``, in eval mode and without gradients.

    Random weights are drawn directly on the device in the target dtype, so that an 8 B model needs no host copy; the
    caller's random state is left as it was. The same seed gives the same weights on one device type and dtype.

    Raises:
        ModelOutOfMemoryError: the weights do not fit on the device.
        ModelLoadError: anything else that stops it; one line.
    """
    import torch

    target = _usable_device(device)
    dtype = _dtype(spec.dtype, target)
    source = find_source(spec)
    try:
        with _no_progress_bars():
            build = _random_model if source.random else _real_model
            model, tokenizer = build(source, spec, target, dtype)
    except torch.OutOfMemoryError as error:
        raise ModelOutOfMemoryError(
            f"model {spec.name!r} in {_name(dtype)} does not fit on {target}: take a smaller model or dtype, or free "
            f"the device ({_first_line(error)})"
        ) from error
    except ModelLoadError:
        raise
    except Exception as error:  # a folder may hold anything: transformers answers with a dozen exception types
        raise ModelLoadError(
            f"model {spec.name!r} ({source.description}) cannot be loaded: {_first_line(error)}; check the folder, "
            "model.attn_implementation and model.dtype"
        ) from error
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=spec.name,
        vocab_size=int(model.config.get_text_config().vocab_size),
        facts=_facts(model, tokenizer, source, target),
    )


def outline_model(spec: ModelSpec) -> LoadedModel:
    """Configuration, tokenizer and facts of the model that ``spec`` names, without weights (its tensors are ``meta``).

    For engines that run the model elsewhere: the workload they get is the one an engine here would get.

    Raises:
        ModelLoadError: what stops it; one line.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = find_source(spec)
    try:
        if source.gguf is not None:
            config, tokenizer = gguf_config(source.gguf), gguf_tokenizer(source.gguf)
        else:
            config = AutoConfig.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
            tokenizer = _folder_tokenizer(source.folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=_dtype(spec.dtype, torch.device("cpu")))
    except Exception as error:  # a folder may hold anything: transformers answers with a dozen exception types
        raise ModelLoadError(
            f"model {spec.name!r} ({source.description}) cannot be read: {_first_line(error)}; check the folder"
        ) from error
    if not source.random and source.folder is not None and (source.folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(source.folder), local_files_only=True)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=spec.name,
        vocab_size=int(model.config.get_text_config().vocab_size),
        facts=_facts(model, tokenizer, source, None),
    )


def _random_model(
    source: ModelSource, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any | None]:
    from transformers import AutoConfig, AutoModelForCausalLM

    if source.gguf:
        config, tokenizer = gguf_config(source.gguf), gguf_tokenizer(source.gguf)
    else:
        config = AutoConfig.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
        tokenizer = _folder_tokenizer(source.folder)
    with _drawing_on(device, dtype, spec.seed):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=spec.attn_implementation)
    return model, tokenizer


def _real_model(
    source: ModelSource, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any | None]:
    from transformers import AutoModelForCausalLM

    folder = source.folder
    if source.gguf is not None:
        dequantise_apart(source.gguf, cache_root())
        folder = dequantised_folder(source.gguf, cache_root())
    if folder is None:
        assert source.gguf is not None  # for the type checker: a source without a folder is a file
        model, tokenizer = read_gguf(source.gguf)
        if spec.attn_implementation is not None:
            model.set_attn_implementation(spec.attn_implementation)
        return model.to(device=device, dtype=dtype), tokenizer
    model, found = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=dtype,
        attn_implementation=spec.attn_implementation,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if found["missing_keys"]:  # transformers only warns, and leaves them random
        absent = sorted(found["missing_keys"])
        raise ModelLoadError(
            f"model {spec.name!r} has no weights for {len(absent)} of its parameters ({absent[0]} …): the files are "
            "incomplete or of another architecture; get them again, or use model.load_format=dummy for random weights"
        )
    return model.to(device), _folder_tokenizer(folder)


def _folder_tokenizer(folder: Path | None) -> Any | None:
    if folder is None or not has_tokenizer_files(folder):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers' bars off for the while: the harness draws its own, and a log file wants none."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _drawing_on(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Tensors are created on ``device`` in ``dtype`` from ``seed``; defaults and random state are put back after."""
    import torch

    default = torch.get_default_dtype()
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _facts(model: Any, tokenizer: Any | None, source: ModelSource, device: torch.device | None) -> ModelFacts:
    """Of a model on ``device``; None: only its outline is here, its weights are not."""
    parameters = list(model.parameters())  # torch yields a tied parameter once
    hashed, covers = (None, "nothing: the weights are not in this process") if device is None else weight_hash(model)
    return ModelFacts(
        source=source.description,
        revision=source.revision,
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=None if device is None else sum(p.numel() * p.element_size() for p in parameters),
        dtype=None if device is None else " and ".join(sorted({_name(p.dtype) for p in parameters})),
        quantisation=quantisation(model.config),
        device=None if device is None else str(device),
        attn_implementation=None if device is None else model.config._attn_implementation,
        config_hash=config_hash(model.config),
        weight_hash=hashed,
        weight_hash_covers=covers,
        tokenizer_hash=tokenizer_hash(tokenizer),
        chat_template_hash=chat_template_hash(tokenizer),
    )


def _usable_device(device: str | torch.device) -> torch.device:
    import torch

    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelLoadError(f"device {device!r} is not known: use cpu, cuda or cuda:<index>") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device {str(device)!r} asked for, but torch finds no CUDA device here: use cpu")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if target.type == "cuda" and target.index >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device {str(device)!r} asked for, but there are only {torch.cuda.device_count()} CUDA devices"
        )
    return target


def _dtype(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:300]}" if lines else type(error).__name__
