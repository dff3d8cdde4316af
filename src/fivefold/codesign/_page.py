"""Pages about plans of a cluster: what ``fivefold.report`` draws of a result.

Words and figures only; how they look is the report's business. The pages need matplotlib for the
picture of the topology, as ``fivefold topology draw`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fivefold.codesign.arbiter import objective_s
from fivefold.codesign.coordinator import CoDesignResult
from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.page_lanes import job_timeline, layer_timelines, link_timeline, unrolled
from fivefold.codesign.plans import DecisionRecord, JobPlan
from fivefold.codesign.simulate import iteration_of
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology, draw_topology
from fivefold.report.columns import Column, record_of, row_table
from fivefold.report.page import (
    BarChart,
    BarRow,
    DataTable,
    Decision,
    DecisionLog,
    Page,
    PagePart,
    PageSection,
    picture_of,
)
from fivefold.units import format_duration_s

SIMULATED = (
    "Simulated by a fluid model: bandwidth-bound phases, no queues, no packet loss. Nothing was "
    "run for real."
)

_NO_CHANGE = 5e-4


def change(ratio: float) -> str:
    """Return a ratio as a change in percent; none where it would round to none."""
    if abs(ratio - 1) < _NO_CHANGE:
        return "0 %"
    return f"{100 * (ratio - 1):+.1f} %"


def flow_words(plan: JobPlan, baseline: JobPlan) -> str:
    """Describe a plan's layer 4 where it differs from the baseline's."""
    words = [f"class {plan.priority}"] if plan.priority else []
    if plan.shift_s:
        words.append(f"{format_duration_s(plan.shift_s)} later")
    moved = sum(path != baseline.paths.get(edge) for edge, path in plan.paths.items())
    if moved:
        words.append(f"{moved} path{'s' if moved != 1 else ''} not as hashed")
    return ", ".join(words) or "as today"


def _choice(record: DecisionRecord) -> Decision:
    taken = not record.decision.startswith("not ")
    alternatives = tuple(sorted(record.alternatives.items(), key=lambda item: item[1]))
    return Decision(
        who=record.layer,
        about=record.entity,
        decision=record.decision.removeprefix("not "),
        taken=taken,
        alternatives=alternatives,
        chosen=_chosen(record, taken=taken),
        inputs=record.inputs,
        allowed_by=record.co_designs,
        round=record.round,
    )


def _chosen(record: DecisionRecord, *, taken: bool) -> str | None:
    """Return the alternative that was decided for; its name may say more than the decision's."""
    if not taken:
        return "as before" if "as before" in record.alternatives else None
    if record.decision in record.alternatives:
        return record.decision
    fitting = [name for name in record.alternatives if record.decision in name]
    return min(fitting, key=lambda name: record.alternatives[name], default=None)


_LOADS = "Share of each link's rate in use over the whole run"
_MOST_BARS = 16  # jobs


def plan_page(
    topology: Topology,
    jobs: Sequence[JobSpec],
    found: CoDesignResult,
    *,
    measured: Mapping[str, float] | None = None,
    command: str = "",
    pictures: bool = True,
) -> Page:
    """Return the page of a planned cluster, and of its execution where one was measured.

    Args:
        topology: The cluster.
        jobs: The jobs.
        found: What ``plan_cluster`` found for them.
        measured: Seconds per iteration of each job in a real run; None where there was none.
        command: How to make it again.
        pictures: Whether links and timelines are drawn; a terminal shows neither.

    Raises:
        ConfigurationError: A job was not measured.
        UnsupportedError: Pictures are wanted, and matplotlib is not installed.

    Examples:
        >>> from fivefold.codesign import plan_cluster
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layers = (LayerCost(forward_s=0.5, backward_s=1.0, gradient_bytes=10**9),) * 2
        >>> jobs = [JobSpec(job_id=n, ranks=(0, 1), layers=layers, iterations=9) for n in "ab"]
        >>> cluster = switch(2, bandwidth="1 GB/s")
        >>> page = plan_page(cluster, jobs, plan_cluster(cluster, jobs))
        >>> [section.heading for section in page.sections][:2]
        ['Jobs', 'What the links carry']
    """
    missing = [job.job_id for job in jobs if measured is not None and job.job_id not in measured]
    if missing:
        raise ConfigurationError(f"job {missing[0]!r} was not measured", hint="measure all jobs")
    drawn = _PlanPage(topology, jobs, found, measured)
    sections = [] if measured is None else [drawn.reality(measured)]
    sections.append(PageSection(heading="Jobs", parts=(drawn.job_table(), drawn.job_bars())))
    if pictures:
        sections += [drawn.pictures(), *drawn.timelines()]
    sections.append(
        PageSection(
            heading="Who decided what",
            how="In the order in which layers spoke, with what they knew and whose it was. Seconds "
            "of a job's own layer are those of its iteration alone on the network; seconds of all "
            "jobs are their weighted mean completion.",
            parts=(DecisionLog(decisions=tuple(map(_choice, found.decisions))),),
        )
    )
    return Page(
        title=f"{len(jobs)} job{'s' if len(jobs) != 1 else ''} on {topology.name}",
        finding=drawn.finding(),
        tiles=drawn.tiles(),
        caveats=() if measured is not None else (SIMULATED,),
        sections=tuple(sections),
        command=command,
    )


