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
from fivefold.cli._later import later
from fivefold.cli._options import JsonOption, PageOption
from fivefold.cli._outputs import require_writable
from fivefold.cli._plan_check import check as check_folder
from fivefold.cli._plan_compare import compare as compare_on
from fivefold.cli._plan_compare import plan_record, write_csv
from fivefold.cli._plan_files import write_plan_files
from fivefold.cli._plan_page import split_page
from fivefold.cli._plan_words import PARTS
from fivefold.errors import InfeasibleError
from fivefold.units import format_bytes

with later():
    from fivefold.runs import write_text
    from fivefold.strategy import (
        Cluster,
        Job,
        PlanPrediction,
        PlanSearchResult,
        evaluate_plan,
        load_cluster,
        load_job,
        megatron_flags,
        plan_to_toml,
        search_plans,
    )
    from fivefold.strategy.compare import tokens_per_s
    from fivefold.strategy.model import ModelSpec
    from fivefold.strategy.words import DEGREES, degrees_of, overlap_of, settings_of


_MOST_REASONS = 8
_Job = Annotated[
    Path | None,
    typer.Argument(metavar="JOB", help="Job file (TOML).", exists=True, dir_okay=False),
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
_ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE", help="A known GPU and its software, such as h100-nemo, or a TOML file."
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
    cluster: _ClusterOption = None,
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
        Path | None, typer.Option(help="Write the fastest plan to this TOML file.")
    ] = None,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Print the fastest plan as flags of Megatron-LM.")
    ] = False,
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

    With a [plan] table in the job file nothing is searched: that plan is judged.

    Examples:
        $ fivefold plan job.toml --compare a.toml h100-nemo --price "2.5 USD/GPU h"

    Raises:
        FivefoldError: Whatever planning met; the entry point prints it.
    """
    forms = _forms(megatron=megatron, json=as_json, csv=as_csv, github=as_github)
    if check is not None:
        _check(check, job, cluster, forms)
        return
    job = _require_job(job, github=as_github)
    if compare:
        _refuse_beside_compare(output=output, write=write, report=report, megatron=megatron)
        names = [str(job), *(clusters or []), *([] if cluster is None else [cluster])]
        form = "json" if as_json else "csv" if as_csv else "text"
        compare_on(names, prices=price or [], tokens=tokens, form=form)
        return
    _require_one_cluster(cluster, clusters, price=price, tokens=tokens)
    assert cluster is not None, "required above"
    require_writable(output, write, report)
    where = load_cluster(cluster)
    what = load_job(job, cluster=where)
    result = None
    if what.plan is None:
        result = _search(what, where, top=top, front=front or report is not None)
    best = (_judge(what, where),) if result is None else result.best
    _write_files(what, best[0], output=output, folder=write, base=torchtitan_base)
    if report is not None:
        _write_page(report, what, where, best, result)
    if megatron:
        typer.echo(" ".join(megatron_flags(what.model, best[0].plan)))
    elif as_csv:
        write_csv([plan_record(what.model, one) for one in best])
    elif as_json:
        typer.echo(json.dumps(_document(what, where, best, result), indent=2))
    else:
        _show(what, where, best, result if front or result is None else _without_front(result))


def _forms(**given: bool) -> dict[str, bool]:
    named = [f"--{name}" for name, value in given.items() if value]
    if len(named) > 1:
        message = f"{named[0]} and {named[1]} both write to standard output"
        raise ArgumentError(message, hint="give one of them; --write FOLDER keeps the flags")
    return {f"--{name}": value for name, value in given.items()}


def _require_job(job: Path | None, *, github: bool) -> Path:
    if github:
        message = "--github is of --check; got it without"
        raise ArgumentError(message, hint="add --check DIR")
    if job is None:
        message = "missing argument 'JOB'"
        raise ArgumentError(message, hint="see fivefold plan --help")
    return job


def _check(folder: Path, job: Path | None, cluster: str | None, forms: dict[str, bool]) -> None:
    if job is not None or forms["--megatron"]:
        beside = "--megatron" if job is None else str(job)
        message = f"{beside} stands beside --check, which reads the recipes of {folder}"
        raise ArgumentError(message, hint="give --check DIR --cluster NAME alone")
    _require_one_cluster(cluster, None)
    assert cluster is not None, "required above"
    named = [name.removeprefix("--") for name, given in forms.items() if given]
    form: Any = named[0] if named else "text"
    check_folder(folder, cluster=cluster, form=form)


def _refuse_beside_compare(**given: Any) -> None:
    for name, value in given.items():
        if value:
            message = f"--{name} is of one cluster, and --compare looks at several"
            raise ArgumentError(message, hint="plan the cluster that you choose by itself")


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


def _write_files(
    job: Job, best: PlanPrediction, *, output: Path | None, folder: Path | None, base: str | None
) -> None:

    if output is not None:
        write_text(output, plan_to_toml(best.plan))
    if folder is not None:
        write_plan_files(folder, job, best.plan, base=base)


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


def _search(job: Job, cluster: Cluster, *, top: int, front: bool) -> PlanSearchResult:

    return search_plans(
        job.model, cluster.device, cluster.fabric, space=job.space, top=top, front=front
    )


def _judge(job: Job, cluster: Cluster) -> PlanPrediction:

    assert job.plan is not None, "only called with a plan"
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
        "best": [_facts(job.model, one) for one in best],
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
    job: Job, cluster: Cluster, best: tuple[PlanPrediction, ...], result: PlanSearchResult | None
) -> None:

    console = Console(highlight=False)
    billions = job.model.num_parameters / 1e9
    console.print(
        f"[bold]{escape(job.model.name)}[/bold], {billions:.1f} B parameters, "
        f"{job.space.num_gpus} GPUs of {escape(cluster.name)}, batch {job.space.global_batch}"
    )
    console.print(_plans("fastest plans" if result else "the plan", job.model, best))
    console.print(_breakdown(best[0]))
    if result is None:
        return
    if result.front:
        console.print(
            _plans("front of time against memory, in steps", job.model, _thinned(result.front))
        )
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
