"""The host memory behind offloaded blocks, and the copies between it and the cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.cache import BlockPairs


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies on their way. Times are known once a step launched after them has been waited for."""

    restore_times: tuple[Any, Any] | None

    @property
    def restore_ms(self) -> float | None:
        """How long copying blocks back took; None if there were none."""
        if self.restore_times is None:
            return None
        start, end = self.restore_times
        return float(start.elapsed_time(end)) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3


class HostStore:
    """Host copies of blocks, allocated once. On a CUDA device the memory is pinned and copies run on a stream of their
    own: after all that was launched before them, and before all that is launched after.

    Args:
        stores: the cache's tensors, each [blocks, ...].
        num_blocks: blocks of the host pool.

    Raises:
        RuntimeError: the host memory cannot be allocated or pinned.
    """

    def __init__(self, stores: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._device = stores[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.tensors = [torch.empty((num_blocks, *s.shape[1:]), dtype=s.dtype) for s in stores]
        self._pairs = list(zip(stores, self.tensors, strict=True))
        self._pinned: list[torch.Tensor] = []
        if self._stream is not None:
            try:
                for tensor in self.tensors:
                    self._pin(tensor)
            except Exception:
                self.close()
                raise

    def _pin(self, tensor: torch.Tensor) -> None:
        # torch's allocator of pinned memory rounds up to a power of two, up to twice what the user allowed.
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        torch.cuda.check_error(int(code))
        self._pinned.append(tensor)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def transfer(self, offloads: BlockPairs, restores: BlockPairs) -> Transfer:
        """Copy (device, host) blocks out, then (host, device) blocks back."""
        if self._stream is None:
            self._copy_out(offloads)
            began = time.perf_counter()
            self._copy_back(restores)
            return Transfer((began, time.perf_counter()) if restores else None)
        compute = torch.cuda.current_stream(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._copy_out(offloads)
            start.record()
            self._copy_back(restores)
            end.record()
        compute.wait_stream(self._stream)
        return Transfer((start, end) if restores else None)

    def _copy_out(self, blocks: BlockPairs) -> None:
        for source, target, count in _runs(blocks):
            for device, host in self._pairs:
                host[target : target + count].copy_(device[source : source + count], non_blocking=True)

    def _copy_back(self, blocks: BlockPairs) -> None:
        for source, target, count in _runs(blocks):
            for device, host in self._pairs:
                device[target : target + count].copy_(host[source : source + count], non_blocking=True)

    def close(self) -> None:
        """Give the memory back; the store is not used again."""
        if self._stream is not None:
            self._stream.synchronize()
        for tensor in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._pinned, self._pairs, self.tensors = [], [], []


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(from, to, count) of neighbouring blocks that lie side by side on both ends: one copy each."""
    first: tuple[int, int] | None = None
    count = 0
    for source, target in pairs:
        if first is not None and (source, target) == (first[0] + count, first[1] + count):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = (source, target), 1
    if first is not None:
        yield (*first, count)
