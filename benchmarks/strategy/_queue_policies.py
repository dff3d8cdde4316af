"""When the jobs of a queue finish on a cluster under a scheduling policy.

Jobs hold all their GPUs or none. At the start of a round in which the set of jobs has changed, the
policy orders all jobs and gives GPUs to the first ones that still fit; the others are preempted at
no cost. Policies that group let jobs with equally many GPUs share them by turns where GPUs are
scarce (Muri, SIGCOMM'22): a job's iteration loads (storage, then host processor), computes and
sends, and jobs of a group start a quarter of the period apart, so that each resource has one user
at a time. A quarter lasts as long as its slowest user.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from fivefold.errors import ConfigurationError

GROUP_LIMIT = 4

Stages = tuple[float, float, float]

QUEUE_LIMITS_GPU_S = (3250.0, 7200.0, 18000.0)  # as Tiresias' simulator has them

_POLICIES: Mapping[str, tuple[str, bool]] = {
    "fifo": ("arrival", False),
    "srtf": ("remaining time", False),
    "srsf": ("remaining service", False),
    "las": ("attained service", False),
    "tiresias": ("queue of attained service", False),
    "themis": ("finish-time fairness", False),
    "muri_s": ("remaining service", True),
    "muri_l": ("attained service", True),
}
_MOVING = {"las", "tiresias", "themis"}  # the order changes while nobody comes or goes


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that waits for GPUs.

    Args:
        job_id: Its name.
        num_gpus: All needed at once.
        submit_s: When it arrives.
        iterations: How many it runs.
        iteration_s: Time of one, alone.
        stages_s: Loading, computing and sending within one; needed by policies that group.

    Raises:
        ConfigurationError: A number is not positive, or a time negative.

    Examples:
        >>> QueuedJob(job_id="a", num_gpus=8, submit_s=0.0, iterations=10, iteration_s=2.0).work_s
        20.0
    """

    job_id: str
    num_gpus: int
    submit_s: float
    iterations: int
    iteration_s: float
    stages_s: Stages | None = None

    def __post_init__(self) -> None:
        numbers = (self.num_gpus, self.iterations, self.iteration_s)
        if min(numbers) <= 0 or not math.isfinite(self.work_s):
            message = f"job {self.job_id!r} has GPUs, iterations, seconds {numbers}"
            raise ConfigurationError(message, hint="all three must be positive and finite")
        times = (self.submit_s, *(self.stages_s or ()))
        if not all(math.isfinite(one) and one >= 0.0 for one in times):
            message = f"job {self.job_id!r} has a time that is negative or not finite"
            raise ConfigurationError(message, hint="submit_s and stages_s are at least 0")

    @property
    def work_s(self) -> float:
        """Its run time, alone."""
        return self.iterations * self.iteration_s


