"""Predicts published training times row by row and judges on rows that no constant was fitted to.

Every table is split into rows to fit and rows to judge. Committed constants were fitted on rows to
fit only; vTrain's table is fitted here, in three ways: six named rows, one half to the other, and
with each model left out in turn. Peers' errors on the same rows stand beside ours.

    python -m benchmarks.strategy.published [--vtrain FOLDER] [--rows FOLDER]
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from benchmarks.strategy._calibration import fit_constants, with_constants
from benchmarks.strategy._orders import MeasuredPlan, order_rows
from benchmarks.strategy._rows import TABLES, Row, predict, read_table, read_vtrain
from benchmarks.strategy._shapes import collective_rows, scaling_rows
from benchmarks.strategy._sourced_rows import source_rows
from benchmarks.strategy.recent import committed_refusals, judge_rows
from fivefold.strategy import Cluster, evaluate_plan, load_cluster

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "published.json"
# One row per model, and one each for tensor parallelism across nodes and a deep pipeline.
SIX = (0, 16, 20, 48, 56, 62)
LIMITS = {
    "gemm_efficiency": (0.5, 1.0),
    "memory_efficiency": (0.4, 0.95),
    "cluster.efficiency": (0.3, 1.0),
}
SINGLE_LIMITS = {
    "gemm_efficiency": (0.5, 1.0),
    "memory_efficiency": (0.4, 0.95),
    "node.efficiency": (0.4, 1.0),
    "host_kernel_s": (5e-6, 2e-4),
}
VTRAIN_START = {"gemm_efficiency": 0.859, "memory_efficiency": 0.718, "cluster.efficiency": 0.6}
PEERS = {
    "vTrain multi-node": {"vTrain, as published": 14.73, "Calculon 25 GB/s": 17.0,
                          "Calculon 12.5 GB/s": 22.1},
    "vTrain single-node": {"vTrain, as published": 8.37, "Calculon": 38.9},
}  # fmt: skip


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def error(cluster: Cluster, row: Row) -> float:
    """Predicted over measured time, less one, in percent."""
    return 100.0 * (predict(cluster, row) / row.measured_s - 1.0)


def judged(
    case: str, errors: list[float], *, target: float | None = None, median: bool = False,
    peers: dict[str, float] | None = None,
) -> BenchmarkRow:  # fmt: skip
    """The mean or median size of the errors of judged rows."""
    sizes = [abs(one) for one in errors]
    ours = statistics.median(sizes) if median else statistics.fmean(sizes)
    note(f"{case}: {ours:.2f} % over {len(sizes)} rows (median {statistics.median(sizes):.2f})")
    return BenchmarkRow(
        case=f"{case}, {len(sizes)} judged rows",
        metric=f"{'median' if median else 'mean'} error of predicted iteration time", unit="%",
        ours=ours, spread=(min(sizes), max(sizes)), peers=peers or {}, target=target,
        met=None if target is None else ours <= target,
    )  # fmt: skip


def table_rows(
    name: str, title: str, *, target: float | None = None, median: bool = False, only: str = ""
) -> list[BenchmarkRow]:
    """Every row of a committed table, and its judged rows in one figure."""
    rows = [row for row in read_table(name) if not only or row.cluster == only]
    clusters = {row.cluster: load_cluster(row.cluster) for row in rows}
    lines, ours = [], []
    theirs: dict[str, list[float]] = {}
    for row in rows:
        mine = error(clusters[row.cluster], row)
        peers = {p: 100 * (s / row.measured_s - 1) for p, s in row.peers_s.items()}
        lines.append(
            BenchmarkRow(
                case=f"{title}, {row.case} ({row.role})",
                metric="error of predicted iteration time",
                unit="%", ours=mine, peers=peers,
            )
        )  # fmt: skip
        if row.role == "judge":
            ours.append(mine)
            for peer, value in peers.items():
                theirs.setdefault(peer, []).append(abs(value))
    mean_peers = {peer: statistics.fmean(values) for peer, values in theirs.items()}
    return [judged(title, ours, target=target, median=median, peers=mean_peers), *lines]


def falls() -> list[BenchmarkRow]:
    """ZeRO-3's throughput per GPU relative to the row that was fitted."""
    rows = [row for row in read_table("megatron_zero3") if row.cluster == "a100-deepspeed"]
    cluster, lines = load_cluster("a100-deepspeed"), []
    for first in (0, 3):
        for later in (first + 1, first + 2):
            published = _fall(rows[first], rows[later], None)
            ours = _fall(rows[first], rows[later], cluster)
            lines.append(
                BenchmarkRow(
                    case=f"{rows[later].case} against {rows[first].case}",
                    metric="error of predicted fall of throughput", unit="%",
                    ours=100 * (ours / published - 1), target=15.0,
                    met=abs(ours / published - 1) <= 0.15,
                )
            )  # fmt: skip
            note(f"{lines[-1].case}: {lines[-1].ours:+.1f} %")
    return lines


