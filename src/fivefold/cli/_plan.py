"""``fivefold plan``: how to split one job over a cluster, what it costs and what was ruled out.

``--compare`` plans it on several clusters, ``--check`` judges the recipes of a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fivefold.cli._options import (
    ArgumentError,
    JsonOption,
    OptionalClusterOption,
    PageOption,
    VerboseOption,
    output_option,
    require_writable,
)

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
        help="Check the recipes of a folder (Megatron-LM, torchtitan, NeMo, Primus, fivefold) for "
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
    Literal["train", "torchtitan", "megatron"] | None,  # strategy.TARGETS, which loads later
    typer.Option("--for", help="Only plans that this program can run."),
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
_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE|NAME",
        help="With --check: the model of recipes that do not say its sizes, a config.json or a "
        "known name.",
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
    model: _Model = None,
    verbose: VerboseOption = False,
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
        $ fivefold plan job.toml --cluster h100-80gb-torchtitan:16 --for torchtitan -o planned.py
        $ fivefold plan job.toml --compare a.toml h100-nemo --price "2.5 USD/GPU h"
    """
    form = _form(json=as_json, csv=as_csv, github=as_github)
    of_one = {
        "--output": output, "--write": write, "--report": report, "--for": target, "--gpus": gpus,
        "--global-batch": global_batch, "--seq-len": seq_len, "--front": front,
        "--torchtitan-base": torchtitan_base,
    }  # fmt: skip
    beside = "{option} does not take {name}, which is for a plan on one cluster"
    alone = "leave it out, or plan that cluster by itself"
    unasked = "{name} is for {option}, which was not given"
    if check is not None:
        _refuse("--check", of_one | {"--compare": compare, "--price": price}, beside, alone)
        if job is not None:
            message = f"--check reads the recipes of {check} and takes no job file; got {job}"
            raise ArgumentError(message, hint="give --check DIR --cluster NAME alone")
        name = _one_cluster(cluster, None)
        from fivefold.cli._plan_work import check_folder

        check_folder(check, cluster=name, form=form, model=model, verbose=verbose)
        return
    only_check = {"--model": model, "--verbose": verbose, "--github": as_github}
    _refuse("--check", only_check, unasked, "add --check DIR")
    if job is None:
        message = "missing argument 'JOB'"
        raise ArgumentError(message, hint="see fivefold plan --help")
    if compare:
        _refuse("--compare", of_one, beside, alone)
        names = [str(job), *(clusters or []), *([] if cluster is None else [cluster])]
        from fivefold.cli._plan_work import compare_on

        compare_on(names, prices=price or [], tokens=tokens, form=form)
        return
    name = _one_cluster(cluster, clusters)
    budget = {"--price": price, "--tokens": tokens}
    _refuse("--compare", budget, unasked + "; got {value!r}", "add --compare and the clusters")
    require_writable(output, write, report)
    from fivefold.strategy import load_cluster

    where = load_cluster(name)  # what is wrong with it is told before compiled loops are loaded
    from fivefold.cli._plan_work import PlanRequest, plan_on

    sizes = {"gpus": gpus, "global_batch": global_batch, "seq_len": seq_len}
    plan_on(PlanRequest(
        job=job, cluster=where, sizes=sizes, top=top, front=front, target=target, form=form,
        base=torchtitan_base, write=write, output=output, report=report,
    ))  # fmt: skip


def _form(**given: bool) -> str:
    named = [name for name, value in given.items() if value]
    if len(named) > 1:
        message = f"--{named[0]} and --{named[1]} both write to standard output"
        raise ArgumentError(message, hint="give one of them")
    return named[0] if named else "text"


def _refuse(option: str, given: Mapping[str, Any], message: str, hint: str) -> None:
    """Refuse options that would be without effect."""
    for name, value in given.items():
        if value:
            raise ArgumentError(message.format(option=option, name=name, value=value), hint=hint)


def _one_cluster(cluster: str | None, clusters: list[str] | None) -> str:
    if clusters:
        message = f"a cluster beside the job file needs --compare; got {clusters[0]!r}"
        raise ArgumentError(message, hint="write --cluster before it, or --compare for several")
    if cluster is None:
        message = "missing option '--cluster'"
        raise ArgumentError(message, hint="such as --cluster h100-nemo, or a TOML file")
    return cluster
