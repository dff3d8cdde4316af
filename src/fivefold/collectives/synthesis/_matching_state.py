"""What the matching loop works on, as tuples of arrays that compiled code can take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


class Fabric(NamedTuple):
    """The network as the loop sees it.

    Args:
        sources: Node where each link begins.
        targets: Node where each link ends.
        costs: Capacity in bytes per second and latency of each link, float64 [2, links].
        rank_of_node: Rank of each node, -1 for switches.
        ports: Link of each port; sorted by rank.
        port_offsets: Where the ports of each rank begin.
        wish_offsets: Where the ranks that each port may serve begin in ``wishes``.
        wishes: Ranks in order of preference.
        out_offsets: Where the links that leave each node begin in ``out_links``.
        out_links: Links by the node that they leave.
        last_offsets: Where the links from switches into each rank begin in ``last_links``.
        last_links: Links by the rank that they enter.
        hops: Links from each node to each rank through switches only, int16 [ranks, nodes]; -1
            where there is no way. Empty without switches.
    """

    sources: Ints
    targets: Ints
    costs: Floats
    rank_of_node: Ints
    ports: Ints
    port_offsets: Longs
    wish_offsets: Longs
    wishes: Ints
    out_offsets: Longs
    out_links: Ints
    last_offsets: Longs
    last_links: Ints
    hops: NDArray[np.int16]


class Neighbourhoods(NamedTuple):
    """Sets of ranks joined by fast links, coarser and coarser; level 0 are the single ranks.

    Args:
        member: Set of each rank at each level, int32 [levels, ranks].
        offsets: Where the counts of each level begin in ``counts``.
        counts: Ranks of a set that hold or await a chunk: set * chunks + chunk, by level.
        rates: Bandwidth that holds each level's sets together.
    """

    member: Ints
    offsets: Longs
    counts: Ints
    rates: Floats


class Holdings(NamedTuple):
    """Bit sets of chunks.

    Args:
        held: What each rank has, uint64 [ranks, words].
        taken: What each rank has, awaits or must not get, uint64 [ranks, words].
    """

    held: Words
    taken: Words


class Transfers(NamedTuple):
    """What is decided, in order of start; the arrays have room for all of it.

    Args:
        chunks: Chunk.
        ports: Port that sends it.
        ends: Target rank.
        times: Start and arrival, float64 [2, transfers].
        route_offsets: Where each route begins; empty where all routes are single links.
        route_links: Links of the routes.
    """

    chunks: Ints
    ports: Ints
    ends: Ints
    times: Floats
    route_offsets: Longs
    route_links: Ints


class Rules(NamedTuple):
    """How to decide.

    Args:
        num_chunks: Number of chunks.
        chunk_bytes: Size of a chunk.
        seed: Of the random choices, more than zero.
        fresh_only: Whether a link between neighbourhoods carries only what the target's has not.
        deadline_s: No transfer may arrive later.
    """

    num_chunks: int
    chunk_bytes: float
    seed: int
    fresh_only: bool
    deadline_s: float
