"""The work of ``fivefold plan``: on one cluster, on several (--compare), of recipes (--check)."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._codesign_work import write_page
from fivefold.cli._options import ArgumentError, show, write_json
from fivefold.cli._plan_columns import PLAN_COLUMNS, plan_facts, plan_record
from fivefold.cli._plan_files import as_sent, read_job, runnable, write_plan_files
from fivefold.cli._plan_page import FoundPlans, age_of, split_page
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.files import read_toml
from fivefold.report import print_page
from fivefold.report.columns import Column, column_table, csv_of, record_of, row_table
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
from fivefold.strategy.recipes import RecipeVerdict, check_recipes
from fivefold.strategy.search import ClusterOutcome, compare_clusters
from fivefold.units import format_bytes

_LOOKED_AT = 200  # fastest plans, of which a program cannot run all


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan, and where its plans are written."""

    job: Path
    cluster: Cluster
    sizes: Mapping[str, int | None]  # where the job does not say them
    top: int
    front: bool
    target: str | None
    base: str | None  # torchtitan's configuration of the model
    form: str  # of standard output
    write: Path | None
    output: Path | None
    report: Path | None


def plan_on(asked: PlanRequest) -> None:
    """Plan a job on a cluster and write the plans where they are wanted."""
    where = asked.cluster
    sizes = {key: size for key, size in asked.sizes.items() if size is not None}
    planned = read_job(asked.job, where, sizes)
    if planned.config is not None or asked.target == "train":
        where = as_sent(where, planned.config)
    front = asked.front or asked.report is not None
    found = _found(planned.job, where, top=asked.top, front=front, target=asked.target)
    if asked.write is not None:
        write_plan_files(asked.write, planned, found.best[0], where, base=asked.base)
    if asked.output is not None:
        text = runnable(asked.target, planned, found.best[0], where, base=asked.base)
        write_text(asked.output, text)
    if asked.report is not None:
        write_page(split_page(found), asked.report)
    _put_out(asked.form, found)
    if asked.output is not None:
        typer.echo(f"written: {asked.output}", err=True)


def _put_out(form: str, found: FoundPlans) -> None:
    if form == "csv":
        typer.echo(csv_of(plan_record(found.job.model, one) for one in found.best), nl=False)
    elif form == "json":
        typer.echo(json.dumps(_document(found), indent=2))
    else:
        print_page(split_page(found))


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
        "best": [plan_facts(model, one) for one in found.best],
        "error_bar": dataclasses.asdict(bar) | {"interval_s": bar.interval_s(best.time_s)},
    }  # fmt: skip
    if len(found.equal) > 1:
        document |= {"not_told_apart": len(found.equal), "simplest": found.simplest + 1}
    if found.release_warning is not None:
        document["release_warning"] = found.release_warning
    if found.job.reading is not None:
        document["reading"] = found.job.reading.to_json()
    if result is not None:
        document |= {
            "front": [plan_facts(model, one) for one in result.front],
            "num_plans": result.num_plans, "num_evaluated": result.num_evaluated,
            "ruled_out": result.ruled_out, "seconds": result.seconds,
        }  # fmt: skip
    return document


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
    costs: list[Price | None] = [price_of(text) for text in prices] or [None]
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
    priced = zip(outcomes, costs, strict=True)
    records = [_cluster_record(one, budget, price) for one, price in priced]
    if form == "json":
        reading = jobs[0].reading  # of the model's configuration, the same on every cluster
        account = {} if reading is None else {"reading": reading.to_json()}
        write_json({"tokens": budget, "clusters": records} | account)
    elif form == "csv":
        typer.echo(csv_of(records), nl=False)
    else:
        _show_clusters(outcomes[0].model, records, budget)


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


