"""Compares synthesis with public synthesizers side by side: TACOS, ForestColl, SCCL.

SCCL's rows compare its solver with a search in steps that is no method of the product
(`k_synchronous`); what `synthesize` finds on DGX-1 is in `exact_search`'s table ``dgx1``.

Peers are run from where the user has them; none is part of this repository:

``--forestcoll FOLDER``  a checkout of liangyuRain/ForestColl (Python, needs networkx).
``--sccl FOLDER``        a checkout of microsoft/sccl (Python; with what its setup.py requires).
``--tacos PROGRAM``      a program on the library of astra-sim/tacos that takes the arguments
                         ``mesh2|torus2|torus3|mesh3 A B C GIB_PER_S LATENCY_US MIB CHUNKS`` and
                         prints ``{"collective_us": ..., "solve_us": ...}``.

Variants run in turns in one run. A peer that is not given is left out of its rows; one that takes
more than 30 s is asked once.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.collectives.k_synchronous import k_synchronous
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.collectives.schedules import all_gather, evaluate, verify_schedule
from fivefold.collectives.schedules.bounds import discrete_ingress_bound
from fivefold.collectives.synthesis import matching, spanning_trees
from fivefold.network.topology import Topology, mesh, named_topology, torus

RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "synthesis_peers.json"
GIGA = 10**9
GIB, MIB = 2**30, 2**20
TIMEOUT_S = 900

FORESTCOLL = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import topologies
from pipeline_allgather import optimal_pipeline_spanning_trees
graph, gpus = getattr(topologies, sys.argv[2] + "_topology")(int(sys.argv[3]))
started = time.perf_counter()
k = int(sys.argv[4])
(u, k), _ = optimal_pipeline_spanning_trees(graph, compute_nodes=gpus, fixed_K=k or None)
print(json.dumps({"seconds": time.perf_counter() - started, "rate": len(gpus) * k / float(u)}))
"""
SCCL = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from msccl.collectives import allgather
from msccl.instance import Instance
from msccl.path_encoding import PathEncoding
from msccl.topologies import dgx1
chunks, steps, rounds = map(int, sys.argv[2:5])
started = time.perf_counter()
instance = Instance(steps, extra_rounds=rounds - steps, chunks=chunks)
found = PathEncoding(dgx1(), allgather(8)).solve(instance)
print(json.dumps({"seconds": time.perf_counter() - started, "found": found is not None}))
"""
# Ours (machine, boxes), theirs, trees per root (0: as many as are optimal).
TREES = [("dgx_a100", 1, "a100", 0), ("dgx_a100", 2, "a100", 0), ("mi250", 1, "mi250", 0),
         ("mi250", 2, "mi250", 1)]  # fmt: skip
# Kind, shape in our order, GiB/s, us, MiB, chunks per rank.
MATCHED = [
    ("mesh2", (3, 4), 50.0, 0.5, 12, 3),
    ("torus2", (4, 4), 50.0, 0.5, 1024, 1),
    ("torus2", (8, 8), 50.0, 0.5, 1024, 1),
    ("torus2", (8, 8), 50.0, 0.5, 1024, 4),
    ("torus3", (4, 2, 3), 50.0, 0.5, 3072, 3),
    ("mesh2", (10, 10), 100.0, 1.0, 1024, 2),
    ("torus2", (16, 16), 50.0, 0.5, 1024, 1),
    ("mesh2", (16, 16), 50.0, 0.5, 1024, 1),
    ("torus3", (8, 8, 8), 50.0, 0.5, 1024, 1),
]
POINTS = [(1, 2, 2), (2, 2, 3), (3, 2, 4), (3, 3, 4), (4, 3, 5), (6, 3, 7)]
SMALL = 64
SLOW_S = 30.0


def ask(command: list[str]) -> dict[str, Any]:
    """Run a peer and read the JSON that it prints last."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def timed_row(case: str, ours: list[float], peer: str, theirs: list[float]) -> BenchmarkRow:
    """Seconds of synthesis, ours beside a peer's."""
    seconds, spread = median_and_spread(ours)
    peers = {peer: median_and_spread(theirs)[0]} if theirs else {}
    return BenchmarkRow(
        case=case, metric="time of synthesis", unit="s", ours=seconds, spread=spread, peers=peers
    )


def trees(folder: Path | None, *, repetitions: int, quick: bool) -> Iterator[BenchmarkRow]:
    """Spanning trees beside ForestColl's."""
    for name, boxes, theirs, k in TREES:
        if quick and boxes > 1:
            continue
        topology = named_topology(name, boxes=boxes)
        ours_s: list[float] = []
        peer_s: list[float] = []
        rates: dict[str, float] = {}
        for _ in range(repetitions):
            started_s = time.perf_counter()
            packing = spanning_trees(topology, k=k or None)
            ours_s.append(time.perf_counter() - started_s)
            if folder is not None and max(peer_s, default=0.0) < SLOW_S:
                command = [
                    sys.executable,
                    "-c",
                    FORESTCOLL,
                    str(folder),
                    theirs,
                    str(boxes),
                    str(k),
                ]
                answer = ask(command)
                peer_s.append(answer["seconds"])
                rates["ForestColl"] = answer["rate"]
        packing.check()
        case = f"all-gather trees, {name} x{boxes}, " + (f"k={k}" if k else "optimal")
        yield timed_row(case, ours_s, "ForestColl", peer_s)
        yield BenchmarkRow(
            case=case, metric="algorithm bandwidth", unit="GB/s", peers=rates,
            ours=packing.algorithm_bandwidth_bytes_per_s / GIGA,
            limit=topology.num_ranks / float(packing.optimum_s_per_byte) / GIGA,
        )  # fmt: skip


