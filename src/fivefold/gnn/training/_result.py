"""What a run reached and what it was started with: result.json and manifest.json."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fivefold.gnn.data import Dataset
from fivefold.gnn.training._config import GnnConfig
from fivefold.gnn.training._models import LayeredModel
from fivefold.units import format_duration_s

_CPU_FILE = Path("/proc/cpuinfo")
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
        "fivefold": version("fivefold"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "mode": config.run.mode,
        "model": config.model.name,
        "label": run_label(config),
        "world_size": world_size,
        "seed": config.run.seed,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "command": _command(sys.argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
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


def parameters_sha256(model: torch.nn.Module) -> str:
    """Digest of all parameters, bit for bit, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


def _command(argv: list[str]) -> list[str]:
    """The command line as a person would type it, without this machine's paths to programs."""
    program = Path(argv[0]).name
    return ["fivefold" if program == "__main__.py" else program, *argv[1:]]


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def _cpu_name() -> str:
    if _CPU_FILE.exists():
        for line in _CPU_FILE.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
