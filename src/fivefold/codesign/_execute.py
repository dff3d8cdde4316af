"""A plan run for real: every rank computes by sleeping and reduces by real messages.

Started once per rank, as ``python -m fivefold.codesign._execute FILE`` under torchrun or in the
lab. Compute is a sleep of the planned length, so that hosts which share a processor do not disturb
one another; reductions are gloo's ring over the hosts' real, shaped links. What is compared with
the simulation is when jobs wait for the network and for one another.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fivefold.codesign._compile import planned_order
from fivefold.codesign._iteration import iteration_of
from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import ClusterPlan, JobPlan
from fivefold.errors import UnsupportedError
from fivefold.network.topology import Topology
from fivefold.tasks import CommunicationTask, LayerCost, TaskGraph

__all__ = ["check_executable", "read_measurements", "write_order"]

_START_IN_S = 1.0  # after all ranks are ready: enough for the news to reach the last one
_WARM_UP = 2


def check_executable(jobs: Sequence[JobSpec], plan: ClusterPlan) -> None:
    """Refuse plans that this cannot run.

    Args:
        jobs: The jobs.
        plan: Their plans.

    Raises:
        UnsupportedError: A job wants another algorithm than a ring, an all-to-all, or a priority
            class; two jobs share a rank.

    Example:
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> jobs = [JobSpec(job_id="a", ranks=(0, 1), layers=(layer,))]
        >>> check_executable(jobs, ClusterPlan({"a": JobPlan(order=(0, 1))}))
    """
    seen: dict[int, str] = {}
    for job in jobs:
        algorithm = plan.jobs[job.job_id].algorithm
        if algorithm != "ring" or any(layer.all_to_all_bytes for layer in job.layers):
            raise UnsupportedError(
                f"job {job.job_id!r} is planned with {algorithm}, and only rings are run here",
                hint="plan with the co-designs V and H only",
            )
        if plan.jobs[job.job_id].priority:
            raise UnsupportedError(
                f"job {job.job_id!r} is planned in a priority class, and links have none here",
                hint="plan with PlanningOptions(classes=1)",
            )
        for rank in job.ranks:
            if rank in seen:
                raise UnsupportedError(
                    f"jobs {seen[rank]!r} and {job.job_id!r} share rank {rank}",
                    hint="give each job ranks of its own",
                )
            seen[rank] = job.job_id


def write_order(
    path: Path, jobs: Sequence[JobSpec], plan: ClusterPlan, *, topology: Topology
) -> None:
    """Write what the ranks need to know, the order of their communications among it.

    That order follows from prices on the topology, as in the simulation; ranks must not find
    another one.

    Args:
        path: The file.
        jobs: The jobs.
        plan: Their plans.
        topology: The cluster that they were planned for.

    Raises:
        UnsupportedError: The plan cannot be run.

    Example:
        >>> write_order.__name__
        'write_order'
    """
    check_executable(jobs, plan)
    record = [
        {
            "job_id": job.job_id,
            "ranks": job.ranks,
            "iterations": job.iterations,
            "arrival_s": job.arrival_s,
            "layers": [
                [layer.forward_s, layer.backward_s, layer.gradient_bytes] for layer in job.layers
            ],
            "channel": planned_order(topology, job, plan.jobs[job.job_id]),
        }
        for job in jobs
    ]
    path.write_text(json.dumps({"jobs": record, "plan": plan.to_json()}), encoding="utf-8")


def read_measurements(lines: Sequence[str]) -> Mapping[str, float]:
    """Mean seconds per iteration of each job from what rank 0 printed.

    Args:
        lines: Its standard output.

    Example:
        >>> read_measurements(["hello", '{"iteration_s": {"a": 0.5}}'])
        {'a': 0.5}
    """
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith('{"iteration_s"'):
            found = json.loads(line)["iteration_s"]
    return found


def _read_order(path: Path) -> tuple[list[JobSpec], ClusterPlan, dict[str, list[str]]]:
    """Jobs, plans, and the order of each job's communications."""
    record = json.loads(path.read_text(encoding="utf-8"))
    jobs = [
        JobSpec(
            job_id=entry["job_id"],
            ranks=tuple(entry["ranks"]),
            iterations=entry["iterations"],
            arrival_s=entry["arrival_s"],
            layers=tuple(
                LayerCost(forward_s=forward_s, backward_s=backward_s, gradient_bytes=size)
                for forward_s, backward_s, size in entry["layers"]
            ),
        )
        for entry in record["jobs"]
    ]
    channels = {entry["job_id"]: entry["channel"] for entry in record["jobs"]}
    return jobs, ClusterPlan.from_json(record["plan"]), channels


