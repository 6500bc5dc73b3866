"""Linear layers of a decode step, torch's and tuned: ``python -m engine.bench.gemm`` on a CUDA device.

Every product of three models at the rows of a step, timed as the engine times them when it starts (weights cold, in a
CUDA graph, both in turn), beside the copy bandwidth and the matmul rate measured in the same process. The last lines
add up a step's products. Nothing is read from or written to the cache of choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.bench.arguments import integers
from engine.bench.ceilings import Ceilings
from engine.kernels.autotune import Choice
from engine.kernels.cublaslt import Algorithm, CublasLt
from engine.kernels.gemm import ANCHORS, TIMED_BYTES, tuned_linear, why_not_tuned
from engine.kernels.gemm_candidates import Problem, kind_of

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's layers and sizes; ``qkv`` is the width of query, key and value heads together."""

    layers: int
    hidden: int
    qkv: int
    heads: int
    intermediate: int
    vocab: int

    def products(self) -> dict[str, tuple[int, int, int]]:
        """(columns, depth, times a step) by name."""
        return {
            "qkv": (self.qkv, self.hidden, self.layers),
            "o": (self.hidden, self.heads, self.layers),
            "gate_up": (2 * self.intermediate, self.hidden, self.layers),
            "down": (self.hidden, self.intermediate, self.layers),
            "lm_head": (self.vocab, self.hidden, 1),
        }


MODELS = {
    "qwen3-0.6b": Decoder(28, 1024, 4096, 2048, 3072, 151936),
    "qwen3-4b": Decoder(36, 2560, 6144, 4096, 9728, 151936),
    "llama-3.1-8b": Decoder(32, 4096, 6144, 4096, 14336, 128256),
}


def _bytes(problem: Problem) -> float:
    rows, columns, depth, _ = problem
    return DTYPE.itemsize * (columns * depth + rows * (columns + depth))


def _flops(problem: Problem) -> float:
    return 2.0 * problem.rows * problem.columns * problem.depth


def tune(columns: int, depth: int, rows: Sequence[int]) -> dict[int, tuple[Choice, dict[str, float]]]:
    """Choices for weights [columns, depth], as many of them as the L2 cache cannot hold, and every candidate's time."""
    count = max(2, min(64, -(-TIMED_BYTES // (columns * depth * DTYPE.itemsize))))
    generator = torch.Generator("cuda").manual_seed(depth)
    weights = [
        torch.randn(columns, depth, device="cuda", dtype=DTYPE, generator=generator).mul_(depth**-0.5)
        for _ in range(count)
    ]
    tuned = tuned_linear([(weight, None) for weight in weights], {"ENGINE_CACHE_DIR": ""})
    assert tuned is not None, "main has asked why_not_tuned"
    with tuned.learning():
        for number in rows:
            tuned(torch.zeros(number, depth, device="cuda", dtype=DTYPE), weights[0])
    choices, times = tuned.choices(), tuned.times()
    problems = {n: Problem(n, columns, depth, False) for n in rows}
    return {n: (choices[p], times.get(p, {})) for n, p in problems.items() if p in choices}


def describe(candidate: str, library: CublasLt) -> str:
    """A candidate in a few words."""
    kind, _, details = candidate.partition(":")
    if kind != "cublaslt":
        return candidate
    return "cublaslt " + " ".join(
        f"{name} {value}" for name, value in library.describe(Algorithm(bytes.fromhex(details), 0)).items()
    )


def best_by_kind(times: dict[str, float]) -> dict[str, float]:
    """The fastest candidate of each kind, the fastest kind first."""
    best: dict[str, str] = {}
    for candidate in sorted(times, key=lambda candidate: times[candidate]):
        best.setdefault(kind_of(candidate), candidate)
    return {candidate: times[candidate] for candidate in best.values()}


def bench(name: str, decoder: Decoder, rows: Sequence[int], ceilings: Ceilings, verbose: bool) -> None:
    """Print a model's table, and the sums of its steps; ``verbose`` with the best of each kind of candidate."""
    library = CublasLt()
    step = {n: [0.0, 0.0, 0.0] for n in rows}
    for product, (columns, depth, times) in decoder.products().items():
        for n, (choice, times_by_candidate) in tune(columns, depth, rows).items():
            problem = Problem(n, columns, depth, False)
            floor = ceilings.floor(_bytes(problem), _flops(problem))
            for index, seconds in enumerate((choice.baseline_seconds, choice.seconds, floor)):
                step[n][index] += times * seconds
            print(
                f"{name:13} {product:8} {columns:6} x {depth:5} {n:5} rows  "
                f"torch {choice.baseline_seconds * 1e6:8.2f} us  tuned {choice.seconds * 1e6:8.2f} us  "
                f"{_bytes(problem) / choice.seconds / 1e12:5.2f} TB/s "
                f"{_flops(problem) / choice.seconds / 1e12:6.1f} TFLOP/s {100 * floor / choice.seconds:5.1f} %  "
                f"{describe(choice.candidate, library)}",
                flush=True,
            )
            for candidate, seconds in best_by_kind(times_by_candidate).items() if verbose else ():
                print(f"{'':40} {seconds * 1e6:8.2f} us  {describe(candidate, library)}", flush=True)
        torch.cuda.empty_cache()
    for n, (before, after, floor) in step.items():
        print(
            f"{name:13} a step's products at {n:5} rows: torch {before * 1e3:6.3f} ms, tuned {after * 1e3:6.3f} ms, "
            f"floor {floor * 1e3:6.3f} ms",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where linear layers are not tuned."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gemm", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help=f"by comma, of {', '.join(MODELS)}")
    parser.add_argument("--rows", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="rows, by comma")
    parser.add_argument("--verbose", action="store_true", help="the best candidate of each kind, not only the chosen")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown or not all(0 < n <= ANCHORS[-1] for n in options.rows):
        parser.error(f"models are {', '.join(MODELS)}, rows 1 to {ANCHORS[-1]}; given {options.models}, {options.rows}")
    reason = why_not_tuned(torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPE, {})
    if reason is not None:
        print(f"nothing to measure: {reason}")
        return 1
    device = torch.device("cuda")
    ceilings = Ceilings.measured(device)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuBLASLt {CublasLt().version}: {ceilings}",
        flush=True,
    )
    with torch.inference_mode():
        for name in names:
            bench(name, MODELS[name], options.rows, ceilings, options.verbose)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
