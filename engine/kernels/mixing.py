"""The integer mixer behind the random streams: a 32-bit finalizer (xor-shift-multiply, "lowbias32", Ellis 2018).

Integers only, so that it gives the same words on every device: in tensors and arrays it is evaluated in int64, in a
kernel in uint32, whose products wrap around.
"""

from __future__ import annotations

from typing import Any

from engine.kernels.language import tl, triton

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
_M1, _M2 = 0x7FEB352D, 0x846CA68B


def mix(x: Any) -> Any:
    """Of each element of an int64 tensor or array in [0, 2**32), or of one such integer. Products that wrap around at
    64 bits keep their low 32 bits right; what the shifts bring down is cut off before."""
    x = x ^ (x >> 16)
    x = (x * _M1) & MASK
    x = x ^ (x >> 15)
    x = (x * _M2) & MASK
    return x ^ (x >> 16)


@triton.jit
def mix_words(x):
    """`mix` of 32-bit words inside a kernel, as uint32."""
    x = x.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)
