"""What every system is to the harness: prepared once, then epochs of batches with their rows.

All systems work on the same sample file and the same features, with the same bytes for a cache of
feature rows. A batch carries its node ids and the rows in the same order; the order itself is the
system's own. MariusGNN samples for itself, inside its buffer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.sampling.batches import SampledBatch
from fivefold.gnn.storage import Container

__all__ = [
    "Preparation",
    "System",
    "SystemBatch",
    "SystemStatistics",
    "Workload",
    "prefetched",
    "staged",
]

_Item = TypeVar("_Item")
_END = object()
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all systems get.

    Attributes:
        features: Container of kind ``"features"``.
        samples: The batches of an epoch.
        cache_bytes: For a cache of rows, its bookkeeping included where a system needs some.
        folder: A system writes its own files into a folder of its name here.
        section: Of the features.
        threads: Reads under way at once, or the nearest thing that a system has.

    Raises:
        ConfigurationError: The budget is negative.

    Example:
        >>> Workload.__name__
        'Workload'
    """

    features: Container
    samples: SampleFile
    cache_bytes: int
    folder: Path
    section: str = "x"
    threads: int = 16

    def __post_init__(self) -> None:
        if self.cache_bytes < 0:
            raise ConfigurationError(
                f"cache_bytes must not be negative; got {self.cache_bytes}", hint="use 0 for none"
            )

    @property
    def num_nodes(self) -> int:
        """Rows of the features."""
        return int(self.features.sections[self.section].shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(self.features.sections[self.section].row_bytes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the features."""
        return np.dtype(self.features.sections[self.section].dtype)

    @property
    def dim(self) -> int:
        """Values per row."""
        return int(np.prod(self.features.sections[self.section].shape[1:], dtype=np.int64))

    def cache_rows(self, *, bookkeeping_bytes: int = 0) -> int:
        """Rows that fit the budget beside a system's bookkeeping."""
        left = max(0, self.cache_bytes - bookkeeping_bytes)
        return min(left // max(1, self.row_bytes), self.num_nodes)

    def empty_rows(self, count: int) -> NDArray[Any]:
        """Make an array for rows of the features."""
        return np.empty((count, self.dim), self.dtype)


class SystemBatch(NamedTuple):
    """One mini-batch as a system hands it out.

    Attributes:
        number: Of the batch, in the sample file or the system's own count.
        node_ids: Ids of its nodes, seeds first.
        x: Their rows, in the same order.
        batch_size: Number of seeds.
        edge_index: Gives ``[2, edges]`` of places in ``node_ids``, source above target.
        sample: The batch as it was sampled, where ``node_ids`` stand in its order.

    Example:
        >>> batch = SystemBatch(0, np.array([4]), np.ones((1, 2)), 1, lambda: np.zeros((2, 0)))
        >>> batch.x.shape
        (1, 2)
    """

    number: int
    node_ids: NDArray[np.int64]
    x: NDArray[Any]
    batch_size: int
    edge_index: Callable[[], NDArray[np.int64]]
    sample: SampledBatch | None = None


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a system did before its first epoch.

    Attributes:
        seconds: Time spent.
        bytes_written: Bytes that it keeps on disk beside the features.
        details: Further figures by name.

    Example:
        >>> Preparation(seconds=1.5).bytes_written
        0
    """

    seconds: float = 0.0
    bytes_written: int = 0
    details: dict[str, float] = field(default_factory=dict)


@dataclass
class SystemStatistics:
    """What a system has done since it was made, or since a difference was taken.

    Attributes:
        rows_requested: Rows handed out.
        rows_cached: Of these, rows that came from memory.
        bytes_read: Bytes of features read from the disk.
        requests: Reads issued.

    Example:
        >>> SystemStatistics(rows_requested=4, rows_cached=1).hit_rate
        0.25
    """

    rows_requested: int = 0
    rows_cached: int = 0
    bytes_read: int = 0
    requests: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the rows that came from memory."""
        return self.rows_cached / self.rows_requested if self.rows_requested else 0.0

    def __sub__(self, other: SystemStatistics) -> SystemStatistics:
        return SystemStatistics(
            self.rows_requested - other.rows_requested,
            self.rows_cached - other.rows_cached,
            self.bytes_read - other.bytes_read,
            self.requests - other.requests,
        )

    def copy(self) -> SystemStatistics:
        """Return the figures of this moment."""
        return self - SystemStatistics()


class System(Protocol):
    """A way to get the rows of each batch.

    Example:
        >>> System.__name__
        'System'
    """

    name: str

    def prepare(self) -> Preparation:
        """Do what is done once, before the first epoch."""
        ...

    def seek(self, start: int) -> None:
        """Come to the state that the system has before a batch, in whatever way is quickest."""
        ...

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out the batches of an epoch, or a stretch of it that begins where ``seek`` led."""
        ...

    def work(self, start: int, stop: int) -> int:
        """Count what the time of these batches goes with: reads, or rows."""
        ...

    def statistics(self) -> SystemStatistics:
        """Return the running totals."""
        ...

    def close(self) -> None:
        """Free memory, files and threads."""
        ...


def staged(items: Iterable[Any], *stages: Callable[[Any], Any], depth: int = 2) -> Iterator[Any]:
    """Run items through stages, a thread and a queue for each, as DiskGNN's and Ginex' loaders do.

    Args:
        items: What to begin with.
        stages: Each is called with what the one before returned.
        depth: Length of each queue; 2 as published.

    Returns:
        What the last stage returns, in order.

    Example:
        >>> list(staged(range(4), lambda i: i + 1, lambda i: i * i))
        [1, 4, 9, 16]
    """
    running: Iterator[Any] = iter(items)
    for stage in stages:
        running = prefetched(map(stage, running), depth=depth)
    return running


def prefetched(items: Iterator[_Item], *, depth: int = 1) -> Iterator[_Item]:
    """Run an iterator in a thread of its own, a few items ahead.

    Args:
        items: What to run; its errors are raised here.
        depth: Items that wait at most.

    Yields:
        The items, in order.

    Raises:
        BaseException: What the iterator raised.

    Example:
        >>> list(prefetched(iter([1, 2, 3]), depth=2))
        [1, 2, 3]
    """
    line: queue.Queue[Any] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Any) -> bool:
        while not stopped.is_set():
            try:
                line.put(item, timeout=_TICK_S)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            if all(put((item, None)) for item in items):
                put((_END, None))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            put((_END, error))

    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = line.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
