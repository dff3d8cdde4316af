"""``fivefold plan --compare`` and ``--check``: one job on several clusters, recipes of a folder."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from fivefold.cli._later import later
from fivefold.cli._options import ArgumentError, show, write_json
from fivefold.errors import InfeasibleError
from fivefold.units import format_duration_s

with later():
    from fivefold.report.page import DataTable
    from fivefold.strategy import PlanPrediction, load_cluster, load_job
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


def compare(names: Sequence[str], *, prices: Sequence[str], tokens: str | None, form: str) -> None:
    """Compare one job on several clusters (names in any order) and show it as ``form`` says."""
    job, clusters = _job_and_clusters(names)
    if len(prices) not in {0, 1, len(clusters)}:
        message = f"there are {len(prices)} prices for {len(clusters)} clusters"
        raise ArgumentError(message, hint="give --price once for all, or once for each in order")
    costs = [price_of(text) for text in prices]
    costs = costs * len(clusters) if len(costs) == 1 else costs
    budget = None if tokens is None else tokens_of(tokens)
    wheres = [load_cluster(name) for name in clusters]
    outcomes = compare_clusters([(load_job(job, cluster=where), where) for where in wheres])
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
        write_json({"tokens": budget, "clusters": records})
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
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
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
    records = [{k: v for k, v in one.items() if not isinstance(v, dict)} for one in records]
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


_ROWS = (
    ("GPUs", "gpus", "{:,}"), ("split", "split", "{}"), ("how", "settings", "{}"),
    ("beside compute", "beside_compute", "{}"), ("micro-batches", "micro_batches", "{:,}"),
    ("iteration", "iteration_s", ""), ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"), ("MFU", "mfu", "{:.1%}"),
    ("memory in GiB", "memory_gib", "{:.1f}"), ("GPU hours", "gpu_hours", "{:,.0f}"),
    ("days", "days", "{:,.1f}"), ("cost", "cost", "{:,.0f}"),
    ("network half as fast", "network_half_change", "{:+.1%}"),
    ("network twice as fast", "network_twice_change", "{:+.1%}"),
    ("no plan", "problem", "{}"),
)  # fmt: skip


def _show(model: ModelSpec, records: Sequence[dict[str, Any]], tokens: float) -> None:
    rows = tuple(
        (label, *(_cell(record, name, form) for record in records))
        for label, name, form in _ROWS
        if any(name in record for record in records)
    )
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


def _cell(record: dict[str, Any], name: str, form: str) -> str:
    if name not in record:
        return ""
    if name == "iteration_s":
        return format_duration_s(record[name])
    text = form.format(record[name])
    return f"{text} {record['currency']}" if name == "cost" else text


Form = Literal["text", "json", "csv", "github"]
_FAILED = ("invalid", "memory")


def check(folder: Path, *, cluster: str, form: Form) -> None:
    """Check the recipes of a folder and show what was found; exit code 1 where one is no good."""
    found = list(check_recipes(folder, load_cluster(cluster)))
    records = [_verdict_record(one) for one in found]
    if form == "json":
        write_json(records)
    elif form == "csv":
        write_csv(records)
    elif form == "github":
        for one in found:
            typer.echo(_annotation(one))
    else:
        _show_verdicts(found, cluster)
    if any(one.status in _FAILED for one in found):
        raise typer.Exit(1)


def _verdict_record(one: RecipeVerdict) -> dict[str, Any]:
    record: dict[str, Any] = {
        "path": str(one.path), "line": one.line, "program": one.program, "status": one.status,
        "message": one.message, "hint": one.hint, "assumed": ", ".join(one.assumed),
    }  # fmt: skip
    if one.prediction is not None and one.model is not None:
        record |= {"model": one.model.name} | plan_record(one.model, one.prediction)
    return record


def _annotation(one: RecipeVerdict) -> str:
    kind = {"ok": "notice", "unknown": "warning"}.get(one.status, "error")
    path = one.path
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    said = one.message + (f"; {one.hint}" if one.hint else "")
    said += f"; assumed: {', '.join(one.assumed)}" if one.assumed else ""
    title = f"fivefold plan: {one.status}"
    where = f"file={_property(os.fspath(path))},line={one.line},title={_property(title)}"
    return f"::{kind} {where}::{_data(said)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _show_verdicts(found: Sequence[RecipeVerdict], cluster: str) -> None:
    rows = []
    for one in found:
        memory = rate = ""
        if one.prediction is not None and one.model is not None:
            record = plan_record(one.model, one.prediction)
            memory = f"{record['memory_gib']:.1f} GiB"
            rate = f"{record['tokens_per_s_per_gpu']:,.0f}"
        what = f"{one.program}: {one.message}"
        what += f"; {one.hint}" if one.hint else ""
        what += f" (assumed: {', '.join(one.assumed)})" if one.assumed else ""
        rows.append((str(one.path), one.status, memory, rate, what))
    names = ("recipe", "status", "memory", "tokens/s/GPU", "what")
    table = DataTable.of(names, rows, text_columns=(1, 4))
    counts = {status: sum(one.status == status for one in found) for status in
              ("ok", *_FAILED, "unknown")}  # fmt: skip
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    show(f"recipes on {cluster}: {len(found)}", table, said)
