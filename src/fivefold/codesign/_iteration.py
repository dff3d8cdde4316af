"""One iteration of a job as a task graph, and the order of its communications."""

from __future__ import annotations

from dataclasses import replace

from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._plans import JobPlan
from fivefold.collectives.pricing.fabric import Quote
from fivefold.tasks import TaskGraph, schedule_tasks
from fivefold.tasks.iteration import mesh_iteration, rotated_iteration
from fivefold.tasks.schedule import TaskSchedule


def iteration_of(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskGraph:
    """Return the rotated iteration of a job."""
    chosen = job.split_as(plan.split)
    bucket, overlap = plan.bucket_bytes, plan.overlap_forward
    if chosen.mesh is not None:
        demand = chosen.mesh.demand
        return mesh_iteration(demand, quote, bucket_bytes=bucket, overlap_forward=overlap)
    layers = chosen.layers
    if len(chosen.ranks) == 1:  # nobody to talk to
        layers = tuple(replace(x, gradient_bytes=0, all_to_all_bytes=0) for x in layers)
    return rotated_iteration(layers, quote, bucket_bytes=bucket, overlap_forward=overlap)


def schedule_iteration(job: JobSpec, plan: JobPlan, quote: Quote) -> TaskSchedule:
    """When everything happens where prices hold: the job's own prediction."""
    return schedule_tasks(iteration_of(job, plan, quote), ordering=plan.ordering)


def communication_order(schedule: TaskSchedule) -> list[str]:
    """Names of the communications in the order in which their channels take them."""
    return [span.task_id for span in schedule.spans if span.resource.startswith("network")]
