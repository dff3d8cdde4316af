"""The layout of a segment against slow references that say what it is."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fivefold.gnn.planning.id_sets import union_of
from fivefold.gnn.planning.layout import Refinement, runs_of, segment_layout


def gray_rank(mask):
    """Inverse of the reflected binary code, from its definition."""
    rank = 0
    while mask:
        rank ^= mask
        mask >>= 1
    return rank


def users(batches):
    """For each id the batches that need it, ids ascending."""
    ids = sorted({int(v) for batch in batches for v in batch})
    sets = [set(batch.tolist()) for batch in batches]
    return {v: [i for i, members in enumerate(sets) if v in members] for v in ids}


def slow_gray(batches):
    last = len(batches) - 1
    masks = {v: sum(1 << (last - i) for i in of) for v, of in users(batches).items()}
    return sorted(masks, key=lambda v: (gray_rank(masks[v]), v))


@st.composite
def segments(draw, most_batches=9):
    num_nodes = draw(st.integers(1, 40))
    members = st.lists(st.integers(0, num_nodes - 1), unique=True).map(sorted)
    lists = draw(st.lists(members, min_size=0, max_size=most_batches))
    return [np.array(ids, np.int64) for ids in lists]


@given(segments())
def test_every_batch_finds_its_rows(batches):
    laid_out = segment_layout(batches)
    assert len(laid_out.rows) == len(batches)
    for number, ids in enumerate(batches):
        rows = laid_out.rows[number]
        assert (np.diff(rows) > 0).all()
        assert np.array_equal(np.sort(laid_out.node_ids(number)), ids)
    assert len(laid_out.order) == len(users(batches))


@given(segments())
def test_gray_orders_by_rank_of_the_mask_then_by_id(batches):
    assert segment_layout(batches).order.tolist() == slow_gray(batches)


def test_gray_takes_more_batches_than_a_word_has_bits(make_batches):
    source = make_batches(0, num_nodes=300, num_batches=150, share=0.3)
    batches = [np.sort(source.node_ids(i)) for i in range(150)]
    assert segment_layout(batches).order.tolist() == slow_gray(batches)


def test_where_every_mask_occurs_gray_is_the_reflected_code():
    # Id v is in the batches whose bits v has, so that all masks of 6 bits occur once.
    ids = np.arange(64)
    batches = [ids[(ids >> bit) & 1 == 1] for bit in range(6)]
    gray = segment_layout(batches)
    # The reflected code changes one bit from row to row: 2**t - 1 changes need 2**(t - 1) runs.
    assert [len(gray.runs(batch)[0]) for batch in range(6)] == [1, 1, 2, 4, 8, 16]


@given(segments())
def test_runs_of_a_batch_are_known_when_it_is_split_off(batches):
    union = union_of(batches)
    refinement = Refinement(len(union))
    laid_out = segment_layout(batches)
    for number, ids in enumerate(batches):
        starts, counts = refinement.split(union.locate(ids))
        starts = starts + len(union) - refinement.num_seen
        expected = runs_of(laid_out.rows[number])
        assert (starts.tolist(), counts.tolist()) == tuple(part.tolist() for part in expected)
