"""What a disk can do, as numbers, and the time that a plan's reads will take on it.

The cost model: a request of s bytes costs t(s) seconds of a busy disk, with the engine's usual
number of requests in flight. t is measured at a few sizes and joined by straight lines; below the
smallest size it is constant (the disk is bound by requests), above the largest it grows in
proportion (bound by bandwidth). Reads of different sizes add up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Self

from fivefold.errors import ConfigurationError, DataError
from fivefold.files import parse_json
from fivefold.units import format_bytes, format_duration_s


@dataclass(frozen=True, kw_only=True)
class DiskProfile:
    """Speeds of one file system, as measured by :func:`probe_disk` or given.

    Attributes:
        sequential_read_bytes_per_s: Large reads one after another, several in flight, nothing done
            with the data.
        sequential_write_bytes_per_s: Writing a container, waiting for the disk at the end.
        random_read_iops: Random reads of 4 KiB per second, with the engine.
        request_latency_s: One random read of 4 KiB, alone.
        bytes_per_s_by_request_bytes: Random reads of these sizes, with the engine.
        backend: The engine's back end.
        direct: Whether reads went past the page cache.
        details: How it was measured.

    Raises:
        ConfigurationError: A speed is not positive and finite.

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
        >>> DiskProfile.from_json(profile.to_json()) == profile
        True
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
        speeds = {
            "sequential_read_bytes_per_s": self.sequential_read_bytes_per_s,
            "sequential_write_bytes_per_s": self.sequential_write_bytes_per_s,
            "random_read_iops": self.random_read_iops,
            "request_latency_s": self.request_latency_s,
            **{f"speed at {size} bytes": s for size, s in self._measured().items()},
        }
        for name, value in speeds.items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} is {value}", hint="give a positive number")
        if any(size <= 0 for size in self._measured()):
            raise ConfigurationError(
                f"request sizes are {sorted(self._measured())}", hint="give positive sizes"
            )

    def _measured(self) -> dict[int, float]:
        """The table, or what the other numbers say where it is empty."""
        if self.bytes_per_s_by_request_bytes:
            return dict(self.bytes_per_s_by_request_bytes)
        return {4096: 4096 * self.random_read_iops, 1 << 20: self.sequential_read_bytes_per_s}

    def _points(self) -> list[tuple[int, float]]:
        """(size, seconds of a request), the second never falling: noise is smoothed out."""
        points: list[tuple[int, float]] = []
        for size, speed in sorted(self._measured().items()):
            least = points[-1][1] if points else 0.0
            points.append((size, max(least, size / speed)))
        return points

    def request_seconds(self, request_bytes: float) -> float:
        """Seconds that one request of this size costs, among others of its kind.

        Args:
            request_bytes: Its size.

        Returns:
            The seconds.

        Raises:
            ConfigurationError: The size is negative.
        """
        if request_bytes < 0:
            raise ConfigurationError(f"request_bytes is {request_bytes}", hint="use 0 or more")
        points = self._points()
        if request_bytes <= points[0][0]:
            return points[0][1]
        for (low, before), (high, after) in pairwise(points):
            if request_bytes <= high:
                return before + (after - before) * (request_bytes - low) / (high - low)
        size, seconds = points[-1]
        return seconds * request_bytes / size

    def seconds(self, requests: float, num_bytes: float) -> float:
        """Seconds for a number of requests of equal size.

        Args:
            requests: How many. For a mixture, add the seconds of each size.
            num_bytes: Bytes of all of them together.

        Returns:
            The seconds; 0 for no requests.

        Raises:
            ConfigurationError: A number is negative.
        """
        if requests < 0:
            raise ConfigurationError(f"requests is {requests}", hint="use 0 or more")
        return requests * self.request_seconds(num_bytes / requests) if requests else 0.0

    def explain(self) -> str:
        """The profile in a few lines for people."""
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
        """The profile as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` gave.

        Args:
            text: JSON.

        Returns:
            The profile.

        Raises:
            DataError: It is something else.
        """
        try:
            fields = parse_json(text, where="the profile")
            table = fields["bytes_per_s_by_request_bytes"]
            fields["bytes_per_s_by_request_bytes"] = {int(k): v for k, v in table.items()}
            return cls(**fields)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DataError(
                f"this is no disk profile: {error!r}", hint="probe the disk again"
            ) from error
