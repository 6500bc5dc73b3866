"""From a name to the files behind it.

The rule, in order: a preset's name; ``smollm2``; a path (it exists, or it is written like one) to a folder or a
``.gguf`` file; a hub id ``owner/name``. Anything else is a mistake and is answered with the nearest known names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.models.gguf import demo_gguf
from harness.models.presets import DEMO_MODEL, nearest_names, preset_folder, preset_hub_id, preset_names
from harness.models.spec import ModelLoadError, ModelSpec
from workloads.names import did_you_mean

# Everything a causal LM needs; not the second copy of the weights that some repositories carry for other programs.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_HUB_IGNORED = ("original/*", "consolidated*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelSource:
    """Files of one model: ``folder`` in transformers' layout, or a single ``gguf`` file; exactly one is set.

    Attributes:
        random: weights are drawn, not read.
        description: for the facts and for messages.
        revision: commit of a hub snapshot.
    """

    description: str
    random: bool
    folder: Path | None = None
    gguf: Path | None = None
    revision: str | None = None


def find_source(spec: ModelSpec) -> ModelSource:
    """Resolve ``spec.name``; downloads from the hub only for a hub id (or a preset's) whose weights are asked for.

    Raises:
        ModelLoadError: nothing of that name, with the nearest names; or the hub cannot deliver it.
    """
    source = _by_name(spec)
    if spec.revision is not None and source.revision is None:
        raise ModelLoadError(
            f"model.revision={spec.revision!r} has no meaning for {source.description}: it selects a version "
            "of a hub id; leave it unset"
        )
    return source


def check_source(spec: ModelSpec) -> None:
    """Refuse a name behind which there is nothing, without asking the hub: what it has is known when it is asked.

    Raises:
        ModelLoadError: as :func:`find_source`.
    """
    if _hub_id(spec) is None:
        find_source(spec)


def may_have_tokenizer(spec: ModelSpec) -> bool:
    """False where it is known, without asking the hub, that the model comes without a tokenizer.

    Raises:
        ModelLoadError: as :func:`find_source`.
    """
    if _hub_id(spec) is not None:
        return True
    folder = find_source(spec).folder
    return folder is None or has_tokenizer_files(folder)


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a model's folder holds a tokenizer in one of the forms that transformers reads."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _hub_id(spec: ModelSpec) -> str | None:
    """The hub id that ``spec`` leads to; None if it is a local source or a mistake."""
    if preset_folder(spec.name) is not None:
        return None if spec.load_format == "dummy" else preset_hub_id(spec.name)
    is_local = spec.name == DEMO_MODEL or _is_path(spec.name)
    return spec.name if not is_local and spec.name.count("/") == 1 else None


def _is_path(name: str) -> bool:
    path = Path(name).expanduser()
    return path.exists() or name.startswith((".", "/", "~")) or path.suffix == ".gguf"


def _by_name(spec: ModelSpec) -> ModelSource:
    hub_id = _hub_id(spec)
    if hub_id is not None:
        return _from_hub(hub_id, spec)
    preset = preset_folder(spec.name)
    if preset is not None:
        return ModelSource(f"preset {spec.name}, random weights, seed {spec.seed}", random=True, folder=preset)
    if spec.name == DEMO_MODEL:
        return _local(demo_gguf(), spec)
    if _is_path(spec.name):
        return _local(Path(spec.name).expanduser(), spec)
    near = nearest_names(spec.name)
    hint = did_you_mean(near) or f" Presets: {', '.join((*preset_names(), DEMO_MODEL))}."
    raise ModelLoadError(
        f"no model {spec.name!r}.{hint} Otherwise give a local folder, a .gguf file or a hub id owner/name"
    )


def _local(path: Path, spec: ModelSpec) -> ModelSource:
    random = spec.load_format == "dummy"
    weights = f", random weights, seed {spec.seed}" if random else ""
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(f"gguf file {path.name}{weights}", random, gguf=path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"model.name={spec.name!r} is a folder without a config.json: give one written by save_pretrained, "
                "or the path of a .gguf file"
            )
        return ModelSource(f"folder {os.path.basename(path.resolve())}{weights}", random, folder=path.resolve())
    reason = "is a file, but not a .gguf one" if path.is_file() else "does not exist"
    raise ModelLoadError(
        f"model.name={spec.name!r} {reason}: give a folder with config.json, a .gguf file, a hub id owner/name or a "
        f"preset ({', '.join((*preset_names(), DEMO_MODEL))})"
    )


def _from_hub(hub_id: str, spec: ModelSpec) -> ModelSource:
    import huggingface_hub

    random = spec.load_format == "dummy"
    patterns = [p for p in _HUB_FILES if not (random and p == "*.safetensors")]
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=spec.revision, allow_patterns=patterns, ignore_patterns=list(_HUB_IGNORED)
            )
        )
    except Exception as error:  # not found, gated, offline, full disk: the client raises a dozen unrelated types
        preset = spec.name if preset_hub_id(spec.name) else next(iter(nearest_names(hub_id)), None)
        shape = (
            f"; for random weights of the same shape use model.name={preset} model.load_format=dummy" if preset else ""
        )
        raise ModelLoadError(
            f"cannot get {hub_id!r} from the hub ({type(error).__name__}): check the name, the network, and HF_TOKEN "
            f"for a gated model, or give a local folder{shape}"
        ) from error
    weights = f", random weights, seed {spec.seed}" if random else ""
    return ModelSource(f"hub {hub_id}{weights}", random, folder=folder, revision=folder.name)
