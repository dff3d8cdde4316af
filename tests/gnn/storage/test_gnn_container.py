"""Containers: what is written is read, in any order and size; equal contents give equal files."""

import gc
import math
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.storage import Container, ContainerWriter, RowReader
from fivefold.gnn.storage.pages import aligned_empty, hash_pages

DTYPES = ["u1", "i8", "f2", "<f4", ">f4", "c16", "?", "S5", "M8[ns]"]


def draw_array(data, dtype, shape):
    size = math.prod(shape) * np.dtype(dtype).itemsize
    seed = data.draw(st.integers(0, 2**32 - 1))
    limit = 2 if dtype == "?" else 256
    raw = np.random.default_rng(seed).integers(0, limit, size, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def same_bits(found, expected):
    expected = np.ascontiguousarray(expected, expected.dtype.newbyteorder("<"))
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_arrays_in_any_order_come_back(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a.fvf"
    shapes = st.tuples(st.integers(0, 3000), st.integers(0, 40))
    arrays = {
        f"s{i}": draw_array(data, data.draw(st.sampled_from(DTYPES)), data.draw(shapes))
        for i in range(data.draw(st.integers(1, 3)))
    }
    grown = {name for name in arrays if data.draw(st.booleans())}
    schema = {
        name: (a.dtype, (None if name in grown else len(a), *a.shape[1:]))
        for name, a in arrays.items()
    }
    pieces = []
    for name, array in arrays.items():
        cuts = sorted(data.draw(st.lists(st.integers(0, len(array)), max_size=4)))
        bounds = [0, *cuts, len(array)]
        pieces += [(name, low, high) for low, high in pairwise(bounds)]
    order = data.draw(st.permutations([p for p in pieces if p[0] not in grown]))
    with ContainerWriter(path, kind="k", sections=schema, attributes={"a": [1]}) as writer:
        for name, low, high in [p for p in pieces if p[0] in grown] + list(order):
            if name in grown:
                writer.append(name, arrays[name][low:high])
            else:
                writer.write(name, low, arrays[name][low:high])
        for name, array in arrays.items():
            assert same_bits(writer.read(name), array)
        writer.commit().close()
    assert names(path.parent) == ["a.fvf"]
    with Container.open(path, kind="k", verify="full") as container:
        assert container.attributes == {"a": [1]}
        for name, array in arrays.items():
            section = container.sections[name]
            assert section.offset % 4096 == 0
            assert section.nbytes == array.nbytes
            assert same_bits(container.read(name), array)
            assert same_bits(container.memory_map(name), array)
            middle = len(array) // 2
            assert same_bits(container.read(name, middle // 2, middle), array[middle // 2 : middle])


def write(path, array, *, pieces=1, attributes=None, kind="k"):
    schema = {"x": (array.dtype, array.shape)}
    with ContainerWriter(path, kind=kind, sections=schema, attributes=attributes or {}) as writer:
        for part in reversed(np.array_split(np.arange(len(array)), pieces)):
            writer.write("x", int(part[0]), array[part])
        return writer.commit()


@pytest.mark.parametrize("pieces", [2, 7, 299])
def test_equal_contents_give_equal_files_however_they_were_written(tmp_path, pieces):
    array = np.random.default_rng(0).random((300, 1025)).astype(np.float32)
    with write(tmp_path / "a", array) as one, write(tmp_path / "b", array, pieces=pieces) as two:
        assert one.fingerprint == two.fingerprint
        assert len(one.fingerprint) == 32
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_large_writes_take_the_direct_way_and_give_the_same_file(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (5_000_000, 1), dtype=np.uint8)
    with (
        write(tmp_path / "a", array, pieces=2) as one,
        write(tmp_path / "b", array, pieces=97) as b,
    ):
        assert one.fingerprint == b.fingerprint
        one.verify()
        assert np.array_equal(one.read("x"), array)
    on_a_page = aligned_empty(array.shape, np.uint8)  # which is written without a copy
    on_a_page[:] = array
    with write(tmp_path / "c", on_a_page) as third:
        assert third.fingerprint == one.fingerprint


def test_fingerprints_differ_with_contents_attributes_and_kind(tmp_path):
    array = np.zeros((100, 3))
    other = array.copy()
    other[99, 2] = 1
    made = [
        write(tmp_path / "a", array),
        write(tmp_path / "b", other),
        write(tmp_path / "c", array, attributes={"a": 1}),
        write(tmp_path / "d", array, kind="other"),
        write(tmp_path / "e", array.astype(np.float32)),
    ]
    assert len({container.fingerprint for container in made}) == len(made)
    for container in made:
        container.close()


def test_the_table_holds_the_checksum_of_every_page(tmp_path):
    array = np.random.default_rng(0).random(5000)
    with write(tmp_path / "a", array) as container:
        raw = np.fromfile(container.path, np.uint8)
        table = container.page_checksums
        assert len(table) == 1 + -(-array.nbytes // 4096)
        assert table[0] == 0
        expected = hash_pages(raw[4096 : 4096 * len(table)], container.file_id, 1)
        assert np.array_equal(table[1:], expected)
        assert container.nbytes == len(raw)


def test_rows_that_were_never_written_are_refused(tmp_path):
    schema = {"x": (np.float64, (10_000, 2))}
    with ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={}) as writer:
        writer.write("x", 0, np.zeros((5000, 2)))
        with pytest.raises(ConfigurationError, match=r"was not written.*near row 5"):
            writer.commit()
        writer.write("x", 5000, np.zeros((5000, 2)))
        writer.commit().close()


def test_rows_may_be_written_twice_and_the_last_counts(tmp_path):
    schema = {"x": (np.int64, (3000,))}
    with ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={}) as writer:
        writer.write("x", 0, np.zeros(3000, np.int64))
        writer.write("x", 1000, np.arange(1000))
        with writer.commit() as container:
            container.verify()
            expected = np.zeros(3000, np.int64)
            expected[1000:2000] = np.arange(1000)
            assert np.array_equal(container.read("x"), expected)


def test_attributes_may_be_numpy_values(tmp_path):
    schema = {"x": (np.int64, (None,))}
    first = {"n": np.int64(3), "list": np.arange(2)}
    writer = ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes=first)
    with writer.commit() as container:
        assert container.attributes == {"n": 3, "list": [0, 1]}


def test_nothing_stands_under_the_name_before_commit_and_abort_leaves_nothing(tmp_path):
    path = tmp_path / "a.fvf"
    schema = {"x": (np.int64, (3,)), "y": (np.int64, (None,)), "z": (np.int64, (None,))}
    writer = ContainerWriter(path, kind="k", sections=schema, attributes={})
    writer.write("x", 0, np.arange(3))
    writer.append("z", np.arange(3))
    writer.mark({"at": 1})
    assert not path.exists()
    with pytest.raises(DataError, match=r"no file .*a\.fvf; it is unfinished"):
        Container.open(path)
    writer.abort()
    assert names(tmp_path) == []
    with pytest.raises(StorageError, match="closed"):
        writer.append("y", np.arange(3))


def test_an_exception_leaves_the_unfinished_file_for_resuming(tmp_path):
    schema = {"x": (np.int64, (3,))}
    path = tmp_path / "a.fvf"
    with (
        pytest.raises(KeyError),
        ContainerWriter(path, kind="k", sections=schema, attributes={}),
    ):
        raise KeyError
    assert names(tmp_path) == ["a.fvf.partial"]


def test_a_file_has_one_writer(tmp_path):
    schema = {"x": (np.int64, (3,))}
    with (
        ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={}),
        pytest.raises(StorageError, match="is being written by another"),
    ):
        ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={})


