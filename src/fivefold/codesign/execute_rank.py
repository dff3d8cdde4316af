"""A plan run for real: one rank computes by sleeping and reduces by real messages.

Started once per rank, as ``python -m fivefold.codesign.execute_rank FILE`` under torchrun or in
the lab. Compute is a sleep of the planned length, so that hosts which share a processor do not
disturb one another; reductions are gloo's ring in the planned order over the hosts' real, shaped
links, or aggregation by the switch that the plan names. What is compared with the simulation is
when jobs wait for the network and for one another.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fivefold.codesign.execute import read_order
from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import JobPlan
from fivefold.codesign.simulate import iteration_of
from fivefold.errors import CommunicationError, UnsupportedError
from fivefold.tasks import CommunicationTask, TaskGraph

__all__: list[str] = []

_START_IN_S = 1.0  # after all ranks are ready: enough for the news to reach the last one
_WARM_UP = 2
_TIMEOUT_S = 120.0
# Plans count slots for the latency of the topology, which has none here; what a chunk needs to
# come in whole and leave again is covered by so many.
_LEAST_WINDOW = 32

Reduce = Callable[[Any], object]


class _Rank:
    """One rank's share of one job."""

    def __init__(self, job: JobSpec, plan: JobPlan, channel: Sequence[str], reduce: Reduce) -> None:
        import torch  # noqa: PLC0415 - planning needs no torch

        self._job, self._reduce, self._order = job, reduce, channel
        self._graph: TaskGraph = iteration_of(job, plan, lambda _kind, _size: 0.0)
        self._buffers = {
            task.task_id: torch.ones(max(1, task.size_bytes // 4))
            for task in self._graph.communication
        }
        self._done: dict[str, threading.Event] = {}
        self._sends: queue.Queue[str | None] = queue.Queue()
        self._failed: list[BaseException] = []

    def run(self, start_s: float) -> float:
        """Run all iterations from a moment of the monotonic clock; return mean seconds of one."""
        sender = threading.Thread(target=self._send_all, daemon=True)
        sender.start()
        _sleep_until(start_s)
        for _ in range(self._job.iterations):
            self._iterate()
        took_s = time.monotonic() - start_s
        self._sends.put(None)
        sender.join()
        return took_s / self._job.iterations

    def _iterate(self) -> None:
        """Run one rotated iteration: compute sleeps, communication goes to the sending thread."""
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
                buffer = self._buffers[name]
                self._reduce(buffer)
                _check_result(name, buffer, len(self._job.ranks))
                buffer.fill_(1.0)
                self._done[name].set()
            except BaseException as error:  # noqa: BLE001 - handed to the computing thread
                self._failed.append(error)
                return


def _check_result(name: str, buffer: Any, number: int) -> None:
    ends = float(buffer[0]), float(buffer[-1])
    if ends != (number, number):
        raise CommunicationError(
            f"{name} should sum {number} ones and gave {ends[0]:g} to {ends[1]:g}",
            hint="this is a fault of the reduction, not of the plan: please report it",
        )


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def _reduction(job: JobSpec, plan: JobPlan, rank: int) -> Reduce:
    """Return how this job reduces, warmed up; all its ranks call it together."""
    import torch  # noqa: PLC0415 - planning needs no torch

    if len(job.ranks) == 1:
        return lambda _buffer: None
    reduce = (
        _aggregation(job, plan, rank) if plan.algorithm == "in_network" else _ring(job, plan, rank)
    )
    for _ in range(_WARM_UP):
        reduce(torch.ones(1 << 14))
    return reduce


def _ring(job: JobSpec, plan: JobPlan, rank: int) -> Reduce:
    # gloo's ring sends from each member to the one before it; torch's new_group would also sort
    # the ranks. Members are counted against the planned order, so that bytes flow along it.
    group = _group(f"ring of {job.job_id}", tuple(reversed(plan.order)), rank)

    def reduce(buffer: Any) -> None:
        group.allreduce([buffer]).wait()

    return reduce


def _aggregation(job: JobSpec, plan: JobPlan, rank: int) -> Reduce:
    from fivefold.collectives.execution import GlooHosts  # noqa: PLC0415 - it needs torch
    from fivefold.network.aggregation import (  # noqa: PLC0415 - rings need none
        AggregationClient,
        AggregationOptions,
    )

    root = str(plan.root)  # the plan has one where it aggregates in the network
    client = AggregationClient(
        _switch_address(root),
        job=job.job_id,
        rank=job.ranks.index(rank),
        size=len(job.ranks),
        fallback=GlooHosts(_group(f"hosts of {job.job_id}", job.ranks, rank)),
        options=AggregationOptions(
            window=max(plan.slots, _LEAST_WINDOW), timeout_s=30.0, connect_timeout_s=20.0
        ),
    )
    if not client.is_connected:
        raise CommunicationError(
            f"the switch {root} does not answer", hint="see its output in the log folder"
        )
    return client.all_reduce


def _switch_address(node: str) -> str:
    known = json.loads(os.environ.get("FIVEFOLD_LAB", "{}")).get("aggregation", {})
    if node not in known:
        raise UnsupportedError(
            f"the plan aggregates at {node}, and no such switch runs",
            hint="run it in the lab, with LabSpec(aggregators=...)",
        )
    found: str = known[node]
    return found


def _group(name: str, members: Sequence[int], rank: int) -> Any:
    import torch.distributed as dist  # noqa: PLC0415 - planning needs no torch

    shared = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way
    store = dist.distributed_c10d.PrefixStore(name, shared)
    limit = timedelta(seconds=_TIMEOUT_S)
    return dist.ProcessGroupGloo(store, members.index(rank), len(members), timeout=limit)


def _main(path: Path) -> None:
    import torch  # noqa: PLC0415 - planning needs no torch
    import torch.distributed as dist  # noqa: PLC0415 - as above

    order = read_order(path)
    jobs, plan, channels = order.jobs, order.plan, order.channels
    torch.set_num_threads(1)
    # Over all jobs: who ends early waits for the last; the lab's own limit is above this.
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    rank = dist.get_rank()
    mine = next((job for job in jobs if rank in job.ranks), None)
    share = None
    if mine is not None:
        own = plan.jobs[mine.job_id]
        share = _Rank(mine, own, channels[mine.job_id], _reduction(mine, own, rank))
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
        sys.stdout.write(json.dumps({"iteration_s": found}) + "\n")  # the parent reads it
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort while the interpreter ends


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
