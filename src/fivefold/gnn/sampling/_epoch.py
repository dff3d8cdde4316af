"""Keys of random numbers, and the mini-batches of an epoch: every training node in exactly one.

Every draw is a hash of what it is for. The key is (seed, epoch, batch, hop), absorbed one after
another into 64 bits; a node has the stream ``mix(key + node * golden)``; draw ``i`` of the stream
is ``mix(stream + (i + 1) * golden)``, with the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA
2014, section 4). So a draw depends on nothing but its purpose: not on the order of work, the
number of threads or the version of a library. ``_kernels`` holds the draws.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ORDER = 0x6F72646572  # keeps the key of the order apart from those of the hops
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Return the 64-bit finaliser of SplitMix64."""
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


def as_ids(values: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return node ids as int64."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"{name} has shape {array.shape} and dtype {array.dtype}", hint="a list of node ids"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def check_distinct(ids: NDArray[np.int64], num_nodes: int | None = None) -> None:
    """Check training nodes; None for ``num_nodes`` allows all ids."""
    in_order = np.sort(ids)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if twice.size:
        raise ConfigurationError(
            f"train_ids holds node {twice[0]} more than once", hint="give every node once"
        )
    if num_nodes is not None and ids.size and not 0 <= in_order[0] <= in_order[-1] < num_nodes:
        outside = in_order[0] if in_order[0] < 0 else in_order[-1]
        raise ConfigurationError(
            f"train_ids holds node {outside}, which is out of range",
            hint=f"nodes are 0 to {num_nodes - 1}",
        )


def epoch_batches(
    train_ids: ArrayLike, *, batch_size: int, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Return the training nodes in random order, cut into batches.

    The order is that of a hash of (seed, epoch, place), so it is the same with every version of
    every library.

    Args:
        train_ids: Node ids, each once.
        batch_size: Nodes in a batch; the last batch has what remains.
        seed: Other seeds give other orders.
        epoch: So do other epochs.

    Raises:
        ConfigurationError: An id stands twice, or ``batch_size`` is not positive.

    Examples:
        >>> batches = epoch_batches(range(10), batch_size=4, seed=0, epoch=0)
        >>> [len(batch) for batch in batches], sum(sum(batch.tolist()) for batch in batches)
        ([4, 4, 2], 45)
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size is {batch_size}", hint="use a positive integer")
    ids = as_ids(train_ids, "train_ids")
    check_distinct(ids)
    key = stream_key(seed, epoch, _ORDER)
    places = np.arange(1, ids.size + 1, dtype=np.uint64)
    order = np.argsort(mix_array(np.uint64(key) + places * np.uint64(GOLDEN)), kind="stable")
    shuffled = ids[order]
    return [shuffled[start : start + batch_size] for start in range(0, ids.size, batch_size)]
