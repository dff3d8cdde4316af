"""What a read cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReadStatistics:
    """Counts of one or more reads; they add up with ``+``.

    Attributes:
        requests: Requests to the disk.
        bytes_read: Bytes that they asked for: whole pages.
        bytes_used: Bytes of the rows that were wanted.
        seconds: Time in the reading calls.

    Examples:
        >>> total = ReadStatistics(1, 4096, 512, 0.5) + ReadStatistics(2, 8192, 5632, 0.5)
        >>> total.requests, total.amplification, total.bytes_per_s
        (3, 2.0, 12288.0)
    """

    requests: int = 0
    bytes_read: int = 0
    bytes_used: int = 0
    seconds: float = 0.0

    def __add__(self, other: ReadStatistics) -> ReadStatistics:
        return ReadStatistics(
            self.requests + other.requests,
            self.bytes_read + other.bytes_read,
            self.bytes_used + other.bytes_used,
            self.seconds + other.seconds,
        )

    @property
    def amplification(self) -> float:
        """Bytes read per byte wanted; 1 where nothing was read."""
        return self.bytes_read / self.bytes_used if self.bytes_used else 1.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second; 0 where nothing was read."""
        return self.bytes_read / self.seconds if self.seconds else 0.0
