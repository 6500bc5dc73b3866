"""Every config group and key with its type, default and a line of explanation, taken from where each is defined.

Keys and types come from the schemas, explanations from the ``Attributes:`` of their docstrings, options and what they
say from the YAML files of package ``sweeps``. ``cb-bench --help`` shows the short form, ``cb-bench --help KEY`` one
group or key, ``python -m harness.config_reference`` writes docs/configuration.md.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from harness.backends.generation import GenerationSettings
from harness.backends.http.settings import HttpSettings
from harness.backends.null import NullSettings
from harness.backends.vllm import VllmSettings
from harness.compose import CONFIG_MODULE
from harness.config import register
from harness.config_schemas import (
    BenchConfig,
    ContinuousEngineConfig,
    ExperimentConfig,
    ModelConfig,
    NullEngineConfig,
    OpenAiHttpEngineConfig,
    SloConfig,
    VllmEngineConfig,
)
from harness.models.spec import ModelSpec
from harness.slo import Slo
from workloads.arrivals import ARRIVALS
from workloads.config import MANDATORY
from workloads.names import did_you_mean, nearest

# Schemas that restate the settings of another class: the explanations stand there.
_EXPLAINED_BY: dict[type, type] = {
    ModelConfig: ModelSpec,
    SloConfig: Slo,
    OpenAiHttpEngineConfig: HttpSettings,
    NullEngineConfig: NullSettings,
    VllmEngineConfig: VllmSettings,
}
_ENGINE = ("engine", "config.py", "ContinuousBatchingConfig")  # read without importing: the engine needs torch
_WIDTH = 118
_NESTED = {"generation": GenerationSettings, "experiment": ExperimentConfig}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its name below its schema, type, default and explanation in words."""

    name: str
    type: str
    default: str
    explanation: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A set of keys and the options of its group that have them: (name, first sentence of its file)."""

    name: str
    says: str
    options: tuple[tuple[str, str], ...]
    keys: tuple[Key, ...]


def top_level() -> dict[str, str]:
    """The keys of the whole config with a line each."""
    return attributes(BenchConfig)


def groups() -> dict[str, tuple[Schema, ...]]:
    """By group, its schemas; ``generation`` and ``experiment`` are none in Hydra's sense but read alike."""
    found: dict[str, tuple[Schema, ...]] = {}
    for group in top_level():
        if group in _NESTED:
            options = tuple((name, _first_sentence(text)) for name, text in _options(group))
            found[group] = (_schema(_NESTED[group], group, options, {}),)
        elif stored := _stored(group):
            found[group] = tuple(_of_group(group, stored))
    return found


def _of_group(group: str, stored: Mapping[str, type]) -> Iterator[Schema]:
    texts = dict(_options(group))
    for name, cls in stored.items():
        options = {o: text for o, text in texts.items() if _base(o, texts) == name}
        if not options:  # what other schemas are made of
            continue
        stem = name.removesuffix("_schema")
        preset = OmegaConf.create(options.get(stem) or next(iter(options.values())))
        said = tuple((option, _first_sentence(text)) for option, text in options.items())
        yield _schema(cls, stem, said, OmegaConf.to_container(preset))  # type: ignore[arg-type]


def _schema(cls: type, name: str, options: tuple[tuple[str, str], ...], preset: Mapping[str, Any]) -> Schema:
    return Schema(name, _first_sentence(inspect.cleandoc(cls.__doc__ or "")), options, tuple(_keys(cls, "", preset)))


def _keys(cls: type, prefix: str, preset: Mapping[str, Any]) -> Iterator[Key]:
    explained = attributes(cls)
    types = get_type_hints(cls)
    for f in fields(cls):
        kind = types[f.name]
        default = _default(f, preset)
        nested = is_dataclass(kind)
        shown = "settings" if nested else re.sub(r"\b(typing|builtins)\.", "", _type_name(kind))
        yield Key(prefix + f.name, shown, "" if nested else default, explained.get(f.name, ""))
        if nested:
            yield from _keys(kind, f"{prefix}{f.name}.", {})


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