def _fall(first: Row, later: Row, cluster: Cluster | None) -> float:
    def per_gpu(row: Row) -> float:
        seconds = row.measured_s if cluster is None else predict(cluster, row)
        plan = row.plans[0]
        return plan.global_batch / (seconds * plan.num_gpus)

    return per_gpu(later) / per_gpu(first)


# Korthikanti et al., figure 1: GiB of parameters and optimizer (embedding left out), activations
# without any technique, and with sequence parallelism and selective recomputation.
FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625), "175B": (45.5625, 66.84, 12.35),
    "530B": (31.64, 114.02, 23.08), "1T": (32.96, 131.25, 26.56),
}  # fmt: skip


def memory_rows() -> list[BenchmarkRow]:
    """The evaluator's memory against the printed one; nothing of memory is fitted."""
    cluster, lines, errors = load_cluster("a100-megatron"), [], []
    for row in read_table("korthikanti"):
        name, _, how = row.case.partition(" ")
        if name not in FIGURE_1 or how not in {"full", "selective"}:
            continue
        states, plain, lean = FIGURE_1[name]
        changed = {"recompute": "none"} if how == "full" else {}
        plan = dataclasses.replace(row.plans[0], **changed)  # type: ignore[arg-type]
        found = evaluate_plan(row.model, cluster.device, cluster.fabric, plan=plan).memory
        outside = 18 * row.model.vocab * row.model.hidden / plan.tensor
        for what, ours, printed in (
            ("parameters and optimizer", found.states_bytes - outside, states),
            ("activations", found.activations_bytes, plain if how == "full" else lean),
        ):
            errors.append(100 * (ours / 2**30 / printed - 1))
            lines.append(
                BenchmarkRow(case=f"Korthikanti, {name}, {how}", metric=f"error of {what}",
                             unit="%", ours=errors[-1], target=5.0, met=abs(errors[-1]) <= 5.0)
            )  # fmt: skip
    note(f"memory: largest error {max(map(abs, errors)):.2f} %")
    return lines


def measured_plans(rows: list[Row], cluster: Cluster | None = None) -> Iterator[MeasuredPlan]:
    """Rows whose plan is printed, predicted by a cluster or by the preset of each."""
    for row in rows:
        if len(row.plans) == 1:
            seconds = predict(cluster or load_cluster(row.cluster), row)
            yield MeasuredPlan(row.cluster, row.model, row.plans[0], row.measured_s, seconds)


def committed_orders() -> list[BenchmarkRow]:
    """Order of plans in the committed tables, rows for fitting among them."""
    names = sorted(
        p.stem for p in TABLES.glob("*.json") if p.stem not in {"collectives", "scaling"}
    )
    rows = [row for name in names for row in read_table(name)]
    return order_rows("plans of one job, committed tables", measured_plans(rows))


def vtrain_multi(folder: Path) -> list[BenchmarkRow]:
    """Zero-shot, half to half, and each model left out."""
    rows = read_vtrain(folder, multi=True)
    start = with_constants(load_cluster("a100-vtrain"), VTRAIN_START)
    peers = PEERS["vTrain multi-node"]

    def fitted(chosen: list[Row]) -> Cluster:
        return fit_constants(start, [row.run() for row in chosen], limits=LIMITS).cluster

    zero = fitted([rows[i] for i in SIX])
    left = [row for i, row in enumerate(rows) if i not in SIX]
    lines = [judged("vTrain multi-node, six rows to the rest", [error(zero, r) for r in left],
                    target=12.0, peers=peers)]  # fmt: skip
    lines += [
        BenchmarkRow(case=f"vTrain multi-node, row {i}, {row.case}{' (fit)' * (i in SIX)}",
                     metric="error of predicted iteration time", unit="%", ours=error(zero, row))
        for i, row in enumerate(rows)
    ]  # fmt: skip
    half = fitted([row for row in rows if row.role == "fit"])
    odd = [row for row in rows if row.role == "judge"]
    lines.append(judged("vTrain multi-node, even rows to odd rows", [error(half, r) for r in odd],
                        target=6.0))  # fmt: skip
    lines.append(judged("vTrain multi-node, even rows to odd rows, median",
                        [error(half, r) for r in odd], median=True))  # fmt: skip
    for seed in range(3):
        order = random.Random(seed).sample(rows, len(rows))  # noqa: S311 - a split
        cluster = fitted(order[::2])
        lines.append(judged(f"vTrain multi-node, random half {seed} to the other",
                            [error(cluster, row) for row in order[1::2]]))  # fmt: skip
    for hidden in sorted({row.model.hidden for row in rows}):
        cluster = fitted([row for row in rows if row.model.hidden != hidden])
        chosen = [row for row in rows if row.model.hidden == hidden]
        lines.append(judged(f"vTrain multi-node, hidden {hidden} left out",
                            [error(cluster, row) for row in chosen]))  # fmt: skip
    lines += order_rows("vTrain multi-node, six rows to the rest", measured_plans(rows, zero))
    return lines


