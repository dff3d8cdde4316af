"""Batches, disks and slow references for the tests of planning."""

from collections import OrderedDict

import numpy as np
import pytest

from helpers.gnn_planning import Batches, Disk


@pytest.fixture(scope="session")
def disk():
    return Disk(requests_per_s=70e3, bytes_per_s=1.2e9)


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
    return Batches(batches, num_nodes=num_nodes)


@pytest.fixture(scope="session")
def lru_misses():
    return misses_of_the_least_recently_used


def misses_of_the_least_recently_used(batches, num_rows):
    """Misses of each batch when the least recently used row gives way; ids one after another."""
    content, misses = OrderedDict(), []
    for ids in batches:
        misses.append(0)
        for node in ids.tolist():
            if node in content:
                content.move_to_end(node)
                continue
            misses[-1] += 1
            content[node] = True
            if len(content) > num_rows:
                content.popitem(last=False)
    return misses


@pytest.fixture(scope="session")
def extents_of():
    return page_extents


def page_extents(starts, counts, *, row_bytes, max_gap_bytes=0):
    """First page and the page after the last of each extent, from the set of all pages touched."""
    pages = {
        page
        for start, count in zip(starts, counts, strict=True)
        if count
        for page in range(start * row_bytes // 4096, -(-(start + count) * row_bytes // 4096))
    }
    extents = []
    for page in sorted(pages):
        if extents and page - extents[-1][1] <= max_gap_bytes // 4096:
            extents[-1][1] = page + 1
        else:
            extents.append([page, page + 1])
    return np.array(extents, np.int64).reshape(-1, 2).T
