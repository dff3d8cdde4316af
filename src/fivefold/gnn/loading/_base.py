"""What all loaders share: the position in the epoch, one running iterator, state, closing."""

from __future__ import annotations

import abc
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, NoReturn, Self

from fivefold.errors import CheckpointError, ConfigurationError, UnsupportedError
from fivefold.gnn.loading._failure import StallError
from fivefold.gnn.loading._iterator import Batch, BatchIterator
from fivefold.gnn.loading._pipeline import Pipeline

_LOG = logging.getLogger(__name__)
_STATE_VERSION = 1


class BatchLoader(abc.ABC, Generic[Batch]):
    """A loader of mini-batches, epoch by epoch, that can stop and go on at any batch.

    Iterating yields the batches of the current epoch; after a whole epoch the next one begins.
    Leaving an epoch early and iterating again begins it anew; to go on in its middle, load the
    state that ``state_dict`` gave.

    Args:
        release: Lets go of files and threads; must not refer to the loader.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        # Not at the exit of the interpreter: a thread that hangs would hang it, too.
        self._finalizer = weakref.finalize(self, _release_here, release, os.getpid())
        self._finalizer.atexit = False
        self._process = os.getpid()
        self._left_behind: Pipeline | None = None
        self._epoch, self._position, self._resumed = 0, 0, False
        self._iterator: weakref.ref[BatchIterator[Batch]] | None = None
        self._pipeline: Pipeline | None = None
        self._past_s: dict[str, float] = {}
        self._past_wait_s = 0.0
        self._delivered = 0

    @abc.abstractmethod
    def _length(self, epoch: int) -> int:
        """Batches of an epoch."""

    @abc.abstractmethod
    def _start(self, epoch: int, first: int) -> Pipeline:
        """A running pipeline over the batches of an epoch from place ``first`` on."""

    @abc.abstractmethod
    def _hand_over(self, value: Any) -> Batch:
        """From what the pipeline makes to what the training loop gets."""

    @abc.abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same batch."""

    def _make_room(self) -> None:  # most loaders have nothing to do here
        """Called before each wait for a batch."""

    def __len__(self) -> int:
        """Batches of the current epoch (of this rank)."""
        return self._length(self._epoch)

    @property
    def epoch(self) -> int:
        """The epoch that runs or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated; a position that was loaded for it stays.

        Raises:
            ConfigurationError: The number is negative.
        """
        if epoch < 0:
            raise ConfigurationError(f"epoch must not be negative; got {epoch}")
        if not (self._resumed and epoch == self._epoch):
            self._epoch, self._position, self._resumed = epoch, 0, False

    def __iter__(self) -> BatchIterator[Batch]:
        if not self._finalizer.alive:
            message = "this loader is closed"
            raise ConfigurationError(message, hint="make another one")
        if os.getpid() != self._process:
            message = f"this loader was made in process {self._process} and cannot work in a child"
            raise UnsupportedError(message, hint="make the loader after the fork, in the child")
        if not self._end_iterator("a newer one was started"):
            message = "a thread of the last epoch still hangs, and would share files with new ones"
            raise StallError(message, hint="close this loader and make another one")
        first = self._position if self._resumed else 0
        self._pipeline = self._start(self._epoch, first)
        self._position, self._resumed = first, False
        iterator = BatchIterator(
            self._pipeline,
            on_batch=self._count_and_hand_over,
            on_next=self._make_room,
            on_end=self._end_epoch,
        )
        self._iterator = weakref.ref(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands, exact to the batch; plain numbers and text.

        Batches that were handed out count as used. All ranks of a data parallel run have the
        same position.
        """
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where ``state`` was taken.

        Raises:
            CheckpointError: The state is of another version, or of a loader with other settings
                or other data, for which the position would mean another batch.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointError(
                f"the loader's state has version {state.get('version')!r}",
                hint=f"this fivefold reads version {_STATE_VERSION}",
            )
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise CheckpointError(
                    f"the loader's state has {name}={state.get(name)!r}, this loader {expected!r}",
                    hint="make the loader with the settings and the data of the saved run",
                )
        epoch, position = (_as_count(state.get(key), key) for key in ("epoch", "position"))
        batches = self._length(epoch)
        if position > batches:
            raise CheckpointError(
                f"the loader's state has position {position}, epoch {epoch} has {batches} batches",
                hint="make the loader with the settings and the data of the saved run",
            )
        self._end_iterator("a state was loaded")
        self._epoch, self._position, self._resumed = epoch, position, True

    def close(self) -> None:
        """End the threads and let go of files; a second call does nothing."""
        if self._end_iterator("the loader was closed"):
            self._finalizer()
        elif self._finalizer.detach() is not None:
            _LOG.warning("files stay open, because a thread still works on them")

    def __reduce__(self) -> NoReturn:
        """A loader has threads and open files: there is no copy of it, also in a worker process.

        Raises:
            UnsupportedError: Always.
        """
        message = "a loader cannot be copied, pickled or sent to another process"
        raise UnsupportedError(message, hint="open the store and make a loader where it is used")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count_and_hand_over(self, value: Any) -> Batch:
        batch = self._hand_over(value)
        self._position += 1
        self._delivered += 1
        return batch

    def _end_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0

    def _end_iterator(self, reason: str) -> bool:
        """End what runs; whether all its threads have ended."""
        running = None if self._iterator is None else self._iterator()
        if running is not None:
            running.end(reason)
        self._iterator = None
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
            self._past_s, self._past_wait_s = self._stage_s(pipeline), self._wait_s(pipeline)
            self._left_behind = self._left_behind or pipeline
        if self._left_behind is not None and self._left_behind.ended:
            self._left_behind = None
        return self._left_behind is None

    def _stage_s(self, pipeline: Pipeline | None) -> dict[str, float]:
        seconds = dict(self._past_s)
        for stage in () if pipeline is None else pipeline.stages:
            seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
        return seconds

    def _wait_s(self, pipeline: Pipeline | None) -> float:
        return self._past_wait_s + (0.0 if pipeline is None else pipeline.wait_s)


def _as_count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(
            f"the loader's state has {name}={value!r}", hint="give what state_dict() returned"
        )
    return value


def _release_here(release: Callable[[], None], process: int) -> None:
    """Release only where the loader was made: a forked child has copies of locks and no threads."""
    if os.getpid() == process:
        release()
