"""``fivefold plan``: how to split one job over a cluster, what it costs and what was ruled out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fivefold.cli._arguments import ArgumentError
from fivefold.cli._codesign import typed_command, write_page
from fivefold.cli._options import ClusterOption, JsonOption, PageOption
from fivefold.cli._outputs import require_writable
from fivefold.cli._plan_files import runnable, write_plan_files
from fivefold.cli._plan_job import CODEC_BYTES, JobSizes, read_job
from fivefold.cli._plan_page import split_page
from fivefold.cli._plan_words import PARTS
from fivefold.errors import InfeasibleError
from fivefold.runs import write_text
from fivefold.strategy import (
    TARGETS,
    Cluster,
    Job,
    PlanPrediction,
    PlanSearchResult,
    evaluate_plan,
    load_cluster,
    plan_to_toml,
    search_plans,
    space_of_target,
    target_problem,
)
from fivefold.strategy.words import DEGREES, degrees_of, settings_of
from fivefold.train.config import TrainConfig
from fivefold.units import format_bytes

_MOST_REASONS = 8
_LOOKED_AT = 200  # fastest plans, of which a program cannot run all
_Job = Annotated[
    Path,
    typer.Argument(
        help="Job file, configuration of fivefold train, or a Hugging Face config.json.",
        exists=True,
    ),
]
_Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for the fastest plan as device mesh, flags of Megatron-LM, configurations "
        "of torchtitan and of fivefold train: those that can run it.",
    ),
]
_Base = Annotated[
    str | None,
    typer.Option(
        metavar="PACKAGE.FUNCTION",
        help="torchtitan's configuration of the model, such as llama3.llama3_8b; found by its "
        "sizes where it is known.",
    ),
]


def plan_command(  # noqa: PLR0913 - each option is a parameter
    job: _Job,
    *,
    cluster: ClusterOption,
    top: Annotated[int, typer.Option(min=1, help="How many of the fastest plans to show.")] = 5,
    front: Annotated[
        bool, typer.Option("--front", help="Show the Pareto front of time against memory too.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the fastest plan: with --for one that the program runs, else a "
            "\\[plan] table.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="|".join(TARGETS),
            help="Only plans that this program can run.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs, where the files do not say how many.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of an optimizer step over all GPUs.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None,
    write: _Write = None,
    torchtitan_base: _Base = None,
    report: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search all ways to split a job over a cluster for the fastest that fits in memory.

    JOB is a job file, a configuration of fivefold train, or a Hugging Face config.json (with
    --global-batch). With a [plan] table in a job file nothing is searched: that plan is judged.

    Examples:
        $ fivefold plan job.toml --cluster h100-torchtitan:16 --for torchtitan -o planned.py

    Raises:
        FivefoldError: Whatever planning met; the entry point prints it.
    """
    if target is not None and target not in TARGETS:
        message = f"--for {target!r} is no program that plans are written for"
        raise ArgumentError(message, hint=f"use one of {', '.join(TARGETS)}")
    require_writable(output, write, report)
    where = load_cluster(cluster)
    sizes = JobSizes(gpus=gpus, global_batch=global_batch, seq_len=seq_len)
    planned = read_job(job, where, sizes)
    where = _as_sent(where, planned.config, target)
    what, result = planned.job, None
    if what.plan is None:
        result = _search(what, where, top=top, front=front or report is not None, target=target)
    best = (_judge(what, where, target),) if result is None else result.best
    if output is not None:
        text = plan_to_toml(best[0].plan)
        if target is not None:
            text = runnable(target, planned, best[0], where, base=torchtitan_base)
        write_text(output, text)
    if write is not None:
        write_plan_files(write, planned, best[0], where, base=torchtitan_base)
    if report is not None:
        _write_page(report, what, where, best, result)
    if as_json:
        typer.echo(json.dumps(_document(what, where, best, result), indent=2))
    else:
        _show(what, where, best, result if front or result is None else _without_front(result))
    if output is not None:
        typer.echo(f"written: {output}", err=True)


def _as_sent(cluster: Cluster, config: TrainConfig | None, target: str | None) -> Cluster:
    """Return the cluster with gradients as wide as fivefold's trainer sends them."""
    if config is None and target != "train":
        return cluster
    codec = "fp32" if config is None else config.sync.codec or "fp32"
    device = dataclasses.replace(cluster.device, gradient_wire_bytes=CODEC_BYTES[codec])
    return dataclasses.replace(cluster, device=device)


def _without_front(result: PlanSearchResult) -> PlanSearchResult:
    """What was found but for the front, which the page wanted and nobody asked to be printed."""
    return dataclasses.replace(result, front=())


def _write_page(
    path: Path,
    job: Job,
    cluster: Cluster,
    best: tuple[PlanPrediction, ...],
    result: PlanSearchResult | None,
) -> None:
    page = split_page(job, cluster, best, result=result, parts=PARTS, command=typed_command())
    write_page(page, path)


