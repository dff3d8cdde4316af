"""The edges of sampled batches as rows of a table, for planning and packing their features."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling._samples import SampleFile
from fivefold.gnn.sampling.batches import SampledBatch
from fivefold.gnn.storage.arrays import Ids


class EdgeSamples(SampleFile):
    """A sample file in which the edges stand for the nodes.

    ``node_ids`` of a batch are the distinct ids of its edges, ascending, and ``sources`` says for
    each edge which of them is its own. So whatever handles rows of nodes handles rows of edges.

    Args:
        samples: Batches with edge ids.
        num_rows: Rows that edges may name.

    Raises:
        ConfigurationError: The samples have no edge ids.
    """

    def __init__(self, samples: SampleFile, num_rows: int) -> None:
        super().__init__(samples.container)
        if not samples.has_edge_ids:
            raise ConfigurationError(
                f"{samples.path} has no edge ids", hint="sample with edge_ids=True"
            )
        self.num_nodes = num_rows

    @property
    def fingerprint(self) -> str:
        """Return a hash over all contents, another one than that of the nodes' batches."""
        text = f"edges of {super().fingerprint}, {self.num_nodes} rows"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

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
