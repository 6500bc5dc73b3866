"""Lengths from tables: pairs, single columns, weights, and ShareGPT files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads import Workload, build_workload
from workloads.build import check_sources
from workloads.config import LengthConfig, LengthTableWorkload, SessionsWorkload, SyntheticWorkload
from workloads.sharegpt import write_length_table
from workloads.traces import TraceError

BURST = {"kind": "burst"}


class Words:
    """A tokenizer of one id a word."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "lengths.csv"
    file.write_bytes("\ufeffid,prompt_tokens,output_tokens,n\r\na,10,1,3\r\nb,200,20,1\r\nc,0,5,4\r\n".encode())
    return file


def build(cfg: Any) -> Workload:
    return build_workload(cfg, BURST, vocab_size=500, seed=2)


def test_pairs_stay_together(path: Path) -> None:
    w = build(LengthTableWorkload(path=str(path), requests=4000))
    pairs = [(len(r.prompt_ids), r.max_new_tokens) for r in w.requests]
    assert set(pairs) == {(10, 1), (200, 20)}
    assert pairs.count((10, 1)) / 4000 == pytest.approx(0.5, abs=0.04)
    assert w.notes == (f"{path}: 1 of 3 rows are left out: no token, or no weight",)
    assert check_sources(LengthTableWorkload(path=str(path)), BURST) == w.notes
    assert len(w.spec["table_sha256"]) == 64


def test_weights_scales_and_caps(path: Path) -> None:
    w = build(
        LengthTableWorkload(
            path=str(path), requests=4000, weight_column="n", length_scale=0.5, length_cap=80, output_cap=4
        )
    )
    pairs = [(len(r.prompt_ids), r.max_new_tokens) for r in w.requests]
    assert set(pairs) == {(5, 1), (80, 4)}
    assert pairs.count((5, 1)) / 4000 == pytest.approx(0.75, abs=0.04)


def test_a_column_as_a_distribution(path: Path) -> None:
    lengths = LengthConfig("table", path=str(path), column="prompt_tokens", weight_column="n")
    cfg = SyntheticWorkload(requests=2000, prompt_tokens=lengths, output_tokens=LengthConfig("fixed", value=3))
    w = build(cfg)
    drawn = [len(r.prompt_ids) for r in w.requests]
    assert set(drawn) == {10, 200}
    assert drawn.count(10) / 2000 == pytest.approx(0.75, abs=0.05)
    assert w.notes == (f"{path}: 1 of 3 rows are left out: no token, or no weight",)
    assert len(w.spec["prompt_table_sha256"]) == 64


def test_conversations_take_tables_too(path: Path) -> None:
    lengths = LengthConfig("table", path=str(path), column="output_tokens")
    fixed = LengthConfig("fixed", value=2)
    w = build(SessionsWorkload(sessions=40, turns=fixed, new_tokens=fixed, output_tokens=lengths))
    assert {r.max_new_tokens for r in w.requests} == {1, 5, 20}
    assert len(w.spec["output_tokens_table_sha256"]) == 64


def test_sharegpt_becomes_a_table(tmp_path: Path) -> None:
    said = [
        {
            "id": "a",
            "conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}],
        },
        {"id": "b", "conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "x"}]},
        {
            "id": "c",
            "conversations": [
                {"from": "system", "value": "be brief"},
                {"from": "human", "value": "y\u2028z"},
                {"from": "gpt", "value": "w"},
                {"from": "human", "value": "not this one"},
            ],
        },
        {"id": "d"},
    ]
    source, table = tmp_path / "sharegpt.json", tmp_path / "lengths.csv"
    source.write_text(json.dumps(said))
    assert write_length_table(source, Words(), table) == (2, 2)
    assert table.read_text() == "prompt_tokens,output_tokens\n3,2\n2,1\n"
    assert {len(r.prompt_ids) for r in build(LengthTableWorkload(path=str(table), requests=50)).requests} == {2, 3}


@pytest.mark.parametrize(
    ("text", "message"), [("[{", "not JSON"), ("{}", "a JSON list"), ("[1, {}]", "none of its 2 conversations")]
)
def test_malformed_sharegpt(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        write_length_table(tmp_path / "s.json", Words(), tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_column": "tokens"}, r":1: column 'tokens': expected a header with"),
        ({"prompt_column": "id"}, r":2: column 'id': expected a whole number"),
        ({"weight_column": "id"}, r":2: column 'id': expected a weight"),
        ({"requests": 0}, r"workload\.requests is 0"),
        ({"length_scale": -1.0}, r"workload\.length_scale is -1"),
        ({"path": None}, r"workload\.path is not set"),
    ],
)
def test_settings_that_mean_nothing(path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(LengthTableWorkload(**({"path": str(path)} | given)))


def test_a_table_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n0,4\n")
    with pytest.raises(TraceError, match="none of its 1 rows"):
        build(LengthTableWorkload(path=str(tmp_path / "t.csv")))


def test_a_missing_table_is_found_before_a_model_is_loaded(tmp_path: Path) -> None:
    lengths = LengthConfig("table", path=str(tmp_path / "none.csv"), column="n")
    with pytest.raises(ValueError, match=r"workload\.prompt_tokens: cannot read table of lengths"):
        check_sources(SyntheticWorkload(prompt_tokens=lengths, output_tokens=LengthConfig("fixed", value=1)), BURST)
