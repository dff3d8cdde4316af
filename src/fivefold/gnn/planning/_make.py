"""From samples, features, budgets and a disk to a plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.gnn.planning._budgets import Budgets, FeatureInfo
from fivefold.gnn.planning._cold import ColdIds
from fivefold.gnn.planning._layout import Layout, check_layout
from fivefold.gnn.planning._packing_cost import packing_ways
from fivefold.gnn.planning._pages import read_costs
from fivefold.gnn.planning._plan import Plan, Policy
from fivefold.gnn.planning._prediction import PackingCost, Prediction
from fivefold.gnn.planning._search import Found, Space, search_segments
from fivefold.gnn.planning._segments import GAPS_BYTES, SegmentQuestion, segments_of
from fivefold.gnn.planning._sources import (
    DiskCost,
    Ids,
    SampleSource,
    sample_bytes,
)
from fivefold.gnn.planning._static import StaticCache
from fivefold.units import format_bytes

__all__ = ["make_plan"]


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
    num_epochs: int = 50,
) -> Plan:
    """Decide what goes where, and predict what that costs. Nothing is written.

    Args:
        samples: Sampled batches.
        features: Size of the feature matrix.
        budgets: Memory and disk space.
        profile: The disk's prices.
        policy: ``"static"``: the most used rows are cached and batches may come in any order;
            ``"belady"``: batches come in the order of the samples, and the host cache holds what
            will be needed soonest.
        layout: Order of the packed rows within a segment.
        segment_batches: Batches per segment; None: the size of least cost within the budget.
        minhash_functions: Number of hash functions of the ``minhash`` layout.
        max_gap_bytes: Gaps up to this size are read through; None: what the disk makes cheapest.
        buffer_batches: Batches in flight whose rows are kept in host memory, and in device
            memory where there is some; the caches get the rest of the budgets.
        num_epochs: Epochs over which the time for packing is spread in the choice of the size.

    Returns:
        The plan.

    Raises:
        ConfigurationError: An argument is not allowed.
        DataError: Samples and features are of different graphs.
        InfeasibleError: A budget is short; says which, and the smallest that would do.

    Example:
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
    _check(samples, features, segment_batches=segment_batches, max_gap_bytes=max_gap_bytes)
    check_layout(layout, minhash_functions)
    buffer_bytes = _reserve(samples, features, budgets, buffer_batches)
    cache = StaticCache.by_count(
        samples.counts,
        device_slots=max(0, budgets.device_bytes - buffer_bytes) // features.row_bytes,
        host_slots=(budgets.host_bytes - buffer_bytes) // features.row_bytes,
    )
    tally = _Tally(samples, features, cache, profile)
    cold = ColdIds(tally.cold_ids(), num_nodes=samples.num_nodes)
    question = SegmentQuestion(
        cold=cold,
        layout=layout,
        minhash_functions=minhash_functions,
        row_bytes=features.row_bytes,
        disk=profile,
        gaps_bytes=GAPS_BYTES if max_gap_bytes is None else (max_gap_bytes,),
    )
    found = search_segments(
        question,
        _space(samples, features, budgets, cache, profile),
        segment_batches=segment_batches,
        num_epochs=num_epochs,
    )
    cold.close()
    return Plan(
        policy=policy,
        layout=layout,
        minhash_functions=minhash_functions,
        max_gap_bytes=found.reads.max_gap_bytes,
        row_bytes=features.row_bytes,
        num_nodes=features.num_nodes,
        num_batches=samples.num_batches,
        features_fingerprint=features.fingerprint,
        samples_fingerprint=samples.fingerprint,
        budgets=budgets,
        device_rows=cache.device_rows,
        host_rows=cache.host_rows,
        num_host_slots=len(cache.host_rows),
        segments=segments_of(samples.num_batches, found.segment_batches),
        segment_rows=found.reads.segment_rows,
        batch_bytes=found.reads.read_bytes,
        batch_requests=found.reads.requests,
        predicted=_predict(samples, features, tally, found, buffer_bytes),
        choices=found.choices,
    )


