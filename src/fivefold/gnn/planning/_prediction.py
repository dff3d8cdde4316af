"""What a plan says will happen: bytes, seconds and space, before anything is written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """What one number of batches per segment costs.

    Args:
        segment_batches: Batches per segment; the last segment may have fewer.
        read_seconds: Seconds to read the cold rows of all batches.
        read_bytes: Bytes of those reads, gaps that are read through included.
        requests: Read requests.
        packed_rows: Rows on disk, over all segments.
        max_gap_bytes: The gap up to which reading through is cheapest.
        packing_seconds: Seconds to write these rows once.
        exact: Whether every segment was counted; else the batches of a few stand for all.

    Examples:
        >>> cost = SegmentCost(segment_batches=16, read_seconds=4.0, read_bytes=10**9,
        ...                    requests=900, packed_rows=10**6, max_gap_bytes=0,
        ...                    packing_seconds=20.0, exact=True)
        >>> cost.total_seconds(num_passes=50)
        220.0
    """

    segment_batches: int
    read_seconds: float
    read_bytes: int
    requests: int
    packed_rows: int
    max_gap_bytes: int
    packing_seconds: float
    exact: bool

    def total_seconds(self, num_passes: float) -> float:
        """Packing once and reading all batches ``num_passes`` times."""
        return self.packing_seconds + num_passes * self.read_seconds


@dataclass(frozen=True, kw_only=True)
class PackingCost:
    """How the rows get from the features to the packed file, and what that moves.

    Args:
        strategy: ``"resident"`` (the features fit the memory: read once, written once),
            ``"spill"`` (one pass over the features into buckets on disk, each of which then fits
            the memory) or ``"passes"`` (a pass over the features for every part of the output
            that fits the memory).
        read_bytes: Bytes read, the features' and the buckets'.
        written_bytes: Bytes written, the buckets' and the packed rows'.
        scratch_bytes: Disk space of the buckets.
        seconds: What the disk needs for both.

    Examples:
        >>> PackingCost(strategy="spill", read_bytes=5, written_bytes=4, scratch_bytes=2,
        ...             seconds=0.1).moved_bytes
        9
    """

    strategy: str
    read_bytes: int
    written_bytes: int
    scratch_bytes: int
    seconds: float

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan will read, write and take.

    Args:
        sampled_epochs: Epochs that the samples make up; values per epoch are means over them.
        read_bytes_per_epoch: Bytes of cold rows read in an epoch: exactly what the reader counts.
        requests_per_epoch: Read requests of an epoch, of at most 1 MiB each.
        read_seconds: Seconds of disk time for them.
        cold_rows: Rows of all batches that come from disk.
        accesses: Rows that all batches ask for.
        packed_rows: Rows of the packed file.
        packed_bytes: Bytes of the packed file's rows.
        cache_bytes: Bytes of the cached rows on disk, which fill the caches at the start.
        fill_seconds: Seconds to fill the caches.
        record_bytes: Bytes of the batch records, estimated from the samples.
        sample_bytes: Bytes of the sample file.
        scratch_bytes: Disk space that packing takes on top while it runs.
        buffer_bytes: Host memory that is kept for the batches in flight.
        blow_up: Packed rows over rows of the features.
        amplification: Bytes read over bytes of the cold rows asked for; 1 where there are none.
        hit_rates: Share of the accesses served by ``device``, ``host`` and ``disk``.
        packing: How the rows are packed, and what that costs.
        packing_seconds: Seconds of disk time for packing.
        online_seconds: Seconds per epoch to gather the same cold rows from the features, each
            page once per batch: what packing saves.

    Examples:
        >>> {field.name for field in dataclasses.fields(Prediction)} >= {"blow_up", "hit_rates"}
        True
    """

    sampled_epochs: int
    read_bytes_per_epoch: int
    requests_per_epoch: int
    read_seconds: float
    cold_rows: int
    accesses: int
    packed_rows: int
    packed_bytes: int
    cache_bytes: int
    fill_seconds: float
    record_bytes: int
    sample_bytes: int
    scratch_bytes: int
    buffer_bytes: int
    blow_up: float
    amplification: float
    hit_rates: dict[str, float]
    packing: PackingCost
    packing_seconds: float
    online_seconds: float

    @property
    def disk_bytes(self) -> int:
        """Largest disk space that is taken at any time, samples and features not counted."""
        return self.packed_bytes + self.cache_bytes + self.record_bytes + self.scratch_bytes

    @property
    def break_even_epochs(self) -> float:
        """Epochs after which packing has paid for itself; infinite where it never does."""
        saved = self.online_seconds - self.read_seconds
        return self.packing_seconds / saved if saved > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """A mapping of plain numbers and names."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Prediction:
        """The prediction that ``to_json`` wrote."""
        return cls(**(values | {"packing": PackingCost(**values["packing"])}))
