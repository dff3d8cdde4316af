"""A plan run for real on the emulated cluster: its options and files, and what one rank does.

Every rank reads a file, started as ``python -m fivefold.codesign.execute FILE``. It computes by a
sleep of the planned length, so that hosts which share a processor do not disturb one another;
reductions are gloo's ring over shaped links, or aggregation by the planned switch. What cannot be
run as planned is refused, never run otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.simulate import iteration_of, planned_order
from fivefold.codesign.steps import edge_route
from fivefold.collectives.pricing.phases import Algorithm, aggregation_tree, host_groups
from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    InfeasibleError,
    UnsupportedError,
)
from fivefold.files import read_json
from fivefold.network.topology import Topology
from fivefold.runs import write_text
from fivefold.tasks import LayerCost, TaskGraph

_SCHEMA = "fivefold.codesign.order/2"
_WRITE = "write one with fivefold execute --output"
_LEAST_SLOT_BYTES = 4096  # below that the software switch is slower than any link worth shaping
_START_IN_S = 1.0  # after all ranks are ready: enough for the news to reach the last one
_WARM_UP = 2
RUNNABLE: tuple[Algorithm, ...] = ("ring", "in_network")
_TIMEOUT_S = 120.0
# Plans count slots for the latency of the topology, which has none here; what a chunk needs to
# come in whole and leave again is covered by so many.
_LEAST_WINDOW = 32

Reduce = Callable[[Any], object]


@dataclass(frozen=True)
class Order:
    """A plan with all that is needed to run it."""

    topology: str
    jobs: tuple[JobSpec, ...]
    plan: ClusterPlan
    channels: Mapping[str, tuple[str, ...]]


def check_executable(jobs: Sequence[JobSpec], plan: ClusterPlan, *, topology: Topology) -> None:
    """Refuse plans that this cannot run."""
    seen: dict[int, str] = {}
    for job in jobs:
        _check_job(topology, job, plan.jobs[job.job_id])
        for rank in job.ranks:
            if rank in seen:
                raise UnsupportedError(
                    f"jobs {seen[rank]!r} and {job.job_id!r} share rank {rank}",
                    hint="give each job ranks of its own",
                )
            seen[rank] = job.job_id


def lab_options(topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan) -> dict[str, Any]:
    """Return what the emulated cluster needs besides the topology."""
    check_executable(jobs, plan, topology=topology)
    plans = [(job, plan.jobs[job.job_id]) for job in jobs]
    classes = 1 + max((own.priority for _, own in plans), default=0)
    roots = sorted({str(own.root) for _, own in plans if own.algorithm == "in_network"})
    pools = {root: topology.ability_of(root).aggregation for root in roots}
    return {
        "classes": classes,
        "host_classes": {rank: own.priority for job, own in plans for rank in job.ranks}
        if classes > 1
        else {},
        "aggregators": {
            root: {"slots": pool.slots, "slot_bytes": pool.slot_bytes}
            for root, pool in pools.items() if pool is not None
        },
        "routes": {edge: route for _, own in plans for edge, route in _routes(topology, own)},
    }  # fmt: skip


def write_order(
    path: Path, jobs: Sequence[JobSpec], plan: ClusterPlan, *, topology: Topology
) -> None:
    """Write what the ranks need to know, the order of their communications among it.

    That order follows from prices on the topology, as in the simulation; ranks must not find
    another one.
    """
    check_executable(jobs, plan, topology=topology)
    order = {
        "schema": _SCHEMA,
        "topology": topology.to_toml(),
        "jobs": [dataclasses.asdict(job) for job in jobs],
        "channels": {j.job_id: planned_order(topology, j, plan.jobs[j.job_id]) for j in jobs},
        "plan": json.loads(plan.to_json()),
    }
    write_text(path, json.dumps({**order, "sha256": _checksum(order)}, indent=1) + "\n")


def _checksum(order: Mapping[str, Any]) -> str:
    own = {name: value for name, value in order.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def read_order(path: Path) -> Order:
    """Read what `write_order` wrote."""
    try:
        record = read_json(path)
        if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
            raise ConfigurationError(
                f"{path} is no plan to be run: its schema is not {_SCHEMA}", hint=_WRITE
            )
        if record.get("sha256") != _checksum(record):
            raise ConfigurationError(
                f"{path} is no plan to be run: it was changed after it was written", hint=_WRITE
            )
        jobs = tuple(
            JobSpec(**{**entry, "layers": tuple(LayerCost(**one) for one in entry["layers"])})
            for entry in record["jobs"]
        )
        return Order(
            topology=str(record["topology"]), jobs=jobs,
            plan=ClusterPlan.from_json(json.dumps(record["plan"])),
            channels={name: tuple(order) for name, order in record["channels"].items()},
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError) and str(path) in error.message:
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path} is no plan to be run: {why}", hint=_WRITE) from error


def execution_command(path: Path) -> list[str]:
    """Return what every host runs, from the file that `write_order` wrote."""
    return [sys.executable, "-m", "fivefold.codesign.execute", str(path)]


def read_measurements(lines: Sequence[str]) -> Mapping[str, float]:
    """Read the mean seconds per iteration of each job from what rank 0 printed."""
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith('{"iteration_s"'):
            found = json.loads(line)["iteration_s"]
    return found


def _check_job(topology: Topology, job: JobSpec, plan: JobPlan) -> None:
    who = f"job {job.job_id!r}"
    groups = host_groups(topology, plan.order)
    several = groups is None or len(groups[0]) > 1
    _refuse(
        (bool(job.splits),
         f"{who} is split as layer 1 chose, and only jobs given by their layers are run here",
         "give the job's layers"),
        (any(layer.all_to_all_bytes for layer in job.layers),
         f"{who} sends all-to-all, and only reductions are run here",
         "leave out its all_to_all_bytes"),
        (plan.algorithm != "ring" and several,
         f"{who} is planned with {plan.algorithm}; over hosts of several ranks only rings are run",
         "plan without II"),
        (plan.algorithm not in RUNNABLE,
         f"{who} is planned with {plan.algorithm}, and only rings and switches are run here",
         "plan with PlanningOptions(algorithms=('ring', 'in_network'))"),
    )  # fmt: skip
    if plan.algorithm == "in_network":
        _check_aggregation(topology, who, plan)


def _refuse(*rules: tuple[bool, str, str]) -> None:
    for broken, message, hint in rules:
        if broken:
            raise UnsupportedError(message, hint=hint)


def _check_aggregation(topology: Topology, who: str, plan: JobPlan) -> None:
    root = str(plan.root)
    tree = aggregation_tree(topology, plan.order, root)
    if tree is None:
        raise InfeasibleError(
            f"switch {root!r} cannot aggregate for {who}", hint="choose another root, or a ring"
        )
    streams = Counter(parent for _, parent in tree)
    aggregating = sorted({root, *(node for node, number in streams.items() if number > 1)})
    pool = topology.ability_of(root).aggregation
    assert pool is not None, "aggregation_tree asked"
    _refuse(
        (aggregating != [root],
         f"{who} is aggregated at {', '.join(aggregating)}, and a job has one such switch here",
         "allow it only in switches where all hosts of a job meet, or plan without HN"),
        (pool.rate_bytes_per_s is not None,
         f"switch {root!r} is said to add at a rate of its own, which is not emulated",
         "leave the rate of its aggregation out"),
        (pool.slot_bytes < _LEAST_SLOT_BYTES or pool.slot_bytes % 8 > 0,
         f"switch {root!r} has slots of {pool.slot_bytes} bytes: the software switch is too slow",
         f"say at least {_LEAST_SLOT_BYTES}, a multiple of 8; 65536 does well"),
    )  # fmt: skip


def _routes(topology: Topology, plan: JobPlan) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Return the way of every edge of a ring."""
    if plan.algorithm == "in_network" or len(plan.order) == 1:
        return []
    edges = zip(plan.order, (*plan.order[1:], plan.order[0]), strict=True)
    return [(edge, edge_route(topology, plan, edge)) for edge in edges]


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
        sent = {task.task_id for task in self._graph.communication}
        for task in self._graph.compute:
            for awaited in task.depends_on:
                self._wait(awaited)
            if sent.intersection(task.depends_on):
                at_s = max(at_s, time.monotonic())
            # Sleeps end late; the next one starts from where this one should have ended.
            at_s += task.duration_s
            _sleep_until(at_s)
            self._done[task.task_id].set()
        for name in self._order:
            self._wait(name)

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
    time.sleep(max(moment_s - time.monotonic(), 0.0))


def _reduction(job: JobSpec, plan: JobPlan, rank: int) -> Reduce:
    """Return how this job reduces, warmed up; all its ranks call it together."""
    import torch  # noqa: PLC0415 - planning needs no torch

    if len(job.ranks) == 1:
        return lambda _buffer: None
    make = _aggregation if plan.algorithm == "in_network" else _ring
    reduce = make(job, plan, rank)
    for _ in range(_WARM_UP):
        reduce(torch.ones(1 << 14))
    return reduce


def _ring(job: JobSpec, plan: JobPlan, rank: int) -> Reduce:
    # gloo's ring sends from each member to the one before it; torch's new_group would also sort
    # the ranks. Members are counted against the planned order, so that bytes flow along it.
    group = _group(f"ring of {job.job_id}", tuple(reversed(plan.order)), rank)
    return lambda buffer: group.allreduce([buffer]).wait()


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
