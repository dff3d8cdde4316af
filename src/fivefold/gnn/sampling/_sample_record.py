"""How a sampled batch lies in a file: one record of whole pages, node ids first.

A record is node ids, sources, edge ids (if any) and degrees, each in the narrowest type that the
graph and the fan-outs allow, one after another without gaps; the rest of its last page is zero.
So one read gets a batch, and one shorter read its node ids. Counts are in the index, a table of
one row per batch: first page, epoch, nodes per hop, edges per hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.sampling._batch import SampledBatch

PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The types in a record; the same for a whole file.

    Attributes:
        node_dtype: Of node ids.
        degree_dtype: Of degrees.
        edge_dtype: Of edge ids; None where there are none.
        num_hops: Hops of every batch.
    """

    node_dtype: np.dtype[Any]
    degree_dtype: np.dtype[Any]
    edge_dtype: np.dtype[Any] | None
    num_hops: int

    @property
    def index_width(self) -> int:
        """Columns of the index."""
        return 2 + 2 * self.num_hops + 1

    def index_row(self, batch: SampledBatch, *, first_page: int, epoch: int) -> NDArray[np.int64]:
        """Return the row of the index for a batch."""
        row = [first_page, epoch, *batch.nodes_per_hop, *batch.edges_per_hop]
        return np.array(row, np.int64)

    def encode(self, batch: SampledBatch) -> NDArray[np.uint8]:
        """Return the record: ``[pages, 4096]``."""
        parts: list[NDArray[Any]] = [
            batch.node_ids.astype(self.node_dtype),
            batch.sources.astype(np.int32),
        ]
        if self.edge_dtype is not None:
            assert batch.edge_ids is not None, "the form has edge ids because the sampler does"
            parts.append(batch.edge_ids.astype(self.edge_dtype))
        parts.append(batch.degrees.astype(self.degree_dtype))
        pages = np.zeros((-(-sum(part.nbytes for part in parts) // PAGE_BYTES), PAGE_BYTES), "u1")
        flat, place = pages.reshape(-1), 0
        for part in parts:
            flat[place : place + part.nbytes] = part.view(np.uint8)
            place += part.nbytes
        return pages

    def num_pages(self, row: NDArray[np.int64]) -> int:
        """Return the length of the record that an index row describes."""
        nodes, edges = self._counts(row)
        size = int(nodes.sum()) * self.node_dtype.itemsize + int(edges.sum()) * 4
        size += int(nodes[:-1].sum()) * self.degree_dtype.itemsize
        if self.edge_dtype is not None:
            size += int(edges.sum()) * self.edge_dtype.itemsize
        return -(-size // PAGE_BYTES)

    def num_node_pages(self, row: NDArray[np.int64]) -> int:
        """Return how many pages of the record hold node ids."""
        return -(-self.num_nodes(row) * self.node_dtype.itemsize // PAGE_BYTES)

    def num_nodes(self, row: NDArray[np.int64]) -> int:
        """Return the nodes of the batch."""
        return int(self._counts(row)[0].sum())

    def decode_node_ids(
        self, pages: NDArray[np.uint8], row: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the node ids from the front pages of a record."""
        count = self.num_nodes(row) * self.node_dtype.itemsize
        return pages.reshape(-1)[:count].view(self.node_dtype).astype(np.int64)

    def decode(
        self, pages: NDArray[np.uint8], row: NDArray[np.int64], *, number: int
    ) -> SampledBatch:
        """Return the batch of a record."""
        nodes, edges = self._counts(row)
        flat = pages.reshape(-1)
        place = self.num_nodes(row) * self.node_dtype.itemsize

        def take(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
            nonlocal place
            # A copy by bytes: later arrays may not lie on a multiple of their item size.
            array = np.frombuffer(flat[place : place + count * dtype.itemsize].tobytes(), dtype)
            place += count * dtype.itemsize
            return array

        num_edges = int(edges.sum())
        sources = take(num_edges, np.dtype(np.int32))
        edge_ids = None
        if self.edge_dtype is not None:
            edge_ids = take(num_edges, self.edge_dtype).astype(np.int64)
        return SampledBatch(
            number=number,
            node_ids=self.decode_node_ids(pages, row),
            batch_size=int(nodes[0]),
            nodes_per_hop=nodes.copy(),
            edges_per_hop=edges.copy(),
            degrees=take(int(nodes[:-1].sum()), self.degree_dtype).astype(np.int32),
            sources=sources,
            edge_ids=edge_ids,
        )

    def _counts(self, row: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        split = 2 + self.num_hops + 1
        return row[2:split], row[split:]


def record_form(
    *, num_nodes: int, num_edges: int, max_degree: int, fanouts: Sequence[int], edge_ids: bool
) -> RecordForm:
    """Return the narrowest form for what a sampler may yield."""
    most = max_degree if min(fanouts) < 0 else min(max_degree, max(fanouts))
    return RecordForm(
        node_dtype=_signed(num_nodes),
        degree_dtype=np.min_scalar_type(most),
        edge_dtype=_signed(num_edges) if edge_ids else None,
        num_hops=len(fanouts),
    )


def _signed(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count <= 1 << 31 else np.int64)
