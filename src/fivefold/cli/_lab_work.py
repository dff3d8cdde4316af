"""The work of ``fivefold lab`` and ``fivefold execute``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fivefold.cli._options import ArgumentError, seconds_of, show
from fivefold.codesign import ClusterPlan, JobSpec, run_plan
from fivefold.codesign.execute import (
    execution_command,
    lab_options,
    read_measurements,
    read_order,
    write_order,
)
from fivefold.errors import CommunicationError
from fivefold.lab import LabResult, LabSpec, run_lab
from fivefold.lab.capabilities import Capabilities
from fivefold.network.topology import Topology, read_topology
from fivefold.report.page import DataTable
from fivefold.units import format_duration_s

_MTU = 60000  # small frames would cost the hosts' processors more than the job does


def run_in_the_lab(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, *, timeout_s: float
) -> tuple[Mapping[str, float], LabResult]:
    """Run a plan; return the mean seconds per iteration of each job, and all of the run."""
    with tempfile.TemporaryDirectory(prefix="fivefold-execute-") as folder:
        order = Path(folder) / "order.json"
        write_order(order, jobs, plan, topology=topology)
        spec = LabSpec.of_topology(topology, mtu=_MTU, **lab_options(topology, jobs, plan))
        command = execution_command(order)
        result = run_lab(spec, command, timeout_s=timeout_s, stream=False).check()
        found = read_measurements(result.ranks[0].stdout().splitlines())
    if set(found) != {job.job_id for job in jobs}:
        message = "the run ended without measurements"
        raise CommunicationError(message, hint="look at the logs that the lab names")
    return found, result


def show_measured(
    jobs: Sequence[JobSpec],
    plan: ClusterPlan,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    result: LabResult,
) -> None:
    """Write predicted and measured seconds per iteration side by side."""
    rows = []
    for job in jobs:
        before, after = predicted[job.job_id], measured[job.job_id]
        off = f"{100 * (after / before - 1):+.1f} %"
        times = format_duration_s(before), format_duration_s(after)
        rows.append((job.job_id, *times, off, _how(plan, job.job_id)))
    table = DataTable.of(("job", "predicted", "measured", "off", "how"), rows, text_columns=(4,))
    lines = [
        f"{node} aggregated {counts['hits']} chunks and left "
        f"{counts['misses'] + counts['expired']} to the hosts"
        for node, counts in result.aggregation.items()
    ]
    show("Seconds per iteration; compute is a sleep, reductions are real", table, *lines)


def _how(plan: ClusterPlan, job_id: str) -> str:
    own = plan.jobs[job_id]
    words = [f"aggregated at {own.root}" if own.root else f"ring {'-'.join(map(str, own.order))}"]
    if len({other.priority for other in plan.jobs.values()}) > 1:
        words.append(f"class {own.priority}")
    if own.shift_s:
        words.append(f"{format_duration_s(own.shift_s)} later")
    return ", ".join(words)


_PLAN_LIMIT = "300s"  # as in "fivefold execute"


def run_planned(path: Path, spec: LabSpec, timeout: str | None) -> None:
    """Run a plan from its file and put measured beside predicted iteration times."""
    if spec != LabSpec(delay="0ms", jitter="0ms"):  # as the options' defaults are spelled
        raise ArgumentError(
            f"the plan {path} brings its own cluster; got options for {spec.describe()} besides",
            hint="leave them out",
        )
    timeout_s = seconds_of(_PLAN_LIMIT if timeout is None else timeout)
    order = read_order(path)
    topology = read_topology(order.topology)
    predicted = run_plan(topology, order.jobs, order.plan).iteration_s
    measured = run_in_the_lab(topology, order.jobs, order.plan, timeout_s=timeout_s)
    show_measured(order.jobs, order.plan, predicted, *measured)


def summarise(spec: LabSpec, result: LabResult) -> None:
    links = result.lab["means"] or "unshaped"
    took = format_duration_s(result.wall_s)
    count = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    if result.timed_out:
        _note(f"[red]time limit[/]: {count} ended after {took}")
    elif result.first_failed_rank is None:
        _note(f"[green]ok[/]: {count} ended with 0 after {took}")
    else:
        failed = result.ranks[result.first_failed_rank]
        _note(f"[red]failed[/]: rank {failed.rank} on host{failed.host} first, after {took} in all")
    if spec.shapes and result.lab["means"] is None:
        _note(f"[yellow]the links were not shaped[/]: {escape(str(result.lab['reason']))}")
    _note(escape(f"{spec.describe()} ({links}); output: {result.log_folder}"))


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold]lab[/]  {text}")


def show_capabilities(able: Capabilities) -> None:
    rows, lines = [], []
    for item in able.items:
        tried = able.isolation is not None or item.name == "namespaces"
        works = "yes" if item.works else "no"
        rows.append((item.name, works if tried else "?", item.meaning))
        # Without namespaces nothing else could be tried: one explanation is enough.
        if tried and not item.works:
            lines.append(f"\n{item.name}: {item.reason}\n  fix: {item.fix}")
    how = f" (as {able.isolation})" if able.isolation else ""
    table = DataTable.of(("feature", "works", "for"), rows, text_columns=(1, 2))
    show(f"links can be given: {able.shaping}{how}", table, *lines)
