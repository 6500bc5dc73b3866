"""Types of command-line arguments that the measurements share."""

from __future__ import annotations


def integers(text: str) -> list[int]:
    """Integers separated by commas; ValueError (which argparse explains) for anything else."""
    return [int(part) for part in text.split(",")]
