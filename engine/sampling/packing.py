"""Small arrays of different types to the device in one copy."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 8
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class Packed:
    """An array on its way to the device; call it for the tensor once its pack is uploaded."""

    __slots__ = ("array", "tensor")

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.tensor: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        assert self.tensor is not None, "the pack is not uploaded yet"
        return self.tensor


class Pack:
    """Collects host arrays (int64, int32, float32) and brings all of them to a device."""

    def __init__(self) -> None:
        self._items: list[Packed] = []

    def add(self, array: np.ndarray) -> Packed:
        self._items.append(Packed(array))
        return self._items[-1]

    def upload(self, device: torch.device) -> None:
        """Copy everything, from pinned memory and without waiting on a GPU."""
        starts, size = [], 0
        for item in self._items:
            starts.append(size)
            size += -(-item.array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        target = host.numpy()
        for start, item in zip(starts, self._items, strict=True):
            target[start : start + item.array.nbytes] = item.array.reshape(-1).view(np.uint8)
        buffer = host.to(device, non_blocking=True)
        for start, item in zip(starts, self._items, strict=True):
            array = item.array
            item.tensor = buffer[start : start + array.nbytes].view(_TORCH[array.dtype]).reshape(array.shape)
