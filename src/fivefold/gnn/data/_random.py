"""Random numbers that are functions of their place: compiled, without state.

Every number is a hash of (key, counter), so any range of a data set can be made alone, in any
order and by any number of threads, and comes out the same. The hash is the finaliser of
SplitMix64 over a Weyl sequence. Normals use a ziggurat of 256 layers, Poisson numbers sequential
search below a mean of 12 and Hormann's transformed rejection above, and permutations an
alternating Feistel network with cycle walking, so that no table of all nodes is needed.

References: Steele et al., OOPSLA 2014 (SplitMix); Marsaglia and Tsang, JSS 2000, and Doornik
2005 (ziggurat); Hormann, Insurance: Mathematics and Economics 1993 (PTRS); Black and Rogaway,
CT-RSA 2002 (cycle walking).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fivefold._compiler import njit

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_AGAIN = np.uint64(0xD6E8FEB86659FD93)
_ONE, _ELEVEN, _LAYER_BITS = np.uint64(1), np.uint64(11), np.uint64(255)
_S27, _S30, _S31, _S8 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(8)
_TO_UNIT = 2.0**-53
_NUM_LAYERS = 256
_TAIL = 3.6541528853610088  # where the lowest layer's rectangle ends, for 256 layers
_LAYER_AREA = 0.00492867323399
_SEARCH_BELOW = 12.0  # Poisson means under this are found by sequential search


def _layers() -> tuple[Any, Any]:
    """Right edges x and heights exp(-x^2 / 2) of the ziggurat's layers, outermost first."""
    x = np.zeros(_NUM_LAYERS + 1)
    x[0] = _LAYER_AREA / math.exp(-0.5 * _TAIL**2)
    x[1] = _TAIL
    for layer in range(2, _NUM_LAYERS):
        height = math.exp(-0.5 * x[layer - 1] ** 2) + _LAYER_AREA / x[layer - 1]
        x[layer] = math.sqrt(-2.0 * math.log(height))
    return x, np.exp(-0.5 * x**2)


LAYERS_X, LAYERS_Y = _layers()


@njit
def number(key: Any, counter: Any) -> Any:
    """64 random bits for this counter under this key; both are below 2**64."""
    # A Python number below 2**63 arrives as int64, and int64 + uint64 would be a float.
    bits = np.uint64(key) + np.uint64(counter) * _WEYL
    bits = (bits ^ (bits >> _S30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> _S27)) * _MULTIPLIER_2
    return bits ^ (bits >> _S31)


@njit
def key_of(key: Any, stream: Any) -> Any:
    """The key of a stream under a key, far away from those of other streams."""
    return number(number(key, _ONE) ^ _AGAIN, np.uint64(stream))


@njit
def uniform(bits: Any) -> Any:
    """A double in [0, 1) from 64 bits."""
    return (bits >> _ELEVEN) * _TO_UNIT


@njit
def normal(bits: Any, layers_x: Any, layers_y: Any) -> Any:
    """A standard normal from 64 bits; the rare rejections draw further bits from these."""
    while True:
        layer = np.int64(bits & _LAYER_BITS)
        x = uniform(bits) * layers_x[layer]
        sign = 1.0 if (bits >> _S8) & _ONE else -1.0
        if x < layers_x[layer + 1]:
            return sign * x
        bits = number(bits, _AGAIN)
        if layer == 0:
            return sign * _normal_tail(bits)
        height = layers_y[layer] + uniform(bits) * (layers_y[layer + 1] - layers_y[layer])
        if height < math.exp(-0.5 * x * x):
            return sign * x
        bits = number(bits, _AGAIN)


@njit
def _normal_tail(bits: Any) -> Any:
    while True:
        second = number(bits, _ONE)
        x = -math.log(1.0 - uniform(bits)) / _TAIL
        if -2.0 * math.log(1.0 - uniform(second)) > x * x:
            return _TAIL + x
        bits = number(second, _AGAIN)


@njit
def poisson(mean: float, key: Any) -> Any:
    """A Poisson number with this mean; ``key`` must be used for nothing else."""
    if mean < _SEARCH_BELOW:
        return _poisson_search(mean, uniform(number(key, _ONE)))
    return _poisson_rejection(mean, key)


@njit
def _poisson_search(mean: float, left: float) -> Any:
    count = 0
    share = math.exp(-mean)
    while left >= share > 0.0:
        left -= share
        count += 1
        share *= mean / count
    return count


@njit
def _poisson_rejection(mean: float, key: Any) -> Any:
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    quick = 0.9277 - 3.6224 / (b - 2.0)
    counter = np.uint64(2)
    while True:
        u = uniform(number(key, counter)) - 0.5
        v = 1.0 - uniform(number(key, counter + _ONE))
        counter += np.uint64(2)
        middle = 0.5 - abs(u)
        count = math.floor((2.0 * a / middle + b) * u + mean + 0.43)
        if middle >= 0.07 and v <= quick:
            return int(count)
        if count < 0 or (middle < 0.013 and v > middle):
            continue
        left = math.log(v * inverse_alpha / (a / (middle * middle) + b))
        if left <= count * math.log(mean) - mean - math.lgamma(count + 1.0):
            return int(count)


@njit
def permute(place: Any, size: Any, key: Any, inverse: bool) -> Any:  # noqa: FBT001 - compiled
    """Where a random permutation of 0..size-1 sends ``place`` (or, inverse, whence it came)."""
    bits = 2
    while (1 << bits) < size:
        bits += 1
    low_bits = np.uint64(bits // 2)
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << np.uint64(bits - bits // 2)) - _ONE
    value = np.uint64(place)
    while True:
        low, high = value & low_mask, value >> low_bits
        for step in range(8):
            turn = 7 - step if inverse else step
            if turn % 2 == 0:
                high ^= number(np.uint64(key) + np.uint64(turn), low) & high_mask
            else:
                low ^= number(np.uint64(key) + np.uint64(turn), high) & low_mask
        value = (high << low_bits) | low
        if value < np.uint64(size):
            return np.int64(value)
