"""Compares small and medium collectives with the library, trees of one root and the lower bound.

Every answer is of `synthesize` by the methods that cost next to nothing, the library and shortest
paths, in the serial cost model: nothing is measured on a network. The peers are the library's best
algorithm with each chunk a message of its own, which was all there was before messages were joined,
its best with joined messages, and the best reduce and broadcast over a tree of shortest paths.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import Schedule, evaluate, named_collective
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.synthesis import synthesize
from fivefold.errors import FivefoldError
from fivefold.network.topology import Topology, named_topology, ring, switch, torus

RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "small.json"
SIZES = {"1 kB": 1e3, "16 kB": 16e3, "256 kB": 256e3, "1 MB": 1e6, "16 MB": 16e6}
NETWORKS: dict[str, Callable[[], Topology]] = {
    "switch, 8 ranks": lambda: switch(8, bandwidth="25 GB/s", latency="2.5 us"),
    "switch, 12 ranks": lambda: switch(12, bandwidth="25 GB/s", latency="2.5 us"),
    "switch, 64 ranks": lambda: switch(64, bandwidth="25 GB/s", latency="2.5 us"),
    "ring, 8 ranks": lambda: ring(8, bandwidth="25 GB/s", latency="1 us"),
    "torus 4x4, 16 ranks": lambda: torus((4, 4), bandwidth="25 GB/s", latency="1 us"),
    "torus 4x4x4, 64 ranks": lambda: torus((4, 4, 4), bandwidth="25 GB/s", latency="1 us"),
    "NDv2 x2, 16 ranks": lambda: named_topology("ndv2", boxes=2),
    "DGX-2 x2, 32 ranks": lambda: named_topology("dgx2", boxes=2),
}


def library_s(name: str, network: Topology, size_bytes: float) -> dict[str, float]:
    """Return the best time of the library, by messages of one chunk and by joined ones."""
    collective = named_collective(name, network.num_ranks)
    best = {"library, chunks apart": float("inf"), "library, joined": float("inf")}
    for algorithm in available_algorithms(collective):
        try:
            schedule = build_algorithm(algorithm, collective, network)
        except FivefoldError:
            continue  # no hosts, no hierarchy
        forms: dict[str, Schedule] = {
            "library, chunks apart": schedule.replaced(messages=None),
            "library, joined": schedule,
        }
        for form, one in forms.items():
            best[form] = min(best[form], evaluate(one, size_bytes=size_bytes).total_s)
    return best


def rows_of(
    label: str, network: Topology, name: str, sizes: dict[str, float]
) -> Iterator[BenchmarkRow]:
    """Yield the row of each size."""
    for size, size_bytes in sizes.items():
        started_s = time.process_time()
        answers = [
            synthesize(name, network, size_bytes=size_bytes, method=method)
            for method in ("library", "paths")
        ]
        spent_s = time.process_time() - started_s
        found = min(answers, key=lambda answer: answer.time_s)
        peers = library_s(name, network, size_bytes)
        target_us = min(peers.values()) * 1e6
        case = f"simulated: {name} of {size}, {label}"
        yield BenchmarkRow(
            case=case, metric="time", unit="us", ours=found.time_s * 1e6,
            peers={peer: seconds * 1e6 for peer, seconds in peers.items()}
            | {"shortest paths alone": answers[1].time_s * 1e6},
            limit=found.bound.seconds * 1e6,
            target=target_us, met=found.time_s * 1e6 <= target_us * (1 + 1e-9),
        )  # fmt: skip
        yield BenchmarkRow(case=case, metric="processor time of the search", unit="s", ours=spent_s)


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two networks; writes no results")
    quick = parser.parse_args().quick
    networks = dict(list(NETWORKS.items())[:2]) if quick else NETWORKS
    rows = [
        row
        for label, make in networks.items()
        for name in COLLECTIVES
        for row in rows_of(label, make(), name, SIZES)
    ]
    if quick:
        for row in rows:
            print(row.case, row.metric, row.ours, row.peers, row.limit)
    else:
        write_results(RESULTS, topic="collectives/small", rows=rows)


if __name__ == "__main__":
    main()
