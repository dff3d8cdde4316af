"""Judges predictions on public rows of 2021 to 2026 that lie outside the project.

The folder is an argument and its rows are never committed. A seed splits them into rows for
fitting and rows for judging; figures are of the judged half, per group of rows that share a cause.
Rows that ran must fit into memory, rows that ran out must not.

    python -m benchmarks.strategy.recent FOLDER [--half fit] [--rows]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_file import BenchmarkRow
from benchmarks.strategy._orders import MeasuredPlan, order_rows
from benchmarks.strategy._recent_rows import PublicRow, read_folder
from benchmarks.strategy._rows import TABLES, read_table
from fivefold.strategy import error_bar, load_cluster
from fivefold.strategy.calibrate import kinds_of, spread_of

__all__ = ["judge_rows", "main"]

SEED = 2026
RESIDUALS = Path(__file__).parents[2] / "src" / "fivefold" / "strategy" / "residuals.json"
COMMITTED = (
    "megatron_sc21", "korthikanti", "nvidia_h100", "nvidia_gb200", "megatron_core", "maxtext_h100",
    "torchtitan", "llmfoundry_a100", "llmfoundry_h100", "megatron_zero3", "zero_fsdp",
    "megatron_bridge_2026", "single_points",
)  # fmt: skip
# Largest mean error in percent that is aimed at, by the beginning of a group's name.
TARGETS = {"dense": 5.0, "small": 10.0, "MoE": 10.0, "A100": 10.0, "V100": 10.0}
WORST = {"dense": 15.0}
MEMORY_TARGET = 8.0


@dataclass(frozen=True)
class Judged:
    """One row with what was predicted."""

    row: PublicRow
    time_error: float | None
    memory_error: float | None
    headroom: float


def judge(rows: list[PublicRow]) -> list[Judged]:
    """Predict every row that can be expressed."""
    return [one for one in map(_judged, rows) if one is not None]


def _judged(row: PublicRow) -> Judged | None:
    found = row.predict()
    if found is None:
        return None
    seconds, total_bytes, device_bytes = found
    time_error = None if row.measured_s is None else 100 * (seconds / row.measured_s - 1)
    memory_error = None
    if row.memory_bytes is not None:
        memory_error = 100 * (total_bytes / row.memory_bytes - 1)
    return Judged(row, time_error, memory_error, total_bytes / device_bytes - 1)


def halves(rows: list[PublicRow]) -> dict[str, list[PublicRow]]:
    """Split rows by the seed, each group into halves of its own."""
    parts: dict[str, list[PublicRow]] = {"fit": [], "judge": []}
    for group in sorted({row.group for row in rows}):
        members = [row for row in rows if row.group == group]
        order = random.Random(f"{SEED} {group}").sample(members, len(members))  # noqa: S311
        parts["fit"] += order[::2]
        parts["judge"] += order[1::2]
    return parts


def time_rows(found: list[Judged], half: str) -> list[BenchmarkRow]:
    """Mean and worst error and the bias of every group."""
    lines = []
    for group in sorted({one.row.title for one in found}):
        errors = [
            e for one in found if one.row.title == group and (e := one.time_error) is not None
        ]
        if not errors:
            continue
        sizes = [abs(error) for error in errors]
        name = f"{group}, {len(errors)} rows ({half})"
        kind = group.split()[0]
        target, worst = TARGETS.get(kind), WORST.get(kind)
        mean = statistics.fmean(sizes)
        lines += [
            BenchmarkRow(
                case=name, metric="mean error of predicted iteration time", unit="%", ours=mean,
                spread=(min(sizes), max(sizes)), target=target,
                met=None if target is None else mean <= target,
            ),
            BenchmarkRow(
                case=name, metric="worst error of predicted iteration time", unit="%",
                ours=max(sizes), target=worst, met=None if worst is None else max(sizes) <= worst,
            ),
            BenchmarkRow(
                case=name, metric="bias of predicted iteration time", unit="%",
                ours=statistics.fmean(errors),
            ),
        ]  # fmt: skip
    return lines


def memory_rows(found: list[Judged], half: str) -> list[BenchmarkRow]:
    """Error of printed memory, rows refused that ran and rows said to fit that did not."""
    errors = [abs(one.memory_error) for one in found if one.memory_error is not None]
    ran = [one for one in found if not one.row.out_of_memory]
    out = [one for one in found if one.row.out_of_memory]
    refused = [one for one in ran if one.headroom > 0]
    wrong = [one for one in out if one.headroom <= 0]
    most = max([100 * one.headroom for one in refused], default=0.0)
    lines = [
        BenchmarkRow(case=f"{len(ran)} rows that ran ({half})", metric="rows refused", unit="rows",
                     ours=len(refused), target=0, met=not refused),
        BenchmarkRow(case=f"{len(ran)} rows that ran ({half})", metric="largest refusal", unit="%",
                     ours=most, target=3.0, met=most <= 3.0),
        BenchmarkRow(case=f"{len(out)} rows that ran out of memory ({half})", unit="rows",
                     metric="rows said to fit", ours=len(wrong), target=0, met=not wrong),
    ]  # fmt: skip
    if errors:
        mean = statistics.fmean(errors)
        lines.append(
            BenchmarkRow(case=f"{len(errors)} rows that print memory ({half})", unit="%",
                         metric="mean error of predicted memory", ours=mean,
                         spread=(min(errors), max(errors)), target=MEMORY_TARGET,
                         met=mean <= MEMORY_TARGET)
        )  # fmt: skip
    return lines


def committed_refusals() -> list[BenchmarkRow]:
    """Rows of the committed tables that ran and are refused."""
    refused, count, most = [], 0, 0.0
    for path in sorted(TABLES.glob("*.json")):
        if path.stem in {"collectives", "scaling"}:
            continue
        for row in read_table(path.stem):
            cluster = load_cluster(row.cluster)
            count += 1
            found = [row.predicted(cluster, plan) for plan in row.plans]
            least = min(one.memory.total_bytes for one in found) / cluster.device.memory_bytes - 1
            if least > 0:
                refused.append(row.case)
                most = max(most, 100 * least)
    case = f"{count} rows of the committed tables that ran"
    return [
        BenchmarkRow(case=case, metric="rows refused", unit="rows", ours=len(refused), target=0,
                     met=not refused),
        BenchmarkRow(case=case, metric="largest refusal", unit="%", ours=most, target=3.0,
                     met=most <= 3.0),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Residual:
    """An error, the kinds it is of, its source and pair, and which constants were fitted."""

    kinds: tuple[str, ...]
    error: float
    gpus: int
    source: str
    pair: str
    fitted: tuple[str, ...] = ()


def residuals(folder: Path) -> list[_Residual]:
    """Errors of rows for fitting of the folder, and of committed rows that nothing was fitted to.

    A row that constants were fitted to errs less the mean of other pairs that they were fitted to.
    """
    every = _fitted_residuals(folder) + _committed_residuals()
    found = []
    for one in every:
        left = _left_out(one, every)
        if left is not None:
            found.append(dataclasses.replace(one, error=left))
    return found


def write_residuals(folder: Path, path: Path) -> None:
    """Write the table of errors that error bars are read from."""
    said = "ln(predicted / measured): root mean square over sources, the spread of their means, \
and what is left between the plans of a pair of model and GPU"
    groups = dict(sorted(_table_of(residuals(folder)).items()))
    path.write_text(json.dumps({"errors": said, "groups": groups}, indent=1) + "\n")


def _table_of(found: list[_Residual]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[_Residual]] = {}
    for one in found:
        for key in one.kinds:
            groups.setdefault(key, []).append(one)
    return {key: _spread(rows) for key, rows in groups.items()}


def left_out_rows(folder: Path) -> list[BenchmarkRow]:
    """Share of rows inside their error bars where each source in turn is left out whole."""
    found = residuals(folder)
    inside: dict[str, list[bool]] = {}
    for source in sorted({one.source for one in found}):
        table = _table_of([one for one in found if one.source != source])
        for one in found:
            if one.source == source:
                fits = abs(one.error) <= spread_of(table, one.kinds, num_gpus=one.gpus)[0]
                for name in ("all", one.kinds[-2], one.kinds[-4].split(", ")[-1]):
                    inside.setdefault(name, []).append(fits)
    sources = len({one.source for one in found})
    return [
        BenchmarkRow(case=f"{name}, {len(fits)} rows, each of {sources} sources left out whole",
                     metric="rows inside their 90 % interval", unit="%",
                     ours=100 * statistics.fmean(fits), target=85.0 if name == "all" else None,
                     met=statistics.fmean(fits) >= 0.85 if name == "all" else None)
        for name, fits in inside.items()
    ]  # fmt: skip


def _fitted_residuals(folder: Path) -> list[_Residual]:
    found = []
    for one in halves(read_folder(folder))["fit"]:
        predicted = one.predict()
        if predicted is None or one.measured_s is None or one.model is None:
            continue
        device, plan = one.device(), one.plans[0]
        # Rates were fitted to dense rows, by GPU, type and stack; experts have none of their own.
        stack = one.cluster.split("-")[1]
        fitted = (device.gpu, plan.dtype, stack) if one.model.experts is None else ()
        found.append(
            _Residual(kinds_of(one.model, device, plan, time_s=predicted[0]),
                      math.log(predicted[0] / one.measured_s), plan.num_gpus, one.case.split()[0],
                      f"{one.model.hidden} {one.model.num_layers} {device.gpu}", fitted)
        )  # fmt: skip
    return found


def _left_out(one: _Residual, every: list[_Residual]) -> float | None:
    """Its error if its pair had not been among the rows of the fit; None where it was alone."""
    if not one.fitted:
        return one.error
    others = [o.error for o in every if o.fitted == one.fitted and o.pair != one.pair]
    return one.error - statistics.fmean(others) if others else None


def _committed_residuals() -> list[_Residual]:
    found = []
    for table, row in ((name, row) for name in COMMITTED for row in read_table(name)):
        if row.role != "judge" or len(row.plans) > 1:
            continue
        cluster = load_cluster(row.cluster)
        time_s = row.predicted(cluster, row.plans[0]).time_s
        kinds = kinds_of(row.model, cluster.device, row.plans[0], time_s=time_s)
        pair = f"{row.model.hidden} {row.model.num_layers} {row.cluster}"
        source = row.source or (row.case if table == "single_points" else table)
        error = math.log(time_s / row.measured_s)
        found.append(_Residual(kinds, error, row.plans[0].num_gpus, source, pair))
    return found


def _spread(rows: list[_Residual]) -> dict[str, float]:
    sources: dict[str, list[float]] = {}
    pairs: dict[str, list[float]] = {}
    for one in rows:
        sources.setdefault(one.source, []).append(one.error)
        pairs.setdefault(f"{one.source} {one.pair}", []).append(one.error)
    mean = {pair: statistics.fmean(values) for pair, values in pairs.items()}
    left = sum((e - mean[pair]) ** 2 for pair, errors in pairs.items() for e in errors)
    whole = statistics.fmean(statistics.fmean(e**2 for e in errors) for errors in sources.values())
    between = statistics.pstdev(statistics.fmean(errors) for errors in sources.values())
    numbers = {"error": math.sqrt(whole), "between_sources": between,
               "between_plans": math.sqrt(left / max(len(rows) - len(pairs), 1))}  # fmt: skip
    return {"rows": len(rows), "sources": len(sources), "pairs": len(pairs),
            "gpus": max(one.gpus for one in rows),
            **{name: round(value, 4) for name, value in numbers.items()}}  # fmt: skip


def interval_rows(rows: list[PublicRow], half: str) -> list[BenchmarkRow]:
    """Share of the rows that lie inside their error bars, all and by kind."""
    inside: dict[str, list[bool]] = {}
    for row in rows:
        predicted = row.predict()
        if predicted is None or row.measured_s is None or row.model is None:
            continue
        bar = error_bar(row.model, row.device(), row.plans[0], time_s=predicted[0])
        low_s, high_s = bar.interval_s(predicted[0])
        for name in ("all", row.group.split()[0]):
            inside.setdefault(name, []).append(low_s <= row.measured_s <= high_s)
    return [
        BenchmarkRow(case=f"{name}, {len(found)} rows ({half})", unit="%",
                     metric="rows inside their 90 % interval", ours=100 * statistics.fmean(found))
        for name, found in inside.items()
    ]  # fmt: skip


def anchor_rows(rows: list[PublicRow], half: str) -> list[BenchmarkRow]:
    """Mean error of rows of one model and cluster, before and after one of them is the anchor."""
    pairs: dict[str, list[float]] = {}
    for row in rows:
        predicted = row.predict()
        if predicted is not None and row.measured_s is not None and row.model is not None:
            pairs.setdefault(f"{row.model.name} {row.cluster}", []).append(
                predicted[0] / row.measured_s
            )
    known = [ratios for ratios in pairs.values() if len(ratios) > 1]
    before = [abs(ratio - 1) for ratios in known for ratio in ratios[1:]]
    after = [abs(ratio / ratios[0] - 1) for ratios in known for ratio in ratios[1:]]
    return [
        BenchmarkRow(case=f"{len(after)} rows ({half})", unit="%",
                     metric=f"mean error {when} one row of the pair is the anchor",
                     ours=100 * statistics.fmean(errors))
        for when, errors in (("before", before), ("after", after))
    ]  # fmt: skip


def recent_orders(rows: list[PublicRow]) -> list[BenchmarkRow]:
    """Order of plans of one job, over both halves: a group is seldom in one of them alone."""
    plans = [
        MeasuredPlan(row.cluster, row.model, row.plans[0], row.measured_s, found[0])
        for row in rows
        if row.model is not None and row.measured_s is not None and len(row.plans) == 1
        if (found := row.predict()) is not None
    ]
    return order_rows("plans of one job, public rows", plans)


def judge_rows(folder: Path, *, half: str = "judge") -> list[BenchmarkRow]:
    """All figures of one half of a folder of public rows.

    Args:
        folder: Where the tables are.
        half: ``"fit"`` or ``"judge"``.
    """
    rows = halves(read_folder(folder))[half]
    found = judge(rows)
    left = len(rows) - len(found)
    lines = time_rows(found, half) + memory_rows(found, half)
    lines += interval_rows(rows, half) + anchor_rows(rows, half)
    lines += left_out_rows(folder)
    lines += recent_orders(read_folder(folder))
    lines.append(
        BenchmarkRow(case=f"{len(rows)} rows ({half})", metric="rows that no plan expresses",
                     unit="rows", ours=left)
    )  # fmt: skip
    return lines


def main() -> None:
    """Print the figures of one half, and each row where asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with the tables")
    parser.add_argument("--half", choices=("fit", "judge"), default="judge")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--residuals", action="store_true", help="write the error bars' table")
    arguments = parser.parse_args()
    if arguments.residuals:
        write_residuals(arguments.folder, RESIDUALS)
    if arguments.rows:
        for one in judge(halves(read_folder(arguments.folder))[arguments.half]):
            time = "" if one.time_error is None else f"{one.time_error:+6.1f}"
            memory = "" if one.memory_error is None else f"{one.memory_error:+6.1f}"
            place = f"{one.row.group:28} {one.row.case:58.58} {one.row.cluster:16.16}"
            out = " OOM" if one.row.out_of_memory else ""
            print(f"{place} {time:7} {memory:7} {100 * one.headroom:+6.1f}{out}")
    for line in judge_rows(arguments.folder, half=arguments.half) + committed_refusals():
        said = "" if line.met is None else (" met" if line.met else f" missed ({line.target:g})")
        print(f"{line.case:48} {line.metric:42} {line.ours:+7.1f} {line.unit}{said}")


if __name__ == "__main__":
    main()
