"""The dragonfly: groups of fully connected routers, and global links between all groups."""

from __future__ import annotations

import itertools

from fivefold.errors import ConfigurationError
from fivefold.network.topology._build import Builder, Wire, check_count
from fivefold.network.topology._regular import DEFAULT_BANDWIDTH
from fivefold.network.topology._topology import Topology


def dragonfly(
    routers_per_group: int,
    *,
    ranks_per_router: int | None = None,
    global_links: int | None = None,
    groups: int | None = None,
    bandwidth: str | float = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
    global_latency: str | float | None = None,
) -> Topology:
    """Ranks on routers, routers of a group all joined, groups joined by global links.

    Global link i of a group leads to the group i + 1 further on (modulo the number of groups), in
    rounds where there are more links than other groups; links that would leave groups unequally
    joined are left out. Unbalanced values are allowed; the balanced dragonfly has
    ``routers_per_group = 2 ranks_per_router = 2 global_links``, which are the defaults.

    Args:
        routers_per_group: Routers in each group, a.
        ranks_per_router: Ranks at each router, p; None for a/2 (at least 1).
        global_links: Global links at each router, h; None for a/2 (at least 1).
        groups: Groups, 1 to a h + 1; None for the most.
        bandwidth: Of each link.
        latency: Of each link at and between the routers of a group.
        global_latency: Of each global link; None for ``latency``.

    Returns:
        The topology.

    Raises:
        ConfigurationError: There are more groups than global links can join.

    References:
        Kim, Dally, Scott, Abts: Technology-driven, highly-scalable dragonfly topology, ISCA 2008.

    Examples:
        >>> network = dragonfly(4)
        >>> network.num_ranks, network.num_nodes, network.is_connected()
        (72, 108, True)
    """
    a = routers_per_group
    check_count("routers_per_group", a)
    p = max(a // 2, 1) if ranks_per_router is None else ranks_per_router
    h = max(a // 2, 1) if global_links is None else global_links
    for what, value in (("ranks_per_router", p), ("global_links", h)):
        check_count(what, value)
    most = a * h + 1
    number = most if groups is None else groups
    check_count("groups", number)
    if number > most:
        raise ConfigurationError(
            f"{a} routers with {h} global links each join at most {most} groups; got {number}",
            hint="use fewer groups, or more routers or global links",
        )
    builder, near = Builder(), Wire(bandwidth, latency)
    far = Wire(bandwidth, latency if global_latency is None else global_latency)
    routers = [_add_group(builder, group, (a, p), near) for group in range(number)]
    if number > 1:
        _join_groups(builder, routers, global_links=h, wire=far)
    return builder.done(f"dragonfly:{a},p={p},h={h},g={number}")


def _add_group(builder: Builder, group: int, size: tuple[int, int], wire: Wire) -> list[str]:
    num_routers, num_ranks = size
    routers = []
    for router in range(num_routers):
        name = f"group{group}/router{router}"
        ranks = builder.row(f"{name}/gpu", num_ranks)
        routers.append(builder.node(name, "switch"))
        for rank in ranks:
            builder.join(rank, routers[-1], wire)
    for first, second in itertools.combinations(routers, 2):
        builder.join(first, second, wire)
    return routers


def _join_groups(
    builder: Builder, routers: list[list[str]], *, global_links: int, wire: Wire
) -> None:
    number = len(routers)
    rounds = len(routers[0]) * global_links // (number - 1)
    for turn, (first, second) in itertools.product(
        range(rounds), itertools.combinations(range(number), 2)
    ):
        # Both ends count their own links: the partner's distance is the rest of the circle.
        there = turn * (number - 1) + (second - first) - 1
        back = turn * (number - 1) + number - (second - first) - 1
        builder.join(
            routers[first][there // global_links], routers[second][back // global_links], wire
        )
