"""Rules for NCCL's example tuner plugin: which algorithm and protocol, by collective and size.

A stock NCCL runs no schedule of ours, but it can be told which of its own to take. The times are
those of the closed form on the topology's tiers, with the constants of NCCL's own tuner, so that
they know what NCCL cannot see: what lies behind the adapters.

Reference: NVIDIA/nccl, plugins/tuner/example (the rules), src/graph/tuning.cc (the constants),
src/enqueue.cc (channels).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing.closed_form import collective_time_s
from fivefold.collectives.pricing.fabric import FabricSpec, Group, Groups
from fivefold.collectives.pricing.phases import ranks_by_host
from fivefold.collectives.pricing.software import (
    NVLINK_SHARE,
    SOFTWARE,
    fabrics_reached,
    protocols_of,
    software_of,
)
from fivefold.errors import UnsupportedError
from fivefold.network.topology import Topology

Floats = npt.NDArray[np.float64]

# As the plugin calls them, with the kind that the closed form knows. NCCL's reduce goes along the
# ring as its broadcast does.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "broadcast",
}
_TREES = protocols_of(
    ("LL", 1 / 3.8, 6.8, 0.6, 5.0),
    ("LL128", 120 / 128, 14.0, 1.25, 8.5),
    ("Simple", 1.0, 8.4, 4.0, 14.0),
    inside_share=NVLINK_SHARE,
)
_NVLS = ("nvls", "nvls_tree")
_NVLS_SHARE = 0.85  # of NVLinks, on Hopper
_NVLS_STEP_S, _NVLS_NET_S = 25e-6, 20.9e-6
_LEAST_NVLS = 3  # GPUs of a host, below which NCCL sets none up
_PAT_SHARE, _PAT_BASE_S, _PAT_STEP_S, _PAT_RANK_S = 0.75, 8e-6, 4e-6, 2.8e-6
_MOST_CHANNELS = 64  # NCCL's own number takes its place where that is smaller
# Bytes that a channel gets at least, threads of a block by NCCL's threshold; a ring's LL for each
# rank.
_CHANNEL_BYTES = {"LL": 512 * 8, "LL128": 640 * 8, "Simple": 512 * 64}
_FIRST, _LAST = 11, 34  # powers of two: sizes below the first and from the last on are one each
_LARGEST_BYTES = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class TunerRule:
    """One line of the file: the first one that fits a call, and that NCCL can run, counts."""

    collective: str  # as the plugin calls it
    least_bytes: int  # of the larger of input and output
    most_bytes: int
    algorithm: str  # ring, tree, nvls, nvls_tree or pat
    protocol: str  # ll, ll128 or simple
    channels: int  # thread blocks at most
    hosts: int  # of the communicator
    ranks: int  # of the communicator
    time_s: float  # predicted, at the size in the middle of the first power of two

    @property
    def choice(self) -> tuple[str, str, int]:
        """Return what the rule asks for."""
        return self.algorithm, self.protocol, self.channels


@dataclass(frozen=True)
class _Way:
    """One algorithm with one protocol."""

    algorithm: str
    protocol: str
    collectives: tuple[str, ...]
    time_s: Callable[[str, Floats, _Shape], Floats]
    sure: bool = False  # whether every NCCL has it everywhere

    def fits(self, collective: str, shape: _Shape) -> bool:
        if collective not in self.collectives:
            return False
        alone = shape.per_host == 1
        return {
            "tree": shape.ranks > 1,
            "pat": alone,
            "nvls": shape.hosts == 1 and shape.per_host >= _LEAST_NVLS,
            "nvls_tree": shape.hosts > 1 and shape.per_host >= _LEAST_NVLS,
        }.get(self.algorithm, True)

    def channels(self, least_bytes: int, shape: _Shape) -> int:
        """Return the channels that NCCL would take at a size, up to the most that it may have."""
        if self.algorithm not in {"ring", "tree"}:
            return _MOST_CHANNELS
        each = _CHANNEL_BYTES[self.protocol]
        each *= shape.ranks if (self.algorithm, self.protocol) == ("ring", "LL") else 1
        return min(max(least_bytes // each, 1), _MOST_CHANNELS)


@dataclass(frozen=True)
class _Shape:
    """Groups of so many hosts and ranks of each, with their sister groups at work."""

    hosts: int
    per_host: int
    stride: int
    mesh: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host


def nccl_tuner_rules(topology: Topology) -> list[TunerRule]:
    """Return rules for all groups of a cluster, those of all ranks first.

    Groups have all hosts, one, or a power of two, and of each host all ranks, one, or a power of
    two. Where the fastest is not in every NCCL (LL128, NVLS, PAT), the next best follows it.

    Args:
        topology: A cluster of GPUs that run NCCL, with as many on every host.

    Raises:
        ConfigurationError: Hosts differ in their number of ranks.
        UnsupportedError: The ranks run another library, or there is only one.

    Examples:
        >>> from fivefold.network.topology import named_topology
        >>> rules = nccl_tuner_rules(named_topology("dgx_a100", boxes=2))
        >>> rules[0].collective, rules[0].algorithm, rules[0].protocol, rules[0].ranks
        ('allreduce', 'tree', 'll', 16)
    """
    library = software_of(topology)
    if library.key != "nccl" or topology.num_ranks < 2:
        what = "one rank" if topology.num_ranks < 2 else f"ranks that run {library.name}"
        raise UnsupportedError(
            f"{topology.name} has {what}: there is nothing that NCCL could choose",
            hint="name a cluster of several NVIDIA GPUs, such as dgx_h100:4",
        )
    ways = _ways(topology)
    return [
        rule
        for shape in _shapes(topology)
        for collective in _COLLECTIVES
        for rule in _rules(ways, collective, shape)
    ]


def tuner_csv(name: str, rules: Iterable[TunerRule]) -> str:
    """Return the file of the rules for a cluster of a name, as the plugin reads it."""
    shown = " ".join(name.split())[:80]  # the plugin takes a line of 256 characters for two
    lines = [
        f"# NCCL's algorithms on {shown}, predicted by fivefold",
        "# NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=(this file)",
        "# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks",
    ]
    for rule in rules:
        fields = (
            rule.collective, rule.least_bytes, rule.most_bytes, *rule.choice, rule.hosts,
            rule.ranks,
        )  # fmt: skip
        lines.append(",".join(map(str, fields)))
    return "\n".join(lines) + "\n"


def _shapes(topology: Topology) -> list[_Shape]:
    hosts = ranks_by_host(topology, range(topology.num_ranks))
    each = len(hosts[0])
    shapes = [
        _Shape(many, some, 1 if many == 1 else each // some, topology.num_ranks)
        for many, some in itertools.product(_parts(len(hosts)), _parts(each))
        if many * some > 1
    ]
    return sorted(shapes, key=lambda shape: (-shape.ranks, -shape.hosts))


def _parts(number: int) -> list[int]:
    """Return the powers of two that divide a number, and the number."""
    powers = (1 << k for k in range(number.bit_length()))
    return sorted({*(power for power in powers if number % power == 0), number})


def _ways(topology: Topology) -> list[_Way]:
    rings = SOFTWARE["nccl"].protocols
    # Where each host has one rank, a ring's steps are as exposed as a tree's.
    bare = [replace(ring, across_s=tree.across_s) for ring, tree in zip(rings, _TREES, strict=True)]
    fabrics = fabrics_reached(topology, [*rings, *bare, *_TREES])
    count = len(rings)
    names = [ring.name for ring in rings]
    ways = [
        _Way("ring", name, tuple(_COLLECTIVES), _ring_s(hosts, alone), name != "LL128")
        for name, hosts, alone in zip(
            names, fabrics[:count], fabrics[count : 2 * count], strict=True
        )
    ]
    ways += [
        _Way("tree", name, ("allreduce",), _tree_s(fabric), name != "LL128")
        for name, fabric in zip(names, fabrics[2 * count :], strict=True)
    ]
    plain = _without_times(fabrics[count - 1])
    ways.append(_Way("pat", "Simple", ("allgather", "reducescatter"), _pat_s(plain)))
    nodes = {node.name: node for node in topology.nodes}
    summing = {nodes[one.node].host for one in topology.switches if one.aggregation is not None}
    if {node.host for node in nodes.values() if node.is_rank} <= summing - {None}:
        ways += [_Way(name, "Simple", ("allreduce",), _nvls_s(plain)) for name in _NVLS]
    return ways


def _without_times(fabric: FabricSpec) -> FabricSpec:
    return replace(
        fabric, tiers=tuple(replace(tier, base_s=0.0, hop_s=0.0) for tier in fabric.tiers)
    )


def _ring_s(hosts: FabricSpec, alone: FabricSpec) -> Callable[[str, Floats, _Shape], Floats]:
    def time_s(collective: str, sizes: Floats, shape: _Shape) -> Floats:
        kind = _COLLECTIVES[collective]
        kind = "all_reduce_by_ring" if kind == "all_reduce" else kind
        return _times_s(alone if shape.per_host == 1 else hosts, kind, sizes, shape)

    return time_s


def _tree_s(fabric: FabricSpec) -> Callable[[str, Floats, _Shape], Floats]:
    return lambda _, sizes, shape: _times_s(fabric, "all_reduce_by_tree", sizes, shape)


def _pat_s(fabric: FabricSpec) -> Callable[[str, Floats, _Shape], Floats]:
    def time_s(collective: str, sizes: Floats, shape: _Shape) -> Floats:
        moved_s = _times_s(fabric, _COLLECTIVES[collective], sizes, shape) / _PAT_SHARE
        steps = (shape.hosts - 1).bit_length()
        return moved_s + _PAT_BASE_S + steps * _PAT_STEP_S + shape.ranks * _PAT_RANK_S

    return time_s


def _nvls_s(fabric: FabricSpec) -> Callable[[str, Floats, _Shape], Floats]:
    """Price the sum in the host's switch, and a tree of hosts for each rank's share."""
    inside = fabric.tiers[0].rate_bytes_per_s * _NVLS_SHARE

    def time_s(_: str, sizes: Floats, shape: _Shape) -> Floats:
        steps = 2 * (shape.hosts - 1).bit_length()
        rails = replace(shape, per_host=1, stride=fabric.gpus_per_node)
        across_s = _times_s(fabric, "all_reduce_by_tree", sizes / shape.per_host, rails)
        return np.maximum(sizes / inside, across_s) + _NVLS_STEP_S + steps * _NVLS_NET_S

    return time_s


def _times_s(fabric: FabricSpec, kind: str, sizes: Floats, shape: _Shape) -> Floats:
    count = np.ones(sizes.shape, dtype=np.int64)
    group = Group(size=shape.ranks, stride=shape.stride, ranks=shape.mesh)
    groups = Groups(size=group.size * count, stride=group.stride * count, ranks=shape.mesh * count)
    return collective_time_s(fabric, kind, size_bytes=sizes, group=groups)


def _rules(ways: Sequence[_Way], collective: str, shape: _Shape) -> Iterator[TunerRule]:
    """Return the rules of one collective: neighbouring sizes of one choice are one rule each."""
    fitting = [way for way in ways if way.fits(collective, shape)]
    powers = range(_FIRST - 1, _LAST + 1)
    middles = np.array([2.0 ** (power + 0.5) for power in powers])
    times = np.array([way.time_s(collective, middles, shape) for way in fitting])
    found: list[tuple[int, list[TunerRule]]] = []
    for at, power in enumerate(powers):
        least = 0 if at == 0 else 1 << power
        rules = []
        for number in np.argsort(times[:, at], kind="stable").tolist():
            way = fitting[number]
            rules.append(
                TunerRule(
                    collective=collective, least_bytes=least, most_bytes=_LARGEST_BYTES,
                    algorithm=way.algorithm, protocol=way.protocol.lower(),
                    channels=way.channels(least, shape), hosts=shape.hosts, ranks=shape.ranks,
                    time_s=float(times[number, at]),
                )
            )  # fmt: skip
            if way.sure:
                break
        if not found or [one.choice for one in found[-1][1]] != [one.choice for one in rules]:
            found.append((least, rules))
    ends = [least - 1 for least, _ in found[1:]] + [_LARGEST_BYTES]
    for (_, rules), end in zip(found, ends, strict=True):
        yield from (replace(rule, most_bytes=end) for rule in rules)
