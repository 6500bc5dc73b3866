"""Linear layers by whichever kernel was fastest on this device for these weights and this many rows.

Before serving (`TunedLinear.learning`) the numbers of rows in `ANCHORS` are tuned: torch and the candidates of
`engine.kernels.gemm_candidates` are timed on the model's own weights, layer after layer, so that they come from memory
as in a step, call upon call. A number of rows between two anchors that a step brings runs on what won at the larger
one. Afterwards the choices do not change: a number of rows that was not rehearsed runs on torch.

Timed behind a small kernel instead, as in a step, whose time is subtracted, kernels that are set up early look better
than they are in the step itself: of 64 rows it took 8 % longer with what was chosen so (`docs/performance.md`).

All candidates sum in fp32 and round once; the order of the sums, and with it the last bit, depends on the choice.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import linear

from engine.kernels.autotune import Choice, GraphTimer, choose
from engine.kernels.autotune_cache import ChoiceCache, Key, cache_folder
from engine.kernels.cublaslt import ALIGNMENT, CublasError, CublasLt
from engine.kernels.gemm_candidates import TORCH, Call, LinearCandidates, Problem, kind_of
from engine.kernels.language import TritonError, triton, why_no_triton

logger = logging.getLogger(__name__)

ANCHORS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280)
"""Rows that are tuned. More rows are left to torch."""
MOST_USED = (256, 1, 128, 64, 32, 8, 16, 192, 96, 4, 48, 2, 512, 1024, 384, 768, 1280)
"""`ANCHORS` in the order in which they are tuned: when time is over, it is what matters less that is left out."""
TIMED_BYTES = 600 << 20
"""Bytes of weights that a timed graph reads: some 150 us at an H200's bandwidth, and ten times its L2 cache."""
TIME_LIMIT = 14.0
"""Seconds a start may spend on measuring; what is left then runs on torch, and is measured by the next start."""
VERSION = 6
"""Of the candidates and the way they are timed: part of a stored choice's key."""

