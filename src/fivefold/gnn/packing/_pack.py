"""Packing: from features, samples and a plan to a store that training reads in order.

First each segment is laid out (``_layouts``), then two files are written at the same time: records
(``_records``) and rows (``_rows``). All of them go on after a kill with the piece that was under
way. ``store.json`` comes last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.gnn.packing._geometry import STRATEGIES, Geometry, reader_shape
from fivefold.gnn.packing._job import ANEW_HINT, Job, Profile
from fivefold.gnn.packing._layouts import KIND_LAYOUTS, write_layouts
from fivefold.gnn.packing._levels import caches_of
from fivefold.gnn.packing._movement import Mover, Order
from fivefold.gnn.packing._overlap import side_by_side
from fivefold.gnn.packing._plan_file import write_plan
from fivefold.gnn.packing._records import KIND_RECORDS, Recorder
from fivefold.gnn.packing._rows import KIND_ROWS, write_rows
from fivefold.gnn.packing._store import (
    PackedStore,
    StoreFiles,
    read_manifest,
    write_manifest,
)
from fivefold.gnn.planning import Plan
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container, RowReader

Progress = Callable[[str, int, int], None]

_SECTION = "x"
_LOCK = "lock"


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
        progress: Called with a stage ("layouts", "records", "spill", "rows"), what is done, and
            the total. Records are made beside the rows, so calls of two stages may alternate.
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

    Examples:
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
        job = Job(files, inputs, memory_bytes=memory_bytes)
        threads, block_bytes = reader_shape(memory_bytes)
        with (
            _layouts(files, samples, plan, inputs, memory_bytes, tell) as layouts,
            RowReader(
                features,
                _SECTION,
                backend="threads" if backend == "auto" else backend,
                threads=threads,
                queue_depth=threads,
                block_bytes=block_bytes,
            ) as reader,
        ):
            recorder = Recorder(samples, plan, layouts, memory_bytes=memory_bytes)
            mover, sections = _mover(features, reader, layouts, plan)
            mover = job.with_geometry(
                mover,
                sections,
                beside_bytes=recorder.needed_bytes,
                free_bytes=_room_bytes(files, samples, plan, layouts),
                profile=profile,
                strategy=strategy,
            )
            _write_both(
                files,
                inputs,
                mover,
                recorder,
                sections=sections,
                at_once=job.at_once,
                progress=tell,
            )
        _finish(files, plan, samples, inputs, mover.geometry)
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
            hint=ANEW_HINT,
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


def _layouts(
    files: StoreFiles,
    samples: SampleFile,
    plan: Plan,
    inputs: dict[str, str],
    memory_bytes: int,
    progress: Progress,
) -> Container:
    if files.layouts.exists():
        return _of_this_store(files.layouts, KIND_LAYOUTS, inputs)
    return write_layouts(
        files.layouts,
        samples,
        plan,
        memory_bytes=memory_bytes,
        attributes=inputs,
        progress=progress,
    )


def _of_this_store(path: Path, kind: str, inputs: dict[str, str]) -> Container:
    found = Container.open(path, kind=kind)
    if found.attributes == inputs:
        return found
    found.close()
    raise DataError(f"{path} is of another store", hint=ANEW_HINT)


def _write_both(
    files: StoreFiles,
    inputs: dict[str, str],
    mover: Mover,
    recorder: Recorder,
    *,
    sections: dict[str, int],
    at_once: bool,
    progress: Progress,
) -> None:
    """Write rows and records, at the same time where there is memory for both."""

    def checked(check: Callable[[], None]) -> Progress:
        def tell(stage: str, done: int, total: int) -> None:
            check()
            progress(stage, done, total)

        return tell

    def write_all_rows(check: Callable[[], None]) -> None:
        if not files.rows.exists():
            write_rows(
                files.rows,
                mover,
                sections=sections,
                attributes=inputs,
                scratch=files.scratch,
                progress=checked(check),
            ).close()

    def write_all_records(check: Callable[[], None]) -> None:
        if not files.records.exists():
            tell = checked(check)
            recorder.write(files.records, attributes=inputs, progress=tell).close()

    if at_once:
        side_by_side(write_all_rows, write_all_records)
        return
    write_all_records(lambda: None)
    write_all_rows(lambda: None)


def _room_bytes(files: StoreFiles, samples: SampleFile, plan: Plan, layouts: Container) -> int:
    """Disk space for rows and spill: of what is free and of the budget, the smaller one."""
    found = os.statvfs(files.folder)
    rows = sum(path.stat().st_size for path in files.folder.glob("rows.fvf*"))  # set aside before
    records = sum(path.stat().st_size for path in files.folder.glob("records.fvf*"))
    whole = records if files.records.exists() else max(samples.nbytes, records)  # about as large
    free = found.f_bavail * found.f_frsize + rows - (whole - records)
    return min(free, plan.budgets.disk_bytes - whole - layouts.nbytes)


def _mover(
    features: Container, reader: RowReader, layouts: Container, plan: Plan
) -> tuple[Mover, dict[str, int]]:
    section = features.sections[_SECTION]
    device, host = caches_of(plan)
    sections = {
        "rows": layouts.sections["order"].shape[0],
        "device": len(device),
        "host": len(host),
    }
    mover = Mover(
        reader=reader,
        num_nodes=section.shape[0],
        dtype=section.dtype,
        dim=section.shape[1],
        order=Order(layouts, np.concatenate([device, host])),
    )
    return mover, sections


def _finish(
    files: StoreFiles,
    plan: Plan,
    samples: SampleFile,
    inputs: dict[str, str],
    geometry: Geometry,
) -> None:
    write_plan(plan, files.plan)
    with (
        _of_this_store(files.rows, KIND_ROWS, inputs) as rows,
        _of_this_store(files.records, KIND_RECORDS, inputs) as records,
    ):
        fingerprints = {"rows": rows.fingerprint, "records": records.fingerprint}
    manifest = {
        "inputs": inputs,
        "files": fingerprints,
        "num_epochs": samples.num_epochs,
        "packing": geometry.to_json(),
    }
    write_manifest(files, manifest)
