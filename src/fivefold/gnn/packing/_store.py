"""The packed store on disk: a folder that training opens, and which refuses what is stale.

``store.json`` is written last: it names the fingerprints of what the store was made from and of
its own files, so that a store is either whole or not there, and a file of another store is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, DataError, StorageError
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.packing._records import KIND_RECORDS
from fivefold.gnn.packing._rows import KIND_ROWS
from fivefold.gnn.packing.record import BatchRecord, decode_record
from fivefold.gnn.planning import Plan
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.files import Closing
from fivefold.gnn.storage.pages import Ids

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

    def __init__(self, folder: Path, *, manifest: dict[str, Any], plan: Plan) -> None:
        files = StoreFiles(folder)
        self.folder = files.folder
        self.manifest = manifest
        self.plan = plan
        self.rows: Container = Container.open(files.rows, kind=KIND_ROWS)
        try:
            self.records: Container = Container.open(files.records, kind=KIND_RECORDS)
        except BaseException:
            self.rows.close()
            raise
        self._index = np.empty((0, 4), np.int64)

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
        for name, given in (("features", features), ("samples", samples)):
            if given is not None and given.fingerprint != manifest["inputs"][name]:
                raise DataError(
                    f"the store {files.folder} was packed from other {name}: "
                    f"{manifest['inputs'][name]}, not {given.fingerprint}",
                    hint=_REPACK,
                )
        plan = Plan.open(files.plan)
        store = cls(files.folder, manifest=manifest, plan=plan)
        try:
            store._check()
        except BaseException:
            store.close()
            raise
        return store

    def _check(self) -> None:
        found = {
            "plan": self.plan.fingerprint,
            "rows": self.rows.fingerprint,
            "records": self.records.fingerprint,
        }
        expected = {"plan": self.manifest["inputs"]["plan"], **self.manifest["files"]}
        for name, fingerprint in found.items():
            if fingerprint != expected[name]:
                raise DataError(
                    f"{name} in {self.folder} do not belong to this store: fingerprint "
                    f"{fingerprint}, store.json says {expected[name]}",
                    hint=f"a file was swapped or replaced; {_REPACK}",
                )
        self._index = self.records.read("index")

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
        return self.dim * self.dtype.itemsize

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

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every page of the store and compare it with its checksum.

        Args:
            progress: Called with the bytes done and the bytes in all.

        Raises:
            DataError: A page is damaged.
            StorageError: The disk refused.
        """
        first, total = self.records.nbytes, self.records.nbytes + self.rows.nbytes
        tell = progress or (lambda _done, _total: None)
        self.records.verify(lambda done, _: tell(done, total))
        self.rows.verify(lambda done, _: tell(first + done, total))

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


def write_manifest(files: StoreFiles, manifest: dict[str, Any]) -> None:
    """Put ``store.json`` in place, whole or not at all."""
    write_checked_json(files.store, {"version": _VERSION, **manifest})