Weights = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class Timer(Protocol):
    """As `engine.kernels.autotune.GraphTimer`."""

    def seconds_per_call(self, candidates: Sequence[Sequence[Callable[[], object]]], repeats: int) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What a `TunedLinear` runs on.

    Attributes:
        measured, stored: problems timed by this process, and read from the cache, anchors among them.
        untimed: problems left to torch because `TIME_LIMIT` was over or memory short.
        seconds: spent on measuring.
        winners: problems of the rehearsed steps by kind of the chosen candidate.
        digest: of their choices; two runs with the same digest ran on the same kernels.
    """

    measured: int
    stored: int
    untimed: int
    seconds: float
    winners: dict[str, int]
    digest: str

    def __str__(self) -> str:
        """The choices, and nothing that differs from start to start."""
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.winners.items())) + f" ({self.digest})"


class TunedLinear:
    """``torch.nn.functional.linear`` for a model's weights, tuned by number of rows.

    Its launches must follow one another on the device, captured or not, as the steps of one runner do (see
    `LinearCandidates`).

    Args:
        weights: (weight, bias or None) of every linear layer, those of one shape in the order of their use.
        candidates: other ways than torch's to compute them.
        timer: measures candidates.
        cache: choices of earlier processes.
        environment: what else their time depends on: device, versions.
        clock: seconds, for `TIME_LIMIT`.
    """

    def __init__(
        self,
        weights: Weights,
        candidates: LinearCandidates,
        timer: Timer,
        cache: ChoiceCache,
        environment: Key,
        clock: Callable[[], float],
    ) -> None:
        self._weights: dict[tuple[int, int, bool], list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        for weight, bias in weights:
            if _suits(weight) and weight.shape[0] % 8 == 0 and (bias is None or _suits(bias)):
                self._weights.setdefault((*weight.shape, bias is not None), []).append((weight, bias))
        first = weights[0][0]
        self._device, self._dtype = first.device, first.dtype
        self._candidates, self._timer, self._clock = candidates, timer, clock
        self._cache, self._environment = cache, environment
        self._calls: dict[Problem, Call] = {}
        self._choices: dict[Problem, Choice] = {}
        self._times: dict[Problem, dict[str, float]] = {}
        self._learning = False
        self._generator: torch.Generator | None = None
        self._measured = self._stored = self._untimed = 0
        self._seconds = 0.0

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.dim() != 2:
            return linear(inputs, weight, bias)
        problem = Problem(inputs.shape[0], weight.shape[0], weight.shape[1], bias is not None)
        call = self._calls.get(problem)
        if call is None:
            call = self._learn(problem) if self._learning else linear
        if call is not linear and not _suits(inputs):
            call = linear
        return call(inputs, weight, bias)

    @contextmanager
    def learning(self, largest: int = 0) -> Iterator[None]:
        """Inside, numbers of rows not seen before get their choice. A step must be run once before it is captured.

        Args:
            largest: rows up to which the anchors are tuned beforehand, the most used first; 0 = as they are met.
        """
        self._learning = True
        try:
            used = ANCHORS[: bisect.bisect_left(ANCHORS, largest) + 1] if largest else ()
            for rows in MOST_USED:
                for shape in self._weights if rows in used else ():
                    self._choice(Problem(rows, *shape))
            yield
        finally:
            self._learning = False
            self._timer.close()
            if self._measured and self._device.type == "cuda":
                torch.cuda.empty_cache()  # of the timed graphs' outputs
        report = self.report()
        logger.info(
            "linear layers: %s; %d measured in %.1f s, %d from the cache",
            report,
            report.measured,
            report.seconds,
            report.stored,
        )
        if report.untimed:
            logger.warning(
                "%d products run on torch untuned: measuring took %.1f s of at most %.0f, or memory was short; the "
                "next start goes on with them",
                report.untimed,
                report.seconds,
                TIME_LIMIT,
            )

    def report(self) -> TuningReport:
        """What was chosen so far."""
        chosen = [
            (tuple(problem), self._choices[problem].candidate if problem in self._choices else TORCH)
            for problem in sorted(self._calls)
        ]
        return TuningReport(
            self._measured,
            self._stored,
            self._untimed,
            self._seconds,
            dict(Counter(kind_of(candidate) for _, candidate in chosen)),
            hashlib.sha256(repr(chosen).encode()).hexdigest()[:12],
        )

    def choices(self) -> dict[Problem, Choice]:
        """By problem, with the times it was chosen by; also of anchors that no step has used."""
        return dict(self._choices)

    def times(self) -> dict[Problem, dict[str, float]]:
        """By problem that this process measured: seconds of every candidate, from the last round it was in."""
        return dict(self._times)

    # --- learning ---------------------------------------------------------------------------------------------------

    def _learn(self, problem: Problem) -> Call:
        """The call for a problem from now on."""
        known = problem[1:] in self._weights and 0 < problem.rows <= ANCHORS[-1]
        if not known or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return linear
        choice = self._choice(problem)
        call = self._candidates.call(problem, choice.candidate) if choice is not None else linear
        if call is None:  # it won between its neighbours, so it was accepted there; refused, it is torch's again
            raise CublasError(f"the chosen {choice} no longer suits {problem}")
        self._calls[problem] = call
        return call

    def _choice(self, problem: Problem) -> Choice | None:
        """The choice for a problem: made before, that of the next anchor, stored, or measured; None if time or memory
        is short."""
        if problem not in self._choices:
            choice = self._measured_choice(problem) if problem.rows in ANCHORS else self._anchors_choice(problem)
            if choice is None:
                return None
            self._choices[problem] = choice
        return self._choices[problem]

    def _anchors_choice(self, problem: Problem) -> Choice | None:
        """What won at the next larger anchor, or torch if it does not suit here."""
        choice = self._choice(problem._replace(rows=ANCHORS[bisect.bisect(ANCHORS, problem.rows)]))
        if choice is None or choice.candidate == TORCH or self._sound(problem, [choice.candidate]):
            return choice
        return Choice(TORCH, choice.baseline_seconds, choice.baseline_seconds)

    def _measured_choice(self, problem: Problem) -> Choice | None:
        key = self._key(problem)
        choice = self._cache.load(key)
        if choice is not None and self._candidates.call(problem, choice.candidate) is not None:
            self._stored += 1
            return choice
        if self._seconds >= TIME_LIMIT:
            self._untimed += 1
            return None
        started = self._clock()
        try:
            choice = self._measure(problem)
        except torch.OutOfMemoryError as error:
            logger.warning("%s is left to torch, there is no memory to try others: %s", problem, error)
            self._untimed += 1
            return None
        finally:
            self._seconds += self._clock() - started
        self._measured += 1
        self._cache.store(key, choice)
        return choice

    def _key(self, problem: Problem) -> Key:
        operation: dict[str, str | int | bool] = {"operation": "linear", "version": VERSION, "dtype": str(self._dtype)}
        return operation | dict(self._environment) | problem._asdict()

    # --- measuring --------------------------------------------------------------------------------------------------

    def _inputs(self, problem: Problem) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator(self._device).manual_seed(0)
        shape = (problem.rows, problem.depth)
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._generator)

    def _measure(self, problem: Problem) -> Choice:
        weights = self._weights[problem[1:]]
        inputs = self._inputs(problem)
        calls: dict[str, Call] = {TORCH: linear}
        calls |= self._sound(problem, self._candidates.names(problem, weights[0][1]), inputs)
        count = min(max(2, -(-TIMED_BYTES // weights[0][0].nbytes)), 64)
        used = [weights[index % len(weights)] for index in range(count)]
        times = self._times[problem] = {}

        def measure(names: Sequence[str], repeats: int) -> list[float]:
            bound = [[_bind(calls[name], inputs, *pair) for pair in used] for name in names]
            seconds = self._timer.seconds_per_call(bound, repeats)
            times.update(zip(names, seconds, strict=True))
            return seconds

        return choose(TORCH, [name for name in calls if name != TORCH], measure)

    def _sound(
        self, problem: Problem, contenders: Sequence[str], inputs: torch.Tensor | None = None
    ) -> dict[str, Call]:
        """The contenders that run, and whose result is torch's but for the order of sums."""
        weight, bias = self._weights[problem[1:]][0]
        inputs = self._inputs(problem) if inputs is None else inputs
        wanted = linear(inputs, weight, bias).float()
        allowed = 4 * torch.finfo(self._dtype).eps * wanted.abs().max()
        self._candidates.compile(contenders, inputs, weight, bias)
        calls, errors = {}, {}
        for name in contenders:
            call = self._candidates.call(problem, name)
            if call is None:
                logger.info("%s is left out for %s: the library refuses it", name, problem)
                continue
            try:
                got = call(inputs, weight, bias)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TritonError) as error:  # CublasError among them
                logger.info("%s is left out for %s: %s", name, problem, error)
                continue
            calls[name] = call
            errors[name] = (got.float() - wanted).abs().max() <= allowed
        sound = dict(zip(errors, torch.stack(list(errors.values())).tolist(), strict=True)) if errors else {}
        for name in [name for name, right in sound.items() if not right]:
            logger.warning("%s is left out for %s: its result is not torch's", name, problem)
            del calls[name]
        return calls


