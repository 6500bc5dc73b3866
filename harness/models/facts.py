"""Hashes that identify a model: cheap enough for every run, and explicit about what they cover."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SAMPLED_ELEMENTS = 65_536
"""Elements of one tensor that enter the weight hash at most, evenly spaced over it."""

# Where a configuration was read from, by which version, and in which dtype it was loaded: not part of what it says.
_VOLATILE = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"})


def config_hash(config: Any) -> str:
    """SHA-256 of a transformers configuration's content."""
    content = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def quantisation(config: Any) -> str:
    """The ``quantization_config`` of a transformers configuration as JSON with sorted keys; "none" without one."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return "none"
    content = found if isinstance(found, dict) else found.to_dict()
    return json.dumps(content, sort_keys=True, default=str)


def weight_hash(model: torch.nn.Module) -> tuple[str, str]:
    """SHA-256 over the parameters as they are in memory, and in words what it covers.

    Name, shape and dtype of every parameter, and all its elements or, of a large one, every k-th (from the first) with
    the smallest k that leaves at most :data:`SAMPLED_ELEMENTS`. A change confined to elements in between goes unseen.
    """
    import torch

    digest = hashlib.sha256()
    total = covered = 0
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, -(-flat.numel() // SAMPLED_ELEMENTS))].contiguous()
            digest.update(json.dumps([name, list(parameter.shape), str(parameter.dtype)]).encode())
            digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
            total += flat.numel()
            covered += sample.numel()
    covers = f"names, shapes, dtypes and {covered} of {total} elements, evenly spaced in each parameter"
    return digest.hexdigest(), covers


def tokenizer_hash(tokenizer: Any | None) -> str | None:
    """SHA-256 of what turns text into ids and back; None without a tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have none: their vocabulary must do
    content = [
        None if backend is None else json.loads(backend.to_str()),
        sorted(tokenizer.get_vocab().items()),
        tokenizer.special_tokens_map,
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def chat_template_hash(tokenizer: Any | None) -> str | None:
    """SHA-256 of the chat template (or of all named ones); None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
