"""The kernels compiled for Hopper on a machine that need not have a GPU: what the compiler made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 227 * 1024
"""What a program of an H100 or H200 may have."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        json.loads(line.removeprefix("COMPILED ")) for line in done.stdout.splitlines() if line.startswith("COMPILED ")
    ]


def test_every_kernel_compiles_and_keeps_its_values_in_registers(compiled: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in compiled} == {
        "_chunk_kernel",
        "_cut_kernel",
        "_decode_kernel",
        "_gated_kernel",
        "_gumbel_kernel",
        "_norm_kernel",
        "_pick_kernel",
        "_prefill_kernel",
        "_rope_kernel",
        "_skinny_kernel",
        "_splitk_kernel",
        "_survey_kernel",
        "_write_kernel",
    }
    for report in compiled:
        assert report["shared"] <= SHARED_MEMORY, report
        assert report["STACK"] == 0, report


def test_attention_uses_tensor_cores_and_copies_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    decode = [report for report in compiled if report["kernel"] == "_decode_kernel"]
    prefill = [report for report in compiled if report["kernel"] == "_prefill_kernel"]
    assert len(decode) == 2  # pages of 256 and 16
    assert len(prefill) == 2
    for report in (*decode, *prefill):
        assert report["tensor_cores"], report
        assert report["wide_async_copies"] > 0, report
    for report in prefill:
        assert report["wgmma"], report
    # Three programs on a multiprocessor: enough loads in flight for its share of the memory's bandwidth.
    assert max(report["shared"] for report in decode) <= SHARED_MEMORY // 3


def test_elementwise_kernels_load_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    streaming = {"_norm_kernel", "_gated_kernel", "_rope_kernel", "_write_kernel"}
    streaming |= {"_chunk_kernel", "_gumbel_kernel", "_survey_kernel"}
    for report in compiled:
        if report["kernel"] in streaming:
            assert report["wide_loads"] > 0, report


def test_programs_are_set_up_early_and_touch_no_memory_before_their_predecessors_are_done(
    compiled: list[dict[str, Any]],
) -> None:
    for report in compiled:
        assert report["dependent"], report
        assert report["waits_first"], report


def test_the_skinny_linear_streams_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    skinny = [report for report in compiled if report["kernel"] == "_skinny_kernel"]
    assert [report["sizes"]["ROWS"] for report in skinny] == [1, 2, 4, 8]
    for report in skinny:
        assert report["wide_streamed_loads"] >= report["sizes"]["COLUMNS"], report
        assert report["shared"] <= 256, report  # sums meet at the end only, nothing is exchanged in the loop


def test_the_split_linear_keeps_bulk_copies_in_flight(compiled: list[dict[str, Any]]) -> None:
    splitk = [report for report in compiled if report["kernel"] == "_splitk_kernel"]
    assert {report["sizes"]["ROWS"] for report in splitk} == {16, 32, 64, 128}
    for report in splitk:
        assert report["wgmma"] is (report["sizes"]["COLUMNS"] >= 64), report
        assert report["tensor_cores"], report
        assert report["bulk_copies"] >= 6, report  # two operands, three tiles or more before the loop
        assert report["releases_last"], report
        assert report["bulk_prefetches"] == 1, report
        assert report["shared"] > 48 * 1024, report  # of 132: 6 MB in flight on the machine
