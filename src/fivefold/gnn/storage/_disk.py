"""What a disk can do: measured with the engine that will read from it, and what reads will take.

A request of s bytes costs t(s) seconds of a busy disk. t is measured at a few sizes, made a time
that a disk can have (``fivefold.measured``) and joined by straight lines, constant below the
smallest and in proportion above the largest: a request never costs more than its two halves.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, StorageError, require_number, require_whole
from fivefold.files import free_bytes, storage_error
from fivefold.gnn.storage._container import Container
from fivefold.gnn.storage._writer import ContainerWriter
from fivefold.gnn.storage.files import Files, open_files
from fivefold.gnn.storage.pages import PAGE_BYTES, aligned_empty
from fivefold.gnn.storage.reader import RowReader
from fivefold.measured import consistent_times_s
from fivefold.units import format_bytes, format_duration_s

_logger = logging.getLogger(__name__)
_SIZES = (4096, 16384, 65536, 262144, 1 << 20)
_BLOCK_BYTES = 1 << 20
_CALL_BYTES = 16 << 20  # per call of the engine when measuring
_FILE_BYTES_PER_S = 128 << 20  # size of the file per second that the probe may take
_LEAST_FILE_BYTES = 4 << 20
_TICK_S = 1e-9  # of the clock: what took none of them took one
_SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S = 1.0, 1e15  # of anything that is a disk
_known: dict[tuple[int, str], DiskProfile] = {}


@dataclass(frozen=True, kw_only=True)
class DiskProfile:
    """Speeds of one file system, as measured by :func:`probe_disk` or given.

    Attributes:
        sequential_read_bytes_per_s: Large reads one after another, several in flight, nothing done
            with the data.
        sequential_write_bytes_per_s: Writing a container, waiting for the disk at the end.
        random_read_iops: Random reads of 4 KiB per second, with the engine.
        request_latency_s: One random read of 4 KiB, alone.
        bytes_per_s_by_request_bytes: Random reads of these sizes, with the engine, as they were
            measured. Prices follow from the nearest times that a disk can have.
        backend: The engine's back end.
        direct: Whether reads went past the page cache.
        details: How it was measured.

    Raises:
        ConfigurationError: A speed is no disk's: below 1 byte/s or above 1 PB/s, or no number; or
            a size is not positive.

    Examples:
        >>> profile = DiskProfile(
        ...     sequential_read_bytes_per_s=1e9,
        ...     sequential_write_bytes_per_s=1e9,
        ...     random_read_iops=50_000,
        ...     request_latency_s=1e-4,
        ...     bytes_per_s_by_request_bytes={4096: 204.8e6, 1 << 20: 1048.576e6},
        ...     backend="threads",
        ...     direct=True,
        ... )
        >>> round(profile.seconds(50_000, 50_000 * 4096), 6), profile.seconds(1, 1 << 20)
        (1.0, 0.001)
    """

    sequential_read_bytes_per_s: float
    sequential_write_bytes_per_s: float
    random_read_iops: float
    request_latency_s: float
    bytes_per_s_by_request_bytes: Mapping[int, float]
    backend: str
    direct: bool
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(size <= 0 for size in self._measured()):
            raise ConfigurationError(
                f"request sizes are {sorted(self._measured())}", hint="give positive sizes"
            )
        for name in ("random_read_iops", "request_latency_s"):
            require_number(name, getattr(self, name), positive=True)
        speeds = {
            "sequential_read_bytes_per_s": self.sequential_read_bytes_per_s,
            "sequential_write_bytes_per_s": self.sequential_write_bytes_per_s,
            **{f"speed at {size} bytes": s for size, s in self._measured().items()},
        }
        for name, value in speeds.items():
            require_number(name, value, positive=True)
            if not _SLOWEST_BYTES_PER_S <= value <= _FASTEST_BYTES_PER_S:
                raise ConfigurationError(
                    f"{name} is {value:g} bytes/s, which no disk has",
                    hint="give bytes per second, from 1 to 1e15; or probe the disk",
                )

    def _measured(self) -> dict[int, float]:
        """Return the table, or what the other numbers say where it is empty."""
        if self.bytes_per_s_by_request_bytes:
            return dict(self.bytes_per_s_by_request_bytes)
        return {4096: 4096 * self.random_read_iops, 1 << 20: self.sequential_read_bytes_per_s}

    @cached_property
    def _prices(self) -> tuple[list[int], list[float]]:
        """Return sizes, ascending, and the seconds that a request of each can take."""
        table = sorted(self._measured().items())
        sizes = [size for size, _ in table]
        return sizes, consistent_times_s(sizes, [size / speed for size, speed in table])

    def request_seconds(self, request_bytes: float) -> float:
        """Return the seconds that one request of this size costs, among others of its kind.

        Raises:
            ConfigurationError: The size is negative.
        """
        if request_bytes < 0:
            raise ConfigurationError(f"request_bytes is {request_bytes}", hint="use 0 or more")
        sizes, seconds = self._prices
        if request_bytes > sizes[-1]:
            return float(seconds[-1] * request_bytes / sizes[-1])
        return float(np.interp(request_bytes, sizes, seconds))

    def seconds(self, requests: float, num_bytes: float) -> float:
        """Return the seconds for a number of requests of equal size.

        Args:
            requests: How many. For a mixture, add the seconds of each size.
            num_bytes: Bytes of all of them together.

        Raises:
            ConfigurationError: A number is negative.
        """
        if requests < 0:
            raise ConfigurationError(f"requests is {requests}", hint="use 0 or more")
        return requests * self.request_seconds(num_bytes / requests) if requests else 0.0

    def explain(self) -> str:
        """Return the profile in a few lines for people."""
        alone = format_duration_s(self.request_latency_s)
        lines = [
            f"sequential read   {format_bytes(self.sequential_read_bytes_per_s)}/s",
            f"sequential write  {format_bytes(self.sequential_write_bytes_per_s)}/s",
            f"random 4 KiB      {self.random_read_iops:,.0f} reads/s, {alone} for one alone",
        ]
        lines.extend(
            f"random {size / 1024:>6,.0f} KiB {format_bytes(speed)}/s"
            for size, speed in sorted(self._measured().items())
        )
        way = "past the page cache" if self.direct else "through the page cache"
        return "\n".join([*lines, f"back end          {self.backend}, {way}"])

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)


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

    Raises:
        ConfigurationError: ``seconds`` or ``size_bytes`` is out of range.
        StorageError: The disk refused or is too full.

    Examples:
        >>> profile = probe_disk(tempfile.gettempdir(), seconds=0.2, size_bytes=4 << 20)
        >>> profile.sequential_read_bytes_per_s > 0, sorted(profile.bytes_per_s_by_request_bytes)
        (True, [4096, 16384, 65536, 262144, 1048576])
    """
    place = Path(folder)
    require_number("seconds", seconds, positive=True)
    if size_bytes is not None:
        require_whole("size_bytes", size_bytes, least=_LEAST_FILE_BYTES)
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
            hint=f"free some space: a probe needs {format_bytes(20 * _LEAST_FILE_BYTES)}",
        )
    return max(size, _LEAST_FILE_BYTES)


