"""Reads a run folder or a sweep's root: uses what is there and says what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from harness import manifest
from harness.manifest import JobState
from harness.store import conform, empty_table
from harness.tables import LATER, TABLES

# The tables a report shows, with the columns it needs of the large ones (None: all).
_NEEDED: dict[str, tuple[str, ...] | None] = {
    "runs": None,
    "requests": None,
    "itl": ("run_id", "itl_ms"),
    "steps": None,
    "config": None,
    "environment": None,
    "telemetry": None,
    "memory_ledger": None,
    "tails": None,
    "divergences": None,
    "calibration": None,
    "phases": None,
}


_MISSING = " is missing: the sections made of it are left out"


class ResultsError(ValueError):
    """A directory that no report can be made of; one line that says why."""


@dataclass(frozen=True)
class Results:
    """The tables of a directory.

    Attributes:
        tables: by name; a table that could not be read is empty, a column that an older version did not have is null.
        notes: one line for everything that was not there or not readable.
        jobs: last state of each job of the manifest; empty without one.
        begun_with: config hashes that the sweep was first planned with; empty where that is not known.
        folders: by run, its folder relative to ``directory`` ("." if it is that), where there is one.
    """

    directory: Path
    tables: dict[str, pd.DataFrame]
    notes: tuple[str, ...]
    jobs: tuple[JobState, ...]
    folders: Mapping[str, str] = field(default_factory=dict)
    begun_with: frozenset[str] = frozenset()

    @property
    def runs(self) -> pd.DataFrame:
        return self.tables["runs"]

    def of_run(self, table: str, run_id: str) -> pd.DataFrame:
        """Rows of one run."""
        frame = self.tables[table]
        if table not in self._positions:
            self._positions[table] = frame.groupby("run_id", sort=False).indices
        return frame.iloc[self._positions[table].get(run_id, [])]

    @cached_property
    def _positions(self) -> dict[str, Mapping[str, np.ndarray]]:
        """Row numbers by table and run, found once a table: a long step log is not searched again for each run."""
        return {}


def read_results(directory: Path) -> Results:
    """Read the tables of ``directory``, or of the run folders below it if its own were never joined.

    Raises:
        ResultsError: no such directory, or no readable ``runs`` table with a row.
    """
    if not directory.is_dir():
        raise ResultsError(f"{directory} is not a directory; give a run folder or the root folder of a sweep")
    notes: list[str] = []
    folders = _folders(directory, notes)
    tables = {name: _joined(name, folders, notes) for name in _NEEDED}
    if tables["runs"].empty:
        unread = [note for note in notes if note.startswith("runs.parquet cannot be read")]
        raise ResultsError(f"{directory}: {'; '.join(dict.fromkeys(unread)) or 'no runs: its runs table has no rows'}")
    jobs = _jobs(directory, notes)
    begun_with = manifest.begun_with(directory) if jobs else frozenset()
    folders_of = _folders_of_runs(directory)
    return Results(directory, tables, tuple(_with_missing_at_once(notes)), jobs, folders_of, begun_with)


def _with_missing_at_once(notes: Sequence[str]) -> list[str]:
    """Each note once, and those of missing tables as one."""
    different = list(dict.fromkeys(notes))
    files = [note.removesuffix(_MISSING) for note in different if note.endswith(_MISSING)]
    if len(files) < 2:
        return different
    rest = [note for note in different if not note.endswith(_MISSING)]
    return [*rest, f"{', '.join(files)} are missing: the sections made of them are left out"]


def _folders_of_runs(directory: Path) -> dict[str, str]:
    """Where each run's own tables are: the folders that hold one run."""
    found: dict[str, str] = {}
    for path in (*directory.glob("*/runs.parquet"), *directory.glob("*/*/runs.parquet"), directory / "runs.parquet"):
        try:
            ids = pd.read_parquet(path, columns=["run_id"])["run_id"].unique()
        except (OSError, ValueError, KeyError):  # said of the tables that are shown
            continue
        if len(ids) == 1:
            found.setdefault(str(ids[0]), path.parent.relative_to(directory).as_posix())
    return found


