"""Plans that the emulated cluster can run, and what it has to be told for that.

A plan becomes a cluster (classes of hosts, switches that sum, routes) and a file that every rank
reads (`_execute_rank`). What cannot be run as planned is refused, never run otherwise.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.codesign._compile import edge_route, planned_order
from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import ClusterPlan, JobPlan
from fivefold.collectives.pricing.phases import aggregation_tree, host_groups
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError
from fivefold.files import read_json
from fivefold.network.topology import Topology
from fivefold.runs import write_text
from fivefold.tasks import LayerCost

_SCHEMA = "fivefold.codesign.order/1"
_WRITE = "write one with fivefold execute --save"
_LEAST_SLOT_BYTES = 4096  # below that the software switch is slower than any link worth shaping


@dataclass(frozen=True)
class Order:
    """A plan with all that is needed to run it.

    Attributes:
        topology: The cluster, as ``Topology.to_toml`` writes it.
        jobs: The jobs.
        plan: Their plans.
        channels: Names of each job's communications, in the order in which they are made.
    """

    topology: str
    jobs: tuple[JobSpec, ...]
    plan: ClusterPlan
    channels: Mapping[str, tuple[str, ...]]


def check_executable(jobs: Sequence[JobSpec], plan: ClusterPlan, *, topology: Topology) -> None:
    """Refuse plans that this cannot run.

    Args:
        jobs: The jobs.
        plan: Their plans.
        topology: The cluster that they were planned for.

    Raises:
        InfeasibleError: The plan is not possible on this cluster.
        UnsupportedError: A job is split otherwise than in data, exchanges all-to-all, reduces
            inside hosts first, or sums at several switches; two jobs share a rank.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> jobs = [JobSpec(job_id="a", ranks=(0, 1), layers=(layer,))]
        >>> plan = ClusterPlan({"a": JobPlan(order=(0, 1))})
        >>> check_executable(jobs, plan, topology=switch(2))
    """
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
    """Return what the emulated cluster needs besides the topology.

    Args:
        topology: The cluster.
        jobs: The jobs.
        plan: Their plans.

    Returns:
        Arguments of ``fivefold.lab.LabSpec.of_topology``: priority classes, each host's class,
        the switches that sum, and the planned routes.

    Raises:
        InfeasibleError: The plan is not possible on this cluster.
        UnsupportedError: The plan cannot be run.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> jobs = [JobSpec(job_id=n, ranks=r, layers=(layer,)) for n, r in
        ...         (("a", (0, 1)), ("b", (2, 3)))]
        >>> plan = ClusterPlan({job.job_id: JobPlan(order=job.ranks) for job in jobs})
        >>> lab_options(switch(4), jobs, plan.changed("b", priority=1))["host_classes"]
        {0: 0, 1: 0, 2: 1, 3: 1}
    """
    check_executable(jobs, plan, topology=topology)
    plans = [(job, plan.jobs[job.job_id]) for job in jobs]
    classes = 1 + max((own.priority for _, own in plans), default=0)
    summing = {str(own.root) for _, own in plans if own.algorithm == "in_network"}
    return {
        "classes": classes,
        "host_classes": {rank: own.priority for job, own in plans for rank in job.ranks}
        if classes > 1
        else {},
        "aggregators": {root: _pool(topology, root) for root in sorted(summing)},
        "routes": {edge: route for job, own in plans for edge, route in _routes(topology, own)},
    }


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
        InfeasibleError: The plan is not possible on this cluster.
        UnsupportedError: The plan cannot be run.
    """
    check_executable(jobs, plan, topology=topology)
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
    order = {
        "schema": _SCHEMA,
        "topology": topology.to_toml(),
        "jobs": record,
        "plan": json.loads(plan.to_json()),
    }
    write_text(path, json.dumps({**order, "sha256": _checksum(order)}, indent=1) + "\n")


def _checksum(order: Mapping[str, Any]) -> str:
    own = {name: value for name, value in order.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def read_order(path: Path) -> Order:
    """Read what `write_order` wrote.

    Args:
        path: The file.

    Returns:
        Cluster, jobs, plans and order.

    Raises:
        ConfigurationError: There is no such file, or it is none of these.

    Examples:
        >>> read_order(Path("nowhere.json"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fivefold.errors.ConfigurationError: nowhere.json is no plan to be run: file ...
    """
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
        return Order(
            str(record["topology"]),
            tuple(_read_job(entry) for entry in record["jobs"]),
            ClusterPlan.from_json(json.dumps(record["plan"])),
            {entry["job_id"]: tuple(entry["channel"]) for entry in record["jobs"]},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError) and str(path) in error.message:
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path} is no plan to be run: {why}", hint=_WRITE) from error


