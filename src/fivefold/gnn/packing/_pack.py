"""Packing: from features, samples and a plan to a store that training reads in order.

First each segment is laid out, then records and rows are written at the same time. All go on after
a kill with the piece that was under way. ``store.json`` is written last, with the fingerprints of
inputs and files: a store is either whole or not there, and a file of another store is seen.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, DataError, StorageError, require_whole
from fivefold.files import lock_file, read_checked_json, write_checked_json
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.packing._records import KIND_LAYOUTS, KIND_RECORDS, Recorder, write_layouts
from fivefold.gnn.packing._rows import KIND_ROWS, Mover, write_rows
from fivefold.gnn.packing.record import BatchRecord, decode_record
from fivefold.gnn.planning import Plan
from fivefold.gnn.planning.geometry import STRATEGIES, Geometry, PackingTask, reader_shape
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, DiskProfile, RowReader
from fivefold.gnn.storage.files import Closing
from fivefold.gnn.storage.pages import Ids
from fivefold.gnn.storage.parallel import Check, side_by_side
from fivefold.units import format_bytes, format_duration_s

_VERSION = 2
_REPACK = "pack again with resume=False (`fivefold gnn pack --fresh`)"


class StoreFiles:
    """Names within a store's folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self.store = self.folder / "store.json"
        self.plan = self.folder / "plan.fvf"
        self.rows = self.folder / "rows.fvf"
        self.records = self.folder / "records.fvf"
        self.scratch = self.folder / "packing"
        self.layouts = self.scratch / "layouts.fvf"
        self.job = self.scratch / "job.json"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedStore(Closing):
    """Packed rows, cached rows and batch records, ready for training.

    Attributes:
        folder: Where it lies.
        plan: The plan that it was packed by.
        rows: Container with section ``rows`` [R, D], the packed rows, and the sections ``device``
            and ``host``: the caches' rows in slot order, so that one sequential read fills each.
        records: Container of the batch records; :meth:`record` reads them.
        manifest: What ``store.json`` holds: fingerprints, sizes and how it was packed.
    """

    folder: Path
    plan: Plan
    rows: Container
    records: Container
    manifest: dict[str, Any]

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        features: Container | None = None,
        samples: SampleFile | None = None,
    ) -> PackedStore:
        """Open a store and check that it is whole and belongs to what is given.

        Args:
            folder: Where it was packed.
            features: Refuse a store that was packed from other features than these.
            samples: Refuse a store that was packed from other samples than these.

        Raises:
            DataError: There is no whole store, its files do not belong together, or it was made
                from other features or samples.
        """
        files = StoreFiles(folder)
        manifest = read_manifest(files)
        inputs = manifest["inputs"]
        for name, given in (("features", features), ("samples", samples)):
            if given is not None and given.fingerprint != inputs[name]:
                raise DataError(
                    f"the store {files.folder} was packed from other {name}: "
                    f"{inputs[name]}, not {given.fingerprint}",
                    hint=_REPACK,
                )
        plan = Plan.open(files.plan)
        with ExitStack() as opened:
            rows = opened.enter_context(Container.open(files.rows, kind=KIND_ROWS))
            records = opened.enter_context(Container.open(files.records, kind=KIND_RECORDS))
            parts: dict[str, Plan | Container]
            parts = {"plan": plan, "rows": rows, "records": records}
            expected = {"plan": inputs["plan"], **manifest["files"]}
            for name, part in parts.items():
                if part.fingerprint != expected[name]:
                    raise DataError(
                        f"{name} in {files.folder} do not belong to this store: fingerprint "
                        f"{part.fingerprint}, store.json says {expected[name]}",
                        hint=f"a file was swapped or replaced; {_REPACK}",
                    )
            store = cls(
                folder=files.folder, plan=plan, rows=rows, records=records, manifest=manifest
            )
            _ = store._index  # a damaged one is told of now
            opened.pop_all()
        return store

    @cached_property
    def _index(self) -> Ids:
        return self.records.read("index")

    @property
    def num_batches(self) -> int:
        """Batches of all packed epochs."""
        return len(self._index)

    @property
    def num_epochs(self) -> int:
        """Epochs that were sampled; each has its own batches."""
        return int(self.manifest["num_epochs"])

    def epoch_batches(self, epoch: int) -> range:
        """Return the batches of a sampled epoch; epochs beyond the last begin again."""
        per_epoch = self.num_batches // self.num_epochs
        first = epoch % self.num_epochs * per_epoch
        return range(first, first + per_epoch)

    @cached_property
    def train_ids(self) -> Ids:
        """Return the seeds of an epoch, in the order in which they were given to the sampler."""
        return self.records.read("train_ids")

    @property
    def dim(self) -> int:
        """Features per row."""
        return self.rows.sections["rows"].shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a feature."""
        return self.rows.sections["rows"].dtype

    @property
    def row_bytes(self) -> int:
        """Return bytes of a row."""
        return self.rows.sections["rows"].row_bytes

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest batch."""
        return int(self._index[:, 2].max(initial=0))

    @property
    def nbytes(self) -> int:
        """Return bytes on disk."""
        return sum(file.path.stat().st_size for file in (self.rows, self.records))

    def record(self, number: int) -> BatchRecord:
        """Read the record of one batch, in one request.

        Raises:
            ConfigurationError: There is no such batch.
            DataError: The record is damaged.
        """
        if not 0 <= number < self.num_batches:
            hint = f"there are {self.num_batches} batches, from 0 on"
            raise ConfigurationError(f"there is no batch {number}", hint=hint)
        start, size = self._index[number, :2].tolist()
        return decode_record(self.records.read("data", start, start + size), number=number)

    def close(self) -> None:
        """Let go of the files."""
        self.rows.close()
        self.records.close()


