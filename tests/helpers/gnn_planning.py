"""What a plan is made from, in memory: batches, features and a disk without files."""

import hashlib
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class Batches:
    """Batches as a list, with what planning asks of a sample file."""

    num_epochs, nbytes = 1, 0

    def __init__(self, batches, *, num_nodes, path=Path("nowhere/samples.fvf")):
        self._batches = [np.asarray(batch, np.int64) for batch in batches]
        self.num_batches, self.num_nodes, self.path = len(self._batches), num_nodes, path
        digest = hashlib.sha256(repr([ids.tolist() for ids in self._batches]).encode())
        self.fingerprint = digest.hexdigest()[:32]

    @cached_property
    def counts(self):
        counts = np.zeros(self.num_nodes, np.uint32)
        for ids in self._batches:
            counts[ids] += np.uint32(1)
        return counts

    def node_ids(self, batch):
        return self._batches[batch]

    def num_nodes_of(self, batch):
        return len(self._batches[batch])

    def record_bytes_of(self, batch):
        return 4 * len(self._batches[batch])


def features_of(num_nodes, row_bytes, fingerprint="f"):
    """Return what planning asks of the features' container."""
    rows = SimpleNamespace(num_rows=num_nodes, row_bytes=row_bytes)
    return SimpleNamespace(section=lambda _name: rows, fingerprint=fingerprint)


class Disk:
    """A disk of so many requests and bytes per second, the two adding up."""

    def __init__(self, requests_per_s=1e5, bytes_per_s=1e9):
        self.requests_per_s = requests_per_s
        self.sequential_read_bytes_per_s = bytes_per_s
        self.sequential_write_bytes_per_s = bytes_per_s

    def seconds(self, requests, size_bytes):
        return requests / self.requests_per_s + size_bytes / self.sequential_read_bytes_per_s
