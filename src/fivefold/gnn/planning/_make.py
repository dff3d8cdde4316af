"""Make a plan from samples, features, budgets and a disk."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import get_args

import numpy as np

from fivefold.errors import (
    ConfigurationError,
    DataError,
    InfeasibleError,
    require_one_of,
    require_whole,
)
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.planning._caches import Caches, KeptArrays, Policy, Scratch, Tally
from fivefold.gnn.planning._plan import Budgets, Plan, Prediction, plan_bytes
from fivefold.gnn.planning._search import (
    GAPS_BYTES,
    Found,
    SegmentQuestion,
    Space,
    search_segments,
    segments_of,
)
from fivefold.gnn.planning.geometry import (
    RECORD_WRITER_BYTES,
    Geometry,
    PackingTask,
    least_memory_bytes,
    recording_bytes,
)
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, DiskProfile
from fivefold.gnn.storage.pages import PAGE_BYTES
from fivefold.units import format_bytes

_log = logging.getLogger(__name__)


def make_plan(  # noqa: PLR0913 - one keyword per decision that the caller may take over
    samples: SampleFile,
    features: Container,
    budgets: Budgets,
    profile: DiskProfile,
    *,
    policy: Policy = "static",
    segment_batches: int | None = None,
    max_gap_bytes: int | None = None,
    buffer_batches: int = 3,
    training_epochs: int = 50,
    scratch_folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide what goes where, and predict what that costs.

    Nothing is written but, where the batches have many ids, a scratch file of as many bytes as
    their ids have, which goes when planning ends.

    Args:
        samples: Sampled batches.
        features: Container whose section ``x`` has the feature rows; only its sizes are read.
        budgets: Memory and disk space.
        profile: The disk's prices.
        policy: ``"static"``: the most used rows are cached and batches may come in any order;
            ``"belady"``: batches come in the order of the samples, and the host cache holds what
            will be needed soonest.
        segment_batches: Batches per segment; None: the size of least cost within the budget.
        max_gap_bytes: Gaps up to this size are read through; None: what the disk makes cheapest.
        buffer_batches: Batches in flight whose rows are kept in host memory, and in device
            memory where there is some; the caches get the rest of the budgets. 2 or more, or 0.
        training_epochs: Epochs over which the time for packing is spread in the choice of the
            segment size.
        scratch_folder: Where the scratch file goes; None: beside the samples.
        progress: Told of (stage, done, total): all batches are walked through once ("cold rows"),
            then for each segment size that is weighed ("segments").

    Returns:
        The plan.

    Raises:
        ConfigurationError: An argument is not allowed.
        DataError: Samples and features are of different graphs.
        InfeasibleError: A budget is short; says which, and the smallest that would do.
        StorageError: The scratch file cannot be written.
    """
    _check(samples, features, budgets, policy)
    _check_numbers(segment_batches, max_gap_bytes, buffer_batches, training_epochs)
    num_nodes, row_bytes = samples.num_nodes, features.section("x").row_bytes
    folder = samples.path.parent if scratch_folder is None else Path(scratch_folder)
    scratch = Scratch(folder=folder, most_bytes=budgets.disk_bytes)
    caches, buffer_bytes = _filled(samples, row_bytes, budgets, policy, buffer_batches, scratch)
    inputs = _Inputs(samples, row_bytes, budgets, profile, buffer_bytes, caches)
    tell = progress or (lambda _stage, _done, _total: None)
    tally = Tally(samples, row_bytes, caches, profile, progress=partial(tell, "cold rows"))
    kept = KeptArrays(tally.cold_ids(), limit=num_nodes, scratch=scratch)
    with contextlib.closing(kept) as cold:
        question = SegmentQuestion(
            cold=cold,
            row_bytes=row_bytes,
            disk=profile,
            gaps_bytes=GAPS_BYTES if max_gap_bytes is None else (max_gap_bytes,),
            progress=partial(tell, "segments"),
        )
        found = search_segments(
            question,
            inputs.space(tally.cold_rows),
            segment_batches=segment_batches,
            num_passes=training_epochs / samples.num_epochs,
        )
    return Plan(
        policy=policy,
        max_gap_bytes=found.reads.max_gap_bytes,
        row_bytes=row_bytes,
        num_nodes=num_nodes,
        num_batches=samples.num_batches,
        features_fingerprint=features.fingerprint,
        samples_fingerprint=samples.fingerprint,
        budgets=budgets,
        training_epochs=training_epochs,
        device_rows=caches.device_rows,
        host_rows=caches.host_rows,
        num_host_slots=caches.num_host_slots,
        segments=segments_of(samples.num_batches, found.segment_batches),
        segment_rows=found.reads.segment_rows,
        batch_bytes=found.reads.read_bytes,
        batch_requests=found.reads.requests,
        predicted=inputs.predict(tally, found),
        choices=found.choices,
        cache_schedule=caches.schedule,
    )