class _Tally:
    """Walks through the batches once, hands out their cold ids and counts along the way."""

    def __init__(
        self, samples: SampleSource, features: FeatureInfo, cache: StaticCache, disk: DiskCost
    ) -> None:
        self._samples, self._features, self._cache, self._disk = samples, features, cache, disk
        self.accesses = self.device_hits = self.host_hits = self.cold_rows = 0
        self.online_seconds = self.fill_seconds = 0.0
        self.cached_rows = len(cache.device_rows) + len(cache.host_rows)
        if self.cached_rows:
            size_bytes = self.cached_rows * features.row_bytes
            self.fill_seconds = size_bytes / disk.sequential_read_bytes_per_s

    def cold_ids(self) -> Iterator[Ids]:
        """Cold ids of each batch, ascending."""
        for batch in range(self._samples.num_batches):
            ids = np.asarray(self._samples.node_ids(batch), np.int64)
            slots = self._cache.slots(ids)
            cold = np.sort(ids[slots < 0])
            on_device = int(np.count_nonzero((slots >= 0) & (slots < len(self._cache.device_rows))))
            self.accesses += len(ids)
            self.device_hits += on_device
            self.host_hits += len(ids) - len(cold) - on_device
            self.cold_rows += len(cold)
            self.online_seconds += self._online(cold)
            yield cold

    def _online(self, cold: Ids) -> float:
        """Seconds to gather these rows from the features, every page once."""
        if not len(cold):
            return 0.0
        ((requests, size_bytes),) = read_costs(
            cold,
            np.ones(len(cold), np.int64),
            row_bytes=self._features.row_bytes,
            gaps_bytes=np.zeros(1, np.int64),
        )
        return self._disk.seconds(int(requests), int(size_bytes))


def _check(
    samples: SampleSource,
    features: FeatureInfo,
    *,
    segment_batches: int | None,
    max_gap_bytes: int | None,
) -> None:
    if samples.num_nodes != features.num_nodes:
        raise DataError(
            f"the samples are of a graph of {samples.num_nodes} nodes, the features of "
            f"{features.num_nodes}",
            hint="sample the graph that these features belong to",
        )
    if segment_batches is not None and segment_batches < 1:
        raise ConfigurationError(
            f"segment_batches must be at least 1; got {segment_batches}",
            hint="1 packs each batch for itself; None searches",
        )
    if max_gap_bytes is not None and max_gap_bytes < 0:
        raise ConfigurationError(
            f"max_gap_bytes must not be negative; got {max_gap_bytes}",
            hint="0 never reads through a gap; None chooses by the disk's prices",
        )


def _reserve(
    samples: SampleSource, features: FeatureInfo, budgets: Budgets, buffer_batches: int
) -> int:
    """Bytes for the rows of the batches in flight, checked against the budget."""
    sizes = (len(samples.node_ids(batch)) for batch in range(samples.num_batches))
    largest = max(sizes, default=0) if buffer_batches else 0
    needed = buffer_batches * largest * features.row_bytes
    if needed > budgets.host_bytes:
        raise InfeasibleError(
            f"host memory of {format_bytes(budgets.host_bytes)} does not hold the rows of "
            f"{buffer_batches} batches of up to {largest} nodes",
            hint=f"give at least host_bytes={needed} ({format_bytes(needed)}), fewer "
            "buffer_batches, or sample smaller batches",
        )
    return needed


def _space(
    samples: SampleSource,
    features: FeatureInfo,
    budgets: Budgets,
    cache: StaticCache,
    disk: DiskCost,
) -> Space:
    cached_rows = len(cache.device_rows) + len(cache.host_rows)

    def ways(packed_rows: int) -> list[PackingCost]:
        return packing_ways(
            features,
            output_rows=packed_rows + cached_rows,
            memory_bytes=budgets.host_bytes,
            disk=disk,
        )

    return Space(
        disk_bytes=budgets.disk_bytes,
        fixed_bytes=cached_rows * features.row_bytes + sample_bytes(samples),
        row_bytes=features.row_bytes,
        ways=ways,
    )


def _predict(
    samples: SampleSource, features: FeatureInfo, tally: _Tally, found: Found, buffer_bytes: int
) -> Prediction:
    packed_rows = int(found.reads.segment_rows[-1])
    read_bytes = int(found.reads.read_bytes.sum())
    accesses = max(1, tally.accesses)
    return Prediction(
        read_bytes_per_epoch=read_bytes,
        requests_per_epoch=int(found.reads.requests.sum()),
        read_seconds=found.reads.seconds,
        cold_rows=tally.cold_rows,
        accesses=tally.accesses,
        packed_rows=packed_rows,
        packed_bytes=packed_rows * features.row_bytes,
        cache_bytes=tally.cached_rows * features.row_bytes,
        fill_seconds=tally.fill_seconds,
        record_bytes=sample_bytes(samples),
        sample_bytes=sample_bytes(samples),
        scratch_bytes=found.packing.scratch_bytes,
        buffer_bytes=buffer_bytes,
        blow_up=packed_rows / max(1, features.num_nodes),
        amplification=read_bytes / (tally.cold_rows * features.row_bytes)
        if tally.cold_rows
        else 1.0,
        hit_rates={
            "device": tally.device_hits / accesses,
            "host": tally.host_hits / accesses,
            "disk": tally.cold_rows / accesses,
        },
        packing=found.packing,
        packing_seconds=found.packing.seconds,
        online_seconds=tally.online_seconds,
    )
