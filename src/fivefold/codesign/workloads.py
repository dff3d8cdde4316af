"""Where jobs come from: a TOML file, or a seeded draw; and where they are placed.

Placement is an input, not a co-design. Of a job that is described by a model and devices layer 1
looks twice: from nominal constants comes its own favourite (the null form); from the topology's
tiers come further candidates, which the layers below price where Vertical is on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from fivefold.codesign.arbiter import Progress
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.jobs import JobSpec, Split, check_jobs, check_ranks, mesh_ranks
from fivefold.codesign.plans import JobPlan
from fivefold.codesign.simulate import alone_quote, schedule_iteration
from fivefold.codesign.tables import (
    TableJob,
    TableTold,
    is_job_table,
    place_in_time,
    read_job_table,
)
from fivefold.collectives.pricing import FabricSpec, collective_time_s, fabric_from_topology
from fivefold.errors import ConfigurationError, InfeasibleError, require_whole
from fivefold.files import read_toml
from fivefold.network.topology import Topology
from fivefold.reading import Reading
from fivefold.runs import Section, check_tables
from fivefold.runs.config import Bytes, Count, Positive, Rate, Seed, Text
from fivefold.strategy import (
    Cluster,
    Job,
    ModelSpec,
    ParallelPlan,
    PlanPrediction,
    evaluate_plan,
    load_cluster,
    search_plans,
)
from fivefold.strategy.cluster import reached_tiers
from fivefold.strategy.demand import plan_demand
from fivefold.strategy.job import job_from_table
from fivefold.strategy.plan import degrees_of, settings_of
from fivefold.tasks import LayerCost, schedule_tasks
from fivefold.tasks.iteration import IterationDemand, mesh_iteration
from fivefold.units import format_bytes, parse_duration_s

_LOOKED_AT = 200  # fastest plans, of which many differ in switches only
_NOMINAL, _INFORMED = 4, 4
_MOST_LOOKS, _ALIKE = 8, 1e-6
_LEAST_S = 1e-12
_LEAST_SHARE = 1e-9  # of an iteration that computes, where all of it is communication


def job_from_plan(
    topology: Topology,
    job: Job,
    devices: Cluster,
    ranks: Sequence[int],
    *,
    job_id: str,
    **when: Any,
) -> JobSpec:
    """Return a job of the cluster, with the ways to split it that layer 1 holds to be best.

    ``when`` are the fields of ``JobSpec`` that say when it runs.
    """
    wanted = job.space.num_gpus
    if len(ranks) != wanted:
        raise ConfigurationError(
            f"job {job_id!r} has {wanted} GPUs and {len(ranks)} ranks",
            hint="give it as many ranks as GPUs",
        )
    topology.require_connected()
    refused: list[InfeasibleError] = []
    splits: list[Split] = []
    for prediction in _candidates(topology, job, devices, job_id):
        try:
            splits.append(_split(topology, job.model, devices, prediction, ranks, job_id))
        except InfeasibleError as error:
            refused.append(error)
    if not splits:
        raise refused[0]
    return JobSpec(job_id=job_id, ranks=splits[0].ranks, splits=tuple(splits), **when)


def _candidates(
    topology: Topology, job: Job, devices: Cluster, job_id: str
) -> list[PlanPrediction]:
    """Return plans that fit in memory in layer 1's order, then those the topology suggests."""

    def priced(plan: ParallelPlan) -> PlanPrediction:
        return evaluate_plan(job.model, devices.device, devices.fabric, plan=plan)

    if job.plan is not None:
        found = priced(job.plan)
        if not found.fits:
            raise InfeasibleError(
                f"the plan of job {job_id!r} does not fit: memory binds; it needs "
                f"{format_bytes(found.memory.total_bytes)} a GPU, {devices.name!r} has "
                f"{format_bytes(devices.device.memory_bytes)}",
                hint="leave out its plan to search for one that fits",
            )
        return [found]
    own = _of_different_mesh(_fastest(job, devices, devices.fabric), _NOMINAL)
    informed: list[PlanPrediction] = []
    tiers = _fabric_below(topology, devices, job.space.num_gpus)
    if tiers != devices.fabric:
        informed = _of_different_mesh(_fastest(job, devices, tiers), _INFORMED)
    seen = {_mesh(one.plan) for one in own}
    # At their nominal price, so that all are in one currency.
    return own + [priced(one.plan) for one in informed if _mesh(one.plan) not in seen]


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


