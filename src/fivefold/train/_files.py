"""Which files of a folder are text, and how a text is read in pieces of bounded size.

The choice depends on names and contents only, never on the order in which a disk lists them.
This module knows nothing of tokens or splits.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE_BYTES = 1 << 20
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file below the source folder.

    Attributes:
        path: Where it is.
        name: Path below the source folder, with forward slashes.
        size_bytes: Its size when it was listed.
        modified_ns: When it was last written, in nanoseconds since 1970.

    Examples:
        >>> SourceFile(path=Path("/t/a.txt"), name="a.txt", size_bytes=3, modified_ns=0).name
        'a.txt'
    """

    path: Path
    name: str
    size_bytes: int
    modified_ns: int


def resolve_source(spec: str) -> Path:
    """Folder of a configuration's ``data.path``.

    Args:
        spec: ``"stdlib"`` for the running interpreter's library, or a folder.

    Returns:
        The folder.

    Raises:
        DataError: It does not exist or is not a folder.

    Examples:
        >>> (resolve_source("stdlib") / "os.py").exists()
        True
    """
    root = Path(sysconfig.get_path("stdlib")) if spec == "stdlib" else Path(spec).expanduser()
    hint = 'set data.path to a folder of text files, or to "stdlib" for the Python library'
    if not root.exists():
        raise DataError(f"data folder {root} does not exist", hint=hint)
    if not root.is_dir():
        raise DataError(f"data.path {root} is a file, not a folder", hint=hint)
    return root


def find_files(root: Path, *, library: bool) -> list[SourceFile]:
    """All files below a folder that are not empty, sorted by name.

    Hidden files and folders are left out, links to folders are not followed.

    Args:
        root: The folder.
        library: Take only Python files, and none of installed packages.

    Returns:
        The files; whether they are text is not looked at.

    Raises:
        DataError: A folder cannot be listed.

    Examples:
        >>> files = find_files(resolve_source("stdlib"), library=True)
        >>> any(file.name == "os.py" for file in files)
        True
    """

    def fail(error: OSError) -> None:
        raise DataError(
            f"data folder {error.filename} cannot be listed: {error.strerror}",
            hint="give read permission, or move the folder out of data.path",
        ) from error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        skipped = _NOT_THE_LIBRARY if library else frozenset[str]()
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n not in skipped]
        for name in names:
            if not name.startswith(".") and (not library or name.endswith(".py")):
                found += _listed(Path(folder, name), root)
    return sorted(found, key=lambda file: file.name)


def is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without NUL characters; reads it in pieces.

    Args:
        path: The file.

    Returns:
        True if it is text.

    Raises:
        DataError: The file cannot be read.

    Examples:
        >>> is_text(resolve_source("stdlib") / "os.py")
        True
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in _raw_pieces(path):
            if b"\0" in piece:
                return False
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def read_pieces(path: Path) -> Iterator[bytes]:
    """Content of a text file in pieces that end at a line's end.

    A line longer than a piece (about 1 MiB) is kept whole, so that a tokenizer never sees a cut
    character or word.

    Args:
        path: The file.

    Yields:
        Pieces that together are the file.

    Raises:
        DataError: The file cannot be read.

    Examples:
        >>> path = resolve_source("stdlib") / "os.py"
        >>> b"".join(read_pieces(path)) == path.read_bytes()
        True
    """
    pending: list[bytes] = []
    for piece in _raw_pieces(path):
        head, newline, tail = piece.rpartition(b"\n")
        if newline:
            yield b"".join([*pending, head, newline])
            pending = []
        pending.append(tail)
    if rest := b"".join(pending):
        yield rest


def _raw_pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise DataError(
            f"file {path} cannot be read: {error.strerror}",
            hint="give read permission, or move the file out of data.path",
        ) from error


def _listed(path: Path, root: Path) -> list[SourceFile]:
    # A dangling link, a socket or an empty file is no text; none of them is an error.
    if not path.is_file():
        return []
    status = path.stat()
    if status.st_size == 0:
        return []
    # Names that are not UTF-8 are allowed on disk; surrogates would break hashing them.
    name = (
        path.relative_to(root).as_posix().encode(errors="surrogateescape").decode(errors="replace")
    )
    return [
        SourceFile(path=path, name=name, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)
    ]
