"""The corpus: what is read, how it is split, and a cache that survives faults."""

import bz2
import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError
from fivefold.train import _token_cache
from fivefold.train._corpus import ByteTokenizer, load_corpus
from fivefold.train._text_files import (
    find_files,
    read_pieces,
    reading_of,
    resolve_source,
    warning_of,
    why_not_text,
)
from fivefold.train.config import DataConfig

END = ByteTokenizer().document_end


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    generator = random.Random(0)  # noqa: S311 - text, not a secret
    for number in range(40):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}:" + "".join(generator.choices("abc é\n", k=200)))
    return root


@pytest.fixture
def load(folder, tmp_path):
    def load_with(path=folder, **options):
        options = {"validation_fraction": 0.25, "sequence_length": 16, **options}
        data = DataConfig(path=str(path), cache=str(tmp_path / "cache"), **options)
        return load_corpus(data, ByteTokenizer())

    return load_with


@pytest.fixture
def caches(tmp_path):
    return lambda: sorted(p for p in (tmp_path / "cache").iterdir() if p.is_dir())


def documents(tokens):
    """Texts between document ends."""
    ends = np.flatnonzero(np.asarray(tokens) == END)
    assert ends[-1] == len(tokens) - 1
    parts = np.split(np.asarray(tokens), ends + 1)[:-1]
    return [bytes(part[:-1].astype(np.uint8)) for part in parts]


def test_every_file_is_in_exactly_one_split_in_the_order_of_names(load, folder):
    corpus = load()
    train, validation = documents(corpus.train), documents(corpus.validation)
    paths = sorted(folder.rglob("*.txt"), key=lambda path: path.relative_to(folder).as_posix())
    contents = [path.read_bytes() for path in paths]
    assert sorted(train + validation) == sorted(contents)
    assert train == [text for text in contents if text in set(train)]
    assert validation == [text for text in contents if text in set(validation)]
    assert corpus.train_bytes == sum(map(len, train))
    assert corpus.validation_bytes == sum(map(len, validation))
    assert (corpus.num_files, corpus.num_skipped) == (40, 0)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == np.uint16
    assert not corpus.train.flags.writeable


def test_adding_files_moves_no_other_file_across_the_split(load, folder):
    before = load()
    for number in range(100, 160):
        (folder / f"{number}.txt").write_text(f"new {number}\n" * 9)
    after = load()
    assert set(documents(before.train)) <= set(documents(after.train))
    assert set(documents(before.validation)) <= set(documents(after.validation))
    assert before.fingerprint != after.fingerprint


def test_the_share_of_validation_files_is_near_the_wanted_one(load, tmp_path):
    root = tmp_path / "many"
    root.mkdir()
    for number in range(1000):
        (root / f"{number}.txt").write_text("some text")
    corpus = load(root, validation_fraction=0.2)
    share = len(documents(corpus.validation)) / 1000
    assert abs(share - 0.2) < 4 * (0.2 * 0.8 / 1000) ** 0.5  # four standard deviations


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_no_split_is_empty_however_extreme_the_share(load, tmp_path, fraction):
    root = tmp_path / "two"
    root.mkdir()
    for name in ("a", "b"):
        (root / name).write_text(name * 50)
    corpus = load(root, validation_fraction=fraction)
    assert (len(corpus.train), len(corpus.validation)) == (51, 51)


def test_hidden_empty_and_binary_files_are_not_read(load, folder):
    expected = load()
    (folder / ".hidden").mkdir()
    for name in (".hidden/a.txt", ".b.txt"):
        (folder / name).write_text("secret")
    (folder / "empty.txt").touch()
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / "image.png").write_bytes(b"\x89PNG\x00\x01")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "late.txt").write_bytes(b"a" * 99 + b"\0")
    (folder / "cut.txt").write_bytes(b"abc\xc3")
    corpus = load()
    assert np.array_equal(corpus.train, expected.train)
    assert np.array_equal(corpus.validation, expected.validation)
    assert (corpus.num_files, corpus.num_skipped) == (40, 4)


