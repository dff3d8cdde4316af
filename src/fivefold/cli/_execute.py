"""``fivefold execute``: jobs planned, predicted, and run for real on the emulated cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._arguments import seconds_of, topology_of
from fivefold.cli._codesign import change_of, flags_of, say_shared_ranks, typed_command, write_page
from fivefold.cli._later import later
from fivefold.cli._options import (
    ClusterOption,
    JobsArgument,
    JsonOption,
    PageOption,
    PathSeedOption,
    output_option,
)
from fivefold.cli._outputs import require_writable, write_json
from fivefold.errors import CommunicationError
from fivefold.units import format_duration_s

with later():
    from fivefold.codesign import (
        ClusterPlan,
        JobSpec,
        PlanningOptions,
        load_jobs,
        plan_cluster,
        plan_page,
        run_plan,
    )
    from fivefold.codesign.execute import (
        execution_command,
        lab_options,
        read_measurements,
        read_order,
        write_order,
    )
    from fivefold.lab import LabSpec, run_lab
    from fivefold.network.topology import Topology, read_topology

_MTU = 60000  # small frames would cost the hosts' processors more than the job does


def execute_command(  # noqa: PLR0913 - each option is a parameter
    jobs: JobsArgument,
    *,
    cluster: ClusterOption,
    co_designs: Annotated[
        str,
        typer.Option(
            help="Co-designs to enable: vertical (V), horizontal (H), host-net (HN), joined by +; "
            "or none."
        ),
    ] = "V+H+HN",
    classes: Annotated[
        int, typer.Option(min=1, max=8, help="Priority classes of the links; 1 for none.")
    ] = 8,
    seed: PathSeedOption = 0,
    timeout: Annotated[str, typer.Option(help="Longest run.")] = "300s",
    output: Annotated[
        Path | None, output_option('The plan, which "fivefold lab run" repeats.')
    ] = None,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run planned jobs in the lab and put measured beside predicted iteration times.

    Every rank of the topology becomes a host of the lab, every link has its own rate and priority
    classes, and packets take the planned paths. Compute is a sleep of the planned length;
    reductions are real: rings of hosts, or aggregation in a switch that can do it.

    Examples:
        $ fivefold execute jobs.toml --cluster switch:4,bandwidth=25MB/s
    """
    require_writable(output, report)
    topology = topology_of(cluster)
    specs = load_jobs(jobs, topology)
    say_shared_ranks(specs)
    options = PlanningOptions(classes=classes)
    found = plan_cluster(topology, specs, flags_of(co_designs), seed=seed, options=options)
    if output is not None:
        write_order(output, specs, found.plan, topology=topology)
    measured = run_in_the_lab(topology, specs, found.plan, timeout_s=seconds_of(timeout))
    if report is not None:
        page = plan_page(
            topology, specs, found, measured=measured.iteration_s, command=typed_command()
        )
        write_page(page, report)
    show_measured(specs, found.plan, found.outcome.iteration_s, measured, as_json=as_json)


@dataclass(frozen=True)
class Measured:
    """What a run of a plan showed.

    Attributes:
        iteration_s: Mean seconds per iteration of each job.
        aggregation: What each aggregation switch counted.
    """

    iteration_s: Mapping[str, float]
    aggregation: Mapping[str, Mapping[str, int]]


def run_in_the_lab(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, *, timeout_s: float
) -> Measured:
    """Run a plan."""
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
    return Measured(found, result.aggregation)


def run_saved(path: Path, *, timeout_s: float) -> None:
    """Run a plan from its file and put measured beside predicted iteration times."""
    order = read_order(path)
    topology = read_topology(order.topology)
    predicted = run_plan(topology, order.jobs, order.plan).iteration_s
    measured = run_in_the_lab(topology, order.jobs, order.plan, timeout_s=timeout_s)
    show_measured(order.jobs, order.plan, predicted, measured)


def show_measured(
    jobs: Sequence[JobSpec],
    plan: ClusterPlan,
    predicted: Mapping[str, float],
    measured: Measured,
    *,
    as_json: bool = False,
) -> None:
    """Write predicted and measured seconds per iteration side by side."""
    if as_json:
        record = {
            job.job_id: {
                "predicted_s": predicted[job.job_id],
                "measured_s": measured.iteration_s[job.job_id],
            }
            for job in jobs
        }
        write_json(record)
        return
    width = max(len("job"), *(len(job.job_id) for job in jobs))
    typer.echo(f"{'job':<{width}}  {'predicted':>10}  {'measured':>10}  {'off':>7}  how")
    for job in jobs:
        before, after = predicted[job.job_id], measured.iteration_s[job.job_id]
        typer.echo(
            f"{job.job_id:<{width}}  {before:>8.3f} s  {after:>8.3f} s  "
            f"{change_of(before, after)}  {_how(plan, job.job_id)}"
        )
    for node, counts in measured.aggregation.items():
        refused = counts["misses"] + counts["expired"]
        typer.echo(f"{node} aggregated {counts['hits']} chunks and left {refused} to the hosts")
    typer.echo("seconds per iteration; compute is a sleep, reductions are real", err=True)


def _how(plan: ClusterPlan, job_id: str) -> str:
    own = plan.jobs[job_id]
    words = [f"aggregated at {own.root}" if own.root else f"ring {'-'.join(map(str, own.order))}"]
    if len({other.priority for other in plan.jobs.values()}) > 1:
        words.append(f"class {own.priority}")
    if own.shift_s:
        words.append(f"{format_duration_s(own.shift_s)} later")
    return ", ".join(words)
