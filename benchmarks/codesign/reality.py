"""Runs plans on the emulated cluster and compares measured with predicted iteration times.

Each case is planned twice, every layer at its best alone (B1) and with co-designs on top of that,
and both plans are run for real: one process per host, real reductions over links that are shaped
one by one, in the planned classes and along the planned paths, by rings or by a software switch in
the rack's own namespace; compute is a sleep of the planned length. Predictions are made before the
first byte is sent, from the same link rates.

    python -m benchmarks.codesign.reality [--repetitions 3] [--case NAME] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.codesign import (
    ClusterPlan,
    CoDesigns,
    JobSpec,
    PlanningOptions,
    plan_cluster,
    run_plan,
)
from fivefold.codesign.baselines import best_alone_plan
from fivefold.codesign.execute import (
    RUNNABLE,
    execution_command,
    lab_options,
    read_measurements,
    write_order,
)
from fivefold.lab import LabSpec, run_lab
from fivefold.network.topology import Aggregation, Topology, parse_topology
from fivefold.tasks import LayerCost

RESULTS = Path(__file__).parents[1] / "results" / "codesign" / "reality.json"
MTU = 60000
MB = 10**6
COUNTS_FROM = 1.1  # gains predicted above this must show


SUMS = Aggregation(slots=256, slot_bytes=16384)


@dataclass(frozen=True)
class Case:
    """Jobs on a topology.

    Attributes:
        name: For people.
        cluster: The topology as the command line spells it.
        jobs: Ranks, compute seconds, megabytes of gradients, layers of each job.
        sums: Kind of the switches that can sum; None for none.
        classes: Given classes of the jobs, on top of B1; None lets the co-designs plan.
        link_classes: Classes that the planners may use; 1 leaves them time shifts alone.
    """

    name: str
    cluster: str
    jobs: tuple[tuple[tuple[int, ...], float, float, int], ...]
    sums: str | None = None
    classes: tuple[int, ...] | None = None
    link_classes: int = 8

    @property
    def label(self) -> str:
        """What the plan beside B1 uses."""
        if self.classes is not None:
            return "B1 with classes"
        return "V+H" if self.sums is None else "V+H+HN"

    def topology(self) -> Topology:
        """The cluster."""
        plain = parse_topology(self.cluster)
        return plain if self.sums is None else plain.with_aggregation(SUMS, kinds=(self.sums,))

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

    def plans(self, topology: Topology, jobs: Sequence[JobSpec]) -> dict[str, ClusterPlan]:
        """B1, and the other plan where it is another one."""
        alone = best_alone_plan(topology, jobs, algorithm="ring")
        if self.classes is not None:
            other = alone
            for job, priority in zip(jobs, self.classes, strict=True):
                other = other.changed(job.job_id, priority=priority)
        else:
            flags = CoDesigns(vertical=True, horizontal=True, host_net=self.sums is not None)
            other = plan_cluster(
                topology,
                jobs,
                flags,
                start="best",
                options=PlanningOptions(classes=self.link_classes, algorithms=RUNNABLE),
            ).plan
        return {"B1": alone} if other == alone else {"B1": alone, self.label: other}


UPLINK = "leaf_spine:{hosts},leaves=2,spines={spines},oversubscription={over},bandwidth=50MB/s"
ONE = UPLINK.format(hosts=4, spines=1, over=4)
CASES = (
    Case(
        "one job, 4 hosts on a switch", "switch:4,bandwidth=25MB/s", (((0, 1, 2, 3), 0.5, 10, 4),)
    ),
    Case(
        "one job, ranks in turns over two racks",
        UPLINK.format(hosts=4, spines=1, over=2),
        (((0, 2, 1, 3), 0.4, 12, 4),),
    ),
    Case("one job on a ring of links", "ring:4,bandwidth=25MB/s", (((0, 1, 2, 3), 0.4, 10, 4),)),
    Case(
        "two equal jobs across one uplink, time shifts alone",
        ONE,
        (((0, 2), 0.6, 10, 1), ((1, 3), 0.6, 10, 1)),
        link_classes=1,
    ),
    Case(
        "two jobs of one period and other shares",
        ONE,
        (((0, 2), 0.7, 7.5, 1), ((1, 3), 0.5, 12.5, 1)),
    ),
    Case("two jobs of other periods", ONE, (((0, 2), 0.6, 10, 6), ((1, 3), 0.3, 8, 4))),
    Case(
        "two jobs of three hosts each across one uplink",
        UPLINK.format(hosts=6, spines=1, over=6),
        (((0, 1, 3), 0.6, 7, 1), ((2, 4, 5), 0.6, 7, 1)),
    ),
    Case(
        "two jobs on two spines",
        UPLINK.format(hosts=4, spines=2, over=2),
        (((0, 2), 0.3, 12, 1), ((1, 3), 0.3, 12, 1)),
    ),
    Case(
        "a short job goes before a long one",
        ONE,
        (((0, 2), 0.8, 12, 1), ((1, 3), 0.25, 3, 1)),
        classes=(1, 0),
    ),
    Case(
        "two equal jobs in two classes",
        ONE,
        (((0, 2), 0.6, 10, 1), ((1, 3), 0.6, 10, 1)),
        classes=(0, 1),
    ),
    Case(
        "one job summed by its switch",
        "switch:4,bandwidth=12.5MB/s",
        (((0, 1, 2, 3), 0.3, 6, 4),),
        sums="switch",
    ),
    Case(
        "two jobs summed by one switch",
        "switch:6,bandwidth=15MB/s",
        (((0, 1, 2), 0.3, 8, 1), ((3, 4, 5), 0.4, 6, 2)),
        sums="switch",
    ),
    Case(
        "one job of three racks summed above them",
        "leaf_spine:3,leaves=3,spines=1,bandwidth=20MB/s",
        (((0, 1, 2), 0.3, 10, 2),),
        sums="core",
    ),
)


def run(topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan) -> Mapping[str, float]:
    """Mean seconds per iteration of each job, measured."""
    with tempfile.TemporaryDirectory(prefix="fivefold-reality-") as folder:
        order = Path(folder) / "order.json"
        write_order(order, jobs, plan, topology=topology)
        spec = LabSpec.of_topology(topology, mtu=MTU, **lab_options(topology, jobs, plan))
        result = run_lab(spec, execution_command(order), timeout_s=300.0, stream=False).check()
        for node in spec.aggregators:
            counts = result.aggregation.get(node, {})
            if not counts.get("hits") or counts["misses"] or counts["expired"]:
                raise RuntimeError(f"{node} did not sum all chunks: {counts}")
        return read_measurements(result.ranks[0].stdout().splitlines())


def measure(
    case: Case, iterations: int, repetitions: int
) -> tuple[list[BenchmarkRow], list[float]]:
    """Rows of one case, and how far predictions were off."""
    topology, jobs = case.topology(), case.specs(iterations)
    plans = case.plans(topology, jobs)
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
    gains = _gains(means, case.label)
    if gains is not None:
        rows.append(_gain_row(case, *gains))
    print(json.dumps({"case": case.name, "off": offs, "gain": gains}), flush=True)
    return rows, offs


def _gains(means: Mapping[str, tuple[float, float]], label: str) -> tuple[float, float] | None:
    """Predicted and measured; None where both plans are one."""
    if label not in means:
        return None
    return means["B1"][0] / means[label][0], means["B1"][1] / means[label][1]


def _gain_row(case: Case, predicted: float, measured: float) -> BenchmarkRow:
    counts = predicted > COUNTS_FROM
    return BenchmarkRow(
        case=f"{case.name}, sleep for compute",
        metric=f"measured gain of {case.label} over B1 in the mean iteration",
        unit="ratio",
        ours=measured,
        peers={"predicted": predicted},
        target=1.0 if counts else None,
        met=measured > 1.0 if counts else None,
    )


def main() -> None:
    """Plan, run, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
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
                case=f"all {len(CASES)} cases, up to two plans each, sleep for compute",
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
