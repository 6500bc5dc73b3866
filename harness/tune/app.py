"""``cb-tune RESULTS… slo.ttft_p95_ms=500``: settings under an SLO, by simulation, confirmed on the engine."""

from __future__ import annotations

from collections.abc import Sequence

from harness.capacity.start import start

USAGE = """cb-tune RESULTS… slo.ttft_p95_ms=500 [KEY=VALUE…]
  RESULTS         folders of measured runs (engine=ours): step times and baseline settings come from them
  slo=chat        limits, or single ones as slo.itl_p99_ms=50
  workload=…      what will arrive, by cb-bench's configuration; left out: the workload of the first run
  trials=40       different engines that the study tries on the simulator; it goes on where it stopped
  requests=600    of each simulated run
  repeats=5       pairs of runs on the engine at the most; confirm=false leaves them out
  load=0.8        rate of those runs, as a share of the baseline's simulated capacity
  seed=0          of search and simulation
  out=DIR         study, runs and result; left out: tune/ inside the first folder"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 if no settings keep the SLO; 2 with one line on standard error if nothing can be tuned; 128
    and the number of the signal that interrupted it."""
    return start("cb-tune", USAGE, "harness.tune.command", argv)


if __name__ == "__main__":
    raise SystemExit(main())
