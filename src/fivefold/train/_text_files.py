"""Files below a folder: which of them are text, why the others are not, and their content.

Every byte on disk is read or stands in the account with a reason and what to do about it. What a
file is, is told by its content, by its name only where the content is another program's text.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import DataError
from fivefold.reading import Reading

PIECE_BYTES = 1 << 20
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_NAMES_KEPT = 3
_WARN_ABOVE, _FAIL_ABOVE = 0.01, 0.5


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file below the source folder."""

    path: Path
    name: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Something below the source folder that is no candidate, such as a hidden folder."""

    name: str
    why: str
    missed: bool  # rather than left out as the guide says


def resolve_source(spec: str) -> Path:
    """Return the folder or the file of a configuration's ``data.path``."""
    root = Path(sysconfig.get_path("stdlib")) if spec == "stdlib" else Path(spec).expanduser()
    hint = 'set data.path to a folder of text files, to one, or to "stdlib" for Python\'s library'
    if not root.exists():
        raise DataError(f"data folder {root} does not exist", hint=hint)
    if not root.is_dir() and not (root.is_file() and root.stat().st_size):
        raise DataError(f"data.path {root} is neither a folder nor a file with content", hint=hint)
    return root


def find_files(root: Path, *, library: bool) -> tuple[list[SourceFile], list[Entry]]:
    """List all files below a folder that are not empty, sorted by name, and what else is there.

    Hidden files and folders are left out, links to folders are not followed. A root that is a file
    is the only one.
    """

    def fail(error: OSError) -> None:
        raise DataError(
            f"data folder {error.filename} cannot be listed: {error.strerror}",
            hint="give read permission, or move the folder out of data.path",
        ) from error

    if root.is_file():
        return _listed(root, root.parent)
    found: list[SourceFile] = []
    others: list[Entry] = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        skipped = _NOT_THE_LIBRARY if library else frozenset[str]()
        wanted = []
        for name in sorted(subfolders):
            path = Path(folder, name)
            if name.startswith(".") or name in skipped:
                others.append(Entry(name=_name(path, root), why="hidden", missed=False))
            elif path.is_symlink():
                why = "a link to a folder: put the folder itself there"
                others.append(Entry(name=_name(path, root), why=why, missed=True))
            else:
                wanted.append(name)
        subfolders[:] = wanted
        for name in sorted(names):
            if library and not name.endswith(".py"):
                continue
            if name.startswith("."):
                others.append(
                    Entry(name=_name(Path(folder, name), root), why="hidden", missed=False)
                )
                continue
            files, odd = _listed(Path(folder, name), root)
            found += files
            others += odd
    return sorted(found, key=lambda file: file.name), others


def _listed(path: Path, root: Path) -> tuple[list[SourceFile], list[Entry]]:
    name = _name(path, root)
    if not path.is_file():  # a dangling link, a socket, a pipe: to open it could wait for ever
        broken = path.is_symlink() and not path.exists()
        why = "a link to nothing" if broken else "no regular file"
        return [], [Entry(name=name, why=why, missed=True)]
    status = path.stat()
    if status.st_size == 0:
        return [], [Entry(name=name, why="empty", missed=False)]
    size, modified = status.st_size, status.st_mtime_ns
    return [SourceFile(path=path, name=name, size_bytes=size, modified_ns=modified)], []


def _name(path: Path, root: Path) -> str:
    # Names that are not UTF-8 are allowed on disk; surrogates would break hashing them.
    name = path.relative_to(root).as_posix()
    return name.encode(errors="surrogateescape").decode(errors="replace")


# -- what a file is -------------------------------------------------------------------------------

# First bytes of files that are no text, or text of no use as it is.
_MAGIC = (
    (b"\xff\xfe\0\0", "UTF-32: iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xfe\xff", "UTF-32: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16: iconv -f UTF-16 -t UTF-8"),
    (b"ARROW1\0\0", "Arrow: write its text column to text files"),
    (b"\x1f\x8b", "compressed by gzip: unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it"),
    (b"\xfd7zXZ\0", "compressed by xz: unpack it"),
    (b"PK\x03\x04", "a zip archive (also .docx, .xlsx, .npz): unpack or convert it"),
    (b"SQLite format 3\0", "a SQLite database: export its text"),
)
# The same where a few letters are not enough: text may begin with them.
_MAGIC_PATTERNS = (
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), "compressed by bzip2: unpack it"),
    (re.compile(rb"%PDF-\d\.\d"), "PDF: extract its text"),
)
_PARQUET = b"PAR1", "Parquet: write its text column to text files"  # at both ends
_LFS = b"version https://git-lfs.github.com/spec/"
_ANNEX = b"/annex/objects/"
_POINTER = "a pointer to a file that is not here: git lfs pull"
_JSON_LINES = "JSON lines: write the field with the text to text files"
_NOTEBOOK = "a notebook: jupyter nbconvert --to script"
_BINARY = "NUL characters, so no text"
_WIDE = "UTF-16 without a mark: iconv -f UTF-16LE (or UTF-16BE) -t UTF-8"
_LINES_LOOKED_AT = 3


