"""What all loaders share: settings, the order of batches, the position in the epoch, closing.

Every process computes the same order from the same numbers, so that ranks agree without talking
and a resumed run goes on where it stopped.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn, Self, TypedDict, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike

from fivefold.errors import (
    CheckpointError,
    ConfigurationError,
    UnsupportedError,
    require_flag,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.gnn.loading._pipeline import Pipeline, StallError
from fivefold.gnn.storage.files import Closing
from fivefold.gnn.storage.pages import Ids
from fivefold.gnn.storage.reader import Backend

_LOG = logging.getLogger(__name__)
_STATE_VERSION = 1

Remainder = Literal["drop", "repeat"]


# Options of PyG's loaders that have no counterpart of the same name: the values that change nothing
# here, and what does what they do.
_OF_PYG: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_workers": ((0,), "leave it out: threads prepare prefetch= batches ahead"),
    "persistent_workers": ((False,), "leave it out: threads stay from epoch to epoch"),
    "prefetch_factor": ((None,), "say prefetch=, the batches that are prepared ahead"),
    "pin_memory": ((False,), "say device=: buffers are pinned where that is a GPU"),
    "worker_init_fn": ((None,), "leave it out: there are no worker processes"),
    "multiprocessing_context": ((None,), "leave it out: there are no worker processes"),
    "filter_per_worker": ((None, False, True), "leave it out"),
    "num_neighbors": ((), "say fanouts="),
    "replace": ((False,), "neighbours are drawn without replacement: leave it out"),
    "directed": ((True,), "edges of a batch are those that were drawn: leave it out"),
    "subgraph_type": (("directional",), "edges of a batch are those that were drawn"),
    "disjoint": ((False,), "batches with times (OnlineLoader, node_time= or edge_time=) are"),
    "time_attr": ((None,), "OnlineLoader and LinkLoader take node_time= or edge_time="),
    "weight_attr": ((None,), "weights that were ingested are drawn by: --column weight=NAME"),
    "transform": ((None,), "apply it to the batch in the loop"),
    "transform_sampler_output": ((None,), "apply it to the batch in the loop"),
    "is_sorted": ((False, True), "leave it out: edges are sorted on ingestion"),
    "neighbor_sampler": ((None,), "leave it out"),
    "custom_init": ((None,), "leave it out"),
    "custom_cls": ((None,), "batches are Data or HeteroData: copy them in the loop"),
    "input_id": ((None,), "input_id of a batch are places among the seeds: look yours up there"),
    "pin_memory_device": (("",), "say device=: buffers are pinned where that is a GPU"),
    "in_order": ((True,), "batches come in the order of the epoch: leave it out"),
    "dataset": ((), "the graph is the first argument"),
    "edge_label_index": ((None,), "LinkLoader takes links"),
    "edge_label": ((None,), "LinkLoader takes links"),
    "edge_label_time": ((None,), "LinkLoader takes links"),
    "temporal_strategy": (("uniform",), "OnlineLoader takes it, with node_time= or edge_time="),
    "drop_last": ((False,), "leave it out, or leave seeds out; remainder= is of ranks"),
    "generator": ((None,), "say seed="),
    "sampler": ((None,), "give the seeds in the order that is wanted, with shuffle=False"),
    "batch_sampler": ((None,), "give the seeds in the order that is wanted, with shuffle=False"),
    "collate_fn": ((None,), "apply it to the batch in the loop"),
    "timeout": ((0,), "say timeout_s="),
    "neg_sampling": ((None,), "LinkLoader takes negatives= and negatives_per_link="),
    "neg_sampling_ratio": ((None, 0, 0.0), "LinkLoader takes negatives= and negatives_per_link="),
    "input_nodes": ((), "OnlineLoader takes the seeds as its second argument"),
    "input_time": ((None,), "OnlineLoader takes it, with node_time= or edge_time="),
    "data": ((), "the graph is the first argument"),
}


def known_options(options: Mapping[str, Any], loader: str, more: Iterable[str] = ()) -> Any:
    """Return the options of a loader without those of PyG's that change nothing here.

    Raises:
        ConfigurationError: Another one is not known; says what does what it does.
    """
    allowed, kept = {*LoaderOptions.__annotations__, *more}, {}
    for name, value in options.items():
        if name in allowed:
            kept[name] = value
            continue
        same, advice = _OF_PYG.get(name, ((), ""))
        if any(value is entry or (type(value) is type(entry) and value == entry) for entry in same):
            continue
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = advice or (f"is {near[0]} meant?" if near else f"use {', '.join(sorted(allowed))}")
        raise ConfigurationError(f"{loader} has no option {name} (got {value!r})", hint=hint)
    return kept


class LoaderOptions(TypedDict, total=False):
    """Options that all loaders take under the same names; ``DiskLoader`` explains them."""

    device: torch.device | str
    rank: int
    world_size: int
    remainder: Remainder
    backend: Backend
    verify: bool
    timeout_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """The arguments that loaders share, checked, with their defaults."""

    shuffle: bool
    seed: int
    prefetch: int | None
    device: Any = "cpu"  # a torch.device from here on
    rank: int = 0
    world_size: int = 1
    remainder: Remainder = "drop"
    backend: Backend = "auto"
    verify: bool = True
    timeout_s: float = 120.0

    @property
    def engine(self) -> dict[str, Any]:
        """Return what a reading engine is told."""
        return {"backend": self.backend, "verify": self.verify}

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _checked_device(self.device))
        if self.prefetch is not None:
            require_whole("prefetch", self.prefetch)
        require_whole("seed", self.seed, least=0)
        hint = "give seconds, such as 120"
        require_number("timeout_s", self.timeout_s, positive=True, hint=hint)
        for name in ("shuffle", "verify"):  # NumPy's become Python's: a state is plain
            object.__setattr__(self, name, require_flag(name, getattr(self, name)))
        require_one_of(self.backend, get_args(Backend), f"backend is {self.backend!r}")
        require_whole("world_size", self.world_size)
        require_whole("rank", self.rank, least=0)
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank must be in 0..world_size-1; got rank={self.rank}, "
                f"world_size={self.world_size}"
            )
        require_one_of(self.remainder, ("drop", "repeat"), f"remainder is {self.remainder!r}")

    def share(self, order: Ids) -> Ids:
        """Return the batches of this rank: every ``world_size``-th, as many on every rank."""
        if 0 < len(order) < self.world_size:
            raise ConfigurationError(
                f"{len(order)} batches cannot be shared by {self.world_size} ranks",
                hint="use a smaller batch size or fewer ranks",
            )
        extra = len(order) % self.world_size
        if self.remainder == "drop":
            usable = order[: len(order) - extra]
        else:
            usable = np.concatenate([order, order[: (self.world_size - extra) % self.world_size]])
        return usable[self.rank :: self.world_size]

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same batch."""
        decides = ("seed", "shuffle", "world_size", "remainder")
        return {name: getattr(self, name) for name in decides}


