"""``fivefold simulate`` and ``fivefold ablate``: jobs on a shared cluster, planned and compared."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from fivefold.cli._later import later
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
from fivefold.errors import (
    CommunicationError,
    InfeasibleError,
    UnsupportedError,
    optional_module,
)

with later():
    from fivefold.codesign import (
        CoDesignResult,
        CoDesigns,
        JobSpec,
        PlanningOptions,
        ablate,
        ablation_page,
        chakra_traces,
        load_jobs,
        msccl_programs,
        plan_cluster,
        plan_page,
        synthetic_jobs,
    )
    from fivefold.codesign.exports import timeline_of
    from fivefold.codesign.plans import decisions_to_json
    from fivefold.codesign.tables import TableTold
    from fivefold.codesign.workloads import load_jobs_with_reading
    from fivefold.network.topology import Topology
    from fivefold.report import print_page, write_html
    from fivefold.report.format import typed_command
    from fivefold.report.page import Page
    from fivefold.runs import ProgressBar, write_text


_DASK_PATIENCE_S = 10
_OVERLAP = 2  # iterations by which a job may end later than in its table: they are whole there
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
    told = TableTold(
        compute_s=None if compute is None else seconds_of(compute),
        gradient_bytes=None if gradients is None else bytes_of(gradients), unit=time_unit,
    )  # fmt: skip
    with ProgressBar() as show:
        specs, jobs_reading = load_jobs_with_reading(jobs, topology, progress=show, told=told)
    readings = [one for one in (cluster_reading, jobs_reading) if one is not None]
    say_readings(*readings)
    if jobs_reading is None:  # jobs of a table have the same ranks one after the other
        say_shared_ranks(specs)
    with ProgressBar() as show:
        found = plan_cluster(
            topology,
            specs,
            flags_of(co_designs),
            start=start,
            seed=seed,
            options=PlanningOptions(guard=guard, budget=budget),
            progress=show,
        )
    if jobs_reading is not None:
        say_overlaps(specs, found)
    if output is not None:
        write_text(output / "plan.json", found.plan.to_json() + "\n")
        write_text(output / "decisions.jsonl", decisions_to_json(found.decisions))
        write_text(output / "timeline.json", json.dumps(timeline_of(found.outcome)) + "\n")
        _write_programs(output / "msccl", topology, specs, found)
    if chakra is not None:
        _write_traces(chakra, topology, specs, found)
    if report is not None:
        write_page(plan_page(topology, specs, found), report)
    if as_json:
        account = {"readings": [one.to_json() for one in readings]} if readings else {}
        write_json(_record(specs, found) | account)
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

    def make(seed: int) -> list[JobSpec]:
        if jobs is not None:
            return load_jobs(jobs, topology)
        return synthetic_jobs(
            topology, number=number, seed=seed, sizes=drawn_sizes, iterations=iterations
        )

    with _engine(parallel, dask), ProgressBar() as show:
        rows = ablate(
            topology,
            make,
            seeds=range(seeds),
            options=PlanningOptions(budget=budget),
            progress=lambda done, total: show("ablation", done, total),
        )
    if report is not None:
        write_page(ablation_page(rows, cluster=topology.name), report)
    if as_json:
        write_json([asdict(row) for row in rows])
        return
    print_page(ablation_page(rows, cluster=topology.name))


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


def say_shared_ranks(jobs: Sequence[JobSpec]) -> None:
    """Tell which jobs name the same ranks: their compute is planned as if it ran side by side."""
    for place, job in enumerate(jobs):
        for other in jobs[place + 1 :]:
            if both := sorted(set(job.ranks) & set(other.ranks)):
                several = len(both) > 1
                typer.echo(
                    f"note: {job.job_id} and {other.job_id} share {len(both)} "
                    f"rank{'s' if several else ''} ({both[0]}{', ...' if several else ''}): only "
                    "the network is shared in the plan, their compute runs side by side",
                    err=True,
                )


def say_overlaps(jobs: Sequence[JobSpec], found: CoDesignResult) -> None:
    """Tell how many jobs of a table still run when others get their ranks."""
    free_s: dict[int, float] = {}
    late = 0
    for job in sorted(jobs, key=lambda one: one.arrival_s):
        busy_s = max((free_s.get(rank, 0.0) for rank in job.ranks), default=0.0)
        late += busy_s > job.arrival_s + _OVERLAP * found.baseline_outcome.iteration_s[job.job_id]
        end_s = job.arrival_s + found.baseline_outcome.completion_s[job.job_id]
        free_s |= {rank: max(end_s, free_s.get(rank, 0.0)) for rank in job.ranks}
    if late:
        typer.echo(
            f"note: {late} of {len(jobs)} jobs start before those end that had their ranks in the "
            "table: the cluster is slower than the table's, and only the network is shared",
            err=True,
        )


def flags_of(text: str) -> CoDesigns:
    """Read co-designs as the command line spells them."""
    if text in {"all", "none"}:
        return CoDesigns.all() if text == "all" else CoDesigns.none()
    names = {"V": "vertical", "H": "horizontal", "II": "intra_inter", "HN": "host_net"}
    parts = [part.strip().upper() for part in text.split("+")]
    unknown = [part for part in parts if part not in names]
    if unknown:
        raise ArgumentError(
            f"there is no co-design {unknown[0]!r}", hint="write V+H+II+HN or a part of it"
        )
    return CoDesigns(**{names[part]: True for part in parts})


def write_page(page: Page, path: Path) -> None:
    """Write the page of what the command line asked for, and say where it is."""
    page = replace(page, command=typed_command(sys.argv))
    typer.echo(f"report: {write_html(page, path)}", err=True)


def _record(jobs: Sequence[JobSpec], found: CoDesignResult) -> dict[str, Any]:
    measures = {
        "completion_s": found.outcome.completion_s,
        "baseline_completion_s": found.baseline_outcome.completion_s,
        "iteration_s": found.outcome.iteration_s,
        "baseline_iteration_s": found.baseline_outcome.iteration_s,
    }
    return {
        "jobs": {
            job.job_id: {name: times_s[job.job_id] for name, times_s in measures.items()}
            for job in jobs
        },
        "worse": list(found.worse),
        "simulations": found.simulations,
        "plan": json.loads(found.plan.to_json()),
    }


def _write_programs(
    folder: Path, topology: Topology, jobs: Sequence[JobSpec], found: CoDesignResult
) -> None:
    """Write the collectives of every job whose hosts do all the work; name the others."""
    for old in folder.glob("job[0-9]*.*.xml"):  # of an earlier plan
        old.unlink()
    for number, job in enumerate(jobs):
        try:
            programs = msccl_programs(topology, job, found.plan.jobs[job.job_id])
        except (InfeasibleError, UnsupportedError) as error:
            typer.echo(f"not written as MSCCL XML: {error.message}", err=True)
            continue
        for name, text in programs.items():
            write_text(folder / f"job{number}.{name}.xml", text)


def _write_traces(
    folder: Path, topology: Topology, jobs: Sequence[JobSpec], found: CoDesignResult
) -> None:
    files = chakra_traces(topology, jobs, found.plan)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("trace.[0-9]*.et"):  # of a larger cluster
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    typer.echo(f"{len(files) - 1} Chakra traces: {folder}", err=True)
