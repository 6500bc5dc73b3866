"""Which of a step's two paths torch.compile is to compile, and how: levels, explicit configs, and what they may be.

A config is transformers' CompileConfig (``fullgraph``, ``dynamic``, ``backend``, ``mode``, ``options``); ``mode`` and
``options`` are the default backend's, Inductor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers.generation import CompileConfig

LEVELS: dict[int, tuple[str, bool]] = {
    1: ("default", True),
    2: ("max-autotune-no-cudagraphs", True),
    3: ("max-autotune-no-cudagraphs", False),
}
"""``mode`` and ``dynamic`` of each level above 0, as in transformers 5.24."""


@dataclass(frozen=True, slots=True)
class PathChoice:
    """Config of a path, None if it is not compiled, and where it comes from."""

    config: CompileConfig | None
    source: str


def choose_compilation(
    level: int, varlen: Any, decode: Any, fallback: Any, flash: bool, decode_path: bool
) -> tuple[PathChoice, PathChoice]:
    """What compiles the varlen path and the decode path.

    Args:
        level: ``default_compile_level``, which fills paths without an explicit config.
        varlen, decode: explicit configs.
        fallback: the GenerationConfig's ``compile_config``, which comes after the level.
        flash: whether attention runs on flash-attn; the level leaves the varlen path alone there.
        decode_path: whether steps of decode rows are a path of their own; if not, they take the varlen path.
    """
    if varlen is not None:
        chosen_varlen = PathChoice(varlen, "user")
    elif level and flash:
        chosen_varlen = PathChoice(None, f"derived: default_compile_level={level} compiles decode only under flash")
    else:
        chosen_varlen = _default(level, fallback)
    if decode_path:
        return chosen_varlen, PathChoice(decode, "user") if decode is not None else _default(level, fallback)
    return chosen_varlen, PathChoice(None, "derived: there is no decode path, every step is a varlen step")


def _default(level: int, fallback: Any) -> PathChoice:
    if level:
        mode, dynamic = LEVELS[level]
        config = CompileConfig(mode=mode, fullgraph=False, dynamic=dynamic)
        return PathChoice(config, f"derived: default_compile_level={level}")
    if fallback is not None:
        return PathChoice(fallback, "derived: compile_config of the generation config")
    return PathChoice(None, "default")


def compile_config(name: str, value: Any) -> CompileConfig | None:
    """A private copy of a config that torch.compile will take.

    Args:
        name: of the setting, for the error.
        value: a CompileConfig, a mapping of its fields, or None.

    Raises:
        ValueError: a field or value that torch.compile does not know.
    """
    if value is None:
        return None
    known = [f.name for f in fields(CompileConfig)]
    if isinstance(value, Mapping):
        if unknown := sorted(set(value) - set(known)):
            raise ValueError(f"{name} has no field {unknown[0]!r}; its fields are {', '.join(known)}")
        value = CompileConfig(**value)
    if not isinstance(value, CompileConfig):
        raise ValueError(f"{name} must be a transformers CompileConfig, a mapping of its fields or None, got {value!r}")
    if not isinstance(value.fullgraph, bool):
        raise ValueError(f"{name}.fullgraph must be True or False, got {value.fullgraph!r}")
    if value.dynamic is not None and not isinstance(value.dynamic, bool):
        raise ValueError(f"{name}.dynamic must be True, False or None, got {value.dynamic!r}")
    if not callable(value.backend) and value.backend not in (backends := torch._dynamo.list_backends(())):
        raise ValueError(f"{name}.backend must be a callable or one of {', '.join(backends)}, got {value.backend!r}")
    if value.options is not None and not isinstance(value.options, Mapping):
        raise ValueError(f"{name}.options must be a mapping or None, got {value.options!r}")
    if value.backend == "inductor":
        _check_inductor(name, value)
    return replace(value, options=None if value.options is None else dict(value.options))


def _check_inductor(name: str, config: CompileConfig) -> None:
    from torch._inductor import config as inductor
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if config.mode is not None and config.mode not in list(modes):
        raise ValueError(f"{name}.mode must be one of {', '.join(modes)} or None, got {config.mode!r}")
    if config.options is None:
        return
    if config.mode is not None:
        raise ValueError(
            f"{name} sets options beside mode={config.mode!r}; torch.compile takes one of them: set mode=None"
        )
    known = inductor.get_config_copy()
    for option in config.options:
        if option.replace("-", "_") not in known:
            raise ValueError(f"{name}.options has {option!r}, which Inductor does not know")


def refuse_own_graphs(name: str, config: CompileConfig) -> None:
    """Refuse a config that lets torch.compile record CUDA graphs: they would be recorded around one step's block
    tables, and only in the thread that compiled.

    Raises:
        ValueError: naming the settings that do the same.
    """
    from torch._inductor import list_mode_options

    stated = config.options if config.mode is None else list_mode_options().get(config.mode)
    if config.backend == "cudagraphs" or (config.backend == "inductor" and (stated or {}).get("triton.cudagraphs")):
        what = f"backend={config.backend!r}, mode={config.mode!r}, options={config.options!r}"
        raise ValueError(
            f"{name} ({what}) records CUDA graphs of its own, which cannot follow the engine's steps; use "
            "mode='default' or 'max-autotune-no-cudagraphs', and use_cuda_graph for graphs of whole steps"
        )
