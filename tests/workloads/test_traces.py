from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads import Workload, build_workload
from workloads.config import TraceWorkload
from workloads.traces import TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path: Path, *lines: str, newline: str = "\n", bom: bool = False) -> str:
    path.write_bytes(("\ufeff" if bom else "").encode() + (newline.join(lines) + newline).encode())
    return str(path)


def replay(path: str, arrival: str = "as_recorded", **settings: Any) -> Workload:
    return build_workload(TraceWorkload(path=path, **settings), {"kind": arrival}, vocab_size=5000, seed=0)


def mooncake_row(t_ms: float, prompt: int, output: int, hash_ids: list[int]) -> str:
    return json.dumps({"timestamp": t_ms, "input_length": prompt, "output_length": output, "hash_ids": hash_ids})


class TestAzure:
    ROWS = (
        "2023-11-16 18:15:46.0010000,374,44",
        "2023-11-16 18:15:46.0020000,396,109",
        "2023-11-16 18:15:46.0090000,879,55",
        "2023-11-16 18:15:46.0110000,91,16",
    )

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    @pytest.mark.parametrize("bom", [False, True])
    def test_b23_fractions_of_seconds_are_kept(self, tmp_path: Path, newline: str, bom: bool) -> None:
        built = replay(write(tmp_path / "a.csv", AZURE, *self.ROWS, newline=newline, bom=bom))
        assert [r.due_s for r in built.requests] == [0, 0.001, 0.008, 0.010]
        assert [len(r.prompt_ids) for r in built.requests] == [374, 396, 879, 91]
        assert [r.max_new_tokens for r in built.requests] == [44, 109, 55, 16]

    def test_b23_second_boundary_no_fraction_zones_and_order(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.csv",
            AZURE,
            "2023-11-16 18:15:47,2,2",
            "2023-11-16 18:15:46.9999999,1,1",
            "2023-11-16T18:15:47.5Z,3,3",
            "2023-11-16 19:15:48.25+01:00,4,4",
            "2023-11-17 00:00:00,5,5",
        )
        trace = read_trace(path, "azure")
        assert [r.t_ns for r in trace.rows] == [0, 100, 500_000_100, 1_250_000_100, 20_653_000_000_100]
        assert [r.prompt_tokens for r in trace.rows] == [1, 2, 3, 4, 5]
        assert trace.unsorted_rows == 1

    def test_columns_in_any_order_and_more_of_them(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "x,GeneratedTokens,TIMESTAMP,ContextTokens", "9,7,2023-11-16 18:15:46,5")
        row = read_trace(path, "azure").rows[0]
        assert (row.prompt_tokens, row.output_tokens, row.line) == (5, 7, 2)

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (("TIMESTAMP,ContextTokens", "x,1"), r":1: column 'GeneratedTokens': expected a header"),
            ((AZURE, ROWS[0], "2023-11-16 18:15:46.5,abc,1"), r":3: column 'ContextTokens': .* got 'abc'"),
            ((AZURE, "2023-11-16 18:15:46.5,1,-1"), r":2: column 'GeneratedTokens': .* got '-1'"),
            ((AZURE, "2023-11-16 18:15:46.5,1,1.5"), r":2: column 'GeneratedTokens'"),
            ((AZURE, "yesterday,1,1"), r":2: column 'TIMESTAMP': expected a time like"),
            ((AZURE, "2023-13-16 18:15:46,1,1"), r":2: column 'TIMESTAMP'"),
            ((AZURE, "2023-11-16 18:15:46+99:59,1,1"), r":2: column 'TIMESTAMP'"),
            ((AZURE, "2023-11-16 18:15:46+05:99,1,1"), r":2: column 'TIMESTAMP'"),
            ((AZURE, "2023-11-16 18:15:46,1" + "0" * 5000 + ",1"), r":2: column 'ContextTokens'"),
            ((AZURE, "2023-11-16 18:15:46,1"), r":2: column 'GeneratedTokens': expected 3 fields"),
            ((AZURE,), r"no rows"),
            (
                (AZURE, "2023-11-16 18:15:46,0,1", "2023-11-16 18:15:47,1,0"),
                r"none of its 2 rows can be used: no prompt",
            ),
        ],
    )
    def test_malformed_files_name_line_and_column(self, tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
        path = write(tmp_path / "bad.csv", *lines)
        with pytest.raises(TraceError, match=message) as caught:
            read_trace(path, "azure")
        assert "\n" not in str(caught.value)
        assert path in str(caught.value)

    def test_unreadable_files_are_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        for path, message in (
            (str(tmp_path / "absent.csv"), "No such file"),
            (str(tmp_path), "directory"),
            (str(tmp_path / "binary"), "not UTF-8"),
            (None, r"workload\.path is not set"),
        ):
            with pytest.raises(TraceError, match=message) as caught:
                read_trace(path, "azure")
            assert "\n" not in str(caught.value)

    def test_rows_without_tokens_are_left_out_and_counted(self, tmp_path: Path) -> None:
        built = replay(write(tmp_path / "a.csv", AZURE, self.ROWS[0], "2023-11-16 18:15:47,0,4", self.ROWS[3]))
        assert len(built) == 2
        assert built.spec["trace_empty_rows_skipped"] == 1
        assert built.spec["trace_rows"] == 3
        assert len(built.spec["trace_sha256"]) == 64


class TestReplay:
    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        rows = [f"2023-11-16 18:15:{k:02d},{100 * (k + 1)},{10 * (k + 1)}" for k in range(10)]
        return write(tmp_path / "a.csv", AZURE, *rows)

    def test_window_and_time_scale(self, path: str) -> None:
        built = replay(path, window_start_s=2, window_end_s=5, time_scale=0.5)
        assert [len(r.prompt_ids) for r in built.requests] == [300, 400, 500]
        assert [r.due_s for r in built.requests] == [0, 0.5, 1.0]

    @pytest.mark.parametrize(
        ("end_s", "window"), [(30.0, "between 20 s and 30 s"), (None, "from 20 s on")], ids=["closed", "open"]
    )
    def test_a_window_without_rows_says_what_the_trace_spans(self, path: str, end_s: float | None, window: str) -> None:
        with pytest.raises(ValueError, match=rf"no rows {window}: the trace spans 0 to 9\.0 s"):
            replay(path, window_start_s=20.0, window_end_s=end_s)

    def test_sampling(self, path: str) -> None:
        first = replay(path, max_requests=4)
        spread = replay(path, max_requests=4, sampling="spread")
        assert [r.due_s for r in first.requests] == [0, 1, 2, 3]
        assert [r.due_s for r in spread.requests] == [0, 2, 5, 7]

    def test_length_scale_and_caps(self, path: str) -> None:
        built = replay(path, length_scale=0.1, length_cap=50, output_cap=4)
        assert [len(r.prompt_ids) for r in built.requests] == [10, 20, 30, 40, 50, 50, 50, 50, 50, 50]
        assert [r.max_new_tokens for r in built.requests] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]

    def test_another_arrival_keeps_the_lengths(self, path: str) -> None:
        built = replay(path, arrival="burst")
        assert {r.due_s for r in built.requests} == {0.0}
        assert len(built.requests[9].prompt_ids) == 1000

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"format": "azur"}, "Did you mean 'azure'"),
            ({"sampling": "spred"}, "Did you mean 'spread'"),
            ({"time_scale": 0}, r"workload\.time_scale"),
            ({"length_cap": 0}, r"workload\.length_cap"),
            ({"window_start_s": 5, "window_end_s": 5}, "window"),
            ({"window_start_s": 100}, r"spans 0 to 9\.0 s"),
        ],
    )
    def test_bad_settings(self, path: str, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replay(path, **settings)


class TestMooncake:
    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        return write(
            tmp_path / "m.jsonl",
            mooncake_row(0, 1200, 5, [0, 1, 2]),
            mooncake_row(0, 1024, 6, [0, 1]),
            mooncake_row(1500.5, 700, 7, [0, 3]),
            mooncake_row(3000, 100, 8, [9]),
        )

    def test_equal_hash_ids_are_equal_blocks(self, path: str) -> None:
        requests = replay(path, format="mooncake").requests
        assert [len(r.prompt_ids) for r in requests] == [1200, 1024, 700, 100]
        assert [r.due_s for r in requests] == [0, 0, 1.5005, 3.0]
        a, b, c, _ = (r.prompt_ids for r in requests)
        assert a[:1024] == b
        assert a[:512] == c[:512]
        assert a[512:516] != c[512:516]
        assert [(r.prefix_group, r.prefix_tokens) for r in requests] == [(0, 512), (0, 512), (0, 512), (None, 0)]

    def test_scaling_keeps_what_is_shared(self, path: str) -> None:
        requests = replay(path, format="mooncake", length_scale=1 / 32, length_cap=40).requests
        a, b, c, d = (r.prompt_ids for r in requests)
        assert [len(p) for p in (a, b, c, d)] == [2 * 16 + 6, 32, 16 + 6, 4]
        assert a[:32] == b
        assert a[:16] == c[:16]
        assert requests[0].prefix_tokens == 16

    def test_hit_fraction_of_an_unlimited_cache(self, path: str) -> None:
        assert replay(path, format="mooncake").spec["block_hit_fraction"] == pytest.approx(3 / 8)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", r":2: column 2: expected a JSON object"),
            ("[1]", r":2: column 1: expected a JSON object"),
            ('{"timestamp": 0}', r":2: column 'input_length': expected a value"),
            (mooncake_row(0, 600, 1, [1]), r":2: column 'hash_ids': expected 2 ids for 600 tokens"),
            (mooncake_row(0, -1, 1, [1]), r":2: column 'input_length'"),
            ('{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": [1]}', r":2: column 'timestamp'"),
            ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', r":2: column 'hash_ids'"),
            (mooncake_row(1e308, 1, 1, [1]), r":2: column 'timestamp': expected milliseconds, at most 1e\+13"),
            (mooncake_row(10**400, 1, 1, [1]), r":2: column 'timestamp'"),
            (mooncake_row(0, 10**400, 1, [1]), r":2: column 'input_length'"),
        ],
    )
    def test_malformed_lines_name_line_and_column(self, tmp_path: Path, line: str, message: str) -> None:
        path = write(tmp_path / "bad.jsonl", mooncake_row(0, 100, 8, [9]), line)
        with pytest.raises(TraceError, match=message):
            read_trace(path, "mooncake")


