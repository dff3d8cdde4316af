"""Runs of graph training in a report: their figures, the finding, what a page shows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.report._records import DataCounts, EpochPoint, GraphEnd, GraphRun
from fivefold.report.columns import Column, record_of, row_table
from fivefold.report.format import (
    COLOURS,
    MARKERS,
    ORANGE,
    UNKNOWN,
    Writer,
    command_texts,
    config_texts,
    fact_table,
    figure_table,
    format_bytes_or_dash,
    format_count,
    format_percent,
    format_ratio,
    format_seconds,
    run_notes,
    seconds_bar,
    thinned,
)
from fivefold.report.page import (
    BarChart,
    BarRow,
    Curve,
    CurveChart,
    DataTable,
    Kinds,
    PagePart,
    PageSection,
    SideBySide,
    TextBlock,
)

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
    """The figures of one run."""

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

    @property
    def memory_hits(self) -> float | None:
        """Return which share of the rows memory served."""
        levels = ("device", "host", "memory")
        hits = sum(self.hit_rates.get(level, 0.0) for level in levels)
        return hits if self.hit_rates else None

    @property
    def preparing_s(self) -> float | None:
        """Return the seconds of sampling, planning and packing."""
        return sum(self.prepare_s.values()) if self.prepare_s else None

    def record(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON."""
        return {**asdict(self), "data": self.data.model_dump()}


def summarise_graph_runs(runs: Sequence[GraphRun]) -> list[GraphSummary]:
    """Return the figures of each run."""
    return [_summarise(run) for run in runs]


