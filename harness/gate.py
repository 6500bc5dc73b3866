"""The correctness gate: did a run give the same tokens and ends as the reference run on the same requests?

Speed of another output is no speed. Greedy decoding has one right answer, so every request of a run is compared with
the same request of the reference engine (padded static batching), which decides the run's verdict:

``equal``      every request has the same token ids and ended the same way
``explained``  some differ, each first at a token where the model itself is undecided: re-scored by one forward pass in
               float32, both candidates lie within the margin that sums in the run's dtype can move
``failed``     at least one difference is no such tie

In a session a prompt holds the answers to the turns before it. A turn is compared only where all of those are equal:
after a difference it was asked something else.

Comparing needs the tables alone. Re-scoring needs the model, so it happens in a process of its own
(``python -m harness.gate``), and only if there is something to explain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.apart import answer, ask
from harness.errors import one_line
from harness.record import Outcome
from harness.store import conform, empty_table

EQUAL, EXPLAINED, FAILED = "equal", "explained", "failed"

MARGINS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
"""Two logits closer than this (times the larger one where it is above 1) may change places with the batch's shape; as
may those closer than twice what the dtype itself moves a logit of this row by (each of the two runs may err so far).
"""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a request of a run and the same request of the reference run.

    Attributes:
        index: of the token; the number of equal tokens before it.
        kind: ``token`` (another id), ``length`` (one of the two stops there), ``end`` (other cause of the same end).
        token, reference_token: ids; None where that run had stopped.
        margin: how far below the best logit the lower of the two candidates is; None = not scored.
        limit: margin up to which the difference is explained.
        verdict: explained or failed.
        note: why it was not scored.
    """

    run_id: str
    reference_run_id: str
    request_id: str
    index: int
    kind: str
    token: int | None
    reference_token: int | None
    margin: float | None = None
    limit: float | None = None
    verdict: str = FAILED
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One next token to score: a request, what was generated before, and the two candidates.

    Attributes:
        answers: by request, the answers that are part of its prompt.
    """

    request_id: str
    prefix: tuple[int, ...]
    token: int
    reference_token: int
    answers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """``margin`` and its ``limit``; see :class:`Divergence`."""

    margin: float
    limit: float


Rescore = Callable[[Path, Sequence[Case]], list[Score]]
"""Scores cases with the model and workload of a job specification (``job.json``); ValueError if it cannot."""


def judge(
    root: Path, tables: Mapping[str, pd.DataFrame], reference_engine: str | None, rescore: Rescore | None = None
) -> dict[str, pd.DataFrame]:
    """``tables`` with the gate's columns of ``runs`` and the table ``divergences`` filled.

    A run is compared with the reference engine's first run on the same model, requests and repeat. Failed runs, that
    reference run itself and runs without a counterpart stay null: they were not compared. Nor is a request compared
    that one of the two did not answer, or whose token ids a server did not show.

    Args:
        root: below it are the ``job.json`` of the runs.
        rescore: how ties are scored; a process of its own by default.
    """
    judged = dict(tables)
    if reference_engine is None:
        return judged
    runs = tables["runs"].copy()
    answers, turns = _answers(tables), _turns_before(tables)
    compared: dict[str, int] = {}
    found: list[Divergence] = []
    for run_id, reference in _pairs(runs, reference_engine).items():
        both = answers.get(run_id, {}).keys() & answers.get(reference, {}).keys()
        if not both:
            continue
        differences = {request: _first_difference(run_id, reference, request, answers) for request in sorted(both)}
        equal = {request for request, difference in differences.items() if difference is None}
        asked_alike = [r for r in differences if equal.issuperset(_history(r, turns.get(reference, {})))]
        compared[run_id] = len(asked_alike)
        found += [d for r in asked_alike if (d := differences[r]) is not None]
    found = _explained(root, found, answers, turns, rescore or rescore_apart)
    for run_id, n in compared.items():
        own = [d for d in found if d.run_id == run_id]
        at = runs.index[runs["run_id"] == run_id]
        runs.loc[at, ["tokens_match", "gate", "n_compared", "n_diverged"]] = [not own, _verdict(own), n, len(own)]
    judged["runs"] = conform("runs", runs)
    judged["divergences"] = (
        conform("divergences", pd.DataFrame([asdict(d) for d in found])) if found else empty_table("divergences")
    )
    return judged


def _pairs(runs: pd.DataFrame, reference_engine: str) -> dict[str, str]:
    """The reference run of each run that has one."""
    same = ["model", "workload_hash", "repeat"]
    ok = runs[(runs["status"] == "ok") & runs[same].notna().all(axis=1)]
    references: dict[Any, str] = {}
    for row in ok[ok["engine"] == reference_engine].to_dict("records"):
        references.setdefault(tuple(row[name] for name in same), row["run_id"])
    found = {}
    for row in ok.to_dict("records"):
        reference = references.get(tuple(row[name] for name in same))
        if reference is not None and reference != row["run_id"]:
            found[str(row["run_id"])] = reference
    return found


@dataclass(frozen=True, slots=True)
class _Answer:
    ids: np.ndarray
    outcome: str


def _answers(tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, _Answer]]:
    """By run and request, what was answered ok with visible ids."""
    ok = {str(Outcome.OK_EOS), str(Outcome.OK_LENGTH)}
    outcomes = {
        (run, request): outcome
        for run, request, outcome in tables["requests"][["run_id", "request_id", "outcome"]].itertuples(index=False)
        if outcome in ok
    }
    found: dict[str, dict[str, _Answer]] = {}
    for run, request, ids in tables["tokens"][["run_id", "request_id", "token_ids"]].itertuples(index=False):
        outcome = outcomes.get((run, request))
        if outcome is not None and ids is not None:
            found.setdefault(run, {})[request] = _Answer(np.asarray(ids), outcome)
    return found


def _first_difference(
    run_id: str, reference: str, request_id: str, answers: Mapping[str, Mapping[str, _Answer]]
) -> Divergence | None:
    own, other = answers[run_id][request_id], answers[reference][request_id]
    common = min(len(own.ids), len(other.ids))
    unequal = np.flatnonzero(own.ids[:common] != other.ids[:common])
    index = int(unequal[0]) if len(unequal) else common
    if len(unequal):
        kind = "token"
    elif len(own.ids) != len(other.ids):
        kind = "length"
    elif own.outcome != other.outcome:
        kind = "end"
    else:
        return None
    token, reference_token = (int(a.ids[index]) if index < len(a.ids) else None for a in (own, other))
    note = None if kind == "token" else f"{own.outcome} after {len(own.ids)}, {other.outcome} after {len(other.ids)}"
    return Divergence(run_id, reference, request_id, index, kind, token, reference_token, note=note)


def _turns_before(tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, str]]:
    """By run and request, the turn before whose answer its prompt holds.

    Tables written before there were sessions have no such column, and nothing to say.
    """
    found: dict[str, dict[str, str]] = {}
    if "holds_answer_of" in tables["requests"]:
        turns = tables["requests"][["run_id", "request_id", "holds_answer_of"]].dropna()
        for run, request, before in turns.itertuples(index=False):
            found.setdefault(run, {})[request] = before
    return found


def _history(request_id: str, before: Mapping[str, str]) -> list[str]:
    """The turns whose answers are part of a request's prompt."""
    turns = []
    while request_id in before:
        request_id = before[request_id]
        turns.append(request_id)
    return turns


