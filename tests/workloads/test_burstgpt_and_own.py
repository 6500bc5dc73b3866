"""BurstGPT in both schemas and own traces: small files in the formats of the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workloads import Workload, build_workload
from workloads.build import check_sources
from workloads.config import TraceWorkload
from workloads.traces import TraceError, read_trace

V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
V2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
RECORDED = {"kind": "as_recorded"}


def write(path: Path, *lines: str, newline: str = "\n", bom: bool = False) -> str:
    path.write_bytes(("\ufeff" if bom else "").encode() + (newline.join(lines) + newline).encode())
    return str(path)


def replay(path: str, format: str, **settings: Any) -> Workload:
    return build_workload(TraceWorkload(path=path, format=format, **settings), RECORDED, vocab_size=5000, seed=0)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [False, True])
def test_both_schemas_say_the_same(tmp_path: Path, newline: str, bom: bool) -> None:
    first = write(
        tmp_path / "1.csv",
        V1,
        "5,ChatGPT,472,18,490,Conversation log",
        "45.25,GPT-4,1087,230,1317,API log",
        newline=newline,
        bom=bom,
    )
    second = write(
        tmp_path / "2.csv",
        V2,
        "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,ChatGPT,472,18,490,Conversation log",
        "19440150.25,,,GPT-4,1087,230,1317,API log",
        newline=newline,
        bom=bom,
    )
    for path in (first, second):
        w = replay(path, "burstgpt")
        assert [(r.due_s, len(r.prompt_ids), r.max_new_tokens) for r in w.requests] == [
            (0, 472, 18),
            (40.25, 1087, 230),
        ]
        assert w.notes == ()
    assert replay(first, "burstgpt").content_hash == replay(second, "burstgpt").content_hash


def test_failed_and_unsorted_rows_are_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "1.csv",
        V1,
        "9,ChatGPT,10,5,15,API log",
        "5,ChatGPT,20,0,20,API log",
        "7,ChatGPT,30,6,36,API log",
    )
    w = replay(path, "burstgpt")
    # Time counts from the first row, also where that is not used.
    assert [(r.due_s, len(r.prompt_ids)) for r in w.requests] == [(2.0, 30), (4.0, 10)]
    notes = (
        f"{path}: 1 of 3 rows are left out: no prompt or no output token",
        f"{path}: 1 of 3 rows stand after a later one: sorted by time",
    )
    assert w.notes == notes
    assert check_sources(TraceWorkload(path=path, format="burstgpt"), RECORDED) == notes
    assert all("\n" not in note for note in notes)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((V1.replace("Request tokens", "Prompt tokens"), "5,C,1,1,2,x"), r":1: column 'Request tokens': .* a header"),
        ((V1, "soon,C,1,1,2,x"), r":2: column 'Timestamp': expected seconds .* got 'soon'"),
        ((V1, "-1,C,1,1,2,x"), r":2: column 'Timestamp'"),
        ((V1, "nan,C,1,1,2,x"), r":2: column 'Timestamp'"),
        ((V1, "5,C,1.5,1,2,x"), r":2: column 'Request tokens'"),
        ((V1, "5,C,1"), r":2: column 'Response tokens': expected 6 fields"),
        ((V1,), "no rows"),
        ((V1, "5,C,1," + "9" * 200_000), "not a csv file"),
    ],
)
def test_malformed_burstgpt(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(write(tmp_path / "b.csv", *lines), "burstgpt")
    assert "\n" not in str(caught.value)


def test_own_trace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        '{"due_s": 2.5, "prompt_tokens": 7, "output_tokens": 3}',
        "",
        '{"output_tokens": 4, "due_s": 0.5, "prompt_tokens": 9}',
        '{"due_s": 3, "prompt_tokens": 0, "output_tokens": 3}',
        newline="\r\n",
        bom=True,
    )
    w = replay(path, "own", time_scale=2.0)
    assert [(r.due_s, len(r.prompt_ids), r.max_new_tokens) for r in w.requests] == [(1.0, 9, 4), (5.0, 7, 3)]
    assert len(w.notes) == 2
    w = replay(path, "own", window_start_s=1.0, window_end_s=3.0, length_cap=5, output_cap=2)
    assert [(r.due_s, len(r.prompt_ids), r.max_new_tokens) for r in w.requests] == [(1.5, 5, 2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"due_s": 1, "prompt_tokens": 1}', r":1: column 'output_tokens': expected a value"),
        ('{"due_s": 1, "prompt_tokens": 1, "output_tokens": 1, "id": 4}', r":1: column 'id': expected only the keys"),
        ('{"due_s": true, "prompt_tokens": 1, "output_tokens": 1}', r":1: column 'due_s'"),
        ('{"due_s": 1e10, "prompt_tokens": 1, "output_tokens": 1}', r":1: column 'due_s'"),
        ('{"due_s": 1, "prompt_tokens": -1, "output_tokens": 1}', r":1: column 'prompt_tokens'"),
        ("5", r":1: column 1: expected a JSON object"),
    ],
)
def test_malformed_own(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "own.jsonl", line), "own")