class _Rank:
    """One rank's share of one job."""

    def __init__(self, job: JobSpec, plan: JobPlan, channel: Sequence[str], group: Any) -> None:
        import torch  # noqa: PLC0415 - planning needs no torch

        self._job, self._group, self._order = job, group, channel
        self._graph: TaskGraph = iteration_of(job, plan, lambda _kind, _size: 0.0)
        self._buffers = {
            task.task_id: torch.ones(max(1, task.size_bytes // 4))
            for task in self._graph.communication
        }
        self._done: dict[str, threading.Event] = {}
        self._sends: queue.Queue[str | None] = queue.Queue()
        self._failed: list[BaseException] = []

    def run(self, start_s: float) -> float:
        """All iterations from a moment of the monotonic clock; mean seconds of one."""
        sender = threading.Thread(target=self._send_all, daemon=True)
        sender.start()
        _sleep_until(start_s)
        for _ in range(self._job.iterations):
            self._iterate()
        self._sends.put(None)
        sender.join()
        return (time.monotonic() - start_s) / self._job.iterations

    def _iterate(self) -> None:
        """One rotated iteration: compute sleeps, communication goes to the sending thread."""
        names = self._graph.order
        self._done = {name: threading.Event() for name in names}
        for name in self._order:
            self._sends.put(name)
        at_s = time.monotonic()
        for task in self._graph.compute:
            for awaited in task.depends_on:
                self._wait(awaited)
            at_s = max(at_s, time.monotonic()) if self._communicates(task.depends_on) else at_s
            # Sleeps end late; the next one starts from where this one should have ended.
            at_s += task.duration_s
            _sleep_until(at_s)
            self._done[task.task_id].set()
        for name in self._order:
            self._wait(name)

    def _communicates(self, names: Sequence[str]) -> bool:
        return any(isinstance(self._graph.by_id[name], CommunicationTask) for name in names)

    def _wait(self, name: str) -> None:
        while not self._done[name].wait(1.0):
            if self._failed:
                raise self._failed[0]

    def _send_all(self) -> None:
        while (name := self._sends.get()) is not None:
            try:
                for awaited in self._graph.by_id[name].depends_on:
                    self._wait(awaited)
                if self._group is not None:
                    self._group.allreduce([self._buffers[name]]).wait()
                self._buffers[name].fill_(1.0)
                self._done[name].set()
            except BaseException as error:  # noqa: BLE001 - handed to the computing thread
                self._failed.append(error)
                return


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def _main(path: Path) -> None:
    import torch  # noqa: PLC0415 - planning needs no torch
    import torch.distributed as dist  # noqa: PLC0415 - as above

    jobs, plan, channels = _read_order(path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    groups = {job.job_id: dist.new_group(list(job.ranks), backend="gloo") for job in jobs}
    mine = next((job for job in jobs if rank in job.ranks), None)
    share = None
    if mine is not None:
        own = groups[mine.job_id] if len(mine.ranks) > 1 else None
        share = _Rank(mine, plan.jobs[mine.job_id], channels[mine.job_id], own)
        for _ in range(_WARM_UP):
            if own is not None:
                own.allreduce([torch.ones(1 << 14)]).wait()
    # One machine, one clock: the moment is told, not only that everybody is here.
    dist.barrier()
    moment = torch.tensor([time.monotonic() + _START_IN_S], dtype=torch.float64)
    dist.broadcast(moment, src=0)
    took_s = 0.0
    if mine is not None and share is not None:
        begin_s = mine.arrival_s + plan.jobs[mine.job_id].shift_s
        took_s = share.run(float(moment) + begin_s)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, took_s)
    if rank == 0:
        found = {job.job_id: max(every[r] for r in job.ranks) for job in jobs}
        print(json.dumps({"iteration_s": found}), flush=True)  # noqa: T201 - the parent reads it
    dist.barrier()
    os._exit(0)  # gloo's threads may abort while the interpreter ends


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
