"""Measuring a disk with the engine that will read from it, on a file of its own."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, StorageError
from fivefold.files import free_bytes, storage_error
from fivefold.gnn.storage._backends import open_files
from fivefold.gnn.storage._buffers import aligned_empty
from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._profile import DiskProfile
from fivefold.gnn.storage._reader import RowReader
from fivefold.gnn.storage._writer import ContainerWriter
from fivefold.gnn.storage._xxhash import PAGE_BYTES
from fivefold.units import format_bytes

_logger = logging.getLogger(__name__)
_SIZES = (4096, 16384, 65536, 262144, 1 << 20)
_BLOCK_BYTES = 1 << 20
_CALL_BYTES = 16 << 20  # per call of the engine when measuring
_FILE_BYTES_PER_S = 128 << 20  # size of the file per second that the probe may take
_LEAST_FILE_BYTES = 4 << 20
_known: dict[tuple[int, str], DiskProfile] = {}


def probe_disk(
    folder: str | os.PathLike[str],
    *,
    seconds: float = 2.0,
    size_bytes: int | None = None,
    backend: str = "auto",
    fresh: bool = False,
) -> DiskProfile:
    """Measure the file system of a folder; known results are used again within the process.

    A file is written there, read in several ways and removed. Speeds vary with what else the
    machine does: where they are compared with something, probe (``fresh=True``) in the same run.

    Args:
        folder: Any folder of the file system, writable.
        seconds: Time to spend, roughly.
        size_bytes: Size of the file; None takes 128 MiB per second, at most a twentieth of what is
            free.
        backend: Of the engine, as for :class:`RowReader`.
        fresh: Measure even if this file system is known.

    Returns:
        The profile.

    Raises:
        ConfigurationError: ``seconds`` or ``size_bytes`` is out of range.
        StorageError: The disk refused or is too full.

    Examples:
        >>> profile = probe_disk(tempfile.gettempdir(), seconds=0.2, size_bytes=4 << 20)
        >>> profile.sequential_read_bytes_per_s > 0, sorted(profile.bytes_per_s_by_request_bytes)
        (True, [4096, 16384, 65536, 262144, 1048576])
    """
    place = Path(folder)
    if seconds <= 0 or (size_bytes is not None and size_bytes < _LEAST_FILE_BYTES):
        raise ConfigurationError(
            f"seconds is {seconds}, size_bytes is {size_bytes}",
            hint=f"use more than 0 seconds and at least {_LEAST_FILE_BYTES} bytes",
        )
    try:
        key = (place.stat().st_dev, backend)
    except OSError as error:
        raise storage_error(error.errno or 0, place, "probing") from error
    if fresh or key not in _known:
        size = size_bytes or _default_size(place, seconds)
        try:
            _known[key] = _measure(place, seconds, size, backend)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error(error.errno or 0, place, "probing") from error
        speed = format_bytes(_known[key].sequential_read_bytes_per_s)
        pages = f"{_known[key].random_read_iops:,.0f}"
        _logger.info("probed %s: reads %s/s in sequence, %s pages/s at random", place, speed, pages)
        _logger.debug("probed %s: %s", place, _known[key].to_json())
    return _known[key]


def _default_size(folder: Path, seconds: float) -> int:
    free = free_bytes(folder)
    size = min(int(seconds * _FILE_BYTES_PER_S), free // 20)
    if size < _LEAST_FILE_BYTES:
        raise StorageError(
            f"{format_bytes(free)} are free in {folder}, too few to probe the disk",
            hint="free some space",
        )
    return max(size, _LEAST_FILE_BYTES)


def _measure(folder: Path, seconds: float, size: int, backend: str) -> DiskProfile:
    blocks = size // _BLOCK_BYTES
    with tempfile.TemporaryDirectory(prefix=".fivefold-probe-", dir=folder) as inside:
        _write(Path(inside) / "warm.fvf", 1)[0].close()  # compile before the clock runs
        container, write_speed = _write(Path(inside) / "probe.fvf", blocks)
        with container:
            _forget_cached(container)
            share = seconds / 8
            sequential = _sequential(container, blocks, 2 * share)
            latency = _latency(container, blocks, share / 2)
            with RowReader(container, "x", backend=backend) as reader:  # type: ignore[arg-type]
                speeds = {size: _random(reader, blocks, size, share) for size in _SIZES}
                name, direct = reader.backend, reader.direct
    return DiskProfile(
        sequential_read_bytes_per_s=sequential,
        sequential_write_bytes_per_s=write_speed,
        random_read_iops=speeds[PAGE_BYTES] / PAGE_BYTES,
        request_latency_s=latency,
        bytes_per_s_by_request_bytes=speeds,
        backend=name,
        direct=direct,
        details={"file_bytes": blocks * _BLOCK_BYTES, "seconds": seconds},
    )


def _write(path: Path, blocks: int) -> tuple[Container, float]:
    rows = blocks * _BLOCK_BYTES // PAGE_BYTES
    block = np.random.default_rng(0).integers(0, 256, (1 << 12, PAGE_BYTES), dtype=np.uint8)
    begin = time.perf_counter()
    schema = {"x": (np.uint8, (rows, PAGE_BYTES))}
    with ContainerWriter(path, kind="probe", sections=schema, attributes={}) as writer:
        for first in range(0, rows, len(block)):
            writer.write("x", first, block[: rows - first])
        container = writer.commit()
    return container, rows * PAGE_BYTES / (time.perf_counter() - begin)


def _forget_cached(container: Container) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(container.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _sequential(container: Container, blocks: int, seconds: float) -> float:
    """Bytes per second of large reads in file order, four in flight, without checks or copies."""
    files = open_files(container.path, container.descriptor, direct=None)
    buffers = [aligned_empty(_BLOCK_BYTES) for _ in range(4)]

    def read(number: int) -> None:
        offset = PAGE_BYTES + number % blocks * _BLOCK_BYTES
        os.preadv(files.direct, [buffers[number % 4].data], offset)

    try:
        with ThreadPoolExecutor(4) as pool:
            return _rate(lambda turn: _all(pool, read, turn), 8 * _BLOCK_BYTES, seconds)
    finally:
        files.close()


def _all(pool: ThreadPoolExecutor, read: Callable[[int], None], turn: int) -> None:
    # Eight at a time: the next block of each buffer is asked for only when the one before is done.
    for half in (0, 4):
        list(pool.map(read, range(8 * turn + half, 8 * turn + half + 4)))


def _latency(container: Container, blocks: int, seconds: float) -> float:
    files = open_files(container.path, container.descriptor, direct=None)
    pages = np.random.default_rng(1).integers(1, blocks * _BLOCK_BYTES // PAGE_BYTES, 4096)
    buffer = aligned_empty(PAGE_BYTES)

    def read(turn: int) -> None:
        os.preadv(files.direct, [buffer.data], int(pages[turn % len(pages)]) * PAGE_BYTES)

    try:
        return 1 / _rate(read, 1, seconds)
    finally:
        files.close()


def _random(reader: RowReader, blocks: int, size: int, seconds: float) -> float:
    """Bytes per second of random reads of one size, through the engine, checks and copies too."""
    rows = size // PAGE_BYTES
    places = blocks * _BLOCK_BYTES // size
    # Every second place at most: neighbours would be joined to one request.
    count = max(1, min(_CALL_BYTES // size, places // 4))
    out = aligned_empty((count * rows, PAGE_BYTES))
    out.fill(0)  # so that the system's work for new memory is not counted
    random = np.random.default_rng(2)
    counts = np.full(count, rows)

    def read(_turn: int) -> None:
        chosen = np.sort(random.choice(places // 2, count, replace=False)) * 2
        reader.read_runs(chosen * rows, counts, np.arange(count) * rows, out)

    return _rate(read, count * size, seconds)


def _rate(action: Callable[[int], Any], amount: float, seconds: float) -> float:
    """Amount per second of an action, repeated for some time; the first one is not counted."""
    action(0)
    turn, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds or turn == 0:
        turn += 1
        action(turn)
    return amount * turn / passed