def _folders(directory: Path, notes: list[str]) -> list[Path]:
    if (directory / "runs.parquet").is_file():
        return [directory]
    if not (directory / manifest.FILE).is_file() and (apart := _results_below(directory)):
        shown = ", ".join(str(p) for p in apart[:5]) + (f" and {len(apart) - 5} more" if len(apart) > 5 else "")
        raise ResultsError(
            f"{directory} is not one run or sweep but holds {len(apart)}: name one of {shown} (cb-plan and cb-tune "
            "take several)"
        )
    below = sorted(path.parent for path in directory.glob("*/runs.parquet"))
    below += sorted(path.parent for path in directory.glob("*/*/runs.parquet"))
    if not below:
        raise ResultsError(f"{directory} holds no results: no runs.parquet in it or in the folders below it")
    notes.append(f"the sweep was not joined (was it interrupted?): read from its {len(below)} run folders")
    return below


def _results_below(directory: Path) -> list[Path]:
    """Runs and sweeps of commands of their own, each with a manifest: below results/sweeps/NAME, or results."""
    found = (path.parent for depth in ("*", "*/*", "*/*/*") for path in directory.glob(f"{depth}/{manifest.FILE}"))
    return sorted(found)


def _joined(name: str, folders: Sequence[Path], notes: list[str]) -> pd.DataFrame:
    frames = [_table(name, folder, notes) for folder in folders]
    filled = [frame for frame in frames if not frame.empty]
    if not filled:
        return frames[0] if frames else empty_table(name)
    return filled[0] if len(filled) == 1 else pd.concat(filled, ignore_index=True)


def _table(name: str, folder: Path, notes: list[str]) -> pd.DataFrame:
    path = folder / f"{name}.parquet"
    if not path.is_file() and name in LATER:
        return empty_table(name)
    if not path.is_file():
        notes.append(f"{path.name}{_MISSING}")
        return empty_table(name)
    wanted = _NEEDED[name]
    try:
        frame = pd.read_parquet(path, columns=None if wanted is None else list(wanted))
        known = list(TABLES[name].dtypes)
        missing = [c for c in (wanted or known) if c not in frame.columns]
        if "run_id" in missing:
            raise ValueError("it has no run_id")
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more columns" if len(missing) > 3 else "")
            notes.append(f"{path.name} comes from another version: without {shown}, taken as unknown")
        return _finite(conform(name, frame[[c for c in frame.columns if c in known]]), path.name, notes)
    except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's errors are ValueErrors and OSErrors
        notes.append(f"{path.name} cannot be read ({_first_line(error)}): the sections made of it are left out")
        return empty_table(name)


def _finite(frame: pd.DataFrame, file: str, notes: list[str]) -> pd.DataFrame:
    """``frame`` with infinities and the like taken as unknown: nothing can be drawn or compared with them."""
    bad = {
        name: wrong
        for name in frame.columns
        if frame[name].dtype == "Float64"
        and (wrong := ~np.isfinite(frame[name].to_numpy(dtype=np.float64, na_value=0.0))).any()
    }
    if not bad:
        return frame
    shown = ", ".join([*bad][:4]) + (f" and {len(bad) - 4} more columns" if len(bad) > 4 else "")
    notes.append(f"{file} holds values that are no finite numbers, taken as unknown: {shown}")
    return frame.assign(**{name: frame[name].mask(wrong) for name, wrong in bad.items()})


def _jobs(directory: Path, notes: list[str]) -> tuple[JobState, ...]:
    try:
        return tuple(manifest.latest(directory))
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"{manifest.FILE} cannot be read ({_first_line(error)}): jobs without a row are not listed")
        return ()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]


def facts(results: Results, key: str) -> list[object]:
    """The different values of an environment key over all runs, in order of appearance, decoded from JSON."""
    environment = results.tables["environment"]
    texts = environment.loc[environment["key"] == key, "value"].dropna()
    return [decoded(text) for text in dict.fromkeys(texts)]


def decoded(text: str) -> object:
    """A JSON text as its value; a text that is no JSON as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
