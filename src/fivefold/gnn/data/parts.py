"""What a source of graph data offers, so that one writer serves all of them.

A source yields its parts in blocks and never needs the whole of one in memory. Positions are
plain integers (rows, edges, files: the source decides), so that a writer that was killed can ask
for the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.gnn.storage.pages import Array, Ids

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 where it is not known before the end."""

EDGE_FEATURES = ("edge_attr", "edge_feat", "edge_features")
SPLITS = ("train", "valid", "test")
_LAST_INT32 = 2**31 - 1


def index_dtype(num_nodes: int) -> np.dtype[Any]:
    """Return the type of node ids in ``indices``: int32 while they fit."""
    return np.dtype(np.int32 if num_nodes - 1 <= _LAST_INT32 else np.int64)


def overlaps(splits: Mapping[str, Ids]) -> dict[str, int]:
    """Return how many nodes are in two splits, by the names of both, where there are some."""
    found = {}
    for one, other in itertools.combinations(splits, 2):
        if count := np.intersect1d(splits[one], splits[other]).size:
            found[f"{one} and {other}"] = int(count)
    return found


@dataclass(frozen=True, slots=True)
class EdgeBlock:
    """Edges ``sources[i] -> targets[i]``; ``position`` is where the source goes on after them."""

    sources: Array
    targets: Array
    position: int
    weights: NDArray[np.float32] | None = None
    edge_ids: Ids | None = None

    def values(self) -> dict[str, Array]:
        """Return what goes with each target: sources, and weights and edge ids where there are."""
        found = {"sources": self.sources, "weights": self.weights, "edge_ids": self.edge_ids}
        return {name: values for name, values in found.items() if values is not None}


class EdgePart(Protocol):
    """The edges of one edge type.

    It may have a ``stamp``, JSON that says which edges they are. The writer numbers the edges as
    they come, unless ``numbered`` is False: then they have no order that somebody may refer to.
    Where ``num_edges`` is None, ``most_edges`` may say how many there cannot be more of.
    """

    @property
    def num_edges(self) -> int | None:
        """Return the number of edges; None where only reading tells."""

    @property
    def expected_edges(self) -> int:
        """Return a guess at their number, from above rather than from below."""

    @property
    def weighted(self) -> bool:
        """Return whether blocks carry weights."""

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        """Yield all edges from ``position`` on (0: the start), at most ``max_edges`` at a time."""


class FeaturePart(Protocol):
    """The feature rows of one node type, in the order of node ids, or of edges by their ids."""

    dtype: np.dtype[Any]
    dim: int

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Array]:
        """Yield all rows from ``first_row`` on, at most ``max_rows`` at a time."""


@dataclass(frozen=True, slots=True)
class LabelPart:
    """Labels in blocks (-1 where unknown) and the ids of the splits.

    ``num_classes`` is one more than the largest label where it is None.
    """

    blocks: Callable[[int], Iterator[Ids]]
    splits: Mapping[str, Ids] = field(
        default_factory=lambda: {name: np.empty(0, np.int64) for name in SPLITS}
    )
    num_classes: int | None = None
    class_names: list[str] | None = None


class Source(Protocol):
    """A homogeneous graph somewhere else.

    It may have ``edge_features()``, the feature rows of its edges in the order of the edges, and
    ``node_parts()`` and ``edge_parts()``: whatever else nodes or edges carry, by name.
    """

    name: str
    num_nodes: int
    recipe: Mapping[str, Any]

    def edges(self) -> EdgePart:
        """Return the edges."""

    def features(self) -> FeaturePart | None:
        """Return the feature rows; None where there are none."""

    def labels(self) -> LabelPart | None:
        """Return the labels and splits; None where there are none."""
