"""Mini-batches: which training nodes are in one, and the nodes and edges sampled around them.

Every draw is a hash of what it is for, by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the key
absorbs (seed, epoch, batch, hop), a node's stream is ``mix(key + node * golden)``, its draw ``i``
is ``mix(stream + (i + 1) * golden)``. Threads and libraries change nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import ConfigurationError, require_whole
from fivefold.gnn.sampling.kernels import mix_bits
from fivefold.gnn.storage.pages import Ids

EdgeType = tuple[str, str, str]
ONE_TYPE: EdgeType = ("node", "edge", "node")  # of a graph of one type
GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ORDER = 0x6F72646572  # keeps the key of the order apart from those of the hops


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledBatch:
    """The nodes and edges of one mini-batch, with local numbers.

    Nodes stand in order of discovery: the seeds, then the nodes first met in hop 1, and so on.
    Each node is expanded once, in the hop after its discovery, so that edges are grouped by
    target, and the targets are 0, 1, 2, ...
    """

    number: int
    node_ids: Ids  # [nodes], the ids in the graph, distinct (in each tree)
    batch_size: int  # how many of them, at the front, are seeds
    nodes_per_hop: Ids  # [hops + 1], newly met nodes: seeds, hop 1, ...
    edges_per_hop: Ids  # [hops]
    degrees: NDArray[np.int32]  # [nodes of all hops but the last], sampled in-edges of each target
    sources: NDArray[np.int32]  # [edges], local number of each edge's source
    edge_ids: Ids | None = None  # [edges], as Adjacency.edge_ids; None where not asked for
    # [nodes], the seed that a node was found from, where each seed has a tree of its own.
    trees: Ids | None = None

    @property
    def seeds(self) -> Ids:
        """Return the ids of the seeds."""
        return self.node_ids[: self.batch_size]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.node_ids.size

    @property
    def num_edges(self) -> int:
        """Return the number of edges."""
        return self.sources.size

    def edge_index(self) -> Ids:
        """Return ``[2, edges]``: row 0 sources, row 1 targets, local numbers."""
        return _edge_index(self.sources, self.degrees)


@dataclass(frozen=True, kw_only=True)
class GraphTypes:
    """The node types of a graph with their numbers of nodes, and its edge types, in their order."""

    num_nodes: Mapping[str, int]
    edge_types: tuple[EdgeType, ...]

    @cached_property
    def starts(self) -> dict[str, int]:
        """Return the number of nodes of the types before each type."""
        sums = accumulate(self.num_nodes.values(), initial=0)
        return dict(zip(self.num_nodes, sums, strict=False))

    @property
    def total_nodes(self) -> int:
        """Return the nodes of all types."""
        return sum(self.num_nodes.values())

    def to_json(self) -> dict[str, Any]:
        """Return lists and numbers that :meth:`from_json` reads."""
        nodes = [[name, count] for name, count in self.num_nodes.items()]
        return {"nodes": nodes, "edges": [list(kind) for kind in self.edge_types]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the types that :meth:`to_json` listed."""
        edge_types = tuple((kind[0], kind[1], kind[2]) for kind in found["edges"])
        return cls(num_nodes=dict(found["nodes"]), edge_types=edge_types)


def one_type(num_nodes: int) -> GraphTypes:
    """Return the types of a graph that has none."""
    return GraphTypes(num_nodes={"node": num_nodes}, edge_types=(ONE_TYPE,))


