"""The figures of a plan, declared here and nowhere else: tables, CSV and JSON show them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fivefold.report.columns import Column, record_of
from fivefold.strategy import PlanPrediction
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import degrees_of, overlap_of, settings_of
from fivefold.strategy.search import tokens_per_s
from fivefold.units import format_duration_s

_GIB = 2**30

# Each is read from a prediction and its model.
PLAN_COLUMNS = [
    Column("split", "split", str, lambda one, _: degrees_of(one.plan), words=True),
    Column("gpus", "GPUs", "{:,}".format, lambda one, _: one.plan.num_gpus, detail=True),
    Column("time_s", "iteration", format_duration_s, lambda one, _: one.time_s),
    Column("tokens_per_s", "tokens/s", "{:,.0f}".format, lambda one, model:
           tokens_per_s(model, one), detail=True),
    Column("tokens_per_s_per_gpu", "tokens/s/GPU", "{:,.0f}".format, lambda one, model:
           tokens_per_s(model, one) / one.plan.num_gpus),
    Column("mfu", "MFU", lambda share: f"{100 * share:.1f} %", lambda one, _: one.mfu,
           "Model FLOPs utilization: the model's FLOPs without recomputation, of the peak."),
    Column("memory_gib", "memory", "{:.1f} GiB".format, lambda one, _:
           one.memory.total_bytes / _GIB, "On the fullest GPU."),
    Column("micro_batches", "micro-batches", "{:,}".format, lambda one, _:
           one.plan.num_micro_batches),
    Column("settings", "how", str, lambda one, _: settings_of(one.plan), words=True),
    Column("beside_compute", "beside compute", str, lambda one, _: overlap_of(one.plan),
           "Communication that runs while the GPU computes.", words=True),
]  # fmt: skip
"""Add one to see it on the terminal, on the page, and in CSV and JSON."""


def plan_record(model: ModelSpec, found: PlanPrediction) -> dict[str, Any]:
    """Return what a plan comes to as a flat record, for tables."""
    return record_of(PLAN_COLUMNS, found, model)


def plan_facts(model: ModelSpec, found: PlanPrediction) -> dict[str, Any]:
    """Return the same with the plan itself, and the parts of its time and memory."""
    memory = dataclasses.asdict(found.memory) | {"total_bytes": found.memory.total_bytes}
    parts = {"time": dataclasses.asdict(found.time), "memory": memory}
    return {"plan": dataclasses.asdict(found.plan)} | plan_record(model, found) | parts