@pytest.mark.parametrize(
    ("sections", "kind", "attributes"),
    [
        ({}, "k", {}),
        ({"x": (object, (3,))}, "k", {}),
        ({"x": ([("a", "f4")], (3,))}, "k", {}),
        ({"x": (np.float32, ())}, "k", {}),
        ({"x": (np.float32, (3, None))}, "k", {}),
        ({"x": (np.float32, (-1,))}, "k", {}),
        ({"": (np.float32, (3,))}, "k", {}),
        ({"x": (np.float32, (3,))}, "", {}),
        ({"x": (np.float32, (3,))}, "k" * 33, {}),
        ({"x": (np.float32, (3,))}, "k", {"a": object()}),
    ],
)
def test_what_cannot_be_stored_is_refused_before_a_file_is_made(
    tmp_path, sections, kind, attributes
):
    with pytest.raises(ConfigurationError):
        ContainerWriter(tmp_path / "a", kind=kind, sections=sections, attributes=attributes)
    assert names(tmp_path) == []


def test_wrong_pieces_are_refused(tmp_path):
    schema = {"x": (np.float32, (10, 2)), "y": (np.int64, (None,))}
    with ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={}) as writer:
        rows = np.zeros((4, 2), np.float32)
        for name, start, piece in [
            ("x", 7, rows),
            ("x", -1, rows),
            ("x", 0, rows.astype(np.float64)),
            ("x", 0, np.zeros((4, 3), np.float32)),
            ("x", 0, np.float32(3)),
            ("z", 0, rows),
            ("y", 0, np.arange(3)),
        ]:
            with pytest.raises(ConfigurationError):
                writer.write(name, start, piece)
        with pytest.raises(ConfigurationError, match="fixed length"):
            writer.append("x", rows)
        with pytest.raises(ConfigurationError, match="JSON"):
            writer.mark(object())


