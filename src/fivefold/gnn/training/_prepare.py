"""Everything between a data set and training: samples, plan, packed rows, made where missing.

Each part has a name that holds a hash of what it depends on, so that another configuration makes
other files and never meets stale ones; and each part goes on where a killed run stopped. The
plan is written before packing begins: a new probe of the disk would give another one. One
process at a time works in a folder, the others wait and then find everything done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fivefold.errors import DataError, InfeasibleError, StorageError
from fivefold.files import lock_file
from fivefold.gnn.data import Dataset
from fivefold.gnn.packing import PackedStore, pack
from fivefold.gnn.planning import Budgets, Plan, make_plan
from fivefold.gnn.sampling import Adjacency, NeighborSampler, SampleFile, sample_epochs
from fivefold.gnn.storage import probe_disk
from fivefold.gnn.training.config import GnnConfig
from fivefold.units import format_bytes, format_duration_s

_LOG = logging.getLogger(__name__)
_SHARE_OF_FREE_DISK = 0.8
_LEAST_PACKING_BYTES = 4 << 20  # less would be lost in what the interpreter takes
Progress = Callable[[str, int, int], None]
Text = Callable[[str], None]
_KEYS = {  # of the configuration, for the planner's arguments
    "host_bytes=": "budgets.host = ",
    "device_bytes=": "budgets.device = ",
    "disk_bytes=": "budgets.disk = ",
    "buffer_batches": "loader.prefetch",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What training in mode "disk" reads."""

    store: PackedStore
    seconds: dict[str, float]
    samples_path: Path


def prepare(
    config: GnnConfig,
    dataset: Dataset,
    *,
    topology: Adjacency,
    progress: Progress | None = None,
    show: Callable[[str], None] | None = None,
    accept: Callable[[str], None] | None = None,
    round_number: int = 0,
) -> Prepared:
    """Sample, plan and pack what is missing."""
    folder = prepared_folder(config)
    work = _Preparation(config, dataset, folder, progress or _no_progress, round_number)
    with _alone_in(folder):
        return work.run(topology, show or _LOG.info, accept or (lambda _fingerprint: None))


def prepared_folder(config: GnnConfig) -> Path:
    """Return the folder of samples, plans and packed rows."""
    return config.data.path / "prepared" if config.data.store == "auto" else Path(config.data.store)


class _Preparation:
    """The three steps, with their times."""

    def __init__(
        self,
        config: GnnConfig,
        dataset: Dataset,
        folder: Path,
        progress: Progress,
        round_number: int,
    ) -> None:
        self._config, self._dataset, self._folder = config, dataset, folder
        self._first_epoch = round_number * config.sampling.epochs
        self._progress = progress
        self._seconds: dict[str, float] = {}
        sampling = config.sampling.model_dump(exclude={"threads", "refresh_every_epochs"})
        graph = {"data": dataset.fingerprint, "sampling": sampling, "first": self._first_epoch}
        self._samples_key = _key(graph)
        self._store_key = _key(
            graph
            | {"budgets": config.budgets.model_dump(), "plan": config.plan.model_dump()}
            | {"prefetch": config.loader.prefetch}
        )

    def run(self, topology: Adjacency, show: Text, accept: Text) -> Prepared:
        with self._sampled(topology) as samples:
            path = self._folder / f"store-{self._store_key}"
            if not (path / "store.json").exists():
                plan = self._planned(samples)
                accept(plan.order_fingerprint)
                self._pack(path, samples, plan, show)
            store = PackedStore.open(path, features=self._dataset.features, samples=samples)
        return Prepared(store=store, seconds=self._seconds, samples_path=self._samples_path())

    def _sampled(self, topology: Adjacency) -> SampleFile:
        config = self._config.sampling
        with self._timed("sample"):
            sampler = NeighborSampler(
                topology, config.fanouts, seed=config.seed, threads=config.threads or None
            )
            return sample_epochs(
                sampler,
                self._dataset.train,
                self._samples_path(),
                batch_size=config.batch_size,
                epochs=config.epochs,
                first_epoch=self._first_epoch,
                progress=lambda done, total: self._progress("sample", done, total),
                resume=True,
            )

    def _samples_path(self) -> Path:
        return self._folder / f"samples-{self._samples_key}.fvf"

    def _pack(self, path: Path, samples: SampleFile, plan: Plan, show: Text) -> None:
        show(plan.explain())
        with self._timed("pack"):
            pack(
                self._dataset.features,
                samples,
                plan,
                path,
                memory_bytes=max(self._config.budgets.host, _LEAST_PACKING_BYTES),
                progress=lambda stage, done, total: self._progress(f"pack {stage}", done, total),
                resume=True,
                profile=probe_disk(self._folder),
            ).close()
        plan_file = self._plan_file()
        plan_file.unlink(missing_ok=True)  # the store has its own copy
        size = format_bytes(sum(file.stat().st_size for file in path.rglob("*")))
        _LOG.info("packed %s in %s", size, format_duration_s(self._seconds["pack"]))

    def _plan_file(self) -> Path:
        return self._folder / f"plan-{self._store_key}.fvf"

    def _planned(self, samples: SampleFile) -> Plan:
        path, features, config = self._plan_file(), self._dataset.features, self._config
        if path.exists():
            with contextlib.suppress(DataError):  # it costs seconds to make it again
                found = Plan.open(path)
                inputs = (found.features_fingerprint, found.samples_fingerprint)
                if inputs == (features.fingerprint, samples.fingerprint):
                    return found
        with self._timed("plan"), _in_terms_of_the_file():
            plan = make_plan(
                samples,
                features,
                self._budgets(),
                probe_disk(self._folder),
                policy=config.plan.policy,
                layout=config.plan.layout,
                segment_batches=config.plan.segment_batches or None,
                minhash_functions=config.plan.minhash_functions,
                buffer_batches=config.loader.prefetch + 1,
                training_epochs=config.run.epochs,
                scratch_folder=self._folder,
            )
            plan.write(path)
        return plan

    def _budgets(self) -> Budgets:
        given = self._config.budgets
        free = shutil.disk_usage(self._folder).free
        disk_bytes = int(free * _SHARE_OF_FREE_DISK) if given.disk is None else given.disk
        return Budgets(device_bytes=given.device, host_bytes=given.host, disk_bytes=disk_bytes)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started_s


