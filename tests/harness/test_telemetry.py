from __future__ import annotations

import time

import pytest

from harness import provenance
from harness.telemetry import NvmlProbe, Telemetry


def sampled(gpu):
    telemetry = Telemetry(1.0, gpu)
    began = time.perf_counter_ns()
    telemetry.start()
    time.sleep(0.05)
    telemetry.stop()
    return telemetry, began


def test_on_a_cpu_memory_is_sampled_and_gpu_columns_are_absent():
    telemetry, began = sampled(None)
    rows = telemetry.samples(began)
    assert len(rows) >= 2
    assert all(row.keys() == {"t_s", "rss_bytes"} and row["rss_bytes"] > 1_000_000 for row in rows)
    assert [r["t_s"] for r in rows] == sorted(r["t_s"] for r in rows)
    assert telemetry.samples(time.perf_counter_ns()) == []


def test_gpu_readings_are_passed_on_with_their_nulls():
    class Probe:
        def sample(self):
            return {"gpu_used_bytes": 5, "power_w": None}

    telemetry, began = sampled(Probe())
    assert telemetry.samples(began)[0]["gpu_used_bytes"] == 5
    assert telemetry.samples(began)[0]["power_w"] is None


def test_absent_nvml_is_one_reason(monkeypatch):
    import pynvml

    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(RuntimeError, match="NVML cannot reach GPU abc"):
        NvmlProbe("abc")


def test_interval_must_be_positive():
    with pytest.raises(ValueError, match="telemetry_interval_ms"):
        Telemetry(0, None)


def test_provenance_states_software_host_and_revision(tmp_path):
    facts = provenance.collect(["cb-bench", "engine=ours"], device="cpu")
    assert facts["command_line"] == ["cb-bench", "engine=ours"]
    assert facts["package.torch"]
    assert facts["package.transformers"]
    assert facts["memory.total_bytes"] > 0
    assert facts["device"] == "cpu"
    assert "gpu.name" not in facts
    assert provenance.source_revision(tmp_path) == {"git.sha": None, "git.dirty": None}
