"""LRU and SIEVE against plain Python references."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading.rows import OnlineCache

traces = st.lists(st.lists(st.integers(0, 9), unique=True, max_size=7), max_size=12)


class PlainLru:
    def __init__(self, size):
        self.size, self.order = size, OrderedDict()

    def batch(self, ids):
        hits = [i for i in ids if i in self.order]
        for i in hits:
            self.order.move_to_end(i)
        for i in ids:
            if i not in hits and self.size:
                if len(self.order) == self.size:
                    self.order.popitem(last=False)
                self.order[i] = True
        return hits

    def content(self):
        return set(self.order)


class PlainSieve:
    """The queue as a list, newest first, as in the paper's pseudo-code."""

    def __init__(self, size):
        self.size, self.queue, self.visited, self.hand = size, [], {}, None

    def evict(self):
        at = len(self.queue) - 1 if self.hand is None else self.queue.index(self.hand)
        while self.visited[self.queue[at]]:
            self.visited[self.queue[at]] = False
            at = at - 1 if at > 0 else len(self.queue) - 1
        self.hand = self.queue[at - 1] if at > 0 else None
        del self.visited[self.queue.pop(at)]

    def batch(self, ids):
        hits = [i for i in ids if i in self.visited]
        for i in hits:
            self.visited[i] = True
        for i in ids:
            if i not in hits and self.size:
                if len(self.queue) == self.size:
                    self.evict()
                self.queue.insert(0, i)
                self.visited[i] = False
        return hits

    def content(self):
        return set(self.queue)


@given(trace=traces, size=st.integers(0, 6), policy=st.sampled_from(["lru", "sieve"]))
def test_same_hits_and_content_as_the_plain_cache(trace, size, policy):
    plain = {"lru": PlainLru, "sieve": PlainSieve}[policy](size)
    cache = OnlineCache(10, num_slots=size, policy=policy)
    for batch in trace:
        ids = np.array(batch, np.int64)
        slots = cache.lookup(ids)
        assert ids[slots >= 0].tolist() == plain.batch(batch)
        cache.admit(ids[slots < 0])
        held = cache._slot_of[np.arange(10)]
        assert set(np.flatnonzero(held >= 0).tolist()) == plain.content()


def test_slots_lead_to_the_rows_that_were_put_there():
    draw = np.random.default_rng(0)
    cache, rows = OnlineCache(100, num_slots=20, policy="sieve"), np.full(20, -1)
    for _ in range(200):
        ids = draw.choice(100, 30, replace=False)
        slots = cache.lookup(ids)
        hit = slots >= 0
        assert (rows[slots[hit]] == ids[hit]).all()
        entered = cache.admit(ids[~hit])
        rows[entered[entered >= 0]] = ids[~hit][entered >= 0]
        assert len(np.unique(entered[entered >= 0])) == np.count_nonzero(entered >= 0) <= 20


def test_what_is_not_allowed_is_refused():
    with pytest.raises(ConfigurationError, match="lru"):
        OnlineCache(3, num_slots=1, policy="fifo")
    with pytest.raises(ConfigurationError, match="negative"):
        OnlineCache(3, num_slots=-1)
