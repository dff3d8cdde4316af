"""From samples, features, budgets and a disk to a plan."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.planning._budgets import Budgets, FeatureInfo
from fivefold.gnn.planning._caches import Caches, Policy, Tally
from fivefold.gnn.planning._kept import KeptArrays, Scratch
from fivefold.gnn.planning._layout import Layout, check_layout
from fivefold.gnn.planning._packing_cost import packing_ways
from fivefold.gnn.planning._plan import Plan
from fivefold.gnn.planning._prediction import PackingCost, Prediction
from fivefold.gnn.planning._search import Found, Space, search_segments
from fivefold.gnn.planning._segments import GAPS_BYTES, SegmentQuestion, segments_of
from fivefold.gnn.planning._sources import (
    DiskCost,
    SampleSource,
    folder_of,
    record_bytes,
    sample_bytes,
    sampled_epochs,
    sizes_of,
)
from fivefold.units import format_bytes

_log = logging.getLogger(__name__)


def make_plan(  # noqa: PLR0913 - one keyword per decision that the caller may take over
    samples: SampleSource,
    features: FeatureInfo,
    budgets: Budgets,
    profile: DiskCost,
    *,
    policy: Policy = "static",
    layout: Layout = "gray",
    segment_batches: int | None = None,
    minhash_functions: int = 2,
    max_gap_bytes: int | None = None,
    buffer_batches: int = 3,
    training_epochs: int = 50,
    scratch_folder: str | os.PathLike[str] | None = None,
) -> Plan:
    """Decide what goes where, and predict what that costs.

    Nothing is written but, where the batches have many ids, a scratch file of as many bytes as
    their ids have, which goes when planning ends.

    Args:
        samples: Sampled batches.
        features: Size of the feature matrix.
        budgets: Memory and disk space.
        profile: The disk's prices.
        policy: ``"static"``: the most used rows are cached and batches may come in any order;
            ``"belady"``: batches come in the order of the samples, and the host cache holds what
            will be needed soonest. ``BatchList`` puts batches into another order.
        layout: Order of the packed rows within a segment.
        segment_batches: Batches per segment; None: the size of least cost within the budget.
        minhash_functions: Number of hash functions of the ``minhash`` layout.
        max_gap_bytes: Gaps up to this size are read through; None: what the disk makes cheapest.
        buffer_batches: Batches in flight whose rows are kept in host memory, and in device
            memory where there is some; the caches get the rest of the budgets.
        training_epochs: Epochs over which the time for packing is spread in the choice of the
            segment size.
        scratch_folder: Where the scratch file goes; None: beside the samples where they are a
            file, else the system's folder for temporary files.

    Returns:
        The plan.

    Raises:
        ConfigurationError: An argument is not allowed.
        DataError: Samples and features are of different graphs.
        InfeasibleError: A budget is short; says which, and the smallest that would do.
        StorageError: The scratch file cannot be written.

    Examples:
        >>> import numpy as np
        >>> from fivefold.gnn.planning import BatchList
        >>> samples = BatchList([np.array([0, 1, 2]), np.array([2, 3])], num_nodes=4)
        >>> features = FeatureInfo(num_nodes=4, row_bytes=4096, fingerprint="x")
        >>> class Disk:
        ...     sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9
        ...     def seconds(self, requests, size_bytes):
        ...         return requests * 1e-5 + size_bytes / 1e9
        >>> plan = make_plan(samples, features, Budgets(host_bytes=50_000, disk_bytes=10**6),
        ...                  Disk(), segment_batches=2)
        >>> plan.host_rows.tolist(), plan.predicted.read_bytes_per_epoch
        ([0, 1, 2], 4096)
    """
    making = _Making(
        samples=samples,
        features=features,
        budgets=budgets,
        disk=profile,
        policy=policy,
        layout=layout,
        segment_batches=segment_batches,
        minhash_functions=minhash_functions,
        max_gap_bytes=max_gap_bytes,
        buffer_batches=buffer_batches,
        training_epochs=training_epochs,
        scratch=Scratch(
            folder=folder_of(samples) if scratch_folder is None else Path(scratch_folder),
            most_bytes=budgets.disk_bytes,
        ),
    )
    making.check()
    return making.plan()


@dataclass(frozen=True, kw_only=True)
class _Making:
    """The arguments of ``make_plan``, and the steps from them to the plan."""

    samples: SampleSource
    features: FeatureInfo
    budgets: Budgets
    disk: DiskCost
    policy: Policy
    layout: Layout
    segment_batches: int | None
    minhash_functions: int
    max_gap_bytes: int | None
    buffer_batches: int
    training_epochs: int
    scratch: Scratch

    def check(self) -> None:
        if self.policy not in {"static", "belady"}:
            raise ConfigurationError(f"policy is {self.policy!r}", hint="use 'static' or 'belady'")
        if self.samples.num_nodes != self.features.num_nodes:
            raise DataError(
                f"the samples are of a graph of {self.samples.num_nodes} nodes, the features of "
                f"{self.features.num_nodes}",
                hint="sample the graph that these features belong to",
            )
        _at_least("segment_batches", self.segment_batches, 1)
        _at_least("max_gap_bytes", self.max_gap_bytes, 0)
        _at_least("buffer_batches", self.buffer_batches, 0)
        _at_least("training_epochs", self.training_epochs, 0)
        check_layout(self.layout, self.minhash_functions)

    def plan(self) -> Plan:
        caches = self.fill_caches()
        tally = Tally(self.samples, self.features, caches, self.disk)
        kept = KeptArrays(tally.cold_ids(), limit=self.samples.num_nodes, scratch=self.scratch)
        with contextlib.closing(kept) as cold:
            found = self.search(cold, caches)
        return Plan(
            policy=self.policy,
            layout=self.layout,
            minhash_functions=self.minhash_functions,
            max_gap_bytes=found.reads.max_gap_bytes,
            row_bytes=self.features.row_bytes,
            num_nodes=self.features.num_nodes,
            num_batches=self.samples.num_batches,
            features_fingerprint=self.features.fingerprint,
            samples_fingerprint=self.samples.fingerprint,
            budgets=self.budgets,
            training_epochs=self.training_epochs,
            device_rows=caches.device_rows,
            host_rows=caches.host_rows,
            num_host_slots=caches.num_host_slots,
            segments=segments_of(self.samples.num_batches, found.segment_batches),
            segment_rows=found.reads.segment_rows,
            batch_bytes=found.reads.read_bytes,
            batch_requests=found.reads.requests,
            predicted=self.predict(caches, tally, found),
            choices=found.choices,
            cache_schedule=caches.schedule,
        )

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes for the rows of the batches in flight."""
        largest = max(sizes_of(self.samples), default=0) if self.buffer_batches else 0
        return self.buffer_batches * largest * self.features.row_bytes

    def fill_caches(self) -> Caches:
        """Give the caches what the buffers leave.

        Raises:
            InfeasibleError: Not even the buffers fit.
        """
        spare_bytes = self.budgets.host_bytes - self.buffer_bytes
        if spare_bytes < 0:
            raise InfeasibleError(
                f"host memory of {format_bytes(self.budgets.host_bytes)} does not hold the rows of "
                f"{self.buffer_batches} batches in flight",
                hint=f"give at least host_bytes={self.buffer_bytes} "
                f"({format_bytes(self.buffer_bytes)}), lower buffer_batches, or sample smaller "
                "batches",
            )
        row_bytes = self.features.row_bytes
        device_slots = max(0, self.budgets.device_bytes - self.buffer_bytes) // row_bytes
        if self.budgets.device_bytes and not device_slots:
            _log.warning(
                "no rows are cached on the device: %s do not exceed the %s of the %d batches in "
                "flight there",
                format_bytes(self.budgets.device_bytes),
                format_bytes(self.buffer_bytes),
                self.buffer_batches,
            )
        return Caches.fill(
            self.samples,
            self.policy,
            device_slots=device_slots,
            host_slots=spare_bytes // row_bytes,
            scratch=self.scratch,
        )

    def search(self, cold: KeptArrays, caches: Caches) -> Found:
        """Choose the segment size."""
        gap_bytes = self.max_gap_bytes
        question = SegmentQuestion(
            cold=cold,
            layout=self.layout,
            minhash_functions=self.minhash_functions,
            row_bytes=self.features.row_bytes,
            disk=self.disk,
            gaps_bytes=GAPS_BYTES if gap_bytes is None else (gap_bytes,),
        )
        return search_segments(
            question,
            self.space(caches, int(cold.sizes.sum())),
            segment_batches=self.segment_batches,
            num_passes=self.training_epochs / sampled_epochs(self.samples),
        )

    def space(self, caches: Caches, cold_rows: int) -> Space:
        """What the disk budget leaves for packed rows."""
        filled = caches.filled_rows

        def ways(packed_rows: int) -> list[PackingCost]:
            return packing_ways(
                self.features,
                output_rows=packed_rows + filled,
                memory_bytes=self.budgets.host_bytes,
                disk=self.disk,
            )

        return Space(
            disk_bytes=self.budgets.disk_bytes,
            fixed_bytes=filled * self.features.row_bytes,
            record_bytes=lambda rows: record_bytes(self.samples, rows, cold_rows),
            row_bytes=self.features.row_bytes,
            ways=ways,
        )

    def predict(self, caches: Caches, tally: Tally, found: Found) -> Prediction:
        """What the choices lead to; sums over all batches become means per epoch."""
        reads, packing, row_bytes = found.reads, found.packing, self.features.row_bytes
        packed_rows = int(reads.segment_rows[-1])
        read_bytes = int(reads.read_bytes.sum())
        epochs = sampled_epochs(self.samples)
        cold_bytes = tally.cold_rows * row_bytes
        cache_bytes = caches.filled_rows * row_bytes
        return Prediction(
            sampled_epochs=epochs,
            read_bytes_per_epoch=round(read_bytes / epochs),
            requests_per_epoch=round(int(reads.requests.sum()) / epochs),
            read_seconds=reads.seconds / epochs,
            cold_rows=tally.cold_rows,
            accesses=tally.accesses,
            packed_rows=packed_rows,
            packed_bytes=packed_rows * row_bytes,
            cache_bytes=cache_bytes,
            fill_seconds=cache_bytes / self.disk.sequential_read_bytes_per_s,
            record_bytes=record_bytes(self.samples, packed_rows, tally.cold_rows),
            sample_bytes=sample_bytes(self.samples),
            scratch_bytes=packing.scratch_bytes,
            buffer_bytes=self.buffer_bytes,
            blow_up=packed_rows / max(1, self.features.num_nodes),
            amplification=read_bytes / cold_bytes if cold_bytes else 1.0,
            hit_rates=tally.hit_rates,
            packing=packing,
            packing_seconds=packing.seconds,
            online_seconds=tally.online_seconds / epochs,
        )


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigurationError(
            f"{name} must be at least {least}; got {value}",
            hint="leave it out for the default",
        )
