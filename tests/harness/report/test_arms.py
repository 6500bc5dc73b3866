"""Grouping, baselines and ratios."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from harness.report.arms import Ratio, Spread, baseline_of, by_facet, group_arms, ratio
from harness.report.config_diff import DECLARED, DERIVED, ENGINE_ONLY, OTHER, PART, config_differences
from harness.report.console import print_summary
from harness.report.headline import _ratio as ratio_in_words
from harness.report.headline import headlines
from harness.report.html import write_report
from harness.report.quantity import UNKNOWN, memory, number, times
from harness.report.read import read_results
from harness.report.results_table import results_table
from harness.report.validity import validity_notes
from harness.report.verdicts import compare_arms, no_verdict_sentences, verdict_sentences


def test_engines_are_compared_inside_a_workload_and_repeats_are_not_pooled(engines_dir: Path) -> None:
    arms = group_arms(read_results(engines_dir))
    facets = by_facet(arms)
    assert list(facets) == ["uniform_burst", "mixed_staged"]
    assert [a.series for a in facets["uniform_burst"]] == ["static", "ours", "transformers"]
    ours = facets["uniform_burst"][1]
    assert ours.label == "uniform_burst · ours"
    values = sorted(float(v) for v in ours.runs["gen_tok_s"])
    assert ours.spread("gen_tok_s") == Spread(values[1], values[0], values[2], 3)
    assert baseline_of(facets["uniform_burst"]).engine == "static"  # type: ignore[union-attr]


def test_rates_of_one_workload_are_facets_of_their_own(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = []
    for rate, digest in ((20.0, "aa"), (40.0, "bb")):
        for engine in ("transformers", "ours"):
            record = record_maker(f"{engine}{rate}", engine, arm=engine, variable="engine", workload="staged")
            record.identity["workload_hash"] = digest
            for i, request in enumerate(record.requests):
                shift = record.t_start_ns + int(i / rate * 1e9) - request.t_sched_ns
                request.t_sched_ns += shift
                request.t_submit_ns += shift
                request.t_done_ns += shift
                for chunk in request.chunks:
                    chunk.time_ns += shift
            records.append(record)
    arms = group_arms(read_results(writer(tmp_path, records)))
    assert [(a.facet, a.series, len(a.runs)) for a in arms] == [
        ("20 requests/s", "transformers", 1),
        ("20 requests/s", "ours", 1),
        ("40 requests/s", "transformers", 1),
        ("40 requests/s", "ours", 1),
    ]


def test_failed_runs_enter_no_number(engines_dir: Path) -> None:
    failed = by_facet(group_arms(read_results(engines_dir)))["mixed_staged"][2]
    assert (failed.engine, len(failed.runs), len(failed.measured)) == ("transformers", 3, 0)
    assert failed.spread("gen_tok_s") is None
    assert failed.tokens_match is None


def test_ratio_is_of_equal_repeats(engines_dir: Path) -> None:
    static, ours, _ = by_facet(group_arms(read_results(engines_dir)))["uniform_burst"]
    own, base = (dict(zip(a.runs["repeat"], a.runs["gen_tok_s"], strict=True)) for a in (ours, static))
    expected = sorted(own[r] / base[r] for r in range(3))
    found = ratio(ours, static, "gen_tok_s")
    assert found is not None
    assert (found.low, found.high, found.n) == (expected[0], expected[2], 3)
    assert found.mean == pytest.approx(math.prod(expected) ** (1 / 3))


def test_numeric_values_are_in_order_and_the_rest_follows(numeric_dir: Path) -> None:
    arms = group_arms(read_results(numeric_dir))
    assert [a.value for a in arms] == ["64", "256", "1024", "auto"]
    assert arms[0].series == "max_batch_tokens = 64"
    assert arms[0].is_baseline  # no static engine: the first arm


def test_variants_of_one_engine_are_named_by_their_arm(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [
        record_maker(arm, engine, arm=arm, variable="engine", workload="w")
        for engine, arm in (("static", "static"), ("static", "static_waves"), ("ours", "ours_small"))
    ]
    assert [a.series for a in group_arms(read_results(writer(tmp_path, records)))] == [
        "static",
        "static_waves",
        "ours_small",
    ]


@pytest.mark.parametrize("variable", ["engine", None])  # a sweep over engines; single runs side by side
def test_an_arm_is_named_as_it_was_typed(
    variable: str | None, tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [
        record_maker(arm, engine, arm=arm, variable=variable, workload="w")
        for engine, arm in (("static", "static_waves"), ("ours", "ours_small"))
    ]
    arms = group_arms(read_results(writer(tmp_path, records)))
    assert [(a.engine, a.series, a.is_baseline) for a in arms] == [
        ("static", "static_waves", True),
        ("ours", "ours_small", False),
    ]


def test_devices_are_never_pooled_but_gpus_of_one_host_are(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    devices = ["cpu", "cuda:0", "cuda:1"]
    records = [record_maker(d, device=d, repeat=i, workload="w") for i, d in enumerate(devices)]
    arms = group_arms(read_results(writer(tmp_path, records)))
    assert [(a.facet, len(a.runs)) for a in arms] == [("cpu", 1), ("cuda", 2)]


def test_a_run_that_failed_before_it_had_a_device_stays_with_its_sweep(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [record_maker(f"m{d}", device=d, arm=str(d), variable="v", workload="w") for d in ("cpu", None)]
    assert [a.facet for a in group_arms(read_results(writer(tmp_path, records)))] == ["", ""]


def test_config_differences_have_roles(numeric_dir: Path, engines_dir: Path) -> None:
    results = read_results(numeric_dir)
    found = {d.field: d for d in config_differences(results, group_arms(results))}
    assert found["max_batch_tokens"].kind == DECLARED
    assert found["num_blocks"].kind == DERIVED
    assert found["max_batch_tokens"].values["max_batch_tokens = 64"] == "64"
    assert set(found) == {"max_batch_tokens", "num_blocks"}
    results = read_results(engines_dir)
    engines = {d.field: d.kind for d in config_differences(results, group_arms(results))}
    assert engines == dict.fromkeys(("wave", "max_batch_tokens", "num_blocks"), ENGINE_ONLY)


def test_undeclared_difference_is_named(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    records = [
        record_maker(f"r{v}", config={"x": v, "dtype": d}, arm=v, variable="engine.x", workload="w")
        for v, d in ((1, "float32"), (2, "bfloat16"))
    ]
    results = read_results(writer(tmp_path, records))
    found = [(d.field, d.kind) for d in config_differences(results, group_arms(results))]
    assert found == [("x", DECLARED), ("dtype", OTHER)]


def test_headlines_hold_the_numbers_of_the_table(engines_dir: Path, numeric_dir: Path, single_dir: Path) -> None:
    arms = group_arms(read_results(engines_dir))
    static, ours, _ = by_facet(arms)["uniform_burst"]
    rates = [number(a.spread("gen_tok_s").median) for a in (ours, static)]  # type: ignore[union-attr]
    against = ratio(ours, static, "gen_tok_s")
    assert against is not None
    first = headlines(arms)[0]
    assert first.startswith(
        f"uniform_burst: ours generated {rates[0]} tokens/s, static {rates[1]}: {times(against.mean)}"
    )
    assert "3 paired repeats" in first
    assert "equal the reference's" in headlines(arms)[-1]
    assert "Highest throughput at max_batch_tokens = 1024" in headlines(group_arms(read_results(numeric_dir)))[0]
    assert headlines(group_arms(read_results(single_dir)))[0].startswith("ours generated")


def test_equal_arms_with_few_repeats_show_no_difference() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 3, 4):
        for _ in range(100):
            ratios = rng.normal(100, 5, n) / rng.normal(100, 5, n)
            assert "no difference is shown" in ratio_in_words(Ratio.of(ratios))


def blocked(record_maker: Callable, n: int, speeds: dict[str, float], **settings: dict[str, object]) -> list:
    """A sweep in ``n`` blocks; an arm written ``1*`` is the second run of arm 1 in each block."""
    return [
        record_maker(
            f"{arm}-{block}",
            n=12,
            speed=speed * (1 + 0.01 * ((block + i) % 3)),
            config={"x": int(arm[0]), **settings.get(f"arm{arm[0]}", {})},
            arm=arm[0],
            arm_index=int(arm[0]),
            variable="engine.x",
            workload="w",
            repeat=block,
            block=block,
            position=i,
            replica=int("*" in arm),
        )
        for block in range(n)
        for i, (arm, speed) in enumerate(speeds.items())
    ]


def test_enough_blocks_give_verdicts_in_words_and_table(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    folder = writer(tmp_path, blocked(record_maker, 6, {"2": 2.0, "1": 1.0, "1*": 1.0}))
    results = read_results(folder)
    arms = group_arms(results)
    assert [(a.series, a.is_baseline, a.is_replica) for a in arms] == [
        ("x = 1", True, False),
        ("x = 1 again", False, True),
        ("x = 2", False, False),
    ]
    findings = compare_arms(results, arms)
    found = {f.metric: f for f in findings}
    assert {f.arm for f in findings} == {"x = 2"}  # the arm itself is no question
    assert (found["gen_tok_s"].verdict, found["gen_tok_s"].pairs) == ("better", 6)
    assert all(f.noise_floor is not None for f in findings if f.ratio)
    assert any("Generated tokens/s against x = 1: better: x = 2 (" in s for s in headlines(arms, findings))
    (said,) = verdict_sentences(arms, findings, {"gen_tok_s": "tok/s", "ttft_p50_ms": "TTFT p50"})
    ratio, low, high = (found["gen_tok_s"].ratio, found["gen_tok_s"].ratio_low, found["gen_tok_s"].ratio_high)
    assert said.startswith(f"x = 2 against x = 1: better: tok/s {ratio:.2f}× ({low:.2f}×–{high:.2f}×)")
    assert "TTFT p50" in said
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<th>verdict</th>" in page
    assert ">better</td>" in page
    assert "Holm-corrected p of at most 0.05" in page


def test_an_undeclared_difference_makes_the_verdict_confounded(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    sweep = blocked(record_maker, 6, {"1": 1.0, "2": 2.0}, arm2={"dtype": "bfloat16"})
    results = read_results(writer(tmp_path, sweep))
    findings = compare_arms(results, group_arms(results))
    assert {f.verdict for f in findings} == {"confounded"}
    assert findings[0].reason == "also differs: engine.dtype"


def test_arms_that_resolve_alike_are_not_compared(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    """M-fix-08: 0.15 is fifo's default, so naming it changes nothing."""
    sweep = blocked(record_maker, 6, {"1": 1.0, "2": 2.0}, arm1={"x": 0.15}, arm2={"x": 0.15})
    results = read_results(writer(tmp_path, sweep))
    findings = compare_arms(results, group_arms(results))
    assert {(f.verdict, f.reason) for f in findings} == {(None, "identical after resolution: not compared")}


