"""Many tasks as arrays: what the simulator reads, whatever it was made from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError
from fivefold.network.simulation._rates import Routes, positive_array, whole_array

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowTable:
    """Tasks by position, one array a property. Build it with :meth:`build`.

    Attributes:
        sizes: Bytes of a flow, seconds of a computation; float64 [tasks].
        is_compute: Whether each is a computation; bool [tasks].
        routes: Links of each flow; computations have none.
        latencies_s: From the last byte sent to the last received; NaN is the sum over the route.
        weights: Share of a full link; float64 [tasks].
        rate_caps_bytes_per_s: Highest rate, ``inf`` for none; float64 [tasks].
        priorities: Lower comes first; int64 [tasks].
        groups: Coupled flows have the same number; -1 is none; int64 [tasks].
        jobs: Number of the job; -1 is none; int64 [tasks].
        releases_s: Earliest start; float64 [tasks].
        processors: Number of the processor of a computation; -1 is none; int64 [tasks].
        dependency_offsets: Slice of ``dependencies`` of each task; int64 [tasks + 1].
        dependencies: Tasks that must end first; int64.
        names: Ids of the tasks; None is their positions.

    Examples:
        >>> table = FlowTable.build(sizes=[100.0, 50.0], routes=[[0], [0]], dependencies=[[], [0]])
        >>> len(table), table.dependencies.tolist()
        (2, [0])
    """

    sizes: FloatArray
    is_compute: npt.NDArray[np.bool_]
    routes: Routes
    latencies_s: FloatArray
    weights: FloatArray
    rate_caps_bytes_per_s: FloatArray
    priorities: IntArray
    groups: IntArray
    jobs: IntArray
    releases_s: FloatArray
    processors: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray
    names: tuple[Hashable, ...] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def name_of(self, task: int) -> Hashable:
        """Id of a task by position."""
        return task if self.names is None else self.names[task]

    @classmethod
    def build(
        cls,
        *,
        sizes: npt.ArrayLike,
        routes: Any,
        dependencies: Any = None,
        names: tuple[Hashable, ...] | None = None,
        **columns: npt.ArrayLike,
    ) -> FlowTable:
        """Check and complete the arrays.

        Args:
            sizes: Bytes of each flow, seconds of each computation.
            routes: A :class:`Routes`, what ``topology.routes()`` returns, or one list of links for
                each task.
            dependencies: A pair of arrays (offsets, tasks), or one list for each task; None is
                no dependency.
            names: Ids of the tasks.
            **columns: Any other attribute of this class, one value for each task or one for all;
                what is left out takes its neutral value.

        Returns:
            The table.

        Raises:
            ConfigurationError: A column is unknown, has the wrong length or a value out of range,
                or the dependencies form a circle.
        """
        size = _at_least_zero("sizes", sizes, None)
        unknown = set(columns) - set(_NEUTRAL)
        if unknown:
            raise ConfigurationError(
                f"a flow table has no column {min(unknown)!r}",
                hint=f"its columns are {', '.join(_NEUTRAL)}",
            )
        given = {key: columns.get(key, neutral) for key, neutral in _NEUTRAL.items()}
        count = len(size)
        offsets, needed = _dependency_arrays(dependencies, count)
        table = Routes.from_any(routes)
        if len(table) != count:
            raise ConfigurationError(f"there are {count} sizes and {len(table)} routes")
        cap = "rate_caps_bytes_per_s"
        return cls(
            sizes=size,
            is_compute=whole_array("is_compute", given["is_compute"], count).astype(np.bool_),
            routes=table,
            latencies_s=_latencies(given["latencies_s"], count),
            weights=positive_array("weights", given["weights"], count),
            rate_caps_bytes_per_s=positive_array(cap, given[cap], count),
            priorities=whole_array("priorities", given["priorities"], count),
            groups=whole_array("groups", given["groups"], count),
            jobs=whole_array("jobs", given["jobs"], count),
            releases_s=_at_least_zero("releases_s", given["releases_s"], count),
            processors=whole_array("processors", given["processors"], count),
            dependency_offsets=offsets,
            dependencies=needed,
            names=names,
        )


_NEUTRAL: dict[str, float] = {
    "is_compute": 0,
    "latencies_s": np.nan,
    "weights": 1.0,
    "rate_caps_bytes_per_s": np.inf,
    "priorities": 0,
    "groups": -1,
    "jobs": -1,
    "releases_s": 0.0,
    "processors": -1,
}


def _at_least_zero(name: str, values: npt.ArrayLike, size: int | None) -> FloatArray:
    array = np.asarray(values, np.float64)
    if size is not None and array.ndim == 0:
        array = np.full(size, array)
    if array.ndim != 1 or (size is not None and array.size != size):
        raise ConfigurationError(f"{name} must be a list of numbers; got shape {array.shape}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ConfigurationError(
            f"{name} of task {wrong[0]} is {array[wrong[0]]}",
            hint="use finite numbers from 0 up",
        )
    return np.array(array, np.float64, order="C")


def _latencies(values: npt.ArrayLike, count: int) -> FloatArray:
    array = np.asarray(values, np.float64)
    known = np.nan_to_num(array, nan=0.0)
    _at_least_zero("latencies_s", known, count)
    return np.full(count, array) if array.ndim == 0 else np.array(array, order="C")


def _dependency_arrays(given: Any, count: int) -> tuple[IntArray, IntArray]:
    if given is None:
        return np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], np.ndarray):
        offsets = np.array(given[0], np.int64, order="C")
        needed = np.array(given[1], np.int64, order="C")
    else:
        lengths = [len(tasks) for tasks in given]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        needed = np.fromiter((task for tasks in given for task in tasks), np.int64)
    if offsets.size != count + 1 or offsets[-1] != needed.size or np.any(np.diff(offsets) < 0):
        raise ConfigurationError(
            f"dependencies must have one list for each of the {count} tasks",
            hint="an empty list is a task that waits for none",
        )
    wrong = np.flatnonzero((needed < 0) | (needed >= count))
    if wrong.size:
        task = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        raise ConfigurationError(
            f"task {task} waits for task {needed[wrong[0]]}, but there are {count} tasks"
        )
    return offsets, needed
