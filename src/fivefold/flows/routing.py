"""Which path each flow takes: hashed, least loaded, or by the intensity of its job.

References:
    Crux, SIGCOMM 2024 (paths in decreasing GPU intensity).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, require_number, require_one_of, require_whole
from fivefold.flows.paths import PathChoices, equal_cost_paths
from fivefold.network.topology import Topology

RoutePolicy = Literal["hash", "least_loaded", "intensity"]
"""``"hash"``: equal-cost paths by a hash of the flow, as ECMP does. ``"least_loaded"``: the
largest flows first, each on the path whose fullest link stays emptiest. ``"intensity"``: the same,
job by job in decreasing intensity."""

FloatArray = npt.NDArray[np.float64]
Path = tuple[int, ...]


@dataclass(frozen=True)
class Routing:
    """The path of every flow of every job.

    Attributes:
        topology: The graph.
        traffic: The jobs.
        paths: Of each job, by its name, the links of each of its flows.
        policy: What chose them.
    """

    topology: Topology
    traffic: tuple[JobTraffic, ...]
    paths: Mapping[str, tuple[Path, ...]]
    policy: str

    @cached_property
    def jobs(self) -> Mapping[str, JobTraffic]:
        """Return the jobs by name."""
        return {job.job_id: job for job in self.traffic}

    def link_bytes(self, job_id: str) -> FloatArray:
        """Return the bytes that one iteration of a job puts on each link, float64 [num_links]."""
        require_one_of(job_id, self.jobs, f"there is no job {job_id!r}")
        return self._link_bytes[job_id]

    @cached_property
    def _link_bytes(self) -> dict[str, FloatArray]:
        found = {job.job_id: np.zeros(self.topology.num_links) for job in self.traffic}
        for job in self.traffic:
            for flow, path in zip(job.flows, self.paths[job.job_id], strict=True):
                np.add.at(found[job.job_id], np.asarray(path, np.intp), flow.size_bytes)
            found[job.job_id].flags.writeable = False
        return found

    def communication_s(self, job_id: str) -> float:
        """Return seconds of a job's communication with the network to itself: its fullest link."""
        loads = self.link_bytes(job_id)
        return float((loads / self.topology.capacities_bytes_per_s).max(initial=0.0))

    def intensity(self, job_id: str) -> float:
        """Return compute work per second of communication; infinite where nothing is sent."""
        seconds = self.communication_s(job_id)
        return self.jobs[job_id].gpu_work / seconds if seconds > 0 else float("inf")

    def shared_links(self, job_a: str, job_b: str) -> npt.NDArray[np.intp]:
        """Return the links that both jobs use."""
        return np.flatnonzero((self.link_bytes(job_a) > 0) & (self.link_bytes(job_b) > 0))


def route_flows(
    topology: Topology,
    traffic: Sequence[JobTraffic],
    *,
    policy: RoutePolicy = "hash",
    seed: int = 0,
) -> Routing:
    """Choose a path for each flow among those of fewest links.

    Other ranks forward only where there is no path without them.

    A hashed path depends on the seed, on the flow's ranks and number among its job's flows between
    them, and on the pairs of ranks of all flows of the job; where several jobs have the same pairs,
    on the job's number among those. So names, sizes and other jobs change no hashed path.

    Args:
        topology: The graph.
        traffic: The jobs.
        policy: What chooses.
        seed: Of the hash, at least 0.

    Raises:
        ConfigurationError: The policy is unknown, the seed is negative, two jobs have one name,
            or a rank does not exist.
        InfeasibleError: A flow has no path.

    Examples:
        >>> from fivefold.flows import FlowDemand
        >>> from fivefold.network.topology import switch
        >>> job = JobTraffic(job_id="a", compute_s=1.0, flows=(FlowDemand(0, 1, 5e9),))
        >>> route_flows(switch(3), [job]).paths["a"]
        ((0, 3),)
    """
    require_one_of(policy, get_args(RoutePolicy), f"there is no policy {policy!r}")
    seed = require_whole("seed", seed, least=0)
    names = [job.job_id for job in traffic]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(
            f"two jobs are called {twice!r}", hint="give each a name of its own"
        )
    choices = _Choices(topology)
    alike: Counter[int] = Counter()  # jobs met so far, by their pairs of ranks
    hashed: dict[str, tuple[Path, ...]] = {}
    for job in traffic:
        pairs = [(flow.source, flow.target) for flow in job.flows]
        content = _digest(pairs)
        met: Counter[tuple[int, int]] = Counter()
        paths = []
        for ends in pairs:
            key = seed, *ends, met[ends], content, alike[content]
            at = choices.of(*ends)
            paths.append(at[_digest(key) % len(at)])
            met[ends] += 1
        hashed[job.job_id] = tuple(paths)
        alike[content] += 1
    start = Routing(topology, tuple(traffic), hashed, "hash")
    if policy == "hash":
        return start
    groups = [list(traffic)]
    if policy == "intensity":
        # Work per second of communication with the network to itself, on hashed paths, as
        # published; equal jobs in the order given.
        groups = [[job] for job in sorted(traffic, key=lambda job: -start.intensity(job.job_id))]
    return Routing(topology, tuple(traffic), _least_loaded(start, groups, choices), policy)