def _default(f: Field[Any], preset: Mapping[str, Any]) -> str:
    """What the key is where nobody sets it: of the schema, else of the option that stands for it."""
    value = f.default
    if value is MISSING and f.default_factory is not MISSING:
        value = f.default_factory()
    if value is MISSING or value == MANDATORY:
        value = preset.get(f.name, MANDATORY)
    if value == MANDATORY:
        return "must be given"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def attributes(cls: type) -> dict[str, str]:
    """Explanations of a schema's fields by name: the ``Attributes:`` of its docstring and of those it builds on."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= documented(base.__doc__ or "")
        if base is ContinuousEngineConfig:
            found |= documented(_engine_docstring())
        elif base in _EXPLAINED_BY:
            found |= documented(_EXPLAINED_BY[base].__doc__ or "")
    for kind, process in ARRIVALS.items():
        if cls.__name__ == f"{process.__name__}Config":  # workloads.config.arrival_schema makes it from the process
            found |= {"kind": f"the process, {kind}", **documented(process.__doc__ or "")}
    return found


def documented(docstring: str) -> dict[str, str]:
    """Name -> text of the section ``Attributes:``; several names with commas between share a text."""
    _, section, rest = inspect.cleandoc(docstring).partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines() if section else []:
        if line and not line.startswith(" "):
            break
        if head := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: text.replace("None", "null").replace("``", "`") for name, text in found.items()}


def _engine_docstring() -> str:
    package, file, name = _ENGINE
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None  # it is in this repository
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return ast.get_docstring(found) or ""


def _stored(group: str) -> dict[str, type]:
    """Schemas that :func:`harness.config.register` gives to Hydra."""
    register()
    nodes = ConfigStore.instance().repo.get(group, {})
    schemas = {name.removesuffix(".yaml"): node for name, node in nodes.items() if name.endswith("_schema.yaml")}
    classes = {name: OmegaConf.get_type(node.node) for name, node in schemas.items()}
    return {name: cls for name, cls in classes.items() if cls is not None}


def _options(group: str) -> list[tuple[str, str]]:
    """Options of a group with the text of their files."""
    folder = files(CONFIG_MODULE) / group
    if not folder.is_dir():
        return []
    found = [(p.name.removesuffix(".yaml"), p.read_text(encoding="utf-8")) for p in folder.iterdir()]
    return sorted((name, text) for name, text in found if not name.startswith("__"))


def _base(option: str, texts: Mapping[str, str]) -> str:
    """The schema that an option builds on, through the options in between."""
    while option in texts:
        option = str(OmegaConf.create(texts[option]).defaults[0])
    return option


def _first_sentence(text: str) -> str:
    """Of a docstring or a YAML file's comment; of an experiment its question."""
    if question := re.search(r"^# Question\s+(.*?)(?=\n# \w+  |\n#?\n|\n\w|\Z)", text, re.DOTALL | re.MULTILINE):
        return re.sub(r"\s*\n#\s*", " ", question[1]).strip()
    lines: list[str] = []
    for line in text.splitlines():
        if not line.strip("# ") or (lines and text.startswith("#") and not line.startswith("#")):
            break
        lines.append(line.lstrip("# ").strip())
    return re.split(r"(?<=[.?])\s+(?=[A-Z`])", " ".join(lines).replace("``", "`"))[0]


def overview() -> str:
    """The groups with their options, then every key of the whole config with its line."""
    said = top_level()
    lines = ["== Groups (GROUP=NAME; cb-bench --help GROUP says what each NAME is) =="]
    found = groups()
    for group, schemas in found.items():
        names = sorted(name for schema in schemas for name, _ in schema.options)
        lines.append(f"{group}: {said[group]}")
        lines += [f"    {', '.join(names)}"] if names else ["    no options, only keys"]
    lines += ["", "== Keys (KEY=VALUE; cb-bench --help KEY explains those below a group) =="]
    width = max(len(key) for key in said if key not in found)
    return "\n".join([*lines, *(f"{key:<{width}}  {text}" for key, text in said.items() if key not in found)])


