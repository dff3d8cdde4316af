"""The plan: what goes where, as data.

A plan is made by ``make_plan`` and read by packing and loading. It holds node ids and numbers of
batches, never rows of features, and it can answer which rows of a batch are cold.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.errors import DataError, InfeasibleError, require_whole
from fivefold.files import parse_json
from fivefold.gnn.planning._caches import Caches, CacheSchedule, Policy
from fivefold.gnn.planning.geometry import Geometry
from fivefold.gnn.planning.layout import SegmentLayout, segment_layout
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.gnn.storage.pages import PAGE_BYTES, Array, Ids
from fivefold.units import format_bytes, format_duration_s


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Most bytes that a packed store and its training may take.

    Args:
        host_bytes: Host memory for the feature cache, the buffers of batches in flight and the
            scratch memory of packing. The topology, the samples in flight, the model and the
            interpreter are not in it.
        disk_bytes: Disk space for all that is written: packed rows, cached rows, batch records
            and, for a while, the scratch files of packing. The features themselves are not in it.
        device_bytes: Device memory for the feature cache and the batches on the device.

    Raises:
        ConfigurationError: A budget is negative or no whole number.
    """

    host_bytes: int
    disk_bytes: int
    device_bytes: int = 0

    def __post_init__(self) -> None:
        hint = "sizes are in bytes; fivefold.units.parse_bytes reads texts like '2 GB'"
        for name in ("host_bytes", "disk_bytes", "device_bytes"):
            whole = require_whole(name, getattr(self, name), least=0, hint=hint)
            object.__setattr__(self, name, whole)

    def cache_slots(
        self, row_bytes: int, *, buffer_batches: int, buffer_bytes: int
    ) -> tuple[int, int]:
        """Return the rows that the device and the host hold beside the batches in flight.

        ``buffer_bytes`` are those of the batches' rows, which are on the host and on the device.

        Raises:
            InfeasibleError: The host does not hold the batches' rows.
        """
        spare_bytes = self.host_bytes - buffer_bytes
        if spare_bytes < 0:
            raise InfeasibleError(
                f"host memory of {format_bytes(self.host_bytes)} does not hold the rows of "
                f"{buffer_batches} batches in flight",
                hint=f"give at least host_bytes={buffer_bytes} ({format_bytes(buffer_bytes)}), "
                "lower buffer_batches, or sample smaller batches",
            )
        return max(0, self.device_bytes - buffer_bytes) // row_bytes, spare_bytes // row_bytes


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """Cost of one number of batches per segment, over all batches."""

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
    """Reads, writes and times that a plan will need.

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
        record_bytes: Bytes of the batch records, estimated from the samples, of the layouts while
            packing runs, and of the plan itself.
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
    packing: Geometry
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


_VERSION = 3
_TEXT_BYTES, _TEXT_BYTES_PER_SEGMENT = 32_000, 24  # of a plan: up to 80 choices; two numbers
_KIND = "plan"


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Levels of all rows, order of the packed ones, and what that costs.

    Args:
        policy: ``"static"`` or ``"belady"``.
        max_gap_bytes: Gaps up to this size are read through.
        row_bytes: Bytes of a row.
        num_nodes: Rows of the features.
        num_batches: Batches that are planned.
        features_fingerprint: Of the features that were planned for.
        samples_fingerprint: Of the samples that were planned for.
        budgets: The budgets that were given.
        training_epochs: Epochs over which packing was spread in the choice of the segment size.
        device_rows: Node id in each slot of the device cache, ascending; it never changes.
        host_rows: Node id in each slot of the host cache at the start, ascending.
        num_host_slots: Slots of the host cache.
        segments: First batch and the batch after the last one of each segment.
        segment_rows: Packed rows before each segment, and all of them, int64 [segments + 1].
        batch_bytes: Bytes that each batch reads, int64 [num_batches].
        batch_requests: Requests of each batch, int64 [num_batches].
        predicted: What will be read, written and taken.
        choices: The segment sizes that were considered.
        cache_schedule: How the host cache changes; None under the static policy.
    """

    policy: Policy
    max_gap_bytes: int
    row_bytes: int
    num_nodes: int
    num_batches: int
    features_fingerprint: str
    samples_fingerprint: str
    budgets: Budgets
    training_epochs: int
    device_rows: Ids
    host_rows: Ids
    num_host_slots: int
    segments: tuple[tuple[int, int], ...]
    segment_rows: Ids
    batch_bytes: Ids
    batch_requests: Ids
    predicted: Prediction
    choices: tuple[SegmentCost, ...] = ()
    cache_schedule: CacheSchedule | None = None

    @property
    def num_device_slots(self) -> int:
        """Slots of the device cache."""
        return len(self.device_rows)

    @property
    def segment_batches(self) -> int:
        """Batches per segment; the last one may have fewer."""
        return self.segments[0][1] - self.segments[0][0] if self.segments else 1

    @property
    def fingerprint(self) -> str:
        """Hash of the whole plan, 32 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    @property
    def order_fingerprint(self) -> str:
        """Hash of what decides which row stands where in which batch, 32 hexadecimal digits.

        Budgets and predictions are not in it: a plan that was made again, after the disk was
        measured anew, may have another ``fingerprint`` and still pack the same rows.
        """
        schedule = self.cache_schedule.arrays() if self.cache_schedule else {}
        decides = {
            "features": self.features_fingerprint,
            "samples": self.samples_fingerprint,
            "policy": self.policy,
            "segments": [list(segment) for segment in self.segments],
            "slots": self.num_host_slots,
            "device": _hash(self.device_rows),
            "host": _hash(self.host_rows),
            "schedule": {name: _hash(array) for name, array in schedule.items()},
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]

    def cold_ids(self, batch: int, node_ids: Array) -> Ids:
        """Return the node ids of a batch that come from disk, ascending.

        Args:
            batch: Number of the batch.
            node_ids: Its node ids as the samples have them.
        """
        return self.caches.cold_ids(batch, node_ids)

    @cached_property
    def caches(self) -> Caches:
        """Return the contents of both caches."""
        return Caches(
            device_rows=self.device_rows,
            host_rows=self.host_rows,
            num_host_slots=self.num_host_slots,
            schedule=self.cache_schedule,
        )

    def lay_out(self, cold_ids: Sequence[Ids]) -> SegmentLayout:
        """Return the order of a segment's packed rows, from the cold ids of its batches."""
        return segment_layout(cold_ids)

    def explain(self) -> str:
        """Return the plan as a table for people."""
        title = (
            f"Plan {self.fingerprint[:8]}: {self.num_batches:,} batches over "
            f"{self.num_nodes:,} rows of {self.row_bytes:,} bytes "
            f"({format_bytes(self.num_nodes * self.row_bytes)})\n"
            f"{self.policy} policy: {_ORDER[self.policy]}"
        )
        parts = [title, _places(self), _sizes(self), _epoch(self), _space(self)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {name: getattr(self, name) for name in _ARRAYS}
        return arrays | (self.cache_schedule.arrays() if self.cache_schedule else {})

    def to_json(self) -> str:
        """Return all but the arrays, of which it has the hashes."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in {*_ARRAYS, "cache_schedule"}
        }
        values["budgets"] = dataclasses.asdict(self.budgets)
        values["predicted"] = self.predicted.to_json()
        values["choices"] = [dataclasses.asdict(choice) for choice in self.choices]
        hashes = {name: _hash(array) for name, array in self._arrays().items()}
        return json.dumps({"version": _VERSION, **values, "arrays": hashes}, sort_keys=True)

    @property
    def nbytes(self) -> int:
        """About the bytes of its file."""
        return plan_bytes(self._arrays().values(), len(self.segments))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: File to write; one that is there is replaced.

        Raises:
            StorageError: The disk refused.
        """
        arrays = self._arrays()
        sections = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        with ContainerWriter(
            path, kind=_KIND, sections=sections, attributes={"plan": self.to_json()}
        ) as writer:
            for name, array in arrays.items():
                writer.write(name, 0, array)
            writer.commit().close()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that ``write`` wrote.

        Raises:
            DataError: The file is missing, damaged or no plan.
        """
        with Container.open(path, kind=_KIND) as container:
            text = str(container.attributes.get("plan"))
            arrays = {name: container.read(name) for name in container.sections}
        try:
            values: dict[str, Any] = parse_json(text, where="the plan")
            version = values.pop("version")
            if version == _VERSION:
                return _from_values(values, arrays)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} holds no plan: {error}", hint="make it again with make_plan"
            ) from error
        raise DataError(
            f"the plan {path} has version {version}, this fivefold reads version {_VERSION}",
            hint="make it again with make_plan",
        )


_ARRAYS = ("device_rows", "host_rows", "segment_rows", "batch_bytes", "batch_requests")


def plan_bytes(arrays: Iterable[Array], num_segments: int) -> int:
    """Return about the bytes of the file of a plan: arrays in whole pages, text, checksums."""
    pages = sum(-(-array.nbytes // PAGE_BYTES) for array in arrays)
    text = _TEXT_BYTES + _TEXT_BYTES_PER_SEGMENT * num_segments
    size_bytes = pages * PAGE_BYTES + text
    return size_bytes + size_bytes // 1024 + 3 * PAGE_BYTES


def _from_values(values: dict[str, Any], arrays: Mapping[str, Array]) -> Plan:
    del values["arrays"]  # hashes, for the fingerprint: the container has checksums of its own
    values["budgets"] = Budgets(**values["budgets"])
    packing = Geometry(**values["predicted"]["packing"])
    values["predicted"] = Prediction(**(values["predicted"] | {"packing": packing}))
    values["choices"] = tuple(SegmentCost(**choice) for choice in values["choices"])
    values["segments"] = tuple((first, stop) for first, stop in values["segments"])
    if values["policy"] == "belady":
        values["cache_schedule"] = CacheSchedule.from_arrays(arrays)
    values |= {name: np.asarray(arrays[name]) for name in _ARRAYS}
    return Plan(**values)


def _hash(array: Array) -> str:
    header = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()[:32]


_MOST_CHOICES = 9
_ORDER = {
    "static": "the most used rows are cached; batches may come in any order",
    "belady": "the rows needed soonest are cached; batches come in the order of the samples",
}
_PACKING = {
    "resident": "the features fit the memory: read once, written in order",
    "spill": "one pass over the features into buckets on disk, then bucket by bucket",
    "passes": "a pass over the features for each part of the output that fits the memory",
}


def _places(plan: Plan) -> str:
    predicted = plan.predicted
    levels = [
        ("device cache", "device", plan.num_device_slots, ""),
        ("host cache", "host", plan.num_host_slots, ""),
        ("disk", "disk", predicted.packed_rows, f"{predicted.blow_up:.2f} x the features"),
    ]
    rows = [
        [
            name,
            f"{number:,}",
            format_bytes(number * plan.row_bytes),
            f"{100 * predicted.hit_rates[level]:.1f} %",
            remark,
        ]
        for name, level, number, remark in levels
    ]
    return _table(["What goes where", "rows", "bytes", "rows served", ""], rows)


def _sizes(plan: Plan) -> str:
    """Tabulate the segment sizes around the chosen one."""
    if not plan.choices:
        return ""
    epochs, chosen = plan.predicted.sampled_epochs, plan.segment_batches
    cold_bytes = max(1, plan.predicted.cold_rows * plan.row_bytes)
    rows = [
        [
            f"{'>' if cost.segment_batches == chosen else ' '} {cost.segment_batches:,}",
            format_bytes(cost.packed_rows * plan.row_bytes),
            f"{cost.read_bytes / cold_bytes:.3f}",
            f"{cost.requests:,}",
            format_duration_s(cost.read_seconds / epochs),
            format_duration_s(cost.packing_seconds),
            format_duration_s(cost.total_seconds(plan.training_epochs / epochs)),
            "counted" if cost.exact else "estimated",
        ]
        for cost in _nearest(plan.choices, chosen)
    ]
    head = ["Batches per segment", "on disk", "amplification", "requests", "epoch", "packing"]
    remark = (
        "amplification: bytes read over bytes needed. Larger segments share more rows, which saves "
        "space,\nand scatter them more, which costs requests and bytes. Of the sizes within 2 % "
        "of the least time\nthe one of least space is taken."
    )
    return f"{_table([*head, f'{plan.training_epochs:,} epochs', ''], rows)}\n{remark}"


def _nearest(choices: Sequence[SegmentCost], chosen: int) -> list[SegmentCost]:
    """Return the chosen size, its neighbours, and sizes at growing distances on both sides."""
    by_size = {cost.segment_batches: cost for cost in choices}
    wanted = {chosen, chosen - 1, chosen + 1, 1, max(by_size)}
    wanted |= {size for size, cost in by_size.items() if cost.exact}
    wanted |= {chosen // 2, chosen * 2, chosen * 4}
    sizes = [size for size in by_size if size in wanted]
    while len(sizes) > _MOST_CHOICES:
        sizes.remove(max(sizes, key=lambda size: abs(size - chosen)))
    return [by_size[size] for size in sorted(sizes)]


def _epoch(plan: Plan) -> str:
    predicted, gaps = plan.predicted, "no gap is read through"
    if plan.max_gap_bytes:
        gaps = f"gaps of up to {format_bytes(plan.max_gap_bytes)} are read through"
    steps = [
        (
            "read from disk",
            format_bytes(predicted.read_bytes_per_epoch),
            predicted.read_seconds,
            f"{predicted.requests_per_epoch:,} requests; {gaps}",
        ),
        (
            "without packing",
            "",
            predicted.online_seconds,
            "the same rows gathered from the features, each page once per batch",
        ),
        (
            "packing, once",
            format_bytes(predicted.packing.moved_bytes),
            predicted.packing_seconds,
            _PACKING[predicted.packing.strategy],
        ),
        (
            "caches, once",
            format_bytes(predicted.cache_bytes),
            predicted.fill_seconds,
            "fill in one sequential read",
        ),
    ]
    rows = [[name, size, format_duration_s(seconds), note] for name, size, seconds, note in steps]
    table = _table(["Each epoch", "bytes", "disk time", ""], rows, left_from=3)
    if predicted.break_even_epochs == float("inf"):
        epochs = "Packing does not pay here: gathering online is as fast."
    elif predicted.break_even_epochs <= 1:
        epochs = "Packing has paid for itself within the first epoch."
    else:
        epochs = f"Packing has paid for itself after {predicted.break_even_epochs:.1f} epochs."
    return f"{table}\n{epochs}"


def _space(plan: Plan) -> str:
    predicted, budgets = plan.predicted, plan.budgets
    buffers = predicted.buffer_bytes
    device = plan.num_device_slots * plan.row_bytes
    device += buffers if device else 0
    parts = {
        "rows": predicted.packed_bytes,
        "caches": predicted.cache_bytes,
        "records": predicted.record_bytes,
        "scratch": predicted.scratch_bytes,
    }
    spaces = [
        ("device memory", device, budgets.device_bytes, ""),
        (
            "host memory",
            plan.num_host_slots * plan.row_bytes + buffers,
            budgets.host_bytes,
            f"cache and {format_bytes(buffers)} for batches in flight",
        ),
        (
            "disk",
            predicted.disk_bytes,
            budgets.disk_bytes,
            ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items()),
        ),
    ]
    rows = [[name, format_bytes(a), format_bytes(b), note] for name, a, b, note in spaces]
    return _table(["Space", "taken", "budget", ""], rows, left_from=3)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left_from: int = 9) -> str:
    """Put columns side by side: the first and those from ``left_from`` on to the left."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if column == 0 or column >= left_from else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])
