"""What can be asked for, what comes back and how a refusal looks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class ModelLoadError(ValueError):
    """A model that cannot be loaded; the message is one line: what was asked, why it failed, what to do."""


class ModelOutOfMemoryError(ModelLoadError):
    """The weights did not fit into the device's memory."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model, with which weights, in which precision. Plain types only: also a Hydra schema.

    Attributes:
        name: preset, ``smollm2``, local folder, ``.gguf`` file or hub id ``owner/name``.
        load_format: ``auto`` = the real weights (the ``tiny-*`` presets are random by definition); ``dummy`` = random
            weights of the same shape, drawn on the device in the target dtype, nothing read from disk.
        dtype: ``auto`` = bfloat16 on CUDA, float32 elsewhere; or float32, bfloat16, float16.
        attn_implementation: passed to transformers; None = its default for the model.
        revision: branch, tag or commit of a hub id; None = the default branch.
        seed: of random weights; real weights ignore it.
    """

    name: str = "smollm2"
    load_format: str = "auto"
    dtype: str = "auto"
    attn_implementation: str | None = None
    revision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ModelLoadError("model.name is empty: give a preset, a local folder or a hub id")
        for field, value, allowed in (
            ("load_format", self.load_format, LOAD_FORMATS),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise ModelLoadError(f"model.{field}={value!r} is not known: use one of {', '.join(allowed)}")


@dataclass(frozen=True)
class ModelFacts:
    """What identifies a loaded model, for the environment table. Hashes are SHA-256 in hex; None = there is none,
    or the weights are not in this process.

    Attributes:
        source: where configuration and weights came from, in words.
        revision: commit of the hub snapshot.
        parameters: number of parameters, shared (tied) ones once.
        weight_bytes: bytes of those parameters.
        dtype: dtype of the parameters.
        quantisation: the configuration's ``quantization_config`` as JSON; "none" where it has none, as weights
            that were read from GGUF have: they are dequantised.
        device: device of the parameters.
        attn_implementation: the one transformers resolved to.
        config_hash: over the configuration without paths, versions and dtype.
        weight_hash: over the weights as loaded; which part of them is said in ``weight_hash_covers``.
        tokenizer_hash: over vocabulary, merges, normaliser and special tokens.
        chat_template_hash: over the chat template's text.
    """

    source: str
    revision: str | None
    parameters: int
    weight_bytes: int | None
    dtype: str | None
    quantisation: str
    device: str | None
    attn_implementation: str | None
    config_hash: str
    weight_hash: str | None
    weight_hash_covers: str
    tokenizer_hash: str | None
    chat_template_hash: str | None

    def as_dict(self) -> dict[str, Any]:
        """Field name to value, all of them JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: in eval mode, without gradients, on its device.

    Attributes:
        model: a transformers causal language model.
        tokenizer: its tokenizer; None where the source has none (presets with random weights).
        name: as asked for.
        vocab_size: rows of the embedding: valid token ids are ``0 <= id < vocab_size``.
    """

    model: Any
    tokenizer: Any | None
    name: str
    vocab_size: int
    facts: ModelFacts
