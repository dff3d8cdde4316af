"""Sets of ids as bits: they sort, merge and number as Python's own sets and lists do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError
from fivefold.gnn.planning.id_sets import (
    IdSet,
    SortedIds,
    argsort_distinct,
    is_dense,
    sort_distinct,
    union_of,
)

distinct = st.lists(st.integers(0, 700), unique=True, max_size=80)


@given(distinct, distinct, distinct, st.sampled_from([np.int32, np.int64, np.uint32]))
def test_a_set_answers_like_a_set(first, second, other, dtype):
    members = IdSet(701, np.array(first, dtype))
    added = members.add(np.array(second, dtype))
    expected = sorted({*first, *second})
    assert added == len({*second} - {*first})
    assert len(members) == len(expected)
    assert members.ascending().tolist() == expected
    places = {member: place for place, member in enumerate(expected)}
    asked = [*range(701), 5000]
    found = members.locate(np.array(asked, dtype))
    assert found.dtype == np.int32
    assert found.tolist() == [places.get(member, -1) for member in asked]
    # A shorter set and a longer one are joined as if the rest were empty.
    for bound in (max(other, default=0) + 1, 9000):
        without = IdSet(bound, np.array(other, dtype))
        assert members.ascending(without=without).tolist() == sorted({*expected} - {*other})


@given(distinct, st.sampled_from([701, 10**6, 2**40]))
def test_sorting_is_sorting_dense_or_not(ids, bound):
    array = np.array(ids, np.int64)
    assert sort_distinct(array, bound).tolist() == sorted(ids)
    assert array[argsort_distinct(array, bound)].tolist() == sorted(ids)
    assert sort_distinct(np.concatenate([array, array]), bound).tolist() == sorted(ids * 2)


@given(st.lists(distinct, max_size=5), st.booleans())
def test_a_union_is_the_same_by_bits_and_by_sorting(lists, sparse):
    scale = 2**33 if sparse else 1
    batches = [scale * np.array(sorted(ids), np.int64) for ids in lists]
    union = union_of(batches)
    expected = sorted({int(member) for ids in batches for member in ids})
    assert len(union) == len(expected)
    assert union.ascending().tolist() == expected
    assert isinstance(union, SortedIds) or not sparse or expected in ([], [0])
    for ids in batches:
        assert [expected[place] for place in union.locate(ids)] == ids.tolist()
    assert union.locate(np.array([scale * 701, 2**34 + 1])).tolist() == [-1, -1]


def test_ids_outside_are_refused_and_sparse_ones_take_no_bits():
    for outside in ([3, -1], [3, 640]):
        with pytest.raises(DataError, match=f"id {outside[1]} is outside 0 to 639"):
            IdSet(640, np.array(outside))
    assert IdSet.bytes_for(640) == 120
    assert is_dense(10, 2560)
    assert not is_dense(10, 2561)
    assert len(IdSet(0)) == 0
