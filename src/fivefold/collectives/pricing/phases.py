"""A collective on a graph: phases of flows that end together, and the time that they take alone.

Rings, two trees, halving and doubling, a hierarchy, trees of aggregating switches, and schedules
that were synthesised, each as bytes per edge and steps of latency.
These are the closed forms of the schedules in ``fivefold.collectives.algorithms`` (a test compares
them), without an object per chunk, so that hundreds of jobs can be simulated.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fivefold.errors import InfeasibleError
from fivefold.network.topology import Topology

Algorithm = Literal[
    "ring", "ring_or_tree", "tree", "halving_doubling", "synthesized", "hierarchical", "in_network"
]
"""``"ring"``: one ring over all ranks. ``"ring_or_tree"``: as NCCL does, rings over every adapter
of a host, and for small all-reduces ``"tree"``: two trees of hosts. ``"halving_doubling"``: pairs
exchange halves, quarters and so on, the nearest most. ``"synthesized"``: what a search on the
topology found. ``"hierarchical"``: inside hosts first, then one ring per place in the host.
``"in_network"``: switches aggregate."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
TREE_SHARE = 0.92  # of a ring's bandwidth, as NCCL's tuner has it
Edge = tuple[int, int]
Tree = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Phase:
    """Flows that one step of a collective keeps going at one rate, after a wait."""

    edges: tuple[Edge, ...]
    edge_bytes: float
    steps: int
    tree: Tree | None = None
    coupled: bool = True
    wait_s: float = 0.0


def collective_phases(
    topology: Topology,
    group: tuple[int, ...],
    kind: str,
    size_bytes: float,
    *,
    algorithm: Algorithm = "ring",
    roots: Sequence[str] = (),
    every_port: bool = False,
) -> list[list[Phase]]:
    """Return the phases of one collective of a group, one after the other."""
    number = len(group)
    if number == 1:
        return []
    if kind == "all_to_all":
        pairs = tuple((a, b) for a in group for b in group if a != b)
        return [[Phase(pairs, size_bytes / number, steps=1, coupled=False)]]
    rounds = 2 if kind == "all_reduce" else 1
    if algorithm == "halving_doubling":
        return [[step] for step in _halving_doubling(group, kind, size_bytes)]
    hosts = ranks_by_host(topology, group)
    equal = len({len(own) for own in hosts}) == 1
    if algorithm in {"ring", "ring_or_tree", "tree"} or (every_port and not equal):
        if (
            rounds == 2
            and len(hosts) > 1
            and (
                algorithm == "tree"
                or (algorithm == "ring_or_tree" and _tree_is_faster(topology, hosts, size_bytes))
            )
        ):
            return [_two_trees(hosts, size_bytes)]
        if algorithm == "ring" and not every_port:
            hosts = [tuple(group)]  # one ring, whatever the hosts
        return [_rings(hosts, rounds * size_bytes, rounds=rounds)]
    if not equal:
        raise InfeasibleError(
            f"{group} has not the same number of ranks on each host", hint="use the ring there"
        )
    if algorithm == "in_network" and rounds == 1:
        algorithm = "hierarchical"
    return _by_host(topology, hosts, kind, size_bytes, algorithm=algorithm, roots=roots)


def _by_host(
    topology: Topology, hosts: list[tuple[int, ...]], kind: str, size_bytes: float, *,
    algorithm: Algorithm, roots: Sequence[str],
) -> list[list[Phase]]:  # fmt: skip
    local, rounds = len(hosts[0]), 2 if kind == "all_reduce" else 1
    inside = [_ring(own, size_bytes, rounds=1) for own in hosts] if local > 1 else []
    columns = [tuple(own[place] for own in hosts) for place in range(local)]
    share = size_bytes / local
    across: list[Phase] = []
    if len(hosts) > 1 and algorithm == "hierarchical":
        across = [_ring(column, rounds * share, rounds=rounds) for column in columns]
    elif len(hosts) > 1:
        across = [
            _tree_phase(topology, column, root, share)
            for column, root in zip(columns, roots, strict=True)
        ]
    steps = {"reduce_scatter": (inside, across), "all_gather": (across, inside)}.get(
        kind, (inside, across, inside)
    )
    return [step for step in steps if step]


def _ring(order: Sequence[int], sent_bytes: float, *, rounds: int) -> Phase:
    """Let every rank pass on all but its own share: once to scatter, once to gather."""
    number = len(order)
    edges = tuple((order[i], order[(i + 1) % number]) for i in range(number))
    return Phase(edges, sent_bytes * (number - 1) / number, steps=rounds * (number - 1))


