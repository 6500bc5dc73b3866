"""Readers of recorded traces. Each turns a file into :class:`TraceRow` s in order of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workloads.names import unknown_name
from workloads.traces.azure import read_azure
from workloads.traces.burstgpt import read_burstgpt
from workloads.traces.mooncake import read_mooncake
from workloads.traces.own import read_own
from workloads.traces.rows import Trace, TraceError, TraceRow

READERS: Mapping[str, Callable[[str | None], Trace]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "own": read_own,
}


def read_trace(path: str | None, format: str) -> Trace:
    """Read the file ``path`` as ``format``, a name of :data:`READERS`; TraceError if it is not what it should be."""
    if format not in READERS:
        raise unknown_name("workload.format", format, READERS)
    return READERS[format](path)


__all__ = ["READERS", "Trace", "TraceError", "TraceRow", "read_trace"]
