"""A folder of memory-mapped tokens that is either whole or not there.

Builders write to a temporary folder, sync it and rename it, so a reader never sees half a cache.
A manifest holds the size and block checksums of each file; a cache that does not match is built
again. Builders of the same cache take turns by a file lock, which saves work; safety comes from
the rename alone, so a file system without locks is fine. This module knows nothing of text.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.files import lock_file, read_checked_json, sync_folder, write_checked_json

_BLOCK_BYTES = 1 << 24
_MOST_BLOCKS_CHECKED = 64  # 1 GiB: below a second, and a truncation shows in the size anyway
_LOCK_TIMEOUT_S = 3600.0
_MOST_BUILDS = 3
_MANIFEST = "manifest.json"
_logger = logging.getLogger(__name__)


def cache_folder(spec: str) -> Path:
    """Return the folder of a configuration's ``data.cache``, made if it is not there."""
    if spec != "auto":
        return _made(Path(spec).expanduser())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.home() raises where there is no home
    folder = Path(home) / "fivefold" / "tokens"
    try:
        return _made(folder)
    except DataError:
        fallback = Path(tempfile.gettempdir()) / f"fivefold-{os.getuid()}" / "tokens"
        _logger.warning("cache folder %s cannot be written; using %s", folder, fallback)
        return _made(fallback)


class TokenWriter:
    """Appends tokens to files of a folder and remembers their checksums."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.folder = folder
        self.dtype = dtype
        self._files: dict[str, Any] = {}
        self._pending: dict[str, bytearray] = {}
        self._checksums: dict[str, list[int]] = {}

    def append(self, name: str, tokens: np.ndarray) -> None:
        """Add tokens to the end of a file."""
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
            self._pending[name], self._checksums[name] = bytearray(), []
        pending = self._pending[name]
        pending += tokens.astype(self.dtype).tobytes()
        while len(pending) >= _BLOCK_BYTES:
            self._write(name, bytes(pending[:_BLOCK_BYTES]))
            del pending[:_BLOCK_BYTES]

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write what is left and sync all files to the disk."""
        described = {}
        for name, file in self._files.items():
            if self._pending[name]:
                self._write(name, bytes(self._pending[name]))
            file.flush()
            os.fsync(file.fileno())
            described[name] = {"size_bytes": file.tell(), "checksums": self._checksums[name]}
        return described

    def close(self) -> None:
        """Close the files; safe to call twice, also after an error."""
        for file in self._files.values():
            # A full disk fails the flush inside close; the first error has told that already.
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, name: str, block: bytes) -> None:
        self._files[name].write(block)
        self._checksums[name].append(zlib.crc32(block))


def open_or_build(
    folder: Path, key: str, *, dtype: np.dtype[Any], build: Callable[[TokenWriter], dict[str, Any]]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Memory-map a cache, after building it if it is missing or damaged."""
    opened = _open(folder / key, dtype, said=False)
    for _ in range(_MOST_BUILDS):  # the second is needed only where builders without locks collide
        if opened is not None:
            return opened
        with _turn(folder / f"{key}.lock"):
            if (opened := _open(folder / key, dtype)) is not None:
                return opened  # another process built it while this one waited
            _build_or_explain(folder, key, dtype, build)
            opened = _open(folder / key, dtype)
    if opened is not None:
        return opened
    raise DataError(
        f"the tokens written to {folder / key} cannot be read back",
        hint="check the disk, or set data.cache to a folder on another one",
    )


def _build_or_explain(
    folder: Path, key: str, dtype: np.dtype[Any], build: Callable[[TokenWriter], dict[str, Any]]
) -> None:
    try:
        _build(folder, key, dtype, build)
    except OSError as error:
        raise DataError(
            f"the tokens cannot be written to {folder}: {error.strerror or error}",
            hint="free some space there, or set data.cache to a folder on another disk",
        ) from error


def _build(
    folder: Path, key: str, dtype: np.dtype[Any], build: Callable[[TokenWriter], dict[str, Any]]
) -> None:
    prefix = f".{key[:16]}-"
    for leftover in folder.glob(f"{prefix}*"):  # of a builder that was killed
        with contextlib.suppress(FileNotFoundError):  # one at work, which has just renamed it
            written_s = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
            if written_s < time.time() - _LOCK_TIMEOUT_S:  # a large text takes longer than that
                shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    writer = TokenWriter(temporary, dtype)
    try:
        facts = build(writer)
        manifest = {"dtype": dtype.name, "files": writer.finish(), "facts": facts}
        write_checked_json(temporary / _MANIFEST, manifest)
        _replace(temporary, folder / key, dtype)
    finally:
        writer.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, target: Path, dtype: np.dtype[Any]) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            raise
        # Where there are no locks, another builder may have been first: its cache is as good.
        if _open(target, dtype) is not None:
            return
        # A folder cannot be renamed onto one that is not empty: move the damaged one away.
        with tempfile.TemporaryDirectory(prefix=".damaged-", dir=target.parent) as grave:
            with contextlib.suppress(FileNotFoundError):
                target.rename(Path(grave) / "cache")
            with contextlib.suppress(FileExistsError):
                temporary.rename(target)
    sync_folder(target.parent)


def _open(
    path: Path, dtype: np.dtype[Any], *, said: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the cache, or None if it is missing or damaged, which a warning says once."""
    if not path.exists():
        return None
    try:
        manifest = read_checked_json(path / _MANIFEST)
        if manifest["dtype"] != dtype.name:
            raise ValueError("the type of the tokens differs")  # noqa: EM101, TRY301 - caught below
        arrays: dict[str, np.ndarray] = {}
        for name, described in manifest["files"].items():
            _check(path / name, described)
            arrays[name] = np.memmap(path / name, dtype=dtype, mode="r")
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not said:
            _logger.warning("token cache %s is damaged (%s); building it again", path, error)
        return None
    return arrays, manifest["facts"]


def _check(path: Path, described: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != described["size_bytes"]:
        raise ValueError(f"{path.name} has {size} bytes instead of {described['size_bytes']}")
    checksums = described["checksums"]
    stride = -(-len(checksums) // _MOST_BLOCKS_CHECKED) or 1
    with path.open("rb") as file:
        for block in range(0, len(checksums), stride):
            file.seek(block * _BLOCK_BYTES)
            if zlib.crc32(file.read(_BLOCK_BYTES)) != checksums[block]:
                raise ValueError(f"{path.name} differs from its checksum in block {block}")


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when the process dies; go on without one if need be."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            lock_file(descriptor, path, patience_s=_LOCK_TIMEOUT_S)
        yield
    finally:
        os.close(descriptor)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cache folder {folder} cannot be made: {error.strerror}",
            hint="set data.cache to a folder that you may write",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(
            f"cache folder {folder} cannot be written",
            hint="set data.cache to a folder that you may write",
        )
    return folder
