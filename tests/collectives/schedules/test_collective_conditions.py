"""Collectives: numbering, conditions, sizes, buffers, inverses, and what is refused."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives import schedules
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.errors import ConfigurationError

RANKS = st.integers(1, 6)


def pairs(chunks, ranks):
    return set(zip(chunks.tolist(), ranks.tolist(), strict=True))


def pre(collective):
    return pairs(collective.pre_chunks, collective.pre_ranks)


def post(collective):
    return pairs(collective.post_chunks, collective.post_ranks)


@given(n=RANKS, c=st.integers(1, 3))
def test_conditions_are_what_the_names_say(n, c):
    everywhere = {(chunk, rank) for chunk in range(n * c) for rank in range(n)}
    at_owner = {(owner * c + i, owner) for owner in range(n) for i in range(c)}
    assert (pre(schedules.all_gather(n, c)), post(schedules.all_gather(n, c))) == (
        at_owner,
        everywhere,
    )
    assert (pre(schedules.reduce_scatter(n, c)), post(schedules.reduce_scatter(n, c))) == (
        everywhere,
        at_owner,
    )
    assert pre(schedules.all_reduce(n, n * c)) == post(schedules.all_reduce(n, n * c)) == everywhere
    root = n - 1
    at_root = {(chunk, root) for chunk in range(n * c)}
    assert (
        pre(schedules.broadcast(n, n * c, root=root)),
        post(schedules.broadcast(n, n * c, root=root)),
    ) == (
        at_root,
        everywhere,
    )
    assert (
        pre(schedules.reduce(n, n * c, root=root)),
        post(schedules.reduce(n, n * c, root=root)),
    ) == (
        everywhere,
        at_root,
    )
    assert (pre(schedules.scatter(n, c, root=root)), post(schedules.scatter(n, c, root=root))) == (
        at_root,
        at_owner,
    )
    assert (pre(schedules.gather(n, c, root=root)), post(schedules.gather(n, c, root=root))) == (
        at_owner,
        at_root,
    )
    every = [(s, d, i, (s * n + d) * c + i) for s in range(n) for d in range(n) for i in range(c)]
    assert pre(schedules.all_to_all(n, c)) == {(chunk, s) for s, _, _, chunk in every}
    assert post(schedules.all_to_all(n, c)) == {(chunk, d) for _, d, _, chunk in every}


@given(name=st.sampled_from(COLLECTIVES), n=RANKS, chunks=st.integers(1, 3))
def test_the_inverse_swaps_conditions_and_inverts_back(name, n, chunks):
    collective = schedules.named_collective(name, n, chunks=chunks, root=0)
    if name == "all_reduce" and n > 1:
        with pytest.raises(ConfigurationError, match="has no inverse"):
            collective.inverted()
        return
    inverse = collective.inverted()
    assert inverse.inverted() == collective
    assert hash(inverse.inverted()) == hash(collective)
    names = {"all_gather": "reduce_scatter", "broadcast": "reduce", "scatter": "gather"}
    names |= {second: first for first, second in names.items()}
    expected = schedules.named_collective(names.get(name, name), n, chunks=chunks, root=0)
    assert inverse == expected


@given(n=RANKS, chunks=st.integers(1, 2), pieces=st.integers(1, 3))
def test_cut_finer_is_what_the_constructor_makes(n, chunks, pieces):
    for name in COLLECTIVES:
        coarse = schedules.named_collective(name, n, chunks=chunks, root=n - 1)
        fine = schedules.named_collective(name, n, chunks=chunks * pieces, root=n - 1)
        assert coarse.replicated(pieces) == fine


def test_sizes_follow_the_convention_of_each_collective():
    n, size = 4, 1200.0
    assert schedules.all_gather(n, 3).chunk_bytes(size)[0] == size / 12
    assert schedules.reduce_scatter(n, 3).chunk_bytes(size)[0] == size / 12
    assert schedules.all_reduce(n, 5).chunk_bytes(size)[0] == size / 5
    assert schedules.broadcast(n, 5).chunk_bytes(size)[0] == size / 5
    assert (
        schedules.all_to_all(n, 2).chunk_bytes(size)[0] == size / 8
    )  # one rank sends 4 x 2 chunks
    assert schedules.scatter(n, 2).chunk_bytes(size)[0] == size / 8
    assert schedules.all_gather(n).chunk_bytes(0).tolist() == [0] * n


def test_uneven_sizes_come_out_as_they_went_in():
    sizes = np.array([[0, 5, 0], [2, 0, 9], [1, 1, 1]])
    collective = schedules.all_to_allv(sizes)
    assert collective.buffer_weight == 11  # rank 1 sends most
    assert collective.chunk_bytes(11).reshape(3, 3).tolist() == sizes.tolist()
    assert collective.chunk_bytes(22).sum() == 2 * sizes.sum()
    assert pre(collective) == {(s * 3 + d, s) for s, d in zip(*np.nonzero(sizes), strict=True)}
    inverse = collective.inverted()
    assert inverse.chunk_bytes(inverse.buffer_weight).reshape(3, 3).tolist() == sizes.T.tolist()
    nothing = schedules.all_to_allv(np.zeros((2, 2)))
    assert nothing.chunk_bytes(100).tolist() == [0, 0, 0, 0]


def test_addresses_count_as_msccl_does():
    n, c = 3, 2
    chunks = np.arange(n * c)
    gathering = schedules.all_gather(n, c)
    assert gathering.input_address(chunks, chunks // c).tolist() == [0, 1, 0, 1, 0, 1]
    assert gathering.input_address(0, 1) == -1
    assert gathering.output_address(chunks, 2).tolist() == chunks.tolist()
    exchange = schedules.all_to_all(n, c)
    for s in range(n):
        for d in range(n):
            for i in range(c):
                chunk = (s * n + d) * c + i
                assert exchange.input_address(chunk, s) == d * c + i
                assert exchange.output_address(chunk, d) == s * c + i
    assert gathering.input_slots.tolist() == [2, 2, 2]
    assert gathering.output_slots.tolist() == [6, 6, 6]
    assert schedules.scatter(n, c, root=1).input_slots.tolist() == [0, 6, 0]
    assert schedules.reduce_scatter(n, c).output_address(3, 1) == 1
    assert schedules.broadcast(3, root=2).input_address(0, 0) == -1


def test_custom_collectives_may_have_several_holders():
    collective = schedules.custom_collective(3, [(1, 2), (0, 0), (0, 1)], post=[(0, 2), (1, 0)])
    assert collective.holders(0).tolist() == [0, 1]
    with pytest.raises(ConfigurationError, match="several holders"):
        collective.inverted()
    assert schedules.custom_collective(2, [], post=[]).num_chunks == 0


def test_a_collective_survives_pickling_and_is_read_only():
    collective = schedules.all_to_allv([[1, 2], [3, 4]])
    assert pickle.loads(pickle.dumps(collective)) == collective  # noqa: S301 - our own bytes
    with pytest.raises(ValueError, match="read-only"):
        collective.pre_chunks[0] = 7
    assert collective != schedules.all_gather(2)
    again = pickle.loads(pickle.dumps(schedules.all_gather(3)))  # noqa: S301 - our own bytes
    assert again.has_equal_chunks
    assert not again.pre_ranks.flags.writeable
    assert schedules.all_to_allv([[1, 1], [1, 1]]).has_equal_chunks
    assert collective != "all_to_allv"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedules.all_gather(0), "num_ranks must be .*; got 0"),
        (lambda: schedules.all_gather(2, 0), "chunks_per_rank must be .*; got 0"),
        (lambda: schedules.all_gather(2.0), "num_ranks must be .*; got 2.0"),
        (lambda: schedules.all_reduce(2, True), "chunks must be .*; got True"),
        (lambda: schedules.broadcast(4, root=4), "root is 4"),
        (lambda: schedules.broadcast(4, root=-1), "root must be .* from 0; got -1"),
        (lambda: schedules.all_to_allv([[1, 2]]), r"shape \(1, 2\)"),
        (lambda: schedules.all_to_allv([[1, -2], [0, 0]]), "weight of chunk 1 is -2"),
        (lambda: schedules.all_to_allv([[1, np.nan], [0, 0]]), "weight of chunk 1 is nan"),
        (lambda: schedules.custom_collective(2, [(0, 0)], post=[(1, 1)]), "chunk 1 must arrive"),
        (
            lambda: dataclasses.replace(schedules.all_gather(2), chunk_weights=[1.0]),
            r"chunk_weights has the shape \(1,\)",
        ),
        (lambda: schedules.custom_collective(2, [(0, 0), (0, 0)], post=[]), "twice"),
        (lambda: schedules.custom_collective(2, [(0, 2)], post=[]), "names rank 2 of 2"),
        (lambda: schedules.custom_collective(2, [(-1, 0)], post=[]), "whole numbers from 0"),
        (lambda: schedules.named_collective("all_together", 2), "no collective 'all_together'"),
        (lambda: schedules.all_gather(2).chunk_bytes(-1), "size_bytes is -1"),
        (lambda: schedules.all_gather(2).chunk_bytes("1 GB"), "size_bytes is '1 GB'"),
        (lambda: schedules.all_gather(2).chunk_bytes(float("inf")), "size_bytes is inf"),
        (
            lambda: schedules.Collective(
                name="x",
                num_ranks=2,
                num_chunks=1,
                reducing=False,
                pre_chunks=[0],
                pre_ranks=[0, 1],
                post_chunks=[],
                post_ranks=[],
            ),
            "shapes",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_names_are_read_as_people_write_them():
    assert schedules.named_collective(" All-Reduce ", 4) == schedules.all_reduce(4)
    assert schedules.named_collective("reduce scatter", 4, chunks=2) == schedules.reduce_scatter(
        4, 2
    )
