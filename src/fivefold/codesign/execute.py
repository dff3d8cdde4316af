"""Plans that the emulated cluster can run, and the options and files of such a run.

A plan becomes a cluster (classes of hosts, aggregation switches, routes) and a file that every
rank reads (`execute_rank`). What cannot be run as planned is refused, never run otherwise.
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

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.simulate import planned_order
from fivefold.codesign.steps import edge_route
from fivefold.collectives.pricing.phases import aggregation_tree, host_groups
from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError
from fivefold.files import read_json
from fivefold.network.topology import Topology
from fivefold.runs import write_text
from fivefold.tasks import LayerCost

_SCHEMA = "fivefold.codesign.order/1"
_WRITE = "write one with fivefold execute --output"
_LEAST_SLOT_BYTES = 4096  # below that the software switch is slower than any link worth shaping


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
    aggregating = {str(own.root) for _, own in plans if own.algorithm == "in_network"}
    return {
        "classes": classes,
        "host_classes": {rank: own.priority for job, own in plans for rank in job.ranks}
        if classes > 1
        else {},
        "aggregators": {root: _pool(topology, root) for root in sorted(aggregating)},
        "routes": {edge: route for job, own in plans for edge, route in _routes(topology, own)},
    }


def write_order(
    path: Path, jobs: Sequence[JobSpec], plan: ClusterPlan, *, topology: Topology
) -> None:
    """Write what the ranks need to know, the order of their communications among it.

    That order follows from prices on the topology, as in the simulation; ranks must not find
    another one.
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
    """Return what every host runs, from the file that `write_order` wrote."""
    return [sys.executable, "-m", "fivefold.codesign.execute_rank", str(path)]


def read_measurements(lines: Sequence[str]) -> Mapping[str, float]:
    """Read the mean seconds per iteration of each job from what rank 0 printed."""
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
            f"{who} sends all-to-all, and only reductions are run here",
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
        _check_aggregation(topology, who, plan)


def _check_aggregation(topology: Topology, who: str, plan: JobPlan) -> None:
    root = str(plan.root)
    tree = aggregation_tree(topology, plan.order, root)
    if tree is None:
        raise InfeasibleError(
            f"switch {root!r} cannot aggregate for {who}", hint="choose another root, or a ring"
        )
    streams = Counter(parent for _, parent in tree)
    aggregating = sorted({root, *(node for node, number in streams.items() if number > 1)})
    if aggregating != [root]:
        raise UnsupportedError(
            f"{who} is aggregated at {', '.join(aggregating)}, and a job has one such switch here",
            hint="allow it only in switches where all hosts of a job meet, or plan without HN",
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
