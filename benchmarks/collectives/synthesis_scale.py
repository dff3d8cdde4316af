"""Measures how time and memory of synthesis grow with the network, from 16 to 4,096 ranks.

Every case runs in a process of its own, whose peak memory is reported; a small case is run first
there, so that compilation is not counted. What is found is verified in the same process, outside
the clock. The ratio compares the schedule with the proven lower bound.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.collectives.schedules import (
    all_gather,
    all_to_all,
    evaluate,
    throughput_optimum,
    verify_schedule,
)
from fivefold.collectives.schedules.bounds import discrete_ingress_bound
from fivefold.collectives.synthesis import (
    all_to_all_flow,
    all_to_all_optimum,
    matching,
    spanning_trees,
)
from fivefold.network.topology import Topology, fat_tree, named_topology, torus

RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "synthesis_scale.json"
SIZE_BYTES = 2.0**30
TARGET_S, TARGET_BYTES = 60.0, 4e9
TIMEOUT_S = 1200
Found = dict[str, float]

NETWORKS: dict[str, Callable[[], Topology]] = {
    "torus 4x4": lambda: torus((4, 4)),
    "torus 8x8": lambda: torus((8, 8)),
    "torus 16x16": lambda: torus((16, 16)),
    "torus 32x32": lambda: torus((32, 32)),
    "torus 64x64": lambda: torus((64, 64)),
    "torus 8x8x16": lambda: torus((8, 8, 16)),
    "fat-tree k=4": lambda: fat_tree(4),
    "fat-tree k=8": lambda: fat_tree(8),
    "fat-tree k=16": lambda: fat_tree(16),
    "DGX-1": lambda: named_topology("dgx1"),
    "DGX A100 x1": lambda: named_topology("dgx_a100"),
    "DGX A100 x2": lambda: named_topology("dgx_a100", boxes=2),
    "DGX A100 x4": lambda: named_topology("dgx_a100", boxes=4),
    "MI250 x2": lambda: named_topology("mi250", boxes=2),
    "DGX A100 x16": lambda: named_topology("dgx_a100", boxes=16),
}
CASES = {
    "matching": [
        "torus 4x4", "torus 8x8", "torus 16x16", "torus 32x32", "torus 8x8x16", "torus 64x64",
        "fat-tree k=4", "fat-tree k=8", "fat-tree k=16", "DGX A100 x16",
    ],
    "trees": ["DGX-1", "DGX A100 x1", "DGX A100 x2", "DGX A100 x4", "MI250 x2", "torus 4x4",
              "torus 8x8"],
    "optimum": ["torus 8x8", "torus 16x16", "torus 32x32", "fat-tree k=16"],
    "flow": ["torus 4x4", "torus 8x8", "torus 16x16", "DGX A100 x2", "DGX A100 x4", "fat-tree k=4",
             "fat-tree k=8"],
}  # fmt: skip
SMALL = {"matching": "fat-tree k=4", "trees": "DGX A100 x1", "optimum": "torus 4x4",
         "flow": "fat-tree k=4"}  # fmt: skip
WHAT = {
    "matching": "all-gather by matching, one seed",
    "trees": "optimal spanning trees",
    "optimum": "exact throughput optimum",
    "flow": "all-to-all by flows, one chunk per pair",
}
QUICK = {"torus 4x4", "fat-tree k=4", "DGX A100 x1"}


def run_once(kind: str, topology: Topology, *, check: bool) -> Found:
    """One synthesis: its seconds, and how far above its bound it is."""
    ranks = topology.num_ranks
    started_s = time.perf_counter()
    if kind == "matching":
        gather = all_gather(ranks)
        schedule = matching(gather, topology, size_bytes=SIZE_BYTES, seeds=1)
        taken_s = time.perf_counter() - started_s
        bound_s = discrete_ingress_bound(gather, topology, SIZE_BYTES).seconds
    elif kind == "trees":
        packing = spanning_trees(topology)
        taken_s = time.perf_counter() - started_s
        packing.check()
        ratio = packing.inverse_rate_s_per_byte / packing.optimum_s_per_byte
        return {"seconds": taken_s, "ratio": float(ratio), "height": packing.height}
    elif kind == "optimum":
        throughput_optimum(topology)
        return {"seconds": time.perf_counter() - started_s}
    else:
        optimum = all_to_all_optimum(topology)
        exchange = all_to_all(ranks)
        schedule = all_to_all_flow(exchange, topology, size_bytes=SIZE_BYTES, optimum=optimum)
        taken_s = time.perf_counter() - started_s
        bound_s = optimum.bound_s * SIZE_BYTES / ranks
    if check:
        verify_schedule(schedule, check_times=True)
    total_s = evaluate(schedule, size_bytes=SIZE_BYTES).total_s
    return {"seconds": taken_s, "ratio": total_s / bound_s}


def work(kind: str, name: str, repetitions: int) -> None:
    """What a process of its own does: a small case, then the case, and its figures to stdout."""
    run_once(kind, NETWORKS[SMALL[kind]](), check=False)
    topology = NETWORKS[name]()
    found = [run_once(kind, topology, check=False) for _ in range(repetitions)]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run_once(kind, topology, check=True)
    sys.stdout.write(
        json.dumps({"runs": found, "peak_bytes": peak_bytes, "ranks": topology.num_ranks})
    )


def measure(kind: str, name: str, repetitions: int) -> dict[str, Any]:
    """One case in its own process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.collectives.synthesis_scale",
        "--work",
        kind,
        name,
        "--repetitions",
        str(repetitions),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def rows_of(kind: str, name: str, found: dict[str, Any]) -> list[BenchmarkRow]:
    """Rows of one case."""
    seconds, spread = median_and_spread([run["seconds"] for run in found["runs"]])
    case = f"{WHAT[kind]}: {name}, {found['ranks']} ranks"
    large = kind == "matching" and found["ranks"] == 1024
    rows = [
        BenchmarkRow(
            case=case, metric="time", unit="s", ours=seconds, spread=spread,
            target=TARGET_S if large else None, met=seconds <= TARGET_S if large else None,
        ),
        BenchmarkRow(
            case=case, metric="peak memory", unit="B", ours=found["peak_bytes"],
            target=TARGET_BYTES if large else None,
            met=found["peak_bytes"] <= TARGET_BYTES if large else None,
        ),
    ]  # fmt: skip
    for key, metric in (("ratio", "simulated: time over its lower bound"), ("height", "height")):
        values = [run[key] for run in found["runs"] if key in run]
        if values:
            middle, around = median_and_spread(values)
            unit = "ratio" if key == "ratio" else "edges"
            limit = 1.0 if key == "ratio" else None
            rows.append(
                BenchmarkRow(
                    case=case, metric=metric, unit=unit, ours=middle, spread=around, limit=limit
                )
            )
    return rows


