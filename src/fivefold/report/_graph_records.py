"""What ``fivefold gnn train`` leaves behind, as frozen records.

As with the records of language models, a field that is not named here is ignored and one that is
missing or of the wrong type is an error of the reader. This module computes simple ratios of its
own fields and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt

from fivefold.report._records import LoggedPoint, Record, StartedRun, Status


class GraphFacts(Record):
    """The data set of a run."""

    name: str
    nodes: NonNegativeInt
    edges: NonNegativeInt
    dim: NonNegativeInt
    dtype: str
    row_bytes: NonNegativeInt
    classes: NonNegativeInt
    train: NonNegativeInt
    valid: NonNegativeInt
    test: NonNegativeInt


class GraphManifest(StartedRun):
    """What was started."""

    mode: str
    model: str
    dataset: GraphFacts


class DataCounts(Record):
    """What the data path of rank 0 did so far."""

    rows: dict[str, int] = Field(default_factory=dict)
    row_bytes: NonNegativeInt = 0
    requests: NonNegativeInt = 0
    bytes_read: NonNegativeInt = 0
    cold_bytes: NonNegativeInt = 0
    record_bytes: NonNegativeInt = 0
    fill_bytes: NonNegativeInt = 0
    stage_s: dict[str, float] = Field(default_factory=dict)
    wait_s: float = 0.0

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the rows that each level served."""
        total = sum(self.rows.values())
        return {level: rows / total for level, rows in self.rows.items()} if total else {}

    @property
    def amplification(self) -> float | None:
        """Return bytes read per byte of cold rows; None where nothing was cold."""
        return self.bytes_read / self.cold_bytes if self.cold_bytes else None


class _EpochPoint(LoggedPoint):
    epoch: NonNegativeInt


class GraphTrainPoint(_EpochPoint):
    """One line of the training curve: rank 0's own seeds."""

    loss: float
    accuracy: float
    nodes: NonNegativeInt


class EpochPoint(_EpochPoint):
    """One whole epoch; data counts from the run's beginning."""

    loss: float | None = None
    accuracy: float | None = None
    data: DataCounts = DataCounts()
    stages: dict[str, float] = Field(default_factory=dict)


class GraphValidationPoint(_EpochPoint):
    """One validation."""

    accuracy: float | None = None
    loss: float | None = None
    test_accuracy: float | None = None
    nodes: NonNegativeInt = 0


class PreparePoint(Record):
    """Sampling, planning and packing; what the plan predicts for an epoch of all ranks."""

    seconds: dict[str, float] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)


class GraphEnd(_EpochPoint):
    """The run ended in order."""

    reason: str
    stages: dict[str, float] = Field(default_factory=dict)


class GraphResult(Record):
    """``result.json``."""

    schema_version: int = Field(alias="schema")
    label: str
    steps: NonNegativeInt
    epochs: NonNegativeInt
    wall_s: float
    seconds: dict[str, float] = Field(default_factory=dict)
    valid_accuracy: float | None = None
    test_accuracy: float | None = None
    best_epoch: int | None = None
    data: DataCounts = DataCounts()


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One run as its folder tells it."""

    path: Path
    name: str
    label: str
    manifest: GraphManifest
    config_text: str = ""
    plan_text: str = ""
    train: tuple[GraphTrainPoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()
    validation: tuple[GraphValidationPoint, ...] = ()
    prepare: PreparePoint = field(default_factory=PreparePoint)
    end: GraphEnd | None = None
    result: GraphResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """Return how the run ended: in order, on request, or not (yet)."""
        if self.end is not None:
            return "stopped" if self.end.reason == "stopped" else "finished"
        return "unfinished"
