"""Texts as rows of numbers: a hashed bag of words.

Every word is hashed to one of D columns and a sign; a text's row is the signed sum of its words'
weights, the logarithm of how rare they are, scaled to a mean square of one (Weinberger et al.,
arXiv 0902.2206). Rows of texts without words are zero.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.data._array_source import ArraySource
from fivefold.gnn.data._rows import ArrayRows

_WORD = re.compile(r"[a-z][a-z0-9+]+")


def hashed_words(texts: Sequence[str], dim: int) -> NDArray[np.float32]:
    """One row per text.

    Args:
        texts: The texts.
        dim: Elements of a row.

    Returns:
        ``[len(texts), dim]``.

    Raises:
        ConfigurationError: ``dim`` is not positive.
    """
    if dim < 1:
        raise ConfigurationError(f"dim is {dim}", hint="use 1 or more")
    words = [Counter(_WORD.findall(text.lower())) for text in texts]
    frequency = Counter(word for bag in words for word in bag)
    places = {word: _place(word, dim) for word in frequency}
    rows = np.zeros((len(texts), dim), np.float32)
    for row, bag in zip(rows, words, strict=True):
        for word, count in bag.items():
            column, sign = places[word]
            row[column] += sign * count * math.log(len(texts) / frequency[word] + 1.0)
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    scale = np.divide(math.sqrt(dim), size, out=np.zeros_like(size), where=size > 0)
    return np.asarray(rows * scale, np.float32)


def _place(word: str, dim: int) -> tuple[int, float]:
    value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return (value >> 1) % dim, 1.0 if value & 1 else -1.0


def random_splits(num_nodes: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """60 % of the nodes for training, 20 % for validation, 20 % for the test."""
    order = np.random.default_rng(seed).permutation(num_nodes)
    first, second = round(0.6 * num_nodes), round(0.8 * num_nodes)
    parts = {"train": order[:first], "valid": order[first:second], "test": order[second:]}
    return {name: np.sort(ids) for name, ids in parts.items()}


def text_source(
    name: str,
    texts: Sequence[str],
    edges: Sequence[tuple[int, int]],
    labels: Sequence[str],
    *,
    dim: int,
    seed: int,
) -> ArraySource:
    """A source over nodes that are texts, small enough for memory.

    Args:
        name: For people.
        texts: Of each node.
        edges: Pairs (source, target).
        labels: Name of each node's class; empty where unknown.
        dim: Elements of a feature row.
        seed: Of the splits.

    Returns:
        The source; classes are numbered in alphabetical order.
    """
    classes = {label: number for number, label in enumerate(sorted(set(labels) - {""}))}
    numbers = np.array([classes.get(label, -1) for label in labels], np.int64)
    return ArraySource(
        name=name,
        edge_rows=ArrayRows(np.ascontiguousarray(np.array(edges, np.int64).reshape(-1, 2).T)),
        feature_rows=ArrayRows(hashed_words(texts, dim)),
        label_rows=ArrayRows(numbers),
        split_rows={k: ArrayRows(v) for k, v in random_splits(len(texts), seed).items()},
        class_names=list(classes),
        kind=name,
    )
