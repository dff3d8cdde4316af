"""What each co-design buys: all sixteen combinations over many seeds, against B0 and B1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.codesign._page import SIMULATED, change
from fivefold.codesign.arbiter import PlanningOptions, objective_s
from fivefold.codesign.coordinator import plan_cluster
from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import CoDesigns
from fivefold.errors import ConfigurationError, optional_module, require_whole
from fivefold.network.topology import Topology
from fivefold.report.columns import Column, record_of, row_table
from fivefold.report.page import Page, PagePart, PageSection, RangeChart, RangeRow, TextBlock

FloatArray = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
_DRAWS = 2000
_NEAR = 0.06


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One combination over all seeds.

    Ratios are of weighted mean completion times on the same jobs, placement and hash; below 1 is
    better. One seed has no interval.
    """

    label: str
    to_null: float
    to_null_interval: tuple[float, float] | None
    to_best: float
    to_best_interval: tuple[float, float] | None
    tail_to_null: float
    jobs_worse: int
    jobs_worse_than_best: int
    jobs: int
    seeds: int


def ablate(
    topology: Topology,
    make_jobs: Callable[[int], Sequence[JobSpec]],
    *,
    seeds: Iterable[int],
    combinations: Iterable[CoDesigns] | None = None,
    options: PlanningOptions | None = None,
    progress: Progress | None = None,
) -> list[AblationRow]:
    """Plan the same jobs with every combination of co-designs.

    Plans are independent of each other and made where ``joblib.parallel_config`` says: by several
    processes of this machine, by a Dask or a Ray cluster; without it one after another.

    Args:
        topology: The cluster.
        make_jobs: Jobs of a seed.
        seeds: Seeds of the jobs, their placement and the hash of paths.
        combinations: Which ones; None for all sixteen.
        options: How hard the coordinator tries.
        progress: Called with how many plans are made, and how many there are.

    Returns:
        A row per combination on top of the null modules, one for B1, and one for all four on top
        of B1.

    Raises:
        ConfigurationError: There is no seed.
        UnsupportedError: joblib is not installed.

    Examples:
        >>> from fivefold.codesign import synthetic_jobs
        >>> from fivefold.network.topology import fat_tree
        >>> cluster = fat_tree(4)
        >>> def jobs(seed):
        ...     return synthetic_jobs(cluster, number=2, seed=seed, sizes=(4,), iterations=3)
        >>> rows = ablate(cluster, jobs, seeds=[0], combinations=[CoDesigns.none()])
        >>> [(row.label, row.to_null) for row in rows if row.label == "none"]
        [('none', 1.0)]
    """
    chosen = list(CoDesigns.combinations() if combinations is None else combinations)
    numbers = [require_whole("a seed", seed, least=0) for seed in seeds]
    if not numbers:
        message = "an ablation needs a seed or more"
        raise ConfigurationError(message, hint="such as seeds=range(10)")
    joblib = optional_module("joblib", extra="network", use="an ablation")
    jobs_of: dict[int, list[JobSpec]] = {}

    def tasks() -> Iterator[Any]:
        for seed in numbers:
            jobs_of[seed] = list(make_jobs(seed))
            for flags in (*chosen, None):
                yield joblib.delayed(_completions)(topology, jobs_of[seed], flags, seed, options)

    made: dict[tuple[int, CoDesigns | None], tuple[Seconds, Seconds]] = {}
    for seed, flags, *completions in joblib.Parallel(return_as="generator_unordered")(tasks()):
        made[seed, flags] = tuple(completions)
        if progress is not None:
            progress(len(made), len(numbers) * (len(chosen) + 1))
    found: dict[str, list[_Sample]] = {}
    for seed in numbers:
        jobs, (on_best, best) = jobs_of[seed], made[seed, None]
        null = best
        for flags in chosen:
            planned, null = made[seed, flags]
            found.setdefault(flags.label, []).append(_sample(jobs, planned, null, best))
        found.setdefault("B1", []).append(_sample(jobs, best, null, best))
        label = f"B1+{CoDesigns.all().label}"
        found.setdefault(label, []).append(_sample(jobs, on_best, null, best))
    return [_row(label, samples) for label, samples in found.items()]


Seconds = dict[str, float]


def _completions(
    topology: Topology,
    jobs: list[JobSpec],
    flags: CoDesigns | None,
    seed: int,
    options: PlanningOptions | None,
) -> tuple[int, CoDesigns | None, Seconds, Seconds]:
    """Return when jobs end as planned, and under the baseline; None: all four on top of B1."""
    if flags is None:
        found = plan_cluster(topology, jobs, start="best", seed=seed, options=options)
    else:
        found = plan_cluster(topology, jobs, flags, seed=seed, options=options)
    planned, before = found.outcome.completion_s, found.baseline_outcome.completion_s
    return seed, flags, dict(planned), dict(before)


_Sample = tuple[float, float, float, int, int, int]
"""Ratios to B0, to B1 and of the tails; jobs worse than under B0 and B1, and all."""


def _sample(jobs: Sequence[JobSpec], after: Seconds, null: Seconds, best: Seconds) -> _Sample:
    ours = objective_s(jobs, after)
    return (
        ours / objective_s(jobs, null),
        ours / objective_s(jobs, best),
        float(np.percentile([*after.values()], 95) / np.percentile([*null.values()], 95)),
        sum(after[name] > null[name] * (1 + 1e-6) for name in after),
        sum(after[name] > best[name] * (1 + 1e-6) for name in after),
        len(jobs),
    )


