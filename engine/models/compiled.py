"""An executor's forward pass under torch.compile, with a bounded number of compilations that all happen at warm-up.

A step takes one of two paths: "decode" (every row has one query token) and "varlen" (any other, and every step where
there is no decode path). What is compiled knows a step by two sizes only, its tokens and its rows that sample, so these
decide how often a path is compiled:

| ``dynamic`` of its config | compiled for |
|---|---|
| True | one token; any other size |
| None | one token; two sizes, of which the second makes torch take all others as well |
| False | each power of two up to the largest step; a step is padded to the next one |

Each of these is a function of its own with its own cache in torch, so that no size and no other engine of the process
uses up torch's limit of compilations a function (beyond which it would run uncompiled).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from engine.attention import AttentionMetadata
from engine.kernels.gemm import TunedLinear
from engine.models.base import TraceableExecutor

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TYPICAL_TOKENS = {"varlen": 512, "decode": 64}
"""Size at which a dynamic path is compiled: Inductor tunes matrix products for the size it sees."""

_numbers = itertools.count()


class CompiledExecutor:
    """Runs an executor's forward pass compiled, on the paths that have a config.

    Args:
        executor: whose forward pass it is.
        varlen, decode: transformers' CompileConfig of a path; None = not compiled.
        decode_path: whether decode steps are a path of their own.
        max_tokens, max_rows: of a step.
    """

    def __init__(
        self, executor: TraceableExecutor, varlen: Any, decode: Any, decode_path: bool, max_tokens: int, max_rows: int
    ) -> None:
        self._executor = executor
        self._varlen = None if varlen is None else _Path("varlen", executor, varlen, max_tokens, max_rows)
        self._decode = None if decode is None else _Path("decode", executor, decode, max_rows, max_rows)
        self._decode_path = decode_path

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        path = self._decode if self._decode_path and metadata.cu_query is None else self._varlen
        if path is None:
            return self._executor.logits(ids, positions, metadata, index)
        return path.run(ids, positions, metadata, index)

    @property
    def tuned(self) -> TunedLinear | None:
        """Those of paths that are not compiled."""
        return self._executor.tuned

    def warm_up(self, padding: AttentionMetadata) -> float:
        """Compile every path for every size; returns the seconds it took.

        Args:
            padding: a step of one decode row that touches the trash block only.

        Raises:
            RuntimeError: the model's forward pass cannot be compiled so.
        """
        started = time.perf_counter()
        device = padding.kv_lengths.device
        for path in (self._varlen, self._decode):
            if path is None:
                continue
            for tokens, rows in path.sizes():
                # Attention looks at the one row; what is compiled does not depend on it.
                zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
                try:
                    path.run(zeros, zeros, padding, zeros[:rows])
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    raise RuntimeError(
                        f"torch.compile of the {path.name} path ({tokens} tokens) failed, "
                        f"{type(error).__name__}: {error}; set {path.name}_compile_config or default_compile_level "
                        "differently"
                    ) from error
        return time.perf_counter() - started

    def refresh(self) -> None:
        """As `Executor.refresh`."""
        self._executor.refresh()

    def close(self) -> None:
        """Forget what was compiled and leave the model as it was found."""
        self._varlen = self._decode = None
        self._executor.close()


class _Path:
    def __init__(self, name: str, executor: TraceableExecutor, config: Any, max_tokens: int, max_rows: int) -> None:
        self.name = name
        self._executor, self._config = executor, config
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._functions: dict[object, Forward] = {}

    def sizes(self) -> list[tuple[int, int]]:
        """(tokens, rows) of steps after which nothing is left to compile."""
        dynamic = self._config.dynamic
        if dynamic is False:
            powers = itertools.takewhile(lambda n: n < self._max_tokens, (1 << k for k in itertools.count()))
            tokens = [*powers, self._max_tokens]
        elif dynamic:
            tokens = [1, TYPICAL_TOKENS[self.name]]
        else:
            tokens = [1, 6, 10]
        # Where torch is to find out what varies, tokens and rows do so independently.
        sizes = [(n, 1 + n // 3 if dynamic is None else n) for n in tokens]
        return sorted({(min(n, self._max_tokens), min(n, rows, self._max_rows)) for n, rows in sizes})

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, index: torch.Tensor
    ) -> torch.Tensor:
        tokens, rows = ids.shape[0], index.shape[0]
        key: object
        if self._config.dynamic is False:
            count = self._padded_tokens(tokens)
            selected = max(rows, min(count, self._max_rows))
            key = (count, selected)
        else:
            # torch compiles anew for a size of one. A single token is worth that; a single row gets a second beside it.
            count, selected, key = tokens, max(rows, min(tokens, 2)), tokens == 1
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._compile()
        inputs = _padded(ids, count), _padded(positions, count), _padded(index, selected)
        if self._config.dynamic and tokens > 1:
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
        with self._executor.during(positions[: metadata.groups[0].kv_slots.shape[0]], metadata):
            return function(*inputs)[:rows]

    def _padded_tokens(self, tokens: int) -> int:
        """The next power of two, but no more than the largest step."""
        power = 1 << (tokens - 1).bit_length()
        return min(power, self._max_tokens) if tokens <= self._max_tokens else power

    def _compile(self) -> Forward:
        config = self._config
        options: dict[str, Any] = {"options": config.options}
        if config.backend == "inductor" and config.mode is not None:
            options["mode"] = config.mode
        return torch.compile(
            _own_code(self._executor.forward, f"{self.name}_{next(_numbers)}"),
            fullgraph=config.fullgraph,
            # True would also take the weights' sizes and every number in the model's attributes for variable.
            dynamic=False if config.dynamic else config.dynamic,
            backend=config.backend,
            **options,
        )


def _own_code(method: Any, name: str) -> Forward:
    """The same bound method with a code object, and so a cache in torch, of its own."""
    function = method.__func__
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return MethodType(copy, method.__self__)


def _padded(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """[n] with zeros behind it, [count] int64. Never a view: torch would compile for places in the packed buffer."""
    return torch.nn.functional.pad(tensor.long(), (0, count - tensor.shape[0]))
