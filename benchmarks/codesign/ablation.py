"""Measures, in simulation, what each co-design buys: sixteen combinations over seeds and clusters.

Every seed draws jobs, their placement and the hash of paths; all variants share them and are judged
by the same fluid simulation of all iterations. Clusters: a 4-ary fat-tree with two GPUs per host
and summing switches, a rail-optimized fabric, and hosts of the Alibaba Lingjun data set where its
topo.csv is given. Nothing here is measured on real links.

    python -m benchmarks.codesign.ablation [--seeds 8] [--lingjun PATH/topo.csv] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.codesign import JobSpec, PlanningOptions, ablate, synthetic_jobs
from fivefold.codesign.ablation import AblationRow
from fivefold.network.topology import (
    Aggregation,
    HostSpec,
    Topology,
    load_lingjun,
    parse_topology,
)

RESULTS = Path(__file__).parents[1] / "results" / "codesign" / "ablation.json"
FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "codesign"
LINK = "bandwidth=12.5GB/s,latency=1us"
POOL = Aggregation(slots=128, slot_bytes=4096)


def draw_ablation(rows: Sequence[AblationRow], path: Path | str, *, title: str = "") -> None:
    """Bars of mean completion time against B0, with intervals and B1 as a line."""
    shown = [row for row in rows if row.label != "B1"]
    figure = Figure(figsize=(8, 0.34 * len(shown) + 1.3), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(shown))
    values = np.array([row.to_null for row in shown])
    ends = np.array([row.to_null_interval or (row.to_null, row.to_null) for row in shown])
    spread = np.abs(ends.T - values)
    axes.barh(places, values, xerr=spread, color="#4c78a8", ecolor="#333333", height=0.7)
    best = next((row for row in rows if row.label == "B1"), None)
    if best is not None:
        axes.axvline(best.to_null, color="#e45756", linewidth=1.5)
        axes.text(best.to_null, -0.9, " B1", color="#e45756", va="bottom", fontsize=9)
    axes.axvline(1.0, color="#888888", linewidth=1.0, linestyle=":")
    axes.set_yticks(places, [row.label for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.05, float(ends.max()) * 1.02))
    axes.set_xlabel("mean completion time / B0 (simulated)")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def clusters(lingjun: Path | None) -> dict[str, tuple[Topology, dict[str, object]]]:
    """Topologies, and how many jobs of which sizes run on each."""
    kinds = ("tor", "agg", "core")
    fat = parse_topology(f"fat_tree:4,gpus=2,{LINK}").with_aggregation(POOL, kinds=kinds)
    rail = parse_topology(f"rail_optimized:16,gpus=4,spines=4,{LINK}")
    rail = rail.with_aggregation(POOL, kinds=kinds)
    found: dict[str, tuple[Topology, dict[str, object]]] = {
        "fat-tree k=4, 16 hosts of 2 GPUs": (fat, {"number": 5, "sizes": (4, 6, 8)}),
        "rail-optimized, 16 hosts of 4 GPUs": (rail, {"number": 5, "sizes": (8, 12, 16)}),
    }
    if lingjun is not None:
        # The data set says nothing of sums in switches: that they can is assumed, as above.
        whole = load_lingjun(lingjun, host=HostSpec(gpus=1, nics=1))
        whole = whole.with_aggregation(POOL, kinds=kinds)
        found["Lingjun, 847 hosts, 20 jobs"] = (whole, {"number": 20, "sizes": (8, 16, 32)})
    return found


def maker(
    topology: Topology, how: dict[str, object], iterations: int
) -> Callable[[int], Sequence[JobSpec]]:
    """Jobs of a seed."""

    def make(seed: int) -> Sequence[JobSpec]:
        return synthetic_jobs(topology, seed=seed, iterations=iterations, **how)  # type: ignore[arg-type]

    return make


def rows_of(case: str, found: Sequence[AblationRow]) -> list[BenchmarkRow]:
    """Benchmark rows of one cluster."""
    rows = []
    for row in found:
        last = row.label in {"V+H+II+HN", "B1+V+H+II+HN"}
        rows.append(
            BenchmarkRow(
                case=f"{case}, {row.seeds} seeds",
                metric=f"mean completion time / B0, {row.label} (simulated; interval over seeds)",
                unit="ratio",
                ours=row.to_null,
                spread=row.to_null_interval or (row.to_null, row.to_null),
                peers={"to B1": row.to_best, "95th percentile / B0": row.tail_to_null},
            )
        )
        worse = row.jobs_worse_than_best if row.label.startswith("B1") else row.jobs_worse
        rows.append(
            BenchmarkRow(
                case=f"{case}, {row.seeds} seeds",
                metric=f"jobs that end later than under the baseline, {row.label}, of {row.jobs}",
                unit="jobs",
                ours=worse,
                target=0 if last else None,
                met=worse == 0 if last else None,
            )
        )
    return rows


def main() -> None:
    """Plan, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--lingjun-seeds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--lingjun", type=Path, help="topo.csv of the Lingjun data set")
    parser.add_argument("--quick", action="store_true", help="a look: one seed, no results file")
    arguments = parser.parse_args()
    rows: list[BenchmarkRow] = []
    for case, (topology, how) in clusters(arguments.lingjun).items():
        started_s = time.perf_counter()
        seeds = arguments.lingjun_seeds if case.startswith("Lingjun") else arguments.seeds
        found = ablate(
            topology,
            maker(topology, how, 3 if arguments.quick else arguments.iterations),
            seeds=range(1 if arguments.quick else seeds),
            options=PlanningOptions(budget=40),
        )
        print(f"{case}: {time.perf_counter() - started_s:.0f} s", flush=True)
        for row in found:
            print(f"  {row.label:14} {row.to_null:.3f} {row.to_best:.3f} worse {row.jobs_worse}")
        rows += rows_of(case, found)
        if not arguments.quick:
            FIGURES.mkdir(parents=True, exist_ok=True)
            name = case.split(",")[0].replace(" ", "_").replace("=", "")
            draw_ablation(found, FIGURES / f"{name}.png", title=case)
    if not arguments.quick:
        # Where the data set lies on this machine is nobody's business.
        place = "" if arguments.lingjun is None else " --lingjun PATH/topo.csv"
        command = f"python -m benchmarks.codesign.ablation --seeds {arguments.seeds}{place}"
        write_results(RESULTS, topic="codesign/ablation", rows=rows, command=command)


if __name__ == "__main__":
    main()