def _row(label: str, samples: Sequence[_Sample]) -> AblationRow:
    to_null, to_best, tail, worse, worse_than_best, jobs = np.array(samples, dtype=np.float64).T
    return AblationRow(
        label=label, to_null=float(to_null.mean()), to_null_interval=_bootstrap(to_null),
        to_best=float(to_best.mean()), to_best_interval=_bootstrap(to_best),
        tail_to_null=float(tail.mean()), jobs_worse=int(worse.sum()),
        jobs_worse_than_best=int(worse_than_best.sum()), jobs=int(jobs.sum()), seeds=len(samples),
    )  # fmt: skip


def _bootstrap(values: FloatArray) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the mean; None for one value, which has none."""
    if len(values) < 2:
        return None
    draw = np.random.default_rng(0)
    means = draw.choice(values, (_DRAWS, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def ablation_page(rows: Sequence[AblationRow], *, cluster: str, command: str = "") -> Page:
    """Return the page of an ablation: what each combination of co-designs buys.

    Args:
        rows: What ``ablate`` found.
        cluster: Name of the cluster.
        command: How to make it again.

    Raises:
        ConfigurationError: There is no row.

    Examples:
        >>> row = AblationRow(
        ...     label="V", to_null=0.9, to_null_interval=(0.8, 1.0), to_best=1.0,
        ...     to_best_interval=(0.9, 1.1), tail_to_null=0.95, jobs_worse=0,
        ...     jobs_worse_than_best=1, jobs=8, seeds=2,
        ... )
        >>> ablation_page([row], cluster="fat-tree").tiles[0]
        ('-10.0 %', 'mean completion time', 'V against B0, today')
    """
    if not rows:
        message = "an ablation without rows has no page"
        raise ConfigurationError(message, hint="give what ablate() returned")
    combined = [row for row in rows if row.label != "B1"]
    best = min(combined or rows, key=lambda row: row.to_null)
    alone = next((row for row in rows if row.label == "B1"), None)
    marks = [("B0", 1.0)]
    if alone is not None:  # names that would lie on one another share one
        marks.append(("" if abs(1.0 - alone.to_null) < _NEAR else "B1", alone.to_null))
    bars = _ratio_chart(rows, "to_null", marks)
    against = _ratio_chart([row for row in rows if row.label != "B1"], "to_best", [("B1", 1.0)])
    table: list[PagePart] = [row_table(_COLUMNS, [record_of(_COLUMNS, row) for row in rows])]
    if rows[0].seeds == 1:
        table.append(TextBlock(text="One seed has no interval; --seeds 5 gives one."))
    interval = _interval(best.to_null_interval)
    interval = interval and f" (95 % interval {interval})"
    finding = (
        f"With {best.label} jobs complete in {best.to_null:.3f} of the time that today's "
        f"uncoordinated stack needs{interval}, and in "
        f"{best.to_best:.3f} of what every layer at its best alone needs."
    )
    size = f"{rows[0].seeds} seed{'s' if rows[0].seeds != 1 else ''}, {rows[0].jobs} jobs"
    return Page(
        title=f"what each co-design buys on {cluster}",
        finding=finding,
        tiles=(
            (change(best.to_null), "mean completion time", f"{best.label} against B0, today"),
            (change(best.to_best), "against B1", "every layer at its best alone"),
            (change(best.tail_to_null), "95th percentile", f"{best.label} against B0"),
            (f"{best.jobs_worse} of {best.jobs}", "jobs worse off", f"{best.label} against B0"),
        ),
        caveats=(SIMULATED,),
        sections=(
            PageSection(
                heading="Mean completion time over that of today's stack (B0)",
                how=f"{size}. Below 1 is faster. Bars are means over seeds, whiskers (of several "
                "seeds) 95 % bootstrap intervals. V: layers of a job talk; H: jobs talk; II: links "
                "inside hosts and the fabric are one network; HN: switches may aggregate.",
                parts=(bars,),
            ),
            PageSection(
                heading="The same over every layer at its best alone (B1)", parts=(against,)
            ),
            PageSection(heading="All figures", parts=tuple(table)),
        ),
        command=command,
    )


def _ratio_chart(
    rows: Sequence[AblationRow], of: str, marks: Sequence[tuple[str, float]]
) -> RangeChart:
    bars = []
    for row in rows:
        value, ends = getattr(row, of), getattr(row, f"{of}_interval")
        low, high = ends or (value, value)
        bars.append(RangeRow(label=row.label, value=value, low=low, high=high, text=f"{value:.3f}"))
    return RangeChart(rows=tuple(bars), marks=tuple(marks))


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


_COLUMNS = (
    Column("label", "co-designs"),
    Column("to_null", "to B0", "{:.3f}".format,
           help="Mean over seeds of the ratio of mean completion times"),
    Column("to_null_interval", "95 % interval", _interval, help="Bootstrap over seeds"),
    Column("to_best", "to B1", "{:.3f}".format),
    Column("to_best_interval", "95 % interval", _interval),
    Column("tail_to_null", "tail to B0", "{:.3f}".format, help="Ratio of the 95th percentiles"),
    Column("jobs_worse", "worse than B0", str, lambda row: f"{row.jobs_worse} of {row.jobs}",
           "Jobs that end later"),
    Column("jobs_worse_than_best", "worse than B1", str,
           lambda row: f"{row.jobs_worse_than_best} of {row.jobs}"),
)  # fmt: skip
