"""Flows of one operation that should end together, or one stage after the other.

References:
    Varys, SIGCOMM 2014 (smallest effective bottleneck first; rates that end together);
    EchelonFlow, HotNets 2022 (finish times in steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Coflow:
    """Flows whose last one decides.

    Args:
        name: What it is called.
        sizes_bytes: Bytes of each flow.
        paths: Links of each flow.

    Raises:
        ConfigurationError: There are not as many paths as sizes, or a size is negative.

    Examples:
        >>> Coflow("a", (2.0, 1.0), ((0,), (0, 1))).bottleneck_s(np.array([1.0, 0.5]))
        3.0
    """

    name: str
    sizes_bytes: tuple[float, ...]
    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.sizes_bytes) != len(self.paths) or any(size < 0 for size in self.sizes_bytes):
            raise ConfigurationError(
                f"coflow {self.name!r} needs a path and a size that is not negative for each flow"
            )

    def bottleneck_s(self, capacities_bytes_per_s: npt.ArrayLike) -> float:
        """Seconds of the fullest link: no schedule ends sooner.

        Args:
            capacities_bytes_per_s: Of each link, what is left for this coflow.
        """
        capacities = np.asarray(capacities_bytes_per_s, np.float64)
        loads = np.zeros(len(capacities))
        for size, path in zip(self.sizes_bytes, self.paths, strict=True):
            np.add.at(loads, np.asarray(path, np.intp), size)
        used = loads > 0
        if not used.any():
            return 0.0
        with np.errstate(divide="ignore"):
            return float((loads[used] / capacities[used]).max())


def together_rates(coflow: Coflow, capacities_bytes_per_s: npt.ArrayLike) -> FloatArray:
    """The least rates at which all flows end together, as soon as the bottleneck allows (MADD).

    Args:
        coflow: The flows.
        capacities_bytes_per_s: Of each link, what is left for this coflow.

    Returns:
        Bytes per second of each flow, float64 [flows]; 0 where a link of the coflow has nothing
        left.

    Examples:
        >>> together_rates(Coflow("a", (2.0, 1.0), ((0,), (0, 1))), [1.0, 0.5]).round(3).tolist()
        [0.667, 0.333]
    """
    seconds = coflow.bottleneck_s(capacities_bytes_per_s)
    sizes = np.asarray(coflow.sizes_bytes, np.float64)
    return np.zeros(len(sizes)) if seconds == 0 else sizes / seconds


def coflow_order(
    coflows: Sequence[Coflow], capacities_bytes_per_s: npt.ArrayLike
) -> tuple[str, ...]:
    """Names by smallest effective bottleneck first; equal ones in the order given.

    Args:
        coflows: What waits.
        capacities_bytes_per_s: Of each link.

    Returns:
        Names, the first to be served first.

    Examples:
        >>> long, short = Coflow("long", (4.0,), ((0,),)), Coflow("short", (1.0,), ((0,),))
        >>> coflow_order([long, short], [1.0])
        ('short', 'long')
    """
    ordered = sorted(coflows, key=lambda coflow: coflow.bottleneck_s(capacities_bytes_per_s))
    return tuple(coflow.name for coflow in ordered)


def ideal_finish_times(
    stages: Sequence[int], *, reference_s: float, gap_s: float | Sequence[float]
) -> FloatArray:
    """When each flow should end so that the compute behind it never waits (EchelonFlow).

    Flows of stage 0 end at the reference time, those of stage k when the compute of the k stages
    before is over: a pipeline's micro-batches, or layers that are needed one after the other. With
    one stage, or no gap, this is a coflow.

    Args:
        stages: Stage of each flow, from 0.
        reference_s: When stage 0 should end.
        gap_s: Seconds of compute of a stage, one for all or one per stage.

    Returns:
        Seconds, float64 [flows].

    Raises:
        ConfigurationError: A stage or a gap is negative, or there are too few gaps.

    Examples:
        >>> ideal_finish_times([0, 1, 1, 2], reference_s=3.0, gap_s=0.5).tolist()
        [3.0, 3.5, 3.5, 4.0]
    """
    numbers = np.asarray(stages, np.int64)
    last = int(numbers.max(initial=0))
    gaps = np.full(last, gap_s) if np.ndim(gap_s) == 0 else np.asarray(gap_s, np.float64)
    if numbers.min(initial=0) < 0 or len(gaps) < last or (gaps < 0).any():
        raise ConfigurationError(
            f"stages count from 0 and each has a gap that is not negative; got stages up to {last} "
            f"and {len(gaps)} gaps"
        )
    offsets = np.concatenate([[0.0], np.cumsum(gaps[:last])])
    found: FloatArray = reference_s + offsets[numbers]
    return found
