"""The last stage on a machine with an accelerator: one batch from host memory to the device.

The copy runs on a stream of its own beside the training loop's. The thread waits for the copy
before it lets go of the pinned buffer, and the loop's stream is told that it uses the tensors, so
that the allocator does not hand their memory out too early. Without CUDA the same code runs with
no streams.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from fivefold.gnn.loading._batch import MiniBatch
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.packing import BatchRecord


class DeviceTransfer:
    """Copy batches to ``device`` and add the rows of the cache that lives there.

    Args:
        store: Feature store, whose device cache is on ``device``.
        device: Where the batches go.
    """

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self._store, self._device = store, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, record: BatchRecord, batch: MiniBatch) -> MiniBatch:
        """The batch on the device, complete; returns when the copies are done."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            x = torch.empty_like(batch.x, device=self._device)
            # Rows of the device cache lie behind the seeds and are not in host memory.
            cached = len(record.device_slots)
            among_seeds = int((record.device_destinations < batch.batch_size).sum())
            rest = batch.batch_size + cached - among_seeds
            for part in (slice(0, batch.batch_size), slice(rest, None)):
                x[part].copy_(batch.x[part], non_blocking=True)
            self._store.fill_device(record, x)
            there = dataclasses.replace(batch, x=x).to(self._device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return there

    def handed_over(self, batch: MiniBatch) -> MiniBatch:
        """Tie the batch to the stream of the caller, who will use it there."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            for tensor in batch.tensors():
                tensor.record_stream(current)
        return batch
