"""Choices of the autotuner on disk, so that only the first start on a machine measures.

One small file a problem, named by a hash of its key and written whole or not at all: processes that tune at the same
time may measure the same problem twice, but never read half a file or lose each other's choices.

``ENGINE_CACHE_DIR`` moves the folder (by default ``$XDG_CACHE_HOME/cb-bench``, or ``~/.cache/cb-bench``); set to
nothing it turns the cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from engine.kernels.autotune import Choice

logger = logging.getLogger(__name__)

Key = Mapping[str, str | int | bool]
"""Everything a choice depends on: the problem, the device, the versions of the libraries that offer candidates."""


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where choices are kept; None = nowhere.

    Args:
        environ: environment variables.
    """
    given = environ.get("ENGINE_CACHE_DIR")
    if given is not None:
        return Path(given).expanduser() / "tuning" if given else None
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cb-bench" / "tuning"


class ChoiceCache:
    """Choices by key.

    Args:
        folder: where they are kept, made when needed; None = nothing is found and nothing stored.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: Key) -> Choice | None:
        """The choice stored for exactly this key; None if there is none, or its file cannot be read."""
        if self._folder is None:
            return None
        path = self._path(key)
        try:
            stored = json.loads(path.read_text())
            if stored["key"] != dict(key):
                return None
            choice = Choice(**stored["choice"])
            return choice if isinstance(choice.candidate, str) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("a stored choice cannot be read and is measured anew: %s (%s)", path, error)
            return None

    def store(self, key: Key, choice: Choice) -> None:
        """Keep a choice. A folder that cannot be written to is said once; the choice then lives as long as the
        process."""
        if self._folder is None:
            return
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump({"key": dict(key), "choice": asdict(choice)}, file, indent=1)
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.warning("tuned choices are not kept, every start will measure: %s", error)
            self._folder = None

    def _path(self, key: Key) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"
