"""Packing: from features, samples and a plan to a store that training reads in order.

Two halves, each one file: records (``_records``) and rows (``_rows``). Both go on after a kill
with the piece that was under way. ``store.json`` comes last.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.packing._geometry import (
    PAGE_BYTES,
    STRATEGIES,
    Geometry,
    choose_geometry,
    reader_shape,
)
from fivefold.gnn.packing._movement import Mover, Order
from fivefold.gnn.packing._plan_file import write_plan
from fivefold.gnn.packing._records import KIND_RECORDS, caches_of, write_records
from fivefold.gnn.packing._rows import KIND_ROWS, write_rows
from fivefold.gnn.packing._store import (
    PackedStore,
    StoreFiles,
    read_manifest,
    write_json,
    write_manifest,
)
from fivefold.gnn.planning import DiskCost, Plan
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, RowReader
from fivefold.units import format_bytes, format_duration_s

Profile = DiskCost | Callable[[], DiskCost]
Progress = Callable[[str, int, int], None]

__all__ = ["pack"]

_logger = logging.getLogger(__name__)
_SECTION = "x"
_LOCK = "lock"
_BYTES_PER_S = 1e9  # of a disk that was not measured
_ANEW = "give another folder, or begin anew with resume=False (--fresh)"
_LEDGER_BYTES_PER_PAGE = 10  # checksum and state of a page, for the rows and for the spill


def pack(  # noqa: PLR0913 - the contract names them
    features: Container,
    samples: SampleFile,
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    memory_bytes: int,
    progress: Callable[[str, int, int], None] | None = None,
    resume: bool = True,
    backend: Literal["auto", "threads", "io_uring", "python", "mmap"] = "auto",
    profile: Profile | None = None,
    strategy: str | None = None,
) -> PackedStore:
    """Write the rows of every batch next to one another, and the records that say where.

    Killed at any moment and started again with the same inputs, it goes on with the piece that
    was under way, and the store becomes the same byte for byte.

    Args:
        features: Container with the section ``x`` [N, D].
        samples: The sampled batches.
        plan: What ``make_plan`` decided for these features and samples.
        folder: Where the store shall lie.
        memory_bytes: What buffers and indices may take; the interpreter is not in it.
        progress: Called with a stage ("records", "spill", "rows"), what is done, and the total.
        resume: Go on with an unfinished store of the same inputs, and take a finished one as it
            is. False: remove what is there and begin anew.
        backend: Engine that reads; "auto" takes threads, for requests are few and large.
        profile: Speeds of the disk, for the choice of the strategy, or a function that measures
            them; it is called only where something is to be chosen.
        strategy: "resident", "passes" or "spill" instead of the cheapest.

    Returns:
        The store, opened.

    Raises:
        ConfigurationError: ``memory_bytes`` is not positive, or the strategy is unknown.
        DataError: Features, samples and plan do not belong together, or the folder holds a store
            of other inputs.
        InfeasibleError: Memory or disk space are short.
        StorageError: The disk refused, or another process packs into this folder.

    Example:
        >>> import tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> from fivefold.gnn.planning import Budgets, FeatureInfo, make_plan
        >>> from fivefold.gnn.sampling import NeighborSampler, sample_epochs
        >>> class Disk:
        ...     sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9
        ...     def seconds(self, requests, size_bytes):
        ...         return requests * 1e-5 + size_bytes / 1e9
        >>> folder = tempfile.TemporaryDirectory()
        >>> data = generate_graph(f"{folder.name}/data", nodes=300, dim=8, seed=1)
        >>> sampler = NeighborSampler(data.topology(), [3, 3], seed=1)
        >>> samples = sample_epochs(
        ...     sampler, data.train, f"{folder.name}/samples.fvf", batch_size=16
        ... )
        >>> info = FeatureInfo(
        ...     num_nodes=300, row_bytes=data.row_bytes, fingerprint=data.features.fingerprint
        ... )
        >>> budgets = Budgets(host_bytes=100_000, disk_bytes=10**8)
        >>> plan = make_plan(samples, info, budgets, Disk(), buffer_batches=0)
        >>> with pack(
        ...     data.features, samples, plan, f"{folder.name}/store", memory_bytes=10**6
        ... ) as store:
        ...     record = store.record(0)
        ...     seeds = record.node_ids[: record.batch_size]
        ...     bool((seeds == samples.batch(0).seeds).all())
        True
        >>> data.close(); samples.close(); folder.cleanup()
    """
    _check_settings(memory_bytes, strategy)
    files = StoreFiles(folder)
    inputs = _inputs(features, samples, plan)
    if resume and files.store.exists():
        return _finished(files, inputs, features, samples)
    tell = progress or (lambda _stage, _done, _total: None)
    with _locked(files):
        if not resume:
            _remove_store(files)
        job = _Job(files, inputs, memory_bytes=memory_bytes)
        threads, block_bytes = reader_shape(memory_bytes)
        with (
            _records(files, samples, plan, inputs, memory_bytes, tell) as records,
            RowReader(
                features,
                _SECTION,
                backend="threads" if backend == "auto" else backend,
                threads=threads,
                queue_depth=threads,
                block_bytes=block_bytes,
            ) as reader,
        ):
            mover, sections = _mover(features, reader, records, plan)
            spare = plan.budgets.disk_bytes - records.nbytes
            mover = job.with_geometry(
                mover, sections, budget_bytes=spare, profile=profile, strategy=strategy
            )
            with _rows(files, mover, sections, inputs, tell) as rows:
                _finish(files, plan, samples, inputs, mover.geometry, rows, records)
        shutil.rmtree(files.scratch)
    return PackedStore.open(files.folder, features=features, samples=samples)


def _check_settings(memory_bytes: int, strategy: str | None) -> None:
    if memory_bytes <= 0:
        raise ConfigurationError(
            f"memory_bytes is {memory_bytes}", hint="use a positive number of bytes"
        )
    if strategy is not None and strategy not in STRATEGIES:
        hint = f"use one of {', '.join(STRATEGIES)}, or None for the cheapest"
        raise ConfigurationError(f"strategy is {strategy!r}", hint=hint)


def _remove_store(files: StoreFiles) -> None:
    """Remove a store, finished or not, but for the lock; its name goes first."""
    files.store.unlink(missing_ok=True)
    for path in (files.plan, files.rows, files.records):
        for found in files.folder.glob(path.name + "*"):
            found.unlink()
    for found in files.scratch.iterdir():
        if found.name != _LOCK:
            found.unlink()


def _inputs(features: Container, samples: SampleFile, plan: Plan) -> dict[str, str]:
    """Fingerprints of what goes in, once it is known that they belong together."""
    section = features.sections.get(_SECTION)
    if section is None or len(section.shape) != 2:
        found = "none" if section is None else str(section.shape)
        raise DataError(
            f"{features.path} has no section {_SECTION!r} of two dimensions: {found}",
            hint="give the features' container, such as features.fvf of a dataset",
        )
    pairs = (
        ("features", plan.features_fingerprint, features.fingerprint),
        ("samples", plan.samples_fingerprint, samples.fingerprint),
    )
    for name, planned, given in pairs:
        if planned != given:
            raise DataError(
                f"the plan was made for other {name}: {planned}, not {given}",
                hint=f"plan again with these {name}, or give those of the plan",
            )
    return {"features": features.fingerprint, "samples": samples.fingerprint,
            "plan": plan.fingerprint}  # fmt: skip


def _finished(
    files: StoreFiles, inputs: dict[str, str], features: Container, samples: SampleFile
) -> PackedStore:
    found = read_manifest(files)["inputs"]
    other = [name for name in inputs if inputs[name] != found.get(name)]
    if other:
        raise DataError(
            f"{files.folder} holds a store of other inputs ({', '.join(other)})",
            hint=_ANEW,
        )
    shutil.rmtree(files.scratch, ignore_errors=True)  # a run was killed while it tidied up
    return PackedStore.open(files.folder, features=features, samples=samples)


@contextmanager
def _locked(files: StoreFiles) -> Iterator[None]:
    """Keep other processes out of this folder."""
    try:
        files.scratch.mkdir(parents=True, exist_ok=True)
        lock = (files.scratch / _LOCK).open("w")
    except OSError as error:
        raise StorageError(
            f"{files.scratch} cannot be made: {error.strerror}",
            hint="choose a folder that can be written, on a disk with free space",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"another process packs into {files.folder}",
                hint="wait for it to end, or choose another folder",
            ) from None
        yield


class _Job:
    """What an unfinished run has settled: its inputs and its geometry."""

    def __init__(self, files: StoreFiles, inputs: dict[str, str], *, memory_bytes: int) -> None:
        self._files = files
        self._path = files.scratch / "job.json"
        self._memory_bytes = memory_bytes
        self._settled: dict[str, Any] = {"inputs": inputs, "geometry": None, "memory_bytes": 0}
        if not self._path.exists():
            write_json(self._path, self._settled)
            return
        try:
            self._settled = json.loads(self._path.read_text())
            known = self._settled["inputs"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path} cannot be read: {error}", hint=_ANEW) from None
        other = [name for name in inputs if inputs[name] != known.get(name)]
        if other:
            message = f"{files.folder} holds an unfinished store of other {', '.join(other)}"
            raise DataError(message, hint=_ANEW)

    def with_geometry(
        self,
        mover: Mover,
        sections: dict[str, int],
        *,
        budget_bytes: int,
        profile: Profile | None,
        strategy: str | None,
    ) -> Mover:
        """The mover with the sizes of the earlier run, where they fit, else with new ones."""
        known = self._settled["geometry"]
        fits = known is not None and self._settled["memory_bytes"] <= self._memory_bytes
        if fits and strategy in {None, known["strategy"]}:
            return dataclasses.replace(mover, geometry=Geometry(**known))
        for leftover in (*self._files.scratch.glob("spill*"), *self._files.scratch.glob("routes*")):
            leftover.unlink()
        disk = profile() if callable(profile) else profile
        output_bytes = sum(sections.values()) * mover.row_bytes
        ledger_bytes = _LEDGER_BYTES_PER_PAGE * output_bytes // PAGE_BYTES
        geometry = choose_geometry(
            num_nodes=mover.num_nodes,
            row_bytes=mover.row_bytes,
            sections=sections,
            memory_bytes=self._memory_bytes - ledger_bytes,
            read_bytes_per_s=getattr(disk, "sequential_read_bytes_per_s", _BYTES_PER_S),
            write_bytes_per_s=getattr(disk, "sequential_write_bytes_per_s", _BYTES_PER_S),
            free_bytes=min(budget_bytes, _free_bytes(self._files)),
            strategy=strategy,
        )
        _logger.info(
            "packing (%s): reads %s, writes %s, about %s",
            geometry.strategy,
            format_bytes(geometry.read_bytes),
            format_bytes(geometry.written_bytes),
            format_duration_s(geometry.seconds),
        )
        self._settled |= {"geometry": geometry.to_json(), "memory_bytes": self._memory_bytes}
        write_json(self._path, self._settled)
        return dataclasses.replace(mover, geometry=geometry)


def _free_bytes(files: StoreFiles) -> int:
    """Free space, with what an unfinished run has already set aside for the rows."""
    found = os.statvfs(files.folder)
    taken = sum(path.stat().st_size for path in files.folder.glob("rows.fvf*"))
    return found.f_bavail * found.f_frsize + taken


def _records(
    files: StoreFiles,
    samples: SampleFile,
    plan: Plan,
    inputs: dict[str, str],
    memory_bytes: int,
    progress: Progress,
) -> Container:
    if files.records.exists():
        records = Container.open(files.records, kind=KIND_RECORDS)
        if records.attributes == inputs:
            return records
        records.close()
        raise DataError(f"{files.records} is of another store", hint=_ANEW)
    return write_records(
        files.records,
        samples,
        plan,
        memory_bytes=memory_bytes,
        attributes=inputs,
        progress=progress,
    )


def _mover(
    features: Container, reader: RowReader, records: Container, plan: Plan
) -> tuple[Mover, dict[str, int]]:
    section = features.sections[_SECTION]
    device, host = caches_of(plan)
    sections = {
        "rows": records.sections["order"].shape[0],
        "device": len(device),
        "host": len(host),
    }
    mover = Mover(
        reader=reader,
        num_nodes=section.shape[0],
        dtype=section.dtype,
        dim=section.shape[1],
        order=Order(records, np.concatenate([device, host])),
    )
    return mover, sections


def _rows(
    files: StoreFiles,
    mover: Mover,
    sections: dict[str, int],
    inputs: dict[str, str],
    progress: Progress,
) -> Container:
    if files.rows.exists():
        rows = Container.open(files.rows, kind=KIND_ROWS)
        if rows.attributes == inputs:
            return rows
        rows.close()
        raise DataError(f"{files.rows} is of another store", hint=_ANEW)
    return write_rows(
        files.rows,
        mover,
        sections=sections,
        attributes=inputs,
        scratch=files.scratch,
        progress=progress,
    )


def _finish(
    files: StoreFiles,
    plan: Plan,
    samples: SampleFile,
    inputs: dict[str, str],
    geometry: Geometry,
    rows: Container,
    records: Container,
) -> None:
    write_plan(plan, files.plan)
    manifest = {
        "inputs": inputs,
        "files": {"rows": rows.fingerprint, "records": records.fingerprint},
        "num_epochs": samples.num_epochs,
        "packing": geometry.to_json(),
    }
    write_manifest(files, manifest)
