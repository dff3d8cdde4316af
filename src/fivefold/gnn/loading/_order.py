"""The order of batches: pure functions of seed, epoch, rank and number of ranks.

Every process computes the same order from the same numbers, so that ranks agree without talking
and a resumed run goes on where it stopped. Nothing here touches a file or a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError

Ids = npt.NDArray[np.int64]
Remainder = Literal["drop", "repeat"]


def batch_order(
    count: int, *, seed: int, epoch: int, segments: Sequence[tuple[int, int]] = ()
) -> Ids:
    """A random order of ``count`` batches, the same for the same seed and epoch.

    Args:
        count: Number of batches.
        seed: Seed of all epochs.
        epoch: Number of the epoch; another epoch has an independent order.
        segments: ``(first, stop)`` of runs of batches that stay together: the runs are put in a
            random order, and the batches inside each run. Empty: any order of all batches.

    Returns:
        int64 [count], each number once.

    Raises:
        ConfigurationError: A count, seed or epoch below zero, or segments that do not cover the
            batches.

    Examples:
        >>> sorted(batch_order(5, seed=1, epoch=0).tolist())
        [0, 1, 2, 3, 4]
        >>> batch_order(4, seed=1, epoch=0, segments=[(0, 2), (2, 4)]).tolist() in (
        ...     [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [1, 0, 3, 2]]
        ...     + [[2, 3, 0, 1], [2, 3, 1, 0], [3, 2, 0, 1], [3, 2, 1, 0]])
        True
    """
    if min(count, seed, epoch) < 0:
        raise ConfigurationError(
            f"count, seed and epoch must not be negative; got {count}, {seed}, {epoch}"
        )
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    if not segments:
        return random.permutation(count).astype(np.int64)
    if sorted(n for first, stop in segments for n in range(first, stop)) != list(range(count)):
        raise ConfigurationError(f"the segments do not cover {count} batches once each")
    runs = [segments[i] for i in random.permutation(len(segments))]
    return np.concatenate([random.permutation(np.arange(first, stop)) for first, stop in runs])


def rank_share(order: Ids, *, rank: int, world_size: int, remainder: Remainder = "drop") -> Ids:
    """The batches of one rank: every ``world_size``-th one, the same number on every rank.

    Args:
        order: Batches of the epoch, the same array on all ranks.
        rank: Number of this rank.
        world_size: Number of ranks.
        remainder: "drop" leaves out the last ``len(order) % world_size`` batches of the order,
            which a shuffled order changes from epoch to epoch; "repeat" hands the first batches
            out a second time, so that none is left out.

    Returns:
        The rank's batches, in order.

    Raises:
        ConfigurationError: A rank outside of the world, or fewer batches than ranks.

    Examples:
        >>> order = np.arange(5)
        >>> [rank_share(order, rank=r, world_size=2).tolist() for r in (0, 1)]
        [[0, 2], [1, 3]]
        >>> [rank_share(order, rank=r, world_size=2, remainder="repeat").tolist() for r in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank must be in 0..world_size-1; got rank={rank}, world_size={world_size}"
        )
    if remainder not in ("drop", "repeat"):
        raise ConfigurationError(f'remainder is {remainder!r}; use "drop" or "repeat"')
    if 0 < len(order) < world_size:
        raise ConfigurationError(
            f"{len(order)} batches cannot be shared by {world_size} ranks",
            hint="use a smaller batch size or fewer ranks",
        )
    extra = len(order) % world_size
    if remainder == "drop":
        usable = order[: len(order) - extra]
    else:
        usable = np.concatenate([order, order[: (world_size - extra) % world_size]])
    return usable[rank::world_size]
