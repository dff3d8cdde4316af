"""Damaged, cut, swapped and foreign files: each is refused with what to do, and no row is wrong."""

import json
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError, StorageError
from fivefold.gnn.storage import Container, ContainerWriter, RowReader

PAGE = 4096
BACKENDS = ["threads", "auto"]


def flip(path, place, bits=1):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bits]))


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "a.fvf"
    rows = np.random.default_rng(0).integers(0, 99, (3000, 3)).astype(np.int32)
    schema = {"x": (rows.dtype, rows.shape), "y": (np.uint8, (5,))}
    with ContainerWriter(path, kind="k", sections=schema, attributes={"a": 1}) as writer:
        writer.write("x", 0, rows)
        writer.write("y", 0, np.arange(5, dtype=np.uint8))
        writer.commit().close()
    return path.read_bytes()


@given(data=st.data())
def test_any_flipped_bit_anywhere_is_seen(data, sound_file, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "flipped.fvf"
    path.write_bytes(sound_file)
    flip(path, data.draw(st.integers(0, len(sound_file) - 1)), 1 << data.draw(st.integers(0, 7)))
    with pytest.raises(DataError, match="; "):
        Container.open(path, verify="full")


@given(data=st.data())
def test_any_truncation_is_seen_on_opening(data, sound_file, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "cut.fvf"
    path.write_bytes(sound_file[: data.draw(st.integers(0, len(sound_file) - 1))])
    with pytest.raises(DataError, match=r"truncated|empty|unfinished or foreign|version 0"):
        Container.open(path)


def test_a_longer_file_is_seen_on_opening(sound_file, tmp_path):
    (tmp_path / "a").write_bytes(sound_file + b"x")
    with pytest.raises(DataError, match="longer than it was written"):
        Container.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("place", "message"),
    [(70, "header of"), ("table", "table of page checksums"), ("manifest", "manifest of")],
)
def test_the_message_names_the_damaged_part(make_file, random_rows, place, message):
    container = make_file(random_rows(3000, 3, "f4"))
    data_end = len(container.page_checksums) * PAGE
    places = {"table": data_end + 10, "manifest": data_end + PAGE + 10}
    flip(container.path, places.get(place, place))
    with pytest.raises(DataError, match=rf"{message} .* is damaged.*; make the file again"):
        Container.open(container.path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_swapped_pages_are_seen(make_file, random_rows, backend):
    rows = random_rows(8000, 1, "f4")
    container = make_file(rows)
    first = container.sections["x"].offset
    raw = bytearray(container.path.read_bytes())
    one, two = slice(first, first + PAGE), slice(first + PAGE, first + 2 * PAGE)
    raw[one], raw[two] = raw[two], raw[one]
    container.path.write_bytes(raw)
    with RowReader(container, "x", backend=backend) as reader, pytest.raises(DataError):
        reader.read_rows(np.array([3]), np.empty((1, 1), np.float32))
    with pytest.raises(DataError, match=r"damaged.*fivefold gnn verify"):
        Container.open(container.path, verify="full")


def test_a_page_of_another_file_is_seen_even_if_its_bytes_were_right_there(make_file, random_rows):
    # Both files hold the same rows, but their ids differ: so do the checksums of equal pages.
    one = make_file(random_rows(4000, 3, "f4"), name="a", attributes={"a": 1})
    two = make_file(random_rows(4000, 3, "f4"), name="b", attributes={"a": 2})
    assert one.file_id != two.file_id
    assert (one.page_checksums[1:] != two.page_checksums[1:]).all()


def test_swapped_files_are_seen_by_kind_and_by_fingerprint(make_file, random_rows):
    one = make_file(random_rows(40, 3, "f4"), name="a", kind="features")
    two = make_file(random_rows(40, 3, "f4"), name="b", kind="labels")
    three = make_file(random_rows(40, 3, "f4", seed=1), name="c", kind="features")
    for swapped in (two, three):
        kept = one.path.with_name("kept")
        one.path.rename(kept)
        one.path.write_bytes(swapped.path.read_bytes())
        if swapped is two:
            with pytest.raises(DataError, match="is of kind 'labels', 'features' was expected"):
                Container.open(one.path, kind="features")
        else:
            with Container.open(one.path, kind="features") as found:
                assert found.fingerprint != one.fingerprint
        kept.rename(one.path)


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04" * 5000, bytes(PAGE * 3), b"\x89FVF"]
)
def test_foreign_and_unfinished_files_are_refused(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match="is no fivefold container"):
        Container.open(tmp_path / "a")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*; check the path"):
        Container.open(tmp_path / "a")


def test_a_newer_version_is_refused_by_number(sound_file, tmp_path):
    page = bytearray(sound_file)
    page[8:12] = struct.pack("<I", 2)
    page[4088:4096] = struct.pack("<Q", xxhash.xxh64_intdigest(bytes(page[:4088])))
    (tmp_path / "a").write_bytes(page)
    with pytest.raises(DataError, match="has format version 2, this fivefold reads 1"):
        Container.open(tmp_path / "a")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_after_opening_is_seen(make_file, random_rows, backend, direct):
    rows = random_rows(30_000, 3, "f4")
    container = make_file(rows)
    section = container.sections["x"]
    with RowReader(container, "x", backend=backend, direct=direct) as reader:
        with container.path.open("r+b") as file:
            file.truncate(section.offset + 10 * PAGE + 100)
        out = np.zeros_like(rows)
        reader.read_rows(np.arange(3000), out)
        assert out[:3000].tobytes() == rows[:3000].tobytes()
        with pytest.raises((StorageError, DataError), match=r"truncated|damaged"):
            reader.read_rows(np.arange(30_000), out)
        with pytest.raises((StorageError, DataError), match=r"truncated|damaged"):
            container.read("x")


def test_a_cut_file_is_not_mapped(make_file, random_rows):
    container = make_file(random_rows(30_000, 3, "f4"))
    with container.path.open("r+b") as file:
        file.truncate(PAGE)
    with pytest.raises(DataError, match="cannot be mapped"):
        container.memory_map("x")


def with_manifest(data, change):
    """A file with another manifest, and all checksums right for it."""
    header = list(struct.unpack_from("<8sIIQ32sQQQQQQQ", data))
    offset, count = header[9], header[10]
    manifest = json.loads(data[offset : offset + count])
    change(manifest)
    text = json.dumps(manifest).encode()
    pages = text.ljust(-(-len(text) // PAGE) * PAGE, b"\0")
    header[5] = offset + len(pages)
    header[10], header[11] = len(text), xxhash.xxh64(pages).intdigest()
    page = struct.pack("<8sIIQ32sQQQQQQQ", *header).ljust(PAGE - 8, b"\0")
    page += struct.pack("<Q", xxhash.xxh64(page).intdigest())
    return page + data[PAGE:offset] + pages


def set_section(**values):
    return lambda manifest: manifest["sections"][0].update(values)


@pytest.mark.parametrize(
    "change",
    [
        set_section(offset=4097),
        set_section(offset=1 << 40),
        set_section(offset=4096 * 10),
        set_section(shape=[3000, 4]),
        set_section(shape=[1 << 40, 3]),
    ],
    ids=["not on a page", "far away", "past the end", "too wide", "too long"],
)
def test_a_section_that_does_not_lie_in_the_file_is_refused(change, sound_file, tmp_path):
    (tmp_path / "same").write_bytes(with_manifest(sound_file, lambda _manifest: None))
    Container.open(tmp_path / "same", verify="full").close()
    (tmp_path / "a").write_bytes(with_manifest(sound_file, change))
    with pytest.raises(DataError, match="does not lie in the file"):
        Container.open(tmp_path / "a")


@pytest.mark.parametrize(
    "change",
    [
        set_section(offset=-4096),
        set_section(offset=0),
        set_section(offset=4096.0),
        set_section(offset="4096"),
        set_section(shape=[-1, 3]),
        set_section(shape=3),
        set_section(dtype="O"),
        set_section(dtype="no type"),
        lambda manifest: manifest.update(sections=7),
        lambda manifest: manifest.pop("attributes"),
    ],
    ids=[
        "negative",
        "in the header",
        "float",
        "text",
        "negative shape",
        "flat shape",
        "objects",
        "no type",
        "no list",
        "no attributes",
    ],
)
def test_a_manifest_of_nonsense_is_refused(change, sound_file, tmp_path):
    (tmp_path / "a").write_bytes(with_manifest(sound_file, change))
    with pytest.raises(DataError, match="; "):
        Container.open(tmp_path / "a")