def _split(
    topology: Topology, model: ModelSpec, devices: Cluster, prediction: PlanPrediction,
    ranks: Sequence[int], job_id: str,
) -> Split:  # fmt: skip
    plan = prediction.plan
    hosts = {topology.host_of(rank) for rank in ranks}
    per_node = max(1, len(ranks) // len(hosts)) if None not in hosts else 1
    demand = plan_demand(model, devices.device, plan, gpus_per_node=per_node)
    tiers = devices.fabric.tiers[0], devices.fabric.tiers[-1]
    fabric = _fabric_below(topology, devices, plan.num_gpus)
    settings = settings_of(plan)
    return Split(
        name=degrees_of(plan) + (f", {settings}" if settings != "plain" else ""),
        plan=plan,
        demand=_priced_alike(model, devices, fabric, plan, demand),
        ranks=mesh_ranks(topology, ranks, tensor=plan.tensor, who=f"job {job_id!r}"),
        nominal_s=prediction.time_s,
        memory_bytes=prediction.memory.total_bytes,
        reached=tuple((t.efficiency, t.exchange_share) for t in tiers),  # type: ignore[arg-type]
    )


@functools.lru_cache(maxsize=32)
def _fabric_below(topology: Topology, devices: Cluster, num_gpus: int) -> FabricSpec:
    """Return the topology's tiers at the rates that the devices' software reaches."""
    try:
        tiers = fabric_from_topology(topology)
    except ConfigurationError:  # its hosts are unequal
        return devices.fabric
    if tiers.num_gpus < num_gpus:
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


Placement = Literal["packed", "random"]
"""``"packed"``: jobs fill the hosts in order. ``"random"``: hosts are drawn."""

_LAYERS = 4
_BACKWARD_SHARE = 2 / 3  # of an iteration's compute: the usual ratio of 1 to 2


def _duration(value: Any) -> Any:
    return parse_duration_s(value) if isinstance(value, str) else value


Duration = Annotated[float, BeforeValidator(_duration), Field(ge=0, allow_inf_nan=False)]


class _Cluster(Section):
    """Table ``[placement]``."""

    policy: Placement = "packed"
    """how jobs that name no ranks are placed"""
    seed: Seed = 0
    """seed of random placement"""


class _Job(Section):
    """One entry of ``[[jobs]]``."""

    id: Text
    """name of the job"""
    ranks: tuple[Count, ...] | None = Field(default=None, strict=False)
    """ranks that it runs on, in its own order"""
    gpus: Positive | None = None
    """number of ranks, where it may be placed anywhere"""
    compute: Duration | None = None
    """seconds of compute per iteration"""
    gradients: Bytes | None = None
    """bytes that an iteration all-reduces"""
    model: Any = None
    """instead of compute and gradients: a preset, a config.json or a table of sizes"""
    devices: Text | None = None
    """GPU and stack of a model's job: a known name or a file"""
    batch: Positive | None = None
    """samples of an iteration of a model's job"""
    seq_len: Positive | None = None
    """tokens of a sample, where not the model's own"""
    search: dict[str, Any] | None = None
    """which plans may be looked at"""
    plan: dict[str, Any] | None = None
    """the plan of a model's job, instead of a search"""
    all_to_all: Bytes = 0
    """bytes of each all-to-all of a layer, four per iteration"""
    layers: Positive = _LAYERS
    """layers among which compute and gradients are divided evenly"""
    iterations: Positive = 100
    """iterations that it does"""
    arrival: Duration = 0.0
    """when it arrives"""
    weight: Rate = 1.0
    """how much a second of it counts"""


class _File(Section):
    """A jobs file."""

    placement: _Cluster = _Cluster()
    """where jobs go"""
    jobs: Annotated[tuple[_Job, ...], Field(strict=False)]
    """the jobs"""


def load_jobs(
    path: Path | str,
    topology: Topology,
    *,
    progress: Progress | None = None,
    told: TableTold | None = None,
) -> list[JobSpec]:
    r"""Read jobs from a TOML file and place those that name no ranks; or from a scheduler's table.

    Args:
        path: The file; ``docs/guides/codesign.md`` has an example.
        topology: The cluster.
        progress: Called before each job, which may be searched for plans, with what is done, how
            many jobs have been read, and how many there are.
        told: What a scheduler's table does not say of its jobs; of other files nothing is told.

    Raises:
        ConfigurationError: The file is missing, is not TOML, or a key is wrong.
        DataError: A row of a table cannot be read.
        InfeasibleError: The jobs do not fit the cluster.

    Examples:
        >>> import tempfile
        >>> from fivefold.network.topology import switch
        >>> file = Path(tempfile.mkdtemp()) / "jobs.toml"
        >>> _ = file.write_text('[[jobs]]\nid="a"\ngpus=2\ncompute="0.3 s"\ngradients="1 GB"')
        >>> load_jobs(file, switch(4))[0].ranks
        (0, 1)
    """
    jobs, reading = load_jobs_with_reading(path, topology, progress=progress, told=told)
    if reading is not None:
        reading.log()
    return jobs


def load_jobs_with_reading(
    path: Path | str,
    topology: Topology,
    *,
    progress: Progress | None = None,
    told: TableTold | None = None,
) -> tuple[list[JobSpec], Reading | None]:
    """Return what ``load_jobs`` does, and the account of a scheduler's table; None of others."""
    if is_job_table(Path(path)):
        return _of_table(Path(path), topology, told or TableTold())
    if told not in (None, TableTold()):
        message = f"{path} is no table of a scheduler: it says itself what is told beside it"
        raise ConfigurationError(message, hint="leave out --compute, --gradients and --time-unit")
    tables = read_toml(Path(path))
    given = tables.get("jobs")
    if "job" not in tables and (not given or not isinstance(given, list)):
        raise ConfigurationError(
            f"{path} describes no jobs",
            hint='write for each [[jobs]] and id = "a", gpus = 2, compute = "0.3 s", '
            'gradients = "1 GB"',
        )
    found = check_tables(tables, _File, source=path)
    for job in found.jobs:
        _check_job(job, str(path))
    taken = sorted({rank for job in found.jobs for rank in job.ranks or ()})
    wanted = {job.id: job.gpus for job in found.jobs if job.gpus is not None}
    how = found.placement
    placed = place_jobs(topology, wanted, policy=how.policy, seed=how.seed, taken=taken)
    jobs = []
    for number, job in enumerate(found.jobs):
        if progress is not None:
            progress("jobs read", number, len(found.jobs))
        ranks = job.ranks or placed[job.id]
        when: dict[str, Any] = {"iterations": job.iterations, "arrival_s": job.arrival}
        when["weight"] = job.weight
        if job.model is not None:
            jobs.append(_modelled(topology, job, ranks, Path(path), when))
            continue
        assert job.compute is not None and job.gradients is not None, "checked before"  # noqa: PT018
        layers = _even(job.compute, job.gradients, number=job.layers, all_to_all=job.all_to_all)
        jobs.append(JobSpec(job_id=job.id, ranks=tuple(ranks), layers=layers, **when))
    check_jobs(topology, jobs)
    return jobs, None


def _of_table(
    path: Path, topology: Topology, told: TableTold
) -> tuple[list[JobSpec], Reading | None]:
    rows, reading = read_job_table(path, told)
    queued = any(note.name == "queue" for note in reading.assumed)
    placed = place_in_time(topology, rows, queued=queued)
    why = "whose hosts the table names is another cluster: as few hosts as can be, tightly"
    reading.assume("placement", "packed", why)
    jobs = []
    for row in rows:
        start_s, ranks = placed[row.job_id]
        compute_s, iteration_s = _as_measured(topology, row, ranks, told.gradient_bytes or 0)
        jobs.append(
            JobSpec(
                job_id=row.job_id, ranks=ranks, arrival_s=start_s,
                layers=_even(compute_s, told.gradient_bytes or 0),
                iterations=row.iterations or max(round(row.duration_s / iteration_s), 1),
            )
        )  # fmt: skip
        if row.iteration_s is not None and iteration_s > row.iteration_s * (1 + _ALIKE):
            why = f"to send what was told takes {iteration_s:.3g} s of {row.iteration_s:.3g} s"
            reading.assume(f"compute of job {row.job_id}", "0 s", why, decisive=True)
    check_jobs(topology, jobs)
    return jobs, reading


def _as_measured(
    topology: Topology, row: TableJob, ranks: tuple[int, ...], gradient_bytes: int
) -> tuple[float, float]:
    """Return an iteration's compute, and the time that it takes alone today, both in seconds.

    What a table measured has communication in it, so compute is what that leaves.
    """

    def job_of(compute_s: float) -> JobSpec:
        return JobSpec(job_id="one", ranks=ranks, layers=_even(compute_s, gradient_bytes))

    most_s = row.iteration_s if row.compute_s is None else row.compute_s
    assert most_s is not None, "the reader asks for one of them"
    plan = null_plan(topology, [job_of(most_s)]).jobs["one"]
    quote = alone_quote(topology, job_of(most_s), plan)

    def alone_s(compute_s: float) -> float:
        return schedule_iteration(job_of(compute_s), plan, quote).end_s

    if row.compute_s is not None:
        return row.compute_s, alone_s(row.compute_s)
    least_s = most_s * _LEAST_SHARE
    if alone_s(least_s) >= most_s:
        return least_s, alone_s(least_s)
    low_s, high_s = least_s, most_s
    while high_s - low_s > _ALIKE * most_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if alone_s(middle_s) > most_s else (middle_s, high_s)
    return low_s, alone_s(low_s)


def place_jobs(
    topology: Topology,
    wanted: dict[str, int],
    *,
    policy: Placement = "packed",
    seed: int = 0,
    taken: Sequence[int] = (),
) -> dict[str, tuple[int, ...]]:
    """Give each job ranks of its own: whole hosts where it needs as many as a host has."""
    gone = set(taken)
    hosts = [list(ranks) for ranks in topology.hosts.values()]
    known = {rank for ranks in hosts for rank in ranks}
    hosts += [[rank] for rank in range(topology.num_ranks) if rank not in known]
    if policy == "random":
        order = np.random.default_rng(seed).permutation(len(hosts))
        hosts = [hosts[place] for place in order.tolist()]
    free = [[rank for rank in ranks if rank not in gone] for ranks in hosts]
    placed: dict[str, tuple[int, ...]] = {}
    for name, number in wanted.items():
        left = sum(map(len, free))
        if number > left:
            fewer = f"give it {left} or fewer, or plan" if left else "plan"
            raise InfeasibleError(
                f"job {name!r} needs {number} ranks, and {left} of {topology.num_ranks} are free",
                hint=f"{fewer} for a larger cluster",
            )
        ranks: list[int] = []
        whole = [own for own, all_of in zip(free, hosts, strict=True) if len(own) == len(all_of)]
        for own in [*whole, *(own for own in free if own not in whole)]:
            take = min(len(own), number - len(ranks))
            ranks += [own.pop(0) for _ in range(take)]
        placed[name] = tuple(ranks)
    return placed


def synthetic_jobs(
    topology: Topology,
    *,
    number: int,
    seed: int,
    sizes: Sequence[int] = (8, 16, 16, 32, 64),
    iterations: int = 100,
) -> list[JobSpec]:
    """Draw jobs: sizes, compute of 0.1 to 0.5 s and gradients of 0.5 to 3 GB per iteration.

    These ranges make communication and compute comparable at 100 to 400 Gbit/s; they are a
    choice of this project, not a trace.

    Args:
        topology: The cluster.
        number: Most jobs; fewer where the cluster is full.
        seed: Seed of the draw and of the placement.
        sizes: Numbers of ranks that are drawn from.
        iterations: Iterations of each job.

    Raises:
        ConfigurationError: A number is out of range.
        InfeasibleError: Not even one job fits.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> [len(j.ranks) for j in synthetic_jobs(switch(8), number=3, seed=0, sizes=(2, 4))]
        [4, 4]
    """
    draw = np.random.default_rng(require_whole("seed", seed, least=0))
    require_whole("number", number)
    wanted: dict[str, int] = {}
    for place in range(number):
        size = int(draw.choice(np.asarray(sizes)))
        if sum(wanted.values()) + size <= topology.num_ranks:
            wanted[f"job{place}"] = size
    if not wanted:
        raise InfeasibleError(
            f"no job of {min(sizes)} ranks fits {topology.num_ranks}", hint="draw smaller sizes"
        )
    placed = place_jobs(topology, wanted, policy="random", seed=seed)
    return [
        JobSpec(
            job_id=name, ranks=ranks, iterations=iterations,
            layers=_even(float(draw.uniform(0.1, 0.5)), int(draw.uniform(0.5e9, 3e9))),
        )
        for name, ranks in placed.items()
    ]  # fmt: skip


def _check_job(job: _Job, source: str) -> None:
    """Refuse what cannot be meant."""
    if (job.ranks is None) == (job.gpus is None):
        raise ConfigurationError(
            f"job {job.id!r} must name its ranks or its number of gpus (in {source})",
            hint="write ranks = [0, 1] or gpus = 2",
        )
    layered = {"compute": job.compute, "gradients": job.gradients}
    described = {"model": job.model, "devices": job.devices, "batch": job.batch}
    more = {"seq_len": job.seq_len, "search": job.search, "plan": job.plan}
    chosen = layered if job.model is None else described
    others = {**described, **more} if job.model is None else layered
    missing = [name for name, value in chosen.items() if value is None]
    surplus = [name for name, value in others.items() if value is not None]
    if job.model is not None:
        surplus += sorted({"layers", "all_to_all"} & job.model_fields_set)
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"cannot have {surplus[0]} as well"
        raise ConfigurationError(
            f"job {job.id!r} {what} (in {source})",
            hint="give compute and gradients, or model, devices and batch",
        )


def _modelled(
    topology: Topology, job: _Job, ranks: Sequence[int], path: Path, when: Mapping[str, Any]
) -> JobSpec:
    """Return a job that is described by a model and devices."""
    assert job.devices is not None, "checked before"
    check_ranks(topology, job.id, ranks)
    beside = path.parent / job.devices
    devices = load_cluster(beside if beside.is_file() else job.devices)
    table = {"model": job.model, "gpus": len(ranks), "global_batch": job.batch}
    more = {"seq_len": job.seq_len, "search": job.search, "plan": job.plan}
    table |= {name: value for name, value in more.items() if value is not None}
    what = job_from_table(table, where=f"job {job.id!r} of {path}", folder=path.parent)
    return job_from_plan(topology, what, devices, ranks, job_id=job.id, **when)


def _even(
    compute_s: float, gradient_bytes: float, *, number: int = _LAYERS, all_to_all: int = 0
) -> tuple[LayerCost, ...]:
    """Divide compute and gradients among layers."""
    layer = LayerCost(
        forward_s=(1 - _BACKWARD_SHARE) * compute_s / number,
        backward_s=_BACKWARD_SHARE * compute_s / number,
        gradient_bytes=round(gradient_bytes / number),
        all_to_all_bytes=all_to_all,
    )
    return (layer,) * number
