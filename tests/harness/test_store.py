from __future__ import annotations

import os

import pandas as pd
import pytest

from harness import store
from harness.metrics import compute_tables
from harness.record import Outcome, RequestRecord, RunRecord, TokenChunk
from harness.tables import TABLES, SchemaError


def tables(run_id="a", engine="ours", tokens=((1, 2), (3,)), **identity):
    requests = [
        RequestRecord(
            f"r{k}", 3, 4, t_sched_ns=0, t_submit_ns=0, t_done_ns=3_000_000,
            chunks=[TokenChunk((i + 1) * 1_000_000, (t,)) for i, t in enumerate(ids)], outcome=Outcome.OK_LENGTH,
        )
        for k, ids in enumerate(tokens)
    ]  # fmt: skip
    identity = {"run_id": run_id, "engine": engine, "model": "m", "workload_hash": "w", "repeat": 0} | identity
    return compute_tables(RunRecord(identity, requests, t_start_ns=0, t_end_ns=3_000_000))


def test_what_is_written_is_what_is_read(tmp_path):
    store.write_result(tmp_path / "x", tables())
    read = store.read_result(tmp_path / "x")
    assert list(read) == list(TABLES)
    assert list(read["runs"]["generated_tokens"]) == [3]
    assert [list(ids) for ids in read["tokens"]["token_ids"]] == [[1, 2], [3]]
    assert TABLES["runs"].dtypes == {n: str(d) for n, d in read["runs"].dtypes.items()}
    assert read["runs"]["peak_gpu_used_bytes"].isna().all()
    csv = pd.read_csv(tmp_path / "x" / "tokens.csv")
    assert list(csv["token_ids"]) == ["[1, 2]", "[3]"]
    assert sorted(p.suffix for p in (tmp_path / "x").iterdir()) == [".csv"] * len(TABLES) + [".parquet"] * len(TABLES)


def test_an_interrupted_write_leaves_no_readable_half(tmp_path, monkeypatch):
    store.write_result(tmp_path, tables("first"))
    moved = []
    replace = os.replace

    def interrupted(source, target):
        if len(moved) == 5:
            raise KeyboardInterrupt
        moved.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write_result(tmp_path, tables("second"))
    assert len(moved) == 5
    assert not store.is_result(tmp_path)
    with pytest.raises(store.NotAResult, match=r"no runs\.parquet"):
        store.read_result(tmp_path)
    assert not list(tmp_path.glob(".partial*"))


def test_a_wrong_frame_touches_nothing(tmp_path):
    store.write_result(tmp_path, tables("first"))
    wrong = tables("second")
    wrong["runs"] = wrong["runs"].drop(columns="engine")
    with pytest.raises(SchemaError):
        store.write_result(tmp_path, wrong)
    with pytest.raises(ValueError, match="missing: runs"):
        store.write_result(tmp_path, {n: f for n, f in tables().items() if n != "runs"})
    assert list(store.read_result(tmp_path, ["runs"])["runs"]["run_id"]) == ["first"]


def test_combine_keeps_order_and_empty_tables(tmp_path):
    store.write_result(tmp_path / "1", tables("b"))
    failed = compute_tables(RunRecord({"run_id": "a", "engine": "ours"}, status="failed", error="no"))
    store.write_result(tmp_path / "2", failed)
    both = store.combine([tmp_path / "1", tmp_path / "2"])
    assert list(both["runs"]["run_id"]) == ["b", "a"]
    assert list(both["runs"]["status"]) == ["ok", "failed"]
    assert both["runs"]["ttft_p50_ms"].isna().tolist() == [False, True]
    assert both["steps"].empty
    store.write_result(tmp_path / "all", both)
    assert len(store.read_result(tmp_path / "all")["requests"]) == 2


def test_a_folder_of_another_version_says_so(tmp_path):
    store.write_result(tmp_path, tables())
    runs = pd.read_parquet(tmp_path / "runs.parquet")
    runs.drop(columns="arm").to_parquet(tmp_path / "runs.parquet")
    (tmp_path / "phases.parquet").unlink()
    read = store.read_result(tmp_path)  # what an older version did not know is unknown
    assert read["runs"]["arm"].isna().all()
    assert list(read["phases"].columns) == list(TABLES["phases"].dtypes)
    runs.assign(speed=1).to_parquet(tmp_path / "runs.parquet")
    with pytest.raises(store.NotAResult, match=r"another version.*speed"):
        store.read_result(tmp_path)
    (tmp_path / "steps.parquet").unlink()
    with pytest.raises(store.NotAResult, match="incomplete"):
        store.read_result(tmp_path, ("steps",))


def test_conform_fills_and_refuses():
    frame = store.conform("itl", pd.DataFrame({"run_id": ["a"], "itl_ms": [1.5]}))
    assert frame["icl_ms"].isna().all()
    with pytest.raises(ValueError, match="does not know: speed"):
        store.conform("itl", pd.DataFrame({"speed": [1]}))
    with pytest.raises(ValueError, match="holds a value"):
        store.conform("itl", pd.DataFrame({"itl_ms": ["fast"]}))