def _checked_device(device: torch.device | str) -> torch.device:
    """Return the device, if torch can use it."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"there is no device {device!r}", hint='use "cpu" or "cuda"'
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        message = f"the batches were wanted on {chosen}, but torch sees no CUDA device"
        raise UnsupportedError(message, hint='use device="cpu"')
    try:
        torch.empty(1, device=chosen).cpu()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        message = f"the batches were wanted on {chosen}, which this torch cannot copy to and from"
        raise UnsupportedError(message, hint='use "cpu" or "cuda"') from error
    return chosen


def check_dtype(dtype: np.dtype[Any], what: str = "features") -> None:
    """Refuse values that no tensor can hold."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError as error:
        raise UnsupportedError(
            f"the {what} are {dtype}, for which torch has no dtype",
            hint="convert them on ingestion",
        ) from error


def checked_ids(ids: ArrayLike, num_nodes: int, *, distinct: bool = True) -> Ids:
    """Return seeds from ids or from a mask over all nodes."""
    values = np.asarray(ids)
    if values.dtype == bool and values.ndim == 1:
        if len(values) != num_nodes:
            raise ConfigurationError(
                f"the mask of ids has {len(values)} entries for {num_nodes} nodes",
                hint="give one boolean per node, or ids",
            )
        return np.flatnonzero(values)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"ids have shape {list(values.shape)} and dtype {values.dtype}",
            hint="give a list of node ids, or a mask",
        )
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < num_nodes:
        raise ConfigurationError(
            f"ids go from {values.min()} to {values.max()}, the graph has {num_nodes} nodes",
            hint="ids of nodes count from 0",
        )
    if distinct:
        found, counts = np.unique(values, return_counts=True)
        if found.size != values.size:
            raise ConfigurationError(
                f"ids name node {found[counts > 1][0]} twice",
                hint="name each node once, numpy.unique(ids); OnlineLoader with node_time= or "
                "edge_time= takes a node several times, each at a time of its own",
            )
    return np.ascontiguousarray(values, np.int64)


