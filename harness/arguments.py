"""Arguments of ``cb-bench`` before Hydra sees them: overrides, flags, and what is commonly written instead of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Flags with which Hydra shows something instead of running, and those that take a value.
_SHOWING = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
_HELP = ("--help", "-h")
_MULTIRUN = ("-m", "--multirun")
# What other tools call these settings.
_SPELLINGS = {"--dry-run": "dry_run=true", "--resume": "resume=true"}


def as_hydra_reads(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command line in the words of Hydra's grammar."""
    return [quote_null(_SPELLINGS.get(a, a)) for a in arguments]


def quote_null(argument: str) -> str:
    """``engine=null`` means the engine of that name; unquoted, Hydra's grammar takes it for "no engine"."""
    key, equals, value = argument.partition("=")
    if key != "engine":
        return argument
    return key + equals + ",".join("'null'" if v == "null" else v for v in value.split(","))


def only_shows(arguments: Sequence[str]) -> bool:
    """Whether Hydra is asked to show something instead of running."""
    return any(a.split("=", 1)[0] in _SHOWING for a in arguments)


def asked_about(arguments: Sequence[str]) -> list[str]:
    """Groups and keys whose explanation is asked for: ``--help engine measure.repeats``."""
    if not any(a in _HELP for a in arguments):
        return []
    return [a for a in arguments if not a.startswith("-") and "=" not in a]


def asks_for_sweep(flags: Sequence[str]) -> bool:
    """Whether a flag says that it is a sweep."""
    return any(f in _MULTIRUN for f in flags)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments as (overrides, flags with their values)."""
    overrides, flags = [], []
    waiting = False
    for argument in arguments:
        if waiting or argument.startswith("-"):
            flags.append(argument)
            waiting = not waiting and argument in _WITH_VALUE
        else:
            overrides.append(argument)
    return overrides, flags


def refuse_mistaken(arguments: Sequence[str]) -> None:
    """Answer what newcomers try and what Hydra would answer by its own rules.

    Raises:
        ValueError: says what to write instead.
    """
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "model" and ("/" in value or value.endswith(".gguf")):
            raise ValueError(
                f"model= chooses a shipped preset; for a folder, a .gguf file or a hub id write model.name={value}"
            )


def own_configs(flags: Sequence[str]) -> list[str]:
    """The user's ``--config-dir`` as an override, because composing knows no flags.

    Raises:
        ValueError: a flag that would replace the configs of ``cb-bench``, or a folder that is none.
    """
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, _, value = flag.partition("=")
        if name in ("--config-name", "-cn", "--config-path", "-cp"):
            raise ValueError(f"{name} is not for cb-bench: put your files in a folder and name it with --config-dir")
        if name in ("--config-dir", "-cd"):
            folder = Path(value or following)
            if not folder.is_dir():
                raise ValueError(f"--config-dir {folder} is no folder")
            return [f"hydra.searchpath=['file://{folder.absolute()}']"]
    return []
