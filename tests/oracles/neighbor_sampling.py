"""The specification of the samplers: plain Python, one edge at a time, the same result bit for bit.

Nothing here is fast or clever. The compiled samplers are tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.sampling._batch import SampledBatch
from fivefold.gnn.sampling._hetero import EdgeType, HeteroSampledBatch, HeteroTopology
from fivefold.gnn.sampling._random import below, draw_bits, exponential, stream_key
from fivefold.gnn.sampling._topology import Topology

__all__ = ["choose_edges", "reference_hetero_sample", "reference_sample"]


def choose_edges(topology: Topology, node: int, fanout: int, key: int) -> list[int]:
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
    topology: HeteroTopology,
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
    topology: Topology,
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
        HeteroTopology({"node": topology.num_nodes}, {kind: topology}),
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
