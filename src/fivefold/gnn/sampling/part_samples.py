"""Parts of batches, nodes of a type or edges, in the form of batches of rows."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling._samples import SampleFile
from fivefold.gnn.sampling.batches import EdgeType, HeteroSampledBatch, SampledBatch
from fivefold.gnn.storage.pages import Ids


class _PartSamples(SampleFile):
    """A sample file of which one part is shown."""

    _what = ""

    @property
    def fingerprint(self) -> str:
        """Return a hash over all contents, another one for each part."""
        text = f"{self._what} of {super().fingerprint}, {self.num_nodes} rows"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _typed(self, number: int) -> HeteroSampledBatch:
        return HeteroSampledBatch.from_flat(super().batch(number), self.types)

    def _hops_of(self, number: int, key: str | EdgeType) -> Ids:
        """Return the nodes, or the edges, of a type at each hop."""
        nodes, edges = self._form.counts(self._row(number))
        names = list(self.types.num_nodes) if isinstance(key, str) else list(self.types.edge_types)
        counts = np.split(nodes if isinstance(key, str) else edges, len(names))
        return counts[names.index(key)]  # type: ignore[arg-type]  # both are lists of such keys


class NodeSamples(_PartSamples):
    """The nodes of one type of a typed graph, with the ends of the edges from and to them."""

    def __init__(self, samples: SampleFile, node_type: str) -> None:
        super().__init__(samples.container)
        self._type, self._what = node_type, f"nodes {node_type!r}"
        self.num_nodes = self.types.num_nodes[node_type]

    @cached_property
    def counts(self) -> NDArray[np.uint32]:
        """Return how many batches use each node."""
        start = self.types.starts[self._type]
        return self.container.read("counts", start, start + self.num_nodes)

    def batch(self, number: int) -> SampledBatch:
        """Read the part of one batch: see ``HeteroSampledBatch.part``."""
        return self._typed(number).part(self._type)

    def node_ids(self, number: int) -> Ids:
        """Read the ids of one batch."""
        ids, start = super().node_ids(number), self.types.starts[self._type]
        return ids[(ids >= start) & (ids < start + self.num_nodes)] - start

    def num_nodes_of(self, number: int) -> int:
        """Return the nodes of a batch, without reading it."""
        return int(self._hops_of(number, self._type).sum())

    def num_edges_of(self, number: int) -> int:
        """Return the edges of a batch from these nodes, without reading it."""
        kinds = [kind for kind in self.types.edge_types if kind[0] == self._type]
        return sum(int(self._hops_of(number, kind).sum()) for kind in kinds)


class EdgeSamples(_PartSamples):
    """The edges, of one type where there are several, as rows of their features.

    ``node_ids`` of a batch are the distinct ids of its edges, ascending; ``sources`` their places.
    """

    def __init__(
        self, samples: SampleFile, num_rows: int, edge_type: EdgeType | None = None
    ) -> None:
        super().__init__(samples.container)
        if not samples.has_edge_ids:
            raise ConfigurationError(
                f"{samples.path} has no edge ids", hint="sample with edge_ids=True"
            )
        self.num_nodes, self._type = num_rows, edge_type
        self._what = "edges" if edge_type is None else f"edges {edge_type}"

    @cached_property
    def counts(self) -> NDArray[np.uint32]:
        """Return how many batches use each edge."""
        found = np.zeros(self.num_nodes, np.uint32)
        for number in range(self.num_batches):
            found[self.node_ids(number)] += 1
        return found

    def batch(self, number: int) -> SampledBatch:
        """Read the edges of one batch."""
        ids = super().batch(number).edge_ids
        if self._type is not None:
            ids = self._typed(number).edge_ids[self._type]
        assert ids is not None, "checked when this was made"
        rows, places = np.unique(ids, return_inverse=True)
        return SampledBatch(
            number=number,
            node_ids=rows,
            batch_size=0,
            nodes_per_hop=np.array([0, len(rows)]),
            edges_per_hop=np.array([len(places)]),
            degrees=np.empty(0, np.int32),
            sources=places.astype(np.int32),
        )

    def node_ids(self, number: int) -> Ids:
        """Read the distinct edge ids of one batch, ascending."""
        return self.batch(number).node_ids

    def num_nodes_of(self, number: int) -> int:
        """Return the edges of a batch, repeated ones too, without reading it."""
        return self.num_edges_of(number)

    def num_edges_of(self, number: int) -> int:
        """Return the edges of a batch, without reading it."""
        if self._type is None:
            return super().num_edges_of(number)
        return int(self._hops_of(number, self._type).sum())