@dataclass(frozen=True, kw_only=True)
class QueueResult:
    """When every job ended.

    Args:
        policy: Under which policy.
        end_s: By job.
        completion_s: From submission to end, by job.

    Examples:
        >>> QueueResult(policy="fifo", end_s={"a": 3.0}, completion_s={"a": 2.0}).mean_s
        2.0
    """

    policy: str
    end_s: Mapping[str, float]
    completion_s: Mapping[str, float]

    @property
    def mean_s(self) -> float:
        """Mean completion time."""
        return sum(self.completion_s.values()) / len(self.completion_s)

    @property
    def makespan_s(self) -> float:
        """When the last job ended."""
        return max(self.end_s.values())

    def percentile_s(self, share: float) -> float:
        """The completion time with index floor(share n) of the sorted ones, as Muri's authors do.

        Raises:
            ConfigurationError: ``share`` is not in [0, 1).
        """
        if not 0.0 <= share < 1.0:
            raise ConfigurationError(f"share={share} is not in [0, 1)", hint="0.99 for p99")
        return sorted(self.completion_s.values())[int(share * len(self.completion_s))]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Jobs, by number, that share the same GPUs."""

    jobs: tuple[int, ...]
    num_gpus: int


@dataclass
class _State:
    """What changes while the queue runs; jobs are numbers."""

    jobs: Sequence[QueuedJob]
    num_gpus: int
    policy: str
    slowdown: float
    now_s: float = 0.0
    left: list[float] = field(init=False)  # iterations
    ran_s: list[float] = field(init=False)
    end_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = [float(job.iterations) for job in self.jobs]
        self.ran_s = [0.0] * len(self.jobs)

    def period_s(self, members: Sequence[int]) -> float:
        """Iteration time of jobs that share GPUs."""
        if len(members) == 1:
            return self.jobs[members[0]].iteration_s
        stages = tuple(sorted(self.stages(job) for job in members))
        return self.slowdown * group_period_s(stages)

    def stages(self, job: int) -> Stages:
        stages = self.jobs[job].stages_s
        if stages is None:
            message = f"policy {self.policy!r} needs stages_s of job {self.jobs[job].job_id!r}"
            raise ConfigurationError(message, hint="give loading, computing and sending seconds")
        return stages

    def rank(self, number: int) -> tuple[float, float, int]:
        """Place in the order of the policy: smaller runs first."""
        job, order = self.jobs[number], _POLICIES[self.policy][0]
        remaining_s = self.left[number] * job.iteration_s
        value = {
            "arrival": job.submit_s,
            "remaining time": remaining_s,
            "remaining service": remaining_s * job.num_gpus,
            "attained service": self.ran_s[number] * job.num_gpus,
            "queue of attained service": sum(
                limit <= self.ran_s[number] * job.num_gpus for limit in QUEUE_LIMITS_GPU_S
            ),
            # The furthest behind goes first: time with others over time alone.
            "finish-time fairness": -(self.now_s - job.submit_s + remaining_s) / job.work_s,
        }[order]
        return value, job.submit_s, number

    def advance(self, group: _Group, start_s: float, until_s: float) -> None:
        """Run a group; a job that ends leaves its turns to the others at once."""
        now_s = start_s
        members = sorted((job for job in group.jobs), key=lambda job: self.left[job])
        while members and now_s < until_s:
            period_s = self.period_s(members)
            first_s = now_s + self.left[members[0]] * period_s
            stop_s = min(first_s, until_s)
            for job in members:
                self.ran_s[job] += stop_s - now_s
                self.left[job] -= (stop_s - now_s) / period_s
            if first_s <= until_s:
                done = members.pop(0)
                self.left[done] = 0.0
                self.end_s[done] = first_s
            now_s = stop_s


def run_queue(
    jobs: Sequence[QueuedJob], num_gpus: int, *, policy: str, round_s: float = 360.0,
    slowdown: float = 1.0,
) -> QueueResult:  # fmt: skip
    """When each job of a queue ends.

    Args:
        jobs: The queue, in any order.
        num_gpus: Of the cluster.
        policy: ``"fifo"``, ``"srtf"`` (shortest remaining time first), ``"srsf"`` (remaining time
            by GPUs), ``"las"`` (least attained service, GPUs times time, round by round: nothing of
            durations is known), ``"tiresias"`` (2D-LAS with its queues: a job moves down at each of
            ``QUEUE_LIMITS_GPU_S``, and in a queue who came first goes first; no promotion of jobs
            that starve), ``"themis"`` (finish-time fairness: who is furthest behind its time alone
            goes first; without auctions and placement), ``"muri_s"`` and ``"muri_l"`` (remaining
            and attained service, with jobs in groups).
        round_s: Decisions are taken at multiples of this time.
        slowdown: Iteration time of a group over that of ideal turns.

    References:
        Tiresias (NSDI 2019), Themis (NSDI 2020), Muri (SIGCOMM 2022).

    Raises:
        ConfigurationError: The policy is unknown, a job larger than the cluster or named twice.

    Examples:
        >>> queue = [QueuedJob(job_id="long", num_gpus=8, submit_s=0.0, iterations=1000,
        ...                    iteration_s=1.0),
        ...          QueuedJob(job_id="short", num_gpus=8, submit_s=10.0, iterations=10,
        ...                    iteration_s=1.0)]
        >>> run_queue(queue, 8, policy="fifo", round_s=100.0).completion_s["short"]
        1000.0
        >>> run_queue(queue, 8, policy="srtf", round_s=100.0).completion_s["short"]
        100.0
    """
    _check(jobs, num_gpus, policy=policy, round_s=round_s, slowdown=slowdown)
    state = _State(jobs=jobs, num_gpus=num_gpus, policy=policy, slowdown=slowdown)
    waiting = sorted(range(len(jobs)), key=lambda job: (jobs[job].submit_s, job), reverse=True)
    here: list[int] = []
    now_s = 0.0
    while waiting or here:
        while waiting and jobs[waiting[-1]].submit_s <= now_s:
            here.append(waiting.pop())
        state.now_s = now_s
        groups = _chosen(state, here)
        arrival_s = jobs[waiting[-1]].submit_s if waiting else math.inf
        change_s = min(arrival_s, _first_change_s(state, groups, now_s=now_s))
        if policy in _MOVING and sum(len(group.jobs) for group in groups) < len(here):
            change_s = now_s  # who waits may be ahead after the next round
        next_s = max(math.ceil(change_s / round_s), round(now_s / round_s) + 1) * round_s
        for group in groups:
            state.advance(group, now_s, next_s)
        here = [job for job in here if job not in state.end_s]
        now_s = next_s
    ends = {jobs[job].job_id: end for job, end in sorted(state.end_s.items())}
    spans = {jobs[job].job_id: end - jobs[job].submit_s for job, end in sorted(state.end_s.items())}
    return QueueResult(policy=policy, end_s=ends, completion_s=spans)


def _check(
    jobs: Sequence[QueuedJob], num_gpus: int, *, policy: str, round_s: float, slowdown: float
) -> None:
    if policy not in _POLICIES:
        message = f"policy {policy!r} is unknown"
        raise ConfigurationError(message, hint=f"use one of {', '.join(_POLICIES)}")
    if not jobs or len({job.job_id for job in jobs}) != len(jobs):
        message = f"{len(jobs)} jobs have {len({job.job_id for job in jobs})} names"
        raise ConfigurationError(message, hint="at least one job, each with a name of its own")
    if not round_s > 0.0 or not slowdown > 0.0 or not math.isfinite(round_s * slowdown):
        message = f"round_s={round_s}, slowdown={slowdown}"
        raise ConfigurationError(message, hint="both must be positive and finite")
    largest = max(jobs, key=lambda job: job.num_gpus)
    if largest.num_gpus > num_gpus:
        message = f"job {largest.job_id!r} needs {largest.num_gpus} GPUs of {num_gpus}"
        raise ConfigurationError(message, hint=f"at least {largest.num_gpus} GPUs, or leave it out")


def _first_change_s(state: _State, groups: Sequence[_Group], *, now_s: float) -> float:
    """When the first of the running jobs ends."""
    ends = (
        now_s + min(state.left[job] for job in group.jobs) * state.period_s(group.jobs)
        for group in groups
    )
    return min(ends, default=math.inf)


def _chosen(state: _State, here: Sequence[int]) -> list[_Group]:
    """What runs in the next rounds."""
    order = sorted(here, key=state.rank)
    if not _POLICIES[state.policy][1]:
        alone = [_Group(jobs=(job,), num_gpus=state.jobs[job].num_gpus) for job in order]
        return _fitting(alone, state.num_gpus)
    groups = _merged(state, _admitted(state, order))
    return _fitting(sorted(groups, key=lambda group: -group.num_gpus), state.num_gpus)


def _fitting(groups: Sequence[_Group], num_gpus: int) -> list[_Group]:
    """The first groups that still fit, one after the other."""
    found, free = [], num_gpus
    for group in groups:
        if group.num_gpus <= free:
            found.append(group)
            free -= group.num_gpus
    return found


def _admitted(state: _State, order: Sequence[int]) -> list[_Group]:
    """Each job that fits brings along the next ones of its size, up to a full group."""
    alike: dict[int, list[int]] = {}
    for job in order:
        alike.setdefault(state.jobs[job].num_gpus, []).append(job)
    taken, admitted, free = dict.fromkeys(alike, 0), set[int](), state.num_gpus
    for job in order:
        size = state.jobs[job].num_gpus
        if job not in admitted and size <= free:
            free -= size
            admitted.update(alike[size][taken[size] : taken[size] + GROUP_LIMIT])
            taken[size] += GROUP_LIMIT
    return [
        _Group(jobs=(job,), num_gpus=size)
        for size, jobs in alike.items()
        for job in jobs
        if job in admitted
    ]


def _merged(state: _State, groups: list[_Group]) -> list[_Group]:
    """Join groups of equal size, best pairs of each matching, until all fit."""
    wanted = sum(group.num_gpus for group in groups)
    while wanted > state.num_gpus:
        before, merged = wanted, []
        for size in dict.fromkeys(group.num_gpus for group in groups):
            alike = [group for group in groups if group.num_gpus == size]
            joined, saved = _joined(state, alike, excess=wanted - state.num_gpus)
            merged += joined
            wanted -= saved
        groups = merged
        if wanted == before:
            break
    return groups


def _joined(state: _State, groups: list[_Group], *, excess: int) -> tuple[list[_Group], int]:
    """Groups after joining pairs while more GPUs are wanted than there are; GPUs saved."""
    numbers = sorted({job for group in groups for job in group.jobs})
    place = {job: i for i, job in enumerate(numbers)}
    stages = [state.stages(job) for job in numbers]
    members = [tuple(place[job] for job in group.jobs) for group in groups]
    kept, saved = dict(enumerate(groups)), 0
    for a, b in match_groups(members, stages):
        if saved >= excess:
            break
        size = groups[a].num_gpus
        kept[a] = _Group(jobs=(*groups[a].jobs, *groups[b].jobs), num_gpus=size)
        del kept[b]
        saved += size
    return list(kept.values()), saved


@functools.lru_cache(maxsize=100_000)
def group_period_s(stages: tuple[Stages, ...]) -> float:
    """Common iteration time of jobs (loading, computing, sending) in their best order of turns."""
    if not 1 <= len(stages) <= GROUP_LIMIT:
        message = f"a group of {len(stages)} jobs cannot take turns at {GROUP_LIMIT} resources"
        raise ConfigurationError(message, hint=f"1 to {GROUP_LIMIT} jobs")
    others = itertools.permutations(range(1, GROUP_LIMIT), len(stages) - 1)
    return min(_period_s(stages, (0, *places)) for places in others)


def _period_s(stages: Sequence[Stages], places: Sequence[int]) -> float:
    """Period when each job starts in the quarter of its place.

    A quarter ends when those who compute or send in it have; two in a row also wait for who loads
    in them. The longest way once round the circle by such steps is the period.
    """
    single, double = [0.0] * GROUP_LIMIT, [0.0] * GROUP_LIMIT
    for (load, compute, send), place in zip(stages, places, strict=True):
        double[place] = load
        for quarter, seconds in ((place + 2, compute), (place + 3, send)):
            single[quarter % 4] = max(single[quarter % 4], seconds)
    one_load = (
        double[q] + single[(q + 2) % GROUP_LIMIT] + single[(q + 3) % GROUP_LIMIT] for q in range(4)
    )
    return max(sum(single), *one_load, double[0] + double[2], double[1] + double[3])


def match_groups(
    groups: Sequence[tuple[int, ...]], stages: Sequence[Stages]
) -> list[tuple[int, int]]:
    """Pairs of groups that use the resources best together, as numbers of groups."""
    graph = nx.Graph()
    for a, b in itertools.combinations(range(len(groups)), 2):
        together = (*groups[a], *groups[b])
        if len(together) <= GROUP_LIMIT:
            chosen = tuple(sorted(stages[job] for job in together))
            used_s = sum(map(sum, chosen))
            if used_s > 0.0:
                graph.add_edge(a, b, weight=used_s / group_period_s(chosen))
    return sorted((min(pair), max(pair)) for pair in nx.max_weight_matching(graph))