def test_a_group_that_is_the_variable_brings_its_settings(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [record_maker(f"r{v}", config={"x": v, "y": v}, arm=v, variable="engine", workload="w") for v in (1, 2)]
    results = read_results(writer(tmp_path, records))
    assert {d.field: d.kind for d in config_differences(results, group_arms(results))} == {"x": PART, "y": PART}


def test_headlines_of_one_run_an_arm_say_that_it_shows_no_spread(
    tmp_path: Path, record_maker: Callable, writer: Callable, numeric_dir: Path, single_dir: Path
) -> None:
    records = [record_maker(f"r{v}", arm=v, variable="engine.x", workload="w", speed=v) for v in (1, 4)]
    said = headlines(group_arms(read_results(writer(tmp_path, records))))
    assert "One run each: no verdict yet (measure.repeats=5 gives one)." in said
    assert not any("no difference" in sentence for sentence in said)
    folder = writer(
        tmp_path / "engines",
        [
            record_maker(f"{w}{e}", e, arm=e, variable="engine", workload=w, model=f"/long/path/to/{w}")
            for w in "uv"
            for e in ("static", "ours", "transformers")
        ],
    )
    results = read_results(folder)
    arms = group_arms(results)
    assert {a.facet for a in arms} == {"u · u", "v · v"}  # a path is called by its last part
    findings = compare_arms(results, arms)
    said = headlines(arms, findings)
    assert said.count("One run each: no verdict yet (measure.repeats=5 gives one).") == 1
    assert sum("×. Median time to first token" in sentence for sentence in said) == 4  # two arms in two facets
    assert not any("no difference" in sentence for sentence in said)
    assert no_verdict_sentences(findings) == ["No verdict: 1 pair; a verdict needs at least 5."]
    console = Console(file=io.StringIO(), width=200)
    print_summary(folder, console)
    assert console.file.getvalue().count("No verdict: 1 pair; a verdict needs at least 5.") == 1  # type: ignore[attr-defined]
    assert "No verdict: 1 pair; a verdict needs at least 5." in results_table(results, arms, findings)
    assert "one run says nothing about the spread" in headlines(group_arms(read_results(single_dir)))[0]
    two = " ".join(headlines(group_arms(read_results(numeric_dir))))
    assert "With fewer than 5 repeats no difference is shown" in two
    assert "first two" not in two


def test_an_arm_of_other_configs_or_of_one_repeat_twice_is_a_warning(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = []
    for value in (32, 64):
        for digest in ("aaaaaaaa", "bbbbbbbb"):
            identity = {"variable": "engine.x", "workload": "w", "repeat": 0, "config_hash": f"{digest}{value}"}
            records.append(record_maker(f"{value}{digest}", arm=value, **identity))
    results = read_results(writer(tmp_path / "mixed", records))
    text = "\n".join(validity_notes(results, group_arms(results)))
    assert "different configs (config_hash) are in one arm: x = 32, x = 64" in text
    assert "The same repeat is there more than once: x = 32, x = 64" in text
    results = read_results(writer(tmp_path / "clean", records[::2]))
    text = "\n".join(validity_notes(results, group_arms(results)))
    assert "config_hash" not in text
    assert "same repeat" not in text


def test_infinite_values_are_unknown_and_said_so(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    folder = writer(tmp_path, [record_maker(f"r{v}", arm=v, variable="engine.x", workload="w") for v in (1, 2)])
    path = folder / "runs.parquet"
    frame = pd.read_parquet(path)
    for name in frame.columns:
        if frame[name].dtype.kind == "f":
            frame[name] = np.inf
    frame.to_parquet(path)
    results = read_results(folder)
    assert results.runs["gen_tok_s"].isna().all()
    assert any("runs.parquet holds values that are no finite numbers" in note for note in results.notes)
    assert "no rate is known" in headlines(group_arms(results))[0]
    assert write_report(folder).is_file()


def test_nothing_measured_is_said(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    record = record_maker("r", failed_requests=24)
    record.status, record.error = "failed", "no request was answered"
    assert headlines(group_arms(read_results(writer(tmp_path, [record])))) == [
        "no run ended well, so there is nothing to report."
    ]


def test_validity_notes(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    late = record_maker("late", "ours", workload="w", arm="a", repeat=0, tokens_match=False)
    for request in late.requests:
        request.t_submit_ns += 30_000_000
        request.chunks = [c for c in request.chunks if c.time_ns > request.t_submit_ns]
    other = record_maker("other", "ours", workload="w", arm="b", repeat=0)
    other.identity["workload_hash"] = "ff"
    results = read_results(writer(tmp_path, [late, other]))
    text = "\n".join(validity_notes(results, group_arms(results)))
    assert "not given the same requests" in text
    assert "sender was late" in text
    assert "Other token ids than the reference: a" in text
    assert "fewer than 662 samples" in text
    assert "One process an arm" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, UNKNOWN),
        (float("nan"), UNKNOWN),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.005, "1.00"),
        (9.999, "10.00"),
        (12.0, "12"),
        (83.21, "83.2"),
        (123.4, "123"),
        (12345.6, "12,346"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (26.741, "26.74×"),
        (1.0, "1.00×"),
        (0.2, "0.20×"),
        (0.0995, "0.100×"),
        (0.0241, "0.024×"),
        (0.000521, "0.00052×"),
    ],
)
def test_ratios(ratio: float, text: str) -> None:
    assert times(ratio) == text
    assert times(0.0) == "0.00×"


def test_memory() -> None:
    assert memory(512 * 2**20) == "512 MiB"
    assert memory(3 * 2**29) == "1.50 GiB"


def test_a_busy_machine_is_said_of_the_arms_it_disturbed(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [record_maker("a", "static", arm="static"), record_maker("b", "ours", arm="ours")]
    for record, others in zip(records, (0.4, 1.3), strict=True):
        record.environment |= {"load.cores": 2, "load.others_cores": others, "load.average_1min_start": 3.21}
    results = read_results(writer(tmp_path, records))
    (note,) = [n for n in validity_notes(results, group_arms(results)) if "busy" in n]
    assert note == (
        "The machine was busy while this was measured: ours (others used 1.3 of 2 cores, load 3.2 at the start)."
    )