def build(kind: str, shape: tuple[int, ...], rate: float, latency_us: float) -> Topology:
    """One of TACOS' networks."""
    make = mesh if kind.startswith("mesh") else torus
    return make(shape, bandwidth=rate * GIB, latency=latency_us * 1e-6)


def matched(program: Path | None, *, repetitions: int, quick: bool) -> Iterator[BenchmarkRow]:
    """Matching beside TACOS: one run of each, and the best of as many."""
    for kind, shape, rate, latency_us, size_mib, chunks in MATCHED:
        topology = build(kind, shape, rate, latency_us)
        if quick and topology.num_ranks > SMALL:
            continue
        collective, size_bytes = all_gather(topology.num_ranks, chunks), size_mib * MIB
        # TACOS names width first, and three numbers always.
        sides = [*reversed(shape)] if len(shape) == 2 else [*shape]
        sides += [0] * (3 - len(sides))
        numbers = [*sides, rate, latency_us, size_mib, chunks]
        ours: list[float] = []
        theirs: list[float] = []
        ours_s: list[float] = []
        peer_s: list[float] = []
        for number in range(repetitions):
            started_s = time.perf_counter()
            schedule = matching(collective, topology, size_bytes=size_bytes, seeds=1, seed=number)
            ours_s.append(time.perf_counter() - started_s)
            verify_schedule(schedule, check_times=True)
            ours.append(evaluate(schedule, size_bytes=size_bytes).total_s * 1e6)
            if program is not None and max(peer_s, default=0.0) < SLOW_S:
                answer = ask([str(program), kind, *map(str, numbers)])
                theirs.append(answer["collective_us"])
                peer_s.append(answer["solve_us"] * 1e-6)
        case = f"all-gather matching, {topology.name}, {size_mib} MiB, C={chunks}"
        yield timed_row(case, ours_s, "TACOS", peer_s)
        bound_us = discrete_ingress_bound(collective, topology, size_bytes).seconds * 1e6
        middle, spread = median_and_spread(ours)
        yield BenchmarkRow(
            case=f"simulated: {case}", metric="collective time, single runs", unit="us",
            ours=middle, spread=spread, limit=bound_us,
            peers={"TACOS": median_and_spread(theirs)[0]} if theirs else {},
        )  # fmt: skip
        yield BenchmarkRow(
            case=f"simulated: {case}", metric="collective time, best of the runs", unit="us",
            ours=min(ours), limit=bound_us, peers={"TACOS": min(theirs)} if theirs else {},
        )  # fmt: skip
        started_s = time.perf_counter()
        schedule = matching(collective, topology, size_bytes=size_bytes)
        taken_s = time.perf_counter() - started_s
        yield BenchmarkRow(
            case=f"simulated: {case}", metric="collective time, default number of seeds",
            unit="us", ours=evaluate(schedule, size_bytes=size_bytes).total_s * 1e6, limit=bound_us,
        )  # fmt: skip
        yield BenchmarkRow(
            case=case, metric="time of synthesis, default number of seeds", unit="s", ours=taken_s
        )


def points(folder: Path | None, *, repetitions: int, quick: bool) -> Iterator[BenchmarkRow]:
    """k-synchronous instances on DGX-1 beside SCCL's solver."""
    topology = named_topology("dgx1").scaled(latency=0.0)
    k_synchronous(all_gather(8), topology, steps=2, rounds=2)  # the solver is loaded now
    for chunks, steps, rounds in POINTS[:2] if quick else POINTS:
        ours_s: list[float] = []
        peer_s: list[float] = []
        for _ in range(repetitions):
            started_s = time.perf_counter()
            k_synchronous(all_gather(8, chunks), topology, steps=steps, rounds=rounds)
            ours_s.append(time.perf_counter() - started_s)
            if folder is not None and max(peer_s, default=0.0) < SLOW_S:
                numbers = map(str, (chunks, steps, rounds))
                peer_s.append(ask([sys.executable, "-c", SCCL, str(folder), *numbers])["seconds"])
        yield timed_row(f"DGX-1 all-gather ({chunks}, {steps}, {rounds})", ours_s, "SCCL", peer_s)


def main() -> None:
    """Run the comparisons, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forestcoll", type=Path)
    parser.add_argument("--sccl", type=Path)
    parser.add_argument("--tacos", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small cases once, no results file")
    arguments = parser.parse_args()
    quick = arguments.quick
    repetitions = 1 if quick else arguments.repetitions
    matching(all_gather(4), torus((2, 2)), size_bytes=1.0)  # compiled before the clock starts
    rows: list[BenchmarkRow] = []
    for table in (
        trees(arguments.forestcoll, repetitions=repetitions, quick=quick),
        matched(arguments.tacos, repetitions=repetitions, quick=quick),
        points(arguments.sccl, repetitions=repetitions, quick=quick),
    ):
        for row in table:
            rows.append(row)
            beside = ", ".join(f"{name} {value:.4g}" for name, value in row.peers.items())
            ratio = math.nan if not row.limit else row.ours / row.limit
            print(f"{row.case} | {row.metric}: {row.ours:.4g} {row.unit} ({beside}; {ratio:.3f} of "
                  f"the limit)", flush=True)  # fmt: skip
    if not quick:
        write_results(arguments.output, topic="collectives/synthesis_peers", rows=rows)


if __name__ == "__main__":
    main()