@dataclass(frozen=True)
class _Inputs:
    """Samples, row size, budgets and disk that a plan is made for."""

    samples: SampleFile
    row_bytes: int
    budgets: Budgets
    disk: DiskProfile
    buffer_bytes: int  # of rows of the batches in flight, each as large as the largest
    caches: Caches

    def space(self, cold_rows: int) -> Space:
        """Return what the disk budget leaves for packed rows."""
        # With less, packing refuses; a plan may be made for its reads alone.
        memory_bytes = max(self.budgets.host_bytes, least_memory_bytes(self.row_bytes))

        @cache
        def ways(packed_rows: int) -> list[Geometry]:
            return self.task(packed_rows).ways(memory_bytes)

        def kept_bytes(packed_rows: int) -> int:
            rows = packed_rows + self.caches.filled_rows
            return rows * self.row_bytes + self.record_bytes(packed_rows, cold_rows)

        return Space(disk_bytes=self.budgets.disk_bytes, kept_bytes=kept_bytes, ways=ways)

    def task(self, packed_rows: int) -> PackingTask:
        """Return what packing so many rows is."""
        cached = {"device": len(self.caches.device_rows), "host": len(self.caches.host_rows)}
        return PackingTask(
            num_nodes=self.samples.num_nodes,
            row_bytes=self.row_bytes,
            sections={"rows": packed_rows, **cached},
            read_bytes_per_s=self.disk.sequential_read_bytes_per_s,
            write_bytes_per_s=self.disk.sequential_write_bytes_per_s,
        )

    def packing(self, found: Found, record_bytes: int) -> Geometry:
        """Return the way of packing that ``pack`` will choose with the host's memory.

        Where that cannot be said, it is the way that the search found to fit.
        """
        task = self.task(int(found.reads.segment_rows[-1]))
        memory_bytes = self.budgets.host_bytes
        beside_bytes = RECORD_WRITER_BYTES + recording_bytes(
            self.samples,
            self.caches,
            segment_rows=int(np.diff(found.reads.segment_rows).max(initial=0)),
            memory_bytes=memory_bytes,
        )
        free_bytes = self.budgets.disk_bytes - record_bytes
        try:
            return task.settle(memory_bytes, beside_bytes, free_bytes=free_bytes)[0]
        except InfeasibleError:
            return found.packing

    def record_bytes(self, packed_rows: int, cold_rows: int) -> int:
        """Estimate the bytes that packing writes besides rows: records, the plan, and layouts.

        Records are about as large as the samples; the layouts take a node id per packed row, a
        number per cold row of a batch and three per batch, in a file of whole pages.
        """
        batches = self.samples.num_batches
        arrays = [
            self.caches.device_rows,
            self.caches.host_rows,
            *[np.empty(batches + 1, np.int64)] * 3,
        ]
        if self.caches.schedule is not None:
            arrays += self.caches.schedule.arrays().values()
        plan = plan_bytes(arrays, batches)
        id_bytes = 4 if self.samples.num_nodes < 2**32 else 8
        layouts = packed_rows * id_bytes + 4 * cold_rows + 24 * batches
        return plan + self.samples.nbytes + layouts + layouts // 1024 + 7 * PAGE_BYTES

    def predict(self, tally: Tally, found: Found) -> Prediction:
        """Sum up what the choices lead to; sums over all batches become means per epoch."""
        reads, packed_rows = found.reads, int(found.reads.segment_rows[-1])
        record_bytes = self.record_bytes(packed_rows, tally.cold_rows)
        packing = self.packing(found, record_bytes)
        read_bytes = int(reads.read_bytes.sum())
        epochs = self.samples.num_epochs
        cold_bytes = tally.cold_rows * self.row_bytes
        cache_bytes = self.caches.filled_rows * self.row_bytes
        return Prediction(
            sampled_epochs=epochs,
            read_bytes_per_epoch=round(read_bytes / epochs),
            requests_per_epoch=round(int(reads.requests.sum()) / epochs),
            read_seconds=reads.seconds / epochs,
            cold_rows=tally.cold_rows,
            accesses=tally.accesses,
            packed_rows=packed_rows,
            packed_bytes=packed_rows * self.row_bytes,
            cache_bytes=cache_bytes,
            fill_seconds=cache_bytes / self.disk.sequential_read_bytes_per_s,
            record_bytes=record_bytes,
            sample_bytes=self.samples.nbytes,
            scratch_bytes=packing.scratch_bytes,
            buffer_bytes=self.buffer_bytes,
            blow_up=packed_rows / max(1, self.samples.num_nodes),
            amplification=read_bytes / cold_bytes if cold_bytes else 1.0,
            hit_rates=tally.hit_rates,
            packing=packing,
            packing_seconds=packing.seconds,
            online_seconds=tally.online_seconds / epochs,
        )


