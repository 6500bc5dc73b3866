"""What a model is called in titles and labels: a path by its last part."""

from __future__ import annotations

from collections.abc import Iterable


def model_labels(names: Iterable[str]) -> dict[str, str]:
    """Each of ``names`` as it is shown; paths that end alike stay whole."""
    short = {name: _last_part(name) for name in dict.fromkeys(map(str, names))}
    labels = list(short.values())
    return {name: label if labels.count(label) == 1 else name for name, label in short.items()}


def _last_part(name: str) -> str:
    """A preset and a hub id ``owner/name`` are no paths and stay as they are."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return name.rstrip("/").rpartition("/")[2] or name if is_path else name