def growth(kind: str, found: dict[str, dict[str, Any]], family: str) -> list[BenchmarkRow]:
    """The exponent of time in the number of ranks, from the smallest to the largest case."""
    points = sorted(
        (case["ranks"], median_and_spread([run["seconds"] for run in case["runs"]])[0])
        for name, case in found.items()
        if name.startswith(family) and name.count("x") < 2
    )
    if len(points) < 2:
        return []
    (few, short_s), (many, long_s) = points[0], points[-1]
    exponent = math.log(long_s / short_s) / math.log(many / few)
    return [
        BenchmarkRow(
            case=f"{WHAT[kind]}: {family}, {few} to {many} ranks", metric="growth of time",
            unit="exponent of ranks", ours=exponent,
        )
    ]  # fmt: skip


def main() -> None:
    """Run all cases, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small cases once, no results file")
    parser.add_argument("--work", nargs=2, metavar=("KIND", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        kind, name = arguments.work
        work(kind, name, arguments.repetitions)
        return
    rows: list[BenchmarkRow] = []
    for kind in arguments.kinds:
        found: dict[str, dict[str, Any]] = {}
        for name in CASES[kind]:
            if arguments.quick and name not in QUICK:
                continue
            repetitions = 1 if arguments.quick or name == "torus 64x64" else arguments.repetitions
            found[name] = measure(kind, name, repetitions)
            rows += rows_of(kind, name, found[name])
            for row in rows[-3:]:
                print(f"{row.case} | {row.metric}: {row.ours:.4g} {row.unit}", flush=True)
        for family in ("torus", "fat-tree"):
            rows += growth(kind, found, family)
    if not arguments.quick:
        write_results(arguments.output, topic="collectives/synthesis_scale", rows=rows)


if __name__ == "__main__":
    main()
