"""``fivefold plan --compare``: one job on several clusters, and what each would cost."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._options import ArgumentError, show, write_json
from fivefold.cli._plan_columns import PLAN_COLUMNS, plan_record
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.files import read_toml
from fivefold.report.columns import Column, column_table, csv_of, record_of
from fivefold.strategy import load_cluster, load_job
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.search import ClusterOutcome, compare_clusters

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
        typer.echo(csv_of(records), nl=False)
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


# Each is read from the outcome on a cluster, the tokens to train on and the price.
_BEFORE = [
    Column("cluster", "cluster", str, lambda one, *_: one.cluster.name, words=True),
    Column("gpus", "GPUs", "{:,}".format, lambda one, *_: one.num_gpus),
    Column("problem", "no plan", str, lambda one, *_: one.problem or None, words=True),
]
_AFTER = [
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


def _record(outcome: ClusterOutcome, tokens: float, price: Price | None) -> dict[str, Any]:
    record = record_of(_BEFORE, outcome, tokens, price)
    if outcome.best is None:
        return record
    record |= plan_record(outcome.model, outcome.best)
    record |= record_of(_AFTER, outcome, tokens, price)
    return record | {"plan": dataclasses.asdict(outcome.best.plan)}


def _show(model: ModelSpec, records: Sequence[dict[str, Any]], tokens: float) -> None:
    names = [record["cluster"] for record in records]
    columns = {column.key: column for column in (*_BEFORE[1:], *PLAN_COLUMNS, *_AFTER)}
    shown = [column for column in columns.values() if column.key != "currency"]
    table = column_table(shown, records, names)
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
