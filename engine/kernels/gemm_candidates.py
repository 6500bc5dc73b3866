"""The ways to compute a linear layer that the autotuner chooses among, by name.

A name says all that is needed to run the candidate again, in this process or, with the same libraries, in a later one:
``torch``; ``cublaslt:`` and the algorithm's 64 bytes; ``skinny:`` or ``splitk:`` and the tile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from engine.kernels.cublaslt import WORKSPACE_LIMIT, Algorithm, CublasError, CublasLt, LtProduct
from engine.kernels.language import TritonError
from engine.kernels.paged_decode import multiprocessors
from engine.kernels.skinny import SkinnyTile, skinny_linear, skinny_tiles
from engine.kernels.splitk import (
    MAX_ROWS,
    SplitScratch,
    SplitTile,
    parts_needed,
    splitk_linear,
    splitk_tiles,
    tickets_needed,
)

logger = logging.getLogger(__name__)

TORCH = "torch"
CUBLASLT_CANDIDATES = 8
"""How many algorithms the library is asked for."""
MAX_TICKETS = 8192
"""Output tiles that may be split."""
COMPILERS = 8
"""Threads that compile; most of it happens outside Python."""

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Problem(NamedTuple):
    """x [rows, depth] times W [columns, depth], transposed, and a bias or none."""

    rows: int
    columns: int
    depth: int
    biased: bool


def kind_of(candidate: str) -> str:
    """``torch``, ``cublaslt``, ``skinny`` or ``splitk``."""
    return candidate.partition(":")[0]


class LinearCandidates:
    """Names candidates and makes calls of them.

    Calls share a scratch buffer, also across captured graphs: they must follow one another on the device.

    Args:
        device, dtype: of all tensors.
        library: cuBLASLt on the device; None = without its algorithms.
        triton: whether Triton kernels run there.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, library: CublasLt | None, triton: bool) -> None:
        self._device, self._dtype, self._library, self._triton = device, dtype, library, triton
        self._scratch: torch.Tensor | None = None
        self._tickets: torch.Tensor | None = None

    def names(self, problem: Problem, bias: torch.Tensor | None) -> list[str]:
        """Candidates for a problem besides torch.

        Args:
            bias: one of the problem's, if it is biased.
        """
        names: list[str] = []
        if self._library is not None:
            try:
                found = self._product(self._library, problem).candidates(CUBLASLT_CANDIDATES, bias)
            except CublasError as error:
                logger.warning("cuBLASLt has no algorithms for %s: %s", problem, error)
                found = []
            names += [f"cublaslt:{algorithm.words.hex()}" for algorithm in found]
        if self._triton:
            names += [f"skinny:{t.columns},{t.depth},{t.warps}" for t in skinny_tiles(problem.rows)]
            processors = multiprocessors(self._device)
            tiles = splitk_tiles(problem.rows, problem.columns, problem.depth, processors)
            names += [f"splitk:{','.join(map(str, astuple(t)))}" for t in tiles if _fits(problem, t)]
        return names

    def call(self, problem: Problem, name: str) -> Call | None:
        """How to run a candidate, also one named for another number of rows; None if it does not suit here."""
        kind, _, details = name.partition(":")
        if kind == TORCH:
            return linear
        try:
            if kind == "cublaslt" and self._library is not None:
                product = self._product(self._library, problem)
                algorithm = product.adopt(bytes.fromhex(details))
                return None if algorithm is None else self._cublaslt_call(problem.columns, product, algorithm)
            sizes = [] if kind == "cublaslt" else [int(size) for size in details.split(",")]
            if kind == "skinny" and self._triton and skinny_tiles(problem.rows):
                return partial(skinny_linear, tile=SkinnyTile(*sizes))
            if kind == "splitk" and self._triton and problem.rows <= MAX_ROWS:
                tile = SplitTile(*sizes)
                return partial(splitk_linear, tile=tile, scratch=self._shared()) if _fits(problem, tile) else None
        except (TypeError, ValueError):  # not a name that `names` gives
            return None
        return None

    def compile(
        self, names: Sequence[str], inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Compile candidates at the same time, which takes a third of doing it one by one. One that cannot be compiled
        says so when it is called.

        Args:
            names: of candidates; those that need no compiling, or have been compiled, take no time.
            inputs, weight, bias: as they will be given.
        """
        tiles: dict[tuple[int, ...], SplitTile] = {}
        for name in names:
            kind, _, details = name.partition(":")
            if kind == "splitk":
                tile = SplitTile(*map(int, details.split(",")))
                tiles[astuple(tile)[:-2]] = tile  # splits and bytes ahead are arguments
        if len(tiles) < 2:
            return

        def first(tile: SplitTile) -> None:
            with torch.cuda.device(self._device), contextlib.suppress(TritonError, RuntimeError):
                splitk_linear(inputs, weight, bias, tile, self._shared(), compile_only=True)

        self._shared()
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(first, tiles.values()))

    def _product(self, library: CublasLt, problem: Problem) -> LtProduct:
        return LtProduct(library, problem.rows, problem.columns, problem.depth, self._dtype, problem.biased)

    def _workspace(self) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(WORKSPACE_LIMIT, dtype=torch.uint8, device=self._device)
        return self._scratch

    def _shared(self) -> SplitScratch:
        if self._tickets is None:
            self._tickets = torch.zeros(MAX_TICKETS, dtype=torch.int32, device=self._device)
        return SplitScratch(self._workspace().view(torch.float32), self._tickets)

    def _cublaslt_call(self, columns: int, product: LtProduct, algorithm: Algorithm) -> Call:
        scratch, prepared, device = self._workspace(), product.prepare(algorithm), self._device

        def call(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = inputs.new_empty((inputs.shape[0], columns))
            stream = torch.cuda.current_stream(device).cuda_stream
            product.run(prepared, inputs, weight, bias, out, scratch, stream)
            return out

        return call


def _fits(problem: Problem, tile: SplitTile) -> bool:
    """Whether what the tile's programs share finds room."""
    rows, columns, *_ = problem
    parts, tickets = parts_needed(rows, columns, tile), tickets_needed(rows, columns, tile)
    return tile.rows >= 16 and 4 * parts <= WORKSPACE_LIMIT and tickets <= MAX_TICKETS
