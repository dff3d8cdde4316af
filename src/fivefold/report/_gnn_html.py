"""What the page shows of graph runs: bars and tables as plain values for the template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.report._format import (
    UNKNOWN,
    format_bytes_or_dash,
    format_count,
    format_percent,
    format_ratio,
    format_seconds,
)
from fivefold.report._gnn_summary import LEVEL_NAMES, STAGE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fivefold.report._gnn_records import GraphRun
    from fivefold.report._gnn_summary import GraphSummary

GraphColumn = tuple[str, str, "Callable[[GraphSummary], str]"]


@dataclass(frozen=True, slots=True)
class _Part:
    kind: str
    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    total: str
    parts: tuple[_Part, ...]


def format_accuracy(value: float | None) -> str:
    """Write an accuracy with the digits that matter."""
    return UNKNOWN if value is None else f"{value:.4f}"


GRAPH_COLUMNS: tuple[GraphColumn, ...] = (
    (
        "test accuracy",
        "Accuracy on test nodes at the best validation, from sampled neighbours.",
        lambda run: format_accuracy(run.test_accuracy),
    ),
    (
        "best epoch",
        "Epoch of the best validation.",
        lambda run: format_count(run.best_epoch),
    ),
    (
        "epoch time",
        "Mean of an epoch: computing and waiting for data.",
        lambda run: format_seconds(run.epoch_s),
    ),
    (
        "waiting for data",
        "Share of an epoch in which training stood still until a batch was there.",
        lambda run: format_percent(run.waiting),
    ),
    (
        "memory hits",
        "Share of the rows that memory served.",
        lambda run: format_percent(_memory_hits(run)),
    ),
    (
        "read per epoch",
        "Bytes that rank 0 read from the disk for the rows that were in no cache.",
        lambda run: format_bytes_or_dash(run.bytes_per_epoch),
    ),
    (
        "read amplification",
        "Those bytes over the bytes of the rows themselves; 1 is the best.",
        lambda run: format_ratio(run.amplification),
    ),
    (
        "preparing",
        "Sampling, planning and packing, once.",
        lambda run: format_seconds(sum(run.prepare_s.values()) if run.prepare_s else None),
    ),
    ("wall time", "Training, everything included.", lambda run: format_seconds(run.wall_s)),
)


def _memory_hits(run: GraphSummary) -> float | None:
    levels = ("device", "host", "memory")
    return sum(run.hit_rates.get(level, 0.0) for level in levels) if run.hit_rates else None


def graph_view(runs: Sequence[GraphRun], summaries: Sequence[GraphSummary]) -> dict[str, Any]:
    """Everything that the template of graph runs names."""
    return {
        "runs": list(zip(runs, summaries, strict=True)),
        "columns": [(name, meaning) for name, meaning, _ in GRAPH_COLUMNS],
        "rows": [(run, [write(run) for _, _, write in GRAPH_COLUMNS]) for run in summaries],
        "stages": STAGE_NAMES,
        "shown_levels": _shown_levels(summaries),
        "stage_bars": _stage_bars(summaries),
        "pipeline": _pipeline(summaries),
        "level_bars": _level_bars(summaries),
        "disk_rows": _disk_rows(summaries),
        "plans": [(run.label, run.plan_text) for run in runs if run.plan_text],
        "facts": _facts(runs),
    }


def _stage_bars(summaries: Sequence[GraphSummary]) -> list[_Bar]:
    longest = max((sum(run.stages.values()) for run in summaries), default=0.0)
    if longest <= 0:
        return []
    return [
        _Bar(
            label=run.label,
            total=format_seconds(sum(run.stages.values())),
            parts=tuple(
                _Part(kind, round(100 * value / longest, 3), _named(STAGE_NAMES[kind], value))
                for kind, value in run.stages.items()
                if value > 0
            ),
        )
        for run in summaries
        if run.stages
    ]


def _pipeline(summaries: Sequence[GraphSummary]) -> list[_Bar]:
    """One bar per background stage, to the scale of the run's training time."""
    bars = []
    for run in summaries:
        longest = max([*run.pipeline.values(), run.wall_s], default=0.0)
        for index, (stage, seconds) in enumerate(run.pipeline.items()):
            kind = "other" if stage.startswith("wait") else "work"
            part = _Part(kind, round(100 * seconds / longest, 3), _named(stage, seconds))
            label = f"{run.label}: " if not index else ""
            bars.append(_Bar(f"{label}{stage}", format_seconds(seconds), (part,)))
    return bars


