"""The plan: what goes where, as data.

A plan is made by ``make_plan`` and read by packing and loading. It holds node ids and numbers of
batches, never rows of features, and it can answer which rows of a batch are cold.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.files import parse_json
from fivefold.gnn.planning._budgets import Budgets
from fivefold.gnn.planning._caches import Caches, Policy
from fivefold.gnn.planning._explain import explain
from fivefold.gnn.planning._layout import Layout, SegmentLayout, segment_layout
from fivefold.gnn.planning._prediction import Prediction, SegmentCost
from fivefold.gnn.planning._schedule import CacheSchedule
from fivefold.gnn.planning._sources import Array, Ids, SampleSource

_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What goes where, and what that costs.

    Args:
        policy: ``"static"`` or ``"belady"``.
        layout: Order of the packed rows within a segment.
        minhash_functions: Number of hash functions of the ``minhash`` layout.
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

    Examples:
        >>> import numpy as np
        >>> from fivefold.gnn.planning import BatchList, Budgets, FeatureInfo, make_plan
        >>> samples = BatchList([np.array([0, 1, 2]), np.array([0, 3])], num_nodes=5)
        >>> features = FeatureInfo(num_nodes=5, row_bytes=2048, fingerprint="x")
        >>> budgets = Budgets(host_bytes=2048, disk_bytes=10**6)
        >>> class Disk:
        ...     sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9
        ...     def seconds(self, requests, size_bytes):
        ...         return requests * 1e-5 + size_bytes / 1e9
        >>> plan = make_plan(samples, features, budgets, Disk(), buffer_batches=0)
        >>> plan.host_rows.tolist(), plan.cold_ids(0, samples.node_ids(0)).tolist()
        ([0], [1, 2])
    """

    policy: Policy
    layout: Layout
    minhash_functions: int
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
        digest = hashlib.sha256(self.to_json().encode())
        return digest.hexdigest()[:32]

    @property
    def order_fingerprint(self) -> str:
        """Hash of what decides which row stands where in which batch, 32 hexadecimal digits.

        Budgets and predictions are not in it: a plan that was made again, after the disk was
        measured anew, may have another ``fingerprint`` and still pack the same rows.
        """
        decides = {
            "features": self.features_fingerprint,
            "samples": self.samples_fingerprint,
            "policy": self.policy,
            "layout": self.layout,
            "functions": self.minhash_functions if self.layout == "minhash" else 0,
            "segments": [list(segment) for segment in self.segments],
            "slots": self.num_host_slots,
            "device": _hash(self.device_rows),
            "host": _hash(self.host_rows),
            "schedule": {
                name: _hash(array)
                for name, array in (
                    self.cache_schedule.arrays() if self.cache_schedule else {}
                ).items()
            },
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]

    def cold_ids(self, batch: int, node_ids: Array) -> Ids:
        """Node ids of a batch that come from disk, ascending.

        Args:
            batch: Number of the batch.
            node_ids: Its node ids as the samples have them.
        """
        return self._caches.cold_ids(batch, node_ids)

    @cached_property
    def _caches(self) -> Caches:
        return Caches(
            device_rows=self.device_rows,
            host_rows=self.host_rows,
            num_host_slots=self.num_host_slots,
            schedule=self.cache_schedule,
        )

    def segment_of(self, batch: int) -> int:
        """Number of the segment that a batch belongs to."""
        return batch // self.segment_batches

    def segment_layout(self, segment: int, samples: SampleSource) -> SegmentLayout:
        """The order of a segment's packed rows and what its batches read of it.

        Args:
            segment: Number of the segment.
            samples: The samples that were planned for.
        """
        first, stop = self.segments[segment]
        return segment_layout(
            [self.cold_ids(batch, samples.node_ids(batch)) for batch in range(first, stop)],
            layout=self.layout,
            minhash_functions=self.minhash_functions,
            first_batch=first,
            num_batches=self.num_batches,
        )

    def explain(self) -> str:
        """The plan as a table for people."""
        return explain(self)

    def arrays(self) -> dict[str, Array]:
        """The large parts, by name; a container or an ``.npz`` file can hold them."""
        arrays: dict[str, Array] = {name: getattr(self, name) for name in _ARRAYS}
        return arrays | (self.cache_schedule.arrays() if self.cache_schedule else {})

    def to_json(self) -> str:
        """All but the arrays, of which it has the hashes."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in {*_ARRAYS, "cache_schedule"}
        }
        values["budgets"] = dataclasses.asdict(self.budgets)
        values["predicted"] = self.predicted.to_json()
        values["choices"] = [dataclasses.asdict(choice) for choice in self.choices]
        hashes = {name: _hash(array) for name, array in self.arrays().items()}
        return json.dumps({"version": _VERSION, **values, "arrays": hashes}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, arrays: Mapping[str, Array]) -> Plan:
        """The plan that ``to_json`` and ``arrays`` wrote.

        Args:
            text: What ``to_json`` returned.
            arrays: What ``arrays`` returned.

        Raises:
            DataError: The text is no plan of this version, or an array is missing or another.
        """
        try:
            values: dict[str, Any] = parse_json(text, where="the plan")
            version, hashes = values.pop("version"), values.pop("arrays")
        except (ValueError, KeyError, RecursionError, TypeError, AttributeError) as error:
            raise DataError(
                f"this is not a plan: {text[:40]!r}", hint="make it again with make_plan"
            ) from error
        if version != _VERSION:
            raise DataError(
                f"the plan has version {version}, this fivefold reads version {_VERSION}",
                hint="make it again with make_plan",
            )
        for name, expected in hashes.items():
            if name not in arrays or _hash(arrays[name]) != expected:
                raise DataError(
                    f"array {name!r} is missing or not the one of this plan",
                    hint="give the arrays that were written together with the plan",
                )
        try:
            return _from_values(values, arrays)
        except (KeyError, TypeError) as error:
            raise DataError(
                f"the plan is not whole: {error}", hint="make it again with make_plan"
            ) from error


_ARRAYS = ("device_rows", "host_rows", "segment_rows", "batch_bytes", "batch_requests")


def _from_values(values: dict[str, Any], arrays: Mapping[str, Array]) -> Plan:
    values["budgets"] = Budgets(**values["budgets"])
    values["predicted"] = Prediction.from_json(values["predicted"])
    values["choices"] = tuple(SegmentCost(**choice) for choice in values["choices"])
    values["segments"] = tuple((first, stop) for first, stop in values["segments"])
    if values["policy"] == "belady":
        values["cache_schedule"] = CacheSchedule.from_arrays(arrays)
    values |= {name: np.asarray(arrays[name]) for name in _ARRAYS}
    return Plan(**values)


def _hash(array: Array) -> str:
    header = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()[:32]
