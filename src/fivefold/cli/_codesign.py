"""``fivefold simulate`` and ``fivefold ablate``: jobs on a shared cluster, planned and compared."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from fivefold.cli._options import (
    ArgumentError,
    ClusterOption,
    JsonOption,
    PageOption,
    PathSeedOption,
    bytes_of,
    numbers_of,
    output_option,
    read_topology_of,
    require_writable,
    say_readings,
    seconds_of,
    topology_of,
    write_json,
)
from fivefold.errors import CommunicationError, optional_module

_DASK_PATIENCE_S = 10
CoDesignsOption = Annotated[
    str,
    typer.Option(
        help="Co-designs to enable: vertical (V), horizontal (H), intra-inter (II), host-net (HN), "
        "joined by +; or all, none."
    ),
]
OutputOption = Annotated[
    Path | None,
    output_option(
        "plan.json, decisions.jsonl, timeline.json (Perfetto) and the jobs' collectives as MSCCL "
        "XML.",
        metavar="FOLDER",
    ),
]
ChakraOption = Annotated[
    Path | None,
    typer.Option(help="Folder for Chakra execution traces; needs the package mlc-chakra."),
]
BudgetOption = Annotated[int, typer.Option(min=1, help="Most simulations while planning.")]


def simulate_command(  # noqa: PLR0913 - each option is a parameter
    jobs: Annotated[
        Path,
        typer.Argument(
            metavar="JOBS",
            help="TOML file with \\[\\[jobs]]; or a scheduler's table of jobs that ran (sacct "
            "--parsable2, CSV, Philly's JSON), with --compute and --gradients.",
            exists=True,
            dir_okay=False,
        ),
    ],
    *,
    cluster: ClusterOption,
    co_designs: CoDesignsOption = "all",
    start: Annotated[
        Literal["null", "best"],
        typer.Option(help="Baseline: null (today's stack) or best (each layer alone)."),
    ] = "null",
    guard: Annotated[
        bool, typer.Option(help="With H: no job may end later than under the baseline.")
    ] = True,
    seed: PathSeedOption = 0,
    budget: BudgetOption = 60,
    compute: Annotated[
        str | None, typer.Option(help="Of a scheduler's table: an iteration's compute, as '0.3 s'.")
    ] = None,
    gradients: Annotated[
        str | None, typer.Option(help="Of such a table: what an iteration reduces, as '1 GB'.")
    ] = None,
    time_unit: Annotated[
        Literal["s", "ms"] | None, typer.Option(help="Of such a table: unit of its bare times.")
    ] = None,
    output: OutputOption = None,
    chakra: ChakraOption = None,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan jobs on a cluster and simulate them beside the uncoordinated baseline.

    JOBS may be a scheduler's table, as sacct --parsable2 or Philly's log: it says when jobs ran on
    how many GPUs, and --compute and --gradients what they did.

    The plan says for each job how its gradients are fused and ordered, which algorithm reduces
    them, over which paths, in which class and at which offset. Nothing is run for real.

    Examples:
        $ fivefold simulate jobs.toml --cluster fat_tree:4,gpus=2
    """
    require_writable(output, chakra, report)
    topology, cluster_reading = read_topology_of(cluster)

    from fivefold.cli import _codesign_work as work
    from fivefold.codesign import PlanningOptions, plan_cluster, plan_page
    from fivefold.codesign.exports import timeline_of
    from fivefold.codesign.plans import decisions_to_json
    from fivefold.codesign.tables import TableTold
    from fivefold.codesign.workloads import load_jobs_with_reading
    from fivefold.report import print_page
    from fivefold.runs import ProgressBar, write_text

    told = TableTold(
        compute_s=None if compute is None else seconds_of(compute),
        gradient_bytes=None if gradients is None else bytes_of(gradients), unit=time_unit,
    )  # fmt: skip
    with ProgressBar() as show:
        specs, jobs_reading = load_jobs_with_reading(jobs, topology, progress=show, told=told)
    readings = [one for one in (cluster_reading, jobs_reading) if one is not None]
    say_readings(*readings)
    if jobs_reading is None:  # jobs of a table have the same ranks one after the other
        work.say_shared_ranks(specs)
    with ProgressBar() as show:
        found = plan_cluster(
            topology,
            specs,
            work.flags_of(co_designs),
            start=start,
            seed=seed,
            options=PlanningOptions(guard=guard, budget=budget),
            progress=show,
        )
    if jobs_reading is not None:
        work.say_overlaps(specs, found)
    if output is not None:
        write_text(output / "plan.json", found.plan.to_json() + "\n")
        write_text(output / "decisions.jsonl", decisions_to_json(found.decisions))
        write_text(output / "timeline.json", json.dumps(timeline_of(found.outcome)) + "\n")
        work.write_programs(output / "msccl", topology, specs, found)
    if chakra is not None:
        work.write_traces(chakra, topology, specs, found)
    if report is not None:
        work.write_page(plan_page(topology, specs, found), report)
    if as_json:
        account = {"readings": [one.to_json() for one in readings]} if readings else {}
        write_json(work.record_of_plan(specs, found) | account)
        return
    print_page(plan_page(topology, specs, found, pictures=False))
    if output is not None:
        typer.echo(f"plan, decisions, timeline and programs: {output}", err=True)


