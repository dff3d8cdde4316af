"""``fivefold execute``: jobs planned, predicted, and run for real on the emulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._arguments import seconds_of, topology_of
from fivefold.cli._codesign import (
    flags_of,
    say_shared_ranks,
    typed_command,
    write_page,
)
from fivefold.cli._execution import run_in_the_lab, show_measured
from fivefold.cli._later import later
from fivefold.cli._options import (
    ClusterOption,
    JobsArgument,
    JsonOption,
    PageOption,
    PathSeedOption,
)
from fivefold.cli._outputs import require_writable

with later():
    from fivefold.codesign import PlanningOptions, load_jobs, plan_cluster, plan_page
    from fivefold.codesign.execute import write_order


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
    save: Annotated[
        Path | None, typer.Option(help='File for the plan, to be repeated by "fivefold lab run".')
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
    require_writable(save, report)
    topology = topology_of(cluster)
    specs = load_jobs(jobs, topology)
    say_shared_ranks(specs)
    options = PlanningOptions(classes=classes)
    found = plan_cluster(topology, specs, flags_of(co_designs), seed=seed, options=options)
    if save is not None:
        write_order(save, specs, found.plan, topology=topology)
    measured = run_in_the_lab(topology, specs, found.plan, timeout_s=seconds_of(timeout))
    if report is not None:
        page = plan_page(
            topology, specs, found, measured=measured.iteration_s, command=typed_command()
        )
        write_page(page, report)
    show_measured(specs, found.plan, found.outcome.iteration_s, measured, as_json=as_json)
