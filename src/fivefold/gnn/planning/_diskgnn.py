"""DiskGNN's own choices of segment and disk cache, for comparison with it as published.

Its disk budget is a blow-up: packed rows over rows of the features. Both searches look at the
first segment only and assume that all others are alike.

* Approximate search: after the first t batches, rows on disk would be (distinct cold rows) times
  (batches / t); the first t at which that meets the budget is taken.
* Brute force: for each segment size the smallest number of shared rows that meets the budget, most
  used rows first, the others copied for each batch; then the pages that batches read are counted,
  and the pair of least amplification is taken.

References: DiskGNN, arXiv 2405.05231, and its public code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.gnn.planning._layout import shared_and_private
from fivefold.gnn.planning._pages import read_costs
from fivefold.gnn.planning._refinement import locate, union_of
from fivefold.gnn.planning._sources import Array, Ids

__all__ = ["DiskGNNChoice", "diskgnn_brute_force", "diskgnn_segment_batches"]

_NO_GAP = np.zeros(1, np.int64)


@dataclass(frozen=True, kw_only=True)
class DiskGNNChoice:
    """What the brute-force search chose.

    Args:
        segment_batches: Batches per segment.
        shared_rows: Rows of the segment's disk cache; all others are copied for each batch.
        amplification: Bytes read over bytes needed, in the first segment.
        blow_up: Packed rows over rows of the features, if all segments are alike.

    Example:
        >>> DiskGNNChoice(segment_batches=2, shared_rows=9, amplification=1.5, blow_up=2.0)
        DiskGNNChoice(segment_batches=2, shared_rows=9, amplification=1.5, blow_up=2.0)
    """

    segment_batches: int
    shared_rows: int
    amplification: float
    blow_up: float


def diskgnn_segment_batches(
    cold_ids: Iterable[Array], *, num_batches: int, num_nodes: int, blow_up: float
) -> int:
    """The segment size of the approximate search.

    Args:
        cold_ids: Cold ids of batch 0, 1, 2, ...; taken until the budget is met.
        num_batches: Number of all batches.
        num_nodes: Rows of the features.
        blow_up: Packed rows over rows of the features that may be used; below 0: no limit.

    Returns:
        Batches per segment.

    Raises:
        InfeasibleError: Not even one segment of all batches meets the budget.

    Example:
        >>> batches = [np.array([0, 1]), np.array([1, 2]), np.array([1, 2])]
        >>> diskgnn_segment_batches(batches, num_batches=3, num_nodes=4, blow_up=1.2)
        2
    """
    if blow_up < 0 or not num_batches:
        return 1
    seen = np.zeros(num_nodes, np.bool_)
    distinct = 0
    for batches, ids in enumerate(cold_ids, start=1):
        distinct += int(np.count_nonzero(~seen[ids]))
        seen[ids] = True
        if distinct * num_batches / batches < blow_up * num_nodes:
            return batches
    least = distinct / max(1, num_nodes)
    raise InfeasibleError(
        f"a blow-up of {blow_up} is too small even for one segment",
        hint=f"give more than {least:.3f}, or more memory for caches",
    )


def diskgnn_brute_force(
    cold_ids: Sequence[Ids],
    *,
    num_nodes: int,
    row_bytes: int,
    blow_up: float,
    minhash_functions: int = 2,
    sizes: Sequence[int] | None = None,
) -> DiskGNNChoice:
    """The pair of segment size and number of shared rows with the fewest pages read.

    Args:
        cold_ids: Ascending cold ids of every batch.
        num_nodes: Rows of the features.
        row_bytes: Bytes of a row.
        blow_up: Packed rows over rows of the features that may be used.
        minhash_functions: Hash functions of the order of the shared rows.
        sizes: Segment sizes to try; None: all.

    Returns:
        The pair, and what it costs.

    Raises:
        ConfigurationError: There are no batches.
        InfeasibleError: No size meets the budget.

    Example:
        >>> batches = [np.array([0, 1]), np.array([1, 2])]
        >>> diskgnn_brute_force(batches, num_nodes=4, row_bytes=4096, blow_up=0.9).shared_rows
        1
    """
    if not cold_ids:
        raise ConfigurationError(f"there are {len(cold_ids)} batches", hint="sample at least one")
    found = [
        choice
        for size in sizes or range(1, len(cold_ids) + 1)
        for choice in [_try(cold_ids, size, num_nodes, row_bytes, blow_up, minhash_functions)]
        if choice is not None
    ]
    if not found:
        raise InfeasibleError(
            f"a blow-up of {blow_up} is too small for every segment size",
            hint="give a larger one, or more memory for caches",
        )
    return min(found, key=lambda choice: (choice.amplification, choice.segment_batches))


def _try(
    cold_ids: Sequence[Ids],
    size: int,
    num_nodes: int,
    row_bytes: int,
    blow_up: float,
    minhash_functions: int,
) -> DiskGNNChoice | None:
    """One size: its smallest disk cache within the budget, and what its batches then read."""
    batches = cold_ids[:size]
    union = union_of(batches)
    uses = np.zeros(len(union), np.int64)
    for ids in batches:
        uses[locate(ids, union)] += 1
    limit = blow_up * num_nodes * size / len(cold_ids)
    # Sharing the c most used rows leaves sum(uses) - sum(their uses - 1) rows, fewer with each.
    by_use = np.argsort(-uses, kind="stable")
    rows = uses.sum() - np.concatenate([[0], np.cumsum(uses[by_use] - 1)])
    within = np.flatnonzero(rows <= limit)
    if not len(within):
        return None
    shared_rows = int(within[0])
    shared = np.zeros(len(union), np.bool_)
    shared[by_use[:shared_rows]] = True
    laid_out = shared_and_private(
        batches, shared, minhash_functions=minhash_functions, num_batches=len(cold_ids)
    )
    read_bytes = sum(
        int(
            read_costs(*laid_out.runs(batch), row_bytes=row_bytes, gaps_bytes=_NO_GAP)[..., 1].sum()
        )
        for batch in range(len(batches))
    )
    needed = int(uses.sum()) * row_bytes
    return DiskGNNChoice(
        segment_batches=size,
        shared_rows=shared_rows,
        amplification=read_bytes / needed if needed else 1.0,
        blow_up=float(rows[shared_rows]) * len(cold_ids) / size / max(1, num_nodes),
    )
