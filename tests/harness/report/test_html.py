"""The page: complete, standing alone, and honest about what it could not read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml

from harness.report import ResultsError, write_report
from harness.report.adoption import adoption_checks
from harness.report.arms import baseline_of, by_facet, group_arms, ratio
from harness.report.evidence import sweep_command
from harness.report.figures import slug
from harness.report.over_time import over_time_section
from harness.report.quantity import times
from harness.report.read import read_results

_VOID = {"meta", "br", "img", "link", "hr", "input"}


class _Balance(HTMLParser):
    """Fails on a tag that is closed without being open; collects ids and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        self._collect(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._collect(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _collect(self, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def sections(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


@pytest.fixture(scope="module")
def _pages() -> dict[Path, str]:
    return {}


@pytest.fixture
def page_of(_pages: dict[Path, str]) -> Callable[[Path], str]:
    def text(directory: Path) -> str:
        if directory not in _pages:
            _pages[directory] = write_report(directory).read_text(encoding="utf-8")
        return _pages[directory]

    return text


def test_page_is_well_formed_and_needs_nothing_from_outside(engines_dir: Path, page_of: Callable) -> None:
    text = page_of(engines_dir)
    parser = _Balance()
    parser.feed(text)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert all(address.startswith("#") and address[1:] in parser.ids for address in parser.addresses)
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert str(engines_dir) not in text


def test_page_of_engines_has_every_part(engines_dir: Path, page_of: Callable) -> None:
    text = page_of(engines_dir)
    parts = ["Arms", "Results", "Requests", "Service level", "Throughput", "Throughput against latency"]
    parts += ["Latency distributions", "Padding"]
    parts += ["Over time", "Before adopting"]
    parts += ["What caused the slowest", "Memory", "Failures", "Settings"]
    assert sections(text) == [*parts, "Provenance", "Where the numbers come from", "Run it again"]
    assert "What does continuous batching gain over padded static batching?" in text
    assert "cb-bench -m &#x27;x=a b&#x27;" in text
    assert "engine stopped: no blocks left" in text
    assert "engine=ours" in text  # the interrupted job that has no row
    assert 'class="few"' in text  # p99 of 24 requests
    assert "generated_tokens / wall_s" in text  # definitions come from harness.tables
    assert "test CPU" in text


def test_the_command_of_a_sweep_stands_before_those_of_its_arms(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    directory = writer(tmp_path, [record_maker(f"r{k}", variable="engine", arm=k, repeat=0) for k in range(2)])
    given = ["engine='null',ours", "model=tiny", "workload.low=a b", "resume=true", "experiment.variable='engine'"]
    recorded = {"hydra": {"sweep": {"dir": "${results_dir}/x"}, "job": {"id": "???"}, "overrides": {"task": given}}}
    (directory / "multirun.yaml").write_text(yaml.safe_dump(recorded))
    said = write_report(directory).read_text(encoding="utf-8").split("<h2>Run it again</h2>")[1]
    assert said.startswith("\n<pre>cb-bench -m engine=null,ours model=tiny &#x27;workload.low=a b&#x27;</pre>")
    assert "<summary>One arm alone (1)</summary>" in said
    for unreadable in ("hydra: [", "hydra: 3", "hydra: {overrides: {task: []}}"):
        (directory / "multirun.yaml").write_text(unreadable)
        assert sweep_command(directory) is None


def test_runs_that_are_no_reference_say_why(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    record = record_maker("r")
    record.environment["outside_plan_scope"] = ["no CUDA GPU"]
    text = write_report(writer(tmp_path, [record])).read_text(encoding="utf-8")
    assert "on one CUDA GPU. Here: no CUDA GPU.</p>" in text


def test_what_the_arms_are_is_said_where_they_are_engines(
    engines_dir: Path, numeric_dir: Path, page_of: Callable, tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    table = page_of(engines_dir).split("<h2>Arms</h2>")[1].split("</section>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", table)
    assert [row[0] for row in rows] == ["static", "ours", "transformers"]
    assert rows[0][1].startswith("padded static batching")
    assert "wave = 24" in rows[0][2]
    assert "max_batch_tokens = 512" in rows[1][2]
    assert "Arms" not in sections(page_of(numeric_dir))  # there each is a value of the variable, and named so
    single = write_report(writer(tmp_path / "one", [record_maker("r", config={"page_size": 8})])).read_text()
    assert "<td>page_size = 8, dtype = float32</td>" in single


def test_pictures_follow_the_page_colour_and_are_saved(engines_dir: Path, page_of: Callable) -> None:
    text = page_of(engines_dir)
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#1b1d21" not in text.split("</style>", 1)[1].lower()
    names = {p.stem for p in (engines_dir / "plots").glob("*.svg")}
    assert names == {p.stem for p in (engines_dir / "plots").glob("*.png")}
    assert {"throughput-uniform_burst", "ttft-cdf-mixed_staged", "itl-cdf-mixed_staged", "padding"} <= names
    for path in (engines_dir / "plots").glob("*.svg"):
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_numeric_sweep_is_drawn_against_its_variable(numeric_dir: Path, page_of: Callable) -> None:
    text = page_of(numeric_dir)
    assert sections(text)[3] == "Against the variable"
    assert "gen_tok_s against engine.max_batch_tokens" in text
    assert "Not on the axis: max_batch_tokens = auto" in text
    assert (numeric_dir / "plots" / "gen_tok_s-vs-variable.png").stat().st_size > 5_000
    assert "Padding" not in sections(text)


def test_a_single_run_is_titled_by_what_it_is(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    plain = writer(tmp_path / "3f9c0a51", [record_maker("r", workload="staged")])
    assert "<h1>ours · tiny · staged</h1>" in write_report(plain).read_text()
    identity = {"experiment": "mbt", "variable": "engine.max_batch_tokens", "arm": 64, "workload": "staged"}
    of_sweep = writer(tmp_path / "0-77", [record_maker("r", **identity)])
    text = write_report(of_sweep).read_text()
    assert "<h1>ours, max_batch_tokens = 64 · tiny · staged</h1>" in text
    assert "experiment mbt" in text


def test_the_table_of_results_holds_the_main_columns_and_folds_the_others(engines_dir: Path, page_of: Callable) -> None:
    text = page_of(engines_dir)
    main, folded = text.split(" more columns: ")
    assert "<th>TTFT p95" in main
    assert "<th>requests ok<small>runs ok</small></th>" in main
    assert "<th>TPOT p50" not in main
    assert "<th>TPOT p50" in folded.split("</details>")[0]


def test_ratios_are_the_same_all_over_the_page(engines_dir: Path, page_of: Callable) -> None:
    results = read_results(engines_dir)
    arms = group_arms(results)
    for members in by_facet(arms).values():
        baseline = baseline_of(members)
        assert baseline is not None
        for arm in members:
            if arm is not baseline and len(arm.measured):
                paired = ratio(arm, baseline, "gen_tok_s")
                assert paired is not None
                throughput = adoption_checks(results, arm, baseline, [])[2]
                assert throughput.evidence.startswith(times(paired.mean))


def test_runs_over_time_are_limited_and_it_is_said(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    identity = {"variable": "engine.page_size", "workload": "staged"}
    records = [record_maker(f"r{k}", arm=16 * (k + 1), steps=k > 0, **identity) for k in range(7)]
    text = write_report(writer(tmp_path, records)).read_text()
    over_time = text[text.index("<h2>Over time</h2>") :]
    over_time = over_time[: over_time.index("</section>")]
    assert "The first 6 of 7 arms. Arms that are compared have the same time axis." in over_time
    assert "Without a step log: page_size = 16." in over_time
    assert len(re.findall("<h3>Requests: ", over_time)) == 6
    assert len(re.findall("<h3>Steps: ", over_time)) == 5
    assert over_time.count("<figcaption>Requests in order") == 1  # what all pictures show is said once


def test_run_without_step_log_shows_its_requests(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    text = write_report(writer(tmp_path, [record_maker("r", failed_requests=3, steps=False)])).read_text()
    assert "Requests in order of submission" in text
    assert "out of blocks &lt;b&gt;" in text


def test_same_tables_give_the_same_page(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    directory = writer(tmp_path, [record_maker("r")])
    first = write_report(directory).read_bytes()
    assert write_report(directory).read_bytes() == first
    assert not list(directory.glob(".*"))


def test_sweep_of_failures_only_still_has_a_page(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    record = record_maker("r", failed_requests=24)
    record.status, record.error = "failed", "no request was answered"
    text = write_report(writer(tmp_path, [record])).read_text()
    assert "nothing to report" in text
    assert "no throughput to draw" in text
    assert "no request was answered" in text


def test_missing_broken_and_old_tables_are_said_and_the_rest_is_shown(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    directory = writer(tmp_path, [record_maker("r")])
    (directory / "steps.parquet").unlink()
    (directory / "itl.parquet").write_bytes(b"PAR1 cut short")
    runs = pd.read_parquet(directory / "runs.parquet")
    runs.drop(columns=["sent_request_s"]).assign(old_name=1).to_parquet(directory / "runs.parquet")
    (directory / "manifest.jsonl").write_text('{"job": "."}\n')
    text = write_report(directory).read_text()
    assert "steps.parquet is missing" in text
    assert "itl.parquet cannot be read" in text
    assert "runs.parquet comes from another version: without sent_request_s" in text
    assert "manifest.jsonl cannot be read" in text
    assert "Latency distributions" in sections(text)  # TTFT is still there
    assert "Requests in order of submission" in text  # instead of the step log


def test_unreadable_runs_are_an_error_in_one_line(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    directory = writer(tmp_path, [record_maker("r")])
    (directory / "runs.parquet").write_bytes(b"nothing")
    with pytest.raises(ResultsError, match=r"runs\.parquet cannot be read") as error:
        write_report(directory)
    assert "\n" not in str(error.value)
    assert not (directory / "report.html").exists()


def test_no_runs_are_said_in_one_line(tmp_path: Path, record_maker: Callable, writer: Callable) -> None:
    directory = writer(tmp_path, [record_maker("r")])
    runs = pd.read_parquet(directory / "runs.parquet")
    runs.iloc[:0].to_parquet(directory / "runs.parquet")
    (directory / "telemetry.parquet").unlink(missing_ok=True)
    with pytest.raises(ResultsError) as error:
        write_report(directory)
    assert str(error.value) == f"{directory}: no runs: its runs table has no rows"


@pytest.mark.parametrize("name", ["a" * 240, "測" * 80], ids=["ascii", "three bytes each"])
def test_arms_with_long_names_have_pictures_of_their_own(
    name: str, tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [record_maker(f"r{k}", variable="engine.backend", arm=f"{name}{k}") for k in range(2)]
    results = read_results(writer(tmp_path, records))
    over_time_section(results, group_arms(results))
    pictures = [path.name for path in (tmp_path / "plots").glob("requests-*.png")]
    assert len(pictures) == 2
    assert all(name[:20] in picture and len(picture.encode()) < 130 for picture in pictures)


def test_a_picture_is_named_by_its_label_and_a_long_one_by_its_beginning() -> None:
    assert slug("requests", "page_size = 16") == "requests-page_size-=-16"
    assert slug("pareto", "") == "pareto"
    assert slug("requests", "x" * 111) == "requests-" + "x" * 111
    cut = slug("requests", "x" * 112)
    assert len(cut) == 120
    assert cut.startswith("requests-" + "x" * 102 + "-")
    assert cut != slug("requests", "x" * 113)
    assert len(slug("rate", "測" * 80).encode()) in (118, 119, 120)  # three bytes each: none is cut in two


def test_sweep_that_was_not_joined_is_read_from_its_runs(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    for i in range(2):
        writer(tmp_path / f"job{i}" / "r0", [record_maker(f"r{i}", repeat=i)])
    results = read_results(tmp_path)
    assert len(results.runs) == 2
    assert "2 run folders" in results.notes[0]


def test_the_head_shows_the_date_and_gates_are_explained(
    tmp_path: Path, record_maker: Callable, writer: Callable
) -> None:
    records = [record_maker(f"2026010{day}T235959-ab-r0", arm=str(day)) for day in (2, 1)]
    text = write_report(writer(tmp_path, records)).read_text(encoding="utf-8")
    assert "measured 2026-01-01 to 2026-01-02 (UTC)" in text
    for term in ("ratio", "same tokens", "requests ok", "runs ok", "t_first [s]"):
        assert f"<dt>{term}</dt>" in text
