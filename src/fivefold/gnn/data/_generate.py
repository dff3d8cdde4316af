"""A graph with classes, skewed degrees and noisy features, at any scale, in flat memory.

The degree-corrected planted partition of Karrer and Newman (arXiv 1008.3926). A random permutation
ties ids to positions, which are sorted by class and by falling weight, so that prefix sums have a
closed form. Each group of nodes has random numbers of its own: any can be made alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fivefold._compiler import njit
from fivefold.errors import ConfigurationError, require_flag, require_one_of, require_whole
from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._ingest import ingest, no_progress
from fivefold.gnn.data._write_graph import both_ways
from fivefold.gnn.data.parts import EdgeBlock, LabelPart, Progress, index_dtype
from fivefold.gnn.sampling.kernels import mix_bits
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.gnn.storage.parallel import in_threads

_PARETO = 1.1  # tail exponent of P(w > x); the density's is 2.1
_BETA = 1.0 - 1.0 / _PARETO
_CLIP_AT_MEANS = 2000
_BLOCK_NODES = 1 << 16
# A group has at most so many nodes, and about so many edges or numbers; changing one of these, or
# what is drawn from a group's random numbers, makes other graphs: raise the version of the recipe.
_GROUP_NODES, _GROUP_EDGES, _GROUP_ELEMENTS = 1 << 10, 1 << 14, 1 << 16
_VERSION = 2
_MOST_THREADS = 8  # beyond that the disk is slower
_FLOATS = ("float16", "float32", "float64")
_ORDER, _DEGREE, _EDGE, _FEATURE, _CENTER, _LABEL, _SPLIT = range(1, 8)  # streams of random numbers
_ONE = np.uint64(1)
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class GraphRecipe:
    """Sizes, seed and random laws of a generated graph."""

    nodes: int
    dim: int
    dtype: str = "float32"
    seed: int = 0
    classes: int = 32
    p_in: float = 0.6
    signal: float = 0.28
    mean_degree: float = 15.0
    label_noise: float = 0.05
    train: float = 0.1
    valid: float = 0.05
    test: float = 0.05
    neighbors: Literal["drawn", "drawing", "both"] = "drawn"
    random_ids: bool = True

    def __post_init__(self) -> None:
        require_whole("nodes", self.nodes, least=0)
        require_whole("dim", self.dim)
        require_whole("seed", self.seed, least=0, most=2**64 - 1)
        require_whole("classes", self.classes, most=2**31 - 1)
        require_one_of(self.dtype, _FLOATS, f"dtype is {self.dtype!r}")
        require_one_of(
            self.neighbors, ("drawn", "drawing", "both"), f"neighbors is {self.neighbors!r}"
        )
        require_flag("random_ids", self.random_ids)
        shares = ("train", "valid", "test")
        ranges: dict[str, tuple[float, float]] = dict.fromkeys(
            (*shares, "p_in", "label_noise"), (0, 1)
        )
        ranges |= {"mean_degree": (0, 2**31), "signal": (-1e9, 1e9)}
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not least <= float(value) <= most:
                raise ConfigurationError(
                    f"{name} is {value!r}", hint=f"use a number from {least:g} to {most:g}"
                )
        if sum(getattr(self, name) for name in shares) > 1 + 1e-9:
            message = f"train, valid and test are {self.train}, {self.valid} and {self.test}"
            raise ConfigurationError(message, hint="use shares that sum to 1 at most")


def generate_graph(  # noqa: PLR0913 - the four that everyone gives, and how to run
    folder: str | Path,
    *,
    nodes: int,
    dim: int,
    dtype: DTypeLike = np.float32,
    seed: int = 0,
    threads: int | None = None,
    memory_bytes: int = 1 << 30,
    progress: Progress | None = None,
    **options: Any,
) -> Dataset:
    """Write a degree-corrected planted-partition graph and open it.

    With one version of NumPy the result depends on the recipe alone, not on threads or memory.
    Killed and called again, it goes on.

    Args:
        folder: Where to write.
        nodes: Number of nodes.
        dim: Elements of a feature row.
        dtype: float16, float32 or float64.
        seed: Random seed.
        threads: How many make random numbers; None: one per processor, at most 8.
        memory_bytes: What buffers may take.
        progress: Told of (stage, done, total).
        **options: Further fields of ``GraphRecipe``.

    Raises:
        ConfigurationError: A value is not allowed.
        DataError: The folder holds another data set.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with generate_graph(folder, nodes=500, dim=16, seed=3, classes=4) as dataset:
        ...         dataset.train.size, int(dataset.labels.max()), dataset.features.read("x").shape
        (50, 3, (500, 16))
    """
    recipe = GraphRecipe(nodes=nodes, dim=dim, dtype=_name_of(dtype), seed=seed, **options)
    most = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    threads = most if threads is None else require_whole("threads", threads)
    source = _Generator(recipe, threads, progress or no_progress)
    return ingest(source, folder, memory_bytes=memory_bytes, progress=progress)


def _name_of(dtype: DTypeLike) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        message = f"dtype is {dtype!r}"
        raise ConfigurationError(message, hint=f"use one of {', '.join(_FLOATS)}") from error


class WeightLaw(NamedTuple):
    """Weights min(t^(beta - 1), cap) by share t of a class, the heaviest first."""

    cap: float

    @classmethod
    def of(cls, nodes: int) -> WeightLaw:
        """Return the law for so many nodes."""
        if nodes < 2:
            return cls(1.0)
        largest = float(nodes) ** (1.0 / _PARETO)
        mean = (1.0 - nodes**-_BETA) / _BETA + largest / nodes
        return cls(float(min(_CLIP_AT_MEANS * mean, largest)))

    @property
    def _corner(self) -> float:
        return float(self.cap**-_PARETO)  # the share that is clipped

    def below(self, share: Any) -> Any:
        """Return the integral of the weights from 0 to ``share``."""
        clipped = np.minimum(share, self._corner)
        return (
            self.cap * clipped
            + (np.maximum(share, self._corner) ** _BETA - self._corner**_BETA) / _BETA
        )

    def share(self, weight: Any) -> Any:
        """Return the inverse of ``below``."""
        clipped = self.cap * self._corner
        rest = np.maximum(weight, clipped) - clipped
        beyond = (rest * _BETA + self._corner**_BETA) ** (1.0 / _BETA)
        return np.where(weight <= clipped, weight / self.cap, beyond)


@njit
def permute(places: Any, size: int, key: Any, inverse: bool) -> Any:  # noqa: FBT001 - compiled
    """Return where a random permutation of 0..size-1 sends places (or, inverse, whence they came).

    An alternating Feistel network with cycle walking (Black and Rogaway, CT-RSA 2002).
    """
    bits = 2
    while (1 << bits) < size:
        bits += 1
    low_bits = np.uint64(bits // 2)
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << np.uint64(bits - bits // 2)) - _ONE
    images = np.empty(places.size, np.int64)
    for index in range(places.size):
        value = np.uint64(places[index])
        while True:
            low, high = value & low_mask, value >> low_bits
            for step in range(8):
                turn = 7 - step if inverse else step
                turn_key = mix_bits(np.uint64(key) + np.uint64(turn))
                if turn % 2 == 0:
                    high ^= mix_bits(turn_key ^ low) & high_mask
                else:
                    low ^= mix_bits(turn_key ^ high) & low_mask
            value = (high << low_bits) | low
            if value < np.uint64(size):
                break
        images[index] = np.int64(value)
    return images


class _Generator:
    """The source: parts are made when they are asked for."""

    def __init__(self, recipe: GraphRecipe, threads: int, progress: Progress) -> None:
        self.options = recipe
        self.progress = progress
        self.threads = threads
        self.name = f"planted partition, {recipe.nodes} nodes, seed {recipe.seed}"
        self.num_nodes = recipe.nodes
        self.recipe: Mapping[str, Any] = {
            "source": "generator",
            "version": _VERSION,
            **asdict(recipe),
        }
        starts = [own * recipe.nodes // recipe.classes for own in range(recipe.classes + 1)]
        self.class_starts = np.array(starts, np.int64)
        self.weights = WeightLaw.of(recipe.nodes)
        self.edge_group = _group(_GROUP_EDGES, recipe.mean_degree)
        self.row_group = _group(_GROUP_ELEMENTS, recipe.dim)

    def random(self, *stream: int) -> np.random.Generator:
        """Return the random numbers of a stream, or of one group in it."""
        return np.random.Generator(np.random.SFC64([self.options.seed, *stream]))

    def permuted(self, stream: int, places: Ids, *, inverse: bool = False) -> Any:
        """Return the images of places under the random permutation of a stream."""
        key = self.random(stream).integers(2**64, dtype=np.uint64)
        return permute(places, self.num_nodes, key, inverse)

    def made(self, make: Callable[[int, int], Made], first: int, step: int) -> Iterator[Made]:
        """Yield what is made of each range of nodes, in order, by several threads."""
        calls = (partial(make, *part) for part in _ranges(first, self.num_nodes, step))
        return in_threads(calls, threads=self.threads)

    def _positions(self, first: int, stop: int) -> Ids:
        nodes = np.arange(first, stop)
        shuffled = self.options.random_ids
        return self.permuted(_ORDER, nodes, inverse=True) if shuffled else nodes

    def _classes_at(self, positions: Ids) -> Ids:
        return np.searchsorted(self.class_starts, positions, side="right") - 1

    def edges(self) -> Any:
        """Return the edges, drawn as they are read; here their degrees are drawn to count them."""
        drawn = nodes = 0
        for degrees in self.made(self.degrees, 0, self.edge_group):
            drawn, nodes = drawn + int(degrees.sum()), nodes + degrees.size
            self.progress("edges counted", nodes, self.num_nodes)
        count = drawn * (2 if self.options.neighbors == "both" else 1)

        def blocks(position: int, max_edges: int) -> Iterator[EdgeBlock]:  # a position is a node
            nodes = min(_BLOCK_NODES, int(max_edges / max(1.0, 2 * self.options.mean_degree)))
            step = max(1, nodes // self.edge_group) * self.edge_group
            return self.made(self._edge_block, position, step)

        return SimpleNamespace(
            weighted=False, numbered=False, num_edges=count, expected_edges=count, blocks=blocks
        )

    def degrees(self, first: int, stop: int) -> Ids:
        """Return how many neighbours each node of a group draws."""
        positions = self._positions(first, stop)
        own = self._classes_at(positions)
        sizes = self.class_starts[own + 1] - self.class_starts[own]
        ranks = positions - self.class_starts[own]
        below = self.weights.below
        weights = sizes * (below((ranks + 1) / sizes) - below(ranks / sizes)) / below(1.0)
        means = self.options.mean_degree / 2 * (1.0 + weights)
        drawn = self.random(_DEGREE, first).poisson(means)
        return np.asarray(np.maximum(1, drawn), np.int64)

    def drawn(self, first: int, stop: int) -> tuple[Array, Array]:
        """Return the edges (drawing node, drawn node) of a group."""
        degrees = self.degrees(first, stop)
        num_edges = int(degrees.sum())
        random, starts, p_in = self.random(_EDGE, first), self.class_starts, self.options.p_in
        chosen = np.repeat(self._classes_at(self._positions(first, stop)), degrees)
        choice = random.random(num_edges)
        far = choice >= p_in  # what is left of the interval is spread over all nodes
        anywhere = ((choice[far] - p_in) / (1.0 - p_in) * self.num_nodes).astype(np.int64)
        chosen[far] = self._classes_at(np.minimum(anywhere, self.num_nodes - 1))
        sizes = starts[chosen + 1] - starts[chosen]
        shares = self.weights.share(random.random(num_edges) * self.weights.below(1.0))
        positions = starts[chosen] + np.minimum((shares * sizes).astype(np.int64), sizes - 1)
        drawn = self.permuted(_ORDER, positions) if self.options.random_ids else positions
        dtype = index_dtype(self.num_nodes)
        drawers = np.repeat(np.arange(first, stop, dtype=dtype), degrees)
        return drawers, drawn.astype(dtype)

    def _edge_block(self, first: int, stop: int) -> EdgeBlock:
        groups = [self.drawn(*part) for part in _ranges(first, stop, self.edge_group)]
        drawers, drawn = (np.concatenate(ends) for ends in zip(*groups, strict=True))
        if self.options.neighbors == "drawn":
            return EdgeBlock(sources=drawn, targets=drawers, position=stop)
        if self.options.neighbors == "drawing":
            return EdgeBlock(sources=drawers, targets=drawn, position=stop)
        return EdgeBlock(both_ways(drawers, drawn), both_ways(drawn, drawers), position=stop)

    def features(self) -> Any:
        """Return the feature rows, drawn as they are read."""

        def blocks(first_row: int, max_rows: int) -> Iterator[Array]:
            step = max(1, max_rows // (2 * self.threads) // self.row_group) * self.row_group
            return self.made(self._row_block, first_row, step)

        dtype = np.dtype(self.options.dtype)
        return SimpleNamespace(dim=self.options.dim, dtype=dtype, blocks=blocks)

    @cached_property
    def _centers(self) -> NDArray[np.float32]:
        shape = (self.options.classes, self.options.dim)
        normal = self.random(_CENTER).standard_normal(shape, np.float32)
        return normal * np.float32(self.options.signal)

    def rows(self, first: int, stop: int) -> NDArray[np.float32]:
        """Return the feature rows of a group."""
        shape = (stop - first, self.options.dim)
        rows = self.random(_FEATURE, first).standard_normal(shape, np.float32)
        rows += self._centers[self._classes_at(self._positions(first, stop))]
        return rows

    def _row_block(self, first: int, stop: int) -> Array:
        block = np.empty((stop - first, self.options.dim), self.options.dtype)
        for begin, end in _ranges(first, stop, self.row_group):
            block[begin - first : end - first] = self.rows(begin, end)
        return block

    def labels(self) -> LabelPart:
        """Return the labels, drawn as they are read, and the node ids of the splits."""
        options, first, splits = self.options, 0, {}
        for name in ("train", "valid", "test"):
            count = min(round(getattr(options, name) * options.nodes), options.nodes - first)
            splits[name] = np.sort(self.permuted(_SPLIT, np.arange(first, first + count)))
            first += count
        return LabelPart(
            lambda first: self.made(self._group_labels, first, _GROUP_NODES),
            splits,
            options.classes,
        )

    def _group_labels(self, first: int, stop: int) -> Ids:
        own = self._classes_at(self._positions(first, stop))
        random, classes = self.random(_LABEL, first), self.options.classes
        wrong = random.random(own.size) < self.options.label_noise
        steps = random.integers(1, classes, own.size) if classes > 1 else 0
        return np.where(wrong, (own + steps) % classes, own)


def _group(most: int, per_node: float) -> int:
    return max(1, min(_GROUP_NODES, int(most / max(1.0, per_node))))


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, last + 1) of at most ``step`` from ``start`` to ``stop``."""
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
