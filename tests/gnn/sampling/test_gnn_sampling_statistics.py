"""The samples have the distribution that they should: chi-square tests with fixed seeds."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fivefold.gnn.sampling import Adjacency, NeighborSampler
from fivefold.gnn.sampling.batches import epoch_batches, mix, stream_key
from fivefold.gnn.sampling.kernels import mix_bits
from oracles.neighbor_sampling import below, draw_bits, exponential

DRAWS = 4000


def star(degree, copies, weights=None):
    """``copies`` centres, each with the same ``degree`` leaves."""
    indptr = [*range(0, copies * degree + 1, degree), *[copies * degree] * degree]
    leaves = np.tile(np.arange(copies, copies + degree), copies)
    return Adjacency(indptr, leaves, None if weights is None else np.tile(weights, copies))


def subsets(topology, fanout, *, copies, epoch=0, seed=0):
    """The chosen leaves of each centre, as rows."""
    sampler = NeighborSampler(topology, [fanout], seed=seed, edge_ids=True)
    batch = sampler.sample(range(copies), epoch=epoch, batch=0)
    return (topology.indices[batch.edge_ids] - copies).reshape(copies, fanout)


def p_value(rows, probabilities):
    """Chi-square of the chosen sets against their probabilities."""
    counts = dict.fromkeys(probabilities, 0)
    for row in rows.tolist():
        counts[frozenset(row)] += 1
    expected = np.array(list(probabilities.values())) * len(rows)
    return stats.chisquare(list(counts.values()), expected).pvalue


@pytest.mark.parametrize(("degree", "fanout"), [(6, 3), (7, 1), (5, 4)])
def test_every_set_of_neighbours_is_equally_likely(degree, fanout):
    rows = subsets(star(degree, DRAWS), fanout, copies=DRAWS)
    sets = [frozenset(pick) for pick in itertools.combinations(range(degree), fanout)]
    assert p_value(rows, dict.fromkeys(sets, 1 / len(sets))) > 1e-3


@pytest.mark.parametrize("fanout", [10, 60])  # the scan and the bitmap
def test_inclusion_is_uniform_for_wide_fanouts(fanout):
    rows = subsets(star(100, 1000), fanout, copies=1000)
    counts = np.bincount(rows.reshape(-1), minlength=100)
    # Draws without replacement vary less than the multinomial, by (1 - fanout / degree).
    statistic = ((counts - 10 * fanout) ** 2 / (10 * fanout)).sum() / (1 - fanout / 100)
    assert 1e-3 < stats.chi2.sf(statistic, 99) < 1 - 1e-3


def weighted_probabilities(weights, fanout):
    """Exact probabilities of sets under successive draws in proportion to the weights."""
    exact = {}
    for order in itertools.permutations(range(len(weights)), fanout):
        rest, probability = sum(weights), 1.0
        for pick in order:
            probability *= weights[pick] / rest
            rest -= weights[pick]
        exact[frozenset(order)] = exact.get(frozenset(order), 0.0) + probability
    return {pick: probability for pick, probability in exact.items() if probability}


@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1], [1, 2, 3, 4], [10, 1, 0.1, 5], [3, 0, 1, 2]])
@pytest.mark.parametrize("fanout", [1, 2])
def test_weighted_sets_have_their_exact_probabilities(weights, fanout):
    topology = star(len(weights), DRAWS, np.array(weights, np.float32))
    rows = subsets(topology, fanout, copies=DRAWS)
    assert p_value(rows, weighted_probabilities(weights, fanout)) > 1e-3


def test_epochs_batches_hops_and_seeds_are_independent():
    topology = star(4, DRAWS)
    first = subsets(topology, 1, copies=DRAWS)[:, 0]
    for other in (
        subsets(topology, 1, copies=DRAWS, epoch=1)[:, 0],
        subsets(topology, 1, copies=DRAWS, seed=1)[:, 0],
        np.roll(first, 1),
    ):
        table = np.histogram2d(first, other, bins=4)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_hops_of_one_node_are_independent():
    picks = [
        [below(draw_bits(stream_key(0, epoch, 0, hop), 5, 0), 4) for hop in range(2)]
        for epoch in range(DRAWS)
    ]
    table = np.histogram2d(*np.array(picks).T, bins=4)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_draws_are_uniform_and_keys_differ():
    bits = np.array([draw_bits(stream_key(1, 2, 3), node, 0) >> 56 for node in range(20_000)])
    assert stats.chisquare(np.bincount(bits, minlength=256)).pvalue > 1e-3
    keys = {stream_key(*parts) for parts in itertools.product(range(6), repeat=4)}
    assert len(keys) == 6**4
    assert stream_key(1, 2) != stream_key(2, 1)


def test_the_hash_is_the_published_one():
    # The first outputs of SplitMix64 with seed 1234567, from its authors' reference code.
    golden = 0x9E3779B97F4A7C15
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = [mix(1234567 + step * golden) for step in (1, 2, 3)]
    assert found == expected
    values = np.array([(1234567 + step * golden) % 2**64 for step in (1, 2, 3)], np.uint64)
    assert mix_bits(values).tolist() == expected


def test_the_logarithm_is_right_to_the_last_places():
    values = [0, 1, 2**64 - 1, 2**63, *(mix(i) for i in range(5000))]
    values += [value >> shift for value in values for shift in (20, 40, 52)]
    for bits in values:
        exact = -math.log(((bits >> 11) + 1) / 2**53)
        assert exponential(bits) == pytest.approx(exact, rel=5e-16, abs=1e-17)


def test_every_training_node_is_in_one_batch():
    ids = np.random.default_rng(0).permutation(10_000)[:1234]
    batches = epoch_batches(ids, batch_size=100, seed=5, epoch=0)
    assert [len(batch) for batch in batches] == [100] * 12 + [34]
    assert sorted(np.concatenate(batches)) == sorted(ids)
    assert all(batch.dtype == np.int64 for batch in batches)


def test_batches_are_shuffled_anew_each_epoch():
    orders = [
        np.concatenate(epoch_batches(np.arange(2000), batch_size=7, seed=seed, epoch=epoch))
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    for left, right in itertools.combinations([np.arange(2000), *orders], 2):
        assert abs(stats.spearmanr(left, right).statistic) < 0.08


def test_the_order_of_an_epoch_never_changes():
    assert [batch.tolist() for batch in epoch_batches(range(8), batch_size=5, seed=1, epoch=2)] == [
        [6, 7, 3, 4, 1],
        [5, 2, 0],
    ]


def test_small_epochs():
    assert epoch_batches([], batch_size=3, seed=0, epoch=0) == []
    assert epoch_batches([9], batch_size=3, seed=0, epoch=0)[0].tolist() == [9]
    assert len(epoch_batches(range(6), batch_size=3, seed=0, epoch=0)) == 2


@pytest.mark.parametrize(
    ("ids", "batch_size", "message"),
    [([1, 2, 1], 2, "node 1 more than once"), ([1], 0, "batch_size"), ([1.5], 1, "train_ids")],
)
def test_wrong_epochs_are_refused(ids, batch_size, message):
    with pytest.raises(ValueError, match=message):
        epoch_batches(ids, batch_size=batch_size, seed=0, epoch=0)
