"""Orders of MariusGNN's partition buffer: their defining properties, and their laws."""

import itertools

import numpy as np
import pytest
from benchmarks.gnn.systems import (
    assign_buckets,
    assign_training_nodes,
    beta_states,
    comet_states,
    dispersed_states,
    partition_rows,
    sequential_states,
    training_first_order,
)
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError


def differ_in_one(states):
    return all(len(set(a) - set(b)) == 1 for a, b in itertools.pairwise(s.tolist() for s in states))


@given(p=st.integers(2, 12), c=st.integers(2, 12), seed=st.integers(0, 99))
def test_beta_brings_every_pair_together(p, c, seed):
    c = min(c, p)
    states = beta_states(p, c, seed=seed)
    met = {pair for state in states for pair in itertools.combinations(sorted(state.tolist()), 2)}
    assert met == set(itertools.combinations(range(p), 2))
    assert all(len(set(state.tolist())) == c for state in states)
    assert differ_in_one(states)


def test_beta_has_the_published_number_of_swaps():
    # Each round passes what is on disk (d) through one slot and replaces min(c - 1, d) others.
    for p, c in [(8, 2), (16, 4), (33, 5)]:
        swaps, on_disk = 0, p - c
        while on_disk > 0:
            replaced = min(c - 1, on_disk)
            swaps += on_disk + replaced
            on_disk -= replaced
        assert len(beta_states(p, c, seed=1)) == swaps + 1


def test_comet_regroups_for_each_seed_and_all_pairs_meet():
    first, second = (comet_states(12, 6, num_groups=4, seed=seed) for seed in (0, 1))
    for states in (first, second):
        met = {pair for s in states for pair in itertools.combinations(sorted(s.tolist()), 2)}
        assert met == set(itertools.combinations(range(12), 2))
        assert all(len(set(state.tolist())) == 6 for state in states)
    assert {frozenset(s.tolist()) for s in first} != {frozenset(s.tolist()) for s in second}


def test_dispersed_admits_each_partition_once():
    states = dispersed_states(9, 3, seed=5)
    assert len(states) == 7
    assert differ_in_one(states)
    assert set(np.concatenate(states).tolist()) == set(range(9))


def test_sequential_holds_the_training_partitions_and_other_random_ones():
    seen = [sequential_states(10, 4, train_partitions=2, seed=s)[0].tolist() for s in range(40)]
    assert all(state[:2] == [0, 1] and len(set(state)) == 4 for state in seen)
    assert {p for state in seen for p in state[2:]} == set(range(2, 10))
    with pytest.raises(ConfigurationError, match="dispersed"):
        sequential_states(10, 4, train_partitions=5, seed=0)


def test_buckets_go_uniformly_to_states_that_hold_both_partitions():
    states = beta_states(6, 3, seed=0)
    draws = np.stack([assign_buckets(states, 6, seed=s) for s in range(600)])
    for i, j in itertools.product(range(6), repeat=2):
        holders = [n for n, s in enumerate(states) if i in s and j in s]
        counts = np.array([(draws[:, i, j] == n).sum() for n in holders])
        assert counts.sum() == 600
        expected = 600 / len(holders)
        # Chi-square with up to 13 degrees of freedom: 40 is beyond one in 10,000.
        assert ((counts - expected) ** 2 / expected).sum() < 40


def test_training_nodes_go_to_states_that_hold_them():
    states = dispersed_states(8, 3, seed=2)
    partition = np.repeat(np.arange(8), 500)
    chosen = assign_training_nodes(states, partition, num_partitions=8, seed=0)
    for state, where in zip(chosen, partition, strict=True):
        assert where in states[state]
    for p in range(8):
        holders = [n for n, s in enumerate(states) if p in s]
        counts = np.bincount(chosen[partition == p], minlength=len(states))[holders]
        assert ((counts - 500 / len(holders)) ** 2 / (500 / len(holders))).sum() < 30
    with pytest.raises(ConfigurationError, match="no state"):
        assign_training_nodes(states[:1], partition, num_partitions=8, seed=0)


@pytest.mark.parametrize("seed", [None, 0])
def test_training_nodes_are_numbered_first(seed):
    train = np.array([7, 2, 4])
    order = training_first_order(10, train, seed=seed)
    assert sorted(order.tolist()) == list(range(10))
    assert set(order[:3].tolist()) == {2, 4, 7}


@pytest.mark.parametrize(
    "call",
    [
        lambda: partition_rows(5, 0),
        lambda: beta_states(4, 1, seed=0),
        lambda: dispersed_states(3, 4, seed=0),
        lambda: comet_states(8, 4, num_groups=3, seed=0),
        lambda: comet_states(8, 4, num_groups=0, seed=0),
    ],
)
def test_impossible_counts_are_refused(call):
    with pytest.raises(ConfigurationError):
        call()


def test_one_partition_and_a_buffer_of_everything():
    assert [s.tolist() for s in beta_states(1, 1, seed=0)] == [[0]]
    assert len(dispersed_states(4, 4, seed=0)) == 1
    assert partition_rows(0, 3) == 1