def why_not_text(file: SourceFile) -> tuple[str, int] | None:
    """Return why a file is not read, and its bytes; None for text. Reads it in pieces.

    A pointer to a file elsewhere counts with the bytes of that file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for number, piece in enumerate(_raw_pieces(file.path)):
            if number == 0 and (known := _known(file, piece)) is not None:
                return known
            if b"\0" in piece:
                return _WIDE if number == 0 and _is_wide(piece) else _BINARY, file.size_bytes
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8: iconv -f ENCODING -t UTF-8, with the encoding it has", file.size_bytes
    return None


def _known(file: SourceFile, piece: bytes) -> tuple[str, int] | None:
    size = file.size_bytes
    if piece.startswith((_LFS, _ANNEX)) and size < PIECE_BYTES:
        real = re.search(rb"^size (\d{1,18})$|-s(\d{1,18})--", piece, re.MULTILINE)
        return _POINTER, max(size, int(real[1] or real[2])) if real else size
    if (why := _by_magic(file, piece)) is not None:
        return why, size
    if file.path.suffix in {".jsonl", ".ndjson"} or _is_json_lines(piece, whole=len(piece) == size):
        return _JSON_LINES, size
    if file.path.suffix == ".ipynb" or _is_notebook(file, piece):
        return _NOTEBOOK, size
    return None


def _by_magic(file: SourceFile, piece: bytes) -> str | None:
    for magic, why in _MAGIC:
        if piece.startswith(magic):
            return why
    for pattern, why in _MAGIC_PATTERNS:
        if pattern.match(piece):
            return why
    magic, why = _PARQUET
    return why if piece.startswith(magic) and _last_bytes(file, len(magic)) == magic else None


def _last_bytes(file: SourceFile, number: int) -> bytes:
    return b"".join(_raw_pieces(file.path, max(file.size_bytes - number, 0), file.size_bytes))


def _is_notebook(file: SourceFile, piece: bytes) -> bool:
    """Return whether the content is a JSON object with cells and the format's number."""
    start = piece.removeprefix(codecs.BOM_UTF8).lstrip()
    if not start.startswith(b"{") or b'"cell_type"' not in piece:
        return False
    try:
        found = json.loads(b"".join(_raw_pieces(file.path)).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return "nbformat" in found and ("cells" in found or "worksheets" in found)


def _is_json_lines(piece: bytes, *, whole: bool) -> bool:
    """Return whether the first lines are JSON objects, each by itself, and at least two."""
    lines = piece.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not whole:
        del lines[-1]  # it may be cut
    found = [line for line in lines[: 2 * _LINES_LOOKED_AT] if line.strip()][:_LINES_LOOKED_AT]
    return len(found) > 1 and all(map(_is_object, found))


def _is_object(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_wide(piece: bytes) -> bool:
    """Return whether every second byte, of one kind, is nearly always NUL and the other never."""
    for at in (0, 1):
        if piece[at::2].count(0) > len(piece[at::2]) * 3 // 4 and 0 not in piece[1 - at :: 2]:
            return len(piece) > 1
    return False


# -- the account ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Files that are not read for one reason, with the names of the first."""

    why: str
    files: int
    size_bytes: int
    names: tuple[str, ...]


class Account:
    """What became of every byte of a folder.

    Args:
        root: The folder.
        files: Candidates, that is all files that are neither hidden nor empty.
        others: What else is there.
    """

    def __init__(self, root: Path, files: list[SourceFile], others: list[Entry]) -> None:
        self._root, self._others = root, others
        self._disk = sum(file.size_bytes for file in files)
        self._left_out: dict[str, LeftOut] = {}
        self._read_files, self.read_bytes = len(files), self._disk
        for entry in others:
            if entry.missed:
                self._add(entry.why, entry.name, 0)

    def leave_out(self, file: SourceFile, why: str, size_bytes: int) -> None:
        """Note a file that is not read; it may stand for more bytes than it has."""
        self._disk += size_bytes - file.size_bytes
        self.read_bytes -= file.size_bytes
        self._read_files -= 1
        self._add(why, file.name, size_bytes)

    def _add(self, why: str, name: str, size_bytes: int) -> None:
        before = self._left_out.get(why, LeftOut(why=why, files=0, size_bytes=0, names=()))
        self._left_out[why] = LeftOut(
            why=why,
            files=before.files + 1,
            size_bytes=before.size_bytes + size_bytes,
            names=(*before.names, name)[:_NAMES_KEPT],
        )

    def record(self) -> dict[str, Any]:
        """Return the account as plain values."""
        hidden = [entry.name for entry in self._others if not entry.missed]
        return {
            "source": str(self._root),
            "read_files": self._read_files,
            "read_bytes": self.read_bytes,
            "disk_bytes": self._disk,
            "left_out": [vars(part) | {"names": list(part.names)} for part in self._parts()],
            "hidden_or_empty": len(hidden),
            "lost_in_tokens_bytes": 0,
        }

    def _parts(self) -> list[LeftOut]:
        return sorted(self._left_out.values(), key=lambda part: (-part.size_bytes, part.why))


def missed_share(record: dict[str, Any]) -> float:
    """Return the share of the bytes on disk, 0 to 1, that is in no token."""
    read = float(record["read_bytes"] - record["lost_in_tokens_bytes"])
    return 1.0 - read / float(max(record["disk_bytes"], 1))


def reading_of(record: dict[str, Any]) -> Reading:
    """Return an account as read, left out and harmless, by reason with the first names."""
    reading = Reading(record["source"])
    share = record["read_bytes"] / max(record["disk_bytes"], 1)
    number = record["read_files"]
    files = f"{number:,} file{'s' * (number != 1)}"
    reading.take(f"{files}, {share:.1%} of {record['disk_bytes']:,} bytes")
    for part in record["left_out"]:
        more = part["files"] - len(part["names"])
        names = ", ".join(part["names"]) + (f" and {more} more" if more else "")
        reading.leave_out(f"{names} ({part['size_bytes']:,} bytes: {part['why']})", part["why"])
    if lost := record["lost_in_tokens_bytes"]:
        reading.leave_out(f"{lost:,} bytes that do not come back from their tokens", "tokenizer")
    if hidden := record["hidden_or_empty"]:
        reading.ignore(f"{hidden} hidden or empty entries", "hidden and empty files are not read")
    return reading


def require_most_read(record: dict[str, Any]) -> None:
    """Refuse to train on the smaller part of a folder.

    Raises:
        DataError: More than half of the bytes would be left out.
    """
    missed = missed_share(record)
    if missed <= _FAIL_ABOVE and record["read_files"]:
        return
    parts = [f"{part['names'][0]}: {part['why']}" for part in record["left_out"][:_NAMES_KEPT]]
    raise DataError(
        f"{missed:.1%} of the {record['disk_bytes']:,} bytes in data.path would not be read: "
        f"{reading_of(record).line()}",
        hint="; ".join(parts)
        or "data.tokenizer does not keep the text: use one whose decoder gives it back",
    )


def warning_of(record: dict[str, Any]) -> str | None:
    """Return what to warn of at the start of a run; None where nearly all is read."""
    elsewhere = any(part["size_bytes"] == 0 for part in record["left_out"])  # nobody knows how much
    if missed_share(record) <= _WARN_ABOVE and not elsewhere:
        return None
    return f"{missed_share(record):.1%} of the bytes in data.path are not read: " + (
        reading_of(record).line()
    )


# -- content --------------------------------------------------------------------------------------


def cut_in_two(file: SourceFile, fraction: float) -> int:
    """Return the byte at which the last part of a text begins: a line's, else a character's.

    Raises:
        DataError: The text is one character.
    """
    wanted = min(max(round(file.size_bytes * (1 - fraction)), 1), file.size_bytes - 1)
    start = max(wanted - PIECE_BYTES, 0)
    with file.path.open("rb") as opened:
        opened.seek(start)
        before, after = opened.read(wanted - start), opened.read(PIECE_BYTES)
    ends = [
        start + before.rfind(b"\n") + 1 if b"\n" in before else 0,
        wanted + after.find(b"\n") + 1 if b"\n" in after else file.size_bytes,
    ]
    inner = [end for end in ends if 0 < end < file.size_bytes]
    if inner:
        return min(inner, key=lambda end: abs(end - wanted))
    text = before + after
    for step in (0, -1, 1, -2, 2, -3, 3):  # a character has at most four bytes
        at = wanted - start + step
        if 0 < at < len(text) and not _is_inside(text[at]):
            return start + at
    raise DataError(
        f"{file.name} is the only text file, and too short to be cut in two",
        hint="use more text: a part of it is held out for validation",
    )


def read_pieces(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yield a text file from one byte to another, in pieces of at most two MiB.

    They end at a line's end. A line that is longer than a MiB is cut, after a space where it has
    one, never inside a character.
    """
    pending = b""
    for piece in _raw_pieces(path, start, stop):
        pending += piece
        end = pending.rfind(b"\n") + 1
        if not end and len(pending) >= PIECE_BYTES:
            end = pending.rfind(b" ", len(pending) // 2) + 1 or _last_character(pending)
        if end:
            yield pending[:end]
            pending = pending[end:]
    if pending:
        yield pending


def _last_character(text: bytes) -> int:
    """Return where the last character begins, which may be cut."""
    at = len(text) - 1
    while at > 0 and _is_inside(text[at]):
        at -= 1
    return at


def _is_inside(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def _raw_pieces(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            left = PIECE_BYTES if stop is None else stop - start
            while piece := file.read(min(PIECE_BYTES, left)):
                yield piece
                left -= 0 if stop is None else len(piece)
    except OSError as error:
        raise DataError(
            f"file {path} cannot be read: {error.strerror}",
            hint="give read permission, or move the file out of data.path",
        ) from error