@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroSampledBatch:
    """A mini-batch with the fields of :class:`SampledBatch` for each node or edge type.

    Local numbers count within a type. A type without nodes or edges in the batch has empty arrays.
    """

    number: int
    node_ids: dict[str, Ids]  # seeds first, then in order of discovery
    batch_sizes: dict[str, int]  # how many of them are seeds
    nodes_per_hop: dict[str, Ids]
    edges_per_hop: dict[EdgeType, Ids]
    degrees: dict[EdgeType, NDArray[np.int32]]  # of target nodes 0, 1, ...
    sources: dict[EdgeType, NDArray[np.int32]]  # local numbers in the source type
    edge_ids: dict[EdgeType, Ids] = field(default_factory=dict)  # empty where not asked for

    def seeds(self, node_type: str) -> Ids:
        """Return the ids of the seeds of one type."""
        return self.node_ids[node_type][: self.batch_sizes[node_type]]

    def edge_index(self, edge_type: EdgeType) -> Ids:
        """Return ``[2, edges]`` of one type: row 0 sources, row 1 targets, local numbers."""
        if edge_type not in self.sources:
            raise ConfigurationError(f"no edge type {edge_type}", hint=f"{list(self.sources)}")
        return _edge_index(self.sources[edge_type], self.degrees[edge_type])

    def part(self, node_type: str) -> SampledBatch:
        """Return the nodes of one type, with what their local numbers occur in.

        ``sources`` and ``edge_ids`` (and ``edges_per_hop``) are those of the edges that come from
        this type, ``degrees`` those of its nodes as targets, edge type after edge type.
        """
        out = [kind for kind in self.sources if kind[0] == node_type]
        into = [kind for kind in self.sources if kind[2] == node_type]
        return SampledBatch(
            number=self.number,
            node_ids=self.node_ids[node_type],
            batch_size=self.batch_sizes[node_type],
            nodes_per_hop=self.nodes_per_hop[node_type],
            edges_per_hop=_joined(self.edges_per_hop, out, np.int64),
            degrees=_joined(self.degrees, into, np.int32),
            sources=_joined(self.sources, out, np.int32),
            edge_ids=_joined(self.edge_ids, out, np.int64) if self.edge_ids else None,
        )

    def flat(self, types: GraphTypes) -> SampledBatch:
        """Return one batch of all types, type after type, its node ids counted through them."""
        names, kinds = list(types.num_nodes), types.edge_types
        ids = {name: self.node_ids[name] + types.starts[name] for name in names}
        return SampledBatch(
            number=self.number,
            node_ids=_joined(ids, names, np.int64),
            batch_size=sum(self.batch_sizes.values()),
            nodes_per_hop=_joined(self.nodes_per_hop, names, np.int64),
            edges_per_hop=_joined(self.edges_per_hop, kinds, np.int64),
            degrees=_joined(self.degrees, kinds, np.int32),
            sources=_joined(self.sources, kinds, np.int32),
            edge_ids=_joined(self.edge_ids, kinds, np.int64) if self.edge_ids else None,
        )

    @classmethod
    def from_flat(cls, flat: SampledBatch, types: GraphTypes) -> Self:
        """Return the batch of which :meth:`flat` was taken."""
        names, kinds = list(types.num_nodes), types.edge_types
        per_type = dict(zip(names, np.split(flat.nodes_per_hop, len(names)), strict=True))
        per_kind = dict(zip(kinds, np.split(flat.edges_per_hop, len(kinds)), strict=True))
        nodes = {name: int(hops.sum()) for name, hops in per_type.items()}
        edges = {kind: int(hops.sum()) for kind, hops in per_kind.items()}
        targets = {kind: int(per_type[kind[2]][:-1].sum()) for kind in kinds}
        ids = _cut(flat.node_ids, nodes)
        edge_ids = {} if flat.edge_ids is None else _cut(flat.edge_ids, edges)
        return cls(
            number=flat.number,
            node_ids={name: found - types.starts[name] for name, found in ids.items()},
            batch_sizes={name: int(hops[0]) for name, hops in per_type.items()},
            nodes_per_hop=per_type,
            edges_per_hop=per_kind,
            degrees=_cut(flat.degrees, targets),
            sources=_cut(flat.sources, edges),
            edge_ids=edge_ids,
        )


def _edge_index(sources: NDArray[np.int32], degrees: NDArray[np.int32]) -> Ids:
    return np.stack([sources.astype(np.int64), np.repeat(np.arange(degrees.size), degrees)])


