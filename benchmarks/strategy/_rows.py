"""Published rows as runs: reading the tables, filling in what was not printed, splitting."""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.strategy._calibration import MeasuredRun
from fivefold.strategy import (
    Cluster,
    ModelSpec,
    ParallelPlan,
    PlanPrediction,
    evaluate_plan,
    load_model,
)
from fivefold.strategy.parts import LatentAttention, LowRankAdapters, MixtureOfExperts
from fivefold.strategy.plan import plan_problem

__all__ = ["Row", "model_of", "predict", "read_table", "read_vtrain"]

TABLES = Path(__file__).parents[2] / "tests" / "strategy" / "tables"
_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Row:
    """One published row.

    Plans hold several candidates where the source does not print the micro-batch: whoever
    measured took the fastest.
    """

    case: str
    model: ModelSpec
    plans: tuple[ParallelPlan, ...]
    measured_s: float
    role: str
    cluster: str
    source: str = ""
    peers_s: dict[str, float] = field(default_factory=dict)

    def predicted(self, cluster: Cluster, plan: ParallelPlan) -> PlanPrediction:
        """Time and memory of one of its plans."""
        return evaluate_plan(self.model, cluster.device, cluster.fabric, plan=plan)

    def run(self, plan: ParallelPlan | None = None) -> MeasuredRun:
        """As input of a fit."""
        chosen = self.plans[0] if plan is None else plan
        return MeasuredRun(
            case=self.case, model=self.model, plan=chosen, measured_s=self.measured_s
        )


def predict(cluster: Cluster, row: Row) -> float:
    """Seconds of the fastest candidate that fits in memory, or of the leanest."""
    found = [row.predicted(cluster, plan) for plan in row.plans]
    fitting = [one.time_s for one in found if one.fits]
    if fitting:
        return min(fitting)
    return min(found, key=lambda one: one.memory.total_bytes).time_s


def read_table(name: str, *, batches: tuple[int, ...] = _BATCHES) -> list[Row]:
    """The rows of a committed table."""
    document = json.loads((TABLES / f"{name}.json").read_text())
    return [_row(entry, batches) for entry in document["rows"]]


def model_of(entry: dict[str, Any]) -> ModelSpec:
    """The model of a row of a table: a known one by its name, or its sizes."""
    if isinstance(entry["model"], str):
        model = load_model(entry["model"], seq_len=entry["seq_len"])
        adapters = LowRankAdapters(**entry["adapters"]) if "adapters" in entry else None
        further = entry.get("predicted_tokens", 0)
        return dataclasses.replace(model, adapters=adapters, predicted_tokens=further)
    shape = dict(entry["model"])
    if "experts" in shape:
        shape["experts"] = MixtureOfExperts(**shape["experts"])
    if "latent" in shape:
        shape["latent"] = LatentAttention(**shape["latent"])
    return ModelSpec(name=entry["case"], **shape)


def _row(entry: dict[str, Any], batches: tuple[int, ...]) -> Row:
    model = model_of(entry)
    if "micro_batch" in entry["plan"]:
        plans = [ParallelPlan(**entry["plan"])]
    else:
        plans = _candidates(model, entry["plan"], batches)
    return Row(
        case=entry["case"], model=model, plans=tuple(plans), measured_s=entry["measured_s"],
        role=entry["role"], cluster=entry["cluster"], source=entry.get("source", ""),
        peers_s=entry.get("peers_s", {}),
    )  # fmt: skip


def _candidates(
    model: ModelSpec, plan: dict[str, Any], batches: tuple[int, ...]
) -> list[ParallelPlan]:
    local = plan["global_batch"] // plan.get("data", 1)
    plans = [ParallelPlan(**plan, micro_batch=size) for size in batches if local % size == 0]
    return [one for one in plans if plan_problem(model, one) is None]


def read_vtrain(folder: Path, *, multi: bool) -> list[Row]:
    """Rows that vTrain measured: even ones to fit, odd ones to judge."""
    name = "multi" if multi else "single"
    rows = []
    with (folder / f"ground_truth_{name}.csv").open() as file:
        for number, entry in enumerate(csv.DictReader(file)):
            rows.append(_vtrain_row(entry, number))
    return rows


def _vtrain_row(entry: dict[str, str], number: int) -> Row:
    def count(key: str) -> int:
        return int(entry[key])

    model = ModelSpec(
        name=f"h{entry['hidden size']} L{entry['# layers']}", num_layers=count("# layers"),
        hidden=count("hidden size"), num_heads=count("attention heads"),
        seq_len=count("sequence length"), vocab=51200,
    )  # fmt: skip
    plan = ParallelPlan(
        global_batch=count("global batch"), micro_batch=count("micro batch"),
        tensor=count("tensor parallelism"), data=count("data parallelism"),
        pipeline=count("pipeline parallelism"), recompute="full",
    )  # fmt: skip
    case = f"{model.name}, t{plan.tensor} d{plan.data} p{plan.pipeline} b{plan.micro_batch}"
    return Row(
        case=case, model=model, plans=(plan,), role="judge" if number % 2 else "fit",
        measured_s=float(entry["iteration time (ms)"]) / 1e3, cluster="a100-vtrain",
    )  # fmt: skip


def with_dtype(row: Row, dtype: str) -> Row:
    """The row with another type of products."""
    plans = tuple(dataclasses.replace(plan, dtype=dtype) for plan in row.plans)
    return dataclasses.replace(row, plans=plans)
