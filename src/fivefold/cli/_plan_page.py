"""What ``fivefold plan`` shows: the fastest splits of one job, their time and their memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.cli._plan_columns import PLAN_COLUMNS, plan_record
from fivefold.report.columns import row_table
from fivefold.report.page import (
    BarChart,
    BarRow,
    Curve,
    CurveChart,
    DataTable,
    Folded,
    Page,
    PagePart,
    PageSection,
    TextBlock,
)
from fivefold.strategy import (
    Cluster,
    Job,
    ParallelPlan,
    PlanPrediction,
    PlanSearchResult,
    error_bar,
)
from fivefold.strategy.calibrate import ErrorBar, release_warning
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import DEGREES, degrees_of, settings_of
from fivefold.units import format_bytes, format_duration_s

_MEMORY = {  # names and colours
    "weights_bytes": ("weights", "job0"), "gradients_bytes": ("gradients", "job1"),
    "optimizer_bytes": ("optimizer", "job2"), "activations_bytes": ("activations", "job3"),
    "working_bytes": ("buffers", "job4"), "reserved_bytes": ("the stack's own", "other"),
}  # fmt: skip
_TIME = {  # the same
    "compute_s": ("compute", "compute"), "recompute_s": ("recomputation", "forward"),
    "tensor_s": ("tensor communication", "job1"), "context_s": ("context communication", "job2"),
    "expert_s": ("dispatch, combine", "job3"), "pipeline_p2p_s": ("pipeline p2p", "job4"),
    "pipeline_bubble_s": ("pipeline bubble", "other"), "data_s": ("gradients, parameters", "job6"),
    "offload_s": ("host transfers", "job7"), "optimizer_s": ("optimizer", "job5"),
    "overhead_s": ("overhead, lag", "least"),
}  # fmt: skip
PARTS = {key: name for key, (name, _) in _TIME.items()}
"""What the parts of a predicted iteration are called."""
_GIB = 2**30
_MOST_REASONS = 8
_PREDICTED = (
    "Predicted by a cost model; its errors on published measurements are in the guide of planning. "
    "Nothing was run."
)


@dataclass(frozen=True, kw_only=True)
class FoundPlans:
    """The plans of one job on one cluster: of a search, or the one that was given."""

    job: Job
    cluster: Cluster
    best: tuple[PlanPrediction, ...]
    result: PlanSearchResult | None = None

    @property
    def error_bar(self) -> ErrorBar:
        """Return how far off the first plan's time may be."""
        best = self.best[0]
        return error_bar(self.job.model, self.cluster.device, best.plan, time_s=best.time_s)

    @property
    def release_warning(self) -> str | None:
        """Return what is to be said of the age of the software that is predicted."""
        return age_of(self.cluster)

    @property
    def equal(self) -> tuple[PlanPrediction, ...]:
        """Return the plans that cannot be told apart from the first."""
        bar, first_s = self.error_bar, self.best[0].time_s
        return tuple(one for one in self.best if bar.equal(first_s, one.time_s))

    @property
    def simplest(self) -> int:
        """Return the place of the one of them with the fewest kinds of parallelism, from 0.

        Of several, the one with the fewest settings beside: sharding, recomputation, offloading.
        """
        words = [
            (len(degrees_of(one.plan).split()), _settings_beside(one.plan)) for one in self.equal
        ]
        return words.index(min(words))


def _settings_beside(plan: ParallelPlan) -> int:
    moved = (plan.offload_weights, plan.offload_activations, plan.offload_optimizer)
    return plan.zero + (plan.shard is not None) + (plan.recompute != "none") + sum(moved)


def age_of(cluster: Cluster) -> str | None:
    """Return what is to be said today of the age of a cluster's software."""
    return release_warning(cluster.device, today=dt.datetime.now(dt.UTC).date())