def read_manifest(files: StoreFiles) -> dict[str, Any]:
    """Return what ``store.json`` says."""
    try:
        manifest = read_checked_json(files.store)
    except FileNotFoundError:
        if files.scratch.exists():
            raise DataError(
                f"{files.folder} holds an unfinished store",
                hint="run packing again; it goes on where it stopped",
            ) from None
        raise DataError(f"{files.folder} holds no packed store", hint="pack first") from None
    except (DataError, StorageError) as error:
        raise DataError(f"{files.store} cannot be read: {error.message}", hint=_REPACK) from None
    if manifest.get("version") != _VERSION:
        found = manifest.get("version")
        raise DataError(f"{files.store} is of version {found!r}, not {_VERSION}", hint=_REPACK)
    return manifest


Profile = DiskProfile | Callable[[], DiskProfile]

_logger = logging.getLogger(__name__)
_SECTION = "x"
_LOCK = "lock"
_ANEW_HINT = "give another folder, or start over with resume=False (--fresh)"
_BYTES_PER_S = 1e9  # of a disk that was not measured


def pack(  # noqa: PLR0913 - independent options, each with a default
    features: Container,
    samples: SampleFile,
    plan: Plan,
    folder: str | os.PathLike[str],
    *,
    memory_bytes: int,
    progress: Progress | None = None,
    resume: bool = True,
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
        progress: Called with a stage ("layouts", "records", "spill", "rows"), what is done, and
            the total. Records are made beside the rows, so calls of two stages may alternate.
        resume: Go on with an unfinished store of the same inputs, and take a finished one as it
            is. False: remove what is there and start over.
        profile: Speeds of the disk, for the choice of the strategy, or a function that measures
            them; it is called only where something is to be chosen.
        strategy: "resident", "passes" or "spill" instead of the cheapest.

    Raises:
        ConfigurationError: ``memory_bytes`` is not positive, or the strategy is unknown.
        DataError: Features, samples and plan do not belong together, or the folder holds a store
            of other inputs.
        InfeasibleError: Memory or disk space are short.
        StorageError: The disk refused, or another process packs into this folder.
    """
    memory_bytes = require_whole("memory_bytes", memory_bytes)
    if strategy not in {None, *STRATEGIES}:
        hint = f"use one of {', '.join(STRATEGIES)}, or None for the cheapest"
        raise ConfigurationError(f"strategy is {strategy!r}", hint=hint)
    files = StoreFiles(folder)
    inputs = _inputs(features, samples, plan)
    if resume and files.store.exists():
        _check_same(files, "a store", inputs, read_manifest(files)["inputs"])
        shutil.rmtree(files.scratch, ignore_errors=True)  # a run was killed while it tidied up
        return PackedStore.open(files.folder, features=features, samples=samples)
    with _locked(files):
        if not resume:
            _remove_store(files)
        _Run(
            files=files,
            inputs=inputs,
            features=features,
            samples=samples,
            plan=plan,
            memory_bytes=memory_bytes,
            progress=progress or (lambda _stage, _done, _total: None),
        ).write(profile, strategy)
        shutil.rmtree(files.scratch)
    return PackedStore.open(files.folder, features=features, samples=samples)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run of packing: what goes in, and where it is written."""

    files: StoreFiles
    inputs: dict[str, str]  # fingerprints
    features: Container
    samples: SampleFile
    plan: Plan
    memory_bytes: int
    progress: Progress

    def write(self, profile: Profile | None, strategy: str | None) -> None:
        """Write all files of the store."""
        job = self._job()
        threads, block_bytes = reader_shape(self.memory_bytes)
        engine: dict[str, Any] = {
            "backend": "threads",  # requests are few and large
            "threads": threads,
            "queue_depth": threads,
            "block_bytes": block_bytes,
        }
        with self._layouts() as layouts, RowReader(self.features, _SECTION, **engine) as reader:
            recorder = Recorder(self.samples, self.plan, layouts, memory_bytes=self.memory_bytes)
            sections = {
                "rows": layouts.sections["order"].shape[0],
                "device": len(self.plan.device_rows),
                "host": len(self.plan.host_rows),
            }
            known = job["geometry"]
            fits = known is not None and job["memory_bytes"] <= self.memory_bytes
            if not fits or strategy not in {None, known["strategy"]}:
                free_bytes = self._free_bytes(layouts)
                job |= self._settled(sections, recorder.needed_bytes, free_bytes, profile, strategy)
            geometry = Geometry(**job["geometry"])
            device, host = self.plan.device_rows, self.plan.host_rows
            section = self.features.sections[_SECTION]
            mover = Mover(
                reader=reader,
                engine=engine,
                num_nodes=section.shape[0],
                dtype=section.dtype,
                dim=section.shape[1],
                layouts=layouts,
                # Without a copy, where there is no other cache.
                caches=np.concatenate([device, host]) if len(device) else host,
                geometry=geometry,
            )

            def rows(check: Check) -> None:
                if not self.files.rows.exists():
                    write_rows(
                        self.files.rows,
                        mover,
                        sections=sections,
                        attributes=self.inputs,
                        scratch=self.files.scratch,
                        progress=partial(self._tell, check),
                    ).close()

            def records(check: Check) -> None:
                path, tell = self.files.records, partial(self._tell, check)
                if not path.exists():
                    recorder.write(path, attributes=self.inputs, progress=tell).close()

            if job["at_once"]:
                side_by_side(rows, records)
            else:
                records(lambda: None)
                rows(lambda: None)
        self._write_manifest(geometry)

    def _job(self) -> dict[str, Any]:
        """Return what an unfinished run of these inputs has settled, or the beginning of one."""
        path, job = self.files.job, dict[str, Any]()
        if not path.exists():
            job = {"inputs": self.inputs, "geometry": None, "at_once": False, "memory_bytes": 0}
            write_checked_json(path, job)
            return job
        try:
            job = read_checked_json(path)
        except DataError as error:
            raise DataError(error.message, hint=_ANEW_HINT) from None
        _check_same(self.files, "an unfinished store", self.inputs, job["inputs"])
        return job

    def _settled(
        self,
        sections: dict[str, int],
        beside_bytes: int,
        free_bytes: int,
        profile: Profile | None,
        strategy: str | None,
    ) -> dict[str, Any]:
        """Choose sizes, and whether records are made while rows are moved.

        ``beside_bytes`` is the memory that making the records takes, ``free_bytes`` the disk space
        for rows and spill.
        """
        scratch = self.files.scratch
        for leftover in (*scratch.glob("spill*"), *scratch.glob("routes*")):
            leftover.unlink()
        disk = profile() if callable(profile) else profile
        section = self.features.section(_SECTION)
        task = PackingTask(
            num_nodes=section.num_rows,
            row_bytes=section.row_bytes,
            sections=sections,
            read_bytes_per_s=getattr(disk, "sequential_read_bytes_per_s", _BYTES_PER_S),
            write_bytes_per_s=getattr(disk, "sequential_write_bytes_per_s", _BYTES_PER_S),
        )
        geometry, at_once = task.settle(
            self.memory_bytes, beside_bytes, free_bytes=free_bytes, strategy=strategy
        )
        _logger.info(
            "packing (%s%s): reads %s, writes %s, about %s",
            geometry.strategy,
            "" if at_once else ", records first",
            format_bytes(geometry.read_bytes),
            format_bytes(geometry.written_bytes),
            format_duration_s(geometry.seconds),
        )
        job = {
            "inputs": self.inputs,
            "geometry": dataclasses.asdict(geometry),
            "at_once": at_once,
            "memory_bytes": self.memory_bytes,
        }
        write_checked_json(self.files.job, job)
        return job

    def _layouts(self) -> Container:
        path = self.files.layouts
        if path.exists():
            return self._own(path, KIND_LAYOUTS)
        return write_layouts(
            path,
            self.samples,
            self.plan,
            memory_bytes=self.memory_bytes,
            attributes=self.inputs,
            progress=self.progress,
        )

    def _own(self, path: Path, kind: str) -> Container:
        """Open a finished file, which must be of this store."""
        found = Container.open(path, kind=kind)
        if found.attributes == self.inputs:
            return found
        found.close()
        raise DataError(f"{path} is of another store", hint=_ANEW_HINT)

    def _tell(self, check: Check, stage: str, done: int, total: int) -> None:
        check()
        self.progress(stage, done, total)

    def _free_bytes(self, layouts: Container) -> int:
        """Return the disk space for rows and spill: what is free or in the budget, if less."""
        files, samples = self.files, self.samples
        found = os.statvfs(files.folder)
        rows = sum(path.stat().st_size for path in files.folder.glob("rows.fvf*"))  # set aside
        records = sum(path.stat().st_size for path in files.folder.glob("records.fvf*"))
        # Records are about as large as the samples; a copy of the plan is written at the end.
        whole = records if files.records.exists() else max(samples.nbytes, records)
        whole += self.plan.nbytes
        free = found.f_bavail * found.f_frsize + rows - (whole - records)
        return min(free, self.plan.budgets.disk_bytes - whole - layouts.nbytes)

    def _write_manifest(self, geometry: Geometry) -> None:
        """Put ``store.json`` in place, whole or not at all."""
        self.plan.write(self.files.plan)
        with (
            self._own(self.files.rows, KIND_ROWS) as rows,
            self._own(self.files.records, KIND_RECORDS) as records,
        ):
            manifest = {
                "version": _VERSION,
                "inputs": self.inputs,
                "files": {"rows": rows.fingerprint, "records": records.fingerprint},
                "num_epochs": self.samples.num_epochs,
                "packing": dataclasses.asdict(geometry),
            }
        write_checked_json(self.files.store, manifest)


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
    """Return the fingerprints of what goes in, once it is known that they belong together."""
    section = features.sections.get(_SECTION)
    if section is None or len(section.shape) != 2:
        found = "none" if section is None else str(section.shape)
        raise DataError(
            f"{features.path} has no section {_SECTION!r} of two dimensions: {found}",
            hint="give the features' container, such as features.fvf of a dataset",
        )
    given = {"features": features.fingerprint, "samples": samples.fingerprint}
    planned = {"features": plan.features_fingerprint, "samples": plan.samples_fingerprint}
    for name, fingerprint in given.items():
        if planned[name] != fingerprint:
            raise DataError(
                f"the plan was made for other {name}: {planned[name]}, not {fingerprint}",
                hint=f"plan again with these {name}, or give those of the plan",
            )
    return {**given, "plan": plan.fingerprint}


def _check_same(
    files: StoreFiles, what: str, inputs: dict[str, str], found: dict[str, str]
) -> None:
    other = [name for name in inputs if inputs[name] != found.get(name)]
    if other:
        raise DataError(
            f"{files.folder} holds {what} of other inputs ({', '.join(other)})", hint=_ANEW_HINT
        )


@contextmanager
def _locked(files: StoreFiles) -> Iterator[None]:
    """Keep other processes out of this folder."""
    try:
        files.scratch.mkdir(parents=True, exist_ok=True)
        lock = (files.scratch / _LOCK).open("w")
    except OSError as error:
        message = f"{files.scratch} cannot be made: {error.strerror}"
        hint = "choose a folder that can be written, on a disk with free space"
        raise StorageError(message, hint=hint) from error
    with lock:
        if not lock_file(lock.fileno(), files.scratch, patience_s=0):
            raise StorageError(
                f"another process packs into {files.folder}",
                hint="wait for it to end, or choose another folder",
            )
        yield
