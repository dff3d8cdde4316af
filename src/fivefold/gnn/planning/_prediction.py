"""What a plan says will happen: bytes, seconds and space, before anything is written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fivefold.gnn.planning._geometry import PackingCost


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """What one number of batches per segment costs, over all batches."""

    segment_batches: int
    read_seconds: float
    read_bytes: int  # gaps that are read through included
    requests: int
    packed_rows: int
    max_gap_bytes: int  # up to which reading through is cheapest
    packing_seconds: float
    exact: bool  # every segment was counted; else the batches of a few stand for all

    def total_seconds(self, num_passes: float) -> float:
        """Return the time for packing once and reading all batches ``num_passes`` times."""
        return self.packing_seconds + num_passes * self.read_seconds


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
        """Return a mapping of plain numbers and names."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Prediction:
        """Return the prediction that ``to_json`` wrote."""
        return cls(**(values | {"packing": PackingCost(**values["packing"])}))