def vtrain_single(folder: Path) -> list[BenchmarkRow]:
    """Even rows to odd rows, and each hidden size left out, on one node."""
    rows = read_vtrain(folder, multi=False)
    start = with_constants(load_cluster("a100-vtrain"), {**VTRAIN_START, "host_kernel_s": 5e-5})

    def fitted(chosen: list[Row]) -> Cluster:
        return fit_constants(start, [row.run() for row in chosen], limits=SINGLE_LIMITS).cluster

    cluster = fitted([row for row in rows if row.role == "fit"][::2])
    odd = [error(cluster, row) for row in rows if row.role == "judge"]
    lines = [judged("vTrain single-node, even rows to odd rows", odd, target=9.0,
                    peers=PEERS["vTrain single-node"])]  # fmt: skip
    for hidden in (1024, 2048):
        others = fitted([row for row in rows if row.model.hidden != hidden][::4])
        errors = [error(others, row) for row in rows if row.model.hidden == hidden]
        lines.append(judged(f"vTrain single-node, hidden {hidden} left out", errors))
    title = "vTrain single-node, a quarter of the rows to all"
    return lines + order_rows(title, measured_plans(rows, cluster), each=False)


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vtrain", type=Path, help="folder with vTrain's ground truth")
    parser.add_argument("--rows", type=Path, help="folder with public rows outside the project")
    parser.add_argument("--sources", type=Path, help="folder with public rows by source")
    arguments = parser.parse_args()
    lines = table_rows("megatron_sc21", "Megatron SC'21, table 1", target=6.0)
    lines += table_rows("megatron_zero3", "Megatron SC'21, table 2, PTD", only="a100-megatron")
    lines += table_rows("megatron_zero3", "Megatron SC'21, table 2, ZeRO-3", only="a100-deepspeed")
    lines += falls()
    lines += table_rows("korthikanti", "Korthikanti", target=4.0)
    lines += table_rows("nvidia_h100", "NVIDIA H100", target=4.0, median=True)
    lines += table_rows("megatron_core", "Megatron-Core H100", target=10.0)
    lines += table_rows("maxtext_h100", "MaxText H100")
    lines += table_rows("nvidia_gb200", "NVIDIA GB200")
    lines += table_rows("torchtitan", "torchtitan H100")
    lines += table_rows("llmfoundry_h100", "llm-foundry H100")
    lines += table_rows("llmfoundry_a100", "llm-foundry A100")
    lines += table_rows("megatron_bridge", "Megatron-Bridge H100")
    lines += table_rows("megatron_bridge_2026", "Megatron-Bridge 26.04 to 26.08", target=12.0)
    lines += table_rows("single_points", "single points")
    lines += table_rows("zero_fsdp", "ZeRO and FSDP, nothing fitted")
    lines += collective_rows() + scaling_rows()
    lines += memory_rows()
    if arguments.vtrain is not None:
        lines += vtrain_multi(arguments.vtrain)
        lines += vtrain_single(arguments.vtrain)
    lines += committed_orders() + committed_refusals()
    if arguments.rows is not None:
        lines += judge_rows(arguments.rows)
    if arguments.sources is not None:
        lines += source_rows(arguments.sources)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    command = (
        "python -m benchmarks.strategy.published --vtrain FOLDER --rows FOLDER --sources FOLDER"
    )
    write_results(RESULTS, topic="strategy/published", rows=lines, command=command)


if __name__ == "__main__":
    main()