def split_page(found: FoundPlans) -> Page:
    """Return the page of a search, or of one plan that was judged."""
    job, cluster, best, result = found.job, found.cluster, found.best, found.result
    first = best[0]
    labels = [f"{number + 1}: {degrees_of(one.plan)}" for number, one in enumerate(best)]
    capacity_bytes = cluster.device.memory_bytes
    times = [format_duration_s(one.time_s) for one in best]
    memories = [
        f"{one.memory.total_bytes / _GIB:.1f} GiB, "
        f"{100 * one.memory.total_bytes / capacity_bytes:.0f} %"
        for one in best
    ]
    of = f"Predicted of {cluster.device.of}."
    doubts = map(TextBlock, (of, *_doubts(found), str(DEGREES)))
    sections = [
        PageSection(
            heading="Fastest plans" if result else "The plan",
            how="MFU counts the model's FLOPs without recomputation.",
            parts=(_table(job.model, best, labels), *doubts),
        ),
        PageSection(
            heading="Where the time of an iteration goes",
            parts=(
                _bars(labels, times, [one.time for one in best], _TIME, format_duration_s),
                breakdown(
                    {label: getattr(first.time, key) for key, label in PARTS.items()},
                    first.time_s,
                    "of the first",
                ),
            ),
        ),
        PageSection(
            heading="What fills the memory of the fullest GPU",
            how=f"Each has {capacity_bytes / _GIB:.1f} GiB.",
            parts=(_bars(labels, memories, [one.memory for one in best], _MEMORY, format_bytes),),
        ),
        PageSection(
            heading="Settings of the fastest",
            how="Those that are not the default; --output writes all of them.",
            parts=(Folded(title="Settings", part=_settings(first.plan)),),
        ),
    ]
    if result is not None:
        sections += _search_sections(job.model, result)
    millions = job.model.num_parameters / 1e6
    size = f"{millions:.1f} M" if millions < 100 else f"{millions / 1e3:.1f} B"
    return Page(
        title=f"{job.model.name} on {first.plan.num_gpus} GPUs of {cluster.name}",
        finding=f"{job.model.name}, {size} parameters, {first.plan.num_gpus} GPUs of "
        f"{cluster.name}, batch {first.plan.global_batch:,} x {job.model.seq_len:,} tokens: an "
        f"iteration takes {format_duration_s(first.time_s)} with {degrees_of(first.plan)} "
        f"({settings_of(first.plan)}).",
        tiles=_tiles(first, result),
        caveats=tuple(filter(None, (_PREDICTED, found.release_warning))),
        sections=tuple(sections),
    )


def _tiles(
    first: PlanPrediction, result: PlanSearchResult | None
) -> tuple[tuple[str, str, str], ...]:
    tiles = [
        (format_duration_s(first.time_s), "an iteration", degrees_of(first.plan)),
        (f"{100 * first.mfu:.1f} %", "model FLOPs utilization", "of the peak"),
        (f"{first.memory.total_bytes / _GIB:.1f} GiB", "memory", "on the fullest GPU"),
    ]
    if result is not None:
        more = f"{result.num_evaluated:,} evaluated in {format_duration_s(result.seconds)}"
        tiles.append((f"{result.num_plans:,}", "plans searched", more))
    return tuple(tiles)


def _doubts(found: FoundPlans) -> list[str]:
    """Return how far off the first plan may be, and which plans cannot be told apart from it."""
    bar, first_s = found.error_bar, found.best[0].time_s
    low_s, high_s = bar.interval_s(first_s)
    around = f"{low_s:.3g} to {high_s:.3g} s"
    errors = f"the errors of {bar.count} published ones of {bar.sources} sources ({bar.like})"
    lines = [f"nine of ten runs like the first take {around}, by {errors}"]
    equal, place = len(found.equal), found.simplest
    if equal > 1:
        simplest = f"{place + 1}, {degrees_of(found.best[place].plan)}" if place else "the first"
        lines.append(
            f"the first {equal} cannot be told apart: two plans of one job are compared to within "
            f"{100 * bar.plan_share:.0f} %; the simplest of them is {simplest}"
        )
    return lines


