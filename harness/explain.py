"""What was wrong with a command line, in one line with the nearest right name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.arguments import own_configs, quote_null, split_arguments
from harness.compose import composing, first_value, load, parse
from harness.config import group_options
from harness.config_errors import explain_config_error
from harness.errors import one_line
from harness.expand import dotted_keys


def explain(error: BaseException, arguments: Sequence[str]) -> str:
    """One line for what composing ``arguments`` raised."""
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):
        return one_line(error)
    with composing() as loader:
        options = group_options(loader)
        line = explain_config_error(error, options, _chosen_keys(loader, arguments, tuple(options)))
        return _name_owners(loader, line, options)


def _name_owners(loader: ConfigLoader, line: str, options: Mapping[str, Sequence[str]]) -> str:
    """``line``; if it is about a key that other choices of its group have, it names those choices."""
    found = re.fullmatch(r"unknown config key '(\w+)\.(\w+)'\..*", line)
    if found is None or found[1] not in options:
        return line
    group, name = found[1], found[2]
    owners = []
    for option in options[group]:
        try:
            config = load(loader, [quote_null(f"{group}={option}")])
        except (HydraException, OmegaConfBaseException):  # one that needs more than its name
            continue
        if OmegaConf.is_config(config[group]) and name in config[group]:
            owners.append(f"{group}={option}")
    if not owners:
        return line
    # A near name in the same group may be what was meant; one elsewhere is not.
    head = line if f"'{group}." in line.partition("Did you mean")[2] else f"unknown config key '{group}.{name}'."
    return f"{head} The chosen {group} has no {name}; add {' or '.join(owners[:4])}."


def _chosen_keys(loader: ConfigLoader, arguments: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Keys of the config with the groups that ``arguments`` choose; of the default one if that is what is wrong."""
    overrides, flags = split_arguments(arguments)
    try:
        chosen = [t for t in overrides if t.split("=", 1)[0].split("@")[0].lstrip("+~") in groups]
        config = load(loader, [*(first_value(o) for o in parse(loader, chosen)), *own_configs(flags)])
    except (HydraException, OmegaConfBaseException, ValueError):
        config = load(loader, [])
    return dotted_keys(OmegaConf.to_container(config, resolve=False))
