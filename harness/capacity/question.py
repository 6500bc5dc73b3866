"""Arguments of ``cb-plan`` and ``cb-tune``: result folders, own settings, and everything else by ``cb-bench``'s
configuration (``slo=chat``, ``slo.ttft_p95_ms=500``, ``workload=azure_2023 workload.path=…``, ``arrival=…``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from harness.compose import composing, load
from harness.config import plain
from harness.explain import explain
from harness.report.read import Results
from harness.simulate.source import measured_runs, nothing_to_fit, workload_of_run, workload_spec
from harness.slo import Slo, read_slo
from workloads import build_workload
from workloads.names import unknown
from workloads.workload import Workload

_GROUPS = ("slo", "workload", "arrival", "measure")


class QuestionError(ValueError):
    """Arguments that ask nothing that can be answered; one line."""


@dataclasses.dataclass(frozen=True)
class Question:
    """Parsed arguments.

    Attributes:
        folders: results to plan from.
        own: values of the command's own settings, by name.
        overrides: for the benchmark's configuration.
    """

    folders: tuple[Path, ...]
    own: Mapping[str, Any]
    overrides: tuple[str, ...]

    @property
    def names_workload(self) -> bool:
        return any(o.lstrip("+~").startswith("workload") for o in self.overrides)


def parse(arguments: Sequence[str], settings: type, hidden: Sequence[str] = ()) -> Question:
    """Split arguments into folders, settings of the dataclass ``settings`` (``hidden`` ones apart) and overrides.

    Raises:
        QuestionError: a name that is neither, or a value of another type.
    """
    types = {f.name: get_type_hints(settings)[f.name] for f in dataclasses.fields(settings) if f.name not in hidden}
    folders, own, overrides = [], {}, []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            folders.append(Path(argument))
        elif key in types:
            own[key] = _value(key, text, types[key])
        elif key.lstrip("+~").split(".")[0] in _GROUPS:
            overrides.append(argument)
        else:
            raise QuestionError(unknown("setting", key, [*types, *_GROUPS]))
    if not folders:
        raise QuestionError("name at least one result folder to plan from, for example results/sweeps/saturation/…")
    return Question(tuple(folders), own, tuple(overrides))


def _value(key: str, text: str, kind: Any) -> Any:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if text == "null" and type(None) in kinds:
        return None
    wanted = next(k for k in kinds if k is not type(None))
    if wanted is bool:
        if text in ("true", "false"):
            return text == "true"
        raise QuestionError(f"{key} must be true or false, got {text!r}")
    try:
        return wanted(text)
    except ValueError:
        raise QuestionError(f"{key} must be a number ({wanted.__name__}), got {text!r}") from None


def configuration(question: Question) -> dict[str, Any]:
    """The benchmark's configuration with the overrides.

    Raises:
        QuestionError: they do not compose.
    """
    try:
        with composing("cb-plan") as loader:
            return plain(load(loader, question.overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise QuestionError(explain(error, question.overrides)) from error


def slo_of(config: Mapping[str, Any]) -> Slo | None:
    """The SLO that was asked for; None if it limits nothing."""
    return read_slo(config["slo"])


def workload_asked(results: Results, question: Question, config: Mapping[str, Any]) -> tuple[Workload, str]:
    """The workload to plan for and where it comes from: named in the arguments, or that of the first measured run.

    Raises:
        QuestionError: no run can be simulated; ValueError: the workload cannot be built.
    """
    runs = measured_runs(results)
    if not runs:
        raise QuestionError(nothing_to_fit(results))
    if not question.names_workload:
        workload, remark = workload_of_run(results, runs[0])
        return workload, f"the workload of run {runs[0]}" + (f"; {remark}" if remark else "")
    spec = workload_spec(results, runs[0]) or {}
    workload = build_workload(
        config["workload"],
        config["arrival"],
        vocab_size=spec.get("vocab_size", 32_000),
        seed=config["measure"]["seed"],
        special_ids=spec.get("special_ids", ()),
    )
    return workload, "the workload that was asked for"
