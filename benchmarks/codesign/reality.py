"""Runs plans on the emulated cluster and compares measured with predicted iteration times.

Each case is planned twice, every layer at its best alone (B1) and with Vertical and Horizontal on
top of that, and both plans are run for real: one process per host, real reductions over links that
are shaped one by one; compute is a sleep of the planned length. Predictions are made before the
first byte is sent, from the same link rates.

    python benchmarks/codesign/reality.py [--repetitions 3] [--case NAME] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.codesign import (
    ClusterPlan,
    CoDesigns,
    JobSpec,
    PlanningOptions,
    best_alone_plan,
    plan_cluster,
    read_measurements,
    run_plan,
    write_order,
)
from fivefold.lab import LabSpec, run_lab
from fivefold.network.topology import Topology, parse_topology
from fivefold.report import BenchmarkRow, write_results
from fivefold.tasks import LayerCost

RESULTS = Path(__file__).parents[1] / "results" / "codesign" / "reality.json"
MTU = 60000
MB = 10**6


@dataclass(frozen=True)
class Case:
    """Jobs on a topology.

    Attributes:
        name: For people.
        cluster: The topology as the command line spells it.
        jobs: Ranks, compute seconds, megabytes of gradients, layers of each job.
    """

    name: str
    cluster: str
    jobs: tuple[tuple[tuple[int, ...], float, float, int], ...]

    def specs(self, iterations: int) -> list[JobSpec]:
        """The jobs."""
        found = []
        for place, (ranks, compute_s, size_mb, layers) in enumerate(self.jobs):
            layer = LayerCost(
                forward_s=compute_s / 3 / layers,
                backward_s=2 * compute_s / 3 / layers,
                gradient_bytes=round(size_mb * MB / layers),
            )
            name = "ab"[place]
            found.append(
                JobSpec(job_id=name, ranks=ranks, layers=(layer,) * layers, iterations=iterations)
            )
        return found


UPLINK = "leaf_spine:{hosts},leaves=2,spines=1,oversubscription={over},bandwidth=50MB/s"
CASES = (
    Case(
        "one job, 4 hosts on a switch", "switch:4,bandwidth=25MB/s", (((0, 1, 2, 3), 0.5, 10, 4),)
    ),
    Case(
        "one job, ranks in turns over two racks",
        UPLINK.format(hosts=4, over=2),
        (((0, 2, 1, 3), 0.4, 12, 4),),
    ),
    Case(
        "two equal jobs across one uplink",
        UPLINK.format(hosts=4, over=4),
        (((0, 2), 0.6, 10, 1), ((1, 3), 0.6, 10, 1)),
    ),
    Case(
        "two jobs of one period and other shares",
        UPLINK.format(hosts=4, over=4),
        (((0, 2), 0.7, 7.5, 1), ((1, 3), 0.5, 12.5, 1)),
    ),
    Case(
        "two jobs of other periods",
        UPLINK.format(hosts=4, over=4),
        (((0, 2), 0.6, 10, 6), ((1, 3), 0.3, 8, 4)),
    ),
    Case("one job on a ring of links", "ring:4,bandwidth=25MB/s", (((0, 1, 2, 3), 0.4, 10, 4),)),
    Case(
        "two jobs of three hosts each across one uplink",
        UPLINK.format(hosts=6, over=6),
        (((0, 1, 3), 0.6, 7, 1), ((2, 4, 5), 0.6, 7, 1)),
    ),
)


def run(topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan) -> Mapping[str, float]:
    """Mean seconds per iteration of each job, measured."""
    with tempfile.TemporaryDirectory(prefix="fivefold-reality-") as folder:
        order = Path(folder) / "order.json"
        write_order(order, jobs, plan, topology=topology)
        command = [sys.executable, "-m", "fivefold.codesign._execute", str(order)]
        spec = LabSpec.of_topology(topology, mtu=MTU)
        result = run_lab(spec, command, timeout_s=300.0, stream=False).check()
        return read_measurements(result.ranks[0].stdout().splitlines())


def measure(
    case: Case, iterations: int, repetitions: int
) -> tuple[list[BenchmarkRow], list[float]]:
    """Rows of one case, and how far predictions were off."""
    topology, jobs = parse_topology(case.cluster), case.specs(iterations)
    planned = plan_cluster(
        topology,
        jobs,
        CoDesigns(vertical=True, horizontal=True),
        start="best",
        options=PlanningOptions(classes=1),  # the lab's links have no priority classes
    )
    plans = {"B1": best_alone_plan(topology, jobs), "V+H": planned.plan}
    measured: dict[str, list[Mapping[str, float]]] = {name: [] for name in plans}
    for _ in range(repetitions):
        for name, plan in plans.items():
            measured[name].append(run(topology, jobs, plan))
    rows, offs = [], []
    means: dict[str, tuple[float, float]] = {}
    for name, plan in plans.items():
        predicted = run_plan(topology, jobs, plan).iteration_s
        for job in jobs:
            times = [found[job.job_id] for found in measured[name]]
            off = statistics.median(times) / predicted[job.job_id] - 1
            offs.append(off)
            rows.append(
                BenchmarkRow(
                    case=f"{case.name}, job {job.job_id}, {name}, sleep for compute",
                    metric="measured seconds per iteration",
                    unit="s",
                    ours=statistics.median(times),
                    spread=(min(times), max(times)),
                )
            )
            rows.append(
                BenchmarkRow(
                    case=f"{case.name}, job {job.job_id}, {name}, sleep for compute",
                    metric="measured over predicted, less one",
                    unit="ratio",
                    ours=off,
                    target=0.2,
                    met=abs(off) <= 0.2,
                )
            )
        means[name] = (
            sum(predicted[job.job_id] for job in jobs),
            sum(statistics.median(f[job.job_id] for f in measured[name]) for job in jobs),
        )
    predicted_gain = means["B1"][0] / means["V+H"][0]
    measured_gain = means["B1"][1] / means["V+H"][1]
    counts = predicted_gain > 1.1
    rows.append(
        BenchmarkRow(
            case=f"{case.name}, sleep for compute",
            metric="measured gain of V+H over B1 in the mean iteration",
            unit="ratio",
            ours=measured_gain,
            peers={"predicted": predicted_gain},
            target=1.0 if counts else None,
            met=measured_gain > 1.0 if counts else None,
        )
    )
    print(
        json.dumps({"case": case.name, "off": offs, "gain": [predicted_gain, measured_gain]}),
        flush=True,
    )
    return rows, offs


def main() -> None:
    """Plan, run, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--case", help="only cases whose name begins so; no results file")
    parser.add_argument("--quick", action="store_true", help="a look: one repetition, no file")
    arguments = parser.parse_args()
    rows: list[BenchmarkRow] = []
    offs: list[float] = []
    for case in CASES:
        if arguments.case and not case.name.startswith(arguments.case):
            continue
        repetitions = 1 if arguments.quick else arguments.repetitions
        own, off = measure(case, 4 if arguments.quick else arguments.iterations, repetitions)
        rows += own
        offs += off
    mean = statistics.mean(map(abs, offs))
    worst = max(map(abs, offs))
    print(f"mean error {mean:.3f}, worst {worst:.3f}")
    for metric, value, target in (("mean", mean, 0.1), ("worst", worst, 0.2)):
        rows.append(
            BenchmarkRow(
                case=f"all {len(CASES)} cases, two plans each, sleep for compute",
                metric=f"{metric} error of predicted iteration times",
                unit="ratio",
                ours=value,
                target=target,
                met=value <= target,
            )
        )
    if not arguments.quick and not arguments.case:
        write_results(RESULTS, topic="codesign/reality", rows=rows)


if __name__ == "__main__":
    main()