class _Choices:
    """Paths between ranks, found once per pair."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._found: dict[tuple[int, int], PathChoices] = {}

    def of(self, source: int, target: int) -> PathChoices:
        """Return the paths between two ranks, each pair looked up once."""
        pair = source, target
        if pair not in self._found:
            self._found[pair] = equal_cost_paths(self._topology, *pair, relay=True)
        return self._found[pair]

    def least_loaded(self, flow: FlowDemand, preferred: Path, busy_s: FloatArray) -> Path:
        """Return the path whose fullest link stays emptiest, then the least in sum.

        Among equals the preferred one, else the first after it, then from the front.
        """
        paths = self.of(flow.source, flow.target)
        if len(paths) == 1:
            return preferred
        links = paths.links()
        after = busy_s[links] + flow.size_bytes / self._topology.capacities_bytes_per_s[links]
        fullest, total = after.max(axis=1), after.sum(axis=1)
        at = int(np.flatnonzero((links == preferred).all(axis=1))[0])
        turned = (np.arange(len(paths)) - at) % len(paths)
        chosen: Path = paths[int(np.lexsort((turned, total, fullest))[0])]
        return chosen


def _digest(value: object) -> int:
    """Return a number that is the same in every process, other than ``hash``."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big")


def _least_loaded(
    hashed: Routing, groups: Sequence[Sequence[JobTraffic]], choices: _Choices
) -> dict[str, tuple[Path, ...]]:
    """Group by group, the largest flows first; each where the fullest link stays emptiest."""
    # Among equals the hashed path is taken, so that jobs that do not see one another do not all
    # choose the first one.
    capacities = hashed.topology.capacities_bytes_per_s
    busy_s = np.zeros(len(capacities))  # seconds that the bytes put on each link so far take
    chosen = {name: list(paths) for name, paths in hashed.paths.items()}
    for group in groups:
        flows = [(job.job_id, n, flow) for job in group for n, flow in enumerate(job.flows)]
        for name, n, flow in sorted(flows, key=lambda entry: -entry[2].size_bytes):
            path = choices.least_loaded(flow, chosen[name][n], busy_s)
            links = np.asarray(path)
            busy_s[links] += flow.size_bytes / capacities[links]
            chosen[name][n] = path
    return {name: tuple(paths) for name, paths in chosen.items()}


@dataclass(frozen=True)
class FlowDemand:
    """Bytes from one rank to another in one iteration.

    Args:
        source: Rank that sends.
        target: Rank that receives.
        size_bytes: Bytes per iteration.

    Raises:
        ConfigurationError: The ranks are equal, or a number is negative.
    """

    source: int
    target: int
    size_bytes: float

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            rank = require_whole(f"{name} of a flow", getattr(self, name), least=0)
            object.__setattr__(self, name, rank)
        if self.source == self.target:
            raise ConfigurationError(
                f"a flow leads from one rank to another; got {self.source} to {self.target}"
            )
        object.__setattr__(
            self, "size_bytes", require_number("size_bytes of a flow", self.size_bytes)
        )


@dataclass(frozen=True, kw_only=True)
class JobTraffic:
    """A job that computes, sends, and begins again.

    Args:
        job_id: Its name.
        compute_s: Seconds of compute per iteration that no communication overlaps.
        flows: What it sends after computing, all at once.
        weight: How much a second of it counts.
        work: Compute work of an iteration, in any unit that all jobs share (GPU seconds, FLOP);
            None takes the GPU seconds: ``compute_s`` times the ranks that take part.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    job_id: str
    compute_s: float
    flows: tuple[FlowDemand, ...]
    weight: float = 1.0
    work: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flows", tuple(self.flows))
        if not isinstance(self.job_id, str) or not self.job_id:
            message = f"a job needs a name; got {self.job_id!r}"
            raise ConfigurationError(message, hint="give job_id as text")
        for flow in self.flows:
            if not isinstance(flow, FlowDemand):
                raise ConfigurationError(f"flows of job {self.job_id!r} hold {flow!r:.40}")
        who = f"of job {self.job_id!r}"
        require_number(f"compute_s {who}", self.compute_s)
        require_number(f"weight {who}", self.weight, positive=True)
        if self.work is not None:
            require_number(f"work {who}", self.work)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that send or receive, ascending."""
        return tuple(sorted({rank for flow in self.flows for rank in (flow.source, flow.target)}))

    @property
    def gpu_work(self) -> float:
        """Compute work of an iteration."""
        return self.compute_s * max(1, len(self.ranks)) if self.work is None else self.work
