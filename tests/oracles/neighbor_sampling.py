"""The specification of the samplers: plain Python, one edge at a time, the same result bit for bit.

Nothing here is fast or clever. The compiled samplers are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.sampling import Adjacency, HeteroAdjacency
from fivefold.gnn.sampling.batches import GOLDEN, HeteroSampledBatch, SampledBatch, mix, stream_key

__all__ = [
    "below",
    "choose_edges",
    "draw_bits",
    "exponential",
    "reference_hetero_sample",
    "reference_sample",
]


EdgeType = tuple[str, str, str]


def draw_bits(key: int, node: int, count: int) -> int:
    """Return draw ``count`` (0, 1, ...) of the stream of ``node``: 64 random bits."""
    return mix(mix(key + node * GOLDEN) + (count + 1) * GOLDEN)


def below(bits: int, bound: int) -> int:
    """Return an integer uniform in ``[0, bound)``: the upper half of ``bits * bound``."""
    return bits * bound >> 64


def exponential(bits: int) -> float:
    """Return ``-log(u)`` for u uniform in (0, 1], to within 2 units in the last place.

    ``u = f * 2**e`` and ``log(f) = 2 * atanh((f - 1) / (f + 1))`` by its series: only operations
    that every machine rounds alike. The logarithms of two libraries may differ in the last bit.
    """
    fraction, exponent = math.frexp(((bits >> 11) + 1) / (1 << 53))
    if fraction < math.sqrt(0.5):
        fraction, exponent = 2.0 * fraction, exponent - 1
    s = (fraction - 1.0) / (fraction + 1.0)
    series = 0.0
    for odd in range(23, 0, -2):
        series = series * (s * s) + 1.0 / odd
    return -(exponent * math.log(2.0) + 2.0 * s * series)


def choose_edges(topology: Adjacency, node: int, fanout: int, key: int) -> list[int]:
    """Return the positions of the edges chosen for one node."""
    start, stop = int(topology.indptr[node]), int(topology.indptr[node + 1])
    if topology.weights is not None:
        return _choose_weighted(topology.weights, range(start, stop), fanout, node=node, key=key)
    degree = stop - start
    if fanout < 0 or degree <= fanout:
        return list(range(start, stop))
    chosen: list[int] = []
    for count, limit in enumerate(range(degree - fanout, degree)):  # Floyd
        pick = below(draw_bits(key, node, count), limit + 1)
        chosen.append(limit if pick in chosen else pick)
    return [start + pick for pick in chosen]


def _choose_weighted(
    weights: NDArray[np.float32], edges: range, fanout: int, *, node: int, key: int
) -> list[int]:
    if fanout < 0 or len(edges) <= fanout:
        return [edge for edge in edges if weights[edge] > 0]
    keyed = [
        (exponential(draw_bits(key, node, offset)) / float(weights[edge]), edge)
        for offset, edge in enumerate(edges)
        if weights[edge] > 0
    ]
    return [edge for _, edge in sorted(keyed)[:fanout]]


def reference_hetero_sample(
    topology: HeteroAdjacency,
    fanouts: Mapping[EdgeType, Sequence[int]],
    seeds: Mapping[str, Sequence[int]],
    *,
    keys: Mapping[tuple[int, EdgeType], int],
    number: int = 0,
) -> HeteroSampledBatch:
    """Return what ``HeteroNeighborSampler`` does; ``keys`` are by hop and edge type."""
    nodes = {name: list(seeds.get(name, ())) for name in topology.num_nodes}
    frontier = {name: list(ids) for name, ids in nodes.items()}
    nodes_per_hop = {name: [len(ids)] for name, ids in nodes.items()}
    edges: dict[EdgeType, list[int]] = {kind: [] for kind in topology.edges}
    edges_per_hop: dict[EdgeType, list[int]] = {kind: [] for kind in topology.edges}
    degrees: dict[EdgeType, list[int]] = {kind: [] for kind in topology.edges}
    sources: dict[EdgeType, list[int]] = {kind: [] for kind in topology.edges}
    for hop in range(len(next(iter(fanouts.values()), ()))):
        for kind, graph in topology.edges.items():
            known = nodes[kind[0]]
            found: list[int] = []
            for node in frontier[kind[2]]:
                chosen = choose_edges(graph, node, fanouts[kind][hop], keys[hop, kind])
                degrees[kind].append(len(chosen))
                found += chosen
            for edge in found:
                source = int(graph.indices[edge])
                if source not in known:
                    known.append(source)
                sources[kind].append(known.index(source))
            edges[kind] += found
            edges_per_hop[kind].append(len(found))
        for name, ids in nodes.items():
            frontier[name] = ids[sum(nodes_per_hop[name]) :]
            nodes_per_hop[name].append(len(frontier[name]))
    return HeteroSampledBatch(
        number=number,
        node_ids={name: np.array(ids, np.int64) for name, ids in nodes.items()},
        batch_sizes={name: counts[0] for name, counts in nodes_per_hop.items()},
        nodes_per_hop={name: np.array(counts) for name, counts in nodes_per_hop.items()},
        edges_per_hop={kind: np.array(counts) for kind, counts in edges_per_hop.items()},
        degrees={kind: np.array(values, np.int32) for kind, values in degrees.items()},
        sources={kind: np.array(values, np.int32) for kind, values in sources.items()},
        edge_ids={kind: np.array(values, np.int64) for kind, values in edges.items()},
    )


def reference_sample(
    topology: Adjacency,
    fanouts: Sequence[int],
    seeds: Sequence[int],
    *,
    seed: int,
    epoch: int,
    batch: int,
) -> SampledBatch:
    """Return what ``NeighborSampler`` does: one node type, one edge type, its own keys."""
    kind = ("node", "to", "node")
    keys = {(hop, kind): stream_key(seed, epoch, batch, hop) for hop in range(len(fanouts))}
    result = reference_hetero_sample(
        HeteroAdjacency({"node": topology.num_nodes}, {kind: topology}),
        {kind: fanouts},
        {"node": seeds},
        keys=keys,
        number=batch,
    )
    return SampledBatch(
        number=batch,
        node_ids=result.node_ids["node"],
        batch_size=len(seeds),
        nodes_per_hop=result.nodes_per_hop["node"],
        edges_per_hop=result.edges_per_hop[kind],
        degrees=result.degrees[kind],
        sources=result.sources[kind],
        edge_ids=result.edge_ids[kind],
    )
