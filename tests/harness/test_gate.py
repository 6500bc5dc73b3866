"""The correctness gate: what counts as the same answer, what as a tie, and what fails a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from harness import gate, manifest, store
from harness.gate import Case, Score
from harness.manifest import JobState
from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk
from harness.sweep import combine_jobs


def run(root: Path, job: str, engine: str, *answers: list[int] | None, status: str = "ok", **facts: object) -> None:
    """A run folder whose requests r0, r1 … gave ``answers``; None = failed. ``facts``: workload_hash, ends, hidden,
    turns.
    """
    ends = facts.get("ends") or [Outcome.OK_LENGTH] * len(answers)
    requests = [
        RequestRecord(
            f"r{i}", 3, 8, t_sched_ns=0, t_submit_ns=0, t_done_ns=99,
            holds_answer_of=facts.get("turns", {}).get(f"r{i}"),
            outcome=Outcome.ENGINE_ERROR if ids is None else end,
            chunks=[TokenChunk(n, None if facts.get("hidden") else (t,), 1) for n, t in enumerate(ids or [])],
        )
        for i, (ids, end) in enumerate(zip(answers, ends, strict=True))
    ]  # fmt: skip
    identity = {"run_id": job, "engine": engine, "model": "m", "repeat": 0}
    identity["workload_hash"] = facts.get("workload_hash", "w")
    store.write_result(
        root / job, compute_tables(RunRecord(identity, requests, t_start_ns=0, t_end_ns=9, status=status))
    )
    (root / job / "job.json").write_text(json.dumps({"identity": identity}))
    manifest.append(root, JobState(job, "h", (f"engine={engine}",), status, manifest.now()))


def judge(root: Path, scores: list[Score] | Exception = ()) -> tuple[pd.DataFrame, pd.DataFrame, list[Case]]:
    """Runs by id, divergences, and what was asked of the model."""
    asked: list[Case] = []

    def rescore(specification: Path, cases: list[Case]) -> list[Score]:
        assert json.loads(specification.read_text())["identity"]["engine"] == "static"
        asked.extend(cases)
        if isinstance(scores, Exception):
            raise scores
        return scores

    folders = [root / s.job for s in manifest.latest(root)]
    tables = gate.judge(root, store.combine(folders), "static", rescore)
    store.write_result(root / "all", tables)  # as the schema says
    return tables["runs"].set_index("run_id"), tables["divergences"], asked


def test_runs_are_compared_with_the_reference_on_the_same_requests(tmp_path):
    run(tmp_path, "0", "static", [1, 2], [7])
    run(tmp_path, "1", "ours", [1, 2], [7])
    run(tmp_path, "2", "ours", [1, 2], [7], workload_hash="other")
    run(tmp_path, "3", "ours", [1, 2], [7], status="failed")
    run(tmp_path, "4", "static", [1, 2], [7])
    run(tmp_path, "5", "ours", [1, 2], [7], hidden=True)
    runs, divergences, asked = judge(tmp_path)
    assert runs["gate"].dropna().to_dict() == {"1": "equal", "4": "equal"}
    assert runs["tokens_match"].dropna().to_dict() == {"1": True, "4": True}
    assert runs.loc["1", ["n_compared", "n_diverged"]].tolist() == [2, 0]
    assert divergences.empty
    assert not asked
    lines = gate.summary(runs.reset_index(), divergences, "static")
    assert lines == [
        "token ids: ours equal to static in 1 of 1 runs",
        "token ids: static equal to static in 1 of 1 runs",
    ]
    assert gate.failures(runs.reset_index(), divergences) == []


def test_a_tie_is_explained_and_what_follows_it_is_not_looked_at(tmp_path):
    run(tmp_path, "0", "static", [1, 2, 3, 4], [7])
    run(tmp_path, "1", "ours", [1, 2, 9, 8, 6], [7])
    runs, divergences, asked = judge(tmp_path, [Score(0.004, 0.01)])
    assert asked == [Case("r0", (1, 2), 9, 3)]
    assert runs.loc["1", ["gate", "tokens_match", "n_compared", "n_diverged"]].tolist() == ["explained", False, 2, 1]
    (row,) = divergences.to_dict("records")
    assert (row["index"], row["kind"], row["token"], row["reference_token"]) == (2, "token", 9, 3)
    assert (row["margin"], row["verdict"]) == (0.004, "explained")
    (line,) = gate.summary(runs.reset_index(), divergences, "static")
    assert line.endswith("0 of 1 runs; in 1 only where the model is undecided (1 requests, margins up to 0.004)")
    assert gate.failures(runs.reset_index(), divergences) == []


def test_a_real_divergence_fails_the_run(tmp_path):
    run(tmp_path, "0", "static", [1, 2], [7, 8])
    run(tmp_path, "1", "ours", [1, 3], [7, 9])
    runs, divergences, _ = judge(tmp_path, [Score(0.004, 0.01), Score(0.5, 0.01)])
    assert runs.loc["1", "gate"] == "failed"
    assert gate.failures(runs.reset_index(), divergences) == [
        "wrong answers: 1 (ours): 1 of 2 requests, the first r1: token 9 for 8 at 1, margin 0.5 above 0.01"
    ]


@pytest.mark.parametrize(
    "ids, end, kind, note",
    [
        ([1, 2], Outcome.OK_LENGTH, "length", "ok_length after 2, ok_length after 3"),
        ([1, 2, 3], Outcome.OK_EOS, "end", "ok_eos after 3, ok_length after 3"),
    ],
)
def test_stopping_elsewhere_or_otherwise_is_no_tie(tmp_path, ids, end, kind, note):
    run(tmp_path, "0", "static", [1, 2, 3])
    run(tmp_path, "1", "ours", ids, ends=[end])
    runs, divergences, asked = judge(tmp_path)
    assert not asked
    assert runs.loc["1", "gate"] == "failed"
    (row,) = divergences.to_dict("records")
    assert (row["kind"], row["note"], row["verdict"]) == (kind, note, "failed")
    assert note in gate.failures(runs.reset_index(), divergences)[0]


def test_an_unanswered_request_is_a_failure_of_its_own_and_not_a_wrong_answer(tmp_path):
    run(tmp_path, "0", "static", [1, 2], [7])
    run(tmp_path, "1", "ours", [1, 2], None)
    runs, _, _ = judge(tmp_path)
    assert runs.loc["1", ["gate", "n_compared", "n_failed"]].tolist() == ["equal", 1, 1]


def test_a_difference_that_nobody_could_score_fails(tmp_path):
    run(tmp_path, "0", "static", [1, 2])
    run(tmp_path, "1", "ours", [1, 3])
    runs, divergences, _ = judge(tmp_path, ValueError("no such model"))
    assert runs.loc["1", "gate"] == "failed"
    (note,) = divergences["note"]
    assert note.startswith("not scored: ")
    assert note.endswith("no such model")


def test_without_a_reference_nothing_is_judged(tmp_path):
    run(tmp_path, "0", "static", [1])
    run(tmp_path, "1", "ours", [2])
    assert combine_jobs(tmp_path, None)["runs"]["gate"].isna().all()


@pytest.fixture(scope="module")
def specification():
    """A job as cb-bench writes it for the gate to read."""
    from omegaconf import OmegaConf

    from harness.plan import make_plan

    plan = make_plan(["model=tiny-llama", "workload=uniform_burst", "workload.requests=2", "measure.device=cpu"])
    groups = ("engine", "model", "arrival", "workload", "generation", "measure")
    assert not OmegaConf.is_config(plan.configs[0])
    return {group: plan.configs[0][group] for group in groups}


def test_margins_are_those_of_the_models_own_logits(specification):
    import torch

    from harness.models import ModelSpec, load_model
    from harness.preparation import workload_of

    loaded = load_model(ModelSpec("tiny-llama", attn_implementation="eager"), "cpu")
    prompt = workload_of(specification, loaded).requests[1]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*prompt.prompt_ids, 5]])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    scores = gate.score(
        specification,
        [Case(prompt.request_id, (5,), best, second), Case(prompt.request_id, (5,), int(logits.argmin()), best)],
    )
    assert scores[0].margin == pytest.approx(float(logits[best] - logits[second]), abs=1e-5)
    assert scores[1].margin == pytest.approx(float(logits.max() - logits.min()), abs=1e-5)
    assert scores[0].limit == pytest.approx(1e-4 * max(1.0, float(logits.max())))


def test_in_half_precision_the_limit_is_what_the_dtype_itself_moves(specification):
    import torch

    from harness.models import ModelSpec, load_model
    from harness.preparation import workload_of

    half = {**specification, "model": {**specification["model"], "dtype": "bfloat16"}}
    model = load_model(ModelSpec("tiny-llama", dtype="bfloat16", attn_implementation="eager"), "cpu")
    prompt = workload_of(half, model).requests[0]
    ids = torch.tensor([prompt.prompt_ids])
    with torch.no_grad():
        rounded = model.model(ids).logits[0, -1].float()
        exact = model.model.float()(ids).logits[0, -1]
    (score,) = gate.score(half, [Case(prompt.request_id, (), 1, 2)])
    moved = float((rounded - exact).abs().max())
    assert moved > 0
    assert score.limit == pytest.approx(max(1e-2 * max(1.0, float(exact.max())), 2 * moved), rel=0.01)


def test_the_gates_own_process_answers_or_says_why(tmp_path, specification):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(specification))
    request_id = "nobody"
    with pytest.raises(ValueError, match="nobody"):
        gate.rescore_apart(path, [Case(request_id, (), 1, 2)])
    assert gate.rescore_apart(path, []) == []


def turns(*chain: str) -> dict[str, str]:
    """``holds_answer_of`` of requests that follow each other."""
    return dict(zip(chain[1:], chain, strict=False))


def test_a_turn_is_compared_only_after_equal_answers(tmp_path):
    """r0 → r1 → r2: after another answer to r0, r1 and r2 were asked something else; r3 stands alone."""
    session = turns("r0", "r1", "r2")
    run(tmp_path, "0", "static", [1, 2], [3, 4], [5, 6], [7], turns=session)
    run(tmp_path, "1", "ours", [1, 9], [8, 8], [8, 8], [7], turns=session)
    run(tmp_path, "2", "ours", [1, 2], [3, 4], [5, 9], [7], turns=session)
    run(tmp_path, "3", "ours", None, [8, 8], [5, 6], [7], turns=session)
    runs, divergences, asked = judge(tmp_path, [Score(0.004, 0.01)] * 2)
    assert runs.loc[["1", "2", "3"], "n_compared"].tolist() == [2, 4, 1]
    assert divergences[["run_id", "request_id"]].to_numpy().tolist() == [["1", "r0"], ["2", "r2"]]
    assert asked == [Case("r0", (1,), 9, 2), Case("r2", (5,), 9, 6, {"r1": (3, 4), "r0": (1, 2)})]
