"""Small files that are read back: a checksum covers all of their contents."""

import contextlib
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError, StorageError
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.planning import Plan
from fivefold.gnn.storage import Container, ContainerWriter

VALUE = {"epochs": 3, "files": {"rows": "ab12", "records": None}, "sizes": [1, 2.5], "done": True}


def test_what_was_written_is_read(tmp_path):
    write_checked_json(tmp_path / "a", VALUE)
    assert read_checked_json(tmp_path / "a") == VALUE
    write_checked_json(tmp_path / "a", {"by number": {2: "b", 10: "a"}})
    assert read_checked_json(tmp_path / "a") == {"by number": {"2": "b", "10": "a"}}


@pytest.fixture(scope="module")
def sound_json(tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "a"
    write_checked_json(path, VALUE)
    return path.read_bytes()


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_changed_file_is_refused_or_says_the_same(place, bit, cut, sound_json, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "changed.json"
    data = bytearray(sound_json)
    at = int(place * len(data))
    data[at] ^= 1 << bit
    path.write_bytes(data[:at] if cut else data)
    with contextlib.suppress(DataError):
        assert read_checked_json(path) == VALUE


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[1, 2]",
        b"",
        b"\xff\xfe",
        b"null",
        json.dumps(VALUE).encode(),
    ],
    ids=["deep list", "deep", "long number", "list", "empty", "no text", "null", "no checksum"],
)
def test_what_is_no_such_file_is_refused(text, tmp_path):
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(DataError, match="make it again"):
        read_checked_json(tmp_path / "a")


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="at most"):
        read_checked_json(tmp_path / "a")


@pytest.mark.parametrize("read", [read_checked_json, Container.open], ids=["json", "container"])
def test_a_pipe_or_a_folder_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(DataError, match="no regular file"):
            read(tmp_path / name)


def test_what_the_system_refuses_is_said(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_checked_json(tmp_path / "nothing")
    with pytest.raises(StorageError, match="nowhere"):
        write_checked_json(tmp_path / "nowhere" / "a", VALUE)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "{}", "7", '{"version": []}'],
    ids=["deep list", "deep", "long number", "empty", "number", "no version"],
)
def test_texts_of_nonsense_are_refused(tmp_path, text):
    """Inside a file that is whole: its checksums are right."""
    path, sections = tmp_path / "a", {"rows": (np.int64, (1,))}
    with ContainerWriter(path, kind="plan", sections=sections, attributes={"plan": text}) as writer:
        writer.write("rows", 0, np.zeros(1, np.int64))
        writer.commit().close()
    with pytest.raises(DataError, match="make it again"):
        Plan.open(path)
