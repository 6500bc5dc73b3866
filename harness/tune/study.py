"""The search on the simulator: an Optuna study in SQLite that goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capacity.search import TOLERANCE, Capacity, NothingMeets
from harness.simulate import EngineSetup
from harness.tune.space import Variable, changes, memory
from workloads.streams import stream

if TYPE_CHECKING:
    import optuna

FILE = "study.db"
_STUBBORN = 5  # suggestions in a row that were tried before, until something else is put to the sampler
NEEDED = 'cb-tune needs Optuna: pip install "cb-bench[tune]"'


class TuneError(ValueError):
    """A study that cannot be begun or continued; one line."""


def open_study(directory: Path, question: Mapping[str, Any], seed: int) -> optuna.Study:
    """The study of ``directory``, new or continued.

    Raises:
        TuneError: Optuna is missing, or the study there answers another question.
    """
    try:
        import optuna
    except ImportError as error:
        raise TuneError(NEEDED) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directory.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="cb-tune",
        storage=f"sqlite:///{(directory / FILE).absolute()}",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=8),
        direction="maximize",
        load_if_exists=True,
    )
    asked = json.dumps(question, sort_keys=True, default=str)
    known = study.user_attrs.get("question")
    if known is not None and known != asked:
        raise TuneError(
            f"{directory / FILE} holds a study of another question ({known}); name another folder with out=DIR"
        )
    study.set_user_attr("question", asked)
    return study


def search_settings(
    study: optuna.Study,
    space: Sequence[Variable],
    base: Mapping[str, Any],
    setup: EngineSetup,
    capacity_of: Callable[[EngineSetup], Capacity],
    trials: int,
    report: Callable[[int, Mapping[str, Any], float], None],
    seed: int = 0,
) -> None:
    """Search until ``trials`` different engines were tried, or all there are. The baseline is the first.

    The value of a trial is its capacity under the SLO: the constraint is inside it, and settings that no rate satisfies
    have the value 0. Settings that make an engine that was tried before (places beyond the tokens of a step make none
    of their own) are not simulated again and do not count; a sampler that insists on them is given others.

    Args:
        report: told the number, settings and value of each trial that was simulated.
        seed: of the order in which others are given.
    """
    import optuna

    known = engines_tried(study, space, setup)
    left = [dict(zip([v.name for v in space], values, strict=True)) for values in product(*(v.values for v in space))]
    stream(seed, "tune").shuffle(left)
    if not known:  # also where a killed run left the baseline's trial without a value
        study.enqueue_trial(dict(base))
    stubborn = 0
    while len(known) < trials:
        if stubborn == _STUBBORN:
            left = [settings for settings in left if _engine(setup, settings) not in known]
            if not left:
                return
            study.enqueue_trial(left[0])
        trial = study.ask()
        settings = {v.name: trial.suggest_categorical(v.name, list(v.values)) for v in space}
        key = _engine(setup, settings)
        stubborn = stubborn + 1 if key in known else 0
        if key not in known:
            try:
                known[key] = capacity_of(setup.changed(**settings)).by_seed[0]
            except NothingMeets:
                known[key] = 0.0
            report(len(known) - 1, settings, known[key])
        study.tell(trial, known[key], state=optuna.trial.TrialState.COMPLETE)


def engines_tried(study: optuna.Study, space: Sequence[Variable], setup: EngineSetup) -> dict[str, float]:
    """Value by engine, of all finished trials."""
    return {
        _engine(setup, trial.params): float(trial.value)
        for trial in study.trials
        if trial.state.is_finished() and trial.value is not None and len(trial.params) == len(space)
    }


def ranked(study: optuna.Study, space: Sequence[Variable]) -> list[tuple[dict[str, Any], float]]:
    """Different settings by value, the best first; of equal ones the earliest."""
    found: dict[str, tuple[dict[str, Any], float]] = {}
    for trial in study.trials:
        if trial.value is not None and len(trial.params) == len(space):
            found.setdefault(_key(trial.params), (dict(trial.params), float(trial.value)))
    return sorted(found.values(), key=lambda pair: -pair[1])


@dataclass(frozen=True)
class Choice:
    """Settings that the search decided for.

    Attributes:
        value: what they reached.
        why: in a sentence, where others reached more; else None.
    """

    settings: dict[str, Any]
    value: float
    why: str | None


def choose(order: Sequence[tuple[dict[str, Any], float]], base: Mapping[str, Any]) -> Choice:
    """The baseline if bisection cannot tell it from the best. Otherwise, of the settings that it cannot tell from the
    best and can tell from the baseline, those that change least, then those that need least memory.

    Args:
        order: settings and values, the best first.
    """
    highest, most = order[0]
    base_value = next((value for settings, value in order if settings == base), None)
    if base_value is not None and not _differs(most, base_value):
        chosen, value, why = dict(base), base_value, "the measured settings stay"
    else:
        near = [
            (settings, value)
            for settings, value in order
            if not _differs(most, value) and (base_value is None or _differs(value, base_value))
        ]
        chosen, value = min(near, key=lambda pair: (len(changes(pair[0], base)), memory(pair[0])))
        fewer = len(changes(chosen, base)) < len(changes(highest, base))
        why = f"{_shown(chosen, base)} is chosen, which {'changes less' if fewer else 'needs less memory'}"
    if chosen == highest:
        return Choice(chosen, value, None)
    told = f"{_shown(highest, base)} reached {most:.3g}, and a search that ends within {TOLERANCE:.0%} cannot tell"
    return Choice(chosen, value, f"{told} {value:.3g} from it: {why}")


def _differs(higher: float, lower: float) -> bool:
    """Whether two capacities are further apart than what bisection leaves open."""
    return higher > lower * (1 + TOLERANCE)


def _shown(settings: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in changes(settings, base).items()) or "the baseline"


def _engine(setup: EngineSetup, settings: Mapping[str, Any]) -> str:
    """What an engine with these settings is: equal ones serve every workload alike."""
    return repr(setup.changed(**settings))


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
