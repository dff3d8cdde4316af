"""MariusGNN's buffer of partitions: which of them are in memory, in which order.

Nodes are split into equal ranges of consecutive ids, and the buffer holds a few of the ranges. For
node classification the training nodes are numbered first: ``sequential_states`` keeps their
partitions in memory for the whole epoch, ``dispersed_states`` lets all partitions pass through the
buffer. ``beta_states`` is the order in which every pair of partitions meets, ``comet_states`` the
same over random groups, regrouped for each epoch. Mohoney et al., OSDI 2021; Waleffe et al.,
EuroSys 2023; details as in the public code.

All are pure functions of their arguments. They must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError

__all__ = [
    "assign_buckets",
    "assign_training_nodes",
    "beta_states",
    "comet_states",
    "dispersed_states",
    "partition_rows",
    "sequential_states",
    "training_first_order",
]

States = list[NDArray[np.int64]]


def partition_rows(num_nodes: int, num_partitions: int) -> int:
    """Nodes per partition; the last ones may have fewer, or none.

    Args:
        num_nodes: Nodes of the graph.
        num_partitions: At least 1.

    Returns:
        The length of a range.

    Raises:
        ConfigurationError: A count is out of range.

    Example:
        >>> partition_rows(10, 4)
        3
    """
    if num_nodes < 0 or num_partitions < 1:
        raise ConfigurationError(
            f"there must be at least one partition; got num_partitions={num_partitions}, "
            f"num_nodes={num_nodes}"
        )
    return max(1, -(-num_nodes // num_partitions))


def training_first_order(
    num_nodes: int, train_ids: NDArray[np.int64], *, seed: int | None = 0
) -> NDArray[np.int64]:
    """Number the training nodes first.

    Args:
        num_nodes: Nodes of the graph.
        train_ids: Distinct training nodes.
        seed: Both groups are shuffled by it, as published; None keeps their order, which lets
            features be rewritten in one sequential pass (equal in law where ids are random).

    Returns:
        The old id of each new one.

    Example:
        >>> training_first_order(5, np.array([3, 1]), seed=None).tolist()
        [1, 3, 0, 2, 4]
    """
    is_train = np.zeros(num_nodes, np.bool_)
    is_train[train_ids] = True
    groups = [np.flatnonzero(is_train), np.flatnonzero(~is_train)]
    if seed is not None:
        draw = np.random.default_rng([seed, 0])
        groups = [draw.permutation(group) for group in groups]
    return np.concatenate(groups)


def sequential_states(
    num_partitions: int, buffer_partitions: int, *, train_partitions: int, seed: int
) -> States:
    """One state for the epoch: all partitions with training nodes, and random others.

    Args:
        num_partitions: Partitions on disk.
        buffer_partitions: Partitions that fit the buffer.
        train_partitions: The first so many hold the training nodes.
        seed: Of this epoch.

    Returns:
        A list of one array.

    Raises:
        ConfigurationError: The training partitions do not fit.

    Example:
        >>> sequential_states(6, 3, train_partitions=2, seed=1)[0][:2].tolist()
        [0, 1]
    """
    _check(num_partitions, buffer_partitions)
    if train_partitions > buffer_partitions:
        raise ConfigurationError(
            f"the training nodes fill {train_partitions} partitions and the buffer holds "
            f"{buffer_partitions}",
            hint="use the dispersed policy, a larger buffer or larger partitions",
        )
    draw = np.random.default_rng([seed, 1])
    others = draw.permutation(np.arange(train_partitions, num_partitions))
    chosen = others[: buffer_partitions - train_partitions]
    return [np.concatenate([np.arange(train_partitions), chosen]).astype(np.int64)]


def dispersed_states(
    num_partitions: int, buffer_partitions: int, *, pinned: int = 0, seed: int
) -> States:
    """A random resident partition is replaced per step, until all have been in memory.

    Args:
        num_partitions: Partitions on disk.
        buffer_partitions: Partitions that fit the buffer.
        pinned: The first so many slots are never replaced.
        seed: Of this epoch.

    Returns:
        ``num_partitions - buffer_partitions + 1`` states; neighbours differ in one slot.

    Raises:
        ConfigurationError: A count is out of range.

    Example:
        >>> len(dispersed_states(6, 3, seed=0))
        4
    """
    _check(num_partitions, buffer_partitions)
    if not 0 <= pinned < buffer_partitions and buffer_partitions < num_partitions:
        raise ConfigurationError(
            f"pinned must be 0 to {buffer_partitions - 1}, one less than the buffer; got {pinned}"
        )
    draw = np.random.default_rng([seed, 2])
    order = draw.permutation(num_partitions).astype(np.int64)
    buffer = order[:buffer_partitions].copy()
    states = [buffer.copy()]
    for entering in order[buffer_partitions:]:
        buffer[draw.integers(pinned, len(buffer))] = entering
        states.append(buffer.copy())
    return states


def beta_states(num_partitions: int, buffer_partitions: int, *, seed: int) -> States:
    """An order in which each pair of partitions is in memory together at least once.

    Start with random partitions. Pass each one on disk through the last slot, then replace all
    other slots, whose partitions have met everything by then; repeat until none is left on disk.

    Args:
        num_partitions: Partitions on disk.
        buffer_partitions: Partitions that fit the buffer, at least 2 unless all fit.
        seed: Of this epoch.

    Returns:
        The states; neighbours differ in one slot.

    Raises:
        ConfigurationError: The buffer holds one of several partitions, so that none can meet.

    Example:
        >>> states = beta_states(4, 2, seed=0)
        >>> len({frozenset(state.tolist()) for state in states})
        6
    """
    _check(num_partitions, buffer_partitions)
    if buffer_partitions == 1 < num_partitions:
        message = "pairs cannot meet in a buffer of one partition"
        raise ConfigurationError(message, hint="use at least 2")
    draw = np.random.default_rng([seed, 3])
    order = draw.permutation(num_partitions).astype(np.int64)
    buffer, on_disk = order[:buffer_partitions].copy(), order[buffer_partitions:].copy()
    states = [buffer.copy()]
    while len(on_disk):
        draw.shuffle(buffer)
        draw.shuffle(on_disk)
        for i in range(len(on_disk)):
            buffer[-1], on_disk[i] = on_disk[i], buffer[-1]
            states.append(buffer.copy())
        draw.shuffle(on_disk)
        replaced = min(len(buffer) - 1, len(on_disk))
        for i in range(replaced):
            buffer[i] = on_disk[i]
            states.append(buffer.copy())
        on_disk = on_disk[replaced:]
    return states


def comet_states(
    num_partitions: int, buffer_partitions: int, *, num_groups: int, seed: int
) -> States:
    """The order of ``beta_states`` over random groups of partitions.

    Args:
        num_partitions: Partitions on disk, a multiple of the groups.
        buffer_partitions: Partitions that fit the buffer, a multiple of a group's.
        num_groups: Logical partitions; they are regrouped for each seed.
        seed: Of this epoch.

    Returns:
        The states, in physical partitions.

    Raises:
        ConfigurationError: The groups are not of equal size or do not fill the buffer.

    Example:
        >>> [len(state) for state in comet_states(8, 4, num_groups=4, seed=0)][:2]
        [4, 4]
    """
    _check(num_partitions, buffer_partitions)
    size = num_partitions // max(1, num_groups)
    if num_groups < 1 or size * num_groups != num_partitions or buffer_partitions % max(1, size):
        raise ConfigurationError(
            f"groups must divide the partitions, and their size the buffer; got "
            f"num_groups={num_groups}, num_partitions={num_partitions}, "
            f"buffer_partitions={buffer_partitions}"
        )
    members = np.random.default_rng([seed, 4]).permutation(num_partitions).reshape(num_groups, size)
    states = beta_states(num_groups, buffer_partitions // size, seed=seed)
    return [members[state].reshape(-1).astype(np.int64) for state in states]


def assign_buckets(
    states: Sequence[NDArray[np.int64]], num_partitions: int, *, seed: int
) -> NDArray[np.int64]:
    """Give each edge bucket to a random one of the states that hold both its partitions.

    Not to the first such state: that would bring the same examples together.

    Args:
        states: Of an epoch.
        num_partitions: Partitions on disk.
        seed: Of this epoch.

    Returns:
        Matrix of state numbers, one per bucket; -1 where no state holds both.

    Example:
        >>> assign_buckets([np.array([0, 1]), np.array([1, 2])], 3, seed=0).tolist()[0]
        [0, 0, -1]
    """
    draw = np.random.default_rng([seed, 5])
    chosen = np.full((num_partitions, num_partitions), -1, np.int64)
    seen = np.zeros((num_partitions, num_partitions), np.int64)
    for number, state in enumerate(states):
        block = np.ix_(state, state)
        seen[block] += 1
        # The n-th candidate replaces the choice with probability 1/n: uniform over all of them.
        takes = draw.random(seen[block].shape) * seen[block] < 1.0
        chosen[block] = np.where(takes, number, chosen[block])
    return chosen


def assign_training_nodes(
    states: Sequence[NDArray[np.int64]],
    train_partition: NDArray[np.int64],
    *,
    num_partitions: int,
    seed: int,
) -> NDArray[np.int64]:
    """Give each training node to a random one of the states that hold its partition.

    Args:
        states: Of an epoch.
        train_partition: Partition of each training node.
        num_partitions: Partitions on disk.
        seed: Of this epoch.

    Returns:
        State number of each training node.

    Raises:
        ConfigurationError: A training node's partition is in no state.

    Example:
        >>> states = [np.array([0, 1]), np.array([2, 1])]
        >>> assign_training_nodes(states, np.array([0, 2]), num_partitions=3, seed=0).tolist()
        [0, 1]
    """
    holders: list[list[int]] = [[] for _ in range(num_partitions)]
    for number, state in enumerate(states):
        for partition in state.tolist():
            holders[partition].append(number)
    lengths = np.array([len(numbers) for numbers in holders], np.int64)
    if len(train_partition) and not lengths[train_partition].all():
        message = "a training node's partition is in no state of the epoch"
        raise ConfigurationError(message, hint="use an order that admits every partition")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.array([number for numbers in holders for number in numbers], np.int64)
    draw = np.random.default_rng([seed, 6])
    picks = np.floor(draw.random(len(train_partition)) * lengths[train_partition]).astype(np.int64)
    return flat[starts[train_partition] + picks]


def _check(num_partitions: int, buffer_partitions: int) -> None:
    if not 1 <= buffer_partitions <= num_partitions:
        raise ConfigurationError(
            f"the buffer must hold 1 to {num_partitions} partitions; got {buffer_partitions}"
        )