def batch_order(count: int, *, seed: int, epoch: int) -> Ids:
    """Return a random order of ``count`` batches, the same for the same seed and epoch."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    return random.permutation(count).astype(np.int64)


class BatchLoader(Closing, abc.ABC):
    """A loader of mini-batches, epoch by epoch, that can stop and go on at any batch.

    Leaving an epoch early and iterating again starts it over, unless a state was loaded.
    """

    def __init__(self, settings: LoaderSettings, release: Callable[[], None]) -> None:
        self._settings = settings
        self._process = process = os.getpid()

        def release_here() -> None:  # a forked child has copies of locks and no threads
            if os.getpid() == process:
                release()

        # Not at the exit of the interpreter: a thread that hangs would hang it, too.
        self._finalizer = weakref.finalize(self, release_here)
        self._finalizer.atexit = False
        self._left_behind: Pipeline | None = None
        self._epoch, self._position, self._resumed = 0, 0, False
        self._iterator: weakref.ref[BatchIterator] | None = None
        self._pipeline: Pipeline | None = None
        self._past: dict[str, Any] = {"stage_s": {}, "wait_s": 0.0}
        self._delivered = 0
        self._made_into: Any = None  # makes PyG's Data of a batch, where they are asked for

    @abc.abstractmethod
    def _numbers(self, epoch: int) -> Ids:
        """Return the batches of this rank in an epoch, in order."""

    @abc.abstractmethod
    def _start(self, epoch: int, numbers: list[int]) -> Pipeline:
        """Return a running pipeline over these batches of an epoch."""

    def _hand_over(self, value: Any) -> Any:
        """Turn what the pipeline makes into what the training loop gets."""
        return value

    @abc.abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same batch."""

    def _make_room(self) -> None:  # most loaders have nothing to do here
        """Prepare for a wait for a batch."""

    def __len__(self) -> int:
        """Return the number of batches of the current epoch (of this rank)."""
        return len(self._numbers(self._epoch))

    @property
    def epoch(self) -> int:
        """Return the epoch that runs or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated; a position that was loaded for it stays."""
        epoch = require_whole("epoch", epoch, least=0, hint="an epoch is not negative")
        if not (self._resumed and epoch == self._epoch):
            self._epoch, self._position, self._resumed = epoch, 0, False

    def __iter__(self) -> BatchIterator:
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
        numbers = self._numbers(self._epoch)[first:].tolist()
        self._pipeline = self._start(self._epoch, numbers)
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
        """Return where this loader stands, exact to the batch; plain numbers and text.

        Batches that were handed out count as used. All ranks of a data parallel run have the
        same position.
        """
        place = {"epoch": self._epoch, "position": self._position}
        return {"version": _STATE_VERSION, **place, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where ``state`` was taken."""
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
        for name in ("epoch", "position"):
            value = state.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                message = f"the loader's state has {name}={value!r}"
                raise CheckpointError(message, hint="give what state_dict() returned")
        epoch, position = state["epoch"], state["position"]
        batches = len(self._numbers(epoch))
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
        """Refuse: a loader has threads and open files, which a copy could not share."""
        message = "a loader cannot be copied, pickled or sent to another process"
        raise UnsupportedError(message, hint="open the store and make a loader where it is used")

    def _count_and_hand_over(self, value: Any) -> Any:
        batch = self._hand_over(value)
        self._position += 1
        self._delivered += 1
        return batch if self._made_into is None else self._made_into.of(batch)

    def _end_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0

    def _end_iterator(self, reason: str) -> bool:
        """End what runs; return whether all its threads have ended."""
        running = None if self._iterator is None else self._iterator()
        if running is not None:
            running.end(reason)
        self._iterator = None
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.close()
            self._past, self._pipeline = self._times(), None
            self._left_behind = self._left_behind or pipeline
        if self._left_behind is not None and self._left_behind.ended:
            self._left_behind = None
        return self._left_behind is None

    def _times(self) -> dict[str, Any]:
        """Return the seconds of each stage, and those for which the training loop waited."""
        seconds, wait_s = dict(self._past["stage_s"]), self._past["wait_s"]
        if self._pipeline is not None:
            wait_s += self._pipeline.wait_s
            for stage in self._pipeline.stages:
                seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
        return {"stage_s": seconds, "wait_s": wait_s}


class BatchIterator:
    """Iterate over the batches of one epoch; owns the epoch's pipeline.

    The user holds the iterator, the iterator holds the pipeline, and the pipeline's threads hold
    neither. So when the loop ends, is left, raises or is collected, the pipeline is closed.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_batch: Callable[[Any], Any],
        on_next: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.pipeline = pipeline
        self._on_batch, self._on_next, self._on_end = on_batch, on_next, on_end
        self._ended_by: str | None = None
        self._finalizer = weakref.finalize(self, pipeline.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderStatistics:
    """Counts of a loader since it was made; the difference of two is what lies between them.

    Args:
        batches: Batches handed to the training loop.
        rows: Rows of prepared batches by level: "device" and "host" caches, "shared" rows of the
            disk (used by several batches of a segment), "private" ones (used by one). For
            batches that were not packed: "file" or "memory".
        row_bytes: Bytes of one row; 0 where they differ by type.
        requests: Read requests for cold rows.
        bytes_read: Bytes that these requests moved from the disk.
        cold_bytes: Bytes of the cold rows themselves.
        record_bytes: Bytes of the batch records that were read.
        edge_bytes: Bytes read for rows of edges; the counts of rows and requests are of nodes.
        fill_bytes: Bytes read to fill the caches.
        fill_s: Seconds that took.
        stage_s: Seconds in each stage of the pipeline, by name.
        wait_s: Seconds for which the training loop waited for batches.
        buffer_bytes: Bytes of the buffers of the ring.
    """

    batches: int = 0
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    row_bytes: int = 0
    requests: int = 0
    bytes_read: int = 0
    cold_bytes: int = 0
    record_bytes: int = 0
    edge_bytes: int = 0
    fill_bytes: int = 0
    fill_s: float = 0.0
    stage_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    wait_s: float = 0.0
    buffer_bytes: int = 0

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the rows that each level served; they add up to 1."""
        total = sum(self.rows.values())
        return {level: rows / total if total else 0.0 for level, rows in self.rows.items()}

    @property
    def amplification(self) -> float:
        """Return bytes read from the disk per byte of cold rows; 1 where nothing was cold."""
        return self.bytes_read / self.cold_bytes if self.cold_bytes else 1.0

    def __sub__(self, earlier: LoaderStatistics) -> LoaderStatistics:
        changes = dict(vars(self))
        for name, then in vars(earlier).items():
            if isinstance(then, Mapping):
                changes[name] = {key: n - then.get(key, 0) for key, n in changes[name].items()}
            elif name not in {"row_bytes", "buffer_bytes"}:
                changes[name] -= then
        return LoaderStatistics(**changes)
