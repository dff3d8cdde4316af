"""Predicts Muri's testbed: 400 jobs on 64 V100 GPUs under four policies, completion of every job.

Nothing is fitted for SRTF and SRSF. How much slower a group of jobs runs than ideal turns is one
constant, fitted to the mean completion time under Muri-S; Muri-L is judged with it.

    python -m benchmarks.strategy.queues FOLDER
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from benchmarks.strategy._queue_policies import QueuedJob, QueueResult, run_queue

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "queues.json"
GPUS = 64
STEPS = tuple(round(1.0 + 0.02 * i, 2) for i in range(31))
JUDGED = ("srtf", "srsf", "muri_l")


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def read_jobs(folder: Path) -> list[QueuedJob]:
    """The trace; run times are iterations times iteration time, not its `duration`."""
    with (folder / "cluster_trace.csv").open() as file:
        return [
            QueuedJob(
                job_id=row["job_id"], num_gpus=int(row["num_gpu"]),
                submit_s=float(row["submit_time"]) / 1e3, iterations=int(row["iterations"]),
                iteration_s=float(row["iteration_time"]) / 1e3,
                stages_s=(float(row["resource_time_0"]) / 1e3,
                          float(row["resource_time_1"]) / 1e3,
                          float(row["resource_time_2"]) / 1e3),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def measured(folder: Path, policy: str) -> QueueResult:
    """What the testbed gave."""
    with (folder / f"jobs_{policy}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return QueueResult(
        policy=policy, end_s={row["job_id"]: float(row["end_time"]) for row in rows},
        completion_s={row["job_id"]: float(row["JCT"]) for row in rows},
    )  # fmt: skip


def off(ours: float, theirs: float) -> float:
    """Percent by which a prediction is off."""
    return 100.0 * (ours / theirs - 1.0)


def fitted_slowdown(jobs: list[QueuedJob], truth: QueueResult) -> float:
    """The constant that gives Muri-S its mean completion time."""
    errors = {
        step: abs(off(run_queue(jobs, GPUS, policy="muri_s", slowdown=step).mean_s, truth.mean_s))
        for step in STEPS
    }
    best = min(errors, key=lambda step: errors[step])
    note(f"slowdown of groups {best}: Muri-S within {errors[best]:.2f} %")
    return best


def rows_of(jobs: list[QueuedJob], truth: QueueResult, slowdown: float) -> list[BenchmarkRow]:
    """Mean (with a bar where it is judged), median, p99 and makespan of a policy."""
    found = run_queue(jobs, GPUS, policy=truth.policy, slowdown=slowdown)
    role = "judge" if truth.policy in JUDGED else "fit"
    pairs = {
        "mean completion time": (found.mean_s, truth.mean_s),
        "median completion time": (found.percentile_s(0.5), truth.percentile_s(0.5)),
        "p99 of completion time": (found.percentile_s(0.99), truth.percentile_s(0.99)),
        "makespan": (found.makespan_s, truth.makespan_s),
    }
    lines = []
    for what, (ours, theirs) in pairs.items():
        error, bar = off(ours, theirs), what.startswith("mean") and role == "judge"
        note(f"{truth.policy}, {what}: {ours:,.0f} s against {theirs:,.0f} s, {error:+.1f} %")
        lines.append(
            BenchmarkRow(
                case=f"Muri's testbed, {truth.policy} ({role})", metric=f"error of {what}",
                unit="%", ours=error, target=12.0 if bar else None,
                met=abs(error) <= 12.0 if bar else None,
            )
        )  # fmt: skip
    return lines


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Muri's trace and completions")
    folder = parser.parse_args().folder
    jobs = read_jobs(folder)
    slowdown = fitted_slowdown(jobs, measured(folder, "muri_s"))
    lines = [
        BenchmarkRow(case="slowdown of groups, fitted on Muri-S", metric="factor", unit="ratio",
                     ours=slowdown)
    ]  # fmt: skip
    for policy in ("srtf", "srsf", "muri_s", "muri_l"):
        lines += rows_of(jobs, measured(folder, policy), slowdown)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks.strategy.queues FOLDER"
    write_results(RESULTS, topic="strategy/queues", rows=lines, command=command)


if __name__ == "__main__":
    main()
