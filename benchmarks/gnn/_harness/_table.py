"""The systems by name, as the worker makes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gnn.systems import (
    DiskGnnSystem,
    GinexSystem,
    InMemorySystem,
    MappedSystem,
    MariusSystem,
    OnlineSystem,
    PackedLoaderSystem,
    PygMappedSystem,
    System,
    Workload,
    source_counts,
)
from fivefold.gnn.data import Dataset
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import DiskProfile

if TYPE_CHECKING:
    from fivefold.gnn.loading import DiskLoader
    from fivefold.gnn.packing import PackedStore

__all__ = ["NAMES", "PACKED", "UNLIMITED", "Order", "loader_bytes", "make_system"]

NAMES = (
    "in memory", "mmap", "mmap plain", "mmap + degree cache", "PyG mmap", "online LRU",
    "online SIEVE", "Ginex", "MariusGNN sequential", "MariusGNN dispersed", "DiskGNN",
    "ours static", "ours belady",
)  # fmt: skip
PACKED = ("DiskGNN", "ours static", "ours belady")
INTERPRETER_BYTES = 256 << 20
UNLIMITED = ("in memory",)  # they cannot run under the limit, by what they are


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is to serve."""

    name: str
    dataset: str
    samples: str
    folder: str
    cache_bytes: int
    packing_bytes: int
    loader_bytes: int | None = None
    profile: str = ""
    disk_rows: int | None = None
    partitions: int = 64
    threads: int = 16
    hidden: int = 128

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        """From that line."""
        return Order(**json.loads(text))


def loader_bytes(limit_bytes: int, cache_bytes: int, batch_bytes: int) -> int:
    """What our loader's buffers may take of a limit.

    The interpreter with torch takes its part, and so do the batches that the consumer holds. More
    than a few buffers are of no use.
    """
    left = limit_bytes - cache_bytes - INTERPRETER_BYTES - 2 * batch_bytes
    return max(2 * batch_bytes, min(left, 6 * batch_bytes))


def make_system(order: Order, dataset: Dataset, samples: SampleFile) -> System:
    """Make the system of an order."""
    work = Workload(
        features=dataset.features,
        samples=samples,
        cache_bytes=order.cache_bytes,
        folder=Path(order.folder),
        threads=order.threads,
    )
    name = order.name
    if name == "in memory":
        return InMemorySystem(work)
    if "mmap" in name:
        return _mapped(name, work, dataset)
    if name.startswith("online"):
        return OnlineSystem(work, policy="sieve" if "SIEVE" in name else "lru")
    if name == "Ginex":
        return GinexSystem(work)
    if name.startswith("MariusGNN"):
        policy: Any = name.split()[1]
        # Generated ids are random: keeping their order is the published numbering in law.
        # Its topology is read in order, once, while preparing; the buckets hold it afterwards.
        return MariusSystem(
            work,
            dataset.topology(mapped=True),
            policy=policy,
            num_partitions=order.partitions,
            shuffle=False,
        )
    return _packed(order, work)


def _mapped(name: str, work: Workload, dataset: Dataset) -> System:
    if name == "PyG mmap":
        return PygMappedSystem(work)
    scores = source_counts(dataset.topology(mapped=True)) if "cache" in name else None
    return MappedSystem(work, advice="normal" if "plain" in name else "random", scores=scores)


def _packed(order: Order, work: Workload) -> System:
    known = json.loads(order.profile)
    speeds = known.pop("bytes_per_s_by_request_bytes").items()
    table = {int(size): speed for size, speed in speeds}
    profile = DiskProfile(**known, bytes_per_s_by_request_bytes=table)
    if order.name == "DiskGNN":
        return DiskGnnSystem(
            work, profile, disk_rows=order.disk_rows, packing_bytes=order.packing_bytes
        )
    policy: Any = order.name.split()[1]
    return PackedLoaderSystem(
        work,
        profile,
        policy=policy,
        disk_rows=order.disk_rows,
        packing_bytes=order.packing_bytes,
        make_loader=lambda store: _loader(store, order.loader_bytes),
    )


def _loader(store: PackedStore, memory_bytes: int | None) -> DiskLoader:
    """Ours; torch is imported here only, for its import takes seconds."""
    from fivefold.gnn.loading import DiskLoader  # noqa: PLC0415

    return DiskLoader(store, memory_bytes=memory_bytes)