def test_the_standard_library_is_read_without_installed_packages():
    root = resolve_source("stdlib")
    names = {file.name for file in find_files(root, library=True)[0]}
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert all(name.endswith(".py") for name in names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


@given(
    st.text(st.characters(exclude_categories=["Cs"], include_characters=" \n"), max_size=200),
    st.integers(1, 20),
    st.data(),
)
def test_pieces_join_to_the_text_and_cut_no_character(tmp_path_factory, text, piece_bytes, data):
    path = tmp_path_factory.mktemp("pieces") / "text"
    content = text.encode()
    path.write_bytes(content)
    place = data.draw(st.integers(0, len(text)))
    start = len(text[:place].encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fivefold.train._text_files.PIECE_BYTES", piece_bytes)
        pieces = list(read_pieces(path, start))
        before = list(read_pieces(path, 0, start))
    assert b"".join(pieces) == content[start:]
    assert b"".join(before) == content[:start]
    assert "".join(piece.decode() for piece in pieces) == text[place:]
    assert all(pieces)
    assert all(len(piece) <= 2 * piece_bytes + 3 for piece in pieces)
    for piece in pieces[:-1]:
        assert piece.endswith(b"\n") or b"\n" not in piece


def test_a_line_without_end_stays_within_the_stated_memory(tmp_path):
    path = tmp_path / "text"
    path.write_text("word " * (1 << 20))
    tracemalloc.start()
    for piece in read_pieces(path):
        assert piece.endswith(b" ")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 6 << 20


@pytest.mark.slow
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n"), min_size=2),
    st.floats(0.001, 0.999),
    st.sampled_from([".", "text"]),  # the folder, or the file itself
)
def test_a_file_that_is_alone_is_cut_and_no_character_with_it(
    tmp_path_factory, text, fraction, place
):
    root = tmp_path_factory.mktemp("alone")
    (root / "text").write_text(text * 40, newline="")
    data = DataConfig(
        path=str(root / place), cache=str(root / ".cache"), sequence_length=1,
        validation_fraction=fraction,
    )  # fmt: skip
    corpus = load_corpus(data, ByteTokenizer())
    parts = [bytes(part[:-1].astype(np.uint8)) for part in (corpus.train, corpus.validation)]
    assert b"".join(parts) == (text * 40).encode()
    assert all(parts)
    for part in parts:
        part.decode()
    off = abs(len(parts[1]) - fraction * len(text.encode()) * 40)
    longest = max(len(line.encode()) + 1 for line in (text * 40).split("\n"))
    assert off <= longest + 1  # the nearer of two line ends


# What a file may be: its bytes from a text, and a word of the reason why it is not read.
KINDS = {
    "utf-8": (lambda text: text.encode(), None),
    "utf-8 with a mark": (lambda text: b"\xef\xbb\xbf" + text.encode(), None),
    "old line ends": (lambda text: text.replace("\n", "\r\n").encode(), None),
    "utf-16": (lambda text: ("x" + text).encode("utf-16"), "UTF-16:"),
    "utf-16 without a mark": (lambda _: b"p\0l\0a\0i\0n\0", "UTF-16 without"),
    "utf-32": (lambda text: text.encode("utf-32"), "UTF-32"),
    "latin": (lambda text: text.encode() + b"caf\xe9 ", "not UTF-8"),
    "cut": (lambda text: text.encode() + "\u20ac".encode()[:2], "not UTF-8"),
    "binary": (lambda text: b"ab\0cd" + text.encode(), "NUL"),
    "late binary": (lambda text: text.encode() + b"x" * 70 + b"\0", "NUL"),
    "parquet": (lambda text: b"PAR1" + text.encode() + b"PAR1", "Parquet"),
    "text with letters of Parquet": (lambda text: b"PAR1 is a section\n" + text.encode(), None),
    "bzip2": (lambda text: bz2.compress(text.encode()), "bzip2"),
    "text with letters of bzip2": (lambda text: b"BZhang\n" + text.encode(), None),
    "text with letters of Arrow": (lambda text: b"ARROW1: " + text.encode(), None),
    "text with letters of PDF": (lambda text: b"%PDF-files\n" + text.encode(), None),
    "code about notebooks": (
        lambda text: b'keys = {"cells", "cell_type", "nbformat"}\n' + text.encode(), None
    ),
    "gzip": (lambda text: gzip.compress(text.encode()), "gzip"),
    "json lines": (lambda text: (json.dumps({"text": text}) + "\n").encode() * 3, "JSON lines"),
    "notebook": (
        lambda text: json.dumps({"cells": [{"cell_type": "code", "source": text}],
                                 "nbformat": 4}).encode(),
        "notebook",
    ),
    "json about notebooks": (
        lambda _: b'{"keys": ["cell_type", "nbformat", "cells"]}', None
    ),
    "one json object": (lambda text: json.dumps({"text": text}, indent=1).encode(), None),
}  # fmt: skip


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(KINDS)),
            st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"),
                    min_size=1, max_size=99),
            st.sampled_from(["a", "b/c", "b/d", ".hidden", "e f"]),
            st.sampled_from(["", ".txt", ".py", ".md"]),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_every_byte_of_a_folder_is_in_the_corpus_or_named(tmp_path_factory, drawn):
    root = tmp_path_factory.mktemp("folder")
    for name in ("x", "y"):  # so much that the rest is no more than half
        (root / name).write_text("some plain text\n" * 1000)
    read, missed = dict.fromkeys(("x", "y"), b"some plain text\n" * 1000), {}
    for number, (kind, text, place, suffix) in enumerate(drawn):
        make, why = KINDS[kind]
        content, name = make(text), f"{place}{number}{suffix}"
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
        if place.startswith("."):
            continue
        (missed if why else read)[name] = (content, why) if why else content
    data = DataConfig(path=str(root), cache=str(root / ".cache"), sequence_length=1)
    corpus = load_corpus(data, ByteTokenizer())
    assert sorted(documents(corpus.train) + documents(corpus.validation)) == sorted(read.values())
    account = corpus.account
    assert account["read_bytes"] == sum(map(len, read.values()))
    assert account["read_bytes"] == corpus.train_bytes + corpus.validation_bytes
    left_out = account["left_out"]
    assert sum(part["size_bytes"] for part in left_out) == sum(len(c) for c, _ in missed.values())
    assert sum(part["files"] for part in left_out) == len(missed)
    assert account["disk_bytes"] == account["read_bytes"] + sum(p["size_bytes"] for p in left_out)
    for name, (_, why) in missed.items():
        (part,) = [part for part in left_out if why in part["why"]]
        assert name in part["names"] or part["files"] > len(part["names"])


