"""In which order the cold rows of a segment lie on disk, and which of them each batch reads.

A segment is a number of consecutive batches that share one stretch of the packed file. Layouts:

* ``gray``, ``folded``: every row once, ordered by which batches need it (see ``_refinement``);
* ``minhash``: DiskGNN's as published. Rows of two or more batches once, ordered by the minimum of
  k random permutations over their batches; then a private chunk per batch;
* ``popularity``: as ``minhash``, but the shared rows by how many batches of the segment need them;
* ``packed``: a chunk per batch, every batch with copies of its own.

Ties go by node id, and so do the rows within a chunk. A pure function: no file, no page.

References: DiskGNN, arXiv 2405.05231; Gray, US patent 2632058 (reflected binary code).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.planning._id_set import sort_distinct
from fivefold.gnn.planning._pages import runs_of
from fivefold.gnn.planning._refinement import Refinement
from fivefold.gnn.planning._sources import Array, Ids
from fivefold.gnn.planning._union import Union

Layout = Literal["gray", "folded", "minhash", "popularity", "packed"]
_LARGEST_KEY = 2**62


@dataclasses.dataclass(frozen=True)
class SegmentLayout:
    """Where the cold rows of one segment lie.

    Args:
        order: Node id of each packed row, int64 [R]. With private chunks a node can stand twice.
        rows: For each batch the places in ``order`` that it reads, ascending, int64.

    Examples:
        >>> layout = SegmentLayout(np.array([4, 7, 9]), [np.array([0, 1]), np.array([1, 2])])
        >>> layout.node_ids(1).tolist()
        [7, 9]
    """

    order: Ids
    rows: list[Ids]

    def node_ids(self, batch: int) -> Ids:
        """Node ids of the rows that a batch of the segment reads, in storage order."""
        return self.order[self.rows[batch]]

    def runs(self, batch: int) -> tuple[Ids, Ids]:
        """Starts and counts of the runs of rows that a batch of the segment reads."""
        return runs_of(self.rows[batch])


def segment_layout(
    cold_ids: Sequence[Ids],
    *,
    layout: Layout,
    minhash_functions: int = 2,
    seed: int = 0,
    first_batch: int = 0,
    num_batches: int | None = None,
) -> SegmentLayout:
    """Lay out the cold rows of one segment.

    Args:
        cold_ids: Node ids that each batch of the segment reads from disk, ascending and distinct.
        layout: One of ``gray``, ``folded``, ``minhash``, ``popularity``, ``packed``.
        minhash_functions: Number of permutations (``minhash`` only).
        seed: Seed of the permutations (``minhash`` only).
        first_batch: Number of the segment's first batch (``minhash`` only: its permutations are
            over all batches).
        num_batches: Number of all batches; None: those of this segment (``minhash`` only).

    Returns:
        The order of the rows and each batch's places in it.

    Raises:
        ConfigurationError: The layout is unknown or a number is out of range.
        DataError: The ids of a batch are not ascending and distinct.

    Examples:
        >>> batches = [np.array([1, 2, 5]), np.array([2, 3, 5])]
        >>> laid_out = segment_layout(batches, layout="gray")
        >>> laid_out.order.tolist(), [rows.tolist() for rows in laid_out.rows]
        ([3, 2, 5, 1], [[1, 2, 3], [0, 1, 2]])
    """
    check_layout(layout, minhash_functions)
    batches = [np.ascontiguousarray(ids, np.int64) for ids in cold_ids]
    for number, ids in enumerate(batches):
        if not (ids[1:] > ids[:-1]).all():
            raise DataError(
                f"the cold ids of batch {number} of the segment are not ascending and distinct",
                hint="sort them with numpy.unique",
            )
    if layout == "packed":
        return _packed(batches)
    if layout in {"gray", "folded"}:
        return _by_membership(batches, folded=layout == "folded")
    if layout == "popularity":
        return _with_chunks(batches, _by_popularity)
    total = first_batch + len(batches) if num_batches is None else num_batches
    if total < first_batch + len(batches) or first_batch < 0:
        raise ConfigurationError(
            f"a segment of {len(batches)} batches from batch {first_batch} on is not within "
            f"num_batches={num_batches}",
            hint="first_batch counts from 0; leave num_batches out for a segment alone",
        )
    hashes = _permutations(minhash_functions, total, seed)[:, first_batch:]
    return _with_chunks(batches, _by_minhash(hashes, total))


def check_layout(layout: str, minhash_functions: int) -> None:
    """Check the name of a layout and its parameter.

    Raises:
        ConfigurationError: There is no such layout, or the number of functions is not positive.
    """
    if layout not in get_args(Layout):
        raise ConfigurationError(
            f"layout is {layout!r}", hint=f"use one of {', '.join(get_args(Layout))}"
        )
    if minhash_functions < 1:
        raise ConfigurationError(
            f"minhash_functions must be at least 1; got {minhash_functions}",
            hint="DiskGNN uses 2",
        )


def _packed(batches: Sequence[Ids]) -> SegmentLayout:
    order = np.concatenate([np.empty(0, np.int64), *batches])
    return SegmentLayout(order, _consecutive(batches, 0))


def _consecutive(batches: Sequence[Array], first: int) -> list[Ids]:
    stops = first + np.cumsum([len(ids) for ids in batches], dtype=np.int64)
    return [
        np.arange(stop - len(ids), stop, dtype=np.int64)
        for ids, stop in zip(batches, stops, strict=True)
    ]


def _by_membership(batches: Sequence[Ids], *, folded: bool) -> SegmentLayout:
    union = Union(batches)
    refinement = Refinement(len(union), folded=folded)
    members = [union.locate(ids) for ids in batches]
    for member in members:
        refinement.split(member)
    places = refinement.positions()
    order = np.empty(len(union), np.int64)
    order[places] = union.ids
    return SegmentLayout(order, [_ascending_places(member, places) for member in members])


_Key = Callable[[Sequence[Array], int], Array]


def shared_and_private(
    batches: Sequence[Ids], shared: Array, *, minhash_functions: int, num_batches: int
) -> SegmentLayout:
    """The first segment with these of its distinct rows shared, and copies of all others.

    Args:
        batches: Ascending ids of each batch.
        shared: Which of the distinct ids, ascending, are stored once.
        minhash_functions: Hash functions of the order of the shared rows.
        num_batches: Number of all batches.
    """
    hashes = _permutations(minhash_functions, num_batches, 0)
    return _with_chunks(batches, _by_minhash(hashes, num_batches), shared)


def _with_chunks(
    batches: Sequence[Ids], key_of: _Key, shared: Array | None = None
) -> SegmentLayout:
    """Shared rows first, by key and id; then a chunk per batch; None: share what two need."""
    union = Union(batches)
    members = [union.locate(ids) for ids in batches]
    if shared is None:
        uses = np.zeros(len(union), np.int32)
        for member in members:
            uses[member] += 1
        shared = uses > 1
    common = np.flatnonzero(shared)
    by_key = common[np.argsort(key_of(members, len(union))[common], kind="stable")]
    places = np.empty(len(union), np.int32)
    places[by_key] = np.arange(len(by_key), dtype=np.int32)
    chunks = [member[~shared[member]] for member in members]
    rows = [
        np.concatenate([_ascending_places(member[shared[member]], places), chunk_rows])
        for member, chunk_rows in zip(members, _consecutive(chunks, len(by_key)), strict=True)
    ]
    return SegmentLayout(union.ids[np.concatenate([by_key, *chunks])], rows)


def _by_popularity(members: Sequence[Array], num_rows: int) -> Array:
    key = np.zeros(num_rows, np.int32)
    for member in members:
        key[member] -= 1  # ascending keys: the most needed rows first
    return key


def _permutations(number: int, num_batches: int, seed: int) -> Ids:
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = [generator.permutation(num_batches) for _ in range(number)]
    return np.array(rows, np.int64).reshape(number, num_batches)


def _by_minhash(hashes: Ids, num_batches: int) -> _Key:
    """DiskGNN's key: the minima as the digits of a number in base ``num_batches``."""

    def key_of(members: Sequence[Array], num_rows: int) -> Array:
        key = np.zeros(num_rows, np.int64)
        for number, function in enumerate(hashes):
            least = np.full(num_rows, num_batches, np.int64)
            for member, value in zip(members, function, strict=False):
                _lower(least, member, value)
            if (num_batches + 1) ** (number + 1) >= _LARGEST_KEY:
                key = np.unique(key, return_inverse=True)[1].astype(np.int64)  # only order matters
            key = key * (num_batches + 1) + least
        return key

    return key_of


def _ascending_places(member: Array, places: Array) -> Ids:
    return sort_distinct(places[member], len(places))


@njit
def _lower(least: Any, member: Any, value: Any) -> None:
    for row in member:
        least[row] = min(least[row], value)
