"""Ginex's change sets against a brute-force optimum over all cache contents."""

import itertools

import numpy as np
import pytest
from benchmarks.gnn.systems import belady_change_sets
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from helpers.night import by_day

batches_of_small_ids = st.lists(
    st.lists(st.integers(0, 6), unique=True, max_size=5), min_size=0, max_size=6
)


def replay(sets, batches):
    """Follow the change sets literally; misses per batch."""
    cache, misses = set(sets.initial.tolist()), []
    for ids, change in zip(batches, sets.after, strict=True):
        misses.append(len(set(ids) - cache))
        assert [ids[p] for p in change.positions] == change.admitted.tolist()
        assert set(change.evicted.tolist()) <= cache
        assert not set(change.admitted.tolist()) & cache
        cache = (cache - set(change.evicted.tolist())) | set(change.admitted.tolist())
    return misses, cache if batches else set()


def fewest_misses(batches, initial, num_slots):
    """Try every possible content after every batch."""
    states = {frozenset(initial): 0}
    for ids in batches:
        following = {}
        for cache, misses in states.items():
            total = misses + len(set(ids) - cache)
            candidates = cache | set(ids)
            size = min(num_slots, len(candidates))
            for kept in itertools.combinations(sorted(candidates), size):
                key = frozenset(kept)
                following[key] = min(following.get(key, total), total)
        states = following
    return min(states.values())


@pytest.mark.slow
@by_day(20)
@given(batches=batches_of_small_ids, num_slots=st.integers(0, 5))
def test_no_other_cache_has_fewer_misses(batches, num_slots):
    arrays = [np.array(ids, np.int64) for ids in batches]
    sets = belady_change_sets(arrays, num_ids=7, num_slots=num_slots)
    misses, cache = replay(sets, batches)
    assert misses == sets.num_misses.tolist()
    assert len(cache) <= num_slots
    assert sum(misses) == fewest_misses(batches, sets.initial.tolist(), num_slots)


def test_the_initial_cache_is_the_first_ids_in_order_of_access():
    batches = [np.array([5, 2]), np.array([2, 0]), np.array([1])]
    assert belady_change_sets(batches, num_ids=6, num_slots=3).initial.tolist() == [5, 2, 0]


def test_a_long_random_trace_never_exceeds_the_cache_and_ends_with_nothing_useful():
    draw = np.random.default_rng(3)
    batches = [draw.choice(500, 80, replace=False) for _ in range(60)]
    sets = belady_change_sets(batches, num_ids=500, num_slots=100)
    cache = set(sets.initial.tolist())
    for ids, change, misses in zip(batches, sets.after, sets.num_misses, strict=True):
        assert len(set(ids.tolist()) - cache) == misses
        cache = (cache - set(change.evicted.tolist())) | set(change.admitted.tolist())
        assert len(cache) == 100
    static = np.argsort(-np.bincount(np.concatenate(batches), minlength=500))[:100]
    assert sets.num_misses.sum() < sum(len(np.setdiff1d(ids, static)) for ids in batches)


@pytest.mark.parametrize("num_slots", [0, 7, 100])
def test_cache_of_nothing_and_of_everything(num_slots):
    batches = [np.arange(7), np.arange(3, 7)]
    sets = belady_change_sets(batches, num_ids=7, num_slots=num_slots)
    assert sets.num_misses.tolist() == ([7, 4] if num_slots == 0 else [0, 0])
    assert all(len(change.evicted) == 0 for change in sets.after)


def test_too_many_batches_are_refused():
    with pytest.raises(ConfigurationError, match="super-batch"):
        belady_change_sets([np.array([0])] * 32768, num_ids=1, num_slots=1)
