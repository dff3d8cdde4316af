"""The planted-partition graph as a function of (seed, node): compiled loops.

A node has an id and a *position*; the two are tied by a random permutation, so that ids say
nothing. Positions are sorted by class and, within a class, by falling weight. The weight of the
node of rank r in a class of n is the mean of the Pareto quantiles over the r-th of n equal
strata, so that prefix sums and their inverse have closed forms: no table of all nodes is needed,
and any range of nodes can be made alone.

Shapes: K classes, D feature dimension, R nodes in the range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fivefold._compiler import njit
from fivefold.gnn.data._random import key_of, normal, number, permute, poisson, uniform

# Streams of random numbers under the graph's key.
_PERMUTATION, _DEGREE, _EDGE, _FEATURE, _CENTER, _LABEL = 1, 2, 3, 4, 5, 6


class Law(NamedTuple):
    """What a generated graph follows, as the kernels take it.

    Attributes:
        class_starts: First position of each class, and the number of nodes; int64 [K + 1].
        cap: Where weights are clipped.
        beta: One minus the inverse of the Pareto tail exponent.
        half_degree: Half the mean number of neighbours drawn.
        p_in: Chance of drawing from the own class.
        signal: Size of the class's centre in the features.
        label_noise: Share of labels that are another class.
        key: Of all random numbers, uint64.
        shuffled: Whether ids are random.
    """

    class_starts: Any
    cap: float
    beta: float
    half_degree: float
    p_in: float
    signal: float
    label_noise: float
    key: Any
    shuffled: bool


@njit
def weight_below(share: float, law: Law) -> Any:
    """Integral of min(t^(beta - 1), cap) for t from 0 to ``share``: the weight of the heaviest."""
    corner = law.cap ** (-1.0 / (1.0 - law.beta))
    if share <= corner:
        return law.cap * share
    return law.cap * corner + (share**law.beta - corner**law.beta) / law.beta


@njit
def share_below(weight: float, law: Law) -> Any:
    """The inverse of ``weight_below``."""
    corner = law.cap ** (-1.0 / (1.0 - law.beta))
    if weight <= law.cap * corner:
        return weight / law.cap
    return ((weight - law.cap * corner) * law.beta + corner**law.beta) ** (1.0 / law.beta)


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
def _position_of(node: int, law: Law) -> Any:
    if not law.shuffled:
        return node
    return permute(node, law.class_starts[-1], key_of(law.key, _PERMUTATION), True)


@njit
def _node_at(position: int, law: Law) -> Any:
    if not law.shuffled:
        return position
    return permute(position, law.class_starts[-1], key_of(law.key, _PERMUTATION), False)


@njit
def fill_degrees(out: Any, first: int, law: Law) -> Any:
    """Out-degrees of nodes first..first+R-1; returns their sum."""
    mean_weight = weight_below(1.0, law)
    degree_key = key_of(law.key, _DEGREE)
    total = 0
    for index in range(out.size):
        position = _position_of(first + index, law)
        own = _class_of(position, law.class_starts)
        size = law.class_starts[own + 1] - law.class_starts[own]
        rank = position - law.class_starts[own]
        weight = size * (weight_below((rank + 1) / size, law) - weight_below(rank / size, law))
        mean = law.half_degree * (1.0 + weight / mean_weight)
        out[index] = max(1, poisson(mean, key_of(degree_key, first + index)))
        total += out[index]
    return total


@njit
def fill_edges(drawers: Any, drawn: Any, degrees: Any, first: int, law: Law) -> None:
    """All edges that nodes first..first+R-1 draw, node by node."""
    starts = law.class_starts
    num_nodes = starts[-1]
    mean_weight = weight_below(1.0, law)
    edge_key = key_of(law.key, _EDGE)
    edge = 0
    for index in range(degrees.size):
        own = _class_of(_position_of(first + index, law), starts)
        node_key = key_of(edge_key, first + index)
        for counter in range(degrees[index]):
            chosen = own
            choice = uniform(number(node_key, np.uint64(2 * counter)))
            if choice >= law.p_in:
                anywhere = int((choice - law.p_in) / (1.0 - law.p_in) * num_nodes)
                chosen = _class_of(min(anywhere, num_nodes - 1), starts)
            size = starts[chosen + 1] - starts[chosen]
            weight = uniform(number(node_key, np.uint64(2 * counter + 1))) * mean_weight
            rank = min(int(share_below(weight, law) * size), size - 1)
            drawers[edge] = first + index
            drawn[edge] = _node_at(starts[chosen] + rank, law)
            edge += 1


@njit
def fill_features(out_rd: Any, first: int, law: Law, layers_x: Any, layers_y: Any) -> None:
    """Rows ``signal * center of the class + N(0, 1)`` of nodes first..first+R-1."""
    rows, dim = out_rd.shape
    num_classes = law.class_starts.size - 1
    centers_kd = np.empty((num_classes, dim), np.float32)
    center_key = key_of(law.key, _CENTER)
    for own in range(num_classes):
        for column in range(dim):
            bits = number(key_of(center_key, own), np.uint64(column))
            centers_kd[own, column] = law.signal * normal(bits, layers_x, layers_y)
    feature_key = key_of(law.key, _FEATURE)
    for index in range(rows):
        own = _class_of(_position_of(first + index, law), law.class_starts)
        row_key = key_of(feature_key, first + index)
        for column in range(dim):
            noise = normal(number(row_key, np.uint64(column)), layers_x, layers_y)
            out_rd[index, column] = centers_kd[own, column] + np.float32(noise)


@njit
def fill_labels(out: Any, first: int, law: Law) -> None:
    """Classes of nodes first..first+R-1, a share ``label_noise`` replaced by another class."""
    num_classes = law.class_starts.size - 1
    label_key = key_of(law.key, _LABEL)
    for index in range(out.size):
        out[index] = _class_of(_position_of(first + index, law), law.class_starts)
        node_key = key_of(label_key, first + index)
        if num_classes > 1 and uniform(number(node_key, np.uint64(0))) < law.label_noise:
            step = 1 + int(uniform(number(node_key, np.uint64(1))) * (num_classes - 1))
            out[index] = (out[index] + step) % num_classes


@njit
def fill_permuted(out: Any, first: int, size: int, key: Any) -> None:
    """Images of places first..first+R-1 under a random permutation of 0..size-1."""
    for index in range(out.size):
        out[index] = permute(first + index, size, key, False)
