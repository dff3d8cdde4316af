"""What a collective of a job puts on the network: phases of flows over the groups of its axis."""

from __future__ import annotations

import dataclasses
import itertools

from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import JobPlan
from fivefold.collectives.pricing.phases import Phase, collective_phases, host_groups
from fivefold.network.topology import Topology

_AGGREGATED_AXES = {"", "data"}  # the empty one stands for all ranks of a job


def phases_of(
    topology: Topology, job: JobSpec, plan: JobPlan, *, kind: str, size_bytes: float
) -> list[list[Phase]]:
    """The phases of one collective, one after the other; those of one entry run side by side.

    ``kind`` is that of the collective, of a split job followed by ``" over "`` and the axis.
    """
    if size_bytes == 0:
        return []
    chosen = job.split_as(plan.split)
    collective, _, axis = kind.partition(" over ")
    if collective in {"send", "return"}:
        sent = _sent(chosen, axis, size_bytes, back=collective == "return")
        return _at_reached_rate(topology, chosen, sent, exchange=True)
    algorithm = plan.algorithm
    if algorithm == "in_network" and axis not in _AGGREGATED_AXES:
        algorithm = "hierarchical"
    found: list[list[list[Phase]]] = []
    trees = 0
    for group in job_groups(chosen, plan, axis):
        local = len((host_groups(topology, group) or [()])[0])
        roots: tuple[str, ...] = ()
        if algorithm == "in_network" and len(group) > 1:
            roots = tuple(plan.root_of(trees + place) for place in range(local))
            trees += local
        phases = collective_phases(
            topology, group, collective, size_bytes, algorithm=algorithm, roots=roots,
            every_port=chosen.mesh is not None,
        )  # fmt: skip
        found.append(phases)
    steps = max(map(len, found), default=0)
    joint = [[phase for own in found if i < len(own) for phase in own[i]] for i in range(steps)]
    return _at_reached_rate(topology, chosen, joint, exchange=collective == "all_to_all")


def _at_reached_rate(
    topology: Topology, job: JobSpec, steps: list[list[Phase]], *, exchange: bool
) -> list[list[Phase]]:
    """Phases with as many bytes as take the time at the link's rate that they take in truth."""
    if job.mesh is None:
        return steps
    inside, across = (reached[exchange] for reached in job.mesh.reached)
    if inside == across == 1.0:
        return steps

    def slowed(phase: Phase) -> Phase:
        hosts = ((topology.host_of(a), topology.host_of(b)) for a, b in phase.edges)
        far = phase.tree is not None or any(a is None or a != b for a, b in hosts)
        return dataclasses.replace(phase, edge_bytes=phase.edge_bytes / (across if far else inside))

    return [[slowed(phase) for phase in phases] for phases in steps]


def job_groups(job: JobSpec, plan: JobPlan, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of an axis (empty: all ranks), each in the order of the plan's ring."""
    if not axis or job.mesh is None:
        return (plan.order,)
    place = {rank: number for number, rank in enumerate(plan.order)}
    groups = job.mesh.groups(axis)
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in groups)


def _sent(job: JobSpec, axis: str, size_bytes: float, *, back: bool) -> list[list[Phase]]:
    """Return what every stage sends to the next one, or to the one before."""
    if job.mesh is None:
        return []
    chains = job.mesh.groups(axis)
    edges = tuple(
        (b, a) if back else (a, b) for chain in chains for a, b in itertools.pairwise(chain)
    )
    return [[Phase(edges, size_bytes, steps=1, coupled=False)]] if edges else []