def register_overview() -> None:
    """Make the overview known to the help text of the root config; Hydra's own list has the schemas too, which nobody
    can choose, and explains nothing."""
    OmegaConf.register_new_resolver("config_overview", overview, replace=True)


def about(asked: Sequence[str]) -> str:
    """What there is to know about groups and keys by name (``engine``, ``measure.repeats``).

    Raises:
        ValueError: a name that is neither; the message has the nearest one.
    """
    return "\n\n".join(_about(name) for name in asked)


def _about(name: str) -> str:
    said, found = top_level(), groups()
    if name in found:
        blocks = [f"{name}: {said[name]}"]
        above: set[tuple[str, str]] = set()
        for schema in found[name]:
            lines = [f"== {name}={option}  {text}" for option, text in schema.options] or [f"== {name}"]
            own = [key for key in schema.keys if (key.name, key.explanation) not in above]
            lines += _aligned(f"{name}.", own)
            if again := [key for key in schema.keys if key not in own]:
                shown = (key.name if key.default == "null" else f"{key.name} [{key.default}]" for key in again)
                lines += textwrap.wrap(
                    f"as above, null unless stated: {', '.join(shown)}",
                    _WIDTH,
                    initial_indent="  ",
                    subsequent_indent="  ",
                )
            above |= {(key.name, key.explanation) for key in own}
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)
    if name in said:
        return f"{name}  {said[name]}"
    entries: dict[str, dict[str, list[str]]] = {}  # by key, what is said of it in which schemas
    for group, schemas in found.items():
        for schema in schemas:
            for key in schema.keys:
                text = f"{key.explanation} {key.type}, default {key.default or 'below'}."
                entries.setdefault(f"{group}.{key.name}", {}).setdefault(text, []).append(schema.name)
    if name not in entries:
        hint = did_you_mean(nearest(name, [*said, *entries]))  # all keys are too many to list
        raise ValueError(f"unknown config key {name!r}.{hint} The groups: {', '.join(found)}.")
    several = len(found[name.partition(".")[0]]) > 1
    return "\n".join(
        f"{name} ({', '.join(schemas)})  {text}" if several else f"{name}  {text}"
        for text, schemas in entries[name].items()
    )


def _aligned(prefix: str, keys: Sequence[Key]) -> list[str]:
    width = max((len(prefix + key.name) for key in keys), default=0)
    return [
        f"  {prefix + key.name:<{width}}  {key.explanation}" + (f" [{key.default}]" if key.default else "")
        for key in keys
    ]


def markdown() -> str:
    """docs/configuration.md."""
    said, found = top_level(), groups()
    parts = [
        "# Configuration",
        "Made by `python -m harness.config_reference > docs/configuration.md` from the schemas and the files in "
        "[sweeps/](../sweeps/); a test holds them together. The same in a terminal: `cb-bench --help`, "
        "`cb-bench --help engine`, `cb-bench --help measure.repeats`. `GROUP=NAME` chooses an option, `KEY=VALUE` sets "
        "a key; null = the default of whoever reads it, recorded after the run in the table `config`.",
        "| key | what it is |\n|---|---|\n"
        + "\n".join(f"| {f'[`{k}`](#{k})' if k in found else f'`{k}`'} | {_cell(t)} |" for k, t in said.items()),
    ]
    for group, schemas in found.items():
        parts.append(f"## {group}\n{said[group][:1].upper()}{said[group][1:]}")
        for schema in schemas:
            if len(schemas) > 1:
                parts.append(f"### {group}: {schema.name}\n{schema.says}")
            if schema.options:
                rows = (f"| `{group}={option}` | {_cell(text)} |" for option, text in schema.options)
                parts.append("| option | what it is |\n|---|---|\n" + "\n".join(rows))
            rows = (
                f"| `{group}.{key.name}` | {_cell(key.type)} | {_cell(key.default)} | {_cell(key.explanation)} |"
                for key in schema.keys
            )
            parts.append("| key | type | default | what it is |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
