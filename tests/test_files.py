"""Reading files: everything that a file can be ends soon, with values or one clear error."""

import os

import pytest

from fivefold.errors import ConfigurationError, DataError, FivefoldError
from fivefold.files import parse_json, parse_toml, read_bytes, read_json, read_text, read_toml


def _fifo(path):
    os.mkfifo(path)


def _denied(path):
    path.symlink_to(path)  # a link to itself: also root cannot open it


KINDS = {
    "missing": (lambda _: None, "does not exist"),
    "folder": (lambda path: path.mkdir(), "cannot be read: Is a directory"),
    "pipe": (_fifo, "is a pipe and not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device and not a regular file"),
    "endless link": (_denied, "cannot be read: Too many levels"),
}
TEXTS = {
    "not UTF-8": (b"\xff\xfe", "it is not UTF-8 text .* at byte 0"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "NUL": (b"a\0b", "NUL characters"),
}


@pytest.mark.parametrize("read", [read_toml, read_json, read_text, read_bytes])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_an_error_with_a_hint(tmp_path, read, kind):
    make, words = KINDS[kind]
    path = tmp_path / "given.file"
    make(path)
    with pytest.raises(FivefoldError, match=words) as caught:
        read(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert isinstance(caught.value, ConfigurationError if read is read_toml else DataError)


@pytest.mark.parametrize("read", [read_toml, read_json, read_text])
@pytest.mark.parametrize("kind", TEXTS)
def test_what_is_no_text_is_an_error_with_a_hint(tmp_path, read, kind):
    data, words = TEXTS[kind]
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(FivefoldError, match=words) as caught:
        read(tmp_path / "a")
    assert "UTF-8" in caught.value.hint


def test_a_path_that_cannot_be_one_is_an_error():
    with pytest.raises(DataError, match="cannot be read: embedded null byte"):
        read_text("a\0b")


@pytest.mark.parametrize(("read", "most"), [(read_toml, 64), (read_json, 256), (read_text, 256)])
def test_a_file_beyond_the_limit_is_refused_with_the_limit(tmp_path, read, most):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((most << 20) + 1)  # a hole: it takes no room
    with pytest.raises(FivefoldError, match=f"may have {most} MiB"):
        read(path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" * 101 + "]" * 101],
    ids=["brackets", "tables", "just too deep"],
)
def test_json_that_is_nested_too_deeply_is_refused_with_the_limit(text):
    with pytest.raises(DataError, match="nested too deeply: at most 100"):
        parse_json(text, where="the text")
    assert parse_json("[" * 100 + "]" * 100, where="the text")


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "[" * 100 + "]" * 100,
        "a = " + "{a=" * 100_000,
        "a." * 100_000 + "a = 1",
        '"a" . ' * 100_000 + "a = 1",
        "[" + "a." * 100_000 + "a]",
    ],
    ids=["brackets", "just too deep", "tables", "dots", "quoted dots", "header"],
)
def test_toml_that_is_nested_too_deeply_is_refused_with_the_limit(text):
    with pytest.raises(ConfigurationError, match="nested too deeply: at most 100"):
        parse_toml(text, where="the text")


def test_dots_that_are_no_keys_are_read():
    text = f"a = [{'0.5, ' * 500}]\nb = '{'0.5; e.g. this ' * 500}'\n"
    assert len(parse_toml(text, where="the text")["a"]) == 500


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
@pytest.mark.parametrize("digits", [25, 4299, 5000])
def test_a_number_of_many_digits_is_refused_with_the_limit(parse, digits):
    number = "9" * digits
    text = f"a = {number}" if parse is parse_toml else f'{{"a": {number}}}'
    with pytest.raises(FivefoldError) as caught:
        parse(text, where="the text")
    assert "18446744073709551615" in caught.value.hint
    assert "sys." not in str(caught.value)


def test_the_largest_and_the_smallest_number_are_read():
    assert parse_json(f"[{2**64 - 1}, {-(2**63)}]", where="x") == [2**64 - 1, -(2**63)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_has_no_numbers_that_are_none(number):
    with pytest.raises(DataError, match=r"b\[1\]\.c must be a finite number"):
        parse_json(f'{{"b": [0, {{"c": {number}}}]}}', where="the text")


def test_toml_has_infinity_and_no_nan():
    assert parse_toml("a = inf", where="the text") == {"a": float("inf")}
    with pytest.raises(ConfigurationError, match=r"t\.a must be a finite number; got nan"):
        parse_toml("[t]\na = nan", where="the text")


def test_a_key_that_is_given_twice_is_named():
    with pytest.raises(DataError, match="has the key 'rate' twice"):
        parse_json('{"x": [{"rate": 1, "other": 2, "rate": 3}]}', where="the text")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        parse_toml("a = 1\na = 2", where="the text")


def test_half_a_character_is_refused():
    with pytest.raises(DataError, match="a must be text"):
        parse_json('{"a": "\\ud800"}', where="the text")
