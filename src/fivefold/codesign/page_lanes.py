"""Timelines of a page: what each job computes and sends, and who loads each link."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan
from fivefold.codesign.simulate import Outcome, SimulatorTask, compile_job
from fivefold.network.simulation import AggregationRequest, Compute, SimulationResult, simulate
from fivefold.network.topology import Topology
from fivefold.report.page import Folded, LaneLoad, LaneSpan, Timeline, TimelineLane
from fivefold.units import format_bytes_per_s

_MOST_TASKS = 40_000  # of all iterations; more would take minutes to draw
_SHOWN = 2.5  # iterations of the slowest job


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of time, and the simulation that covers it."""

    result: SimulationResult
    start_s: float
    end_s: float
    iterations: Mapping[str, int]
    whole: bool


def unrolled(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, outcome: Outcome
) -> Window | None:
    """Simulate as many iterations as a window needs in which all jobs run."""
    begins_s = {j.job_id: j.arrival_s + plan.jobs[j.job_id].shift_s for j in jobs}
    length_s = _SHOWN * max(outcome.iteration_s.values())
    once = {job.job_id: compile_job(topology, job, plan.jobs[job.job_id]) for job in jobs}
    last_s = max(begins_s.values())
    for start_s in (last_s, min(begins_s.values())):
        counts = {
            job.job_id: _iterations(job, begins_s[job.job_id], start_s + length_s, outcome)
            for job in jobs
        }
        if sum(counts[name] * len(once[name]) for name in once) <= _MOST_TASKS:
            break
    else:
        return None
    tasks = [task for name in once for task in _written_out(name, once[name], counts[name])]
    result = simulate(topology, tasks, record_rates=True)
    whole = start_s == last_s and all(
        begins_s[name] + outcome.iteration_s[name] * counts[name] > start_s for name in begins_s
    )
    end_s = min(start_s + length_s, result.total_s)
    return Window(result=result, start_s=start_s if end_s > start_s else 0.0, end_s=end_s,
                  iterations=counts, whole=whole)  # fmt: skip


def _iterations(job: JobSpec, begin_s: float, until_s: float, outcome: Outcome) -> int:
    """Return how many iterations a job has begun until a moment, one more for safety."""
    if begin_s >= until_s:
        return 0
    started = math.ceil((until_s - begin_s) / outcome.iteration_s[job.job_id]) + 1
    return min(job.iterations, started)


def _written_out(job_id: str, once: Sequence[SimulatorTask], count: int) -> Iterator[SimulatorTask]:
    """Repeat an iteration: each begins when all tasks of the one before have ended."""
    before: tuple[Hashable, ...] = ()
    for number in range(count):
        copies = [_copy(task, number, before) for task in once]
        yield from copies
        before = ((number, (job_id, "iteration")),)
        yield Compute(before[0], 0.0, depends_on=tuple(map(_name, copies)), job=job_id)


def _copy(task: SimulatorTask, number: int, before: tuple[Hashable, ...]) -> SimulatorTask:
    after = tuple((number, name) for name in task.depends_on) or before
    changes: dict[str, Any] = {_id_field(task): (number, _name(task)), "depends_on": after}
    if getattr(task, "group", None) is not None:
        changes["group"] = (number, task.group)  # type: ignore[union-attr]
    if isinstance(task, AggregationRequest) and task.fallback is not None:
        changes["fallback"] = [_copy(flow, number, ()) for flow in task.fallback]
    return replace(task, **changes)


def _name(task: SimulatorTask) -> Hashable:
    name: Hashable = getattr(task, _id_field(task))
    return name


def _id_field(task: SimulatorTask) -> str:
    names = ("task_id", "flow_id", "flows_id", "request_id")
    return next(name for name in names if hasattr(task, name))


_MOST_JOBS = 12
_MOST_LINKS = 16
_LINKS_OF_TIER = 3
_MOST_LAYERS = 40
_COLOURS = 8
_LAYERS = re.compile(r"\d+(-\d+)?")
_PASSES = (
    ("backward", "backward pass"),
    ("forward", "forward pass"),
    ("other", "optimizer, pipeline bubble"),
    ("reduce", "reduction"),
    ("exchange", "other communication"),
    ("exposed_communication", "compute waits"),
)

_SENT = {"reduce", "exchange"}
Times = dict[tuple[int, str, bool], tuple[float, float]]
"""By iteration, task, and whether it computes: when it began and ended."""