def _filled(
    samples: SampleFile,
    row_bytes: int,
    budgets: Budgets,
    policy: Policy,
    buffer_batches: int,
    scratch: Scratch,
) -> tuple[Caches, int]:
    """Fill the slots that the batches in flight leave; return these batches' bytes, too."""
    largest = max(map(samples.num_nodes_of, range(samples.num_batches)), default=0)
    buffer_bytes = buffer_batches * largest * row_bytes
    device_slots, host_slots = budgets.cache_slots(
        row_bytes, buffer_batches=buffer_batches, buffer_bytes=buffer_bytes
    )
    if budgets.device_bytes and not device_slots:
        _log.warning(
            "no rows are cached on the device: %s do not exceed the %s of the %d batches in flight "
            "there",
            format_bytes(budgets.device_bytes),
            format_bytes(buffer_bytes),
            buffer_batches,
        )
    slots = {"device_slots": device_slots, "host_slots": host_slots}
    return Caches.fill(samples, policy, **slots, scratch=scratch), buffer_bytes


def _check(samples: SampleFile, features: Container, budgets: object, policy: str) -> None:
    """Refuse samples and features of different graphs, and arguments of the wrong kind."""
    num_nodes = features.section("x").num_rows
    if samples.num_nodes != num_nodes:
        raise DataError(
            f"the samples are of a graph of {samples.num_nodes} nodes, the features of {num_nodes}",
            hint="sample the graph that these features belong to",
        )
    if not isinstance(budgets, Budgets):
        raise ConfigurationError(f"budgets is {budgets!r:.40}", hint="give Budgets")
    require_one_of(policy, get_args(Policy), f"policy is {policy!r}")


def _check_numbers(
    segment_batches: int | None,
    max_gap_bytes: int | None,
    buffer_batches: int,
    training_epochs: int,
) -> None:
    for name, value, least in (
        ("segment_batches", segment_batches, 1),
        ("max_gap_bytes", max_gap_bytes, 0),
        ("buffer_batches", buffer_batches, 0),
        ("training_epochs", training_epochs, 0),
    ):
        if value is not None:
            require_whole(name, value, least=least, hint="leave it out for the default")
    if buffer_batches == 1:
        message = "buffer_batches is 1, but a batch is prepared while another one is trained on"
        hint = "use 2 or more, or 0 to keep no memory for batches in flight"
        raise ConfigurationError(message, hint=hint)
