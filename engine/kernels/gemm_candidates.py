"""The ways to compute a linear layer that the autotuner chooses among, by name.

A name says all that is needed to run the candidate again, in this process or, with the same libraries, in a later one:
``torch``; ``cublaslt:`` and the algorithm's 64 bytes; ``skinny:`` or ``narrow:`` and the tile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from engine.kernels.cublaslt import WORKSPACE_LIMIT, Algorithm, CublasError, CublasLt, LtProduct
from engine.kernels.narrow import NarrowTile, narrow_linear, narrow_tiles
from engine.kernels.skinny import SkinnyTile, skinny_linear, skinny_tiles

logger = logging.getLogger(__name__)

TORCH = "torch"
CUBLASLT_CANDIDATES = 12
"""How many algorithms the library is asked for."""
SPLIT_CANDIDATES, SPLITS = 3, (2, 3, 4, 6)
"""How many of them are also tried with their sum in parts, and in how many."""
SPLIT_OUTPUTS = 2 * 132 * 64 * 128
"""Output elements that fill an H200 twice with small tiles; a product with more is not split."""

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Problem(NamedTuple):
    """x [rows, depth] times W [columns, depth], transposed, and a bias or none."""

    rows: int
    columns: int
    depth: int
    biased: bool


def kind_of(candidate: str) -> str:
    """``torch``, ``cublaslt``, ``skinny`` or ``narrow``."""
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

    def names(self, problem: Problem, bias: torch.Tensor | None) -> list[str]:
        """Candidates for a problem besides torch.

        Args:
            bias: one of the problem's, if it is biased.
        """
        names: list[str] = []
        if self._library is not None:
            product = self._product(self._library, problem)
            try:
                found = product.candidates(CUBLASLT_CANDIDATES, bias)
            except CublasError as error:
                logger.warning("cuBLASLt has no algorithms for %s: %s", problem, error)
                found = []
            if max(problem.rows, 64) * problem.columns <= SPLIT_OUTPUTS:
                found += _split(product, found[:SPLIT_CANDIDATES])
            names += dict.fromkeys(f"cublaslt:{algorithm.words.hex()}" for algorithm in found)
        if self._triton:
            names += [f"skinny:{t.columns},{t.depth},{t.warps}" for t in skinny_tiles(problem.rows)]
            tiles = [t for t in narrow_tiles(problem.rows) if problem.depth % t.depth == 0]
            names += [f"narrow:{t.columns},{t.depth},{t.warps},{t.stages}" for t in tiles]
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
            if kind == "narrow" and self._triton and narrow_tiles(problem.rows):
                tile = NarrowTile(*sizes)
                return None if problem.depth % tile.depth else partial(narrow_linear, tile=tile)
        except (TypeError, ValueError):  # not a name that `names` gives
            return None
        return None

    def _product(self, library: CublasLt, problem: Problem) -> LtProduct:
        return LtProduct(library, problem.rows, problem.columns, problem.depth, self._dtype, problem.biased)

    def _cublaslt_call(self, columns: int, product: LtProduct, algorithm: Algorithm) -> Call:
        if self._scratch is None:
            self._scratch = torch.empty(WORKSPACE_LIMIT, dtype=torch.uint8, device=self._device)
        scratch, prepared, device = self._scratch, product.prepare(algorithm), self._device

        def call(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = inputs.new_empty((inputs.shape[0], columns))
            stream = torch.cuda.current_stream(device).cuda_stream
            product.run(prepared, inputs, weight, bias, out, scratch, stream)
            return out

        return call


def _split(product: LtProduct, algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    split = (product.split(algorithm, parts) for algorithm in algorithms for parts in SPLITS)
    return [algorithm for algorithm in split if algorithm is not None]
