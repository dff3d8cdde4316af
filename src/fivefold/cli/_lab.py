"""``fivefold lab`` and ``fivefold execute``: commands and planned jobs on an emulated cluster."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli._options import (
    ArgumentError,
    ClusterOption,
    JobsArgument,
    JsonOption,
    PageOption,
    PathSeedOption,
    command_group,
    help_text,
    output_option,
    require_writable,
    seconds_of,
    topology_of,
    typed_arguments,
    write_json,
)


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
    """Run planned jobs on the emulated cluster and compare measured with predicted times.

    Every rank of the topology becomes a host of the lab, every link has its own rate and priority
    classes, and packets take the planned paths. Compute is a sleep of the planned length;
    reductions are real: rings of hosts, or aggregation in a switch that can do it.

    Examples:
        $ fivefold execute jobs.toml --cluster switch:4,bandwidth=25MB/s
    """
    require_writable(output, report)
    topology = topology_of(cluster)

    from fivefold.cli._codesign_work import flags_of, say_shared_ranks, write_page
    from fivefold.cli._lab_work import run_in_the_lab, show_measured
    from fivefold.codesign import PlanningOptions, load_jobs, plan_cluster, plan_page
    from fivefold.codesign.execute import RUNNABLE, write_order

    specs = load_jobs(jobs, topology)
    say_shared_ranks(specs)
    options = PlanningOptions(classes=classes, algorithms=RUNNABLE)
    found = plan_cluster(topology, specs, flags_of(co_designs), seed=seed, options=options)
    if output is not None:
        write_order(output, specs, found.plan, topology=topology)
    measured, result = run_in_the_lab(topology, specs, found.plan, timeout_s=seconds_of(timeout))
    predicted = found.outcome.iteration_s
    if report is not None:
        write_page(plan_page(topology, specs, found, measured=measured), report)
    if as_json:
        times = {
            name: {"predicted_s": predicted[name], "measured_s": measured[name]}
            for name in (job.job_id for job in specs)
        }
        write_json(times)
    else:
        show_measured(specs, found.plan, predicted, measured, result)


app = command_group(
    "lab", help="Emulated cluster on this machine: hosts on slow links, made of network namespaces."
)


def _cluster(help: str, **how: Any) -> Any:  # noqa: A002 - as typer calls it
    return typer.Option(help=help, rich_help_panel="Cluster", **how)


def _run_option(help: str, *names: str, **how: Any) -> Any:  # noqa: A002 - as above
    return typer.Option(*names, help=help, rich_help_panel="Run", **how)


_Command = Annotated[
    list[str], typer.Argument(metavar="PLAN | -- COMMAND", help="What every rank runs.")
]
_Hosts = Annotated[int, _cluster("Number of hosts.")]
_Rate = Annotated[
    str | None,
    _cluster("Bandwidth of each link, both ways, such as 200Mbit/s.", show_default="unlimited"),
]
_Delay = Annotated[str, _cluster("One-way delay between hosts.")]
_Jitter = Annotated[str, _cluster("Jitter: the delay varies by up to this much.")]
_Loss = Annotated[float, _cluster("Probability of losing a packet.")]
_HostRates = Annotated[
    list[str] | None,
    _cluster("Bandwidth of one host, such as 1=50Mbit/s; repeatable.", metavar="HOST=RATE"),
]
_Topology = Annotated[
    str | None,
    _cluster(
        "A topology in place of one switch: a TOML file, or such as ring:4.", show_default="none"
    ),
]
_Classes = Annotated[int, _cluster("Number of priority classes per link.")]
_HostClasses = Annotated[
    list[str] | None,
    _cluster(
        "Class of what a host sends, such as 1=0; 0 is the most urgent; repeatable.",
        metavar="HOST=CLASS",
    ),
]
_SumAt = Annotated[
    list[str] | None,
    _cluster("Switch that aggregates chunks for the hosts; repeatable.", metavar="NODE"),
]
_Processes = Annotated[int, _cluster("Processes per host.")]
_Mtu = Annotated[int | None, _cluster("Largest packet in bytes.", show_default="chosen")]
_Seed = Annotated[int, _cluster("Seed of jitter and loss.")]
_Timeout = Annotated[str | None, _run_option("Longest run, such as 10min.", show_default="none")]
_Grace = Annotated[
    str, _run_option("Time that ranks get to exit by themselves after a failure or SIGTERM.")
]
_LogFolder = Annotated[
    Path | None, _run_option("Folder for each rank's output.", show_default="a new one")
]
_Unshaped = Annotated[
    bool,
    _run_option("Where links cannot be shaped, run over loopback anyway.", "--allow-unshaped"),
]
_Quiet = Annotated[bool, _run_option("Only write logs to files.", "--quiet", "-q")]


def run(  # noqa: PLR0913 - one parameter per option of the command line
    *,
    command: _Command,
    hosts: _Hosts = 2,
    rate: _Rate = None,
    delay: _Delay = "0ms",
    jitter: _Jitter = "0ms",
    loss: _Loss = 0.0,
    host_rate: _HostRates = None,
    topology: _Topology = None,
    classes: _Classes = 1,
    host_class: _HostClasses = None,
    sum_at: _SumAt = None,
    nproc_per_host: _Processes = 1,
    mtu: _Mtu = None,
    seed: _Seed = 0,
    timeout: _Timeout = None,
    grace: _Grace = "30s",
    log_folder: _LogFolder = None,
    allow_unshaped: _Unshaped = False,
    quiet: _Quiet = False,
) -> None:
    """Run a command on every host, with the environment that torchrun gives.

    Rank 0's standard output goes to standard output; everything else to standard error, with
    the host's name before each line. The exit code is that of the first rank that failed, or 124
    after the time limit.

    In place of a command, a plan that "fivefold execute --output" wrote: it brings its own cluster
    and is run once more, measured beside predicted.

    Example: fivefold lab run --hosts 2 --rate 200Mbit/s --delay 5ms -- python train.py

    Example: fivefold lab run plan.json
    """
    links: dict[str, Any] = {"hosts": hosts, "rate": rate}
    if topology is not None:  # the rate is that of a generated one's links
        described = topology_of(topology, bandwidth=rate)
        links = {"hosts": described.num_ranks, "topology": described.to_toml()}
    classes_of = _by_host("--host-class", host_class, example="1=0")

    from fivefold.cli._lab_work import run_planned, summarise
    from fivefold.lab import LabSpec, run_lab

    with typed_arguments():
        spec = LabSpec(
            **links, delay=delay, jitter=jitter, loss=loss, nproc_per_host=nproc_per_host,
            mtu=mtu, seed=seed, classes=classes,
            host_rates=_by_host("--host-rate", host_rate, example="1=50Mbit/s"),
            host_classes={host: int(own) for host, own in classes_of.items()},
            aggregators={node: {} for node in sum_at or []},
        )  # fmt: skip
    if len(command) == 1 and command[0].endswith(".json"):  # a plan: no program is called so
        run_planned(Path(command[0]), spec, timeout)
        return
    timeout_s = None if timeout is None else seconds_of(timeout)
    result = run_lab(
        spec, command, timeout_s=timeout_s, grace_s=seconds_of(grace),
        log_folder=log_folder, allow_unshaped=allow_unshaped, stream=not quiet,
    )  # fmt: skip
    summarise(spec, result)
    raise typer.Exit(result.exit_code)


def check(*, as_json: JsonOption = False) -> None:
    """Say what this machine can emulate, and what is missing for the rest.

    The exit code is 0 where links can be given at least a rate, else 1.
    """
    from fivefold.cli._lab_work import show_capabilities
    from fivefold.lab import probe_capabilities

    able = probe_capabilities()
    if as_json:
        typer.echo(json.dumps({"shaping": able.shaping, **asdict(able)}, indent=2))
    else:
        show_capabilities(able)
    raise typer.Exit(1 if able.shaping == "none" else 0)


def clean() -> None:
    """Remove what killed runs left behind, and say what it was; runs under way are left alone."""
    from fivefold.lab import clean_lab

    report = clean_lab()
    said = {"removed": report.removed, "left alone": report.active}
    for what, lines in (said | {"could not remove": report.failed}).items():
        for line in lines:
            typer.echo(f"{what} {line}")
    if not (report.removed or report.failed):
        typer.echo("nothing to remove")
    raise typer.Exit(1 if report.failed else 0)


def _by_host(option: str, texts: list[str] | None, *, example: str) -> dict[int, str]:
    found = {}
    for text in texts or []:
        host, separator, value = text.partition("=")
        name = option.rpartition("-")[2].upper()
        numbers = (host, value) if name == "CLASS" else (host,)
        if not separator or not all(number.strip().isdecimal() for number in numbers):
            raise ArgumentError(
                f"{option} {text!r} is not HOST={name}", hint=f"write for example {example}"
            )
        found[int(host)] = value.strip()
    return found


app.command(help=help_text(run), context_settings={"allow_interspersed_args": False})(run)
app.command(help=help_text(check))(check)
app.command(help=help_text(clean))(clean)
