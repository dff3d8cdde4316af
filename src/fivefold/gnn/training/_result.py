"""What a run reached and what it was started with: result.json and manifest.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import CheckpointError
from fivefold.gnn.training._graph import Graph, facts_of
from fivefold.gnn.training.config import GnnConfig
from fivefold.runs.checkpoints import find_checkpoint
from fivefold.runs.machine import run_facts
from fivefold.units import format_duration_s

_CATEGORIES = ("compute", "data", "validation", "checkpoint")
_MODEL_NAMES = {"sage": "GraphSAGE", "gat": "GAT", "gcn": "GCN"}
_MODE_NAMES = {"disk": "packed on disk", "memory": "in memory", "online": "online from disk"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GnnResult:
    """Accuracy, times and counts of one run.

    Args:
        output: The run's folder.
        label: Model and mode, for people.
        reason: "finished", or "stopped" by a signal (then a checkpoint was written).
        steps: Optimizer steps per rank.
        epochs: Whole epochs.
        wall_s: Seconds of training, over resumes.
        seconds: Seconds per category; they sum to ``wall_s``.
        prepare_s: Seconds of sampling, planning and packing in this run, by name.
        valid_accuracy: Best validation accuracy; None where there was none.
        test_accuracy: Test accuracy at that epoch.
        best_epoch: That epoch, from 1.
        data: What the data path of rank 0 did: rows by level, bytes, requests, stage seconds.
        parameters_sha256: Digest of the parameters.
    """

    output: Path
    label: str
    reason: str
    steps: int
    epochs: int
    wall_s: float
    seconds: dict[str, float]
    prepare_s: dict[str, float]
    valid_accuracy: float | None
    test_accuracy: float | None
    best_epoch: int | None
    data: dict[str, Any]
    parameters_sha256: str

    def summary(self) -> str:
        """Return one line for people."""
        text = f"{self.label}: {self.reason}, {self.epochs} epochs, {self.steps} steps in "
        text += format_duration_s(self.wall_s)
        if self.valid_accuracy is not None and self.test_accuracy is not None:
            text += f", valid {self.valid_accuracy:.4f}, test {self.test_accuracy:.4f}"
        return f"{text}; {self.output}"

    def record(self) -> dict[str, Any]:
        """Return the content of result.json."""
        values = dataclasses.asdict(self)
        del values["output"]
        return {"schema": 1, "kind": "gnn", **values}


def run_label(config: GnnConfig) -> str:
    """Return the model and mode, for people."""
    return f"{_MODEL_NAMES[config.model.name]}, {_MODE_NAMES[config.run.mode]}"


def run_manifest(
    config: GnnConfig, dataset: Graph, model: torch.nn.Module, *, world_size: int
) -> dict[str, Any]:
    """Return the content of a run's manifest.json."""
    return {
        "schema": 1,
        "kind": "gnn",
        **run_facts(),
        "mode": config.run.mode,
        "model": config.model.name,
        "label": run_label(config),
        "world_size": world_size,
        "seed": config.run.seed,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dataset": facts_of(dataset),
    }


@dataclasses.dataclass(kw_only=True)
class EpochTally:
    """Sums over the seeds of this rank."""

    loss_sum: float = 0.0
    right: int = 0
    nodes: int = 0
    logged_loss_sum: float = 0.0
    logged_right: int = 0
    logged_nodes: int = 0

    def add(self, *, loss: float, right: int, nodes: int) -> None:
        """Count a batch: summed loss, seeds that were right, seeds with a label."""
        self.loss_sum += loss
        self.right += right
        self.nodes += nodes

    @property
    def loss(self) -> float:
        """Mean loss of the epoch so far."""
        return self.loss_sum / max(1, self.nodes)

    @property
    def accuracy(self) -> float:
        """Accuracy of the epoch so far."""
        return self.right / max(1, self.nodes)

    def take_recent(self) -> dict[str, Any]:
        """Return the loss, accuracy and seeds since the last call."""
        nodes = self.nodes - self.logged_nodes
        loss = (self.loss_sum - self.logged_loss_sum) / max(1, nodes)
        accuracy = (self.right - self.logged_right) / max(1, nodes)
        self.logged_loss_sum, self.logged_right = self.loss_sum, self.right
        self.logged_nodes = self.nodes
        return {"loss": loss, "accuracy": accuracy, "nodes": nodes}


class Clock:
    """Seconds per category."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        before = seconds or {}
        self._seconds = {name: before.get(name, 0.0) for name in _CATEGORIES}
        self._before_s = sum(before.values())
        self._started_s = time.perf_counter()

    @contextlib.contextmanager
    def measure(self, category: str) -> Iterator[None]:
        """Count what happens inside under a category."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[category] += time.perf_counter() - started_s

    def wall_s(self) -> float:
        """Return the seconds since the run's first beginning, pauses not counted."""
        return self._before_s + time.perf_counter() - self._started_s

    def record(self) -> dict[str, float]:
        """Return the seconds by category; "other" is what none of them is."""
        rest = max(0.0, self.wall_s() - sum(self._seconds.values()))
        return {**self._seconds, "other": rest}


def describe_run(config: GnnConfig, *, data: str) -> dict[str, Any]:
    """Describe what decides the parameters and must be equal for a run to be resumed.

    The number of epochs may change, so that a finished run can be made longer.
    """
    sections = config.model_dump(mode="json", include={"model", "optim", "sampling"})
    del sections["sampling"]["threads"]
    # JSON knows no infinity.
    sections["optim"]["grad_clip"] = repr(config.optim.grad_clip)
    sections["run"] = {"seed": config.run.seed, "mode": config.run.mode}
    sections["loader"] = {"form": config.loader.form, "shuffle": config.loader.shuffle}
    sections["data"] = {"fingerprint": data}
    normal: dict[str, Any] = json.loads(json.dumps(sections))
    return normal


def check_before_work(config: GnnConfig, *, data: str, world_size: int) -> Callable[[str], None]:
    """Refuse a run that could not go on in its folder, before hours of sampling and packing.

    Returns what refuses a plan, by its ``order_fingerprint``, that is not the checkpoint's.
    """
    found = find_checkpoint(
        config.run.output,
        config.run.resume,
        description=describe_run(config, data=data),
        world_size=world_size,
    )

    def accept(plan: str) -> None:
        if found is not None and not config.sampling.refresh_every_epochs:
            # That of the first rows: those of other types are not planned yet.
            require_same_plan(*found, plan=plan, first=True)

    return accept


def require_same_plan(
    path: Path, manifest: Mapping[str, Any], *, plan: str | None, first: bool = False
) -> None:
    """Refuse another order of the packed rows than the checkpoint's, or of the first type's."""
    order = manifest["description"]["plan"]["order"]
    if first and order is not None:
        order = order.partition(" ")[0]
    if order != plan:
        raise CheckpointError(
            f"{path} was written with another plan of the packed rows",
            hint="give the budgets and [plan] of that run, and its store; use that run's "
            "config.toml, or choose another run.output to begin afresh",
        )
