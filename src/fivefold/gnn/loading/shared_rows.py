"""Rows in memory that the processes of one machine have together.

They are in a file without a name in any folder (``memfd_create``): nothing is left behind however
its processes end. Its label has the store's fingerprint; sealed when it is full, it never changes.
Others find it among the open files of this user's processes; a lock lets one fill while they wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fivefold.files import lock_file
from fivefold.gnn.storage import Container, RowReader
from fivefold.gnn.storage.pages import Array, aligned_empty
from fivefold.gnn.storage.reader import Backend, ReadStatistics

_LOG = logging.getLogger(__name__)
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no further seals, no shrinking, no growing, no writing
_ADD_SEALS, _GET_SEALS = 1033, 1034  # of fcntl; Python has their names from 3.12 on

_LEAST_PATIENCE_S = 60.0  # with another process that reads rows
SLOWEST_BYTES_PER_S = 10e6  # a disk below this is taken for one that hangs

Shape = tuple[tuple[int, ...], np.dtype[np.generic]]


def rows_in_memory(
    container: Container,
    name: str,
    *,
    shared: bool,
    backend: Backend = "auto",
    verify: bool = True,
) -> tuple[Array, ReadStatistics]:
    """Return all rows of a section, and the cost of reading them.

    ``shared`` rows are read-only, and cost nothing where a process of this machine had read them.
    """
    section = container.section(name)
    shape = tuple(section.shape), np.dtype(section.dtype)

    def read(rows: Array) -> ReadStatistics:
        with RowReader(container, name, backend=backend, verify=verify) as reader:
            return reader.read_runs([0], [section.num_rows], [0], rows)

    if not section.nbytes:
        return aligned_empty(*shape), ReadStatistics()
    if not shared or not hasattr(os, "memfd_create"):
        rows = aligned_empty(*shape)
        return rows, read(rows)
    text = f"{container.fingerprint} {name} {verify} {shape}"
    label = f"fivefold-rows-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    patience_s = _LEAST_PATIENCE_S + section.nbytes / SLOWEST_BYTES_PER_S
    with _alone(Path(container.path), patience_s):
        found = _found(label, shape)
        if found is not None:
            _LOG.debug("%s %s: mapped from another process", container.path, name)
            return found, ReadStatistics()
        return _filled(label, shape, read)


@contextlib.contextmanager
def _alone(path: Path, patience_s: float) -> Iterator[None]:
    """Let one process at a time look and fill; without the lock some would read twice."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock only what is writable
            if not lock_file(descriptor, path, patience_s=patience_s):
                _LOG.warning(
                    "another process has been filling a cache from %s for %.0f s: reading the rows "
                    "for this process alone",
                    path,
                    patience_s,
                )
        yield
    finally:
        os.close(descriptor)


def _found(label: str, shape: Shape) -> Array | None:
    """Return the sealed rows of a label that a process of this user has open."""
    target = f"/memfd:{label} (deleted)"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(file.readlink()) != target:
                        continue
                    rows = _mapped(os.open(file, os.O_RDONLY | os.O_CLOEXEC), target, shape)
                    if rows is not None:
                        return rows
    return None


def _mapped(descriptor: int, target: str, shape: Shape) -> Array | None:
    """Map an open file, if it is what it was taken for, this user's, and whole."""
    try:
        facts = os.fstat(descriptor)
        right = (
            str(Path(f"/proc/self/fd/{descriptor}").readlink())
            == target  # the number was not used again
            and facts.st_uid == os.geteuid()
            and facts.st_size == _num_bytes(shape)
            and fcntl.fcntl(descriptor, _GET_SEALS) == _SEALS
        )
        if not right:
            return None
        # Nobody writes, so that private maps have their pages together, too; a shared one of what
        # is sealed needs Linux 6.7.
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        return _rows(memory, shape)
    finally:
        os.close(descriptor)  # the map has its own


def _filled(
    label: str, shape: Shape, read: Callable[[Array], ReadStatistics]
) -> tuple[Array, ReadStatistics]:
    """Read the rows into a file in memory, seal it, and return them."""
    descriptor = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, _num_bytes(shape))
        memory = mmap.mmap(descriptor, 0)
        cost = read(_rows(memory, shape))
        memory.close()  # what somebody may write to cannot be sealed
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        rows = _mapped(os.dup(descriptor), f"/memfd:{label} (deleted)", shape)
        assert rows is not None, "it was made here"
        return rows, cost
    finally:
        os.close(descriptor)


def _num_bytes(shape: Shape) -> int:
    return math.prod(shape[0]) * shape[1].itemsize


def _rows(memory: mmap.mmap, shape: Shape) -> Array:
    return np.frombuffer(memory, shape[1]).reshape(shape[0])
