"""Where the batches of an epoch come from in all three modes, and how a model is judged.

With ``sampling.refresh_every_epochs`` the next round is sampled and packed while the current one
trains. The nodes of a validation, their order and their neighbours are always the same, so that
two validations differ by the parameters alone. Each rank judges its share; the sums are exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from fivefold.errors import InfeasibleError
from fivefold.gnn.data.parts import Progress
from fivefold.gnn.loading import DiskLoader, LoaderStatistics, OnlineLoader
from fivefold.gnn.loading.prepare import Preparation, Prepared, StoreRecipe, fanouts_of
from fivefold.gnn.sampling import Adjacency, HeteroAdjacency
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.gnn.training._graph import Graph, TypedData, scores_of
from fivefold.gnn.training.config import GnnConfig
from fivefold.runs.ranks import Ranks

_LOG = logging.getLogger(__name__)
Loader: TypeAlias = DiskLoader | OnlineLoader
Topology: TypeAlias = Adjacency | HeteroAdjacency


def make_loader(
    config: GnnConfig,
    dataset: Graph,
    *,
    topology: Topology,
    ranks: Ranks,
    features: Array | None,
    prepared: Prepared | None,
) -> Loader:
    """Make the loader of a mode."""
    loader = config.loader
    place: dict[str, Any] = {
        "device": ranks.device,
        "backend": loader.backend,
        "verify": loader.verify,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "shuffle": loader.shuffle,
        "seed": config.run.seed,
    }
    if prepared is not None:
        return DiskLoader(
            prepared,
            labels=dataset.labels,
            prefetch=loader.prefetch,
            threads=loader.threads or None,
            form="edge_index" if isinstance(dataset, TypedData) else loader.form,
            **place,
        )
    sampling = config.sampling
    place |= {"fanouts": sampling.fanouts, "batch_size": sampling.batch_size, "topology": topology}
    return _sampled(dataset, dataset.train, form=loader.form, features=features, **place)


def _sampled(dataset: Graph, ids: Ids, *, features: Array | None, **options: Any) -> OnlineLoader:
    """Return a loader that samples; the models need no rows of edges."""
    options |= {"features": "disk" if features is None else features, "edge_ids": False}
    if isinstance(dataset, TypedData):
        options["form"] = "edge_index"
        return OnlineLoader(dataset.graph, (dataset.node_type, ids), **options)
    return OnlineLoader(dataset, ids, **options)


def add_counts(before: dict[str, Any] | None, now: LoaderStatistics) -> dict[str, Any]:
    """Return the counts of a loader, those that add up over parts of a run, added to a record."""
    counts = dataclasses.asdict(now)
    for name in ("batches", "fill_s", "buffer_bytes"):
        del counts[name]
    for key, value in counts.items():
        earlier = (before or {}).get(key, 0)
        if isinstance(value, dict):
            known = earlier or {}
            counts[key] = known | {name: n + known.get(name, 0) for name, n in value.items()}
        elif key != "row_bytes":
            counts[key] = value + earlier
    return counts


_SEED = 20_250  # of the sampled neighbours; apart from training's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy and loss of a model on some nodes."""

    accuracy: float
    loss: float
    nodes: int


class Evaluator:
    """Judges a model on a fixed part of the validation and test nodes."""

    def __init__(
        self,
        config: GnnConfig,
        dataset: Graph,
        *,
        topology: Topology,
        ranks: Ranks,
        features: Array | None,
    ) -> None:
        self._ranks = ranks
        self._loaders = {
            name: _sampled(
                dataset,
                _share(dataset, ids, limit=config.validation.nodes, ranks=ranks),
                fanouts=config.validation.fanouts or config.sampling.fanouts,
                batch_size=config.validation.batch_size,
                topology=topology,
                features=features,
                resample=False,
                seed=_SEED,
                form="blocks",
                device=ranks.device,
                backend=config.loader.backend,
                verify=config.loader.verify,
            )
            for name, ids in (("valid", dataset.valid), ("test", dataset.test))
        }

    def score(self, model: torch.nn.Module, name: Literal["valid", "test"]) -> Score:
        """Judge a model; a collective call."""
        loss, right, nodes = 0.0, 0, 0
        loader = self._loaders[name]
        loader.set_epoch(0)  # which decides the draws
        model.eval()
        try:
            with torch.no_grad():
                for batch in loader:
                    assert batch.y is not None, "the loader has labels"
                    scores = scores_of(model, batch)
                    loss += float(functional.cross_entropy(scores, batch.y, reduction="sum"))
                    right += int((scores.argmax(dim=1) == batch.y).sum())
                    nodes += batch.batch_size
        finally:
            model.train()
        loss, right_sum, count = self._ranks.sum([loss, right, nodes], what=f"the {name} score")
        if not count:
            return Score(accuracy=float("nan"), loss=float("nan"), nodes=0)
        return Score(accuracy=right_sum / count, loss=loss / count, nodes=int(count))

    def close(self) -> None:
        """Let go of files and threads."""
        for loader in self._loaders.values():
            loader.close()


def _share(dataset: Graph, ids: Ids, *, limit: int, ranks: Ranks) -> Ids:
    """Return a rank's share of at most limit labelled nodes, spread evenly over all of them."""
    known = ids[dataset.labels[ids] >= 0]
    if len(known) > limit:
        known = known[np.linspace(0, len(known) - 1, limit).astype(np.int64)]
    return np.ascontiguousarray(known[ranks.rank :: ranks.world_size])


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


def _recipe(config: GnnConfig, dataset: Graph, round_number: int) -> StoreRecipe:
    sampling, budgets = config.sampling, config.budgets
    graph = dataset.graph if isinstance(dataset, TypedData) else dataset
    return StoreRecipe(
        fanouts=fanouts_of(graph, sampling.fanouts),
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
        self, config: GnnConfig, dataset: Graph, *, topology: Topology, is_main: bool
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
        config, dataset = self._config, self._dataset
        node_type = dataset.node_type if isinstance(dataset, TypedData) else None
        with _in_terms_of_the_file():
            return Preparation(
                dataset=dataset.graph if isinstance(dataset, TypedData) else dataset,
                recipe=_recipe(config, dataset, number),
                folder=prepared_folder(config),
                ids=dataset.train,
                input_type=node_type,
                topology=self._topology,
                threads=config.sampling.threads or None,
                progress=progress,
                show=show,
                accept=accept,
            ).run()

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
