"""Rounds of samples: every R epochs new ones, drawn and packed while training goes on.

Round r holds for epochs r R to (r + 1) R - 1. While one is trained on, a thread prepares the next;
at the change training waits for what is left of that. The samples of a round are a function of
seed and round, so a resumed run has the same. An old round's files go when the next is in use.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable

from fivefold.gnn.data import Dataset
from fivefold.gnn.sampling import Topology
from fivefold.gnn.training._config import GnnConfig
from fivefold.gnn.training._prepare import Prepared, Progress, prepare

_LOG = logging.getLogger(__name__)


class _CancelledError(Exception):
    """The run ends before the next round is needed."""


class Rounds:
    """Packed stores, one after another.

    Args:
        config: The configuration.
        dataset: Graph and features.
        topology: Its edges.
        is_main: Whether this process prepares ahead; others wait for it.
    """

    def __init__(
        self, config: GnnConfig, dataset: Dataset, *, topology: Topology, is_main: bool
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
        """The round that an epoch belongs to."""
        return epoch // self._every if self._every else 0

    def open(
        self,
        epoch: int,
        *,
        progress: Progress | None = None,
        show: Callable[[str], None] | None = None,
        accept: Callable[[str], None] | None = None,
    ) -> Prepared:
        """The store for an epoch; waits for it, or makes it.

        ``progress``, ``show`` and ``accept`` are those of ``prepare``.

        Raises:
            FivefoldError: What preparing it met, here or in the background.
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
