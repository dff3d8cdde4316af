"""Measures how long schedules take to build, verify and price, from 64 to 4,096 ranks.

Ring all-gather and reduce-scatter, N (N - 1) transfers: building the arrays, the symbolic verifier,
the verifier with data, and the serial cost model on a ring. Then the exact throughput optimum of
tori. Every figure is the median of repetitions in one process, after a warm-up that compiles.

    python -m benchmarks.collectives.verifying [--ranks 64,256,1024,4096] [--quick]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.schedules import (
    Schedule,
    evaluate,
    named_collective,
    throughput_optimum,
    verify_schedule,
)
from fivefold.network.topology import ring, torus

RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "verifying.json"
SIZE_BYTES = 2**30


def timed(work: Callable[[], object], repetitions: int) -> list[float]:
    """Seconds of each repetition."""
    found = []
    for _ in range(repetitions):
        begin_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin_s)
    return found


def row(case: str, metric: str, seconds: list[float]) -> BenchmarkRow:
    """A row of the median and the spread."""
    median, spread = median_and_spread(seconds)
    return BenchmarkRow(case=case, metric=metric, unit="s", ours=median, spread=spread)


def schedules(ranks: int, repetitions: int) -> Iterator[BenchmarkRow]:
    """Ring schedules of one size."""
    network = ring(ranks, bandwidth="25 GB/s", latency="1 us")
    for name in ("all_gather", "reduce_scatter"):
        collective = named_collective(name, ranks)
        order = list(range(ranks))

        def build(collective: object = collective, order: list[int] = order) -> Schedule:
            return build_algorithm("ring", collective, order=order)  # type: ignore[arg-type]

        schedule = build()
        case = f"ring {name}, {ranks} ranks, {schedule.num_transfers} transfers"
        works: dict[str, Callable[[], object]] = {
            "build": build,
            "verify": lambda schedule=schedule: verify_schedule(schedule),  # type: ignore[misc]
            "evaluate": lambda schedule=schedule: evaluate(  # type: ignore[misc]
                schedule, network, size_bytes=SIZE_BYTES
            ),
        }
        for metric, work in works.items():
            yield row(case, metric, timed(work, repetitions))


def optima(ranks: int, repetitions: int) -> Iterator[BenchmarkRow]:
    """Exact throughput optimum of a square torus."""
    side = round(ranks**0.5)
    network = torus((side, side), bandwidth="25 GB/s")
    seconds = timed(lambda: throughput_optimum(network), repetitions)
    yield row(f"torus {side}x{side}", "exact throughput optimum", seconds)


def main() -> None:
    """Run all sizes and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="64,256,1024,4096", help="sizes, comma-separated")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks, no results file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sizes = [int(text) for text in arguments.ranks.split(",")]
    repetitions = arguments.repetitions
    if arguments.quick:
        sizes, repetitions = [size for size in sizes if size <= 1024], 3
    list(schedules(8, 1))  # compiles
    rows = []
    for size in sizes:
        for found in (*schedules(size, repetitions), *optima(size, repetitions)):
            print(f"{found.case}: {found.metric} {found.ours:.4g} s {found.spread}", flush=True)
            rows.append(found)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows.append(
        BenchmarkRow(
            case=f"all sizes up to {max(sizes)} ranks", metric="memory", unit="bytes", ours=memory
        )
    )
    if not arguments.quick:
        write_results(arguments.results, topic="collectives/verifying", rows=rows)


if __name__ == "__main__":
    main()
