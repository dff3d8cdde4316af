"""``DiskLoader``: mini-batches from a packed store, prepared ahead on background threads.

It puts the parts together: the order of the batches (pure), the pipeline with its stages, the
ring of buffers, the four-level feature store. Stages: read a batch's record, wait for a buffer,
read its cold rows into it, copy the cached rows, build the tensors, and copy to the device where
there is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.gnn.loading._assemble import SeedTable, checked_form
from fivefold.gnn.loading._batch import MiniBatch
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.loading._iterator import BatchIterator
from fivefold.gnn.loading._order import Remainder, batch_order, rank_share
from fivefold.gnn.loading._pipeline import Pipeline
from fivefold.gnn.loading._ring import BufferRing
from fivefold.gnn.loading._rows import Backend
from fivefold.gnn.loading._settings import LoaderSettings, buffer_count
from fivefold.gnn.loading._stages import BatchStages, Prepared
from fivefold.gnn.loading._statistics import LoaderStatistics
from fivefold.gnn.loading._transfer import DeviceTransfer
from fivefold.gnn.packing import PackedStore

__all__ = ["DiskLoader"]

_STATE_VERSION = 1
_BYTES_PER_EDGE = 16  # edge_index, int64
_BYTES_PER_NODE = 8  # n_id, int64


class DiskLoader:
    """Iterate over the mini-batches of a packed store, in the shape of PyG's loaders.

    Every iteration is one epoch; the epochs that were sampled are used in turn. After a whole
    epoch the next one begins. Leaving an epoch early and iterating again begins it anew; to go on
    in its middle, load the state that ``state_dict`` gave.

    Tensors of a batch are copy-free views of the loader's buffers. A buffer is used again only
    when nothing refers to its batch any more, so batches may be kept, at the cost of memory.

    Data parallel training: all ranks open the same store and pass their ``rank`` and the
    ``world_size``. Each batch goes to one rank, all ranks make the same number of steps. Caches
    and buffers are per rank: plan with the memory of one.

    Args:
        store: Packed store.
        labels: Label of every node; None for batches without ``y``.
        device: Where the tensors are put.
        shuffle: New random order of the batches in every epoch; "segments" keeps the batches of
            a segment together; None shuffles where the plan allows it. A Belady plan holds for
            the planned order alone.
        seed: Seed of the order.
        prefetch: Batches that are prepared ahead; None for as many as are useful and fit.
        backend: Reading engine of the storage.
        threads: Its reading threads; None for its default.
        verify: Check the checksum of every page that is read.
        rank: Rank of this process.
        world_size: Number of processes that share the epoch.
        memory_bytes: What the buffers of this process may take; None leaves the number of
            buffers to ``prefetch`` alone.
        form: "edge_index", or "blocks" for layered models.
        remainder: What happens with batches that do not fill a step of all ranks: "drop" leaves
            out the last ones of the epoch's order, "repeat" hands the first ones out again.
        timeout_s: Longest wait for one batch before an error names the stage that hangs.

    Raises:
        ConfigurationError: A setting is not allowed, or does not fit the plan of the store.
        InfeasibleError: The buffers do not fit ``memory_bytes``.

    Example:
        >>> from fivefold.gnn.loading import DiskLoader
        >>> DiskLoader.__name__
        'DiskLoader'
    """

    def __init__(  # noqa: PLR0913 - independent options, each with a default
        self,
        store: PackedStore,
        *,
        labels: npt.NDArray[Any] | torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        shuffle: bool | Literal["segments"] | None = None,
        seed: int = 0,
        prefetch: int | None = None,
        backend: Backend = "auto",
        threads: int | None = None,
        verify: bool = True,
        rank: int = 0,
        world_size: int = 1,
        memory_bytes: int | None = None,
        form: Literal["edge_index", "blocks"] = "edge_index",
        remainder: Remainder = "drop",
        timeout_s: float = 120.0,
    ) -> None:
        self._store = store
        self._settings = LoaderSettings(
            device=torch.device(device),
            shuffle=store.plan.policy != "belady" if shuffle is None else shuffle,
            seed=seed,
            prefetch=prefetch,
            rank=rank,
            world_size=world_size,
            memory_bytes=memory_bytes,
            form=form,
            remainder=remainder,
            timeout_s=timeout_s,
        )
        _check_policy(store, self._settings)
        self._buffers = buffer_count(
            batch_bytes=_batch_bytes(store), memory_bytes=memory_bytes, prefetch=prefetch
        )
        self._features = FeatureStore(
            store, device=device, backend=backend, threads=threads, verify=verify
        )
        self._finalizer = weakref.finalize(self, self._features.close)
        self._ring = BufferRing(
            self._buffers,
            size_bytes=store.max_nodes * store.row_bytes,
            pinned=self._settings.device.type == "cuda",
        )
        self._transfer: DeviceTransfer | None = None
        if self._settings.device.type != "cpu":
            self._transfer = DeviceTransfer(self._features, self._settings.device)
        self._seeds = SeedTable(
            getattr(store, "train_ids", np.empty(0, np.int64)), _as_array(labels)
        )
        self._epoch, self._position, self._resumed = 0, 0, False
        self._iterator: weakref.ref[BatchIterator] | None = None
        self._pipelines: list[Pipeline] = []
        self._delivered = 0

    def __len__(self) -> int:
        """Batches that this rank gets in the current epoch."""
        return len(self._numbers(self._epoch))

    @property
    def epoch(self) -> int:
        """The epoch that runs or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated, from its beginning.

        Raises:
            ConfigurationError: The number is negative.
        """
        if epoch < 0:
            raise ConfigurationError(f"epoch must not be negative; got {epoch}")
        if not (self._resumed and epoch == self._epoch):  # a loaded position stays
            self._epoch, self._position, self._resumed = epoch, 0, False

    def __iter__(self) -> BatchIterator:
        if not self._finalizer.alive:
            message = "this loader is closed"
            raise ConfigurationError(message, hint="make another one")
        self._end_iterator("a newer one was started")
        numbers = self._numbers(self._epoch)
        first = self._position if self._resumed else 0
        self._position, self._resumed = first, False
        if first < len(numbers):
            self._features.start(int(numbers[first]))
        stages = BatchStages(
            self._store,
            self._features,
            self._ring,
            seeds=self._seeds,
            form=checked_form(self._settings.form),
            transfer=self._transfer,
        )
        pipeline = Pipeline(
            (int(n) for n in numbers[first:]),
            stages.groups(),
            capacity=max(1, self._buffers - 1),
            timeout_s=self._settings.timeout_s,
            on_close=stages.stop_waiting,
        )
        self._pipelines.append(pipeline)
        iterator = BatchIterator(
            pipeline, on_batch=self._hand_over, on_next=self._ring.make_room, on_end=self._end_epoch
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
            CheckpointError: The state is of another version, store, order or number of ranks.
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
                    hint="make the loader with the settings and the store of the saved run",
                )
        self._end_iterator("a state was loaded")
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._resumed = True

    def statistics(self) -> LoaderStatistics:
        """Counts since the loader was made."""
        features = self._features
        stage_s: dict[str, float] = {}
        for stage in (stage for pipeline in self._pipelines for stage in pipeline.stages):
            stage_s[stage.name] = stage_s.get(stage.name, 0.0) + stage.seconds
        return LoaderStatistics(
            batches=self._delivered,
            rows=dict(features.rows),
            row_bytes=features.row_bytes,
            requests=features.reading.requests,
            bytes_read=features.reading.bytes_read,
            cold_bytes=features.reading.bytes_used,
            fill_bytes=features.filling.bytes_read,
            fill_s=features.filling.seconds,
            stage_s=stage_s,
            wait_s=sum(pipeline.wait_s for pipeline in self._pipelines),
            buffer_bytes=self._ring.nbytes,
        )

    def close(self) -> None:
        """End the threads and let go of files; a second call does nothing."""
        self._end_iterator("the loader was closed")
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_over(self, prepared: Prepared) -> MiniBatch:
        batch = prepared.batch
        assert batch is not None, "the last stage builds the batch"
        if self._transfer is None:
            self._ring.delivered(prepared.loan)
        else:
            batch = self._transfer.handed_over(batch)
        self._position += 1
        self._delivered += 1
        return batch

    def _end_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0

    def _end_iterator(self, reason: str) -> None:
        running = None if self._iterator is None else self._iterator()
        if running is not None:
            running.end(reason)
        self._iterator = None

    def _numbers(self, epoch: int) -> npt.NDArray[np.int64]:
        """Batches of this rank in an epoch, in order."""
        settings, batches = (
            self._settings,
            self._store.epoch_batches(epoch % self._store.num_epochs),
        )
        order = np.arange(len(batches), dtype=np.int64)
        if settings.shuffle:
            segments = self._segments(batches) if settings.shuffle == "segments" else ()
            order = batch_order(len(batches), seed=settings.seed, epoch=epoch, segments=segments)
        share = rank_share(
            order,
            rank=settings.rank,
            world_size=settings.world_size,
            remainder=settings.remainder,
        )
        return share + batches.start

    def _segments(self, batches: range) -> list[tuple[int, int]]:
        """The plan's segments within an epoch, counted from its first batch."""
        inside = (
            (max(first, batches.start), min(stop, batches.stop))
            for first, stop in self._store.plan.segments
        )
        return [(a - batches.start, b - batches.start) for a, b in inside if a < b]

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same."""
        settings = self._settings
        return {
            "store": f"{self._store.rows.fingerprint}-{self._store.records.fingerprint}",
            "seed": settings.seed,
            "shuffle": settings.shuffle,
            "world_size": settings.world_size,
            "remainder": settings.remainder,
        }


def _check_policy(store: PackedStore, settings: LoaderSettings) -> None:
    if store.plan.policy != "belady":
        return
    if settings.shuffle:
        raise ConfigurationError(
            "this store was packed with a Belady plan, which holds for the planned order of the "
            f"batches alone; got shuffle={settings.shuffle!r}",
            hint='use shuffle=False, or plan with policy="static"',
        )
    if settings.world_size > 1:
        raise ConfigurationError(
            "the cache of a Belady plan changes with every batch, so that its batches cannot be "
            f"shared by {settings.world_size} ranks",
            hint='plan with policy="static"',
        )


def _batch_bytes(store: PackedStore) -> int:
    """Host memory that the tensors of the largest batch take."""
    per_node = store.row_bytes + _BYTES_PER_NODE
    return int(store.max_nodes * per_node + store.max_edges * _BYTES_PER_EDGE)


def _as_array(labels: npt.NDArray[Any] | torch.Tensor | None) -> npt.NDArray[Any] | None:
    return labels.numpy() if isinstance(labels, torch.Tensor) else labels
