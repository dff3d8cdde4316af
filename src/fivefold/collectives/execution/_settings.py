"""What the backend is told: by :func:`configure`, by environment variables, or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fivefold.collectives.lowering import Program, check_program, from_msccl_xml, lower
from fivefold.collectives.pricing.software import ENGINE_MESSAGE_S, SOFTWARE, Software
from fivefold.collectives.schedules import Schedule
from fivefold.errors import ConfigurationError, require_number, require_one_of, require_whole
from fivefold.network.aggregation import AggregationOptions
from fivefold.network.aggregation.wire import parse_address
from fivefold.network.topology import Link, Node, Topology, parse_topology, read_topology, switch

CHOOSABLE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_TOPOLOGY = "FIVEFOLD_TOPOLOGY"
_ALGORITHMS = "FIVEFOLD_ALGORITHMS"
_LAB = "FIVEFOLD_LAB"
_AGGREGATION = "FIVEFOLD_AGGREGATION"
_LEAST = {"max_pieces": 1, "min_piece_bytes": 1, "aggregation_min_bytes": 0, "shared_cores": 0}
_TIMES = ("message_s", "inner_message_s", "message_work_s")
_ASSUMED_BYTES_PER_S = 1.25e9
_ASSUMED_LATENCY_S = 25e-6
_UNSHAPED_BYTES_PER_S = 1e9  # about what one machine's processors carry
_ETHERNET_MTU, _TCP_HEADER_BYTES, _FRAME_HEADER_BYTES = 1500, 52, 14


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the backend; groups keep those of the moment in which they were made.

    Args:
        topology: Network between the ranks of the whole job; None asks ``FIVEFOLD_TOPOLOGY``, then
            the lab, and else assumes equal links.
        inner: Backend that carries messages and does what fivefold does not: ``"gloo"``,
            ``"nccl"``; None takes gloo on CPUs and NCCL on GPUs.
        algorithms: For each collective ``"auto"``, ``"inner"``, or the name of an algorithm of
            the library, of ``"trees"`` or of a registered one.
        message_s: Software cost of one of the backend's messages, for predictions.
        inner_message_s: Software cost of one of the inner backend's messages.
        message_work_s: Processor time of one of the backend's messages, at both ends together.
        shared_cores: Processor cores that all ranks share, as in the lab; 0 where each rank has
            its own. None asks the lab, and else is 0.
        shared_link_share: What a link carries of its capacity where several connections meet on
            it: they never share it quite evenly, and the plan waits for the slowest.
        margin: Share by which an algorithm must be predicted faster than the inner backend.
        max_pieces: Largest number of parts that chunks are cut into to be pipelined.
        min_piece_bytes: No part is smaller.
        aggregation: ``host:port`` of a software aggregation switch, which then sums all-reduces
            of tensors on CPUs; None asks ``FIVEFOLD_AGGREGATION``, and else there is none.
        aggregation_min_bytes: Smallest all-reduce that goes to the switch.
        aggregation_options: How the switch is used; None for the defaults.
        software: The communication library that predictions are of, its protocols in place of the
            times above; None for this backend's own messages over gloo.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    topology: Topology | None = None
    inner: str | None = None
    algorithms: Mapping[str, str] = field(default_factory=dict)
    message_s: float = ENGINE_MESSAGE_S
    inner_message_s: float = SOFTWARE["gloo"].protocols[0].across_s
    message_work_s: float = SOFTWARE["gloo"].work_s
    shared_cores: int | None = None
    shared_link_share: float = SOFTWARE["gloo"].shared_link_share
    margin: float = 0.03
    max_pieces: int = 32
    min_piece_bytes: int = 1 << 16
    aggregation: str | None = None
    aggregation_min_bytes: int = 1 << 16
    aggregation_options: AggregationOptions | None = None
    software: Software | None = None

    def __post_init__(self) -> None:
        if self.inner not in (None, "gloo", "nccl"):
            raise ConfigurationError(f"inner must be 'gloo' or 'nccl'; got {self.inner!r}")
        if self.aggregation is not None:
            parse_address(self.aggregation)
        if not isinstance(self.algorithms, Mapping):
            raise ConfigurationError(
                f"algorithms must be a mapping; got {self.algorithms!r:.60}",
                hint="write it as {'all_reduce': 'ring'}",
            )
        for name in self.algorithms:
            require_one_of(name, CHOOSABLE, f"algorithms names {name!r}")
        for what, least in _LEAST.items():
            if getattr(self, what) is not None or what != "shared_cores":
                require_whole(what, getattr(self, what), least=least)
        for what in _TIMES:
            require_number(what, getattr(self, what))
        if require_number("margin", self.margin) >= 1:
            raise ConfigurationError(f"margin must be in [0, 1); got {self.margin}")
        share = require_number("shared_link_share", self.shared_link_share, positive=True)
        if share > 1:
            raise ConfigurationError(f"shared_link_share must be in (0, 1]; got {share}")

    def algorithm_of(self, collective: str) -> str:
        """Return what is asked for one collective."""
        return self.algorithms.get(collective, "auto")


_current = Settings()
_registered: dict[str, tuple[Program, int, int]] = {}


def configure(**changes: Any) -> Settings:
    """Change the settings of groups that are made from now on.

    Args:
        **changes: Fields of :class:`Settings`; ``topology`` may also be what
            :func:`parse_topology` reads, such as a path.

    Raises:
        ConfigurationError: There is no such setting, or a value is not allowed.

    Examples:
        >>> before = current_settings()
        >>> configure(algorithms={"all_reduce": "ring"}).algorithm_of("all_reduce")
        'ring'
        >>> _ = configure(algorithms=before.algorithms)
    """
    global _current  # noqa: PLW0603 - torch makes the groups: there is no other way to tell them
    for name in changes:
        require_one_of(name, Settings.__dataclass_fields__, f"there is no setting {name!r}")
    if isinstance(changes.get("topology"), str | Path):
        changes["topology"] = parse_topology(str(changes["topology"]))
    _current = replace(_current, **changes)
    return _current


def current_settings() -> Settings:
    """Return what groups made now would use, environment included.

    Raises:
        ConfigurationError: An environment variable cannot be understood.
    """
    algorithms = {**_algorithms_from(os.environ.get(_ALGORITHMS, "")), **_current.algorithms}
    topology = _current.topology
    if topology is None and os.environ.get(_TOPOLOGY):
        topology = parse_topology(os.environ[_TOPOLOGY])
    cores = _current.shared_cores
    if cores is None:  # the lab's hosts are processes of one machine
        cores = len(os.sched_getaffinity(0)) if os.environ.get(_LAB) else 0
    return replace(
        _current,
        algorithms=algorithms,
        topology=topology,
        aggregation=_current.aggregation or os.environ.get(_AGGREGATION) or None,
        shared_cores=cores,
    )


def _algorithms_from(text: str) -> dict[str, str]:
    found = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, sign, algorithm = item.partition("=")
        if not sign:
            raise ConfigurationError(
                f"{_ALGORITHMS} holds {item!r}", hint="write it as all_reduce=ring,all_gather=inner"
            )
        found[name.strip()] = algorithm.strip()
    return found


def topology_of(settings: Settings, world_size: int) -> tuple[Topology, bool]:
    """Return the network between all ranks of a job."""
    if settings.topology is not None:
        found = settings.topology
        if found.num_ranks != world_size:
            raise ConfigurationError(
                f"the topology {found.name} has {found.num_ranks} ranks, the job {world_size}",
                hint="start as many processes, or describe the network that the job runs on",
            )
        return found, True
    lab = lab_topology(os.environ.get(_LAB, ""), world_size)
    if lab is not None:
        return lab, True
    assumed = switch(world_size, bandwidth=_ASSUMED_BYTES_PER_S, latency=_ASSUMED_LATENCY_S)
    return assumed, False


def runs_own(settings: Settings, collective: str) -> bool:
    """Return whether a collective may run by an algorithm of its own.

    All-to-alls do so only where an algorithm is named or registered: their sizes may differ from
    rank to rank, so that the ranks have to tell each other first, and of the library's algorithms
    none is predicted to be faster than the inner backend's direct exchange.
    """
    asked = settings.algorithm_of(collective)
    if collective == "all_to_all" and asked == "auto":
        own = (program.collective.name for program, _, _ in _registered.values())
        return collective in own
    return asked != "inner"


def lab_topology(facts: str, world_size: int) -> Topology | None:
    """Return the network that the lab says it emulates."""
    if not facts:
        return None
    data = json.loads(facts)
    if not data.get("shaped") or data.get("nproc_per_host") != 1:
        return None
    described = data.get("topology")
    topology = read_topology(described) if described else _star(data)
    # Rates count whole Ethernet frames; of a frame only this share is a program's data.
    mtu = data.get("mtu") or _ETHERNET_MTU
    whole = topology.scaled(bandwidth=(mtu - _TCP_HEADER_BYTES) / (mtu + _FRAME_HEADER_BYTES))
    return whole if whole.num_ranks == world_size else None


def _star(data: dict[str, Any]) -> Topology:
    own = data["host_rates_bytes_per_s"]
    middle, links = Node("switch", "switch"), []
    hosts = [Node(f"host{host}", "gpu") for host in range(data["hosts"])]
    for host, node in enumerate(hosts):
        rate = own.get(str(host), data["rate_bytes_per_s"]) or _UNSHAPED_BYTES_PER_S
        half_s = data["delay_s"] / 2
        links += [
            Link(*ends, bandwidth_bytes_per_s=rate, latency_s=half_s)
            for ends in ((node.name, middle.name), (middle.name, node.name))
        ]
    return Topology("lab", [*hosts, middle], links)


def register_algorithm(
    name: str, source: Schedule | Program | str | Path, *, min_bytes: int = 0, max_bytes: int = 0
) -> Program:
    """Add an algorithm that groups of its size may choose, or be told to take.

    Args:
        name: Name to choose it by.
        source: A schedule, a program, or the path of an MSCCL XML file.
        min_bytes: Smallest message that it is for.
        max_bytes: Largest message that it is for; 0 has no limit.

    Returns:
        The program, checked.

    Raises:
        ConfigurationError: The name is taken by the backend itself, or a size is no
            whole number from 0.
        ProgramError: The program does not compute what it says.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_reduce
        >>> register_algorithm("my ring", build_algorithm("ring", all_reduce(4))).num_ranks
        4
    """
    if name in {"auto", "inner", "trees"}:
        raise ConfigurationError(f"the name {name!r} has a meaning already")
    require_whole("min_bytes", min_bytes, least=0)
    require_whole("max_bytes", max_bytes, least=0)
    if isinstance(source, Schedule):
        program = lowered(source)
    elif isinstance(source, Program):
        program = source
    else:
        program = from_msccl_xml(source)
    computed = program.collective.name
    require_one_of(
        computed, CHOOSABLE, f"{name} computes {computed}, which the backend does not run"
    )
    check_program(program)
    sizes = min_bytes or program.min_bytes, max_bytes or program.max_bytes
    _registered[name] = (program, *sizes)
    return program


def lowered(schedule: Schedule, pieces: int = 1) -> Program:
    """Return the program of a schedule as the backend runs it, chunks cut into so many pieces."""
    in_place = schedule.collective.name in {"all_reduce", "broadcast"}
    return lower(schedule, instances=pieces, in_place=in_place, queue_slots=None, relay=False)


def registered_algorithms() -> dict[str, tuple[Program, int, int]]:
    """Return all that were registered: program, smallest and largest message."""
    return dict(_registered)
