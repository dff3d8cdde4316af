"""What a source of graph data offers, so that one writer serves all of them.

A source yields its parts in blocks and never needs the whole of one in memory. Positions are
plain integers (rows, edges, files: the source decides), so that a writer that was killed can ask
for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 where it is not known before the end."""

EDGE_FEATURES = ("edge_attr", "edge_feat", "edge_features")
_SPLITS = ("train", "valid", "test")
_LAST_INT32 = 2**31 - 1


def index_dtype(num_nodes: int) -> np.dtype[Any]:
    """The type of node ids in ``indices``: int32 while they fit."""
    return np.dtype(np.int32 if num_nodes - 1 <= _LAST_INT32 else np.int64)


def refuse_edge_features(what: object, names: Iterable[str], leave_out: Collection[str]) -> None:
    """Refuse features of edges, which cannot be stored, unless they may be left out."""
    for name in names:
        if name in EDGE_FEATURES and name not in leave_out:
            raise DataError(
                f"{what} has {name}, and features of edges cannot be stored",
                hint="one number per edge can, as its weight; or leave them out: "
                f"leave_out=[{name!r}], on the command line --leave-out {name}",
            )


@dataclass(frozen=True, slots=True)
class EdgeBlock:
    """Edges ``sources[i] -> targets[i]``; ``position`` is where the source goes on after them.

    Examples:
        >>> EdgeBlock(np.array([0, 1]), np.array([2, 2]), position=2).targets.tolist()
        [2, 2]
    """

    sources: NDArray[Any]
    targets: NDArray[Any]
    position: int
    weights: NDArray[np.float32] | None = None


class EdgePart(Protocol):
    """The edges of one edge type.

    Examples:
        >>> import numpy as np
        >>> class Ring:
        ...     num_edges = expected_edges = 5
        ...     weighted, sorted_by_target = False, True
        ...
        ...     def blocks(self, position, max_edges):
        ...         ids = np.arange(position, 5)
        ...         yield EdgeBlock((ids + 1) % 5, ids, position=5)
        >>> part: EdgePart = Ring()
        >>> next(part.blocks(3, 100)).sources.tolist()
        [4, 0]

    Attributes:
        num_edges: Edges in all; None where only reading tells.
        expected_edges: A guess, from above rather than from below.
        weighted: Whether blocks carry weights.
        sorted_by_target: Targets never fall from one edge to the next: then nothing is sorted.
    """

    @property
    def num_edges(self) -> int | None:
        """Edges in all, or None."""
        ...

    @property
    def expected_edges(self) -> int:
        """A guess at it."""
        ...

    @property
    def weighted(self) -> bool:
        """Whether blocks carry weights."""
        ...

    @property
    def sorted_by_target(self) -> bool:
        """Whether targets never fall."""
        ...

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        """All edges from ``position`` on (0 at the start), at most ``max_edges`` at a time."""
        ...


class FeaturePart(Protocol):
    """The feature rows of one node type, in the order of node ids.

    Examples:
        >>> class Ones:
        ...     dtype, dim = np.dtype(np.float16), 3
        ...
        ...     def blocks(self, first_row, max_rows):
        ...         yield np.ones((10 - first_row, 3), np.float16)
        >>> part: FeaturePart = Ones()
        >>> next(part.blocks(8, 100)).shape
        (2, 3)
    """

    dtype: np.dtype[Any]
    dim: int

    def blocks(self, first_row: int, max_rows: int) -> Iterator[NDArray[Any]]:
        """All rows from ``first_row`` on, at most ``max_rows`` at a time."""
        ...


@dataclass(frozen=True, slots=True)
class LabelPart:
    """Labels in blocks (-1 where unknown) and the ids of the splits.

    ``num_classes`` is one more than the largest label where it is None.

    Examples:
        >>> part = LabelPart(lambda first_row: iter([np.array([0, -1, 2])]))
        >>> part.splits["train"].size
        0
    """

    blocks: Callable[[int], Iterator[NDArray[np.int64]]]
    splits: Mapping[str, NDArray[np.int64]] = field(
        default_factory=lambda: {name: np.empty(0, np.int64) for name in _SPLITS}
    )
    num_classes: int | None = None
    class_names: list[str] | None = None


class Source(Protocol):
    """A homogeneous graph somewhere else.

    Examples:
        >>> from fivefold.gnn.data import array_source
        >>> source: Source = array_source([[0, 1], [1, 0]], name="pair")
        >>> source.name, source.num_nodes, source.edges().num_edges
        ('pair', 2, 2)

    Attributes:
        name: For people.
        num_nodes: Nodes in all.
        recipe: What decides the result (paths, sizes, dates, options), as JSON: a folder that
            was begun with one recipe is never finished with another.
    """

    name: str
    num_nodes: int
    recipe: Mapping[str, Any]

    def edges(self) -> EdgePart:
        """The edges."""
        ...

    def features(self) -> FeaturePart | None:
        """The feature rows; None where there are none."""
        ...

    def labels(self) -> LabelPart | None:
        """Labels and splits; None where there are none."""
        ...