# Each is read from the outcome on a cluster, the tokens to train on and the price.
_CLUSTER_COLUMNS = [
    Column("cluster", "cluster", str, lambda one, *_: one.cluster.name, words=True),
    Column("gpus", "GPUs", "{:,}".format, lambda one, *_: one.num_gpus),
    Column("problem", "no plan", str, lambda one, *_: one.problem or None, words=True),
]
_COST_COLUMNS = [
    Column("gpu_hours", "GPU hours", "{:,.0f}".format, lambda one, tokens, _:
           one.gpu_hours(tokens)),
    Column("days", "days", "{:,.1f}".format, lambda one, tokens, _:
           one.gpu_hours(tokens) / one.num_gpus / 24),
    Column("cost", "cost", "{:,.0f}".format, lambda one, tokens, price:
           price and one.gpu_hours(tokens) * price.amount, unit_key="currency"),
    Column("currency", "currency", str, lambda _one, _tokens, price: price and price.currency,
           detail=True),
    Column("network_half_change", "network half as fast", "{:+.1%}".format, lambda one, *_:
           _change(one, below=True)),
    Column("network_twice_change", "network twice as fast", "{:+.1%}".format, lambda one, *_:
           _change(one, below=False)),
]  # fmt: skip


def _change(outcome: ClusterOutcome, *, below: bool) -> float | None:
    """Return how tokens/s change with a slower or a faster network; None within one node."""
    assert outcome.best is not None, "records of clusters without a plan end before"
    times_s = [time_s for rate, time_s in outcome.at_rate_s.items() if (rate < 1) == below]
    return outcome.best.time_s / times_s[0] - 1 if times_s else None


def _cluster_record(outcome: ClusterOutcome, tokens: float, price: Price | None) -> dict[str, Any]:
    record = record_of(_CLUSTER_COLUMNS, outcome, tokens, price)
    if outcome.best is None:
        return record
    if (warning := age_of(outcome.cluster)) is not None:
        record["release_warning"] = warning
    record |= plan_record(outcome.model, outcome.best)
    record |= record_of(_COST_COLUMNS, outcome, tokens, price)
    return record | {"plan": dataclasses.asdict(outcome.best.plan)}


def _show_clusters(model: ModelSpec, records: Sequence[dict[str, Any]], tokens: float) -> None:
    names = [record["cluster"] for record in records]
    columns = (*_CLUSTER_COLUMNS[1:], *PLAN_COLUMNS, *_COST_COLUMNS)
    shown = {column.key: column for column in columns if column.key != "currency"}
    table = column_table(shown.values(), records, names)
    best = [record for record in records if "gpu_hours" in record]
    key = "cost" if len({record.get("currency") for record in best}) == 1 else "gpu_hours"
    key = key if key in best[0] else "gpu_hours"
    lines = [
        f"{record['cluster']}: {record['release_warning']}"
        for record in records
        if "release_warning" in record
    ]
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


_FAILED = ("invalid", "memory")


def check_folder(
    folder: Path, *, cluster: str, form: str, model: str | None = None, verbose: bool = False
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
        typer.echo(csv_of(records), nl=False)
    elif form == "github":
        for one in found:
            typer.echo(_annotation(one))
    else:
        _show_verdicts(found, records, cluster, verbose=verbose)
    if any(one.status in _FAILED for one in found):
        raise typer.Exit(1)


_RECIPE_COLUMNS = [
    Column("path", "recipe", str, lambda one: str(one.path), words=True),
    Column("line", "line", detail=True),
    Column("program", "program", words=True, detail=True),
    Column("status", "status", words=True),
    Column("message", "message", words=True, detail=True),
    Column("hint", "hint", words=True, detail=True),
    Column("assumed", "assumed", str, lambda one: ", ".join(one.assumed), words=True, detail=True),
]
_SHOWN = ("memory_gib", "tokens_per_s_per_gpu")  # of the plan
_WHAT = Column("what", "what", words=True)  # program, message, hint and assumptions in one cell


def _verdict_record(one: RecipeVerdict) -> dict[str, Any]:
    record = record_of(_RECIPE_COLUMNS, one) | {"reading": one.reading.to_json()}
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
    told = {column.key: column for column in PLAN_COLUMNS}
    columns = [*_RECIPE_COLUMNS, *(told[key] for key in _SHOWN), _WHAT]
    rows = [
        record | {"what": f"{one.program}: {_said(one)}"}
        for one, record in zip(found, records, strict=True)
    ]
    table = row_table(columns, rows)
    counts = {status: sum(one.status == status for one in found) for status in
              ("ok", *_FAILED, "unknown", "no training")}  # fmt: skip
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    accounts = [one.reading.text() for one in found] if verbose else []
    show(f"recipes on {cluster}: {len(found)}", table, said, *accounts)
