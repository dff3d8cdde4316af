"""The store of packed batches that a run reads: made as its configuration says, round by round.

With ``sampling.refresh_every_epochs`` the next round is sampled and packed while the current one
is trained on. What is made, and how it goes on after a kill, is in ``loading``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from fivefold.errors import InfeasibleError
from fivefold.gnn.data import Dataset
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.loading.prepare import Prepared, StoreRecipe, prepare
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.training.config import GnnConfig

_LOG = logging.getLogger(__name__)
Show = Callable[[str], None]
_KEYS = {  # of the configuration, for the planner's arguments
    "host_bytes=": "budgets.host = ",
    "device_bytes=": "budgets.device = ",
    "disk_bytes=": "budgets.disk = ",
    "buffer_batches": "loader.prefetch",
}


def prepared_folder(config: GnnConfig) -> Path:
    """Return the folder of samples, plans and packed rows."""
    return config.data.path / "prepared" if config.data.store == "auto" else Path(config.data.store)


def _recipe(config: GnnConfig, round_number: int) -> StoreRecipe:
    sampling, budgets = config.sampling, config.budgets
    return StoreRecipe(
        fanouts=sampling.fanouts,
        batch_size=sampling.batch_size,
        epochs=sampling.epochs,
        first_epoch=round_number * sampling.epochs,
        seed=sampling.seed,
        device_bytes=budgets.device,
        host_bytes=budgets.host,
        disk_bytes=budgets.disk,
        buffer_batches=config.loader.prefetch + 1,
        training_epochs=config.run.epochs,
        **config.plan.model_dump(),
    )


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
        show: Show | None = None,
        accept: Show | None = None,
    ) -> Prepared:
        """Return the store for an epoch; waits for it, or makes it.

        ``progress`` is told of each stage, ``show`` the plan as text, ``accept`` its fingerprint.
        """
        self._join()
        old, self.number = self.prepared, self.number_of(epoch)
        self.prepared = self._prepare(self.number, progress, show, accept)
        if old is not None and self._is_main:
            old.remove()
        last = self.number_of(self._config.run.epochs - 1)
        if self._is_main and self.number < last:
            self._thread = threading.Thread(
                target=self._prepare_ahead, args=(self.number + 1,), daemon=True
            )
            self._thread.start()
        return self.prepared

    def _prepare(
        self, number: int, progress: Progress | None, show: Show | None, accept: Show | None
    ) -> Prepared:
        config = self._config
        with _in_terms_of_the_file():
            return prepare(
                self._dataset,
                _recipe(config, number),
                prepared_folder(config),
                ids=self._dataset.train,
                topology=self._topology,
                threads=config.sampling.threads or None,
                progress=progress,
                show=show,
                accept=accept,
            )

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
            show = functools.partial(_LOG.debug, "%s")
            self._prepare(number, self._check, show, None).close()
        except BaseException as error:  # noqa: BLE001 - handed to the training thread
            self._failure = error

    def _check(self, _name: str, _done: int, _total: int) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