@contextlib.contextmanager
def _in_terms_of_the_file() -> Iterator[None]:
    """Rename what the planner refuses as the configuration file names it."""
    try:
        yield
    except InfeasibleError as error:
        hint = error.hint or ""
        for argument, key in _KEYS.items():
            hint = hint.replace(argument, key)
        raise InfeasibleError(error.message, hint=hint) from error


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out; a lock of a process that died is free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w", encoding="utf-8")
    except OSError as error:
        message = f"cannot write in {folder}: {error.strerror or error}"
        raise StorageError(message, hint="set data.store to a folder that you may write") from error
    with file:
        if not lock_file(file.fileno(), folder, patience_s=0):
            _LOG.info("another process prepares %s; waiting for it", folder)
            lock_file(file.fileno(), folder, patience_s=math.inf)
        yield


def _key(parts: dict[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _no_progress(_name: str, _done: int, _total: int) -> None:
    """Show nothing."""


class _CancelledError(Exception):
    """The run ends before the next round is needed."""


class Rounds:
    """Packed stores, one after another."""

    def __init__(
        self, config: GnnConfig, dataset: Dataset, *, topology: Adjacency, is_main: bool
    ) -> None:
        self._config, self._dataset, self._topology = config, dataset, topology
        self._every = config.sampling.refresh_every_epochs
        self._is_main = is_main
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.number = 0
        self.prepared: Prepared | None = None

    def number_of(self, epoch: int) -> int:
        """Return the round that an epoch belongs to."""
        return epoch // self._every if self._every else 0

    def open(
        self,
        epoch: int,
        *,
        progress: Progress | None = None,
        show: Callable[[str], None] | None = None,
        accept: Callable[[str], None] | None = None,
    ) -> Prepared:
        """Return the store for an epoch; waits for it, or makes it.

        ``progress``, ``show`` and ``accept`` are those of ``prepare``.
        """
        self._join()
        old, self.number = self.prepared, self.number_of(epoch)
        self.prepared = prepare(
            self._config,
            self._dataset,
            topology=self._topology,
            progress=progress,
            show=show,
            accept=accept,
            round_number=self.number,
        )
        if old is not None and self._is_main:
            # Open files stay readable for whoever still has them.
            shutil.rmtree(old.store.folder, ignore_errors=True)
            old.samples_path.unlink(missing_ok=True)
        last = self.number_of(self._config.run.epochs - 1)
        if self._is_main and self.number < last:
            self._thread = threading.Thread(
                target=self._prepare_ahead, args=(self.number + 1,), daemon=True
            )
            self._thread.start()
        return self.prepared

    def close(self) -> None:
        """Stop preparing; what was done stays and is gone on with."""
        self._cancelled.set()
        with contextlib.suppress(_CancelledError):
            self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None and not self._cancelled.is_set():
            raise failure

    def _prepare_ahead(self, number: int) -> None:
        try:
            made = prepare(
                self._config,
                self._dataset,
                topology=self._topology,
                progress=self._check,
                show=lambda text: _LOG.debug("%s", text),
                round_number=number,
            )
            made.store.close()
        except BaseException as error:  # noqa: BLE001 - handed to the training thread
            self._failure = error

    def _check(self, _name: str, _done: int, _total: int) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
