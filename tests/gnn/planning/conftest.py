"""Batches, disks and slow references for the tests of planning."""

import numpy as np
import pytest

from fivefold.gnn.planning import BatchList


class Disk:
    """A disk of so many requests and bytes per second, the two adding up."""

    def __init__(self, requests_per_s=70e3, bytes_per_s=1.2e9):
        self.requests_per_s = requests_per_s
        self.sequential_read_bytes_per_s = bytes_per_s
        self.sequential_write_bytes_per_s = bytes_per_s

    def seconds(self, requests, size_bytes):
        return requests / self.requests_per_s + size_bytes / self.sequential_read_bytes_per_s


@pytest.fixture(scope="session")
def disk():
    return Disk()


@pytest.fixture(scope="session")
def make_batches():
    return random_batches


def random_batches(seed, *, num_nodes, num_batches, share=0.5, skew=2.0):
    """Batches of different sizes; low ids are in many of them where ``skew`` is large."""
    generator = np.random.default_rng(seed)
    popularity = generator.random(num_nodes) ** skew
    batches = []
    for _ in range(num_batches):
        chosen = np.flatnonzero(generator.random(num_nodes) < share * popularity)
        batches.append(generator.permutation(chosen))
    return BatchList(batches, num_nodes=num_nodes)
