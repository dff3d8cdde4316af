"""Jobs that are described by a model and devices: layer 1's answer becomes a job of the cluster.

Layer 1 looks twice. From nominal constants (what the devices' file says of links) comes its own
favourite: the null form, which nobody questions where Vertical is off. From the topology's tiers
come further candidates; with Vertical on, the layers below price all of them, and the choice may
change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fivefold.codesign.jobs import JobSpec, Split, mesh_ranks
from fivefold.codesign.plans import JobPlan
from fivefold.collectives.pricing import FabricSpec, collective_time_s, fabric_from_topology
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Topology
from fivefold.strategy import (
    Cluster,
    Job,
    ModelSpec,
    ParallelPlan,
    PlanPrediction,
    evaluate_plan,
    search_plans,
)
from fivefold.strategy.cluster import reached_tiers
from fivefold.strategy.demand import plan_demand
from fivefold.tasks import schedule_tasks
from fivefold.tasks.iteration import IterationDemand, mesh_iteration
from fivefold.units import format_bytes

_LOOKED_AT = 200  # fastest plans, of which many differ in switches only
_NOMINAL, _INFORMED = 4, 4
_MOST_LOOKS, _ALIKE = 8, 1e-6
_LEAST_S = 1e-12


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """A job as ``fivefold plan`` takes it, with when it runs."""

    job_id: str
    job: Job
    devices: Cluster
    iterations: int = 1
    arrival_s: float = 0.0
    weight: float = 1.0


def job_from_plan(topology: Topology, described: ModelJob, ranks: Sequence[int]) -> JobSpec:
    """Return a job of the cluster, with the ways to split it that layer 1 holds to be best."""
    wanted = described.job.space.num_gpus
    if len(ranks) != wanted:
        raise ConfigurationError(
            f"job {described.job_id!r} has {wanted} GPUs and {len(ranks)} ranks",
            hint="give it as many ranks as GPUs",
        )
    topology.require_connected()
    refused: list[InfeasibleError] = []
    splits: list[Split] = []
    for prediction in _candidates(topology, described):
        try:
            splits.append(_split(topology, described, prediction, ranks))
        except InfeasibleError as error:
            refused.append(error)
    if not splits:
        raise refused[0]
    return JobSpec(
        job_id=described.job_id,
        ranks=splits[0].ranks,
        iterations=described.iterations,
        arrival_s=described.arrival_s,
        weight=described.weight,
        splits=tuple(splits),
    )


def _candidates(topology: Topology, described: ModelJob) -> list[PlanPrediction]:
    """Return plans that fit in memory in layer 1's order, then those the topology suggests."""
    job, devices = described.job, described.devices
    if job.plan is not None:
        return [_judged(described, job.plan)]
    own = _of_different_mesh(_fastest(job, devices, devices.fabric), _NOMINAL)
    informed: list[PlanPrediction] = []
    tiers = _fabric_below(topology, devices, job.space.num_gpus)
    if tiers != devices.fabric:
        informed = _of_different_mesh(_fastest(job, devices, tiers), _INFORMED)
    seen = {_mesh(one.plan) for one in own}
    more = [one for one in informed if _mesh(one.plan) not in seen]
    # Their nominal price, so that all are in one currency.
    return own + [
        evaluate_plan(job.model, devices.device, devices.fabric, plan=one.plan) for one in more
    ]


def _judged(described: ModelJob, plan: ParallelPlan) -> PlanPrediction:
    devices = described.devices
    found = evaluate_plan(described.job.model, devices.device, devices.fabric, plan=plan)
    if not found.fits:
        raise InfeasibleError(
            f"the plan of job {described.job_id!r} does not fit: memory binds; it needs "
            f"{format_bytes(found.memory.total_bytes)} a GPU, {devices.name!r} has "
            f"{format_bytes(devices.device.memory_bytes)}",
            hint="leave out its plan to search for one that fits",
        )
    return found


def _fastest(job: Job, devices: Cluster, fabric: FabricSpec) -> Sequence[PlanPrediction]:
    found = search_plans(job.model, devices.device, fabric, space=job.space, top=_LOOKED_AT)
    return found.best


def _of_different_mesh(best: Iterable[PlanPrediction], most: int) -> list[PlanPrediction]:
    """Return the fastest of each mesh."""
    found: dict[tuple[int, ...], PlanPrediction] = {}
    for one in best:
        found.setdefault(_mesh(one.plan), one)
    return list(found.values())[:most]


def _mesh(plan: ParallelPlan) -> tuple[int, ...]:
    """Return what decides the messages: degrees, and what ZeRO sends instead of all-reduces."""
    return (plan.data, plan.tensor, plan.pipeline, plan.context, plan.expert, plan.zero)