def _explained(
    root: Path,
    found: Sequence[Divergence],
    answers: Mapping[str, Mapping[str, _Answer]],
    turns: Mapping[str, Mapping[str, str]],
    rescore: Rescore,
) -> list[Divergence]:
    """``found`` with margins and verdicts. Only another token can be a tie; an answer that stops elsewhere is wrong."""
    judged = list(found)
    by_reference: dict[str, list[int]] = {}
    for i, d in enumerate(found):
        if d.kind == "token":
            by_reference.setdefault(d.reference_run_id, []).append(i)
    for reference, positions in by_reference.items():  # one model and workload each
        cases = [_case(found[i], answers[reference], turns.get(reference, {})) for i in positions]
        try:
            scores = rescore(_specification(root, reference), cases)
        except ValueError as error:
            for i in positions:
                judged[i] = replace(found[i], note=f"not scored: {one_line(error)}")
            continue
        for i, s in zip(positions, scores, strict=True):
            verdict = EXPLAINED if s.margin <= s.limit else FAILED
            judged[i] = replace(found[i], margin=s.margin, limit=s.limit, verdict=verdict)
    return judged


def _case(d: Divergence, reference: Mapping[str, _Answer], before: Mapping[str, str]) -> Case:
    if d.token is None or d.reference_token is None:
        raise ValueError(f"request {d.request_id!r} has no two candidates at token {d.index}")
    prefix = tuple(reference[d.request_id].ids[: d.index].tolist())
    said = {turn: tuple(reference[turn].ids.tolist()) for turn in _history(d.request_id, before)}
    return Case(d.request_id, prefix, d.token, d.reference_token, said)


def _specification(root: Path, run_id: str) -> Path:
    """The ``job.json`` of a run below ``root``.

    Raises:
        ValueError: there is none.
    """
    for path in sorted(root.rglob("job.json")):
        if json.loads(path.read_text())["identity"]["run_id"] == run_id:
            return path
    raise ValueError(f"no job.json of run {run_id} below {root}")