def _joined(parts: Mapping[Any, Any], keys: Sequence[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *(parts[key] for key in keys)], dtype=dtype)


def _cut(values: NDArray[Any], lengths: Mapping[Any, int]) -> dict[Any, NDArray[Any]]:
    ends = np.cumsum(list(lengths.values()))[:-1]
    return dict(zip(lengths, np.split(values, ends), strict=True))


def mix(value: int) -> int:
    """Return the 64-bit finaliser of SplitMix64."""
    return int(mix_bits(np.uint64(value & _MASK)))


def stream_key(*parts: int) -> int:
    """Return the key of ``parts``; their order and number matter."""
    key = 0
    for part in parts:
        number = require_whole("seed, epoch or batch", part, least=-(2**63))
        key = mix(key ^ mix(number + GOLDEN))
    return key


def as_ids(values: ArrayLike, name: str) -> Ids:
    """Return node ids as int64."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"{name} has shape {array.shape} and dtype {array.dtype}", hint="a list of node ids"
        )
    return np.ascontiguousarray(array, dtype=np.int64)


def checked_fanouts(fanouts: Iterable[int]) -> tuple[int, ...]:
    """Return the fan-outs as a tuple of ``int``."""
    try:
        checked = tuple(operator.index(fanout) for fanout in fanouts)
    except TypeError:
        checked = ()
    if not checked or min(checked) < -1 or max(checked) >= 1 << 63:
        raise ConfigurationError(
            f"fanouts is {fanouts!r}",
            hint="one number per hop: neighbours to sample, or -1 for all",
        )
    return checked


def fanouts_by_type(
    edge_types: Sequence[EdgeType], fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]]
) -> dict[EdgeType, tuple[int, ...]]:
    """Return the fan-outs of every edge type; one list serves all."""
    if not isinstance(fanouts, Mapping):
        return dict.fromkeys(edge_types, checked_fanouts(fanouts))
    if set(fanouts) != set(edge_types):
        odd = sorted(set(fanouts) ^ set(edge_types))
        raise ConfigurationError(
            f"fanouts and edge types differ in {odd}", hint="use [0, ...] to leave a type out"
        )
    checked = {edge_type: checked_fanouts(fanouts[edge_type]) for edge_type in edge_types}
    if len({len(numbers) for numbers in checked.values()}) > 1:
        raise ConfigurationError(
            f"fanouts have different numbers of hops: {checked}", hint="fill up with 0"
        )
    return checked


def check_distinct(ids: Ids, num_nodes: int | None = None) -> None:
    """Check training nodes; None for ``num_nodes`` allows all ids."""
    in_order = np.sort(ids)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if twice.size:
        raise ConfigurationError(
            f"train_ids holds node {twice[0]} more than once", hint="give every node once"
        )
    if num_nodes is not None and ids.size and not 0 <= in_order[0] <= in_order[-1] < num_nodes:
        outside = in_order[0] if in_order[0] < 0 else in_order[-1]
        raise ConfigurationError(
            f"train_ids holds node {outside}, which is out of range",
            hint=f"nodes are 0 to {num_nodes - 1}",
        )


def epoch_batches(train_ids: ArrayLike, *, batch_size: int, seed: int, epoch: int) -> list[Ids]:
    """Return the training nodes in random order, cut into batches; the last has what remains.

    The order is that of a hash of (seed, epoch, place), whatever the version of a library.
    """
    require_whole("batch_size", batch_size)
    ids = as_ids(train_ids, "train_ids")
    check_distinct(ids)
    key = stream_key(seed, epoch, _ORDER)
    places = np.arange(1, ids.size + 1, dtype=np.uint64)
    order = np.argsort(mix_bits(np.uint64(key) + places * np.uint64(GOLDEN)), kind="stable")
    shuffled = ids[order]
    return [shuffled[start : start + batch_size] for start in range(0, ids.size, batch_size)]
