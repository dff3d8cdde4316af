"""Measures the fluid simulator's cost from 1,000 to 100,000 flows, and its times against real ones.

Cost: one flow from each host of a fat-tree to another host (a random permutation, a random one of
the shortest paths each), solved once, and simulated to the end with equal and with different
sizes; several flows a host; and jobs that compute and reduce in turn, each reduction one coupled
ring, over many iterations. Processor seconds, best of the repetitions, compilation left out.

Reality: patterns of transfers between the hosts of an emulated cluster, over gloo. The links are
measured by ``profile_links`` in the same run; the simulator gets nothing but that profile. What
is simulated and what is measured are rows of their own; their ratio is a third.

    python -m benchmarks.network.simulation [--quick] [--no-lab] [--repetitions 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.lab import LabSpec, run_lab
from fivefold.network.profiling import Profile, profile_links
from fivefold.network.simulation import Flow, FlowTable, max_min_rates, simulate
from fivefold.network.simulation.rates import routes_of
from fivefold.network.topology import Topology

RESULTS = Path(__file__).parents[1] / "results" / "network" / "simulation.json"
LINK_BYTES_PER_S = 12.5e9
SOLVE_TARGETS_S = {8_192: 0.05, 101_306: 1.0}
LAB_ERROR_TARGET = 0.1
MB = 1_000_000


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class FatTree:
    """Links of a k-ary fat-tree by arithmetic: what the simulator reads of a topology, and paths.

    Links are numbered: hosts up, hosts down, then edge to aggregation, back, aggregation to core,
    back; each switch layer by (pod, switch, port).
    """

    def __init__(self, k: int) -> None:
        self.half, self.num_hosts = k // 2, k**3 // 4
        self.layer = k * self.half**2
        self.num_links = 2 * self.num_hosts + 4 * self.layer
        self.capacities_bytes_per_s = np.full(self.num_links, LINK_BYTES_PER_S)
        self.latencies_s = np.full(self.num_links, 1e-6)
        self.switches: tuple[()] = ()
        self.name = f"fat_tree:{k}"

    def path(self, source: int, target: int, choice: tuple[int, int]) -> list[int]:
        """A shortest path, through the chosen aggregation switch and core port."""
        half, base = self.half, 2 * self.num_hosts
        edges = source // half, target // half
        if edges[0] == edges[1]:
            return [source, self.num_hosts + target]
        pods = edges[0] // half, edges[1] // half
        up = base + edges[0] * half + choice[0]
        down = base + self.layer + edges[1] * half + choice[0]
        ends = source, self.num_hosts + target
        if pods[0] == pods[1]:
            return [ends[0], up, down, ends[1]]
        rise = base + 2 * self.layer + (pods[0] * half + choice[0]) * half + choice[1]
        fall = base + 3 * self.layer + (pods[1] * half + choice[0]) * half + choice[1]
        return [ends[0], up, rise, fall, down, ends[1]]


def random_paths(tree: FatTree, pairs: Any, seed: int) -> Any:
    """Hashed paths of pairs of hosts."""
    random = np.random.default_rng(seed)
    choices = random.integers(0, tree.half, (len(pairs), 2)).tolist()
    paths = [tree.path(a, b, (x, y)) for (a, b), (x, y) in zip(pairs, choices, strict=True)]
    return routes_of(paths)


def best_cpu_s(work: Callable[[], Any], repetitions: int) -> tuple[float, float, Any]:
    """The least and the largest processor time, and the last result."""
    spent, found = [], None
    for _ in range(repetitions):
        started_s = time.process_time()
        found = work()
        spent.append(time.process_time() - started_s)
    return min(spent), max(spent), found


def cost_rows(k: int, repetitions: int) -> list[BenchmarkRow]:
    """One size of the cost curve."""
    tree: Any = FatTree(k)
    random = np.random.default_rng(k)
    hosts = tree.num_hosts
    pairs = list(zip(range(hosts), random.permutation(hosts).tolist(), strict=True))
    routes = random_paths(tree, pairs, seed=k)
    rows = []

    def row(metric: str, work: Callable[[], Any], target: float | None = None) -> Any:
        low, high, found = best_cpu_s(work, repetitions)
        met = None if target is None else low <= target
        rows.append(
            BenchmarkRow(
                case=f"fat-tree k={k}, {hosts} hosts and flows, {tree.num_links} links",
                metric=metric, unit="CPU s", ours=low, spread=(low, high), target=target, met=met,
            )
        )  # fmt: skip
        note(f"k={k}: {metric}: {low:.3f} s")
        return found

    row(
        "rates solved once",
        lambda: max_min_rates(routes, tree.capacities_bytes_per_s),
        SOLVE_TARGETS_S.get(hosts),
    )
    for name, sizes in (
        ("equal sizes", np.full(hosts, 100.0 * MB)),
        ("different sizes", random.uniform(1 * MB, 100 * MB, hosts)),
    ):
        table = FlowTable.build(sizes=sizes, routes=routes)
        result = row(f"simulated to the end, {name}", partial(simulate, tree, table))
        case = rows[-1].case
        for metric, value in (("events", result.events), ("solves", result.solves)):
            rows.append(
                BenchmarkRow(case=case, metric=f"{metric}, {name}", unit="count", ours=value)
            )
    return rows


def crowded_rows(k: int, flows_per_host: int) -> list[BenchmarkRow]:
    """Many flows a host, all of different sizes: every end moves many rates."""
    tree: Any = FatTree(k)
    random = np.random.default_rng(2)
    hosts = range(tree.num_hosts)
    pairs = [
        pair
        for _ in range(flows_per_host)
        for pair in zip(hosts, random.permutation(tree.num_hosts).tolist(), strict=True)
    ]
    sizes = random.uniform(1 * MB, 100 * MB, len(pairs))
    table = FlowTable.build(sizes=sizes, routes=random_paths(tree, pairs, seed=3))
    case = f"fat-tree k={k}, {flows_per_host} flows a host, different sizes"
    exact_s, _, exact = best_cpu_s(partial(simulate, tree, table), 1)
    loose_s, _, loose = best_cpu_s(partial(simulate, tree, table, tolerance=1e-2), 1)
    error = float(np.abs(loose.finish_s / exact.finish_s - 1.0).max())
    note(f"{case}: exact {exact_s:.2f} s, tolerance 1 % {loose_s:.2f} s, error {error:.2g}")
    return [
        BenchmarkRow(case=case, metric="exact", unit="CPU s", ours=exact_s),
        BenchmarkRow(case=case, metric="tolerance 1 %", unit="CPU s", ours=loose_s),
        BenchmarkRow(case=case, metric="tolerance 1 %: largest error of an end", unit="ratio",
                     ours=error),
    ]  # fmt: skip


def job_rows(*, hosts_per_job: int, jobs: int, iterations: int, k: int) -> list[BenchmarkRow]:
    """Jobs on random hosts: compute, then a ring all-reduce at one common rate, and again."""
    tree: Any = FatTree(k)
    random = np.random.default_rng(1)
    order = random.permutation(tree.num_hosts).tolist()
    sizes, paths, needs, compute, number = [], [], [], [], []
    for job in range(jobs):
        members = order[job * hosts_per_job : (job + 1) * hosts_per_job]
        pairs = zip(members, members[1:] + members[:1], strict=True)
        ring = [tree.path(a, b, tuple(random.integers(0, tree.half, 2))) for a, b in pairs]
        # In lock step the whole ring is one flow over the links of all its neighbours.
        sizes += [float(random.uniform(0.05, 0.2)), float(random.uniform(0.2e9, 2e9))]
        paths += [[], list(itertools.chain.from_iterable(ring))]
        needs += [[], [2 * job]]
        compute += [1, 0]
        number += [job, job]
    table = FlowTable.build(
        sizes=sizes, routes=paths, dependencies=needs, is_compute=compute, jobs=number
    )
    low, _, result = best_cpu_s(lambda: simulate(tree, table, iterations=iterations), 1)
    case = f"{jobs} jobs of {hosts_per_job} hosts, {iterations} iterations, fat-tree k={k}"
    note(f"{case}: {low:.2f} s, {result.events} events")
    return [
        BenchmarkRow(case=case, metric="simulated to the end", unit="CPU s", ours=low,
                     target=300.0, met=low <= 300.0),
        BenchmarkRow(case=case, metric="per event", unit="CPU us", ours=1e6 * low / result.events),
    ]  # fmt: skip


# Reality: (source, target, megabytes) at the same time, on four hosts of which the last is slow.
PATTERNS: dict[str, list[tuple[int, int, int]]] = {
    "one transfer": [(0, 1, 8)],
    "three to one": [(1, 0, 4), (2, 0, 4), (3, 0, 4)],
    "one to three": [(0, 1, 4), (0, 2, 4), (0, 3, 4)],
    "around a ring": [(0, 1, 6), (1, 2, 6), (2, 3, 6), (3, 0, 6)],
    "all to all": [(a, b, 2) for a in range(4) for b in range(4) if a != b],
    "two sizes on one uplink": [(0, 1, 8), (0, 2, 2)],
    "a chain of shared ports": [(0, 1, 6), (2, 1, 6), (2, 3, 3)],
}


def worker() -> None:
    """One rank in the lab: profile the links, then time every pattern; rank 0 prints JSON."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415 - as above

    dist.init_process_group("gloo")
    rank, repetitions = dist.get_rank(), int(os.environ["PATTERN_REPETITIONS"])
    profile = profile_links(sizes_bytes=(64, 1 << 18, 1 << 20, 4 << 20), repetitions=3)
    times: dict[str, list[float]] = {name: [] for name in PATTERNS}
    for turn in range(repetitions + 1):  # patterns take turns; the first turn warms up
        for name, transfers in PATTERNS.items():
            into = {a: torch.zeros(n * MB, dtype=torch.uint8) for a, b, n in transfers if b == rank}
            dist.barrier()
            started_s = time.perf_counter()
            works = [dist.irecv(data, src=a) for a, data in into.items()]
            works += [
                dist.isend(torch.zeros(n * MB, dtype=torch.uint8), dst=b)
                for a, b, n in transfers
                if a == rank
            ]
            for work in works:
                if work is not None:
                    work.wait()
            spent = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn:
                times[name].append(float(spent))
    if rank == 0:
        print(json.dumps({"profile": profile.to_dict(), "times": times}))
    dist.barrier()
    dist.destroy_process_group()


