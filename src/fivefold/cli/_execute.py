"""``fivefold execute``: jobs planned, predicted, and run for real on the emulated cluster."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fivefold.cli._codesign import (
    ClusterOption,
    JobsArgument,
    JsonOption,
    ReportOption,
    SeedOption,
    flags_of,
    typed_command,
    write_page,
)

__all__ = ["execute_command"]


def execute_command(
    jobs: JobsArgument,
    *,
    cluster: ClusterOption,
    co_designs: Annotated[
        str, typer.Option(help="What may be told: V, H joined by +, or none.")
    ] = "V+H",
    seed: SeedOption = 0,
    timeout: Annotated[str, typer.Option(help="Longest run.")] = "300s",
    report: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run planned jobs in the lab and put measured beside predicted iteration times.

    Every rank of the topology becomes a host of the lab, every link has its own rate. Compute is a
    sleep of the planned length; reductions are real. Rings only: plan with V and H.

    Example:
        $ fivefold execute jobs.toml --cluster switch:4,bandwidth=25MB/s
    """
    from fivefold.cli._execution import run_in_the_lab  # noqa: PLC0415 - as above
    from fivefold.codesign import (  # noqa: PLC0415 - keeps --help fast
        PlanningOptions,
        load_jobs,
        plan_cluster,
    )
    from fivefold.network.topology import parse_topology  # noqa: PLC0415 - as above
    from fivefold.units import parse_duration_s  # noqa: PLC0415 - as above

    topology = parse_topology(cluster)
    specs = load_jobs(jobs, topology)
    plain = PlanningOptions(classes=1)  # the lab's links have no priority classes
    found = plan_cluster(topology, specs, flags_of(co_designs), seed=seed, options=plain)
    measured = run_in_the_lab(topology, specs, found.plan, timeout_s=parse_duration_s(timeout))
    predicted = found.outcome.iteration_s
    if report is not None:
        from fivefold.codesign import plan_page  # noqa: PLC0415 - keeps --help fast

        page = plan_page(topology, specs, found, measured=measured, command=typed_command())
        write_page(page, report)
    if as_json:
        record = {
            job.job_id: {
                "predicted_s": predicted[job.job_id], "measured_s": measured[job.job_id]
            }
            for job in specs
        }  # fmt: skip
        typer.echo(json.dumps(record))
        return
    width = max(len("job"), *(len(job.job_id) for job in specs))
    typer.echo(f"{'job':<{width}}  {'predicted':>10}  {'measured':>10}  {'off':>7}")
    for job in specs:
        before, after = predicted[job.job_id], measured[job.job_id]
        typer.echo(
            f"{job.job_id:<{width}}  {before:>8.3f} s  {after:>8.3f} s  "
            f"{100 * (after / before - 1):>+6.1f}%"
        )
    typer.echo("seconds per iteration; compute is a sleep, reductions are real", err=True)