def ablate_command(  # noqa: PLR0913 - each option is a parameter
    jobs: Annotated[
        Path | None,
        typer.Argument(metavar="[JOBS]", help="TOML file with \\[\\[jobs]]; left out, drawn jobs."),
    ] = None,
    *,
    cluster: ClusterOption,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    number: Annotated[int, typer.Option(min=1, help="Jobs to draw, where none are given.")] = 5,
    sizes: Annotated[str, typer.Option(help="Ranks of drawn jobs, comma-separated.")] = "4,8",
    iterations: Annotated[int, typer.Option(min=1, help="Iterations of drawn jobs.")] = 20,
    budget: BudgetOption = 60,
    parallel: Annotated[
        int, typer.Option(min=1, help="Plans made side by side, in processes of this machine.")
    ] = 1,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Dask scheduler, such as tcp://head:8786, whose workers plan."
        ),
    ] = None,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what each co-design buys: all sixteen combinations, against B0 and B1.

    B0 is today's stack without coordination; B1 is every layer at its best alone. All use the same
    jobs, placement and hash, and are judged by the same simulation.

    Examples:
        $ fivefold ablate --cluster fat_tree:4,gpus=2 --seeds 3
        $ fivefold ablate --cluster fat_tree:4,gpus=2 --seeds 20 --parallel 8
    """
    require_writable(report)
    topology = topology_of(cluster)
    drawn_sizes = numbers_of(sizes, "sizes", example="4,8,16", least=1)

    from fivefold import codesign
    from fivefold.cli._codesign_work import write_page
    from fivefold.report import print_page
    from fivefold.runs import ProgressBar

    def make(seed: int) -> list[codesign.JobSpec]:
        if jobs is not None:
            return codesign.load_jobs(jobs, topology)
        return codesign.synthetic_jobs(
            topology, number=number, seed=seed, sizes=drawn_sizes, iterations=iterations
        )

    with _engine(parallel, dask), ProgressBar() as show:
        rows = codesign.ablate(
            topology,
            make,
            seeds=range(seeds),
            options=codesign.PlanningOptions(budget=budget),
            progress=lambda done, total: show("ablation", done, total),
        )
    if report is not None:
        write_page(codesign.ablation_page(rows, cluster=topology.name), report)
    if as_json:
        write_json([asdict(row) for row in rows])
        return
    print_page(codesign.ablation_page(rows, cluster=topology.name))


@contextmanager
def _engine(parallel: int, dask: str | None) -> Iterator[None]:
    """Let joblib use processes of this machine, or the workers of a Dask cluster."""
    joblib = optional_module("joblib", extra="network", use="an ablation")
    if dask is None:
        try:
            # Ctrl-C reaches this process, which ends them: they would each say where it met them.
            ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
            with joblib.parallel_config("loky", n_jobs=parallel, **ignore):
                yield
        except BrokenExecutor as error:
            message = f"one of {parallel} processes that made plans was killed"
            hint = "memory may have run out: take fewer with --parallel, or a smaller cluster"
            raise CommunicationError(message, hint=hint) from error
        return
    if parallel > 1:
        message = f"--parallel {parallel} and --dask {dask} are two ways to make plans side by side"
        raise ArgumentError(message, hint="leave one of them out")
    distributed = optional_module("distributed", extra="sweeps", use="--dask")
    if logging.getLogger().level > logging.DEBUG:  # a lost scheduler is told below, in a line
        for name in ("distributed", "distributed.client", "tornado.application"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(dask, timeout=_DASK_PATIENCE_S)
    except (OSError, ValueError) as error:
        message = f"no Dask scheduler answers at {dask!r}: {error}"
        hint = "start one with `dask scheduler`, and `dask worker ADDRESS` on each machine"
        raise CommunicationError(message, hint=hint) from error
    with client, _watched(client, dask):
        try:
            with joblib.parallel_config("dask") as chosen:
                backend = chosen["backend"]
                # With one job at a time joblib would make plans here, and not on the worker.
                number = max(2, backend.effective_n_jobs(-1))
                backend.effective_n_jobs = lambda *_: number
                yield
        except CancelledError as error:
            raise _lost(f"the Dask scheduler at {dask} is gone") from error
        except (distributed.scheduler.KilledWorker, ImportError) as error:
            message = f"workers of the Dask scheduler at {dask} cannot make plans: {error}"
            hint = "each needs this version of fivefold, and memory for a plan"
            raise CommunicationError(message, hint=hint) from error


@contextmanager
def _watched(client: Any, address: str) -> Iterator[None]:
    """Raise an error in this thread, the main one, when a Dask cluster has no worker left."""
    if not client.scheduler_info()["workers"]:
        message = f"the Dask scheduler at {address} has no worker"
        raise CommunicationError(message, hint=f"start some: dask worker {address}")
    over, main = threading.Event(), threading.get_ident()
    gone = False

    def watch() -> None:
        nonlocal gone
        seen_s = time.monotonic()
        while not over.wait(1.0):
            # Dask cancels what waits for a lost scheduler. It forgets a result that was on its way,
            # though, and where that is the only one nothing would end the wait.
            gone = client.status != "running"
            try:
                if not gone and client.nthreads():
                    seen_s = time.monotonic()
            except OSError:  # it ended after the look at the status
                gone = True
            if time.monotonic() - seen_s > _DASK_PATIENCE_S and not over.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    def tell(*_: object) -> NoReturn:
        raise _lost(
            f"the Dask scheduler at {address} "
            + ("is gone" if gone else "has lost all its workers")
        )

    usual = signal.signal(signal.SIGUSR1, tell)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it may be on its way; usually it kills
        over.set()
        thread.join(_DASK_PATIENCE_S)
        signal.signal(signal.SIGUSR1, usual)


def _lost(message: str) -> CommunicationError:
    return CommunicationError(message, hint="see its log, and those of workers")
