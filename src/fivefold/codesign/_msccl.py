"""The collectives of a job's plan as programs of MSCCL: one XML file per collective."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import JobPlan
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.lowering import lower, to_msccl_xml
from fivefold.collectives.pricing.phases import host_groups
from fivefold.collectives.schedules import Schedule, all_reduce, all_to_all
from fivefold.errors import UnsupportedError
from fivefold.network.topology import Topology


def msccl_programs(topology: Topology, job: JobSpec, plan: JobPlan) -> Mapping[str, str]:
    """Return what layer 3 chose for a job, for an NCCL that has MSCCL.

    Args:
        topology: The cluster: whose ranks sit in one host.
        job: The job; ranks of the programs are its own, from 0.
        plan: Its plan.

    Returns:
        Text of each file by the collective's name.

    Raises:
        UnsupportedError: Switches sum, which MSCCL's programs of GPUs cannot say; or the job is
            split along several axes.
        InfeasibleError: A program exceeds a limit of MSCCL's interpreter.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> job = JobSpec(job_id="a", ranks=(2, 0), layers=(layer,))
        >>> list(msccl_programs(switch(4), job, JobPlan(order=(0, 2))))
        ['all_reduce']
    """
    if job.split_as(plan.split).mesh is not None or plan.algorithm == "in_network":
        reason = "its switches sum" if plan.algorithm == "in_network" else "it has several axes"
        raise UnsupportedError(
            f"job {job.job_id!r} has no MSCCL program: {reason}",
            hint="plan with the co-designs V, H and II, for data-parallel jobs",
        )
    number = len(job.ranks)
    programs: dict[str, str] = {}
    if number > 1 and any(layer.gradient_bytes for layer in job.layers):
        programs["all_reduce"] = _text(_reduction(topology, job, plan))
    if number > 1 and any(layer.all_to_all_bytes for layer in job.layers):
        programs["all_to_all"] = _text(build_algorithm("direct", all_to_all(number)))
    return programs


def _reduction(topology: Topology, job: JobSpec, plan: JobPlan) -> Schedule:
    collective = all_reduce(len(job.ranks))
    places = {rank: place for place, rank in enumerate(job.ranks)}
    if plan.algorithm == "ring":
        return build_algorithm("ring", collective, order=[places[rank] for rank in plan.order])
    groups = host_groups(topology, plan.order)
    if groups is None:
        raise UnsupportedError(
            f"job {job.job_id!r} is planned host by host, but has no even hosts",
            hint="plan it again on this cluster",
        )
    own = [[places[rank] for rank in group] for group in groups]
    return build_algorithm("hierarchical", collective, groups=own)


def _text(schedule: Schedule) -> str:
    return to_msccl_xml(lower(schedule))
