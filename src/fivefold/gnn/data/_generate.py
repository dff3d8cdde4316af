"""A graph with classes, skewed degrees and noisy features, at any scale, in flat memory.

The degree-corrected planted partition of Karrer and Newman (arXiv 1008.3926): K classes of equal
size; a node's weight w is Pareto with density exponent 2.1, clipped at 2000 times the mean; it
draws Poisson(7.5 + 7.5 w / mean w) neighbours, at least one, each from its own class with
probability ``p_in`` and from all nodes otherwise, proportionally to w. Features are
``signal * mu_class + N(0, 1)``, 5 % of labels are another class, ids are random.

Weights are the Pareto law's quantiles over equal strata of each class rather than independent
draws: every node's weight has the same law, and the prefix sums that drawing needs have a closed
form (``_generate_kernels``), so that memory does not grow with the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.data import _generate_kernels as kernels
from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._parts import EdgeBlock, LabelPart, Progress, index_dtype
from fivefold.gnn.data._random import LAYERS_X, LAYERS_Y, key_of
from fivefold.gnn.data._ranges import default_threads, in_order, ranges
from fivefold.gnn.data._write import write_dataset
from fivefold.gnn.data._write_graph import both_ways

_PARETO = 1.1  # tail exponent of P(w > x); the density's is 2.1
_CLIP_AT_MEANS = 2000
_BLOCK_NODES = 1 << 16
_SPLIT_STREAM = 7
_FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class GraphRecipe:
    """What decides a generated graph.

    Attributes:
        nodes: Number of nodes.
        dim: Elements of a feature row.
        dtype: float16, float32 or float64.
        seed: Of all random numbers.
        classes: Number of classes.
        p_in: Chance that a neighbour is drawn from the node's own class.
        signal: Size of the class's centre in the features, whose noise has size 1.
        mean_degree: Mean of the neighbours drawn per node; half of it follows the weight.
        label_noise: Share of labels that are another class.
        train: Share of nodes in the training split.
        valid: Share in the validation split.
        test: Share in the test split.
        neighbors: "drawn": a node hears from the nodes it drew, so that few nodes are heard by
            very many; "drawing": from those that drew it, so that few nodes have very many
            neighbours; "both".
        random_ids: Whether ids are random; otherwise they are sorted by class and weight.

    Examples:
        >>> GraphRecipe(nodes=10, dim=4).classes
        32
    """

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
        shares = (self.train, self.valid, self.test)
        rules = {
            "nodes": (self.nodes >= 0, "0 or more"),
            "dim": (self.dim >= 1, "1 or more"),
            "dtype": (self.dtype in _FLOATS, f"one of {', '.join(_FLOATS)}"),
            "seed": (0 <= self.seed < 2**64, "between 0 and 2^64 - 1"),
            "classes": (1 <= self.classes < 2**31, "1 or more"),
            "p_in": (0 <= self.p_in <= 1, "between 0 and 1"),
            "mean_degree": (0 <= self.mean_degree < 2**31, "0 or more"),
            "label_noise": (0 <= self.label_noise <= 1, "between 0 and 1"),
            "train": (min(shares) >= 0 and sum(shares) <= 1 + 1e-9, "shares that sum to 1 at most"),
            "neighbors": (self.neighbors in {"drawn", "drawing", "both"}, "drawn, drawing or both"),
        }
        for key, (allowed, rule) in rules.items():
            if not allowed:
                raise ConfigurationError(f"{key} is {getattr(self, key)!r}", hint=f"use {rule}")


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

    The result depends on the recipe alone, not on threads or memory. Killed and called again, it
    goes on.

    Args:
        folder: Where to write.
        nodes: Number of nodes.
        dim: Elements of a feature row.
        dtype: float16, float32 or float64.
        seed: Of all random numbers.
        threads: How many make random numbers; None: one per processor, at most 8.
        memory_bytes: What buffers may take.
        progress: Told of (stage, done, total).
        **options: Further fields of ``GraphRecipe``.

    Returns:
        The data set.

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
    threads = default_threads() if threads is None else threads
    if threads < 1:
        raise ConfigurationError(f"threads is {threads}", hint="use 1 or more, or None")
    source = _Generator(recipe, threads)
    return write_dataset(source, folder, memory_bytes=memory_bytes, progress=progress)


def _name_of(dtype: DTypeLike) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        message = f"dtype is {dtype!r}"
        raise ConfigurationError(message, hint=f"use one of {', '.join(_FLOATS)}") from error


class _Generator:
    """The source: parts are made when they are asked for."""

    def __init__(self, recipe: GraphRecipe, threads: int) -> None:
        self.options = recipe
        self.threads = threads
        self.name = f"planted partition, {recipe.nodes} nodes, seed {recipe.seed}"
        self.num_nodes = recipe.nodes
        self.recipe: Mapping[str, Any] = {"source": "generator", "version": 1, **asdict(recipe)}
        starts = [own * recipe.nodes // recipe.classes for own in range(recipe.classes + 1)]
        beta = 1.0 - 1.0 / _PARETO
        self.law = kernels.Law(
            class_starts=np.array(starts, np.int64),
            cap=_cap(recipe.nodes, beta),
            beta=beta,
            half_degree=recipe.mean_degree / 2,
            p_in=float(recipe.p_in),
            signal=float(recipe.signal),
            label_noise=float(recipe.label_noise),
            key=np.uint64(recipe.seed),
            shuffled=recipe.random_ids,
        )

    def edges(self) -> _GeneratedEdges:
        return _GeneratedEdges(self)

    def features(self) -> _GeneratedFeatures:
        return _GeneratedFeatures(self)

    def labels(self) -> LabelPart:
        options, first, splits = self.options, 0, {}
        key = np.uint64(key_of(self.law.key, _SPLIT_STREAM))  # a plain number again
        for name in ("train", "valid", "test"):
            share = getattr(options, name)
            count = min(round(share * options.nodes), options.nodes - first)
            ids = np.empty(count, np.int64)
            kernels.fill_permuted(ids, first, options.nodes, key)
            splits[name] = np.sort(ids)
            first += count
        return LabelPart(self._label_blocks, splits, options.classes)

    def _label_blocks(self, first_row: int) -> Iterator[NDArray[np.int64]]:
        def block(first: int, stop: int) -> NDArray[np.int64]:
            out = np.empty(stop - first, np.int64)
            kernels.fill_labels(out, first, self.law)
            return out

        parts = ranges(first_row, self.num_nodes, _BLOCK_NODES)
        return in_order(block, parts, threads=self.threads)

    def degrees(self, first: int, stop: int) -> NDArray[np.int64]:
        """How many neighbours each node of the range draws."""
        out = np.empty(stop - first, np.int64)
        kernels.fill_degrees(out, first, self.law)
        return out

    def drawn(self, first: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The edges (drawing node, drawn node) of the range."""
        degrees = self.degrees(first, stop)
        drawers = np.empty(int(degrees.sum()), index_dtype(self.num_nodes))
        drawn = np.empty_like(drawers)
        kernels.fill_edges(drawers, drawn, degrees, first, self.law)
        return drawers, drawn