def job_timeline(window: Window, jobs: Sequence[JobSpec]) -> Timeline:
    """Compute and communication of each job over the window."""
    times = _task_times(window)
    lanes: list[TimelineLane] = []
    for job in _largest(jobs):
        spans = _spans(times.get(job.job_id, {}))
        computed = [s for s in spans if s.kind not in _SENT]
        computed += _waits(computed, window)
        lanes.append(TimelineLane(name="compute", group=job.job_id, spans=tuple(computed)))
        lanes.append(TimelineLane(name="network", spans=tuple(s for s in spans if s.kind in _SENT)))
    more = len(jobs) - _MOST_JOBS
    left = f" {more} more jobs are not drawn." if more > 0 else ""
    return Timeline(
        lanes=tuple(lanes),
        start_s=window.start_s,
        end_s=window.end_s,
        kinds=_kinds_of(lanes),
        caption="All jobs on one clock. A compute row stands still (red) where the next layer "
        f"waits for gradients.{left}",
    )


def layer_timelines(window: Window, jobs: Sequence[JobSpec]) -> list[Folded]:
    """Return one iteration of each job, a row per layer."""
    times = _task_times(window)
    return [
        timeline
        for job in _largest(jobs)
        if (timeline := _layers(job, window, times.get(job.job_id, {}))) is not None
    ]


def link_timeline(window: Window, jobs: Sequence[JobSpec], topology: Topology) -> Timeline | None:
    """Load of the busiest links over the window, the jobs on top of one another."""
    rates = _Rates(window, [job.job_id for job in jobs], topology)
    busiest = rates.busiest()
    lanes = [rates.lane(link) for link in busiest]
    if not lanes:
        return None
    seen = {load.kind: load.title for lane in lanes for load in lane.loads}
    return Timeline(
        lanes=tuple(lanes),
        start_s=window.start_s,
        end_s=window.end_s,
        kinds=tuple(sorted((kind, name.partition(":")[0]) for kind, name in seen.items())),
        caption="Of each tier the links that carry most for their rate, over the same stretch, the "
        "busiest first. A row's height is the link's whole rate: what is full to the top is the "
        "bottleneck then.",
    )


def _largest(jobs: Sequence[JobSpec]) -> list[JobSpec]:
    """Return the jobs to draw, in their own order."""
    size = {job.job_id: (-len(job.ranks), place) for place, job in enumerate(jobs)}
    chosen = {job.job_id for job in sorted(jobs, key=lambda j: size[j.job_id])[:_MOST_JOBS]}
    return [job for job in jobs if job.job_id in chosen]


def _task_times(window: Window) -> dict[str, Times]:
    """Return by job when each task of each iteration began and ended."""
    table = window.result.table
    found: dict[str, Times] = {}
    for place in range(len(table)):
        number, name = cast("tuple[int, tuple[Any, ...]]", table.name_of(place))
        start_s, end_s = window.result.start_s[place], window.result.finish_s[place]
        if name[1] == "iteration" or np.isnan(start_s) or window.result.skipped[place]:
            continue
        # Delays and joints of a communication have no processor.
        computes = bool(table.is_compute[place] and table.processors[place] >= 0)
        times = found.setdefault(name[0], {})
        key = (number, name[1], computes)
        before = times.get(key, (start_s, end_s))
        times[key] = (min(before[0], float(start_s)), max(before[1], float(end_s)))
    return found


def _spans(times: Times) -> list[LaneSpan]:
    return [
        LaneSpan(
            start_s=start_s, end_s=end_s, kind=_kind_of(name, computes=computes),
            title=f"iteration {number + 1}: {name}",
            label=layer.group() if (layer := _LAYERS.search(name)) else "",
        )
        for (number, name, computes), (start_s, end_s) in sorted(times.items(), key=itemgetter(1))
        if end_s > start_s
    ]  # fmt: skip


def _kind_of(name: str, *, computes: bool) -> str:
    word = name.partition(" ")[0]
    if computes:
        return word if word in {"backward", "forward"} else "other"
    return "reduce" if word == "reduce" else "exchange"


def _waits(computed: Sequence[LaneSpan], window: Window) -> list[LaneSpan]:
    """Return what lies between one layer and the next: nothing else holds compute up."""
    least_s = 1e-6 * (window.end_s - window.start_s)
    return [
        LaneSpan(
            start_s=before.end_s, end_s=after.start_s, kind="exposed_communication",
            title=f"waits before {after.title.partition(': ')[2]}",
        )
        for before, after in pairwise(computed)
        if after.start_s - before.end_s > least_s
    ]  # fmt: skip


def _kinds_of(lanes: Iterable[TimelineLane]) -> tuple[tuple[str, str], ...]:
    used = {span.kind for lane in lanes for span in lane.spans}
    return tuple((kind, name) for kind, name in _PASSES if kind in used)


