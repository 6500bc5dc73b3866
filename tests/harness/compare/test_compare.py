"""``cb-compare`` on made-up result sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from harness.compare.app import main
from harness.metrics import compute_tables
from harness.record import ConfigValue, Outcome, RequestRecord, RunRecord, TokenChunk
from harness.store import combine, write_result

FACTS = {"gpu.name": "H200", "package.torch": "2.13.0", "model.weight_hash": "w1", "git.sha": "s1"}
WOBBLE = (0, 3, -2, 1, -3, 2)


def result(folder: Path, step_ms: float, arms=("ours",), settings=None, facts=None, **identity) -> Path:
    """A sweep of six blocks whose runs deliver ten tokens, one each ``step_ms`` (with a wobble in the ns)."""
    parts = []
    for arm in arms:
        for block, wobble in enumerate(WOBBLE):
            gap = int(step_ms * 1e6 * (1 + wobble * 1e-3))
            request = RequestRecord(
                "r", 5, 10, t_sched_ns=0, t_submit_ns=0, t_done_ns=10 * gap, outcome=Outcome.OK_LENGTH,
                chunks=[TokenChunk((i + 1) * gap, (i,)) for i in range(10)],
            )  # fmt: skip
            named = {"run_id": f"{folder.name}-{arm}-{block}", "engine": "ours", "model": "m", "workload": "w",
                     "workload_hash": "h", "device": "cpu", "seed": 0, "repeat": block, "arm": arm,
                     "variable": None if arm == "ours" else "engine.page_size"}  # fmt: skip
            config = [ConfigValue(k, v, "user") for k, v in ({"page_size": 16} | (settings or {})).items()]
            config += [ConfigValue("num_blocks", int(900 / step_ms), "derived: free memory")]
            record = RunRecord(
                named | identity, [request], t_start_ns=0, t_end_ns=10 * gap, config=config,
                environment=FACTS | (facts or {}),
            )  # fmt: skip
            parts.append(folder / f"{arm}-{block}")
            write_result(parts[-1], compute_tables(record))
    write_result(folder, combine(parts))
    return folder


@pytest.fixture
def a(tmp_path):
    return result(tmp_path / "a", 10.0)


def test_two_sets_are_paired_and_judged(a, tmp_path, capsys):
    b = result(tmp_path / "b", 8.0, settings={"page_size": 32})
    assert main([str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "1.25×" in said
    assert "better" in said
    assert "compared is engine.page_size" in said
    assert "derived from other settings: engine.num_blocks" in said
    table = pd.read_parquet(b / "comparisons" / "a" / "comparison.parquet").set_index("metric")
    assert table.loc["gen_tok_s", "ratio"] == pytest.approx(1.25)
    assert (table.loc["gen_tok_s", "pairs"], table.loc["gen_tok_s", "verdict"]) == (6, "better")
    assert (table.loc["ttft_p50_ms", "better"], table.loc["ttft_p50_ms", "verdict"]) == ("lower", "better")
    assert pd.read_csv(b / "comparisons" / "a" / "comparison.csv")["metric"].tolist() == table.index.tolist()
    assert "engine.page_size" in (b / "comparisons" / "a" / "comparison.html").read_text()


def test_two_sets_of_equal_speed_are_indistinguishable(a, tmp_path, capsys):
    again = result(tmp_path / "again", 10.0)
    assert main([str(a), str(again), "--json", "--out", str(tmp_path / "out")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["differences"] == []
    assert {f["verdict"] for f in answer["findings"]} == {"indistinguishable"}
    assert answer["pairs"][0]["variable"] is None


def test_what_speaks_against_the_numbers_of_a_set_is_carried_over_with_the_arm(a, tmp_path, capsys):
    busy = {"load.others_cores": 1.6, "load.cores": 2}
    b = result(tmp_path / "b", 8.0, settings={"page_size": 32}, facts=busy)
    assert main([str(a), str(b)]) == 0
    note = "B: The machine was busy while this was measured: ours (others used 1.6 of 2 cores)."
    said = capsys.readouterr().out
    assert f"! {note}" in said
    assert "A: The machine was busy" not in said
    assert "! A: p99 of TTFT rests on fewer than" in said
    page = (b / "comparisons" / "a" / "comparison.html").read_text()
    assert f"<li>{note}</li>" in page
    shown = page.split("<h2>Comparison</h2>")[1].split("</section>")[0]
    assert "<details>" not in shown
    assert re.search(r"<td>generated \[tokens/s\]</td><td>100[.0]*</td><td>125</td><td>1.25×</td>", shown)
    assert "<td>TTFT p50 [ms]</td>" in shown


def test_the_same_runs_on_both_sides_say_nothing(a, tmp_path, capsys):
    sweep = result(tmp_path / "s", 9.0, arms=("16", "64"))
    for same in ([str(a), str(a)], [str(sweep), str(sweep), "--arm-a", "16"]):
        assert main(same) == 2
        captured = capsys.readouterr()
        assert "are the same runs (6 of them)" in captured.err
        assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert not list(tmp_path.rglob("comparisons"))


def test_each_pair_of_arms_has_a_folder_of_its_own(tmp_path):
    sweep = result(tmp_path / "s", 9.0, arms=("16", "org/64"))
    for one, other in (("16", "org/64"), ("org/64", "16")):
        assert main([str(sweep), str(sweep), "--arm-a", one, "--arm-b", other]) in (0, 1)
    found = {f.parent.name: set(pd.read_csv(f)["arm"]) for f in sweep.glob("comparisons/*/comparison.csv")}
    assert found == {
        "s,arm-a=16,arm-b=org_64": {"B: ours org/64"},
        "s,arm-a=org_64,arm-b=16": {"B: ours 16"},
    }


@pytest.mark.parametrize(
    "changed, expected",
    [
        ({"workload_hash": "other"}, "workload: workload_hash is h in A and other in B"),
        ({"seed": 1}, "seed: seed is 0 in A and 1 in B"),
        ({"facts": {"gpu.name": "A100"}}, "hardware: gpu.name is H200 in A and A100 in B"),
        ({"facts": {"package.torch": "2.11.0"}}, "versions: package.torch is 2.13.0 in A and 2.11.0 in B"),
        ({"facts": {"model.weight_hash": "w2"}}, "model: model.weight_hash is w1 in A and w2 in B"),
        ({"model": "n"}, "model: model is m in A and n in B"),
    ],
)
def test_what_could_explain_any_result_is_refused_by_name_and_can_be_forced(changed, expected, a, tmp_path, capsys):
    b = result(tmp_path / "b", 8.0, **changed)
    assert main([str(a), str(b)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"cb-compare: {expected}" in captured.err
    assert "1 difference could explain any result" in captured.err
    assert not (b / "comparisons").exists()
    assert main([str(a), str(b), "--force"]) == 0
    said = capsys.readouterr().out
    assert expected in said
    assert "1.25×" in said
    assert "better" in said


def test_unequal_requests_are_named_setting_by_setting(tmp_path, capsys):
    def built(requests, **arrival):
        workload = {"name": "staged", "requests": requests, "prompt_tokens": {"kind": "fixed", "value": 64}}
        return {"workload.spec": {"workload": workload, "arrival": arrival, "special_ids": list(range(99))}}

    a = result(tmp_path / "a", 10.0, workload_hash="h1", facts=built(24, kind="poisson", rate=4.0))
    b = result(tmp_path / "b", 8.0, workload_hash="h2", facts=built(32, kind="burst"))
    assert main([str(a), str(b)]) == 2
    assert (
        'workload_hash is h1 in A and h2 in B (arrival.kind: "poisson" in A, "burst" in B; '
        "arrival.rate: 4.0 in A, absent in B; workload.requests: 24 in A, 32 in B)"
    ) in capsys.readouterr().err
    assert main([str(a), str(b), "--force"]) == 0
    assert "workload.requests: 24 in A, 32 in B" in (b / "comparisons" / "a" / "comparison.html").read_text()
    capsys.readouterr()
    c = result(tmp_path / "c", 8.0, workload_hash="h3", facts=built(24, kind="poisson", rate=4.0))
    assert main([str(a), str(c)]) == 2
    assert "(built by the same settings" in capsys.readouterr().err


def test_workloads_of_whole_sweeps_are_named(tmp_path, capsys):
    def sweep(folder, names):
        parts = []
        for name in names:
            facts = {"workload.spec": {"workload": {"name": name}}}
            result(tmp_path / folder / name, 10.0, workload_hash=name, workload=name, facts=facts)
            parts.append(tmp_path / folder / name)
        write_result(tmp_path / folder, combine(parts))
        return tmp_path / folder

    a, b = sweep("a", ("x", "shared")), sweep("b", ("shared", "y", "z"))
    assert main([str(a), str(b)]) == 2
    assert "(only in A: x; only in B: y, z)" in capsys.readouterr().err


def test_a_reason_that_all_metrics_share_is_said_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WOBBLE", (0,))
    a, b = result(tmp_path / "a", 10.0), result(tmp_path / "b", 8.0)
    assert main([str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert said.count("1 pair; a verdict needs at least 5") == 1
    assert "verdict none in every metric: 1 pair" in said
    assert "ITL p50 [ms]" in said


@pytest.mark.parametrize("wobbles, interval", [((0, 3, -2, 1), "range 1.25×–1.25×"), (WOBBLE[:5], "1.25×–1.25×")])
def test_few_pairs_have_a_range_and_no_interval(wobbles, interval, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WOBBLE", wobbles)
    a, b = result(tmp_path / "a", 10.0), result(tmp_path / "b", 8.0)
    assert main([str(a), str(b)]) == 0
    cells = [line.split("|") for line in capsys.readouterr().out.splitlines() if "generated [" in line]
    assert [(row[5].strip(), row[6].strip()) for row in cells] == [(interval, str(len(wobbles)))]
    folder = b / "comparisons" / "a"
    table = pd.read_parquet(folder / "comparison.parquet")
    assert table["ratio_low"].isna().all() == table["ratio_high"].isna().all() == (len(wobbles) < 5)
    assert f"<td>{interval}</td>" in (folder / "comparison.html").read_text()


def test_another_revision_and_unknown_facts_are_noted_only(a, tmp_path, capsys):
    b = result(tmp_path / "b", 8.0, facts={"git.sha": "s2", "gpu.name": None})
    assert main([str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "noted, source: git.sha is s1 in A and s2 in B" in said
    assert "noted, hardware: gpu.name is H200 in A and unknown in B" in said
    assert "A (a) against B (b): no setting differs, but the code does" in said


def test_another_revision_of_the_same_code_is_not_noted(tmp_path, capsys):
    def compared(code_b):
        facts = [{"git.sha": "s1", "code.sha256": "c1"}, {"git.sha": "s2", "code.sha256": code_b}]
        folders = [result(tmp_path / f"{code_b}{k}", 8.0 + k, facts=own) for k, own in enumerate(facts)]
        assert main([str(folder) for folder in folders]) == 0
        return capsys.readouterr().out

    assert "noted, source" not in compared("c1")
    said = compared("c2")
    assert "noted, source: git.sha is s1 in A and s2 in B" in said
    assert "noted, source: code.sha256 is c1 in A and c2 in B" in said


def test_two_settings_are_confounded_unless_declared(a, tmp_path, capsys):
    b = result(tmp_path / "b", 8.0, settings={"page_size": 32, "safety_margin": 0.2}, facts={})
    a = result(tmp_path / "a2", 10.0, settings={"safety_margin": 0.1})
    assert main([str(a), str(b)]) == 1
    said = capsys.readouterr().out
    assert "also differs: engine.page_size, engine.safety_margin" in said
    assert "confounded by engine.page_size, engine.safety_margin" in said
    assert "--variable engine.page_size,engine.safety_margin" in said
    for declared in ("engine.page_size,engine.safety_margin", "page_size, safety_margin", "engine"):
        assert main([str(a), str(b), "--variable", declared]) == 0
    capsys.readouterr()
    assert main([str(a), str(b), "--variable", "page_size"]) == 1
    said = capsys.readouterr().out
    assert "compared is engine.page_size" in said
    assert "confounded by engine.safety_margin" in said


@pytest.mark.parametrize(
    "given, expected",
    [
        ("pagesize", "--variable 'pagesize' is no setting of A or B. Did you mean 'engine.page_size'?"),
        ("page_size,engine.num_block", "'engine.num_block' is no setting of A or B. Did you mean 'engine.num_blocks'?"),
        ("page_size,", "--variable '' is no setting of A or B."),
        ("rate", "--variable 'rate' could be any of arrival.rate, engine.rate: give the full key"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_in_one_line(given, expected, tmp_path, capsys):
    a, b = (result(tmp_path / n, 8.0, settings={"arrival.rate": 1, "rate": 2}) for n in ("a", "b"))
    assert main([str(a), str(b), "--variable", given]) == 2
    captured = capsys.readouterr()
    assert captured.err.rstrip().endswith(expected)
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert not (b / "comparisons").exists()


def test_arms_of_sweeps_are_matched_by_value(tmp_path, capsys):
    a = result(tmp_path / "a", 10.0, arms=("16", "32"))
    b = result(tmp_path / "b", 8.0, arms=("32", "64"))
    assert main([str(a), str(b), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(p["a"], p["b"]) for p in answer["pairs"]] == [("A: ours 32", "B: ours 32")]
    assert answer["unmatched"] == ["only in A: m · w · h · cpu · A: ours 16", "only in B: m · w · h · cpu · B: ours 64"]
    assert main([str(a), str(b), "--arm-a", "16", "--arm-b", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["b"] == "B: ours 64"
    assert main([str(a), str(b), "--arm-a", "8"]) == 2
    assert "set A has no measured arm 8 (there are: ours, 16, 32)" in capsys.readouterr().err


def test_only_what_two_commands_measured_was_measured_apart(tmp_path, capsys):
    apart = "The two sets were measured apart"
    sweep = result(tmp_path / "s", 9.0, arms=("16", "64"))
    (sweep / "manifest.jsonl").touch()
    one = result(sweep / "job-16", 9.0, arms=("16",))
    other = result(tmp_path / "other", 9.0, arms=("16", "64"))
    for a, b, said in ((sweep, sweep, False), (one, sweep, False), (sweep, other, True)):
        assert main([str(a), str(b), "--arm-a", "16", "--arm-b", "64", "--force", "--out", str(tmp_path / "out")]) in (
            0,
            1,
        )
        assert (apart in capsys.readouterr().out) is said
        assert (apart in (tmp_path / "out" / "comparison.html").read_text()) is said


def test_no_results_are_one_line(a, tmp_path, capsys):
    assert main([str(a), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
