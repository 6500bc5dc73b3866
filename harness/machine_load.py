"""How busy the machine was while something was measured: load average, and the cores that others used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil

from harness.clock import NS_PER_S, Clock


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU time spent so far, in seconds.

    Attributes:
        time_ns: when it was read.
        machine_s: of the whole machine, without idling and waiting for disks; a hypervisor's theft counts as use.
        own_s: of this process and the children it has waited for.
        load_1min: load average over the last minute; None where the system has none.
    """

    time_ns: int
    machine_s: float
    own_s: float
    load_1min: float | None

    @classmethod
    def now(cls, clock: Clock) -> CpuReading:
        machine, own = psutil.cpu_times(), os.times()
        used = ("user", "nice", "system", "irq", "softirq", "steal")  # not every system reports each
        return cls(
            time_ns=clock.now_ns(),
            machine_s=sum(getattr(machine, name, 0.0) for name in used),
            own_s=own.user + own.system + own.children_user + own.children_system,
            load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        )


def machine_load(begin: CpuReading, end: CpuReading, cores: int | None) -> dict[str, Any]:
    """Facts for the environment table; null = could not be determined.

    A load average decays over minutes, so it holds the loading, the warm-up and the job before this one. What disturbs
    is therefore taken from CPU times: what the machine spent between the two readings less what this process did.
    """
    wall_s = (end.time_ns - begin.time_ns) / NS_PER_S
    own_s, machine_s = end.own_s - begin.own_s, end.machine_s - begin.machine_s
    # Where the machine's clocks stand still (some sandboxes) nothing is known of others.
    counted = wall_s > 0 and machine_s > 0
    return {
        "load.cores": cores,
        "load.average_1min_start": begin.load_1min,
        "load.average_1min_end": end.load_1min,
        "load.own_cores": own_s / wall_s if wall_s > 0 else None,
        "load.others_cores": max(0.0, machine_s - own_s) / wall_s if counted else None,
    }
