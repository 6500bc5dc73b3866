"""``cb-plan RESULTS… slo.ttft_p95_ms=500 target_rate=200 [workload=…]``: a capacity plan from measured runs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.capacity.start import start

USAGE = """cb-plan RESULTS… [KEY=VALUE…]
  RESULTS                    folders of measured runs or sweeps (engine=ours) on the GPU to plan for
  slo=chat                   limits, or single ones: slo.ttft_p95_ms=500 slo.itl_p99_ms=50
  workload=azure_2023 …      what will arrive, by cb-bench's configuration; left out: the workload of the first run
  target_rate=200            requests/s to serve: how many GPUs
  headroom=0.2               share of each GPU left free
  price_per_gpu_hour=3.5     for the cost of a million generated tokens
  requests=1000 seeds=3      of each simulated run; searches that the interval rests on
  recommend=false            do not try other settings
  fleet=4                    instead of a plan: replay the workload as it is recorded on 4 GPUs behind each router
  out=DIR                    where to write; left out: plan/ inside the first folder"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 if no rate keeps the SLO; 2 with one line on standard error if nothing can be planned."""
    return start("cb-plan", USAGE, "harness.capacity.command", argv)


if __name__ == "__main__":
    raise SystemExit(main())