def profile_from(found: dict[str, Any]) -> Profile:
    """The profile that a rank printed."""
    times = np.array(found["times_s"])
    times[np.eye(len(times), dtype=bool)] = np.nan
    return Profile(
        hosts=tuple(found["hosts"]),
        backend=found["backend"],
        sizes_bytes=tuple(found["sizes_bytes"]),
        times_s=times,
    )


def simulated_s(topology: Topology, transfers: list[tuple[int, int, int]]) -> float:
    """What the simulator says of a pattern."""
    flows = [
        Flow(
            place,
            topology.ranks[a],
            topology.ranks[b],
            float(n * MB),
            topology.shortest_route(a, b, through_ranks=False),
        )
        for place, (a, b, n) in enumerate(transfers)
    ]
    return simulate(topology, flows).total_s


def lab_rows(spec: LabSpec, repetitions: int) -> list[BenchmarkRow]:
    """Measured against simulated."""
    os.environ["PATTERN_REPETITIONS"] = str(repetitions)
    command = [sys.executable, "-m", "benchmarks.network.simulation", "--worker"]
    result = run_lab(spec, command, timeout_s=900, stream=False).check()
    found = json.loads(result.ranks[0].stdout().strip().splitlines()[-1])
    topology = profile_from(found["profile"]).to_topology()
    rows, errors = [], []
    for name, transfers in PATTERNS.items():
        measured, spread = median_and_spread(found["times"][name])
        predicted = simulated_s(topology, transfers)
        errors.append(abs(predicted / measured - 1.0))
        case = f"lab, {spec.describe()}: {name}"
        rows += [
            BenchmarkRow(case=case, metric="measured", unit="s", ours=measured, spread=spread),
            BenchmarkRow(case=case, metric="simulated from the profile", unit="s", ours=predicted),
            BenchmarkRow(case=case, metric="simulated / measured", unit="ratio",
                         ours=predicted / measured),
        ]  # fmt: skip
        note(f"{name}: measured {measured:.3f} s, simulated {predicted:.3f} s")
    mean = statistics.mean(errors)
    rows.append(
        BenchmarkRow(case=f"lab, {spec.describe()}: all patterns", metric="mean error",
                     unit="ratio", ours=mean, target=LAB_ERROR_TARGET,
                     met=mean <= LAB_ERROR_TARGET)
    )  # fmt: skip
    return rows


def main() -> None:
    """Run it all and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, no results file")
    parser.add_argument("--no-lab", action="store_true", help="leave out what needs namespaces")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker()
        return
    cost_rows(4, 1)  # compiles
    rows = []
    for k in (8, 16) if arguments.quick else (16, 24, 32, 48, 64, 74):
        rows += cost_rows(k, arguments.repetitions)
    for flows in (2,) if arguments.quick else (2, 4, 8):
        rows += crowded_rows(16, flows)
    rows += job_rows(hosts_per_job=8, jobs=20, iterations=50, k=16)
    if not arguments.quick:
        rows += job_rows(hosts_per_job=8, jobs=100, iterations=1000, k=16)
    if not arguments.no_lab:
        spec = LabSpec(hosts=4, rate="200Mbit/s", host_rates={3: "100Mbit/s"})
        rows += lab_rows(spec, arguments.repetitions)
    if not arguments.quick:
        write_results(arguments.output, topic="network/simulation", rows=rows)
        note(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