def _level_bars(summaries: Sequence[GraphSummary]) -> list[_Bar]:
    longest = max((sum(run.data.rows.values()) for run in summaries), default=0)
    if not longest:
        return []
    return [
        _Bar(
            label=run.label,
            total=format_bytes_or_dash(sum(run.data.rows.values()) * run.data.row_bytes),
            parts=tuple(
                _Part(
                    level,
                    round(100 * rows / longest, 3),
                    f"{LEVEL_NAMES.get(level, level)}: "
                    f"{format_bytes_or_dash(rows * run.data.row_bytes)}",
                )
                for level, rows in run.data.rows.items()
                if rows
            ),
        )
        for run in summaries
        if run.data.rows
    ]


def _shown_levels(summaries: Sequence[GraphSummary]) -> dict[str, str]:
    """The levels that served any run."""
    used = {level for run in summaries for level, rows in run.data.rows.items() if rows}
    return {level: name for level, name in LEVEL_NAMES.items() if level in used}


def _disk_rows(summaries: Sequence[GraphSummary]) -> list[tuple[str, list[str]]]:
    """Per packed run: hits by level, bytes read and predicted, requests, their mean size."""
    rows = []
    for run in summaries:
        if not run.data.rows:
            continue
        mean = run.data.bytes_read / run.data.requests if run.data.requests else None
        cells = [format_percent(run.hit_rates.get(level)) for level in _shown_levels(summaries)]
        cells += [
            format_bytes_or_dash(run.bytes_per_epoch),
            format_bytes_or_dash(run.predicted_bytes_per_epoch),
            format_count(run.data.requests / run.epochs if run.epochs else None),
            format_bytes_or_dash(mean),
            format_ratio(run.amplification),
        ]
        rows.append((run.label, cells))
    return rows


def _facts(runs: Sequence[GraphRun]) -> list[tuple[str, list[str]]]:
    writers: tuple[tuple[str, Callable[[GraphRun], object]], ...] = (
        ("data set", lambda run: run.manifest.dataset.name),
        ("nodes", lambda run: format_count(run.manifest.dataset.nodes)),
        ("edges", lambda run: format_count(run.manifest.dataset.edges)),
        (
            "features",
            lambda run: (
                f"{run.manifest.dataset.dim} x {run.manifest.dataset.dtype}, "
                + format_bytes_or_dash(run.manifest.dataset.nodes * run.manifest.dataset.row_bytes)
            ),
        ),
        ("training nodes", lambda run: format_count(run.manifest.dataset.train)),
        ("model parameters", lambda run: format_count(run.manifest.num_parameters)),
        ("ranks", lambda run: run.manifest.world_size),
        ("seed", lambda run: run.manifest.seed),
        ("processor", lambda run: run.manifest.machine.cpu),
        ("cores", lambda run: run.manifest.machine.cores),
        ("memory", lambda run: format_bytes_or_dash(run.manifest.machine.memory_bytes)),
        ("kernel", lambda run: run.manifest.machine.kernel),
        ("fivefold", lambda run: run.manifest.fivefold),
        ("torch", lambda run: run.manifest.torch),
        ("started", lambda run: run.manifest.started_at),
    )
    rows = []
    for name, write in writers:
        values = [UNKNOWN if (value := write(run)) is None else str(value) for run in runs]
        rows.append((name, values[:1] if len(set(values)) == 1 else values))
    return rows


def _named(name: str, seconds: float) -> str:
    return f"{name}: {format_seconds(seconds)}"
