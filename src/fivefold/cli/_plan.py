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

from fivefold.cli._codesign import typed_command, write_page
from fivefold.cli._later import later
from fivefold.cli._options import (
    ArgumentError,
    JsonOption,
    OptionalClusterOption,
    PageOption,
    output_option,
    require_writable,
)
from fivefold.cli._plan_compare import check as check_folder
from fivefold.cli._plan_compare import compare as compare_on
from fivefold.cli._plan_compare import plan_record, write_csv
from fivefold.cli._plan_files import JobSizes, as_sent, read_job, runnable, write_plan_files
from fivefold.cli._plan_page import PARTS, split_page
from fivefold.errors import InfeasibleError
from fivefold.units import format_bytes

with later():
    from fivefold.runs import write_text
    from fivefold.strategy import (
        TARGETS,
        Cluster,
        Job,
        PlanPrediction,
        PlanSearchResult,
        error_bar,
        evaluate_plan,
        load_cluster,
        plan_to_toml,
        search_plans,
        space_of_target,
        target_problem,
    )
    from fivefold.strategy.compare import tokens_per_s
    from fivefold.strategy.intervals import ErrorBar
    from fivefold.strategy.model import ModelSpec
    from fivefold.strategy.plan import DEGREES, degrees_of, overlap_of, settings_of


