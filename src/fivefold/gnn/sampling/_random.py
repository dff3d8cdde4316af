"""Counter-based random numbers: every draw is a hash of what it is for.

The key is (seed, epoch, batch, hop), absorbed one after another into 64 bits; a node has the
stream ``mix(key + node * golden)``; draw ``i`` of the stream is ``mix(stream + (i + 1) * golden)``,
with the finaliser of SplitMix64. So a draw depends on nothing but its purpose: not on the order of
work, the number of threads or the version of a library. This module holds the hash for Python
integers and for arrays; ``_kernels`` holds the same in compiled form.

References:
    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, section 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GOLDEN", "MASK", "mix", "mix_array", "stream_key"]

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Return the 64-bit finaliser of SplitMix64, a bijection on 64-bit integers."""
    value &= MASK
    value = ((value ^ (value >> 30)) * _FIRST) & MASK
    value = ((value ^ (value >> 27)) * _SECOND) & MASK
    return value ^ (value >> 31)


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return :func:`mix` of every element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def stream_key(*parts: int) -> int:
    """Return the key of ``parts``; their order and number matter."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part + GOLDEN))
    return key
