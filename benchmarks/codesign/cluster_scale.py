"""Measures how long simulations of large clusters take, and how much memory they need.

One iteration of data-parallel jobs on a three-tier Clos with 16,384 GPUs, a described job on 1,024,
4,096 and 16,384 of them, and 100 jobs on the 847
hosts of the Alibaba Lingjun data set (its topo.csv is an argument) for 1,000 iterations; and the
curve of cost against hosts. Wall seconds of this machine; each case in a process of its own.

    python -m benchmarks.codesign.cluster_scale [--lingjun PATH/topo.csv] [--quick]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.codesign import JobSpec, plan_cluster, run_plan, synthetic_jobs
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.workloads import job_from_plan
from fivefold.network.topology import HostSpec, Topology, load_lingjun, parse_topology
from fivefold.strategy import Job, SearchSpace, load_cluster, load_model
from fivefold.tasks import LayerCost

RESULTS = Path(__file__).parents[1] / "results" / "codesign" / "cluster_scale.json"
LINK = "bandwidth=25GB/s,latency=1us"


def one_job(topology: Topology) -> list[JobSpec]:
    """A single job over all ranks."""
    layer = LayerCost(forward_s=0.05, backward_s=0.1, gradient_bytes=500_000_000)
    return [JobSpec(job_id="all", ranks=tuple(range(topology.num_ranks)), layers=(layer,) * 4)]


def described_job(topology: Topology) -> list[JobSpec]:
    """Return a model over all ranks, as layer 1 splits it."""
    space = SearchSpace(num_gpus=topology.num_ranks, global_batch=topology.num_ranks)
    job = Job(model=load_model("llama3-70b"), space=space)
    devices, ranks = load_cluster("h100-nemo"), range(topology.num_ranks)
    return [job_from_plan(topology, job, devices, ranks, job_id="llama")]


def measure(
    case: str, lingjun: str | None, iterations: int, *, coordinated: bool, described: bool = False
) -> dict[str, Any]:
    """Build, plan with the null modules or with all four co-designs, simulate."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    if case.startswith("clos"):
        topology = parse_topology(case)
        jobs = described_job(topology) if described else one_job(topology)
    elif lingjun is not None:
        topology = load_lingjun(lingjun, host=HostSpec(gpus=1, nics=1))
        jobs = synthetic_jobs(
            topology, number=100, seed=0, sizes=(4, 8, 8, 16), iterations=iterations
        )
    else:
        topology = parse_topology(case)
        jobs = synthetic_jobs(
            topology, number=topology.num_ranks // 8, seed=0, sizes=(8,), iterations=iterations
        )
    if coordinated:
        jobs = [replace(job, iterations=iterations) for job in jobs]
        built_s = time.perf_counter() - started_s
        outcome = plan_cluster(topology, jobs).outcome
    else:
        plan = null_plan(topology, jobs)
        built_s = time.perf_counter() - started_s
        outcome = run_plan(topology, jobs, plan)
    total_s = time.perf_counter() - started_s
    assert outcome.result is not None, "run_plan simulates"
    return {
        "ranks": topology.num_ranks,
        "jobs": len(jobs),
        "built_s": built_s,
        "total_s": total_s,
        "cpu_s": time.process_time() - started_cpu_s,
        "events": outcome.result.events,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_a_process(
    case: str, lingjun: Path | None, iterations: int, *, coordinated: bool = False,
    described: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One case, alone in its memory."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.codesign.cluster_scale",
        "--case",
        case,
        "--iterations",
        str(iterations),
    ]
    if lingjun is not None:
        command += ["--lingjun", str(lingjun)]
    command += ["--coordinated"] * coordinated + ["--described"] * described
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{case}, {iterations} iterations: {found}", flush=True)
    return found


def rows_of(
    case: str, found: dict[str, Any], *, target_s: float | None, target_bytes: float | None
) -> list[BenchmarkRow]:
    """Time and memory of one case."""
    name = f"{case}: {found['ranks']} ranks, {found['jobs']} jobs"
    time_met = None if target_s is None else found["total_s"] <= target_s
    room_met = None if target_bytes is None else found["peak_bytes"] <= target_bytes
    return [
        BenchmarkRow(
            case=name, metric="build, plan and simulate", unit="s", ours=found["total_s"],
            target=target_s, met=time_met,
        ),
        BenchmarkRow(case=name, metric="processor time", unit="s", ours=found["cpu_s"]),
        BenchmarkRow(
            case=name, metric="events per second", unit="1/s",
            ours=found["events"] / (found["total_s"] - found["built_s"]),
        ),
        BenchmarkRow(
            case=name, metric="peak memory", unit="B", ours=found["peak_bytes"],
            target=target_bytes, met=room_met,
        ),
    ]  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lingjun", type=Path, help="topo.csv of the Lingjun data set")
    parser.add_argument("--quick", action="store_true", help="a look: small, no results file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--iterations", type=int, default=1000, help=argparse.SUPPRESS)
    parser.add_argument("--coordinated", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--described", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        found = measure(
            arguments.case, arguments.lingjun, arguments.iterations,
            coordinated=arguments.coordinated, described=arguments.described,
        )  # fmt: skip
        print(json.dumps(found))
        return
    rows: list[BenchmarkRow] = []
    sizes = (4,) if arguments.quick else (4, 8, 16)
    for k in sizes:
        case = f"fat_tree:{k},{LINK}"
        found = in_a_process(case, None, 20)
        rows += rows_of(f"{case}, 20 iterations", found, target_s=None, target_bytes=None)
    if not arguments.quick:
        case = f"clos:16x16x8,aggs=8,cores=64,gpus=8,{LINK}"
        found = in_a_process(case, None, 1)
        rows += rows_of("three-tier Clos, one iteration", found, target_s=60, target_bytes=8e9)
        found = in_a_process(case, None, 20, coordinated=True)
        name = "three-tier Clos, 20 iterations, all four co-designs"
        rows += rows_of(name, found, target_s=60, target_bytes=8e9)
        for pods, aggs, cores in ((4, 4, 16), (8, 8, 64), (16, 8, 64)):
            case = f"clos:{pods}x{pods}x8,aggs={aggs},cores={cores},gpus=8,{LINK}"
            found = in_a_process(case, None, 5, coordinated=True, described=True)
            name = "Llama-3 70B described, three-tier Clos, all four co-designs"
            rows += rows_of(name, found, target_s=60, target_bytes=8e9)
        if arguments.lingjun is not None:
            found = in_a_process("lingjun", arguments.lingjun, 1000)
            rows += rows_of("Lingjun, 1,000 iterations", found, target_s=300, target_bytes=None)
        # Where the data set lies on this machine is nobody's business.
        place = "" if arguments.lingjun is None else " --lingjun PATH/topo.csv"
        command = f"python -m benchmarks.codesign.cluster_scale{place}"
        write_results(RESULTS, topic="codesign/cluster_scale", rows=rows, command=command)


if __name__ == "__main__":
    main()
