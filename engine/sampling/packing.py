"""Small arrays of different types to the device in one copy."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 8


class Pack:
    """Collects host arrays; `upload` brings all of them to a device and hands each out as a tensor."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, array: np.ndarray) -> int:
        """Take an array; returns its number."""
        self._arrays.append(np.ascontiguousarray(array))
        return len(self._arrays) - 1

    def ints(self, values: list[int]) -> int:
        return self.add(np.array(values, dtype=np.int64))

    def floats(self, values: list[float]) -> int:
        return self.add(np.array(values, dtype=np.float32))

    def upload(self, device: torch.device) -> None:
        """Copy everything, from pinned memory and without waiting on a GPU."""
        starts, size = [], 0
        for array in self._arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        target = host.numpy()
        for start, array in zip(starts, self._arrays, strict=True):
            target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        buffer = host.to(device, non_blocking=True)
        self._tensors = [
            buffer[start : start + array.nbytes].view(_TORCH[array.dtype]).reshape(array.shape)
            for start, array in zip(starts, self._arrays, strict=True)
        ]

    def __getitem__(self, number: int) -> torch.Tensor:
        """The tensor of the array with this number, once uploaded."""
        return self._tensors[number]


_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