def graph_headline(summaries: Sequence[GraphSummary]) -> str:
    """Return the finding in a sentence or two.

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
    last = run.epochs[-1] if run.epochs else None  # what is beyond it is no whole epoch
    ends = (*run.train[-1:], *run.epochs[-1:], *run.validation[-1:])
    stages, by_epoch = _stages(run.end or last), _stages(last)
    data = run.result.data if run.result else last.data if last else DataCounts()
    judged = [point for point in run.validation if point.accuracy is not None]
    best = max(judged, key=lambda one: (one.accuracy or 0.0, -one.epoch), default=None)
    predicted = run.prepare.plan.get("read_bytes_per_epoch")
    epochs = last.epoch if last else 0
    busy_s = _busy_s(stages)
    return GraphSummary(
        name=run.name,
        label=run.label,
        mode=run.manifest.mode,
        status=run.status,
        epochs=epochs,
        wall_s=run.end.wall_s if run.end else max((one.wall_s for one in ends), default=0.0),
        epoch_s=_busy_s(by_epoch) / epochs if epochs else None,
        stages=stages,
        pipeline={name: seconds for name, seconds in data.stage_s.items() if seconds > 0},
        waiting=stages.get("data", 0.0) / busy_s if busy_s else None,
        data=data,
        bytes_per_epoch=last.data.bytes_read / epochs if last and epochs and data.rows else None,
        predicted_bytes_per_epoch=predicted if isinstance(predicted, int) else None,
        hit_rates=data.hit_rates,
        amplification=data.amplification,
        prepare_s=run.prepare.seconds,
        valid_accuracy=best.accuracy if best else None,
        test_accuracy=best.test_accuracy if best else None,
        best_epoch=best.epoch if best else None,
    )


def _stages(at: EpochPoint | GraphEnd | None) -> dict[str, float]:
    return {name: at.stages.get(name, 0.0) for name in STAGE_NAMES} if at and at.stages else {}


def _busy_s(stages: Mapping[str, float]) -> float:
    return stages.get("compute", 0.0) + stages.get("data", 0.0)


_COLUMNS = (
    Column("test_accuracy", "test accuracy", "{:.4f}".format,
           help="Accuracy on test nodes at the best validation, from sampled neighbours."),
    Column("best_epoch", "best epoch", format_count, help="Epoch of the best validation."),
    Column("epoch_s", "epoch time", format_seconds,
           help="Mean of an epoch: computing and waiting for data."),
    Column("waiting", "waiting for data", format_percent,
           help="Share of an epoch in which training stood still until a batch was there."),
    Column("memory_hits", "memory hits", format_percent,
           help="Share of the rows that memory served."),
    Column("bytes_per_epoch", "read per epoch", format_bytes_or_dash,
           help="Bytes that rank 0 read from the disk for the rows that were in no cache."),
    Column("amplification", "read amplification", format_ratio,
           help="Those bytes over the bytes of the rows themselves; 1 is the best."),
    Column("preparing_s", "preparing", format_seconds,
           help="Sampling, planning and packing, once."),
    Column("wall_s", "wall time", format_seconds, help="Training, everything included."),
)  # fmt: skip


def graph_text_sections(
    runs: Sequence[GraphRun], summaries: Sequence[GraphSummary]
) -> list[PageSection]:
    """Return what the text form shows: a table, where the time went and the rows came from."""
    shares = tuple(
        BarRow(
            label=run.label,
            total=" / ".join(format_percent(share) for share in run.hit_rates.values() if share),
            segments=tuple((level, share, "") for level, share in run.hit_rates.items()),
        )
        for run in summaries
        if run.hit_rates
    )
    shown: dict[str, PagePart] = {
        "": figure_table(summaries, _COLUMNS),
        "Where each second of rank 0 went": _stage_bars(summaries),
        "Where the feature rows came from": BarChart(rows=shares, kinds=tuple(LEVEL_NAMES.items())),
    }
    notes = tuple(TextBlock(f"note: {text}") for text in run_notes(runs))
    return [
        *(PageSection(heading=heading, parts=(part,)) for heading, part in shown.items()),
        PageSection(heading="", parts=notes),
    ]


def graph_sections(
    runs: Sequence[GraphRun], summaries: Sequence[GraphSummary]
) -> list[PageSection]:
    """Return what the page shows of the runs, in its order."""
    plans = [
        TextBlock(run.plan_text, heading=run.label, verbatim=True) for run in runs if run.plan_text
    ]
    return [
        PageSection(
            key="graphs",
            heading="Graph neural networks",
            how="One row per run of fivefold gnn train. A run whose features lie on disk is as "
            "fast as one in memory where it does not wait for data.",
            parts=(figure_table(summaries, _COLUMNS), *map(TextBlock, run_notes(runs))),
        ),
        _curves(runs),
        PageSection(
            key="graph-seconds",
            heading="Where each second went",
            how="Wall time of rank 0, split by what its training thread did. Orange is time in "
            "which training stood still because the next batch was not there yet. All bars have "
            "the same scale.",
            parts=(_stage_bars(summaries), _pipeline(summaries)),
        ),
        PageSection(
            key="graph-levels",
            heading="Where the rows came from",
            how="Bytes of feature rows that each level handed over, over the whole run of rank 0.",
            parts=(_level_bars(summaries), _disk_table(summaries)),
        ),
        PageSection(
            key="graph-plan",
            heading="Plan",
            how="What goes where, and what that was predicted to cost, before anything was "
            "written.",
            parts=(*plans, TextBlock("")),
        ),
        PageSection(
            key="graph-setting",
            heading="Data, machine, versions",
            parts=(_facts(runs), *config_texts(runs), *command_texts(runs)),
        ),
    ]


_STAGE_KINDS = {"data": "exposed_communication"}  # training stands still


def _curves(runs: Sequence[GraphRun]) -> PageSection:
    losses = []
    for index, run in enumerate(runs):
        points = [(point.step, point.loss) for point in run.train if math.isfinite(point.loss)]
        losses.append(Curve.through(run.label, thinned(points), colour=_colour(index), width=1.4))
    loss = CurveChart(
        key="graph-loss",
        x_name="optimizer step",
        y_name="training loss (nats)",
        curves=tuple(losses) if any(run.train for run in runs) else (),
        x_from_zero=True,
        caption="Training loss. Of rank 0's batches.",
    )
    charts = (
        _accuracy_chart(runs, "wall_s", "training time (s)", "Against training time. The curve "
                        "further left gets there sooner."),
        _accuracy_chart(runs, "epoch", "epoch", "Against epoch. Speed taken away: whether fixed "
                        "samples cost accuracy."),
    )  # fmt: skip
    return PageSection(
        key="graph-curves",
        heading="Accuracy and loss",
        how="Accuracy on nodes that were held out, judged from sampled neighbours that are the "
        "same in every validation.",
        parts=(SideBySide(parts=charts), loss),
    )


def _accuracy_chart(runs: Sequence[GraphRun], field: str, x_name: str, caption: str) -> CurveChart:
    curves = []
    for index, run in enumerate(runs):
        points = [(getattr(p, field), p.accuracy) for p in run.validation if p.accuracy is not None]
        texts = tuple(f"{y:.4f} at {x:g}" for x, y in points)
        looks = {"colour": _colour(index), "marker": MARKERS[index % len(MARKERS)]}
        curves.append(Curve.through(run.label, points, texts=texts, width=2.4, **looks))
    return CurveChart(
        key="graph-accuracy-wall" if field == "wall_s" else "graph-accuracy-epoch",
        x_name=x_name,
        y_name="validation accuracy",
        curves=tuple(curves) if any(run.validation for run in runs) else (),
        x_from_zero=True,
        caption=caption,
    )


def _colour(index: int) -> str:
    colours = (COLOURS[0], ORANGE, *COLOURS[1:])
    return colours[index % len(colours)]


def _stage_bars(summaries: Sequence[GraphSummary]) -> BarChart:
    rows = [
        seconds_bar(run.label, run.stages, STAGE_NAMES, kinds=_STAGE_KINDS)
        for run in summaries
        if run.stages
    ]
    kinds = tuple((_STAGE_KINDS.get(stage, stage), name) for stage, name in STAGE_NAMES.items())
    return BarChart(rows=tuple(rows), kinds=kinds)


def _pipeline(summaries: Sequence[GraphSummary]) -> BarChart:
    """Return one bar per background stage, to the scale of its run's training time."""
    rows = []
    for run in summaries:
        longest = max([*run.pipeline.values(), run.wall_s], default=0.0)
        for index, (stage, seconds) in enumerate(run.pipeline.items()):
            kind = "other" if stage.startswith("wait") else "data"
            segment = (kind, seconds / longest, f"{stage}: {format_seconds(seconds)}")
            label = f"{run.label}: " if not index else ""
            rows.append(BarRow(label=f"{label}{stage}", total=format_seconds(seconds),
                               segments=(segment,)))  # fmt: skip
    return BarChart(
        rows=tuple(rows),
        full=1.0,
        tight=True,
        caption="Behind the training thread: seconds of the stages of the data path in the "
        "background, each to the scale of its run's wall time; grey is waiting. Where training "
        "waits, the longest green one is what it waits for.",
    )