def test_reading_outside_a_section_is_refused(make_file, random_rows):
    container = make_file(random_rows(50, 3, "f4"))
    for start, stop in [(-1, 3), (3, 2), (0, 51), (51, None)]:
        with pytest.raises(ConfigurationError):
            container.read("x", start, stop)
    with pytest.raises(DataError, match=r"has no section 'y'; it has first, x"):
        container.read("y")
    with pytest.raises(ConfigurationError, match="advice"):
        container.memory_map("x", advice="odd")


def test_a_closed_file_says_so_and_maps_stay(make_file, random_rows):
    rows = random_rows(50, 3, "i4")
    container = make_file(rows)
    mapped = container.memory_map("x", advice="sequential")
    container.close()
    container.close()
    with pytest.raises(StorageError, match="closed"):
        container.read("x")
    with pytest.raises(StorageError, match="closed"):
        container.memory_map("x")
    assert np.array_equal(mapped, rows)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0, 0] = 1


def test_verify_reports_its_progress(make_file, random_rows):
    container = make_file(random_rows(3000, 1000, "u4"))
    seen = []
    container.verify(lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == (len(container.page_checksums) - 1) * 4096


def test_several_threads_may_write_and_the_file_is_the_same(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (6 << 20, 1), dtype=np.uint8)
    schema = {"x": (array.dtype, array.shape)}
    cuts = np.linspace(0, len(array), 25).astype(int).tolist()
    writer = ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={})

    def work(first):
        for low, high in list(pairwise(cuts))[first::4]:
            writer.write("x", low, array[low:high])
            writer.mark(low)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with writer.commit() as container, write(tmp_path / "b", array) as plain:
        assert container.fingerprint == plain.fingerprint


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list files")
def test_forgotten_objects_close_their_files(tmp_path):
    array = np.zeros((100, 3))
    write(tmp_path / "warm", array).close()
    gc.collect()
    before = open_files()
    schema = {"x": (np.float64, (None, 3)), "y": (np.float64, (None,))}
    writer = ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={})
    container = write(tmp_path / "b", array)
    readers = [RowReader(container, "x", backend=name) for name in ("auto", "threads")]
    assert open_files() >= before + 5
    del writer, container, readers
    gc.collect()
    assert open_files() == before
