"""Data sets as plain arrays, to compare with what went in."""

import os

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def edges_in(topology):
    """(sources, targets) in stored order."""
    targets = np.repeat(np.arange(topology.num_nodes), np.diff(topology.indptr))
    return np.asarray(topology.indices), targets


def stable_csr(sources, targets, num_nodes):
    """The obviously right result: a stable sort by target."""
    order = np.argsort(targets, kind="stable")
    counts = np.bincount(targets, minlength=num_nodes)
    return np.concatenate([[0], np.cumsum(counts)]), np.asarray(sources)[order], order


@pytest.fixture
def random_graph():
    rng = np.random.default_rng(7)
    num_nodes, num_edges = 300, 4000
    return {
        "sources": rng.integers(0, num_nodes, num_edges),
        "targets": (num_nodes * rng.random(num_edges) ** 3).astype(np.int64),
        "features": rng.standard_normal((num_nodes, 5)).astype(np.float32),
        "labels": rng.integers(0, 4, num_nodes),
        "weights": rng.random(num_edges).astype(np.float32),
        "num_nodes": num_nodes,
    }


@pytest.fixture
def as_edges():
    return edges_in


@pytest.fixture
def expected_csr():
    return stable_csr