def _verdict(found: Sequence[Divergence]) -> str:
    if not found:
        return EQUAL
    return EXPLAINED if all(d.verdict == EXPLAINED for d in found) else FAILED


def summary(runs: pd.DataFrame, divergences: pd.DataFrame, reference_engine: str | None) -> list[str]:
    """One sentence an engine that was compared: in how many runs its answers are the reference's."""
    lines = []
    for engine, rows in runs[runs["gate"].notna()].groupby("engine", sort=False):
        counts = {verdict: int((rows["gate"] == verdict).sum()) for verdict in (EQUAL, EXPLAINED, FAILED)}
        line = f"token ids: {engine} equal to {reference_engine} in {counts[EQUAL]} of {len(rows)} runs"
        own = divergences[divergences["run_id"].isin(rows["run_id"])]
        if counts[EXPLAINED]:
            ties = own[own["verdict"] == EXPLAINED]
            line += (
                f"; in {counts[EXPLAINED]} only where the model is undecided ({len(ties)} requests, margins up to "
                f"{ties['margin'].max():.2g})"
            )
        if counts[FAILED]:
            line += f"; DIFFERENT in {counts[FAILED]}"
        lines.append(line)
    return lines


def failures(runs: pd.DataFrame, divergences: pd.DataFrame) -> list[str]:
    """One line a run that failed the gate, with its first difference; [] if none did."""
    lines = []
    for row in runs[runs["gate"] == FAILED].to_dict("records"):
        own = divergences[(divergences["run_id"] == row["run_id"]) & (divergences["verdict"] == FAILED)]
        first = own.iloc[0]
        what = {
            "token": f"token {first['token']} for {first['reference_token']} at {first['index']}",
            "length": f"another length at {first['index']}",
            "end": "another end",
        }[first["kind"]]
        if pd.notna(first["margin"]):
            what += f", margin {first['margin']:.3g} above {first['limit']:.3g}"
        elif pd.notna(first["note"]):
            what += f" ({first['note']})"
        lines.append(
            f"wrong answers: {row['run_id']} ({row['engine']}): {len(own)} of {row['n_compared']} requests, the first "
            f"{first['request_id']}: {what}"
        )
    return lines


def rescore_apart(specification: Path, cases: Sequence[Case]) -> list[Score]:
    """Score ``cases`` in a process of its own, because the caller has no model and no torch.

    Raises:
        NoAnswer: it did not work; why, in one line.
    """
    question = {"specification": str(specification), "cases": [asdict(case) for case in cases]}
    return [Score(**score) for score in ask("harness.gate", question)]


def score(specification: Mapping[str, Any], cases: Sequence[Case]) -> list[Score]:
    """Margins by one forward pass a case, the weights as they were measured and all sums in float32; limits by another
    one in the dtype that was measured.

    Raises:
        ValueError: the model cannot be loaded or the workload not built again.
    """
    from harness.device import resolve_device
    from harness.preparation import load_or_outline, workload_of

    # Eager attention takes float32 and every model's particularities (soft caps, windows) as the model states them.
    plain = {
        **specification,
        "engine": {**specification["engine"], "attn_implementation": None},
        "model": {**specification["model"], "attn_implementation": "eager"},
    }
    loaded = load_or_outline(plain, resolve_device(specification["measure"]["device"]))
    workload = workload_of(plain, loaded)
    least = MARGINS[str(loaded.model.dtype).removeprefix("torch.")]
    inputs = [[*workload.sent_ids(case.request_id, case.answers), *case.prefix] for case in cases]
    measured = [_next_logits(loaded.model, ids) for ids in inputs]
    exact_model = loaded.model.float()
    scores = []
    for case, ids, rounded in zip(cases, inputs, measured, strict=True):
        logits = _next_logits(exact_model, ids)
        best = float(logits.max())
        margin = best - float(logits[[case.token, case.reference_token]].min())
        moved = float((rounded - logits).abs().max())
        scores.append(Score(margin, max(least * max(1.0, abs(best)), 2 * moved)))
    return scores


def _next_logits(model: Any, ids: Sequence[int]) -> Any:
    """[vocabulary] logits of the token after ``ids``, as float32 on the CPU."""
    import torch

    with torch.inference_mode():
        inputs = torch.tensor([ids], device=model.device)
        return model(input_ids=inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()


def respond(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The scores of the cases that :func:`rescore_apart` asks for."""
    cases = [
        Case(
            c["request_id"],
            tuple(c["prefix"]),
            c["token"],
            c["reference_token"],
            {turn: tuple(ids) for turn, ids in c["answers"].items()},
        )
        for c in question["cases"]
    ]
    return [asdict(s) for s in score(json.loads(Path(question["specification"]).read_text()), cases)]


if __name__ == "__main__":
    raise SystemExit(answer(respond))