def _read_job(entry: Mapping[str, Any]) -> JobSpec:
    return JobSpec(
        job_id=entry["job_id"],
        ranks=tuple(entry["ranks"]),
        iterations=entry["iterations"],
        arrival_s=entry["arrival_s"],
        layers=tuple(
            LayerCost(forward_s=forward_s, backward_s=backward_s, gradient_bytes=size)
            for forward_s, backward_s, size in entry["layers"]
        ),
    )


def execution_command(path: Path) -> list[str]:
    """Return what every host runs, from the file that `write_order` wrote.

    Examples:
        >>> execution_command(Path("order.json"))[1:]
        ['-m', 'fivefold.codesign._execute_rank', 'order.json']
    """
    return [sys.executable, "-m", "fivefold.codesign._execute_rank", str(path)]


def read_measurements(lines: Sequence[str]) -> Mapping[str, float]:
    """Mean seconds per iteration of each job from what rank 0 printed.

    Args:
        lines: Its standard output.

    Examples:
        >>> read_measurements(["hello", '{"iteration_s": {"a": 0.5}}'])
        {'a': 0.5}
    """
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith('{"iteration_s"'):
            found = json.loads(line)["iteration_s"]
    return found


def _check_job(topology: Topology, job: JobSpec, plan: JobPlan) -> None:
    who = f"job {job.job_id!r}"
    if job.splits:
        raise UnsupportedError(
            f"{who} is split as layer 1 chose, and only jobs that are given by their layers are "
            "run here",
            hint="give the job's layers",
        )
    if any(layer.all_to_all_bytes for layer in job.layers):
        raise UnsupportedError(
            f"{who} exchanges all-to-all, and only reductions are run here",
            hint="leave out its all_to_all_bytes",
        )
    groups = host_groups(topology, plan.order)
    if plan.algorithm != "ring" and (groups is None or len(groups[0]) > 1):
        raise UnsupportedError(
            f"{who} is planned with {plan.algorithm} over hosts of several ranks, and only rings "
            "are run there",
            hint="plan without II",
        )
    if plan.algorithm == "in_network":
        _check_sums(topology, who, plan)


def _check_sums(topology: Topology, who: str, plan: JobPlan) -> None:
    root = str(plan.root)
    tree = aggregation_tree(topology, plan.order, root)
    if tree is None:
        raise InfeasibleError(
            f"switch {root!r} cannot sum for {who}", hint="choose another root, or a ring"
        )
    streams = Counter(parent for _, parent in tree)
    summing = sorted({root, *(node for node, number in streams.items() if number > 1)})
    if summing != [root]:
        raise UnsupportedError(
            f"{who} is summed at {', '.join(summing)}, and one switch sums for a job here",
            hint="let only switches sum at which all of a job's hosts meet, or plan without HN",
        )
    pool = topology.ability_of(root).aggregation
    assert pool is not None, "aggregation_tree asked"
    if pool.rate_bytes_per_s is not None:
        raise UnsupportedError(
            f"switch {root!r} is said to add at a rate of its own, which is not emulated",
            hint="leave the rate of its aggregation out",
        )
    if pool.slot_bytes < _LEAST_SLOT_BYTES or pool.slot_bytes % 8:
        raise UnsupportedError(
            f"switch {root!r} has slots of {pool.slot_bytes} bytes, for which the software switch "
            "is too slow",
            hint=f"say at least {_LEAST_SLOT_BYTES}, a multiple of 8; 65536 does well",
        )


def _pool(topology: Topology, root: str) -> dict[str, int]:
    pool = topology.ability_of(root).aggregation
    assert pool is not None, "checked before"
    return {"slots": pool.slots, "slot_bytes": pool.slot_bytes}


def _routes(topology: Topology, plan: JobPlan) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Return the way of every edge of a ring."""
    if plan.algorithm == "in_network" or len(plan.order) == 1:
        return []
    edges = zip(plan.order, (*plan.order[1:], plan.order[0]), strict=True)
    return [(edge, edge_route(topology, plan, edge)) for edge in edges]