def _search(
    job: Job, cluster: Cluster, *, top: int, front: bool, target: str | None
) -> PlanSearchResult:
    if target is None:
        return search_plans(
            job.model, cluster.device, cluster.fabric, space=job.space, top=top, front=front
        )
    space = space_of_target(job.space, target, gpus_per_node=cluster.fabric.gpus_per_node)
    most = max(top, _LOOKED_AT)
    found = search_plans(
        job.model, cluster.device, cluster.fabric, space=space, top=most, front=front
    )
    problems = [target_problem(job.model, one.plan, target) for one in found.best]
    able = [one for one, problem in zip(found.best, problems, strict=True) if problem is None]
    if not able:
        message = f"{target} can run none of the {len(problems)} fastest plans: {problems[0]}"
        raise InfeasibleError(message, hint="limit [search] to what it can run, or leave out --for")
    runs = [one for one in found.front if target_problem(job.model, one.plan, target) is None]
    return dataclasses.replace(found, best=tuple(able[:top]), front=tuple(runs))


def _judge(job: Job, cluster: Cluster, target: str | None) -> PlanPrediction:

    assert job.plan is not None, "only called with a plan"
    if target is not None and (problem := target_problem(job.model, job.plan, target)) is not None:
        message = f"{target} cannot run the [plan] of the job file: {problem}"
        raise InfeasibleError(message, hint="leave out [plan] to search for one that it can run")
    found = evaluate_plan(job.model, cluster.device, cluster.fabric, plan=job.plan)
    if not found.fits:
        message = (
            f"the plan does not fit: memory binds; it needs "
            f"{format_bytes(found.memory.total_bytes)} a GPU, {cluster.name!r} has "
            f"{format_bytes(cluster.device.memory_bytes)}"
        )
        raise InfeasibleError(message, hint="leave out [plan] to search for one that fits")
    return found


def _document(
    job: Job, cluster: Cluster, best: tuple[PlanPrediction, ...], result: PlanSearchResult | None
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": job.model.name, "parameters": job.model.num_parameters, "cluster": cluster.name,
        "best": [_facts(one) for one in best],
    }  # fmt: skip
    if result is not None:
        document |= {
            "front": [_facts(one) for one in result.front], "num_plans": result.num_plans,
            "num_evaluated": result.num_evaluated, "ruled_out": result.ruled_out,
            "seconds": result.seconds,
        }  # fmt: skip
    return document


def _facts(found: PlanPrediction) -> dict[str, Any]:
    memory = dataclasses.asdict(found.memory) | {"total_bytes": found.memory.total_bytes}
    return {
        "plan": dataclasses.asdict(found.plan), "time_s": found.time_s, "mfu": found.mfu,
        "time": dataclasses.asdict(found.time), "memory": memory,
    }  # fmt: skip


def _show(
    job: Job, cluster: Cluster, best: tuple[PlanPrediction, ...], result: PlanSearchResult | None
) -> None:

    console = Console(highlight=False)
    billions = job.model.num_parameters / 1e9
    console.print(
        f"[bold]{escape(job.model.name)}[/bold], {billions:.1f} B parameters, "
        f"{job.space.num_gpus} GPUs of {escape(cluster.name)}, batch {job.space.global_batch}"
    )
    console.print(_plans("fastest plans" if result else "the plan", best))
    console.print(_breakdown(best[0]))
    if result is None:
        return
    if result.front:
        console.print(_plans("front of time against memory, in steps", _thinned(result.front)))
    console.print(DEGREES)
    console.print(
        f"{result.num_plans:,} plans in {result.seconds:.1f} s: {result.num_evaluated:,} "
        f"evaluated, {result.num_bounded:,} ruled out by bounds"
    )
    reasons = sorted(result.ruled_out.items(), key=lambda item: -item[1])
    for reason, count in reasons[:_MOST_REASONS]:
        console.print(f"  {count:>12,}  {reason}", soft_wrap=True, markup=False)
    if rest := sum(count for _, count in reasons[_MOST_REASONS:]):
        others = len(reasons) - _MOST_REASONS
        console.print(f"  {rest:>12,}  for {others} other reasons: --json", soft_wrap=True)


def _plans(title: str, found: tuple[PlanPrediction, ...]) -> Any:

    table = Table(title=title, title_justify="left")
    for name in ("time", "MFU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("split", no_wrap=True)
    table.add_column("how")
    for one in found:
        table.add_row(
            f"{one.time_s:.4g} s", f"{100 * one.mfu:.1f} %",
            f"{one.memory.total_bytes / 2**30:.1f} GiB", degrees_of(one.plan),
            settings_of(one.plan),
        )  # fmt: skip
    return table


def _thinned(front: tuple[PlanPrediction, ...]) -> tuple[PlanPrediction, ...]:
    """Points of the front that save at least a twentieth of the memory of the one before."""
    shown: list[PlanPrediction] = []
    for one in front:
        if not shown or one.memory.total_bytes < 0.95 * shown[-1].memory.total_bytes:
            shown.append(one)
    return tuple(shown)


def _breakdown(found: PlanPrediction) -> Any:

    table = Table(title="where the time of the first goes", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, label in PARTS.items():
        seconds = getattr(found.time, name)
        share = seconds / found.time_s
        if share >= 5e-4:
            table.add_row(label, f"{seconds:.4g} s", "#" * round(40 * share))
    return table