def test_what_is_left_out_is_warned_of_and_most_of_a_folder_is_refused(load, folder):
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert warning_of(load().account) is None
    for number in range(4):
        (folder / f"a{number}.parquet").write_bytes(b"PAR1" + b"x" * (size // 50) + b"PAR1")
    account = load().account
    wanted = "a0.parquet, a1.parquet, a2.parquet and 1 more"
    assert wanted in warning_of(account)
    assert wanted in reading_of(account).line()
    assert "write its text column to text files" in warning_of(account)
    (folder / "a4.parquet").write_bytes(b"PAR1" + b"x" * 2 * size + b"PAR1")
    with pytest.raises(
        DataError, match=r"% of the [\d,]+ bytes in data.path would not be read"
    ) as e:
        load()
    assert "a0.parquet: Parquet: write its text column" in e.value.hint


@pytest.mark.parametrize(
    "pointer",
    [
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345678\n",
        "/annex/objects/SHA256E-s12345678--ab.txt\n",
    ],
)
def test_a_pointer_stands_for_the_file_that_is_not_here(load, folder, pointer):
    (folder / "big.txt").write_text(pointer)
    with pytest.raises(DataError, match=r"big.txt \(12,345,678 bytes") as caught:
        load()
    assert "git lfs pull" in caught.value.hint


def test_links_to_folders_are_warned_of(load, folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert "link (0 bytes: a link to a folder" in warning_of(load().account)


def test_a_character_on_the_edge_of_two_pieces_is_still_text(tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.train._text_files.PIECE_BYTES", 3)
    (tmp_path / "a").write_text("aa\u00e9\u00e9\u20ac\u20ac\U0001d11e")
    assert why_not_text(find_files(tmp_path, library=False)[0][0]) is None


def test_the_cache_is_used_and_follows_text_and_options(load, folder, caches):
    first = load()
    stamp = (caches()[0] / "manifest.json").stat().st_mtime_ns
    again = load()
    assert (caches()[0] / "manifest.json").stat().st_mtime_ns == stamp
    assert again.fingerprint == first.fingerprint
    load(validation_fraction=0.5)
    assert len(caches()) == 2
    changed = folder / "part0" / "0.txt"
    content = changed.read_text()
    changed.write_text(content[::-1])  # the same size
    assert load().fingerprint != first.fingerprint
    assert len(caches()) == 3


def test_a_copy_elsewhere_has_the_same_fingerprint(load, folder, tmp_path):
    first = load()
    copy = folder.rename(tmp_path / "moved")
    assert load(copy).fingerprint == first.fingerprint


def truncate(path):
    os.truncate(path / "train", (path / "train").stat().st_size // 2)


def flip(path):
    content = bytearray((path / "train").read_bytes())
    content[100] ^= 1
    (path / "train").write_bytes(content)


DAMAGE = {
    "truncated": truncate,
    "one bit flipped": flip,
    "tokens gone": lambda path: (path / "validation").unlink(),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
    "manifest cut": lambda path: os.truncate(path / "manifest.json", 20),
    "manifest of another form": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest without checksums": lambda path: (path / "manifest.json").write_text(
        json.dumps({"dtype": "uint16", "files": {"train": {"size_bytes": 1}}, "facts": {}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_cache_is_built_again(load, caches, caplog, damage):
    first = load()
    expected = np.array(first.train)
    damage(caches()[0])
    again = load()
    assert "is damaged" in caplog.text
    assert np.array_equal(again.train, expected)
    assert again.fingerprint == first.fingerprint
    caplog.clear()
    load()
    assert not caplog.text
    assert len(caches()) == 1  # no remains


def _load_in_child(data, barrier, queue):
    barrier.wait()
    corpus = load_corpus(data, ByteTokenizer())
    queue.put((corpus.fingerprint, int(np.asarray(corpus.train, dtype=np.int64).sum())))


def test_a_builder_may_end_while_another_looks_for_leftovers(folder, tmp_path, monkeypatch):
    found = Path.glob
    monkeypatch.setattr(Path, "glob", lambda at, names: [*found(at, names), at / ".has-just-gone"])
    data = DataConfig(path=str(folder), cache=str(tmp_path / "cache"), sequence_length=16)
    assert load_corpus(data, ByteTokenizer()).num_files > 1


def test_a_builder_that_takes_hours_is_no_leftover(folder, tmp_path):
    data = DataConfig(path=str(folder), cache=str(tmp_path / "cache"), sequence_length=16)
    load_corpus(data, ByteTokenizer())
    (made,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    for name, ago_s in (("writes", 60), ("was-killed", 7200)):
        builder = tmp_path / "cache" / f".{made.name[:16]}-{name}"
        builder.mkdir()
        (builder / "tokens").touch()
        os.utime(builder / "tokens", (time.time() - ago_s,) * 2)
        os.utime(builder, (time.time() - 7200,) * 2)  # when its files were made
    shutil.rmtree(made)
    load_corpus(data, ByteTokenizer())
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.name[0] == "."]
    assert [name for name in left if name.endswith(("writes", "was-killed"))] == [
        f".{made.name[:16]}-writes"
    ]


@pytest.mark.parametrize("locks", [True, False])
def test_builders_at_the_same_time_agree(folder, tmp_path, monkeypatch, locks):
    if not locks:

        def no_locks(*_):
            raise OSError

        monkeypatch.setattr("fcntl.flock", no_locks)
    data = DataConfig(path=str(folder), cache=str(tmp_path / "shared"), sequence_length=16)
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    children = [
        context.Process(target=_load_in_child, args=(data, barrier, queue)) for _ in range(4)
    ]
    for child in children:
        child.start()
    results = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
    assert len(set(results)) == 1
    assert [child.exitcode for child in children] == [0] * 4
    assert len([p for p in (tmp_path / "shared").iterdir() if p.is_dir()]) == 1


def test_a_builder_that_is_killed_leaves_nothing_in_the_way(load, folder, tmp_path):
    class Slow(ByteTokenizer):
        def encode(self, text):
            time.sleep(60)
            return super().encode(text)

    data = DataConfig(
        path=str(folder), cache=str(tmp_path / "cache"), sequence_length=16,
        validation_fraction=0.25,
    )  # fmt: skip
    child = multiprocessing.get_context("fork").Process(target=load_corpus, args=(data, Slow()))
    child.start()
    cache = tmp_path / "cache"
    deadline = time.monotonic() + 120
    while not list(cache.glob(".*-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(cache.glob(".*-*"))  # it holds the lock and has begun to write
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    assert load().num_files == 40


def test_a_full_disk_is_an_error_with_a_hint_and_leaves_no_remains(load, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_token_cache.os, "fsync", full)
        with pytest.raises(DataError, match="No space left on device") as caught:
            load()
    assert "data.cache" in caught.value.hint
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert load().num_files == 40


def test_a_cache_folder_that_cannot_be_made_is_an_error(folder, tmp_path):
    (tmp_path / "file").touch()
    data = DataConfig(path=str(folder), cache=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="cannot be made") as caught:
        load_corpus(data, ByteTokenizer())
    assert "data.cache" in caught.value.hint


def test_the_automatic_cache_falls_back_to_the_temporary_folder(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = _token_cache.cache_folder("auto")
    assert folder.is_relative_to(tmp_path)
    assert folder.is_dir()
    assert "cannot be written" in caplog.text


def test_missing_empty_binary_and_short_data_are_errors_with_hints(load, tmp_path):
    def error_of(path, **options):
        with pytest.raises(DataError) as caught:
            load(path, **options)
        assert caught.value.hint
        return caught.value.message

    assert "does not exist" in error_of(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no files to read" in error_of(empty)
    for number in range(3):
        (empty / str(number)).write_bytes(b"\0\1\2")
    assert "100.0% of the 9 bytes in data.path would not be read" in error_of(empty)
    (empty / "text").write_text("w" * 10)
    assert "too few for one sequence" in error_of(empty)
    (empty / "text").write_text("w")
    for number in range(3):
        (empty / str(number)).unlink()
    assert "too short to be cut in two" in error_of(empty)
    (empty / "text").write_text("words " * 50)
    (empty / "more").write_text("words " * 50)
    assert load(empty, sequence_length=300).num_files == 2
    message = error_of(empty, sequence_length=301)
    assert "split has 301 tokens, too few for one sequence of 301" in message


def test_more_than_65536_tokens_need_32_bits(folder, tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 70_000
        document_end = 69_999
        fingerprint = "large"

    data = DataConfig(path=str(folder), cache=str(tmp_path / "cache"), sequence_length=16)
    corpus = load_corpus(data, Large())
    assert corpus.train.dtype == np.uint32
    assert corpus.train[-1] == 69_999