@functools.lru_cache(maxsize=32)
def _tiers(topology: Topology) -> FabricSpec | None:
    """Return what layer 1 can know of the topology; None where its hosts are unequal."""
    try:
        return fabric_from_topology(topology)
    except ConfigurationError:
        return None


def _split(
    topology: Topology, described: ModelJob, prediction: PlanPrediction, ranks: Sequence[int]
) -> Split:
    plan, devices = prediction.plan, described.devices
    who = f"job {described.job_id!r}"
    hosts = {topology.host_of(rank) for rank in ranks}
    demand = plan_demand(
        described.job.model,
        devices.device,
        plan,
        gpus_per_node=max(1, len(ranks) // len(hosts)) if None not in hosts else 1,
    )
    tiers = devices.fabric.tiers[0], devices.fabric.tiers[-1]
    fabric = _fabric_below(topology, devices, plan.num_gpus)
    return Split(
        name=split_name(plan),
        plan=plan,
        demand=_priced_alike(described.job.model, devices, fabric, plan, demand),
        ranks=mesh_ranks(topology, ranks, tensor=plan.tensor, who=who),
        nominal_s=prediction.time_s,
        memory_bytes=prediction.memory.total_bytes,
        reached=tuple((t.efficiency, t.exchange_share) for t in tiers),  # type: ignore[arg-type]
    )


def _fabric_below(topology: Topology, devices: Cluster, num_gpus: int) -> FabricSpec:
    """Return the topology's tiers at the rates that the devices' software reaches."""
    tiers = _tiers(topology)
    if tiers is None or tiers.num_gpus < num_gpus:
        return devices.fabric
    return reached_tiers(tiers, devices.fabric)


def _priced_alike(
    model: ModelSpec, devices: Cluster, fabric: FabricSpec, plan: ParallelPlan,
    demand: IterationDemand,
) -> IterationDemand:  # fmt: skip
    """Return the demand with what layer 1 counts and its tasks have no place for.

    Such are messages of the other stages while a pipeline fills, and compute that is slower beside
    communication. At layer 1's prices of collectives the tasks then take layer 1's time.
    """
    wanted_s = evaluate_plan(model, devices.device, fabric, plan=plan).time_s

    def quote(kind: str, size_bytes: float) -> float:
        collective, _, axis = kind.partition(" over ")
        collective = "point_to_point" if collective in {"send", "return"} else collective
        group = plan.group(axis)
        return collective_time_s(fabric, collective, size_bytes=size_bytes, group=group)

    plain = JobPlan(order=())
    for _ in range(_MOST_LOOKS):
        graph = mesh_iteration(
            demand, quote, bucket_bytes=plain.bucket_bytes, overlap_forward=plain.overlap_forward
        )
        tasks = schedule_tasks(graph, ordering=plain.ordering)
        missing_s = wanted_s - tasks.end_s
        if abs(missing_s) <= _ALIKE * wanted_s:
            break
        demand = _with_waits(demand, missing_s)
    return demand


def _with_waits(demand: IterationDemand, more_s: float) -> IterationDemand:
    """Add seconds of waiting; where there are too few to take away, take away compute."""
    overhead_s = demand.overhead_s + more_s
    bubble_s = demand.bubble_s + min(overhead_s, 0.0)
    computed_s = demand.micro_batches * demand.segments * (demand.forward_s + demand.backward_s)
    less = max(1.0 + min(bubble_s, 0.0) / max(computed_s, _LEAST_S), 0.0)
    return replace(
        demand,
        overhead_s=max(overhead_s, 0.0),
        bubble_s=max(bubble_s, 0.0),
        forward_s=less * demand.forward_s,
        backward_s=less * demand.backward_s,
    )


def split_name(plan: ParallelPlan) -> str:
    """Describe a split in a few words: degrees over 1, micro-batch and settings."""
    degrees = (("d", plan.data), ("t", plan.tensor), ("p", plan.pipeline), ("c", plan.context),
               ("e", plan.expert))  # fmt: skip
    words = [f"{letter}{degree}" for letter, degree in degrees if degree > 1]
    words.append(f"b{plan.micro_batch}")
    switches: list[str] = [plan.schedule] * (plan.pipeline > 1)
    switches += [f"ZeRO-{plan.zero}"] * (plan.zero > 0)
    switches += [f"recompute {plan.recompute}"] * (plan.recompute != "none")
    switches += ["sequence parallel"] * plan.sequence_parallel
    return ", ".join([" ".join(words), *switches])
