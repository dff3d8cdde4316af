"""``fivefold plan``: how to split one job over a cluster, what it costs and what was ruled out."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli._codesign import write_page
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
from fivefold.cli._plan_files import (
    JobSizes,
    PlannedJob,
    as_sent,
    read_job,
    runnable,
    write_plan_files,
)
from fivefold.cli._plan_page import FoundPlans, split_page
from fivefold.errors import InfeasibleError
from fivefold.units import format_bytes

with later():
    from fivefold.report import print_page
    from fivefold.report.format import typed_command
    from fivefold.runs import write_text
    from fivefold.strategy import (
        TARGETS,
        Cluster,
        Job,
        ParallelPlan,
        PlanPrediction,
        evaluate_plan,
        load_cluster,
        plan_to_toml,
        search_plans,
        space_of_target,
        target_problem,
    )
    from fivefold.strategy.model import ModelSpec
    from fivefold.strategy.search import tokens_per_s


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
    typer.Argument(metavar="CLUSTER", help="With --compare: clusters, as --cluster has them."),
]
_Compare = Annotated[
    bool, typer.Option("--compare", help="Plan the job on each of several clusters.")
]
_Check = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Check the recipes of a folder (torchtitan, Megatron-LM, NeMo, fivefold) for "
        "validity and memory; exit code 1 where one fails.",
        exists=True,
    ),
]
_Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        help="With --compare: such as '2.5 USD/GPU h', once for all or for each cluster in order.",
    ),
]
_Tokens = Annotated[
    str | None,
    typer.Option(
        help="With --compare: tokens to train on, such as 15T.", show_default="20 per parameter"
    ),
]
_Top = Annotated[int, typer.Option(min=1, help="How many of the fastest plans to show.")]
_Front = Annotated[
    bool, typer.Option("--front", help="Show the Pareto front of time against memory too.")
]
_Output = Annotated[
    Path | None,
    output_option(
        "The fastest plan: with --for a file that the program runs, else a \\[plan] table."
    ),
]
_Target = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="train|torchtitan|megatron",
        help="Only plans that this program can run.",
    ),
]
_Gpus = Annotated[
    int | None, typer.Option(min=1, help="GPUs, where the files do not say how many.")
]
_Batch = Annotated[
    int | None, typer.Option(min=1, help="Samples of an optimizer step over all GPUs.")
]
_Length = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")]
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
_Csv = Annotated[bool, typer.Option("--csv", help="Write the plans as CSV.")]
_Github = Annotated[bool, typer.Option("--github", help="With --check: write GitHub annotations.")]


def plan_command(  # noqa: PLR0913 - each option is a parameter
    job: _Job = None,
    clusters: _Clusters = None,
    *,
    cluster: OptionalClusterOption = None,
    compare: _Compare = False,
    check: _Check = None,
    price: _Prices = None,
    tokens: _Tokens = None,
    top: _Top = 5,
    front: _Front = False,
    output: _Output = None,
    target: _Target = None,
    gpus: _Gpus = None,
    global_batch: _Batch = None,
    seq_len: _Length = None,
    write: _Write = None,
    torchtitan_base: _Base = None,
    report: PageOption = None,
    as_json: JsonOption = False,
    as_csv: _Csv = False,
    as_github: _Github = False,
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
    name = _one_cluster(cluster, clusters, price=price, tokens=tokens)
    require_writable(output, write, report)
    where = load_cluster(name)
    sizes = JobSizes(gpus=gpus, global_batch=global_batch, seq_len=seq_len)
    planned = read_job(job, where, sizes)
    if planned.config is not None or target == "train":
        where = as_sent(where, planned.config)
    found = _found(planned.job, where, top=top, front=front or report is not None, target=target)
    if write is not None:
        write_plan_files(write, planned, found.best[0], where, base=torchtitan_base)
    if output is not None:
        write_text(output, _fastest(planned, found, target, base=torchtitan_base))
    if report is not None:
        write_page(split_page(found, command=typed_command(sys.argv)), report)
    _put_out(form, found)
    if output is not None:
        typer.echo(f"written: {output}", err=True)


def _fastest(
    planned: PlannedJob, found: FoundPlans, target: str | None, *, base: str | None
) -> str:
    """Return the fastest plan as a table, or as the file that a program runs."""
    best = found.best[0]
    if target is None:
        return plan_to_toml(best.plan)
    return runnable(target, planned, best, found.cluster, base=base)


def _put_out(form: str, found: FoundPlans) -> None:
    if form == "csv":
        write_csv([plan_record(found.job.model, one) for one in found.best])
    elif form == "json":
        typer.echo(json.dumps(_document(found), indent=2))
    else:
        print_page(split_page(found))


def _form(**given: bool) -> Any:
    named = [name for name, value in given.items() if value]
    if len(named) > 1:
        message = f"--{named[0]} and --{named[1]} both write to standard output"
        raise ArgumentError(message, hint="give one of them")
    return named[0] if named else "text"


def _require_job(job: Path | None, target: str | None, *, github: bool) -> Path:
    if github:
        message = "--github is for --check, which was not given"
        raise ArgumentError(message, hint="add --check DIR")
    if job is None:
        message = "missing argument 'JOB'"
        raise ArgumentError(message, hint="see fivefold plan --help")
    if target is not None and target not in TARGETS:
        message = f"--for does not know the program {target!r}"
        raise ArgumentError(message, hint=f"use one of {', '.join(TARGETS)}")
    return job


def _check(folder: Path, job: Path | None, cluster: str | None, form: Any) -> None:
    if job is not None:
        message = f"--check reads the recipes of {folder} and takes no job file; got {job}"
        raise ArgumentError(message, hint="give --check DIR --cluster NAME alone")
    check_folder(folder, cluster=_one_cluster(cluster, None), form=form)


def _refuse_beside(option: str, **given: Any) -> None:
    """Refuse options that another one would leave without effect."""
    for name, value in given.items():
        if value:
            message = f"{option} does not take {name}, which is for a plan on one cluster"
            raise ArgumentError(message, hint="leave it out, or plan that cluster by itself")


def _one_cluster(cluster: str | None, clusters: list[str] | None, **compared: Any) -> str:
    if clusters:
        message = f"a cluster beside the job file needs --compare; got {clusters[0]!r}"
        raise ArgumentError(message, hint="write --cluster before it, or --compare for several")
    if cluster is None:
        message = "missing option '--cluster'"
        raise ArgumentError(message, hint="such as --cluster h100-nemo, or a TOML file")
    for name, value in compared.items():
        if value:
            message = f"--{name} is for --compare, which was not given; got {value!r}"
            raise ArgumentError(message, hint="add --compare and the clusters")
    return cluster


def _found(job: Job, cluster: Cluster, *, top: int, front: bool, target: str | None) -> FoundPlans:
    """Search for plans, or judge the one that the job has."""
    if job.plan is not None:
        best = _judge(job, job.plan, cluster, target)
        return FoundPlans(job=job, cluster=cluster, best=(best,))
    space, most = job.space, top
    if target is not None:
        space = space_of_target(space, target, gpus_per_node=cluster.fabric.gpus_per_node)
        most = max(top, _LOOKED_AT)
    found = search_plans(
        job.model, cluster.device, cluster.fabric, space=space, top=most, front=front
    )
    if target is not None:
        problems = [target_problem(job.model, one.plan, target) for one in found.best]
        able = [one for one, problem in zip(found.best, problems, strict=True) if problem is None]
        if not able:
            message = f"{target} can run none of the {len(problems)} fastest plans: {problems[0]}"
            raise InfeasibleError(
                message, hint="limit [search] to what it can run, or leave out --for"
            )
        runs = [one for one in found.front if target_problem(job.model, one.plan, target) is None]
        found = dataclasses.replace(found, best=tuple(able[:top]), front=tuple(runs))
    return FoundPlans(job=job, cluster=cluster, best=found.best, result=found)


def _judge(job: Job, plan: ParallelPlan, cluster: Cluster, target: str | None) -> PlanPrediction:
    if target is not None and (problem := target_problem(job.model, plan, target)) is not None:
        message = f"{target} cannot run the [plan] of the job file: {problem}"
        raise InfeasibleError(message, hint="leave out [plan] to search for one that it can run")
    found = evaluate_plan(job.model, cluster.device, cluster.fabric, plan=plan)
    if not found.fits:
        message = (
            f"the plan does not fit: memory binds; it needs "
            f"{format_bytes(found.memory.total_bytes)} a GPU, {cluster.name!r} has "
            f"{format_bytes(cluster.device.memory_bytes)}"
        )
        raise InfeasibleError(message, hint="leave out [plan] to search for one that fits")
    return found


def _document(found: FoundPlans) -> dict[str, Any]:
    model, best, result = found.job.model, found.best[0], found.result
    bar = found.error_bar
    document: dict[str, Any] = {
        "model": model.name, "parameters": model.num_parameters, "cluster": found.cluster.name,
        "best": [_facts(model, one) for one in found.best],
        "error_bar": dataclasses.asdict(bar) | {"interval_s": bar.interval_s(best.time_s)},
    }  # fmt: skip
    if result is not None:
        document |= {
            "front": [_facts(model, one) for one in result.front],
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