class _PlanPage:
    """What a page says of a planned cluster."""

    def __init__(
        self, topology: Topology, jobs: Sequence[JobSpec], found: CoDesignResult,
        measured: Mapping[str, float] | None,
    ) -> None:  # fmt: skip
        self.topology, self.jobs, self.found = topology, jobs, found
        self.before_s = objective_s(jobs, found.baseline_outcome.completion_s)
        self.after_s = found.mean_completion_s(jobs)
        iteration_s = found.outcome.iteration_s
        # How far each measured iteration is off the predicted one, as a share.
        self.errors = [abs(measured[n] / iteration_s[n] - 1) for n in iteration_s if measured]
        self.variants = [("planned", found.plan, found.outcome)]
        if found.plan != found.baseline:
            self.variants.append(("baseline", found.baseline, found.baseline_outcome))

    def finding(self) -> str:
        """Return the page in a sentence or two."""
        many = len(self.jobs) > 1
        who, mean = ("Jobs complete", " on average") if many else ("The job completes", "")
        after = format_duration_s(self.after_s)
        if self.after_s >= self.before_s * (1 - 1e-9):
            text = "The plan is the baseline: nothing was found that helps. "
            text += f"{who} in {after}{mean}."
        else:
            share = 100 * (1 - self.after_s / self.before_s)
            times = f"{after} instead of {format_duration_s(self.before_s)}{mean}"
            text = f"{who} in {times}, {share:.1f} % sooner."
            worse = ", ".join(self.found.worse)
            text += (f" Worse off: {worse}." if worse else " Nobody is worse off.") if many else ""
        if not self.errors:
            return text
        off = f"{100 * float(np.mean(self.errors)):.1f} %"
        real = f"Measured iterations are {off} off the predicted ones"
        return f"{real}{' in the mean' if many else ''}. {text}"

    def tiles(self) -> tuple[tuple[str, str, str], ...]:
        """Return the figures on top."""
        found = self.found
        tiles = [
            (change(self.after_s / self.before_s), "mean completion", "planned against baseline"),
            (f"{len(found.worse)} of {len(self.jobs)}", "jobs worse off",
             "than under the baseline"),
        ]  # fmt: skip
        if self.errors:
            against = "measured against predicted"
            mean, most = float(np.mean(self.errors)), max(self.errors)
            return ((f"{100 * mean:.1f} %", "off in the mean", against),
                    (f"{100 * most:.1f} %", "off at worst", against), *tiles)  # fmt: skip
        return (
            *tiles,
            (str(len(found.decisions)), "decisions", "each with its reasons, below"),
            (str(found.simulations), "simulations", "while planning"),
        )

    def job_table(self) -> DataTable:
        """Return times and decisions of each job."""
        split = any(job.splits for job in self.jobs)
        columns = [column for column in _JOB_COLUMNS if split or column.key != "split"]
        plans = self.found.plan.jobs, self.found.baseline.jobs
        times_s = self.found.baseline_outcome.iteration_s, self.found.outcome.iteration_s
        records = [
            record_of(columns, job, *(of[job.job_id] for of in (*plans, *times_s)))
            for job in self.jobs
        ]
        caption = f"Seconds per iteration on {self.topology.name}, simulated"
        return row_table(columns, records, caption=caption)

    def job_bars(self) -> BarChart:
        """Compute and waiting of an iteration, baseline above plan."""
        rows, found = [], self.found
        before_s, after_s = found.baseline_outcome.iteration_s, found.outcome.iteration_s
        variants = (("baseline", before_s, found.baseline), ("planned", after_s, found.plan))
        chosen = sorted(
            self.jobs, key=lambda job: -abs(after_s[job.job_id] / before_s[job.job_id] - 1)
        )[:_MOST_BARS]
        for job in (job for job in self.jobs if job in chosen):
            for name, iteration_s, plan in variants:
                total_s = iteration_s[job.job_id]
                compute_s = min(total_s, _compute_s(job, plan.jobs[job.job_id]))
                waits_s = total_s - compute_s
                share = 100 * waits_s / total_s
                rows.append(
                    BarRow(
                        label=f"{job.job_id}, {name}",
                        total=f"{format_duration_s(total_s)}, waits {share:.0f} %",
                        segments=(
                            ("compute", compute_s, f"computes {format_duration_s(compute_s)}"),
                            (
                                "exposed_communication",
                                waits_s,
                                f"waits {format_duration_s(waits_s)}",
                            ),
                        ),
                    )
                )
        kinds = (("compute", "compute"), ("exposed_communication", "waiting for communication"))
        caption = "Where an iteration's time goes."
        if len(self.jobs) > _MOST_BARS:
            caption += f" The {_MOST_BARS} jobs that the plan changes most."
        return BarChart(rows=tuple(rows), kinds=kinds, caption=caption)

    def pictures(self) -> PageSection:
        """Draw the share of each link in use."""
        parts = []
        for name, _, outcome in self.variants:
            rates = self.topology.capacities_bytes_per_s
            shares = outcome.result.link_bytes / rates / outcome.result.total_s
            heading = f"{name.capitalize()}: {_LOADS.lower()}"
            loads = np.minimum(shares, 1.0)
            parts.append(
                picture_of(draw_topology(self.topology, link_loads=loads, title=heading), heading)
            )
        return PageSection(
            heading="What the links carry",
            how=f"{_LOADS}: what is dark is the bottleneck. Every direction has its own line, to "
            "the right as seen by the traffic.",
            parts=tuple(parts),
        )

    def timelines(self) -> list[PageSection]:
        """Return compute, messages and links over time."""
        sections, jobs, topology = [], self.jobs, self.topology
        for name, plan, outcome in self.variants:
            window = unrolled(topology, jobs, plan, outcome)
            if window is None:
                how = "One iteration of all jobs has too many transfers to be drawn here; the "
                how += "Perfetto timeline of fivefold simulate --output has them."
                sections.append(PageSection(heading=f"Over time, {name}", how=how, parts=()))
                continue
            links = link_timeline(window, jobs, topology)
            parts: list[PagePart] = [job_timeline(window, jobs), *([links] if links else [])]
            parts += layer_timelines(window, jobs) if name == "planned" else []
            until = format_duration_s(window.end_s - window.start_s)
            how = f"{until}, from {format_duration_s(window.start_s)} after the start on."
            if not window.whole:
                how += " Not all jobs run within it."
            sections.append(PageSection(heading=f"Over time, {name}", how=how, parts=tuple(parts)))
        return sections

    def reality(self, measured: Mapping[str, float]) -> PageSection:
        """Compare predicted and measured iterations."""
        bars, rows = [], []
        for job in self.jobs:
            predicted, real = self.found.outcome.iteration_s[job.job_id], measured[job.job_id]
            off = change(real / predicted)
            for kind, value in (("predicted", predicted), ("measured", real)):
                text = format_duration_s(value)
                total = text if kind == "predicted" else f"{text}, {off}"
                bars.append(
                    BarRow(
                        label=job.job_id if kind == "predicted" else "",
                        total=f"{total} {kind}",
                        segments=((kind, value, f"{kind} {text}"),),
                    )
                )
            rows.append((job.job_id, format_duration_s(predicted), format_duration_s(real), off))
        return PageSection(
            heading="Predicted and measured",
            how="Seconds per iteration. Compute is a sleep of the planned length, reductions are "
            "real messages over links of the emulated cluster, each with its own rate.",
            parts=(
                BarChart(
                    rows=tuple(bars), kinds=(("predicted", "predicted"), ("measured", "measured"))
                ),
                DataTable.of(("job", "predicted", "measured", "off"), rows),
            ),
        )


