"""``fivefold plan``: how to split one job over a cluster, what it costs and what was ruled out.

``--compare`` plans it on several clusters, ``--check`` judges the recipes of a folder.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fivefold.cli._codesign import write_page
from fivefold.cli._later import later
from fivefold.cli._options import (
    ArgumentError,
    JsonOption,
    OptionalClusterOption,
    PageOption,
    VerboseOption,
    output_option,
    require_writable,
    show,
    write_json,
)
from fivefold.cli._plan_files import (
    as_sent,
    read_job,
    runnable,
    write_plan_files,
)
from fivefold.cli._plan_page import FoundPlans, split_page
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.files import read_toml
from fivefold.units import format_bytes, format_duration_s

with later():
    from fivefold.report import print_page
    from fivefold.report.page import DataTable
    from fivefold.runs import write_text
    from fivefold.strategy import (
        Cluster,
        Job,
        ParallelPlan,
        PlanPrediction,
        evaluate_plan,
        load_cluster,
        load_job,
        load_model,
        search_plans,
        space_of_target,
        target_problem,
    )
    from fivefold.strategy.hugging_face import is_configuration, read_model
    from fivefold.strategy.model import ModelSpec
    from fivefold.strategy.plan import degrees_of, overlap_of, settings_of
    from fivefold.strategy.recipes import RecipeVerdict, check_recipes
    from fivefold.strategy.search import ClusterOutcome, compare_clusters, tokens_per_s


_TOKENS_A_PARAMETER = 20  # a usual budget, where none is given
_PRICE = re.compile(
    r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<currency>[A-Za-z]{3}|[$€£])\s*/\s*"
    r"GPU[\s-]*(h|hr|hour)\s*",
    re.IGNORECASE,
)
_COUNT = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kMGBT]?)(\s*tokens?)?\s*")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Price:
    """Price of an hour of a GPU."""

    amount: float
    currency: str


def price_of(text: str) -> Price:
    """Return a price such as "2.5 USD/GPU h"."""
    found = _PRICE.fullmatch(text)
    if found is None:
        message = f"a price must be an amount, a currency and /GPU h; got {text!r:.60}"
        raise ArgumentError(message, hint='write --price "2.5 USD/GPU h"')
    return Price(float(found["number"]), found["currency"].upper())


def tokens_of(text: str) -> float:
    """Return a number of tokens such as "15T"."""
    found = _COUNT.fullmatch(text)
    if found is None or float(found["number"]) == 0:
        message = f"a token budget must be a positive count; got {text!r:.60}"
        raise ArgumentError(message, hint="write --tokens 15T, or k, M or B for thousands and up")
    return float(found["number"]) * _UNITS[found["unit"]]


def compare_on(
    names: Sequence[str], *, prices: Sequence[str], tokens: str | None, form: str
) -> None:
    """Compare one job on several clusters (names in any order) and show it as ``form`` says."""
    job, clusters = _job_and_clusters(names)
    if len(prices) not in {0, 1, len(clusters)}:
        message = f"there are {len(prices)} prices for {len(clusters)} clusters"
        raise ArgumentError(message, hint="give --price once for all, or once for each in order")
    costs = [price_of(text) for text in prices]
    costs = costs * len(clusters) if len(costs) == 1 else costs
    budget = None if tokens is None else tokens_of(tokens)
    wheres = [load_cluster(name) for name in clusters]
    jobs = [load_job(job, cluster=where) for where in wheres]
    outcomes = compare_clusters(list(zip(jobs, wheres, strict=True)))
    if all(outcome.best is None for outcome in outcomes):
        reasons = "; ".join(f"{one.cluster.name}: {one.problem}" for one in outcomes)
        raise InfeasibleError(
            f"no plan fits on any cluster: {reasons}",
            hint="more GPUs, a smaller batch, or offload = [true] and zero = [3] in [search]",
        )
    budget = budget or _TOKENS_A_PARAMETER * outcomes[0].model.num_parameters
    records = [
        _record(one, budget, costs[place] if costs else None) for place, one in enumerate(outcomes)
    ]
    if form == "json":
        reading = jobs[0].reading  # of the model's configuration, the same on every cluster
        account = {} if reading is None else {"reading": reading.to_json()}
        write_json({"tokens": budget, "clusters": records} | account)
    elif form == "csv":
        write_csv(records)
    else:
        _show(outcomes[0].model, records, budget)


def _job_and_clusters(names: Sequence[str]) -> tuple[Path, list[str]]:
    jobs = [name for name in names if _is_job(Path(name))]
    clusters = [name for name in names if name not in jobs]
    if len(jobs) != 1 or not clusters:
        given = ", ".join(names) or "nothing"
        raise ArgumentError(
            f"--compare takes one job file and clusters; got {given}",
            hint="fivefold plan job.toml --compare A.toml B.toml",
        )
    return Path(jobs[0]), clusters


def _is_job(path: Path) -> bool:
    """Return whether a file is a job: it says a model. What cannot be read is none."""
    try:
        table = read_toml(path)
    except ConfigurationError:
        return False
    return "model" in table or "global_batch" in table


def plan_record(model: ModelSpec, found: PlanPrediction) -> dict[str, Any]:
    """Return what a plan comes to as a flat record, for tables."""
    rate = tokens_per_s(model, found)
    return {
        "gpus": found.plan.num_gpus, "split": degrees_of(found.plan),
        "settings": settings_of(found.plan), "beside_compute": overlap_of(found.plan),
        "micro_batches": found.plan.num_micro_batches, "iteration_s": found.time_s,
        "tokens_per_s": rate, "tokens_per_s_per_gpu": rate / found.plan.num_gpus,
        "mfu": found.mfu, "memory_gib": found.memory.total_bytes / 2**30,
    }  # fmt: skip


def write_csv(records: Sequence[dict[str, Any]]) -> None:
    """Write records to standard output, a line each below a line of names."""
    records = [
        {key: value for key, value in record.items() if not isinstance(value, dict)}
        for record in records
    ]
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    typer.echo(text.getvalue(), nl=False)


def _record(outcome: ClusterOutcome, tokens: float, price: Price | None) -> dict[str, Any]:
    record: dict[str, Any] = {"cluster": outcome.cluster.name, "gpus": outcome.num_gpus}
    if outcome.best is None:
        return record | {"problem": outcome.problem}
    hours = outcome.gpu_hours(tokens)
    record |= plan_record(outcome.model, outcome.best)
    record |= {"days": hours / outcome.num_gpus / 24, "gpu_hours": hours}
    if price is not None:
        record |= {"cost": hours * price.amount, "currency": price.currency}
    for rate, seconds in outcome.at_rate_s.items():
        name = "half" if rate < 1 else "twice"
        record[f"network_{name}_change"] = outcome.best.time_s / seconds - 1
    record["plan"] = dataclasses.asdict(outcome.best.plan)
    return record


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("GPUs", "gpus", "{:,}".format), ("split", "split", str), ("how", "settings", str),
    ("beside compute", "beside_compute", str), ("micro-batches", "micro_batches", "{:,}".format),
    ("iteration", "iteration_s", format_duration_s), ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}".format), ("MFU", "mfu", "{:.1%}".format),
    ("memory in GiB", "memory_gib", "{:.1f}".format), ("GPU hours", "gpu_hours", "{:,.0f}".format),
    ("days", "days", "{:,.1f}".format), ("cost", "cost", "{:,.0f}".format),
    ("network half as fast", "network_half_change", "{:+.1%}".format),
    ("network twice as fast", "network_twice_change", "{:+.1%}".format),
    ("no plan", "problem", str),
)  # fmt: skip


def _show(model: ModelSpec, records: Sequence[dict[str, Any]], tokens: float) -> None:
    rows = []
    for label, name, write in _ROWS:
        if any(name in record for record in records):
            rows.append((label, *(_cell(record, name, write) for record in records)))
    table = DataTable.of(("", *(record["cluster"] for record in records)), rows)
    best = [record for record in records if "gpu_hours" in record]
    key = "cost" if len({record.get("currency") for record in best}) == 1 else "gpu_hours"
    key = key if key in best[0] else "gpu_hours"
    lines = []
    if len(best) > 1:
        cheapest = min(best, key=lambda record: record[key])
        soonest = min(best, key=lambda record: record["days"])
        least = "cost" if key == "cost" else "GPU hours"
        lines.append(f"least {least}: {cheapest['cluster']}; soonest: {soonest['cluster']}")
    lines.append(
        "network: change of tokens/s with the links between nodes so fast, planned again; all of "
        "it predicted, none run"
    )
    show(f"{model.name}, {tokens / 1e9:,.4g} billion tokens", table, *lines)


def _cell(record: dict[str, Any], name: str, write: Callable[[Any], str]) -> str:
    if name not in record:
        return ""
    text = write(record[name])
    return f"{text} {record['currency']}" if name == "cost" else text


Form = Literal["text", "json", "csv", "github"]
_FAILED = ("invalid", "memory")


def check_folder(
    folder: Path, *, cluster: str, form: Form, model: str | None = None, verbose: bool = False
) -> None:
    """Check the recipes of a folder and show what was found; exit code 1 where one is no good."""
    spec, reading = None, None
    if model is not None:
        spec, reading = read_model(model) if is_configuration(model) else (load_model(model), None)
    where = load_cluster(cluster)
    found = list(check_recipes(folder, where, model=spec, model_reading=reading))
    records = [_verdict_record(one) for one in found]
    if form == "json":
        write_json(records)
    elif form == "csv":
        write_csv([{key: one[key] for key in one if key != "reading"} for one in records])
    elif form == "github":
        for one in found:
            typer.echo(_annotation(one))
    else:
        _show_verdicts(found, records, cluster, verbose=verbose)
    if any(one.status in _FAILED for one in found):
        raise typer.Exit(1)


def _verdict_record(one: RecipeVerdict) -> dict[str, Any]:
    record: dict[str, Any] = {
        "path": str(one.path), "line": one.line, "program": one.program, "status": one.status,
        "message": one.message, "hint": one.hint, "assumed": ", ".join(one.assumed),
        "reading": one.reading.to_json(),
    }  # fmt: skip
    if one.prediction is not None and one.model is not None:
        record |= {"model": one.model.name} | plan_record(one.model, one.prediction)
    return record


def _annotation(one: RecipeVerdict) -> str:
    kind = {"ok": "notice", "no training": "notice", "unknown": "warning"}.get(one.status, "error")
    path = one.path
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    title = f"fivefold plan: {one.status}"
    where = f"file={_property(os.fspath(path))},line={one.line},title={_property(title)}"
    return f"::{kind} {where}::{_data(_said(one))}"


def _said(one: RecipeVerdict) -> str:
    said = one.message + (f"; {one.hint}" if one.hint else "")
    return said + (f"; assumed: {', '.join(one.assumed)}" if one.assumed else "")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _show_verdicts(
    found: Sequence[RecipeVerdict],
    records: Sequence[dict[str, Any]],
    cluster: str,
    *,
    verbose: bool,
) -> None:
    rows = []
    for one, record in zip(found, records, strict=True):
        memory = rate = ""
        if "memory_gib" in record:
            memory = f"{record['memory_gib']:.1f} GiB"
            rate = f"{record['tokens_per_s_per_gpu']:,.0f}"
        rows.append((str(one.path), one.status, memory, rate, f"{one.program}: {_said(one)}"))
    names = ("recipe", "status", "memory", "tokens/s/GPU", "what")
    table = DataTable.of(names, rows, text_columns=(1, 4))
    counts = {status: sum(one.status == status for one in found) for status in
              ("ok", *_FAILED, "unknown", "no training")}  # fmt: skip
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    accounts = [one.reading.text() for one in found] if verbose else []
    show(f"recipes on {cluster}: {len(found)}", table, said, *accounts)


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
    if check is not None:
        _refuse_beside("--check", **of_one, **{"--compare": compare, "--price": price})
        _require_no_job(check, job)
        name = _one_cluster(cluster, None)
        check_folder(check, cluster=name, form=form, model=model, verbose=verbose)
        return
    _refuse_without_check(**{"--model": model, "--verbose": verbose})
    job = _require_job(job, github=as_github)
    if compare:
        _refuse_beside("--compare", **of_one)
        names = [str(job), *(clusters or []), *([] if cluster is None else [cluster])]
        compare_on(names, prices=price or [], tokens=tokens, form=form)
        return
    name = _one_cluster(cluster, clusters, price=price, tokens=tokens)
    require_writable(output, write, report)
    where = load_cluster(name)
    sizes = {"gpus": gpus, "global_batch": global_batch, "seq_len": seq_len}
    planned = read_job(job, where, {key: size for key, size in sizes.items() if size is not None})
    if planned.config is not None or target == "train":
        where = as_sent(where, planned.config)
    found = _found(planned.job, where, top=top, front=front or report is not None, target=target)
    if write is not None:
        write_plan_files(write, planned, found.best[0], where, base=torchtitan_base)
    if output is not None:
        text = runnable(target, planned, found.best[0], where, base=torchtitan_base)
        write_text(output, text)
    if report is not None:
        write_page(split_page(found), report)
    _put_out(form, found)
    if output is not None:
        typer.echo(f"written: {output}", err=True)


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


def _require_job(job: Path | None, *, github: bool) -> Path:
    if github:
        message = "--github is for --check, which was not given"
        raise ArgumentError(message, hint="add --check DIR")
    if job is None:
        message = "missing argument 'JOB'"
        raise ArgumentError(message, hint="see fivefold plan --help")
    return job


def _require_no_job(folder: Path, job: Path | None) -> None:
    if job is not None:
        message = f"--check reads the recipes of {folder} and takes no job file; got {job}"
        raise ArgumentError(message, hint="give --check DIR --cluster NAME alone")


def _refuse_without_check(**given: Any) -> None:
    for name, value in given.items():
        if value:
            message = f"{name} is for --check, which was not given"
            raise ArgumentError(message, hint="add --check DIR")


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
        space = space_of_target(space, target, gpus_per_node=cluster.fabric.gpus_per_host)
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
        "of": found.cluster.device.facts,
        "best": [_facts(model, one) for one in found.best],
        "error_bar": dataclasses.asdict(bar) | {"interval_s": bar.interval_s(best.time_s)},
    }  # fmt: skip
    if found.release_warning is not None:
        document["release_warning"] = found.release_warning
    if found.job.reading is not None:
        document["reading"] = found.job.reading.to_json()
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
