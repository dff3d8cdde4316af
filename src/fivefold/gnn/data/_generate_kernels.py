"""The planted-partition graph as a function of (seed, node): compiled loops.

A node has an id and a *position*; the two are tied by a random permutation, so that ids say
nothing. Positions are sorted by class and, within a class, by falling weight. The weight of the
node of rank r in a class of n is the mean of the Pareto quantiles over the r-th of n equal
strata, so that prefix sums and their inverse have closed forms: no table of all nodes is needed,
and any range of nodes can be made alone.

Shapes: K classes, D feature dimension, R nodes in the range.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.gnn.data._compiler import njit
from fivefold.gnn.data._random import key_of, normal, number, permute, poisson, uniform

__all__ = ["fill_degrees", "fill_edges", "fill_features", "fill_labels", "fill_permuted"]

# Streams of random numbers under the graph's key.
_PERMUTATION, _DEGREE, _EDGE, _FEATURE, _CENTER, _LABEL = 1, 2, 3, 4, 5, 6


@njit
def weight_below(share: float, cap: float, beta: float) -> Any:
    """Integral of min(t^(beta - 1), cap) for t from 0 to ``share``: the weight of the heaviest."""
    corner = cap ** (-1.0 / (1.0 - beta))
    if share <= corner:
        return cap * share
    return cap * corner + (share**beta - corner**beta) / beta


@njit
def share_below(weight: float, cap: float, beta: float) -> Any:
    """The inverse of ``weight_below``."""
    corner = cap ** (-1.0 / (1.0 - beta))
    if weight <= cap * corner:
        return weight / cap
    return ((weight - cap * corner) * beta + corner**beta) ** (1.0 / beta)


@njit
def _class_of(position: int, class_starts: Any) -> Any:
    low, high = 0, class_starts.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if class_starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@njit
def _position_of(node: int, num_nodes: int, key: Any, shuffled: bool) -> Any:  # noqa: FBT001
    return permute(node, num_nodes, key_of(key, _PERMUTATION), True) if shuffled else node


@njit
def _node_at(position: int, num_nodes: int, key: Any, shuffled: bool) -> Any:  # noqa: FBT001
    return permute(position, num_nodes, key_of(key, _PERMUTATION), False) if shuffled else position


@njit
def fill_degrees(  # noqa: PLR0913, PLR0917 - numba compiles no keyword-only arguments
    out: Any,
    first: int,
    class_starts: Any,
    cap: float,
    beta: float,
    half_degree: float,
    key: Any,
    shuffled: bool,  # noqa: FBT001
) -> Any:
    """Out-degrees of nodes first..first+R-1; returns their sum."""
    num_nodes = class_starts[-1]
    mean_weight = weight_below(1.0, cap, beta)
    degree_key = key_of(key, _DEGREE)
    total = 0
    for index in range(out.size):
        position = _position_of(first + index, num_nodes, key, shuffled)
        own = _class_of(position, class_starts)
        size = class_starts[own + 1] - class_starts[own]
        rank = position - class_starts[own]
        upper = weight_below((rank + 1) / size, cap, beta)
        weight = size * (upper - weight_below(rank / size, cap, beta))
        mean = half_degree + half_degree * weight / mean_weight
        out[index] = max(1, poisson(mean, key_of(degree_key, first + index)))
        total += out[index]
    return total


@njit
def fill_edges(  # noqa: PLR0913, PLR0917
    drawers: Any,
    drawn: Any,
    degrees: Any,
    first: int,
    class_starts: Any,
    cap: float,
    beta: float,
    p_in: float,
    key: Any,
    shuffled: bool,  # noqa: FBT001
) -> None:
    """All edges that nodes first..first+R-1 draw, node by node."""
    num_nodes = class_starts[-1]
    mean_weight = weight_below(1.0, cap, beta)
    edge_key = key_of(key, _EDGE)
    edge = 0
    for index in range(degrees.size):
        node = first + index
        own = _class_of(_position_of(node, num_nodes, key, shuffled), class_starts)
        node_key = key_of(edge_key, node)
        for counter in range(degrees[index]):
            chosen = own
            choice = uniform(number(node_key, np.uint64(2 * counter)))
            if choice >= p_in:
                anywhere = int((choice - p_in) / (1.0 - p_in) * num_nodes)
                chosen = _class_of(min(anywhere, num_nodes - 1), class_starts)
            size = class_starts[chosen + 1] - class_starts[chosen]
            weight = uniform(number(node_key, np.uint64(2 * counter + 1))) * mean_weight
            rank = min(int(share_below(weight, cap, beta) * size), size - 1)
            drawers[edge] = node
            drawn[edge] = _node_at(class_starts[chosen] + rank, num_nodes, key, shuffled)
            edge += 1


@njit
def fill_features(  # noqa: PLR0913, PLR0917
    out_RD: Any,
    first: int,
    class_starts: Any,
    signal: float,
    key: Any,
    shuffled: bool,  # noqa: FBT001
    layers_x: Any,
    layers_y: Any,
) -> None:
    """Rows ``signal * center of the class + N(0, 1)`` of nodes first..first+R-1."""
    rows, dim = out_RD.shape
    num_classes = class_starts.size - 1
    centers_KD = np.empty((num_classes, dim), np.float32)
    center_key = key_of(key, _CENTER)
    for own in range(num_classes):
        for column in range(dim):
            bits = number(key_of(center_key, own), np.uint64(column))
            centers_KD[own, column] = signal * normal(bits, layers_x, layers_y)
    feature_key = key_of(key, _FEATURE)
    for index in range(rows):
        position = _position_of(first + index, class_starts[-1], key, shuffled)
        own = _class_of(position, class_starts)
        row_key = key_of(feature_key, first + index)
        for column in range(dim):
            noise = normal(number(row_key, np.uint64(column)), layers_x, layers_y)
            out_RD[index, column] = centers_KD[own, column] + np.float32(noise)


@njit
def fill_labels(  # noqa: PLR0913, PLR0917
    out: Any,
    first: int,
    class_starts: Any,
    noise: float,
    key: Any,
    shuffled: bool,  # noqa: FBT001
) -> None:
    """Classes of nodes first..first+R-1, a share ``noise`` of them replaced by another class."""
    num_classes = class_starts.size - 1
    label_key = key_of(key, _LABEL)
    for index in range(out.size):
        position = _position_of(first + index, class_starts[-1], key, shuffled)
        out[index] = _class_of(position, class_starts)
        node_key = key_of(label_key, first + index)
        if num_classes > 1 and uniform(number(node_key, np.uint64(0))) < noise:
            step = 1 + int(uniform(number(node_key, np.uint64(1))) * (num_classes - 1))
            out[index] = (out[index] + step) % num_classes


@njit
def fill_permuted(out: Any, first: int, size: int, key: Any) -> None:
    """Images of places first..first+R-1 under a random permutation of 0..size-1."""
    for index in range(out.size):
        out[index] = permute(first + index, size, key, False)