def _compute_s(job: JobSpec, plan: JobPlan) -> float:
    """Return seconds per iteration in which a rank of the job computes, whatever it waits for."""
    graph = iteration_of(job, plan, lambda _kind, _size_bytes: 0.0)  # messages are not asked
    return sum(task.duration_s for task in graph.compute if not task.task_id.startswith("wait"))


# Each is read from a job, its plan, that of the baseline, and seconds without and with the plan.
_JOB_COLUMNS = (
    Column("job_id", "job"),
    Column("ranks", "ranks", str, lambda job, *_: len(job.ranks), "Processes of the job"),
    Column("before_s", "baseline", format_duration_s, lambda *row: row[-2],
           "Seconds per iteration without coordination"),
    Column("after_s", "planned", format_duration_s, lambda *row: row[-1],
           "Seconds per iteration under the plan"),
    Column("change", "change", change, lambda *row: row[-1] / row[-2],
           "Planned against baseline; below 0 is faster"),
    Column("computes", "computes", lambda share: f"{100 * share:.0f} %",
           lambda job, plan, *row: _compute_s(job, plan) / row[-1],
           "Share of a planned iteration in which the job computes"),
    Column("split", "layer 1: split", str,
           lambda job, plan, *_: job.splits[plan.split].name if job.splits else "data",
           "d data, t tensor, p pipeline, c context, e expert", words=True),
    Column("order", "layer 2: order of communication", str,
           lambda _job, plan, *_: plan.order_words, words=True),
    Column("algorithm", "layer 3: algorithm", str, lambda _job, plan, *_:
           plan.algorithm.replace("_", " ") + (f" at {plan.root}" if plan.root else ""),
           words=True),
    Column("flows", "layer 4: flows", str, lambda _job, *row: flow_words(*row[:2]),
           "Paths of their own, priority class (0 is the most urgent), later start", words=True),
)  # fmt: skip
