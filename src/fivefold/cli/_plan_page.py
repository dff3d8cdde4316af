"""The page of ``fivefold plan``: the fastest splits of one job, their time and their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fivefold.cli._later import later
from fivefold.units import format_bytes, format_duration_s

with later():
    from fivefold.report.page import (
        BarChart,
        BarRow,
        Curve,
        CurveChart,
        DataTable,
        Page,
        PageSection,
    )
    from fivefold.strategy import Cluster, Job, ParallelPlan, PlanPrediction, PlanSearchResult
    from fivefold.strategy.plan import degrees_of, settings_of


_MEMORY = (
    ("weights_bytes", "weights", "job0"),
    ("gradients_bytes", "gradients", "job1"),
    ("optimizer_bytes", "optimizer", "job2"),
    ("activations_bytes", "activations", "job3"),
    ("working_bytes", "buffers", "job4"),
    ("reserved_bytes", "the stack's own", "other"),
)
_TIME_COLOURS = {
    "compute_s": "compute", "recompute_s": "forward", "tensor_s": "job1", "context_s": "job2",
    "expert_s": "job3", "pipeline_p2p_s": "job4", "pipeline_bubble_s": "other", "data_s": "job6",
    "offload_s": "job7", "optimizer_s": "job5", "overhead_s": "least",
}  # fmt: skip
PARTS = {
    "compute_s": "compute", "recompute_s": "recomputation", "tensor_s": "tensor communication",
    "context_s": "context communication", "expert_s": "dispatch, combine",
    "pipeline_p2p_s": "pipeline p2p", "pipeline_bubble_s": "pipeline bubble",
    "data_s": "gradients, parameters", "offload_s": "host transfers",
    "optimizer_s": "optimizer", "overhead_s": "overhead, lag",
}  # fmt: skip
"""What the parts of a predicted iteration are called."""
_GIB = 2**30
_PREDICTED = (
    "Predicted by a cost model; its errors on published measurements are in the guide of planning. "
    "Nothing was run."
)


def split_page(
    job: Job,
    cluster: Cluster,
    best: Sequence[PlanPrediction],
    *,
    result: PlanSearchResult | None,
    command: str,
) -> Page:
    """Return the page of a search, or of one plan that was judged.

    Args:
        job: The job.
        cluster: Where it runs.
        best: The fastest plans.
        result: The search; None where a plan was given.
        command: How to make it again.
    """
    first = best[0]
    num_gpus = first.plan.num_gpus
    labels = [f"{number + 1}: {degrees_of(one.plan)}" for number, one in enumerate(best)]
    sections = [
        PageSection(
            heading="Fastest plans" if result else "The plan",
            how="d data, t tensor, p pipeline, c context, e expert parallelism, b micro-batch. "
            "MFU counts the model's FLOPs without recomputation.",
            parts=(_table(best, labels),),
        ),
        PageSection(heading="Where the time of an iteration goes", parts=(_times(best, labels),)),
        PageSection(
            heading="What fills the memory of the fullest GPU",
            how=f"Each has {cluster.device.memory_bytes / _GIB:.1f} GiB.",
            parts=(_memories(best, labels, cluster.device.memory_bytes),),
        ),
        PageSection(
            heading="Settings of the fastest",
            how="Those that are not the default; --output writes all of them.",
            parts=(_settings(first.plan),),
        ),
    ]
    if result is not None:
        sections += _search_sections(result)
    return Page(
        title=f"{job.model.name} on {num_gpus} GPUs of {cluster.name}",
        finding=f"An iteration of {first.plan.global_batch:,} samples takes "
        f"{format_duration_s(first.time_s)} with {degrees_of(first.plan)} "
        f"({settings_of(first.plan)}).",
        tiles=(
            (format_duration_s(first.time_s), "an iteration", degrees_of(first.plan)),
            (f"{100 * first.mfu:.1f} %", "model FLOPs utilization", "of the peak"),
            (f"{first.memory.total_bytes / _GIB:.1f} GiB", "memory", "on the fullest GPU"),
            *([] if result is None else [_searched(result)]),
        ),
        caveats=(_PREDICTED,),
        sections=tuple(sections),
        command=command,
    )


def _searched(result: PlanSearchResult) -> tuple[str, str, str]:
    more = f"{result.num_evaluated:,} evaluated in {format_duration_s(result.seconds)}"
    return f"{result.num_plans:,}", "plans searched", more


def _table(best: Sequence[PlanPrediction], labels: Sequence[str]) -> DataTable:
    rows = tuple(
        (
            label, format_duration_s(one.time_s), f"{100 * one.mfu:.1f} %",
            f"{one.memory.total_bytes / _GIB:.1f} GiB", settings_of(one.plan),
        )
        for label, one in zip(labels, best, strict=True)
    )  # fmt: skip
    columns = (("split", ""), ("iteration", ""), ("MFU", ""), ("memory", ""), ("how", ""))
    return DataTable(columns=columns, rows=rows, text_columns=(4,), marked=(0,))


def _times(best: Sequence[PlanPrediction], labels: Sequence[str]) -> BarChart:
    rows, used = [], set()
    for label, one in zip(labels, best, strict=True):
        taken = {name: seconds for name in PARTS if (seconds := getattr(one.time, name)) > 0}
        used |= set(taken)
        segments = tuple(
            (_TIME_COLOURS[name], seconds, f"{PARTS[name]} {format_duration_s(seconds)}")
            for name, seconds in taken.items()
        )
        total = format_duration_s(one.time_s)
        rows.append(BarRow(label=label, total=total, segments=segments))
    kinds = tuple((_TIME_COLOURS[name], text) for name, text in PARTS.items() if name in used)
    return BarChart(rows=tuple(rows), kinds=kinds)


def _memories(
    best: Sequence[PlanPrediction], labels: Sequence[str], capacity_bytes: float
) -> BarChart:
    rows = []
    for label, one in zip(labels, best, strict=True):
        segments = tuple(
            (kind, size, f"{text} {format_bytes(size)}")
            for name, text, kind in _MEMORY
            if (size := float(getattr(one.memory, name))) > 0
        )
        total = one.memory.total_bytes
        text = f"{total / _GIB:.1f} GiB, {100 * total / capacity_bytes:.0f} %"
        rows.append(BarRow(label=label, total=text, segments=segments))
    return BarChart(rows=tuple(rows), kinds=tuple((kind, text) for _, text, kind in _MEMORY))


def _settings(plan: ParallelPlan) -> DataTable:
    """Return what is not as by default, and the sizes."""
    rows = tuple(
        (field.name.replace("_", " "), str(value))
        for field in dataclasses.fields(plan)
        if (value := getattr(plan, field.name)) != field.default
    )
    return DataTable(columns=(("setting", ""), ("value", "")), rows=rows, text_columns=(1,))


def _search_sections(result: PlanSearchResult) -> list[PageSection]:
    shown = (("others", result.front[1:], "#1f83c8"), ("fastest", result.front[:1], "#d55e00"))
    front = CurveChart(
        key="front",
        x_name="iteration in s",
        y_name="memory in GiB",
        curves=tuple(_points(*one) for one in shown if one[1]),
    )
    reasons = sorted(result.ruled_out.items(), key=lambda item: -item[1])
    ruled = DataTable(
        columns=(("plans", ""), ("reason", "")),
        rows=tuple((f"{count:,}", reason) for reason, count in reasons),
        text_columns=(1,),
    )
    how = "Plans that no other beats in both; the fastest is marked. A pointer over one names it."
    sections = []
    if result.front:
        sections.append(PageSection(heading="Time against memory", how=how, parts=(front,)))
    if reasons:
        sections.append(PageSection(heading="What was ruled out", parts=(ruled,)))
    return sections


def _points(name: str, found: Sequence[PlanPrediction], colour: str) -> Curve:
    points = [(one.time_s, one.memory.total_bytes / _GIB) for one in found]
    texts = tuple(f"{degrees_of(one.plan)}: {one.time_s:.4g} s" for one in found)
    return Curve.through(name, points, texts=texts, colour=colour, width=0.0, marker="circle")