def _level_bars(summaries: Sequence[GraphSummary]) -> BarChart:
    rows = tuple(
        BarRow(
            label=run.label,
            total=_bytes(sum(run.data.rows.values()), run),
            segments=tuple(
                (level, float(rows), f"{LEVEL_NAMES.get(level, level)}: {_bytes(rows, run)}")
                for level, rows in run.data.rows.items()
                if rows
            ),
        )
        for run in summaries
        if run.data.rows
    )
    return BarChart(rows=rows, kinds=_levels(summaries))


def _levels(summaries: Sequence[GraphSummary]) -> Kinds:
    """Return the levels that served any run."""
    used = {level for run in summaries for level, rows in run.data.rows.items() if rows}
    return tuple((level, name) for level, name in LEVEL_NAMES.items() if level in used)


def _disk_table(summaries: Sequence[GraphSummary]) -> DataTable:
    """Return per packed run: hits by level, bytes read and predicted, requests, their mean size."""
    columns = [
        Column("label", "run"),
        *(
            Column(level, name, format_percent, lambda run, level=level: run.hit_rates.get(level))
            for level, name in _levels(summaries)
        ),
        Column("bytes_per_epoch", "read per epoch", format_bytes_or_dash,
               help="Rank 0, cold rows only"),
        Column("predicted_bytes_per_epoch", "predicted per epoch", format_bytes_or_dash,
               help="By the plan, for all ranks"),
        Column("requests", "requests per epoch", format_count, _requests_per_epoch),
        Column("mean_request", "mean request", format_bytes_or_dash, _mean_request_bytes),
        Column("amplification", "amplification", format_ratio),
    ]  # fmt: skip
    records = [record_of(columns, run) for run in summaries if run.data.rows]
    caption = "Share of the rows by level, and what was read from the disk"
    return row_table(columns, records, blank=UNKNOWN, caption=caption)


def _mean_request_bytes(run: GraphSummary) -> float | None:
    return run.data.bytes_read / run.data.requests if run.data.requests else None


def _requests_per_epoch(run: GraphSummary) -> float | None:
    if run.bytes_per_epoch is None:  # no epoch is whole yet
        return None
    mean = _mean_request_bytes(run)
    return run.bytes_per_epoch / mean if mean else 0.0


def _facts(runs: Sequence[GraphRun]) -> DataTable:
    writers: tuple[tuple[str, Writer], ...] = (
        ("data set", lambda run: run.manifest.dataset.name),
        ("nodes", lambda run: format_count(run.manifest.dataset.nodes)),
        ("edges", lambda run: format_count(run.manifest.dataset.edges)),
        ("features", _features),
        ("training nodes", lambda run: format_count(run.manifest.dataset.train)),
    )
    return fact_table(runs, writers)


def _features(run: GraphRun) -> str:
    data = run.manifest.dataset
    if data.feature_bytes:
        sizes = data.feature_bytes.items()
        return ", ".join(f"{format_bytes_or_dash(size)} of {name}" for name, size in sizes)
    return f"{data.dim} x {data.dtype}, {format_bytes_or_dash(data.nodes * data.row_bytes)}"


def _bytes(rows: int, run: GraphSummary) -> str:
    return format_bytes_or_dash(rows * run.data.row_bytes)