def _bind(call: Call, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[], object]:
    return lambda: call(inputs, weight, bias)


def _suits(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 and tensor.shape[-1] % 8 == 0


def why_not_tuned(device: torch.device, dtype: torch.dtype, environ: Mapping[str, str]) -> str | None:
    """The reason why linear layers stay with torch, or None if they can be tuned."""
    if environ.get("ENGINE_TUNE") == "0":
        return "ENGINE_TUNE=0"
    if device.type != "cuda":
        return f"the weights are on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} products are torch's"
    return None


def tuned_linear(weights: Weights, environ: Mapping[str, str] = os.environ) -> TunedLinear | None:
    """A `TunedLinear` on the weights' device, its choices kept on disk; None where `why_not_tuned` gives a reason.

    Args:
        weights: (weight, bias or None) of every linear layer of a model.
        environ: ``ENGINE_TUNE=0`` turns tuning off; for ``ENGINE_CACHE_DIR`` see `engine.kernels.autotune_cache`.
    """
    device, dtype = weights[0][0].device, weights[0][0].dtype
    reason = why_not_tuned(device, dtype, environ)
    if reason is not None:
        logger.debug("linear layers are not tuned: %s", reason)
        return None
    library = None
    try:
        with torch.cuda.device(device):
            library = CublasLt()
    except (OSError, CublasError) as error:
        logger.warning("linear layers are tuned without cuBLASLt's algorithms: %s", error)
    properties = torch.cuda.get_device_properties(device)
    environment: dict[str, str | int | bool] = {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cublaslt": 0 if library is None else library.version,
        "torch": torch.__version__,
        "triton": str(getattr(triton, "__version__", None)),
    }
    return TunedLinear(
        weights,
        LinearCandidates(device, dtype, library, why_no_triton(device) is None),
        GraphTimer(device),
        ChoiceCache(cache_folder(environ)),
        environment,
        time.perf_counter,
    )