def _layers(job: JobSpec, window: Window, times: Times) -> Folded | None:
    """Return the first iteration of a job that begins within the window, else its last."""
    begins = {
        number: min(ends[0] for (n, *_), ends in times.items() if n == number)
        for number in {number for number, *_ in times}
    }
    if not begins:
        return None
    inside = [n for n, start_s in sorted(begins.items()) if start_s >= window.start_s]
    number = inside[0] if inside else max(begins)
    own = {key: ends for key, ends in times.items() if key[0] == number}
    start_s, end_s = begins[number], max(ends[1] for ends in own.values())
    if not end_s > start_s:
        return None
    rows: dict[int, list[LaneSpan]] = {}
    for span in _spans(own):  # of layer 3: ``backward 3``; of layers 4 to 7: ``reduce 7-4``
        ends = [int(part) for part in span.label.split("-") if part]
        for layer in range(min(ends), max(ends) + 1) if ends else ():
            rows.setdefault(layer, []).append(span)
    lanes = tuple(
        TimelineLane(name=f"layer {n}", spans=tuple(spans))
        for n, spans in sorted(rows.items())[:_MOST_LAYERS]
    )
    more = len(rows) - len(lanes)
    left = f"; {more} more layers are not drawn" if more > 0 else ""
    timeline = Timeline(lanes=lanes, start_s=start_s, end_s=end_s, kinds=_kinds_of(lanes))
    title = f"{job.job_id}: iteration {number + 1} by layer{left}"
    return Folded(title=title, part=timeline)


class _Rates:
    """Who loads which link when."""

    def __init__(self, window: Window, jobs: Sequence[str], topology: Topology) -> None:
        self._window, self._jobs, self._topology = window, jobs, topology
        table, result = window.result.table, window.result
        begun = (result.start_s < window.end_s) & (result.sent_s > window.start_s)
        begun &= ~table.is_compute & ~result.skipped
        routes = table.routes
        owners = np.repeat(np.arange(len(table)), np.diff(routes.offsets))
        kept = begun[owners]
        self._links, self._tasks = routes.links[kept], owners[kept]
        # Names of jobs by the simulator's own numbers, which go by first appearance.
        numbered: dict[int, str] = {}
        for task in np.unique(self._tasks).tolist():
            name = cast("tuple[int, tuple[Any, ...]]", table.name_of(task))
            numbered.setdefault(int(table.jobs[task]), str(name[1][0]))
        self._numbered = numbered

    def busiest(self) -> list[int]:
        """Return each tier's links that carry most within the window for their rate."""
        sizes = self._window.result.table.sizes[self._tasks]
        carried = np.bincount(self._links, sizes, self._topology.num_links)
        shares = carried / self._topology.capacities_bytes_per_s
        tiers: dict[tuple[str, str], int] = {}
        found: list[int] = []
        for link in np.argsort(-shares, kind="stable").tolist():
            tier = self._tier(link)
            tiers[tier] = tiers.get(tier, 0) + 1
            if shares[link] > 0 and tiers[tier] <= _LINKS_OF_TIER and len(found) < _MOST_LINKS:
                found.append(link)
        return found

    def _tier(self, link: int) -> tuple[str, str]:
        nodes = self._topology.nodes
        ends = self._topology.link_sources[link], self._topology.link_targets[link]
        return nodes[int(ends[0])].kind, nodes[int(ends[1])].kind

    def lane(self, link: int) -> TimelineLane:
        """Return the row of a link."""
        ends = self._topology.links[link]
        rate = float(self._topology.capacities_bytes_per_s[link])
        tasks = self._tasks[self._links == link]
        jobs = self._window.result.table.jobs[tasks]
        loads = [
            self._load(self._numbered[number], tasks[jobs == number], rate)
            for number in np.unique(jobs).tolist()
        ]
        arrow = f"{ends.source} \N{RIGHTWARDS ARROW} {ends.target}"
        return TimelineLane(name=arrow, loads=tuple(load for load in loads if load is not None))

    def _load(self, name: str, tasks: npt.NDArray[np.int64], capacity: float) -> LaneLoad | None:
        moments, load = self._window.result.load_of(tasks.tolist())
        if not len(moments):
            return None
        shares = load / capacity
        place = self._jobs.index(name)
        return LaneLoad(
            kind=f"job{place % _COLOURS}",
            title=f"{name}: up to {format_bytes_per_s(float(shares.max() * capacity))}",
            times_s=tuple(moments.tolist()),
            shares=tuple(shares[:-1].tolist()),
        )
