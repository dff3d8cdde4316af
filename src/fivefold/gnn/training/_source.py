"""Where the batches of an epoch come from in all three modes, and how a model is judged.

The nodes of a validation, their order and their neighbours are always the same, so that two
validations differ by the parameters alone. Each rank judges its share; the sums are exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional

from fivefold.gnn.data import Dataset
from fivefold.gnn.loading import DiskLoader, LoaderStatistics, OnlineLoader
from fivefold.gnn.packing import PackedStore
from fivefold.gnn.sampling import Adjacency
from fivefold.gnn.storage.arrays import Array, Ids
from fivefold.gnn.training.config import GnnConfig
from fivefold.gnn.training.models import LayeredModel
from fivefold.runs.ranks import Ranks


def make_loader(
    config: GnnConfig,
    dataset: Dataset,
    *,
    topology: Adjacency,
    ranks: Ranks,
    features: Array | None,
    store: PackedStore | None,
) -> DiskLoader | OnlineLoader:
    """Make the loader of a mode."""
    loader = config.loader
    place: dict[str, Any] = {
        "form": loader.form,
        "device": ranks.device,
        "backend": loader.backend,
        "verify": loader.verify,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "shuffle": loader.shuffle,
        "seed": config.run.seed,
    }
    if store is not None:
        return DiskLoader(
            store,
            labels=dataset.labels,
            prefetch=loader.prefetch,
            threads=loader.threads or None,
            **place,
        )
    rows: Literal["disk"] | Array = "disk" if features is None else features
    return OnlineLoader(
        dataset,
        dataset.train,
        fanouts=config.sampling.fanouts,
        batch_size=config.sampling.batch_size,
        topology=topology,
        features=rows,
        **place,
    )


def counts_of(statistics: LoaderStatistics) -> dict[str, Any]:
    """Return the counts of a loader that add up over parts of a run."""
    counts = dataclasses.asdict(statistics)
    return {
        name: counts[name] for name in counts if name not in {"batches", "fill_s", "buffer_bytes"}
    }


def add_counts(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two records of counts."""
    if first is None:
        return second
    total: dict[str, Any] = {}
    for key, value in second.items():
        before = first.get(key, 0)
        if isinstance(value, dict):
            before = before or {}
            names = [*before, *(name for name in value if name not in before)]
            total[key] = {name: before.get(name, 0) + value.get(name, 0) for name in names}
        else:
            total[key] = value if key == "row_bytes" else before + value
    return total


_SEED = 20_250  # of the sampled neighbours; apart from training's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model does on some nodes."""

    accuracy: float
    loss: float
    nodes: int


class Evaluator:
    """Judges a model on a fixed part of the validation and test nodes."""

    def __init__(
        self,
        config: GnnConfig,
        dataset: Dataset,
        *,
        topology: Adjacency,
        ranks: Ranks,
        features: Array | None,
    ) -> None:
        self._ranks = ranks
        rows: Literal["disk"] | Array = "disk" if features is None else features
        self._loaders = {
            name: OnlineLoader(
                dataset,
                _share(dataset, ids, limit=config.validation.nodes, ranks=ranks),
                fanouts=config.validation.fanouts or config.sampling.fanouts,
                batch_size=config.validation.batch_size,
                topology=topology,
                features=rows,
                resample=False,
                seed=_SEED,
                form="blocks",
                device=ranks.device,
                backend=config.loader.backend,
                verify=config.loader.verify,
            )
            for name, ids in (("valid", dataset.valid), ("test", dataset.test))
        }

    def score(self, model: LayeredModel, name: Literal["valid", "test"]) -> Score:
        """Judge a model; a collective call."""
        loss, right, nodes = 0.0, 0, 0
        loader = self._loaders[name]
        model.eval()
        try:
            with torch.no_grad():
                for batch in loader:
                    assert batch.blocks is not None, "the loader was asked for blocks"
                    assert batch.y is not None, "the loader has labels"
                    scores = model(batch.x, batch.blocks)
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


def _share(dataset: Dataset, ids: Ids, *, limit: int, ranks: Ranks) -> Ids:
    """Return a rank's share of at most limit labelled nodes, spread evenly over all of them."""
    known = ids[dataset.labels[ids] >= 0]
    if len(known) > limit:
        known = known[np.linspace(0, len(known) - 1, limit).astype(np.int64)]
    return np.ascontiguousarray(known[ranks.rank :: ranks.world_size])
