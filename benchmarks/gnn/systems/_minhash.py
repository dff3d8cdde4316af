"""DiskGNN's order of packed rows, as published, and a plan that packs by it.

Rows that two or more batches of a segment need lie first, each once, ordered by MinHash: by the
minima of random permutations of the segment's batches over those that need the row. Then comes a
private chunk per batch. Ties go by node id.

Reference: DiskGNN, arXiv 2405.05231.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.planning import Plan
from fivefold.gnn.planning.id_sets import union_of
from fivefold.gnn.planning.layout import SegmentLayout, read_costs
from fivefold.gnn.sampling import SampleFile

_FUNCTIONS = 2
Ids = NDArray[np.int64]


def minhash_layout(cold_ids: Sequence[Ids]) -> SegmentLayout:
    """Lay out the cold rows of one segment, given the ascending cold ids of each of its batches."""
    union = union_of(cold_ids)
    ids, members = union.ascending(), [union.locate(batch) for batch in cold_ids]
    uses = np.zeros(len(ids), np.int32)
    for member in members:
        uses[member] += 1
    shared = uses > 1
    common = np.flatnonzero(shared)
    by_key = common[np.argsort(_keys(members, len(ids))[common], kind="stable")]
    places = np.empty(len(ids), np.int64)
    places[by_key] = np.arange(len(by_key))
    chunks = [member[~shared[member]] for member in members]
    stops = len(by_key) + np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)
    rows = [
        np.concatenate([np.sort(places[member[shared[member]]]), np.arange(stop - len(own), stop)])
        for member, own, stop in zip(members, chunks, stops, strict=True)
    ]
    return SegmentLayout(ids[np.concatenate([by_key, *chunks])], rows)


def permutations(num_batches: int) -> Ids:
    """Return the hash functions of a segment of so many batches, [functions, num_batches]."""
    generator = np.random.Generator(np.random.PCG64(0))
    return np.array([generator.permutation(num_batches) for _ in range(_FUNCTIONS)], np.int64)


def _keys(members: Sequence[NDArray[np.integer]], num_rows: int) -> Ids:
    """Return the minima of each row as the digits of one number."""
    keys = np.zeros(num_rows, np.int64)
    for function in permutations(len(members)):
        least = np.full(num_rows, len(members), np.int64)
        for member, value in zip(members, function, strict=True):
            least[member] = np.minimum(least[member], value)
        keys = keys * (len(members) + 1) + least
    return keys


class MinHashPlan(Plan):
    """A plan whose segments are laid out by MinHash."""

    def lay_out(self, cold_ids: Sequence[Ids]) -> SegmentLayout:
        """Return the published order of a segment's packed rows."""
        return minhash_layout(cold_ids)


def by_minhash(plan: Plan, samples: SampleFile) -> MinHashPlan:
    """Return the plan with the published order, and the reads that follow from it.

    Segments, caches and packed rows stay: both orders store each row of a segment once.
    """

    def cold(first: int, stop: int) -> list[Ids]:
        return [plan.cold_ids(batch, samples.node_ids(batch)) for batch in range(first, stop)]

    requests, read_bytes = count_minhash_reads(
        cold, plan.segments, row_bytes=plan.row_bytes, max_gap_bytes=plan.max_gap_bytes
    )
    epochs = plan.predicted.sampled_epochs
    cold_bytes = plan.predicted.cold_rows * plan.row_bytes
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    values |= {"batch_bytes": read_bytes, "batch_requests": requests, "choices": ()}
    values["predicted"] = dataclasses.replace(
        plan.predicted,
        read_bytes_per_epoch=round(int(read_bytes.sum()) / epochs),
        requests_per_epoch=round(int(requests.sum()) / epochs),
        amplification=int(read_bytes.sum()) / cold_bytes if cold_bytes else 1.0,
    )
    return MinHashPlan(**values)


def count_minhash_reads(
    cold: Callable[[int, int], Sequence[Ids]],
    segments: Iterable[tuple[int, int]],
    *,
    row_bytes: int,
    max_gap_bytes: int = 0,
) -> tuple[Ids, Ids]:
    """Return the requests and bytes of each batch, given the cold ids of ranges of batches."""
    costs, rows = [], 0
    for first, stop in segments:
        laid_out = minhash_layout(cold(first, stop))
        for batch in range(stop - first):
            starts, counts = laid_out.runs(batch)
            cost = read_costs(
                starts + rows, counts, row_bytes=row_bytes, gaps_bytes=np.array([max_gap_bytes])
            )
            costs.append(cost[0].sum(axis=0))
        rows += len(laid_out.order)
    table = np.array(costs, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()