def _rings(hosts: list[tuple[int, ...]], sent_bytes: float, *, rounds: int) -> list[Phase]:
    """Return as many rings as the smallest host has members; each leaves a host by another one.

    So all ports of that host carry a share, as the closed form over tiers counts on.
    """
    rings, number = min(map(len, hosts)), sum(map(len, hosts))
    if rings == 1 or len(hosts) == 1:
        return [_ring([rank for own in hosts for rank in own], sent_bytes, rounds=rounds)]
    passed = sent_bytes * (number - 1) / number / rings
    across = tuple(
        (own[(i - 1) % len(own)], further[i])
        for own, further in zip(hosts, (*hosts[1:], hosts[0]), strict=True)
        for i in range(rings)
    )
    phases = []
    for members in sorted({len(own) for own in hosts}):
        inside = tuple(
            (own[i], own[(i + 1) % members])
            for own in hosts
            if len(own) == members
            for i in range(members)
        )
        # Each ring goes through all members but one link, another one for each ring.
        share = passed * rings * (members - 1) / members
        phases.append(Phase(inside, share, steps=rounds * (number - len(hosts))))
    return [*phases, Phase(across, passed, steps=rounds * (len(hosts) - 1))]


def _two_trees(hosts: list[tuple[int, ...]], size_bytes: float) -> list[Phase]:
    """Return two trees of hosts, each for half of the data, up and down; a chain inside hosts.

    Hosts that pass on in one tree are leaves of the other one (Sanders, Speck and Traeff, 2009).
    Each member of a host has trees of its own, as rings have.
    """
    number, rails = len(hosts), min(map(len, hosts))
    across = [
        (order[place][rail], order[(place - 1) // 2][rail])
        for order in (hosts, hosts[::-1])
        for place in range(1, number)
        for rail in range(rails)
    ]
    depth = number.bit_length() - 1
    phases = []
    for members in sorted({len(own) for own in hosts if len(own) > 1}):
        inside = [
            (own[i], own[(i + 1) % members])
            for own in hosts
            if len(own) == members
            for i in range(members if members > 2 else 1)
        ]
        share = size_bytes * (members - 1) / members if members > 2 else size_bytes
        phases.append(Phase(_both_ways(inside), share, steps=2 * (members - 1)))
    return [*phases, Phase(_both_ways(across), size_bytes / rails / 2, steps=2 * depth)]


def _both_ways(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    return (*edges, *((target, source) for source, target in edges))


def _tree_is_faster(topology: Topology, hosts: list[tuple[int, ...]], size_bytes: float) -> bool:
    """Return what a library's tuner finds: latency of a route, and the rate of its narrowest link.

    A ring passes by every rank; a tree has the depth of its hosts, and 0.92 of a ring's rate. Over
    two hosts each sends half of the data up and half down, else a host that passes on all of it
    twice (NCCL's tuning.cc; as measured on two hosts, where trees beat what rings can reach).
    """
    if len(hosts) < 2:
        return False

    def cost(source: int, target: int) -> tuple[float, float]:
        links = list(topology.shortest_route(source, target))
        latencies, rates = topology.latencies_s, topology.capacities_bytes_per_s
        return float(latencies[links].sum()), float(rates[links].min())

    latency_s, rate = cost(hosts[0][0], hosts[-1][0])
    inside_s = cost(*hosts[0][:2])[0] if len(hosts[0]) > 1 else 0.0
    units, ranks, rails = len(hosts), sum(map(len, hosts)), min(map(len, hosts))
    ring_s = 2 * max((units - 1) * latency_s, (ranks - units) * inside_s)
    ring_s += 2 * size_bytes * (ranks - 1) / ranks / rails / rate
    tree_s = 2 * max((units.bit_length() - 1) * latency_s, (len(hosts[0]) - 1) * inside_s)
    tree_s += (1 if units == 2 else 2) * size_bytes / rails / rate / TREE_SHARE
    return tree_s < ring_s


def _halving_doubling(group: Sequence[int], kind: str, size_bytes: float) -> list[Phase]:
    """Return the steps of recursive halving, doubling, or both; the nearest exchange most.

    Ranks beyond a power of two give what they have to a partner, and take the result from it.
    """
    number = len(group)
    power = 1 << (number.bit_length() - 1)
    own = size_bytes if kind == "all_reduce" else size_bytes / number
    pairs = tuple((group[power + i], group[i]) for i in range(number - power))
    halving = [
        Phase(
            tuple((group[i], group[i ^ 1 << k]) for i in range(power)), size_bytes / (2 << k),
            steps=1, coupled=False,
        )
        for k in range(power.bit_length() - 1)
    ]  # fmt: skip
    whole = size_bytes if kind != "reduce_scatter" else own
    before = size_bytes if kind != "all_gather" else own
    into = [Phase(pairs, before, steps=1, coupled=False)] if pairs else []
    out = [Phase(tuple((b, a) for a, b in pairs), whole, steps=1, coupled=False)] if pairs else []
    middle = {"all_gather": halving[::-1], "reduce_scatter": halving}.get(
        kind, [*halving, *halving[::-1]]
    )
    return [*into, *middle, *out]


def _tree_phase(topology: Topology, leaves: Sequence[int], root: str, size_bytes: float) -> Phase:
    tree = aggregation_tree(topology, tuple(leaves), root)
    if tree is None:
        raise InfeasibleError(
            f"switch {root!r} cannot aggregate for ranks {tuple(leaves)}",
            hint="choose another root, or a host algorithm",
        )
    return Phase(tuple((rank, rank) for rank in leaves), size_bytes, steps=1, tree=tree)


def ranks_by_host(topology: Topology, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks by host, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        host = topology.host_of(rank)
        groups.setdefault(host if host is not None else f"rank {rank}", []).append(rank)
    return [tuple(group) for group in groups.values()]


def host_groups(topology: Topology, ranks: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return ranks by host, in order of first appearance; None where hosts have unequal numbers."""
    groups = ranks_by_host(topology, ranks)
    return groups if len({len(group) for group in groups}) == 1 else None


def phases_time_s(
    topology: Topology,
    phases: Sequence[Phase],
    *,
    route: Callable[[Edge], tuple[int, ...]],
    slots: int = 0,
) -> float:
    """Return the seconds of phases that run side by side, with the network to themselves.

    Flows add up on the links that they share.
    """
    loads = np.zeros(topology.num_links)
    slowest_s = latency_s = 0.0
    for phase in phases:
        latency_s = max(latency_s, phase.wait_s)
        if phase.tree is not None:
            rate, delay_s = _tree_rate(topology, slots, phase.tree)
            slowest_s = max(slowest_s, phase.edge_bytes / rate)
            latency_s = max(latency_s, delay_s)
            routes: list[tuple[int, ...]] = [tree_links(topology, phase.tree)]
        else:
            routes = [route(edge) for edge in phase.edges]
            delay_s = max((route_latency_s(topology, links) for links in routes), default=0.0)
            latency_s = max(latency_s, phase.wait_s + phase.steps * delay_s)
        links = np.fromiter(itertools.chain.from_iterable(routes), np.int64)
        np.add.at(loads, links, phase.edge_bytes)
    busiest_s = float((loads / topology.capacities_bytes_per_s).max(initial=0.0))
    return max(slowest_s, busiest_s) + latency_s


@functools.lru_cache(maxsize=1 << 17)
def route_latency_s(topology: Topology, route: tuple[int, ...]) -> float:
    """Return the latency of a path."""
    return float(topology.latencies_s[list(route)].sum())


@functools.lru_cache(maxsize=1 << 14)
def aggregation_tree(topology: Topology, leaves: tuple[int, ...], root: str) -> Tree | None:
    """Return child and parent of each node of the tree of shortest paths to a root."""
    parents = _toward(topology, topology.index(root), {topology.node_of_rank(r) for r in leaves})
    tree: dict[str, str] = {}
    for rank in leaves:
        node = topology.node_of_rank(rank)
        while topology.nodes[node].name != root:
            if node not in parents:
                return None
            above = parents[node]
            tree[topology.nodes[node].name] = topology.nodes[above].name
            node = above
    found = tuple(sorted(tree.items()))
    if any(topology.ability_of(name).aggregation is None for name in tree_switches(found)):
        return None
    return found


def tree_switches(tree: Tree) -> list[str]:
    """Return the nodes in which streams meet, and the root: the others, such as NICs, pass on."""
    streams = Counter(parent for _, parent in tree)
    children = {child for child, _ in tree}
    return [name for name, number in streams.items() if number > 1 or name not in children]


def _toward(topology: Topology, root: int, wanted: set[int]) -> dict[int, int]:
    """Return the next node on a shortest way to the root, by links that exist both ways."""
    parents: dict[int, int] = {}
    frontier, missing = [root], wanted - {root}
    while frontier and missing:
        further = []
        for node in frontier:
            out = {int(topology.link_targets[link]) for link in topology.out_links(node)}
            for link in topology.in_links(node):
                child = int(topology.link_sources[link])
                if child != root and child not in parents and child in out:
                    parents[child] = node
                    missing.discard(child)
                    if not topology.is_rank[child]:  # ranks do not forward
                        further.append(child)
        frontier = further
    return parents


@functools.lru_cache(maxsize=1 << 14)
def tree_links(topology: Topology, tree: Tree) -> tuple[int, ...]:
    """Return the links of a tree, up and down for each edge: between two nodes the widest."""
    found = []
    for child, parent in tree:
        for ends in ((child, parent), (parent, child)):
            links = topology.out_links(topology.index(ends[0]))
            links = links[topology.link_targets[links] == topology.index(ends[1])]
            found.append(int(links[np.argmax(topology.capacities_bytes_per_s[links])]))
    return tuple(found)


def _tree_rate(topology: Topology, slots: int, tree: Tree) -> tuple[float, float]:
    """Return what adders and slots of a tree allow, and its latency."""
    links = tree_links(topology, tree)
    delays = {
        child: float(topology.latencies_s[up] + topology.latencies_s[down])
        for (child, _), up, down in zip(tree, links[::2], links[1::2], strict=True)
    }
    above = dict(tree)
    delay_s = 0.0
    for child in above:
        node, total = child, 0.0
        while node in above:
            total += delays[node]
            node = above[node]
        delay_s = max(delay_s, total)
    rate = np.inf
    for node in set(above.values()):
        ability = topology.ability_of(node).aggregation
        if ability is None:  # it only passes on
            continue
        if ability.rate_bytes_per_s is not None:
            rate = min(rate, ability.rate_bytes_per_s)
        if delay_s > 0:
            rate = min(rate, slots * ability.slot_bytes / delay_s)
    return rate, delay_s
