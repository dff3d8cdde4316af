"""What each stage of the pipeline does to a batch.

The stages hold the feature store, the ring of buffers and the labels, and not the loader, so that
a loader can be collected while its threads still run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy.typing as npt
import torch

from fivefold.gnn.loading._assemble import Form, SeedTable, Structure, assemble
from fivefold.gnn.loading._batch import MiniBatch
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading._pipeline import Stage, Ticket
from fivefold.gnn.loading._ring import BufferRing
from fivefold.gnn.loading._transfer import DeviceTransfer
from fivefold.gnn.packing import BatchRecord

_RECORD_READERS = 2  # one alone, beside those of rows, gets too little of the disk to keep up


@dataclasses.dataclass(slots=True)
class Prepared:
    """A batch on its way, and the number of its buffer's loan."""

    record: BatchRecord
    rows: npt.NDArray[Any] | None = None
    batch: MiniBatch | None = None
    loan: int = 0


class BatchStages:
    """From the number of a batch to its tensors.

    Args:
        features: Feature store with the records and the rows.
        ring: Buffers for the rows.
        seeds: Places and labels of the seeds.
        form: Form of the batches.
        transfer: Last stage of a machine with an accelerator; None on the CPU.
    """

    def __init__(
        self,
        features: FeatureStore,
        ring: BufferRing,
        *,
        seeds: SeedTable,
        form: Form,
        transfer: DeviceTransfer | None,
    ) -> None:
        self._features, self._ring = features, ring
        self._seeds, self._form, self._transfer = seeds, form, transfer
        self._started = False

    def groups(self) -> list[list[Stage]]:
        """The stages of each group of threads.

        Buffers are lent by one thread, in order, so that the batch that comes first is never the
        one without a buffer.
        """
        groups = [
            [Stage("fill the caches", self._fill, patience_s=self._features.fill_patience_s)],
            [Stage("read record", self._read_record)],
            [Stage("wait for a buffer", self._lend, waits=True)],
            [Stage("read cold rows", self._read_cold)],
            [Stage("gather cached rows", self._gather), Stage("build tensors", self._build)],
        ]
        if self._transfer is not None:
            groups.append([Stage("copy to the device", self._copy)])
        return groups

    def lanes(self) -> list[int]:
        """Threads of each group: the disk never waits between one batch and the next."""
        several = {1: _RECORD_READERS, 3: self._features.readers}
        return [several.get(i, 1) for i in range(len(self.groups()))]

    def stop_waiting(self) -> None:
        """Wake the stage that waits for a buffer."""
        self._ring.stop_waiting(self)

    def _fill(self, ticket: Ticket) -> None:
        if not self._started:
            self._features.start(ticket.batch)
            self._started = True

    def _read_record(self, ticket: Ticket) -> Prepared:
        return Prepared(self._features.record(ticket.batch))

    def _lend(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        shape = (len(work.record.node_ids), *self._features.row_shape)
        work.rows = self._ring.lend(shape, self._features.dtype, borrower=self)
        work.loan = id(work.rows)
        return work

    def _read_cold(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        self._features.read_cold(work.record, _rows_of(work))
        return work

    def _gather(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        self._features.gather_cached(work.record, _rows_of(work))
        return work

    def _build(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        x = torch.from_numpy(_rows_of(work))
        work.batch = assemble(Structure.of_record(work.record), x, self._seeds, form=self._form)
        work.rows = None  # from here on the tensor alone holds the loan
        return work

    def _copy(self, ticket: Ticket) -> Prepared:
        work: Prepared = ticket.value
        assert self._transfer is not None, "the stage exists only with a transfer"
        assert work.batch is not None, "the stage before builds the batch"
        work.batch = self._transfer.copy(work.record, work.batch)
        return work


def _rows_of(work: Prepared) -> npt.NDArray[Any]:
    assert work.rows is not None, "a stage before lends the buffer"
    return work.rows
