"""``BatchIterator``: what a loader's ``iter`` hands out; it owns the epoch's pipeline.

The user holds the iterator, the iterator holds the pipeline, and the pipeline's threads hold
neither. So when the loop ends, is left, raises or is collected, the pipeline is closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading._pipeline import Pipeline

Batch = TypeVar("Batch")


class BatchIterator(Generic[Batch]):
    """Iterate over the batches of one epoch.

    Args:
        pipeline: Running pipeline.
        on_batch: From a value of the pipeline to the batch that is handed out.
        on_next: Called before each wait for a batch.
        on_end: Called when the epoch is complete.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_batch: Callable[[Any], Batch],
        on_next: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.pipeline = pipeline
        self._on_batch, self._on_next, self._on_end = on_batch, on_next, on_end
        self._ended_by: str | None = None
        self._finalizer = weakref.finalize(self, pipeline.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._ended_by is not None:
            raise ConfigurationError(
                f"this iterator was ended: {self._ended_by}", hint="call iter(loader) again"
            )
        self._on_next()
        first_end = not self.pipeline.finished
        try:
            batch = self.pipeline.take()
        except StopIteration:
            if first_end and self.pipeline.finished:
                self._on_end()
            raise
        return self._on_batch(batch)

    def end(self, reason: str) -> None:
        """Close the pipeline; later calls of ``next`` fail with the reason."""
        if self._finalizer.alive:
            self._finalizer()
            if not self.pipeline.finished:
                self._ended_by = reason