def _cap(nodes: int, beta: float) -> float:
    """Where weights are clipped: 2000 times the mean of N draws at its typical value.

    The mean of a law with such a tail depends on how many draws there are: it is that of the
    law cut at its N-th quantile, which is also the size of the largest of N draws.
    """
    if nodes < 2:
        return 1.0
    largest = float(nodes) ** (1.0 / _PARETO)
    mean = (1.0 - nodes**-beta) / beta + largest / nodes
    return float(min(_CLIP_AT_MEANS * mean, largest))


class _GeneratedEdges:
    weighted = False

    def __init__(self, generator: _Generator) -> None:
        self.generator = generator
        options = generator.options
        self.sorted_by_target = options.neighbors == "drawn"
        parts = ranges(0, options.nodes, _BLOCK_NODES)
        sums = in_order(
            lambda first, stop: int(generator.degrees(first, stop).sum()),
            parts,
            threads=generator.threads,
        )
        self.expected_edges = sum(sums) * (2 if options.neighbors == "both" else 1)
        self.num_edges: int | None = self.expected_edges

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        """Blocks of whole nodes; ``position`` is a node."""
        options = self.generator.options
        step = max(1, min(_BLOCK_NODES, int(max_edges // max(1.0, 2 * options.mean_degree))))
        parts = ranges(position, options.nodes, step)
        return in_order(self._block, parts, threads=self.generator.threads)

    def _block(self, first: int, stop: int) -> EdgeBlock:
        drawers, drawn = self.generator.drawn(first, stop)
        neighbors = self.generator.options.neighbors
        if neighbors == "drawn":
            return EdgeBlock(sources=drawn, targets=drawers, position=stop)
        if neighbors == "drawing":
            return EdgeBlock(sources=drawers, targets=drawn, position=stop)
        return EdgeBlock(both_ways(drawers, drawn), both_ways(drawn, drawers), position=stop)


class _GeneratedFeatures:
    def __init__(self, generator: _Generator) -> None:
        self.generator = generator
        self.dim = generator.options.dim
        self.dtype = np.dtype(generator.options.dtype)

    def blocks(self, first_row: int, max_rows: int) -> Iterator[NDArray[Any]]:
        step = max(1, max_rows // (2 * self.generator.threads))
        parts = ranges(first_row, self.generator.num_nodes, step)
        return in_order(self._block, parts, threads=self.generator.threads)

    def _block(self, first: int, stop: int) -> NDArray[Any]:
        rows = np.empty((stop - first, self.dim), np.float32)
        kernels.fill_features(rows, first, self.generator.law, LAYERS_X, LAYERS_Y)
        return rows.astype(self.dtype, copy=False)