def _table(model: ModelSpec, best: Sequence[PlanPrediction], names: Sequence[str]) -> DataTable:
    named = zip(best, names, strict=True)
    records = [plan_record(model, one) | {"split": name} for one, name in named]
    return row_table(PLAN_COLUMNS, records, marked=(0,))


def breakdown(parts_s: Mapping[str, float], whole_s: float, name: str) -> DataTable:
    """Return the parts of a time, with their shares; what does not show is left out."""
    rows = [
        (label, format_duration_s(seconds), f"{100 * seconds / whole_s:.1f} %")
        for label, seconds in parts_s.items()
        if seconds >= 5e-4 * whole_s
    ]
    return DataTable.of((name, "time", "share"), rows)


def _bars(
    labels: Sequence[str], totals: Sequence[str], parts: Sequence[Any],
    looks: Mapping[str, tuple[str, str]], write: Callable[[float], str],
) -> BarChart:  # fmt: skip
    """Return a bar per plan of the parts that it has."""
    rows, used = [], set()
    for label, total, own in zip(labels, totals, parts, strict=True):
        taken = {key: value for key in looks if (value := float(getattr(own, key))) > 0}
        used |= set(taken)
        segments = tuple(
            (looks[key][1], value, f"{looks[key][0]} {write(value)}")
            for key, value in taken.items()
        )
        rows.append(BarRow(label=label, total=total, segments=segments))
    kinds = tuple((colour, name) for key, (name, colour) in looks.items() if key in used)
    return BarChart(rows=tuple(rows), kinds=kinds)


def _settings(plan: ParallelPlan) -> DataTable:
    """Return what is not as by default, and the sizes."""
    rows = tuple(
        (field.name.replace("_", " "), str(value))
        for field in dataclasses.fields(plan)
        if (value := getattr(plan, field.name)) != field.default
    )
    return DataTable.of(("setting", "value"), rows, text_columns=(1,))


def _search_sections(model: ModelSpec, result: PlanSearchResult) -> list[PageSection]:
    reasons = sorted(result.ruled_out.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in reasons[_MOST_REASONS:])
    every = [(reason, f"{count:,}") for reason, count in reasons]
    shown = every[:_MOST_REASONS]
    parts: list[PagePart] = [
        TextBlock(
            f"{result.num_plans:,} plans in {result.seconds:.1f} s: {result.num_evaluated:,} "
            f"evaluated, {result.num_bounded:,} ruled out by bounds"
        )
    ]
    if rest:
        shown.append((f"for {len(reasons) - _MOST_REASONS} other reasons: --json", f"{rest:,}"))
        parts.append(Folded(title="All reasons", part=DataTable.of(("reason", "plans"), every)))
    ruled = PageSection(
        heading="What was ruled out", parts=(*parts, DataTable.of(("reason", "plans"), shown))
    )
    return [_front(model, result), ruled] if result.front else [ruled]


def _front(model: ModelSpec, result: PlanSearchResult) -> PageSection:
    shown = (("others", result.front[1:], "#1f83c8"), ("fastest", result.front[:1], "#d55e00"))
    chart = CurveChart(
        key="front",
        x_name="iteration in s",
        y_name="memory in GiB",
        curves=tuple(_points(*one) for one in shown if one[1]),
    )
    steps: list[PlanPrediction] = []
    for one in result.front:  # each saves a twentieth of the memory of the one before, or more
        if not steps or one.memory.total_bytes < 0.95 * steps[-1].memory.total_bytes:
            steps.append(one)
    return PageSection(
        heading="Time against memory",
        how="Plans that no other beats in both; the fastest is marked. A pointer over one names "
        "it. The table has those that save a twentieth of the memory or more.",
        parts=(chart, _table(model, steps, [degrees_of(one.plan) for one in steps])),
    )


def _points(name: str, found: Sequence[PlanPrediction], colour: str) -> Curve:
    points = [(one.time_s, one.memory.total_bytes / _GIB) for one in found]
    texts = tuple(f"{degrees_of(one.plan)}: {one.time_s:.4g} s" for one in found)
    return Curve.through(name, points, texts=texts, colour=colour, width=0.0, marker="circle")
