"""Measured collectives, and series of which only the shape is known."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from typing import Any

import numpy as np

from benchmarks.results_file import BenchmarkRow
from benchmarks.strategy._rows import TABLES
from fivefold.collectives.pricing import FabricSpec, Group, Tier, collective_time_s
from fivefold.strategy import ModelSpec, ParallelPlan, evaluate_plan, load_cluster

__all__ = ["collective_rows", "scaling_rows"]


def _rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((TABLES / f"{name}.json").read_text())["rows"]
    return rows


def _fitted_tier(rows: list[dict[str, Any]]) -> Tier:
    """Base, rate and fill from three measured all-reduces: a linear system."""
    gpus = rows[0]["gpus"]
    matrix = [[1.0, row["size_bytes"], math.sqrt(row["size_bytes"])] for row in rows]
    base, inverse, root = np.linalg.solve(matrix, [row["measured_s"] for row in rows])
    rate = 2 * (gpus - 1) / gpus / float(inverse)
    return Tier(
        name="node", gpus=gpus, bandwidth_bytes_per_s=rate, efficiency=1.0, base_s=float(base),
        hop_s=0.0, fill_s=(float(root) / 2) ** 2 * rate,
    )  # fmt: skip


def collective_rows() -> list[BenchmarkRow]:
    """All-reduce on eight H100: three sizes fit a tier, the others judge it."""
    rows = _rows_of("collectives")
    tier = _fitted_tier([row for row in rows if row["role"] == "fit"])
    fabric, lines, sizes = FabricSpec(name="h100", tiers=(tier,)), [], []
    for row in rows:
        ours = collective_time_s(
            fabric, "all_reduce", size_bytes=row["size_bytes"], group=Group(size=row["gpus"])
        )
        error = 100 * (ours / row["measured_s"] - 1)
        lines.append(
            BenchmarkRow(case=f"{row['case']} ({row['role']})", unit="%", ours=error,
                         metric="error of predicted time of a collective")
        )  # fmt: skip
        if row["role"] == "judge":
            sizes.append(abs(error))
    mean = BenchmarkRow(
        case=f"all-reduce on 8 H100, {len(sizes)} judged rows", unit="%",
        metric="mean error of predicted time of a collective", ours=statistics.fmean(sizes),
        spread=(min(sizes), max(sizes)),
    )  # fmt: skip
    return [mean, *lines]


def scaling_rows() -> list[BenchmarkRow]:
    """Throughput per GPU relative to the first row of each series, beside the measured one."""
    lines = []
    for _, group in itertools.groupby(_rows_of("scaling"), key=lambda row: row["series"]):
        rows = list(group)
        ours = [_throughput(row) for row in rows]
        for row, value in list(zip(rows, ours, strict=True))[1:]:
            lines.append(
                BenchmarkRow(
                    case=row["case"], metric="throughput per GPU against the series' first row",
                    unit="ratio", ours=value / ours[0],
                    peers={"measured": row["throughput"] / rows[0]["throughput"]},
                )
            )  # fmt: skip
    return lines


def _throughput(row: dict[str, Any]) -> float:
    cluster, plan = load_cluster(row["cluster"]), ParallelPlan(**row["plan"])
    model = ModelSpec(name=row["case"], **row["model"])
    found = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
    return plan.global_batch / found.time_s / plan.num_gpus