class TestRealFiles:
    def test_azure_2023(self, traces: Path) -> None:
        trace = read_trace(str(traces / "azure_2023" / "AzureLLMInferenceTrace_conv.csv"), "azure")
        assert len(trace.rows) + trace.empty_rows == 19_366
        assert trace.rows[-1].t_ns / 1e9 == pytest.approx(3502, abs=1)
        assert sorted(r.prompt_tokens for r in trace.rows)[len(trace.rows) // 2] == 1020
        assert max(r.prompt_tokens for r in trace.rows) == 14_050

    def test_azure_ten_minutes_scaled_down(self, traces: Path) -> None:
        built = replay(
            str(traces / "azure_2023" / "AzureLLMInferenceTrace_conv.csv"),
            window_end_s=600,
            max_requests=40,
            sampling="spread",
            time_scale=0.1,
            length_scale=0.1,
            length_cap=256,
        )
        assert len(built) == 40
        assert 50 < built.requests[-1].due_s < 60
        assert max(len(r.prompt_ids) for r in built.requests) <= 256

    def test_mooncake(self, traces: Path) -> None:
        path = str(traces / "mooncake_fast25" / "conversation_trace.jsonl")
        trace = read_trace(path, "mooncake")
        assert len(trace.rows) == 12_031
        built = replay(path, format="mooncake", length_scale=1 / 128, arrival="burst")
        assert built.spec["block_hit_fraction"] == pytest.approx(0.366, abs=0.001)

        # 512-token blocks became 4-token ones: a cache over the prompts finds the whole blocks the hash ids repeat
        found, cached = 0, set[tuple[int, ...]]()
        for r in built.requests[:200]:
            prefixes = [r.prompt_ids[:end] for end in range(4, len(r.prompt_ids) + 1, 4)]
            found += sum(p in cached for p in prefixes)
            cached.update(prefixes)
        repeated, seen = 0, set[int]()
        for row in trace.rows[:200]:
            whole = (row.hash_ids or ())[: len(built.requests[row.line - 1].prompt_ids) // 4]
            repeated += sum(h in seen for h in whole)
            seen.update(whole)
        assert found == repeated > 200