def _measure(folder: Path, seconds: float, size: int, backend: str) -> DiskProfile:
    blocks = size // _BLOCK_BYTES
    with tempfile.TemporaryDirectory(prefix=".fivefold-probe-", dir=folder) as inside:
        _write(Path(inside) / "warm.fvf", 1)[0].close()  # compile before the clock runs
        container, write_speed = _write(Path(inside) / "probe.fvf", blocks)
        with container:
            os.posix_fadvise(container.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            share = seconds / 8
            files = open_files(container.path, container.descriptor)
            try:
                sequential = _sequential(files, blocks, 2 * share)
                latency = _latency(files, blocks, share / 2)
            finally:
                files.close()
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
    return container, rows * PAGE_BYTES / max(time.perf_counter() - begin, _TICK_S)


def _sequential(files: Files, blocks: int, seconds: float) -> float:
    """Return bytes/s of large reads in file order, four in flight, without checks or copies."""
    buffers = [aligned_empty(_BLOCK_BYTES) for _ in range(4)]

    def read(number: int) -> None:
        offset = PAGE_BYTES + number % blocks * _BLOCK_BYTES
        os.preadv(files.direct, [buffers[number % 4].data], offset)

    with ThreadPoolExecutor(4) as pool:
        # The next block of each buffer is asked for only when the one before is done.
        return _rate(
            lambda turn: list(pool.map(read, range(4 * turn, 4 * turn + 4))),
            4 * _BLOCK_BYTES,
            seconds,
        )


def _latency(files: Files, blocks: int, seconds: float) -> float:
    pages = np.random.default_rng(1).integers(1, blocks * _BLOCK_BYTES // PAGE_BYTES, 4096)
    buffer = aligned_empty(PAGE_BYTES)

    def read(turn: int) -> None:
        os.preadv(files.direct, [buffer.data], int(pages[turn % len(pages)]) * PAGE_BYTES)

    return 1 / _rate(read, 1, seconds)


def _random(reader: RowReader, blocks: int, size: int, seconds: float) -> float:
    """Return bytes/s of random reads of one size, through the engine, checks and copies too."""
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
    """Return amount per second of an action, repeated for some time; the first does not count."""
    action(0)
    turn, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds or turn == 0:
        turn += 1
        action(turn)
    return amount * turn / max(passed, _TICK_S)
