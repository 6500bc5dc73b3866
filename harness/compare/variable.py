"""The settings that ``--variable`` declares, by the keys that the two result sets know."""

from __future__ import annotations

from collections.abc import Iterable

from workloads.names import did_you_mean, nearest


def declared_keys(given: str, known: Iterable[str]) -> str:
    """What ``given`` declares, as full config keys.

    Args:
        given: keys, groups (``engine``), or last parts of keys that only one key has; several with commas between.
        known: config keys of the settings of both sets.

    Returns:
        The keys with commas between, each once.

    Raises:
        ValueError: a name is no key of either set, or several keys end in it.
    """
    keys = sorted(set(known))
    names = [name.strip() for name in given.split(",")]
    return ",".join(dict.fromkeys(_key(name, keys) for name in names))


def _key(name: str, keys: list[str]) -> str:
    groups = {"engine", *(key.partition(".")[0] for key in keys)}
    # A setting that is itself a mapping is recorded whole: workload.prefix for workload.prefix.fraction.
    if name in groups or name in keys or any(name.startswith(f"{key}.") for key in keys):
        return name
    ending = [key for key in keys if name and key.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ValueError(f"--variable {name!r} could be any of {', '.join(ending)}: give the full key")
    by_name = {key: key for key in keys} if "." in name else {key.partition(".")[2]: key for key in keys}
    hint = did_you_mean(by_name[close] for close in nearest(name, by_name))
    raise ValueError(f"--variable {name!r} is no setting of A or B.{hint}")
