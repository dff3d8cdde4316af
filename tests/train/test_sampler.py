"""Sharding: disjoint, complete, deterministic, resumable, and well mixed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.train.sampler import ShardedSampler, gather_batch, sequential_starts

shapes = st.fixed_dictionaries(
    {
        "sequence_length": st.integers(1, 20),
        "batch_size": st.integers(1, 5),
        "world_size": st.integers(1, 5),
        "seed": st.integers(0, 2**63 - 1),
    }
)


def make_samplers(num_tokens, shape):
    return [ShardedSampler(num_tokens, rank=rank, **shape) for rank in range(shape["world_size"])]


def epoch_starts(samplers, epoch):
    steps = samplers[0].steps_per_epoch
    return np.concatenate(
        [
            s.batch_starts(step)
            for step in range(epoch * steps, (epoch + 1) * steps)
            for s in samplers
        ]
    )


@settings(deadline=None)
@given(shape=shapes, spare=st.integers(0, 400), epoch=st.integers(0, 3))
def test_an_epoch_reads_disjoint_windows_inside_the_tokens(shape, spare, epoch):
    length = shape["sequence_length"]
    num_tokens = (shape["batch_size"] * shape["world_size"] + 1) * length + spare
    samplers = make_samplers(num_tokens, shape)
    starts = epoch_starts(samplers, epoch)
    assert starts.dtype == np.int64
    assert starts.min() >= 0
    assert starts.max() + length + 1 <= num_tokens
    assert np.unique(starts).size == starts.size
    assert np.unique(starts % length).size == 1  # one grid, so different starts cannot overlap
    # Complete but for the documented tail, which is smaller than one step of all ranks.
    left_out = samplers[0].windows_per_epoch - starts.size
    assert 0 <= left_out < shape["batch_size"] * shape["world_size"]
    assert samplers[0].windows_per_epoch == (num_tokens - length) // length


@settings(deadline=None)
@given(shape=shapes, steps=st.lists(st.integers(0, 10**12), min_size=1, max_size=5))
def test_a_batch_follows_from_seed_step_and_rank_alone(shape, steps):
    first, second = (make_samplers(2000, shape)[-1] for _ in range(2))
    expected = [first.batch_starts(step) for step in steps]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator must not matter
    torch.manual_seed(1)
    for step, starts in reversed(list(zip(steps, expected, strict=True))):
        np.testing.assert_array_equal(second.batch_starts(step), starts)


def test_the_order_is_the_same_on_every_platform_and_version():
    sampler = ShardedSampler(10_000, sequence_length=7, batch_size=4, rank=1, world_size=2, seed=42)
    assert [sampler.batch_starts(step).tolist() for step in (0, 1, 1000)] == RECORDED


def test_epochs_and_seeds_differ_in_order_and_in_offset():
    shape = {"sequence_length": 16, "batch_size": 4, "world_size": 1}
    runs = [make_samplers(16_016, {**shape, "seed": seed})[0] for seed in range(20)]
    epochs = [epoch_starts([run], epoch) for run in runs for epoch in (0, 1)]
    offsets = {int(starts[0] % 16) for starts in epochs}
    assert len(offsets) > 10  # of 16, in 40 draws
    windows = [tuple(starts // 16) for starts in epochs]
    assert len(set(windows)) == 40


@pytest.mark.parametrize("windows", [2, 3, 5, 17, 64, 65])
def test_every_window_is_as_likely_at_every_place(windows):
    draws = 2000
    counts = np.zeros((windows, windows))
    for seed in range(draws):
        sampler = ShardedSampler(
            windows + 1, sequence_length=1, batch_size=windows, rank=0, world_size=1, seed=seed
        )
        counts[np.arange(windows), sampler.batch_starts(0)] += 1
    expected = draws / windows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (windows - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_in_the_order_are_not_neighbours_in_the_text():
    sampler = ShardedSampler(
        100_001, sequence_length=1, batch_size=100_000, rank=0, world_size=1, seed=0
    )
    order = sampler.batch_starts(0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02


def test_ranks_read_what_one_rank_with_their_whole_batch_reads():
    shape = {"sequence_length": 8, "seed": 3}
    alone = ShardedSampler(5000, batch_size=12, rank=0, world_size=1, **shape)
    four = [ShardedSampler(5000, batch_size=3, rank=r, world_size=4, **shape) for r in range(4)]
    for step in (0, 7, 100):
        together = np.concatenate([sampler.batch_starts(step) for sampler in four])
        np.testing.assert_array_equal(together, alone.batch_starts(step))


def test_too_few_tokens_says_how_many_are_needed():
    shape = {"sequence_length": 10, "batch_size": 4, "rank": 0, "world_size": 2, "seed": 0}
    with pytest.raises(DataError, match=r"89 training tokens are too few .* needs 90"):
        ShardedSampler(89, **shape)
    assert ShardedSampler(90, **shape).steps_per_epoch == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2},
        {"rank": -1},
        {"rank": 0.5},
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"sequence_length": 0},
        {"world_size": "2"},
        {"seed": "0"},
    ],
)
def test_numbers_out_of_range_are_errors(wrong):
    shape = {"sequence_length": 4, "batch_size": 1, "rank": 0, "world_size": 2, "seed": 0}
    with pytest.raises(ConfigurationError):
        ShardedSampler(1000, **(shape | wrong))


def test_a_negative_step_is_an_error():
    sampler = ShardedSampler(100, sequence_length=4, batch_size=1, rank=0, world_size=1, seed=0)
    with pytest.raises(ConfigurationError, match="-1"):
        sampler.batch_starts(-1)


@given(
    num_tokens=st.integers(8, 500),
    sequence_length=st.integers(1, 7),
    batch_size=st.integers(1, 5),
    num_batches=st.integers(1, 6),
    world_size=st.integers(1, 5),
)
def test_validation_windows_are_fixed_disjoint_and_independent_of_the_ranks(
    num_tokens, sequence_length, batch_size, num_batches, world_size
):
    def starts(rank, ranks):
        return sequential_starts(
            num_tokens,
            sequence_length=sequence_length,
            batch_size=batch_size,
            num_batches=num_batches,
            rank=rank,
            world_size=ranks,
        )

    alone = np.concatenate(starts(0, 1))
    shared = [batch for rank in range(world_size) for batch in starts(rank, world_size)]
    assert sorted(np.concatenate(shared)) == alone.tolist()
    assert all(0 < len(batch) <= batch_size for batch in shared)
    available = (num_tokens - 1) // sequence_length
    assert alone.size == min(available, num_batches * batch_size)
    assert (np.diff(alone) >= sequence_length).all()
    assert alone[-1] + sequence_length + 1 <= num_tokens


def test_validation_covers_the_whole_text_and_not_its_beginning():
    (starts,) = sequential_starts(
        10_001, sequence_length=10, batch_size=10, num_batches=1, rank=0, world_size=1
    )
    assert starts.tolist() == list(range(0, 10_000, 1000))


def test_too_few_validation_tokens_is_an_error():
    with pytest.raises(DataError, match="5 validation tokens"):
        sequential_starts(5, sequence_length=5, batch_size=1, num_batches=1, rank=0, world_size=1)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_targets_are_the_next_tokens(dtype):
    tokens = (np.arange(50) * 7 % 251).astype(dtype)
    inputs, targets = gather_batch(tokens, np.array([0, 13, 41]), 8)
    assert inputs.dtype == targets.dtype == torch.int64
    for row, start in enumerate((0, 13, 41)):
        assert inputs[row].tolist() == tokens[start : start + 8].tolist()
        assert targets[row].tolist() == tokens[start + 1 : start + 9].tolist()
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


RECORDED = [[7193, 3889, 3553, 5233], [9923, 4855, 2391, 2153], [4806, 6276, 4246, 6157]]
