"""What a run reached and what it was started with: result.json and manifest.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fivefold.gnn.data import Dataset
from fivefold.gnn.training._config import GnnConfig
from fivefold.gnn.training._models import LayeredModel
from fivefold.runs import run_facts
from fivefold.units import format_duration_s

_MODEL_NAMES = {"sage": "GraphSAGE", "gat": "GAT", "gcn": "GCN"}
_MODE_NAMES = {"disk": "packed on disk", "memory": "in memory", "online": "online from disk"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GnnResult:
    """What one run reached.

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

    Examples:
        >>> GnnResult.__dataclass_params__.frozen
        True
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
        """One line for people."""
        text = f"{self.label}: {self.reason}, {self.epochs} epochs, {self.steps} steps in "
        text += format_duration_s(self.wall_s)
        if self.valid_accuracy is not None and self.test_accuracy is not None:
            text += f", valid {self.valid_accuracy:.4f}, test {self.test_accuracy:.4f}"
        return f"{text}; {self.output}"

    def record(self) -> dict[str, Any]:
        """Content of result.json."""
        values = dataclasses.asdict(self)
        del values["output"]
        return {"schema": 1, "kind": "gnn", **values}


def run_label(config: GnnConfig) -> str:
    """Model and mode, for people."""
    return f"{_MODEL_NAMES[config.model.name]}, {_MODE_NAMES[config.run.mode]}"


def run_manifest(
    config: GnnConfig, dataset: Dataset, model: LayeredModel, *, world_size: int
) -> dict[str, Any]:
    """Content of a run's manifest.json."""
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
        "dataset": {
            "name": dataset.name,
            "nodes": dataset.num_nodes,
            "edges": dataset.num_edges,
            "dim": dataset.dim,
            "dtype": str(dataset.dtype),
            "row_bytes": dataset.row_bytes,
            "classes": dataset.num_classes,
            "train": len(dataset.train),
            "valid": len(dataset.valid),
            "test": len(dataset.test),
        },
    }
