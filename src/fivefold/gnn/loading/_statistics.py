"""What a loader did: rows and bytes by level, requests, time by stage, waiting of the consumer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderStatistics:
    """Counts of a loader since it was made; the difference of two is what lies between them.

    Args:
        batches: Batches handed to the training loop.
        rows: Rows of prepared batches by level: "device" and "host" caches, "shared" rows of the
            disk (used by several batches of a segment), "private" ones (used by one). For
            batches that were not packed: "file" or "memory".
        row_bytes: Bytes of one row.
        requests: Read requests for cold rows.
        bytes_read: Bytes that these requests moved from the disk.
        cold_bytes: Bytes of the cold rows themselves.
        record_bytes: Bytes of the batch records that were read.
        fill_bytes: Bytes read to fill the caches.
        fill_s: Seconds that took.
        stage_s: Seconds in each stage of the pipeline, by name.
        wait_s: Seconds for which the training loop waited for batches.
        buffer_bytes: Bytes of the buffers of the ring.
    """

    batches: int = 0
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    row_bytes: int = 0
    requests: int = 0
    bytes_read: int = 0
    cold_bytes: int = 0
    record_bytes: int = 0
    fill_bytes: int = 0
    fill_s: float = 0.0
    stage_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    wait_s: float = 0.0
    buffer_bytes: int = 0

    @property
    def bytes_by_level(self) -> dict[str, int]:
        """Return bytes that each level handed over."""
        return {level: rows * self.row_bytes for level, rows in self.rows.items()}

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the rows that each level served; they add up to 1."""
        total = sum(self.rows.values())
        return {level: rows / total if total else 0.0 for level, rows in self.rows.items()}

    @property
    def amplification(self) -> float:
        """Return bytes read from the disk per byte of cold rows; 1 where nothing was cold."""
        return self.bytes_read / self.cold_bytes if self.cold_bytes else 1.0

    def __sub__(self, earlier: LoaderStatistics) -> LoaderStatistics:
        kept = ("row_bytes", "buffer_bytes")
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            now, then = getattr(self, field.name), getattr(earlier, field.name)
            if isinstance(now, Mapping):
                changes[field.name] = {key: now[key] - then.get(key, 0) for key in now}
            else:
                changes[field.name] = now if field.name in kept else now - then
        return LoaderStatistics(**changes)

    def to_json(self) -> dict[str, Any]:
        """Return all counts and rates as plain numbers."""
        return dataclasses.asdict(self) | {
            "bytes_by_level": self.bytes_by_level,
            "hit_rates": self.hit_rates,
            "amplification": self.amplification,
        }
