"""New samples in the background, while training goes on with the old ones."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError
from fivefold.gnn.sampling._epoch import as_ids, check_distinct
from fivefold.gnn.sampling._sample_epochs import sample_epochs
from fivefold.gnn.sampling._sample_file import SampleFile
from fivefold.gnn.sampling._sampler import NeighborSampler

__all__ = ["SampleRefresher"]


class _ClosedError(Exception):
    """Ends the thread; never reaches the caller."""


class SampleRefresher:
    """Draws the next sample file in a thread of its own; :meth:`take` hands it over.

    Files hold ``epochs`` epochs each: the first those from ``first_epoch`` on, the next those
    after, and so on. Drawing the next file begins when one is taken. The thread samples one batch
    at a time and rests in between, so that it is busy for ``cpu_share`` of the time; compiled code
    and disk waits hold no interpreter lock. A file stands under its name,
    ``samples-FIRST_EPOCH.fvf``, only when it is whole. An unfinished or finished file of the same
    settings is taken up, so that a resumed run loses nothing.

    Args:
        sampler: Settings of the samples; its ``threads`` do not matter here.
        train_ids: Seeds of an epoch.
        folder: Where the files go.
        batch_size: Seeds of a batch.
        epochs: Epochs in a file: how many to train before new samples come.
        first_epoch: First epoch of the first file.
        cpu_share: Share of one processor to use, above 0 and at most 1. A caller who waits in
            :meth:`take` gets all of it.
        keep: How many files handed over to leave on the disk, the newest; older ones are deleted
            when another is taken. None deletes nothing.

    Raises:
        ConfigurationError: A number is out of range, or ``train_ids`` is empty or not distinct.

    Example:
        >>> import tempfile
        >>> from fivefold.gnn.sampling import Topology
        >>> sampler = NeighborSampler(Topology([0, 1, 2, 2], [1, 2]), [1])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with SampleRefresher(sampler, [0, 1], folder, batch_size=1, epochs=5) as refresher:
        ...         for _ in range(2):
        ...             with refresher.take() as samples:
        ...                 print(samples.path.name, samples.num_batches)
        samples-0.fvf 10
        samples-5.fvf 10
    """

    def __init__(  # noqa: PLR0913 - settings of one run, nearly all keyword-only
        self,
        sampler: NeighborSampler,
        train_ids: ArrayLike,
        folder: str | os.PathLike[str],
        *,
        batch_size: int,
        epochs: int,
        first_epoch: int = 0,
        cpu_share: float = 0.25,
        keep: int | None = 1,
    ) -> None:
        self._train_ids = as_ids(train_ids, "train_ids").copy()
        check_distinct(self._train_ids, sampler.topology.num_nodes)
        _check_numbers(self._train_ids.size, batch_size, epochs, cpu_share, keep)
        self._sampler = NeighborSampler(
            sampler.topology,
            sampler.fanouts,
            seed=sampler.seed,
            threads=1,
            edge_ids=sampler.edge_ids,
        )
        self.folder = Path(folder)
        self.batch_size = batch_size
        self.epochs = epochs
        self.cpu_share = cpu_share
        self.keep = keep
        self._epoch = first_epoch
        self._taken: list[Path] = []
        self._closed = False
        self._waiting = 0  # callers in take(): while there is one, the thread does not rest
        self._changed = threading.Condition()
        self._draw()

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` would return (or raise) at once."""
        return self._done.is_set()

    @property
    def next_epoch(self) -> int:
        """First epoch of the file that :meth:`take` will return."""
        return self._epoch

    def take(self, timeout_s: float | None = None) -> SampleFile:
        """Wait for the file in the making, begin the next one, and return this one, open.

        Args:
            timeout_s: How long to wait; None waits until it is there.

        Raises:
            ConfigurationError: The refresher has been closed.
            TimeoutError: It was not there in time; it is still being made.
            FivefoldError: Drawing it failed; this is the error. Another call tries again.
        """
        if self._closed:
            message = "the refresher has been closed"
            raise ConfigurationError(message, hint="make a new one with first_epoch")
        self._wake(waiting=1)
        finished = self._done.wait(timeout_s)
        self._wake(waiting=-1)
        if not finished:
            raise TimeoutError(
                f"samples from epoch {self._epoch} on were not there after {timeout_s} s; wait "
                "longer, or raise cpu_share"
            )
        self._thread.join()
        if self._error is not None:
            error = self._error
            self._draw()
            raise error
        samples = SampleFile.open(self._path)
        self._delete_old()
        self._epoch += self.epochs
        self._draw()
        return samples

    def close(self) -> None:
        """Stop drawing; what is unfinished stays for resuming. It waits for at most one batch."""
        self._closed = True
        self._wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _draw(self) -> None:
        self._path = self.folder / f"samples-{self._epoch}.fvf"
        self._error: Exception | None = None
        self._done = threading.Event()
        # Daemon: a program that ends without close() shall not wait for the samples.
        self._thread = threading.Thread(
            target=self._run, args=(self._epoch,), name="fivefold-refresher", daemon=True
        )
        self._thread.start()

    def _run(self, first_epoch: int) -> None:
        self._awake_since = time.monotonic()
        try:
            sample_epochs(
                self._sampler,
                self._train_ids,
                self._path,
                batch_size=self.batch_size,
                epochs=self.epochs,
                first_epoch=first_epoch,
                progress=self._rest,
            ).close()
        except _ClosedError:
            pass
        except Exception as error:  # noqa: BLE001 - handed to the caller's next take()
            self._error = error
        finally:
            self._done.set()

    def _rest(self, done: int, total: int) -> None:  # noqa: ARG002 - a progress callback
        busy_s = time.monotonic() - self._awake_since
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._waiting, busy_s * (1.0 / self.cpu_share - 1.0)
            )
        if self._closed:
            raise _ClosedError
        self._awake_since = time.monotonic()

    def _wake(self, waiting: int = 0) -> None:
        with self._changed:
            self._waiting += waiting
            self._changed.notify_all()

    def _delete_old(self) -> None:
        self._taken.append(self._path)
        if self.keep is not None:
            while len(self._taken) > self.keep:
                self._taken.pop(0).unlink(missing_ok=True)


def _check_numbers(
    num_ids: int, batch_size: int, epochs: int, cpu_share: float, keep: int | None
) -> None:
    if min(num_ids, batch_size, epochs) < 1:
        raise ConfigurationError(
            f"{num_ids} training nodes, batch_size {batch_size}, epochs {epochs}",
            hint="use at least one of each",
        )
    if not 0.0 < cpu_share <= 1.0:
        raise ConfigurationError(f"cpu_share is {cpu_share}", hint="above 0 and at most 1")
    if keep is not None and keep < 1:
        raise ConfigurationError(f"keep is {keep}", hint="use 1 or more, or None to keep all")
