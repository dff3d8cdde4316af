"""Gathering in memory against NumPy's indexing; aligned buffers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.gnn.storage.pages import aligned_empty, gather_rows


@given(data=st.data())
def test_equals_numpy_indexing(data):
    dtype = data.draw(st.sampled_from(["u1", "f2", "f4", "c16", "S3"]))
    shape = (data.draw(st.integers(1, 50)), data.draw(st.sampled_from([0, 1, 3, 128, 1025])))
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    source = raw.view(dtype).reshape(shape)
    count = data.draw(st.integers(0, 60))
    kind = data.draw(st.sampled_from([np.int32, np.int64, np.uint32]))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = random.integers(0, shape[0], count).astype(kind)
    places = random.permutation(count + 3)[:count]
    out, expected = (np.zeros((count + 3, shape[1]), dtype) for _ in range(2))
    gather_rows(source, rows, out, places)
    expected[places] = source[rows]
    assert out.tobytes() == expected.tobytes()
    gather_rows(source, rows, out)
    assert out[:count].tobytes() == source[rows].tobytes()


def test_sources_may_be_read_only_and_strided_by_rows():
    table = np.arange(60.0).reshape(10, 6)
    table.flags.writeable = False
    out = np.empty((3, 4))
    gather_rows(table[::2, 1:5], np.array([4, 0, 2]), out)
    assert np.array_equal(out, table[::2, 1:5][[4, 0, 2]])


def test_nothing_is_copied_when_an_index_is_out_of_range():
    table, out = np.ones((5, 2)), np.zeros((3, 2))
    for rows, places in [([0, 5], None), ([0, -1], None), ([0, 1], [0, 3]), ([0, 1], [0, -1])]:
        where = None if places is None else np.array(places)
        with pytest.raises(ConfigurationError, match="out of range"):
            gather_rows(table, np.array(rows), out, where)
        assert not out.any()
    with pytest.raises(ConfigurationError, match="out of range; there are 0 rows"):
        gather_rows(np.ones((0, 2)), np.array([0]), out)


@pytest.mark.parametrize(
    ("source", "out"),
    [
        (np.ones((5, 2)), np.ones((5, 2), np.float32)),
        (np.ones((5, 2)), np.ones((5, 3))),
        (np.ones((5, 4))[:, ::2], np.ones((5, 2))),
        (np.ones((5, 2)), np.ones((5, 4))[:, ::2]),
    ],
)
def test_arrays_that_do_not_fit_are_refused(source, out):
    with pytest.raises(ConfigurationError):
        gather_rows(source, np.array([0]), out)


def test_a_destination_per_row():
    with pytest.raises(ConfigurationError, match="one per row"):
        gather_rows(np.ones((5, 2)), np.array([0]), np.ones((5, 2)), np.array([0, 1]))


@pytest.mark.parametrize("shape", [0, 5, (3, 1000), (2, 3, 4), (0, 7)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_aligned_buffers(shape, dtype):
    buffer = aligned_empty(shape, dtype)
    assert buffer.shape == np.empty(shape).shape
    assert buffer.dtype == dtype
    assert buffer.size == 0 or buffer.ctypes.data % 4096 == 0
    buffer[...] = 1
    assert buffer.flags.c_contiguous


def test_pinning_needs_a_device():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        buffer = aligned_empty((100, 3), np.float32, pin=True)
        assert torch.from_numpy(buffer).is_pinned()
    else:
        with pytest.raises(UnsupportedError, match="no CUDA device; leave pin=False"):
            aligned_empty(10, pin=True)
