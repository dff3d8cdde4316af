"""How a cache that knows the order of the batches changes from batch to batch, as arrays.

Made by ``belady``; used by packing, which writes the changes into the batch records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.planning._sources import Array, Ids


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheSchedule:
    """Which rows of each batch are misses, and which rows enter the cache after it.

    Args:
        hit_bits: Hits of all batches, a bit per node id in the order of the samples, each batch
            from a new byte on, uint8.
        hit_starts: First byte of each batch in ``hit_bits``, int64 [batches + 1].
        admitted_rows: Node ids that enter the cache after each batch, ascending per batch, int64.
        admitted_slots: The slots that they take, int32.
        admitted_starts: First place of each batch in both, int64 [batches + 1].

    Examples:
        >>> schedule = CacheSchedule(  # two batches of two ids; the second id is then kept
        ...     hit_bits=np.packbits([0, 0]).repeat(2) | np.array([0, 128], np.uint8),
        ...     hit_starts=np.array([0, 1, 2]), admitted_rows=np.array([7]),
        ...     admitted_slots=np.array([0], np.int32), admitted_starts=np.array([0, 1, 1]))
        >>> [values.tolist() for values in schedule.admissions(0)], schedule.misses(1, 2).tolist()
        ([[7], [0]], [False, True])
    """

    hit_bits: NDArray[np.uint8]
    hit_starts: Ids
    admitted_rows: Ids
    admitted_slots: NDArray[np.int32]
    admitted_starts: Ids

    def misses(self, batch: int, num_ids: int) -> NDArray[np.bool_]:
        """Which ids of a batch, in the order of the samples, come from disk."""
        packed = self.hit_bits[self.hit_starts[batch] : self.hit_starts[batch + 1]]
        missed: NDArray[np.bool_] = np.unpackbits(packed, count=num_ids) == 0
        return missed

    def admissions(self, batch: int) -> tuple[Ids, NDArray[np.int32]]:
        """Node ids that enter after a batch, ascending, and the slots that they take."""
        place = slice(self.admitted_starts[batch], self.admitted_starts[batch + 1])
        return self.admitted_rows[place], self.admitted_slots[place]

    def arrays(self) -> dict[str, Array]:
        """The arrays by name."""
        return dict(vars(self))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> CacheSchedule:
        """The schedule whose ``arrays`` these are; others are ignored."""
        return cls(**{name: np.asarray(arrays[name]) for name in cls.__dataclass_fields__})
