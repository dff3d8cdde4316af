"""The distinct ids of a segment, and where each batch's ids stand among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fivefold.gnn.planning._id_set import IdSet, is_dense
from fivefold.gnn.planning._refinement import locate, union_of
from fivefold.gnn.planning._sources import Array, Ids


class Union:
    """The union of lists of ids that ascend and hold no id twice.

    Bits where ids are dense, as those of a sampled graph are; merged lists where they are not.

    Args:
        batches: The lists.

    Examples:
        >>> import numpy as np
        >>> union = Union([np.array([1, 5]), np.array([2, 5, 9])])
        >>> union.ids.tolist(), union.locate(np.array([2, 9])).tolist()
        ([1, 2, 5, 9], [1, 3])
    """

    def __init__(self, batches: Sequence[Ids]) -> None:
        bound = 1 + max((int(ids[-1]) for ids in batches if len(ids)), default=-1)
        self._members: IdSet | None = None
        if is_dense(sum(map(len, batches)), bound):
            self._members = IdSet(bound)
            for ids in batches:
                self._members.add(ids)
        else:
            self.ids = union_of(batches)

    @cached_property
    def ids(self) -> Ids:
        """All ids, ascending."""
        assert self._members is not None, "else they were merged"
        return self._members.ascending()

    def __len__(self) -> int:
        return len(self.ids) if self._members is None else len(self._members)

    def locate(self, ids: Ids) -> Array:
        """Place of each of the ascending ids, all of which are in the union; int32."""
        return locate(ids, self.ids) if self._members is None else self._members.locate(ids)
