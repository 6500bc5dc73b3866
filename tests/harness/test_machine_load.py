from __future__ import annotations

import pytest

from harness.clock import RealClock
from harness.machine_load import CpuReading, machine_load


def test_others_are_the_machine_without_this_process():
    begin = CpuReading(time_ns=0, machine_s=100.0, own_s=4.0, load_1min=3.2)
    end = CpuReading(time_ns=10_000_000_000, machine_s=120.0, own_s=9.0, load_1min=2.5)
    assert machine_load(begin, end, 2) == {
        "load.cores": 2,
        "load.average_1min_start": 3.2,
        "load.average_1min_end": 2.5,
        "load.own_cores": pytest.approx(0.5),
        "load.others_cores": pytest.approx(1.5),
    }


def test_what_the_machine_does_not_count_is_unknown():
    begin = CpuReading(time_ns=0, machine_s=0.0, own_s=0.0, load_1min=None)
    end = CpuReading(time_ns=2_000_000_000, machine_s=0.0, own_s=1.0, load_1min=None)
    facts = machine_load(begin, end, None)
    assert (facts["load.own_cores"], facts["load.others_cores"], facts["load.average_1min_end"]) == (0.5, None, None)


def test_readings_grow_with_work():
    clock = RealClock()
    before = CpuReading.now(clock)
    while CpuReading.now(clock).own_s == before.own_s:
        sum(range(10_000))
    assert CpuReading.now(clock).time_ns > before.time_ns
