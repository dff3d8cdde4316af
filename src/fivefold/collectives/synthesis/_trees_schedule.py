"""From packed trees to a schedule: each root's chunks follow one another down its trees.

Chunk number p of a tree crosses an edge of depth d in step p + d - 1, so every link carries in
each step what the packing gave it, and P chunks take P + height - 1 steps: the rate of the
packing, plus a ramp that more chunks make shorter. Transfers are listed step by step, which is
also their priority where links are shared without a barrier.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import (
    Collective,
    Schedule,
    compose_all_reduce,
    named_collective,
)
from fivefold.collectives.synthesis._dispatch import dispatch
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.collectives.synthesis._trees import SpanningTree, TreePacking

Longs = NDArray[np.int64]

_EVERY_RANK = ("all_gather", "reduce_scatter", "all_reduce")
_ONE_ROOT = ("broadcast", "reduce")
_BACKWARDS = {"reduce_scatter": "all_gather", "reduce": "broadcast"}
_MOST_TRANSFERS = 1_000_000
_MOST_DOUBLINGS = 10
_MOST_WORSE = 3


def schedule_trees(
    packing: TreePacking,
    collective: Collective | str,
    *,
    chunks: int | None,
    size_bytes: float | None,
) -> Schedule:
    """See `TreePacking.to_schedule`.

    Raises:
        ConfigurationError: The collective does not fit the trees, or ``chunks`` is no count.
    """
    name = (collective if isinstance(collective, str) else collective.name).replace("-", "_")
    _check_name(packing, name)
    if isinstance(collective, Collective):
        _check_ranks(packing, collective)
        chunks = _per_root(packing, collective) if chunks is None else chunks
    if chunks is not None and (
        isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1
    ):
        raise ConfigurationError(f"chunks is {chunks!r}", hint="give a whole number from 1")
    if name == "all_reduce":
        return _all_reduce(packing, chunks, size_bytes)
    if name not in _BACKWARDS:
        return _best(packing, name, chunks, size_bytes)
    copied = _best(packing.backwards, _BACKWARDS[name], chunks, size_bytes)
    return copied.inverted().replaced(topology=packing.topology)


def _all_reduce(packing: TreePacking, chunks: int | None, size_bytes: float | None) -> Schedule:
    gather = _best(packing, "all_gather", chunks, size_bytes)
    same = gather.collective.num_chunks // packing.topology.num_ranks
    scatter = _best(packing.backwards, "all_gather", same, size_bytes).inverted()
    return compose_all_reduce(scatter.replaced(topology=packing.topology), gather)


def _best(
    packing: TreePacking, name: str, chunks: int | None, size_bytes: float | None
) -> Schedule:
    """The schedule by steps, or with a size the one with times that takes least."""
    if size_bytes is None:
        return _forward(packing, name, chunks or packing.k)
    best, best_s, worse = None, math.inf, 0
    for count in [chunks] if chunks is not None else _counts(packing):
        found = dispatch(_forward(packing, name, count), size_bytes=size_bytes)
        total_s = 0.0 if found.ends_s is None else float(found.ends_s.max(initial=0.0))
        if best is None or total_s < best_s:
            best, best_s, worse = found, total_s, 0
        else:
            worse += 1
            if worse > _MOST_WORSE:  # finer chunks only add latency from here on
                break
    assert best is not None, "there is always a count to try"
    return best


def _counts(packing: TreePacking) -> list[int]:
    """Chunks per root worth trying: powers of two below k, then k times powers of two."""
    ranks = packing.topology.num_ranks
    roots = 1 if packing.root is not None else ranks
    most = max(1, _MOST_TRANSFERS // (roots * max(1, ranks - 1)))
    few = [1 << power for power in range(packing.k.bit_length()) if 1 << power < packing.k]
    many = [packing.k << power for power in range(_MOST_DOUBLINGS)]
    return [count for count in [*few, *many] if count <= most] or [1]


def _check_name(packing: TreePacking, name: str) -> None:
    if name not in (*_EVERY_RANK, *_ONE_ROOT):
        raise ConfigurationError(
            f"spanning trees do no {name}",
            hint=f"they do {', '.join((*_EVERY_RANK, *_ONE_ROOT))}",
        )
    if (name in _ONE_ROOT) != (packing.root is not None):
        wanted = "one root" if name in _ONE_ROOT else "a root at every rank"
        raise ConfigurationError(
            f"{name} needs trees with {wanted}",
            hint="pass root= to spanning_trees for broadcast and reduce, and only for them",
        )


def _check_ranks(packing: TreePacking, collective: Collective) -> None:
    if collective.num_ranks != packing.topology.num_ranks:
        raise ConfigurationError(
            f"the collective has {collective.num_ranks} ranks, the topology "
            f"{packing.topology.num_ranks}",
            hint="make the collective for topology.num_ranks ranks",
        )
    if collective.root is not None and collective.root != packing.root:
        raise ConfigurationError(
            f"the collective has root {collective.root}, the trees have root {packing.root}",
            hint="pack the trees with the collective's root",
        )


def _per_root(packing: TreePacking, collective: Collective) -> int:
    roots = 1 if packing.root is not None else collective.num_ranks
    if collective.num_chunks % roots or not collective.num_chunks:
        raise ConfigurationError(
            f"{collective.num_chunks} chunks do not divide among {roots} roots",
            hint=f"use a positive multiple of {roots} chunks",
        )
    return collective.num_chunks // roots


def _forward(packing: TreePacking, name: str, chunks: int) -> Schedule:
    ranks = packing.topology.num_ranks
    made = named_collective(name, ranks, chunks=chunks, root=packing.root or 0)
    table = _Table(packing, chunks)
    # Within a step each rank sends to the next rank first, so that they do not all meet at one.
    ahead = (table.targets - table.sources)[table.edges] % ranks
    order = np.lexsort((ahead, table.steps))
    edges = table.edges[order]
    lengths = table.route_lengths[edges]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return Schedule(
        collective=made,
        chunks=table.chunks[order],
        sources=table.sources[edges],
        targets=table.targets[edges],
        steps=table.steps[order],
        route_offsets=offsets,
        route_links=table.route_links[np.repeat(table.route_starts[edges], lengths) + within],
        topology=packing.topology,
        name="spanning trees",
        solver="ForestColl",
        attributes={"model": "synchronous", "k": packing.k, "height": packing.height},
    )


class _Table:
    """Edges of all trees, and one row for each chunk on each edge of its tree."""

    def __init__(self, packing: TreePacking, chunks: int) -> None:
        trees = packing.trees
        self.sources = np.array([s for tree in trees for s in tree.sources], np.int32)
        self.targets = np.array([t for tree in trees for t in tree.targets], np.int32)
        depths = np.array([d for tree in trees for d in tree.depths], np.int64)
        routes = [route for tree in trees for route in tree.routes]
        self.route_links = np.array([link for route in routes for link in route], np.int32)
        self.route_lengths = np.array([len(route) for route in routes], np.int64)
        self.route_starts = np.cumsum(self.route_lengths) - self.route_lengths
        first_edge = np.cumsum([0, *(len(tree.sources) for tree in trees)])
        parts: list[tuple[Longs, Longs, Longs]] = []
        for place, numbers in enumerate(_shares(packing, chunks)):
            edges = np.arange(first_edge[place], first_edge[place + 1])
            rounds = np.arange(len(numbers)) // trees[place].multiplicity
            steps = rounds[:, None] + depths[edges][None, :] - 1
            parts.append((np.repeat(numbers, len(edges)), np.tile(edges, len(numbers)),
                          steps.reshape(-1)))  # fmt: skip
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [
            np.zeros(0, np.int64)
        ] * 3
        self.chunks = columns[0].astype(np.int32)
        self.edges = columns[1].astype(np.int64)
        self.steps = columns[2].astype(np.int32)


def _shares(packing: TreePacking, chunks: int) -> list[Longs]:
    """Chunk numbers of each tree: whole rounds by multiplicity, the rest where links are idle."""
    trees = packing.trees
    rounds, rest = divmod(chunks, packing.k)
    counts = [rounds * tree.multiplicity for tree in trees]
    if rest:
        _spread_rest(packing, counts, rest)
    shares, used = [], dict[int, int]()
    for tree, count in zip(trees, counts, strict=True):
        base = 0 if packing.root is not None else tree.root * chunks
        start = used.get(tree.root, 0)
        shares.append(base + start + np.arange(count, dtype=np.int64))
        used[tree.root] = start + count
    return shares


def _spread_rest(packing: TreePacking, counts: list[int], rest: int) -> None:
    """Give each root ``rest`` more chunks, each on the tree whose fullest link stays emptiest."""
    per_byte = 1.0 / packing.topology.capacities_bytes_per_s
    loads = np.zeros(packing.topology.num_links)
    links = [np.array([e for route in tree.routes for e in route]) for tree in packing.trees]
    of_root: dict[int, list[int]] = {}
    for place, tree in enumerate(packing.trees):
        of_root.setdefault(tree.root, []).append(place)
    for _ in range(rest):
        for places in of_root.values():
            best = min(places, key=lambda place: _fullest(packing.trees[place], loads, links[place],
                                                          per_byte))  # fmt: skip
            np.add.at(loads, links[best], per_byte[links[best]])
            counts[best] += 1


def _fullest(
    tree: SpanningTree, loads: NDArray[np.float64], links: Longs, per_byte: NDArray[np.float64]
) -> tuple[float, int]:
    return float((loads[links] + per_byte[links]).max()), tree.height
