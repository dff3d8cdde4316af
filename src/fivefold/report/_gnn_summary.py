"""Figures of graph runs that every form of the report shows, and the finding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fivefold.report._format import format_percent, format_ratio, format_seconds
from fivefold.report._gnn_records import DataCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.report._gnn_records import GraphRun

STAGE_NAMES = {
    "compute": "compute",
    "data": "waiting for data",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "other": "other",
}
LEVEL_NAMES = {
    "device": "device cache",
    "host": "host cache",
    "shared": "disk, shared by batches",
    "private": "disk, of one batch",
    "memory": "features in memory",
    "file": "feature file, at random",
}
_MUCH = 0.1


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """The figures of one run.

    Attributes:
        name: Unique name of the run.
        label: Name for people.
        mode: Where its batches came from.
        status: How it ended.
        epochs: Whole epochs.
        wall_s: Seconds of training.
        epoch_s: Mean seconds of an epoch, validation and checkpoints not counted.
        stages: Seconds of rank 0 by what its training thread did.
        pipeline: Seconds of rank 0's background stages.
        waiting: Share of an epoch in which training stood still for data.
        data: What the data path did.
        bytes_per_epoch: Bytes that rank 0 read from disk for cold rows, per epoch.
        predicted_bytes_per_epoch: What the plan said all ranks would read.
        hit_rates: Share of the rows by level.
        amplification: Bytes read per byte of cold rows.
        prepare_s: Seconds of sampling, planning and packing.
        valid_accuracy: Best validation accuracy.
        test_accuracy: Test accuracy at that epoch.
        best_epoch: That epoch.
    """

    name: str
    label: str
    mode: str
    status: str
    epochs: int
    wall_s: float
    epoch_s: float | None
    stages: dict[str, float]
    pipeline: dict[str, float]
    waiting: float | None
    data: DataCounts
    bytes_per_epoch: float | None
    predicted_bytes_per_epoch: int | None
    hit_rates: dict[str, float]
    amplification: float | None
    prepare_s: dict[str, float]
    valid_accuracy: float | None
    test_accuracy: float | None
    best_epoch: int | None

    def record(self) -> dict[str, Any]:
        """The figures as plain values, for JSON."""
        return {**asdict(self), "data": self.data.model_dump()}


def summarise_graph_runs(runs: Sequence[GraphRun]) -> list[GraphSummary]:
    """The figures of each run."""
    return [_summarise(run) for run in runs]


def graph_headline(summaries: Sequence[GraphSummary]) -> str:
    """The finding in a sentence or two.

    The subject is the first run from packed rows, else the first run; beside its accuracy stands
    that of the best run of another mode.
    """
    if not summaries:
        return ""
    run = next((run for run in summaries if run.mode == "disk"), summaries[0])
    text = f"{run.label}: {run.epochs} epochs in {format_seconds(run.wall_s)}"
    if run.test_accuracy is not None:
        text += f", test accuracy {run.test_accuracy:.4f} at the best validation"
        others = [other for other in summaries if other.mode != run.mode and other.test_accuracy]
        if others:
            best = max(others, key=lambda other: other.test_accuracy or 0.0)
            text += f" ({best.test_accuracy:.4f} for {best.label})"
    if run.waiting is not None:
        text += f". Training waited for data {format_percent(run.waiting)} of an epoch"
        text += ": the data path is the bottleneck" if run.waiting > _MUCH else ""
    if run.amplification is not None:
        text += f"; {format_ratio(run.amplification)} the bytes of the cold rows were read"
    return f"{text}."


def _summarise(run: GraphRun) -> GraphSummary:
    stages = _stages(run)
    data = run.result.data if run.result else run.epochs[-1].data if run.epochs else DataCounts()
    epochs = run.epochs[-1].epoch if run.epochs else 0
    busy_s = stages.get("compute", 0.0) + stages.get("data", 0.0)
    best = _best(run)
    predicted = run.prepare.plan.get("read_bytes_per_epoch")
    on_disk = bool(data.rows)
    return GraphSummary(
        name=run.name,
        label=run.label,
        mode=run.manifest.mode,
        status=run.status,
        epochs=epochs,
        wall_s=_wall_s(run),
        epoch_s=busy_s / epochs if epochs else None,
        stages=stages,
        pipeline={name: seconds for name, seconds in data.stage_s.items() if seconds > 0},
        waiting=stages.get("data", 0.0) / busy_s if busy_s else None,
        data=data,
        bytes_per_epoch=data.bytes_read / epochs if epochs and on_disk else None,
        predicted_bytes_per_epoch=predicted if isinstance(predicted, int) else None,
        hit_rates=data.hit_rates,
        amplification=data.amplification,
        prepare_s=run.prepare.seconds,
        valid_accuracy=best[0],
        test_accuracy=best[1],
        best_epoch=best[2],
    )


def _stages(run: GraphRun) -> dict[str, float]:
    found = run.end.stages if run.end else run.epochs[-1].stages if run.epochs else {}
    return {name: found.get(name, 0.0) for name in STAGE_NAMES} if found else {}


def _wall_s(run: GraphRun) -> float:
    times = [point.wall_s for point in run.train[-1:]]
    times += [point.wall_s for point in run.epochs[-1:]]
    times += [point.wall_s for point in run.validation[-1:]]
    return run.end.wall_s if run.end else max(times, default=0.0)


def _best(run: GraphRun) -> tuple[float | None, float | None, int | None]:
    judged = [point for point in run.validation if point.accuracy is not None]
    if not judged:
        return None, None, None
    best = max(judged, key=lambda point: (point.accuracy or 0.0, -point.epoch))
    return best.accuracy, best.test_accuracy, best.epoch
