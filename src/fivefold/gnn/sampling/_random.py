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

import math
import operator

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Return the 64-bit finaliser of SplitMix64, a bijection on 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
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
        key = mix(key ^ mix(operator.index(part) + GOLDEN))  # NumPy's integers would overflow
    return key


def draw_bits(key: int, node: int, count: int) -> int:
    """Return draw ``count`` (0, 1, ...) of the stream of ``node``: 64 random bits."""
    return mix(mix(key + node * GOLDEN) + (count + 1) * GOLDEN)


def below(bits: int, bound: int) -> int:
    """Return an integer uniform in ``[0, bound)``: the upper half of ``bits * bound``."""
    return bits * bound >> 64


def exponential(bits: int) -> float:
    """Return ``-log(u)`` for u uniform in (0, 1], to within 2 units in the last place.

    ``u = f * 2**e`` and ``log(f) = 2 * atanh((f - 1) / (f + 1))`` by its series: only operations
    that every machine rounds alike. The logarithms of two libraries may differ in the last bit.
    """
    fraction, exponent = math.frexp(((bits >> 11) + 1) / (1 << 53))
    if fraction < math.sqrt(0.5):
        fraction, exponent = 2.0 * fraction, exponent - 1
    s = (fraction - 1.0) / (fraction + 1.0)
    series = 0.0
    for odd in range(23, 0, -2):
        series = series * (s * s) + 1.0 / odd
    return -(exponent * math.log(2.0) + 2.0 * s * series)
