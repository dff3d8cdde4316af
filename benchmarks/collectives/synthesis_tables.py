"""Reproduces published optima: throughput of trees, all-to-all flows, TACOS' regression values.

Three tables. The throughput optimum of all-gather on machines, tori, meshes and hypercubes must
equal the published fraction, and trees must reach it; a fixed number of trees must give the
published bandwidth. The all-to-all optimum must agree to 1e-6. Matching must be within 1 % of
TACOS' regression values. Times are seconds of synthesis.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.collectives.schedules import all_gather, evaluate, throughput_optimum, verify_schedule
from fivefold.collectives.synthesis import all_to_all_optimum, matching, spanning_trees
from fivefold.network.topology import Topology, hypercube, mesh, named_topology, ring, torus

RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "synthesis_tables.json"
GIGA = 10**9
GIB, MIB = 2**30, 2**20
LARGEST_PACKED = 100
Make = Callable[[], Topology]


def machine(name: str, boxes: int = 1) -> Make:
    """A named machine."""
    return lambda: named_topology(name, boxes=boxes).scaled(latency=0.0)


def grid(make: Callable[..., Topology], *shape: int) -> Make:
    """A torus or mesh with links of 1 GB/s."""
    return lambda: make(shape, bandwidth=GIGA)


# Seconds per GB of one rank's shard.
OPTIMA: dict[str, tuple[Make, Fraction]] = {
    "A100 x1": (machine("dgx_a100"), Fraction(7, 300)),
    "A100 x2": (machine("dgx_a100", 2), Fraction(3, 65)),
    "A100 x4": (machine("dgx_a100", 4), Fraction(3, 25)),
    "A100 x16": (machine("dgx_a100", 16), Fraction(3, 5)),
    "A100 x32": (machine("dgx_a100", 32), Fraction(31, 25)),
    "MI250 x1": (machine("mi250"), Fraction(7, 150)),
    "MI250 x2": (machine("mi250", 2), Fraction(15, 166)),
    "MI250 x8": (machine("mi250", 8), Fraction(7, 16)),
    "MI250 x16": (machine("mi250", 16), Fraction(15, 16)),
    "DGX-1": (machine("dgx1"), Fraction(7, 150)),
    "DGX-2 x1": (machine("dgx2"), Fraction(3, 25)),
    "DGX-2 x2": (machine("dgx2", 2), Fraction(31, 125)),
    **{
        f"torus {'x'.join(map(str, shape))}": (
            grid(torus, *shape), Fraction(math.prod(shape) - 1, 2 * len(shape)),
        )
        for shape in ((4, 4), (8, 8), (16, 16), (32, 32), (4, 4, 4), (8, 8, 8), (3, 3, 3),
                      (3, 4, 5))
    },
    **{
        f"mesh {'x'.join(map(str, shape))}": (
            grid(mesh, *shape), Fraction(math.prod(shape) - 1, len(shape)),
        )
        for shape in ((4, 4), (5, 5), (8, 8), (10, 10), (7, 12), (32, 32), (3, 3, 3), (3, 4, 5),
                      (4, 2, 3))
    },
    "hypercube 2^10": (lambda: hypercube(10, bandwidth=GIGA), Fraction(1023, 10)),
}  # fmt: skip
FIXED = [
    *(("dgx_a100", 2, k, 342.8571) for k in range(1, 6)),
    *(("mi250", 1, k, rate)
      for k, rate in enumerate((266.6667, 320.0, 342.8571, 320.0, 333.3333), 1)),
    *(("mi250", 2, k, rate) for k, rate in ((1, 320.0), (3, 342.8571), (4, 341.3333))),
]  # fmt: skip
FLOWS: dict[str, tuple[Make, float]] = {
    "DGX-1": (machine("dgx1"), 8 / 3 / 25),
    "ring 8": (lambda: ring(8, bandwidth=GIGA), 8.0),
    "torus 4x4": (grid(torus, 4, 4), 8.0),
    "torus 8x8": (grid(torus, 8, 8), 64.0),
    "hypercube 2^6": (lambda: hypercube(6, bandwidth=GIGA), 32.0),
    "mesh 4x4": (grid(mesh, 4, 4), 16.0),
    "mesh 8x8": (grid(mesh, 8, 8), 128.0),
    "A100 x2": (machine("dgx_a100", 2), 0.32),
}
# Shape, GiB/s along each dimension, us, MiB, chunks per node, published us.
TACOS = [
    (mesh, (3, 3, 3), (50.0,) * 3, 0.5, 1024, 1, 6671.17),
    (mesh, (3, 4, 5), (50.0,) * 3, 0.5, 2048, 2, 13353.33),
    (mesh, (4, 2, 3), (50.0,) * 3, 0.5, 3072, 3, 19178.17),
    (mesh, (5, 5), (50.0, 50.0), 0.5, 1024, 1, 9606.0),
    (mesh, (10, 10), (100.0, 100.0), 1.0, 1024, 2, 5049.0),
    (mesh, (5, 5), (75.0, 50.0), 0.5, 1024, 1, 8005.0),
    (mesh, (5, 8), (35.0, 80.0), 1.0, 1024, 2, 8595.43),
    (torus, (3, 3, 3), (50.0,) * 3, 0.5, 1024, 1, 3706.20),
    (torus, (4, 2, 3), (50.0,) * 3, 0.5, 3072, 3, 11673.67),
]


def optima(*, quick: bool) -> Iterator[BenchmarkRow]:
    """Throughput optima, and trees that reach them."""
    for name, (make, expected) in OPTIMA.items():
        topology = make()
        if quick and topology.num_ranks > 32:
            continue
        started_s = time.perf_counter()
        found = throughput_optimum(topology).inverse_rate * GIGA
        taken_s = time.perf_counter() - started_s
        yield BenchmarkRow(
            case=f"all-gather, {name}", metric="seconds per GB of shard", unit="s/GB",
            ours=float(found), peers={"published": float(expected)}, target=float(expected),
            met=found == expected,
        )  # fmt: skip
        yield BenchmarkRow(
            case=f"all-gather, {name}", metric="time of the optimum", unit="s", ours=taken_s
        )
        if topology.num_ranks <= LARGEST_PACKED and not (quick and topology.num_ranks > 16):
            yield from _packed(f"all-gather, {name}", topology, expected)


def _packed(case: str, topology: Topology, expected: Fraction) -> Iterator[BenchmarkRow]:
    started_s = time.perf_counter()
    packing = spanning_trees(topology)
    taken_s = time.perf_counter() - started_s
    packing.check()
    rate = packing.inverse_rate_s_per_byte * GIGA
    yield BenchmarkRow(
        case=case, metric="trees, seconds per GB of shard", unit="s/GB", ours=float(rate),
        limit=float(expected), target=float(expected), met=rate == expected,
    )  # fmt: skip
    yield BenchmarkRow(case=case, metric="time of the trees", unit="s", ours=taken_s)


def fixed() -> Iterator[BenchmarkRow]:
    """Bandwidths with a fixed number of trees."""
    for name, boxes, k, expected in FIXED:
        packing = spanning_trees(named_topology(name, boxes=boxes), k=k)
        packing.check()
        rate = packing.algorithm_bandwidth_bytes_per_s / GIGA
        yield BenchmarkRow(
            case=f"all-gather, {name} x{boxes}, k={k}", metric="algorithm bandwidth", unit="GB/s",
            ours=rate, peers={"published": expected}, target=expected,
            met=abs(rate - expected) < 1e-3,
        )  # fmt: skip


def flows() -> Iterator[BenchmarkRow]:
    """All-to-all optima."""
    for name, (make, expected) in FLOWS.items():
        topology = make()
        started_s = time.perf_counter()
        optimum = all_to_all_optimum(topology)
        taken_s = time.perf_counter() - started_s
        found = optimum.seconds * GIGA
        yield BenchmarkRow(
            case=f"all-to-all, {name}", metric="seconds per GB between each pair", unit="s/GB",
            ours=found, peers={"published": expected}, limit=optimum.bound_s * GIGA,
            target=expected, met=abs(found / expected - 1) < 1e-6,
        )  # fmt: skip
        yield BenchmarkRow(
            case=f"all-to-all, {name}", metric="time of the program", unit="s", ours=taken_s
        )


def regression_values() -> Iterator[BenchmarkRow]:
    """TACOS' table, which its tests hold to 1 %."""
    for make, shape, rates, latency_us, size_mib, chunks, expected_us in TACOS:
        topology = make(shape, bandwidth=[rate * GIB for rate in rates], latency=latency_us * 1e-6)
        collective, size_bytes = all_gather(topology.num_ranks, chunks), size_mib * MIB
        schedule = matching(collective, topology, size_bytes=size_bytes)
        verify_schedule(schedule, check_times=True)
        found_us = evaluate(schedule, size_bytes=size_bytes).total_s * 1e6
        yield BenchmarkRow(
            case=f"simulated: {topology.name}, {rates} GiB/s, {size_mib} MiB, C={chunks}",
            metric="all-gather time", unit="us", ours=found_us, peers={"TACOS": expected_us},
            target=1.01 * expected_us, met=found_us <= 1.01 * expected_us,
        )  # fmt: skip


def main() -> None:
    """Run the tables, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small cases, no results file")
    arguments = parser.parse_args()
    rows: list[BenchmarkRow] = []
    for table in (optima(quick=arguments.quick), fixed(), flows(), regression_values()):
        for row in table:
            met = "" if row.met is None else (" met" if row.met else " NOT MET")
            print(f"{row.case} | {row.metric}: {row.ours:.6g} {row.unit}{met}", flush=True)
            rows.append(row)
    if not arguments.quick:
        write_results(arguments.output, topic="collectives/synthesis_tables", rows=rows)


if __name__ == "__main__":
    main()
