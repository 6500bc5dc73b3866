"""Errors of composing a config as one line that says what was wrong and what to do.

Hydra and OmegaConf report a wrong name in several lines and without the names that would have been right. Here their
exceptions become one line each; ``HYDRA_FULL_ERROR=1`` shows the whole story.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from workloads.names import did_you_mean, nearest, unknown


def explain_config_error(error: BaseException, options: dict[str, list[str]], keys: Sequence[str]) -> str:
    """One line for an exception of Hydra or OmegaConf.

    Args:
        error: what composing the config raised.
        options: config groups and the names each offers.
        keys: every dotted key of the default config.
    """
    cause = _root_cause(error)
    if isinstance(cause, MissingConfigException):
        return _missing_option(cause, options)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown_key(cause.full_key or str(cause.key), keys)
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key} has no value: set {cause.full_key}=…"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"bad value for {cause.full_key}: {str(cause).splitlines()[0]}"
    if isinstance(error, OverrideParseException):
        first = str(error).splitlines()[0]
        return f"cannot read the override {error.override!r}: {first}; write KEY=VALUE (quote values with commas)"
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'.*?No match in the defaults list", text, re.DOTALL):
        return unknown("config group", match[1], list(options))
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match[1], keys)
    return " ".join(text.split())


def _root_cause(error: BaseException) -> BaseException:
    while (inner := error.__cause__) is not None and isinstance(
        inner, ConfigCompositionException | MissingConfigException | OmegaConfBaseException
    ):
        error = inner
    return error


_PLUGINS = {
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/launcher/ray": "hydra-ray-launcher",
}
"""Hydra's own plugins that the documentation names, by the choice that needs them: packages on PyPI."""


def _missing_option(error: MissingConfigException, options: dict[str, list[str]]) -> str:
    missing = error.missing_cfg_file or ""
    group, _, name = missing.rpartition("/")
    if missing in _PLUGINS:
        return f"{group}={name} needs a package that is not installed: pip install {_PLUGINS[missing]}"
    known = options.get(group) or list(error.options or ())
    if not known:
        return unknown("config group", group or missing, list(options))
    return unknown(group, name, known)


def unknown_key(key: str, keys: Sequence[str]) -> str:
    """One line for a config key that does not exist, with the nearest that does."""
    if key in keys:
        return f"unknown config key {key!r}: only some of the choices of this sweep have it."
    guess = nearest(key, keys)
    if not guess:  # a right last part under a wrong parent, or the other way round
        leaf = key.rpartition(".")[2]
        guess = tuple(k for k in keys if k.rpartition(".")[2] == leaf)[:1]
    hint = did_you_mean(guess) or " 'cb-bench --cfg job' shows all keys."
    return f"unknown config key {key!r}.{hint}"
