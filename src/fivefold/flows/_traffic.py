"""What jobs send: flows of one iteration, and the compute beside them. Knows no topology."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.errors import ConfigurationError


@dataclass(frozen=True)
class FlowDemand:
    """Bytes from one rank to another in one iteration.

    Args:
        source: Rank that sends.
        target: Rank that receives.
        size_bytes: Bytes per iteration.

    Raises:
        ConfigurationError: The ranks are equal, or a number is negative.

    Examples:
        >>> FlowDemand(0, 1, 10**9).size_bytes
        1000000000
    """

    source: int
    target: int
    size_bytes: float

    def __post_init__(self) -> None:
        if self.source == self.target or min(self.source, self.target) < 0:
            raise ConfigurationError(
                f"a flow leads from one rank to another; got {self.source} to {self.target}"
            )
        if not math.isfinite(self.size_bytes) or self.size_bytes < 0:
            raise ConfigurationError(f"size_bytes must not be negative; got {self.size_bytes}")


@dataclass(frozen=True, kw_only=True)
class JobTraffic:
    """A job that computes, sends, and begins again.

    Args:
        job_id: Its name.
        compute_s: Seconds of compute per iteration that no communication overlaps.
        flows: What it sends after computing, all at once.
        iterations: How many it does.
        arrival_s: When it arrives.
        weight: How much a second of it counts.
        work: Compute work of an iteration, in any unit that all jobs share (GPU seconds, FLOP);
            None takes the GPU seconds: ``compute_s`` times the ranks that take part.

    Raises:
        ConfigurationError: A value is not allowed.

    Examples:
        >>> job = JobTraffic(job_id="a", compute_s=0.5, flows=(FlowDemand(0, 1, 1e9),))
        >>> job.ranks, job.gpu_work
        ((0, 1), 1.0)
    """

    job_id: str
    compute_s: float
    flows: tuple[FlowDemand, ...]
    iterations: int = 1
    arrival_s: float = 0.0
    weight: float = 1.0
    work: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flows", tuple(self.flows))
        if not self.job_id:
            message = "a job needs a name"
            raise ConfigurationError(message, hint="give job_id")
        for name in ("compute_s", "arrival_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigurationError(
                    f"{name} of job {self.job_id!r} must not be negative; got {value}"
                )
        if self.iterations < 1 or not self.weight > 0:
            raise ConfigurationError(
                f"job {self.job_id!r} needs iterations and a weight above 0; "
                f"got {self.iterations} and {self.weight}"
            )
        if self.work is not None and not self.work >= 0:
            raise ConfigurationError(
                f"work of job {self.job_id!r} must not be negative; got {self.work}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that send or receive, ascending."""
        return tuple(sorted({rank for flow in self.flows for rank in (flow.source, flow.target)}))

    @property
    def gpu_work(self) -> float:
        """Compute work of an iteration."""
        return self.compute_s * max(1, len(self.ranks)) if self.work is None else self.work
