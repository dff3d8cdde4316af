"""Public rows of 2025 and 2026 by source, outside the project; no constant is fitted to them.

One layout for all tables (``shape`` is JSON); the preset of each source is named here. Those of
InternEvo and AutoModel were made with these rows in sight, the others before.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow
from fivefold.strategy import (
    Cluster,
    ModelSpec,
    ParallelPlan,
    error_bar,
    evaluate_plan,
    load_cluster,
    load_model,
)
from fivefold.strategy.parts import LowRankAdapters
from fivefold.strategy.plan import plan_problem

__all__ = ["source_rows"]

_PRESETS = {
    "automodel_lora": "h100-automodel", "automodel_moe": "h100-automodel",
    "bridge_matched": "h100-bridge@megatron-bridge-26.06", "internevo_7b": "a100-internevo",
    "internevo_memory": "a100-internevo", "kempner_dense": "h200-pytorch",
    "mlperf_v6_dsv3": "{device}-bridge@megatron-bridge-26.06",
}  # fmt: skip
_NAMES = {"moonlight-16b": "moonlight-16b-a3b"}
# Rank 8 on all products: the recipes' own, of NeMo AutoModel's performance summary.
_ADAPTERS = LowRankAdapters(
    rank=8,
    modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)


@functools.cache
def _cluster(name: str, node: int) -> Cluster:
    cluster = load_cluster(name)
    if "bridge" in name or cluster.fabric.gpus_per_node == node:
        return cluster
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(f'base = "{name}"\ngpus_per_node = {node}\n')
        return load_cluster(path)


def _model(entry: dict[str, str]) -> ModelSpec | None:
    seq_len = int(entry["seq"])
    shape = json.loads(entry["shape"] or "{}")
    if set(shape) <= {field.name for field in dataclasses.fields(ModelSpec)} and shape:
        model = ModelSpec(name=entry["model"], seq_len=seq_len, **shape)
    else:
        model = load_model(_NAMES.get(entry["model"], entry["model"]), seq_len=seq_len)
    adapters = _ADAPTERS if entry["task"] == "lora" else None
    return dataclasses.replace(model, adapters=adapters)


def _plan(entry: dict[str, str], model: ModelSpec) -> ParallelPlan:
    def number(name: str) -> int:
        return int(entry[name] or 1)

    data, tensor, virtual = number("dp"), number("tp"), number("vp")
    plan: dict[str, Any] = {
        "global_batch": number("gbs"), "micro_batch": number("mbs"), "data": data, "tensor": tensor,
        "pipeline": number("pp"), "context": number("cp"), "expert": number("ep"),
        "zero": int(entry["zero"] or 0) if data * number("cp") > 1 else 0,
        "dtype": entry["precision"], "recompute": entry["recompute"], "data_overlap": True,
        "sequence_parallel": tensor > 1 and "no sequence" not in entry["notes"],
    }  # fmt: skip
    if entry["shard"] and int(entry["shard"]) < data:
        plan["shard"] = int(entry["shard"])
    if entry["recompute_layers"]:
        plan["recompute_layers"] = int(entry["recompute_layers"])
    if entry["tensor_overlap"]:
        plan["tensor_overlap"] = entry["tensor_overlap"]
    if model.experts is not None:
        plan["expert_tensor"] = 1
        plan["expert_overlap"] = "EP overlap" in entry["notes"] or entry["precision"] == "mxfp8"
    if virtual > 1:
        plan |= {"virtual": virtual, "schedule": "interleaved", "pipeline_overlap": True,
                 "embedding_layers": model.num_layers % (virtual * number("pp")) > 0}  # fmt: skip
    return ParallelPlan(**plan)


def source_rows(folder: Path) -> list[BenchmarkRow]:
    """Time, error bars and memory of every table of the folder, by its source."""
    lines: list[BenchmarkRow] = []
    inside: list[bool] = []
    for path in sorted(folder.glob("*.csv")):
        times, memories, fits = _judged(path)
        inside += fits
        for metric, errors in (("predicted iteration time", times), ("predicted memory", memories)):
            if errors:
                case, sizes = f"{path.stem}, {len(errors)} rows", [abs(error) for error in errors]
                lines += [
                    BenchmarkRow(case=case, metric=f"mean error of {metric}", unit="%",
                                 ours=statistics.fmean(sizes), spread=(min(sizes), max(sizes))),
                    BenchmarkRow(case=case, metric=f"bias of {metric}", unit="%",
                                 ours=statistics.fmean(errors)),
                ]  # fmt: skip
    share = statistics.fmean(inside)
    return [
        *lines,
        BenchmarkRow(case=f"all sources, {len(inside)} rows", unit="%", ours=100 * share,
                     metric="rows inside their 90 % interval", target=85.0, met=share >= 0.85),
    ]  # fmt: skip


def _judged(path: Path) -> tuple[list[float], list[float], list[bool]]:
    times, memories, inside = [], [], []
    with path.open() as file:
        for entry in csv.DictReader(file):
            name = _PRESETS.get(path.stem)
            if name is None:
                continue
            cluster = _cluster(name.format(device=entry["device"].lower()),
                               int(entry["gpus_per_node"]))  # fmt: skip
            model = _model(entry)
            if model is None or plan_problem(model, plan := _plan(entry, model)) is not None:
                continue
            found = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
            if entry["step_s"]:
                measured_s = float(entry["step_s"])
                times.append(100 * (found.time_s / measured_s - 1))
                bar = error_bar(model, cluster.device, plan, time_s=found.time_s)
                low_s, high_s = bar.interval_s(found.time_s)
                inside.append(low_s <= measured_s <= high_s)
            if entry["memory_gb"]:
                unit = 2**30 if "GiB" in entry["memory_kind"] else 1e9
                used = found.memory.total_bytes / unit
                memories.append(100 * (used / float(entry["memory_gb"]) - 1))
    return times, memories, inside