_MOST_REASONS = 8
_LOOKED_AT = 200  # fastest plans, of which a program cannot run all
_Job = Annotated[
    Path | None,
    typer.Argument(
        metavar="JOB",
        help="Job file, configuration of fivefold train, or a Hugging Face config.json.",
        exists=True,
    ),
]
_Clusters = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CLUSTER]...", help="With --compare: clusters, as --cluster has them."),
]
_Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        help="With --compare: such as '2.5 USD/GPU h', once for all or for each cluster in order.",
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
    job: _Job = None,
    clusters: _Clusters = None,
    *,
    cluster: OptionalClusterOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Plan the job on each of several clusters.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Check the recipes of a folder (torchtitan, Megatron-LM, NeMo, fivefold) for "
            "validity and memory; exit code 1 where one fails.",
            exists=True,
        ),
    ] = None,
    price: _Prices = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="With --compare: tokens to train on, such as 15T; 20 a parameter."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the fastest plans to show.")] = 5,
    front: Annotated[
        bool, typer.Option("--front", help="Show the Pareto front of time against memory too.")
    ] = False,
    output: Annotated[
        Path | None,
        output_option(
            "The fastest plan: with --for a file that the program runs, else a \\[plan] table."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="train|torchtitan|megatron",
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
    as_csv: Annotated[bool, typer.Option("--csv", help="Write the plans as CSV.")] = False,
    as_github: Annotated[
        bool, typer.Option("--github", help="With --check: write GitHub annotations.")
    ] = False,
) -> None:
    """Search all ways to split a job over a cluster for the fastest that fits in memory.

    JOB is a job file, a configuration of fivefold train, or a Hugging Face config.json (with
    --global-batch). With a [plan] table in a job file nothing is searched: that plan is judged.

    Examples:
        $ fivefold plan job.toml --cluster h100-torchtitan:16 --for torchtitan -o planned.py
        $ fivefold plan job.toml --compare a.toml h100-nemo --price "2.5 USD/GPU h"
    """
    form = _form(json=as_json, csv=as_csv, github=as_github)
    of_one = {
        "--output": output, "--write": write, "--report": report, "--for": target, "--gpus": gpus,
        "--global-batch": global_batch, "--seq-len": seq_len, "--front": front,
        "--torchtitan-base": torchtitan_base,
    }  # fmt: skip
    if check is not None:
        _refuse_beside("--check", **of_one, **{"--compare": compare, "--price": price})
        _check(check, job, cluster, form)
        return
    job = _require_job(job, target, github=as_github)
    if compare:
        _refuse_beside("--compare", **of_one)
        names = [str(job), *(clusters or []), *([] if cluster is None else [cluster])]
        compare_on(names, prices=price or [], tokens=tokens, form=form)
        return
    _require_one_cluster(cluster, clusters, price=price, tokens=tokens)
    assert cluster is not None, "required above"
    require_writable(output, write, report)
    where = load_cluster(cluster)
    sizes = JobSizes(gpus=gpus, global_batch=global_batch, seq_len=seq_len)
    planned = read_job(job, where, sizes)
    if planned.config is not None or target == "train":
        where = as_sent(where, planned.config)
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
        page = split_page(what, where, best, result=result, command=typed_command())
        write_page(page, report)
    _put_out(form, what, where, best, result, front=front)
    if output is not None:
        typer.echo(f"written: {output}", err=True)


def _put_out(
    form: str,
    job: Job,
    cluster: Cluster,
    best: tuple[PlanPrediction, ...],
    result: PlanSearchResult | None,
    *,
    front: bool,
) -> None:
    if form == "csv":
        write_csv([plan_record(job.model, one) for one in best])
    elif form == "json":
        typer.echo(json.dumps(_document(job, cluster, best, result), indent=2))
    else:
        _show(job, cluster, best, result, front=front)


def _form(**given: bool) -> Any:
    named = [name for name, value in given.items() if value]
    if len(named) > 1:
        message = f"--{named[0]} and --{named[1]} both write to standard output"
        raise ArgumentError(message, hint="give one of them")
    return named[0] if named else "text"


def _require_job(job: Path | None, target: str | None, *, github: bool) -> Path:
    if github:
        message = "--github is of --check; got it without"
        raise ArgumentError(message, hint="add --check DIR")
    if job is None:
        message = "missing argument 'JOB'"
        raise ArgumentError(message, hint="see fivefold plan --help")
    if target is not None and target not in TARGETS:
        message = f"--for {target!r} is no program that plans are written for"
        raise ArgumentError(message, hint=f"use one of {', '.join(TARGETS)}")
    return job


def _check(folder: Path, job: Path | None, cluster: str | None, form: Any) -> None:
    if job is not None:
        message = f"{job} stands beside --check, which reads the recipes of {folder}"
        raise ArgumentError(message, hint="give --check DIR --cluster NAME alone")
    _require_one_cluster(cluster, None)
    assert cluster is not None, "required above"
    check_folder(folder, cluster=cluster, form=form)


def _refuse_beside(option: str, **given: Any) -> None:
    """Refuse options that another one would leave without effect."""
    for name, value in given.items():
        if value:
            message = f"{name} is of a plan on one cluster, and {option} does not take it"
            raise ArgumentError(message, hint="leave it out, or plan that cluster by itself")


def _require_one_cluster(cluster: str | None, clusters: list[str] | None, **compared: Any) -> None:
    if clusters:
        message = f"{clusters[0]!r} stands beside the job file, without --compare"
        raise ArgumentError(message, hint="write --cluster before it, or --compare for several")
    if cluster is None:
        message = "missing option '--cluster'"
        raise ArgumentError(message, hint="such as --cluster h100-nemo, or a TOML file")
    for name, value in compared.items():
        if value:
            message = f"--{name} is of --compare; got {value!r} without it"
            raise ArgumentError(message, hint="add --compare and the clusters")


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
    bar = _bar(job, cluster, best[0])
    document: dict[str, Any] = {
        "model": job.model.name, "parameters": job.model.num_parameters, "cluster": cluster.name,
        "best": [_facts(job.model, one) for one in best],
        "error_bar": dataclasses.asdict(bar) | {"interval_s": bar.interval_s(best[0].time_s)},
    }  # fmt: skip
    if result is not None:
        document |= {
            "front": [_facts(job.model, one) for one in result.front],
            "num_plans": result.num_plans, "num_evaluated": result.num_evaluated,
            "ruled_out": result.ruled_out, "seconds": result.seconds,
        }  # fmt: skip
    return document


def _facts(model: ModelSpec, found: PlanPrediction) -> dict[str, Any]:
    memory = dataclasses.asdict(found.memory) | {"total_bytes": found.memory.total_bytes}
    return {
        "plan": dataclasses.asdict(found.plan), "tokens_per_s": tokens_per_s(model, found),
        "micro_batches": found.plan.num_micro_batches, "time_s": found.time_s, "mfu": found.mfu,
        "time": dataclasses.asdict(found.time), "memory": memory,
    }  # fmt: skip


def _show(
    job: Job,
    cluster: Cluster,
    best: tuple[PlanPrediction, ...],
    result: PlanSearchResult | None,
    *,
    front: bool,
) -> None:
    console = Console(highlight=False)
    millions = job.model.num_parameters / 1e6
    size = f"{millions:.1f} M" if millions < 100 else f"{millions / 1e3:.1f} B"
    console.print(
        f"[bold]{escape(job.model.name)}[/bold], {size} parameters, "
        f"{job.space.num_gpus} GPUs of {escape(cluster.name)}, "
        f"batch {job.space.global_batch} x {job.model.seq_len:,} tokens"
    )
    console.print(_plans("fastest plans" if result else "the plan", job.model, best))
    _show_error_bar(console, _bar(job, cluster, best[0]), best)
    console.print(_breakdown(best[0]))
    if result is None:
        return
    if front and result.front:
        console.print(
            _plans("front of time against memory, in steps", job.model, _thinned(result.front))
        )
    console.print(str(DEGREES))
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


def _bar(job: Job, cluster: Cluster, found: PlanPrediction) -> ErrorBar:
    return error_bar(job.model, cluster.device, found.plan, time_s=found.time_s)


def _show_error_bar(console: Any, bar: ErrorBar, best: tuple[PlanPrediction, ...]) -> None:
    low_s, high_s = bar.interval_s(best[0].time_s)
    console.print(
        f"nine of ten runs like the first take {low_s:.3g} to {high_s:.3g} s, by the errors of "
        f"{bar.count} published ones ({bar.like})", soft_wrap=True, markup=False,
    )  # fmt: skip
    equal = sum(bar.equal(best[0].time_s, one.time_s) for one in best)
    if equal > 1:
        console.print(
            f"the first {equal} cannot be told apart: two plans of one job are compared to within "
            f"{100 * bar.plan_share:.0f} %", soft_wrap=True, markup=False,
        )  # fmt: skip


def _plans(title: str, model: ModelSpec, found: tuple[PlanPrediction, ...]) -> Any:
    table = Table(title=title, title_justify="left")
    for name in ("time", "tokens/s\n/GPU", "MFU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("split", no_wrap=True)
    table.add_column("micro-\nbatches", justify="right", no_wrap=True)
    table.add_column("how; beside compute")
    for one in found:
        rate = tokens_per_s(model, one) / one.plan.num_gpus
        table.add_row(
            f"{one.time_s:.4g} s", f"{rate:,.0f}", f"{100 * one.mfu:.1f} %",
            f"{one.memory.total_bytes / 2**30:.1f} GiB", degrees_of(one.plan),
            f"{one.plan.num_micro_batches}",
            f"{settings_of(one.plan)}; {overlap_of(one.plan)}",
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
