"""The work of ``fivefold plan`` on one cluster: search or judge, then write what is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._codesign_work import write_page
from fivefold.cli._plan_columns import plan_facts, plan_record
from fivefold.cli._plan_files import as_sent, read_job, runnable, write_plan_files
from fivefold.cli._plan_page import FoundPlans, split_page
from fivefold.errors import InfeasibleError
from fivefold.report import print_page
from fivefold.report.columns import csv_of
from fivefold.runs import write_text
from fivefold.strategy import (
    Cluster,
    Job,
    ParallelPlan,
    PlanPrediction,
    evaluate_plan,
    search_plans,
    space_of_target,
    target_problem,
)
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
