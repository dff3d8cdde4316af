"""Graphs of directly joined nodes: rings, meshes, tori, cubes, the single switch, the dragonfly.

Every neighbouring pair has one link each way. A dimension of size 2 has one link, wrapped or not,
and one of size 1 has none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from fivefold.errors import ConfigurationError
from fivefold.network.topology._build import Builder, Wire, check_count
from fivefold.network.topology._topology import Topology

DEFAULT_BANDWIDTH = "25 GB/s"


def ring(
    num_ranks: int, *, bandwidth: str | float = DEFAULT_BANDWIDTH, latency: str | float = 0.0
) -> Topology:
    """Build a cycle of ranks, links both ways; two ranks have one link each way.

    Args:
        num_ranks: Number of ranks, from 1.
        bandwidth: Of each link, such as ``"25 GB/s"``; a number is bytes per second.
        latency: Of each link, such as ``"1 us"``; a number is seconds.

    Examples:
        >>> ring(8).num_links, ring(2).num_links
        (16, 2)
    """
    return _grid("ring", (num_ranks,), wrap=True, wire=Wire(bandwidth, latency))


def line(
    num_ranks: int, *, bandwidth: str | float = DEFAULT_BANDWIDTH, latency: str | float = 0.0
) -> Topology:
    """Build a chain of ranks, links both ways; arguments as of ``ring``."""
    return _grid("line", (num_ranks,), wrap=False, wire=Wire(bandwidth, latency))


def mesh(
    shape: Sequence[int],
    *,
    bandwidth: str | float | Sequence[str | float] = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
) -> Topology:
    """Build a grid without wrap-around; rank = position in row-major order of ``shape``.

    Args:
        shape: Ranks along each dimension, such as ``(4, 4)``.
        bandwidth: Of each link; a sequence gives one value per dimension.
        latency: Of each link, such as ``"1 us"``; a number is seconds.

    Examples:
        >>> mesh((3, 4)).num_links
        34
    """
    return _grid("mesh", shape, wrap=False, wire=_wires(bandwidth, latency))


def torus(
    shape: Sequence[int],
    *,
    bandwidth: str | float | Sequence[str | float] = DEFAULT_BANDWIDTH,
    latency: str | float = 0.0,
) -> Topology:
    """Build a ``mesh`` with wrap-around.

    Examples:
        >>> torus((4, 4)).num_links, len(torus((4, 2, 3)).out_links(0))
        (64, 5)
    """
    return _grid("torus", shape, wrap=True, wire=_wires(bandwidth, latency))


def hypercube(
    dimensions: int, *, bandwidth: str | float = DEFAULT_BANDWIDTH, latency: str | float = 0.0
) -> Topology:
    """Build ranks 0 to 2^d - 1; those whose numbers differ in one bit are neighbours.

    ``dimensions`` are the bits d, 0 for a single rank; links as of ``ring``.
    """
    check_count("dimensions of a hypercube", dimensions, low=0)
    builder, wire = Builder(), Wire(bandwidth, latency)
    names = builder.row("gpu", 2**dimensions)
    for rank, bit in itertools.product(range(2**dimensions), range(dimensions)):
        if not rank >> bit & 1:
            builder.join(names[rank], names[rank | 1 << bit], wire)
    return builder.done(f"hypercube:{dimensions}")


def fully_connected(
    num_ranks: int, *, bandwidth: str | float = DEFAULT_BANDWIDTH, latency: str | float = 0.0
) -> Topology:
    """Build a link each way between every two ranks; arguments as of ``ring``."""
    check_count("num_ranks", num_ranks)
    builder, wire = Builder(), Wire(bandwidth, latency)
    for first, second in itertools.combinations(builder.row("gpu", num_ranks), 2):
        builder.join(first, second, wire)
    return builder.done(f"fully_connected:{num_ranks}")


def star(
    num_ranks: int, *, bandwidth: str | float = DEFAULT_BANDWIDTH, latency: str | float = 0.0
) -> Topology:
    """Build rank 0 in the middle, a link each way to every other rank; no switch.

    Arguments as of ``ring``; ``num_ranks`` counts the middle one.
    """
    check_count("num_ranks", num_ranks)
    builder, wire = Builder(), Wire(bandwidth, latency)
    middle, *others = builder.row("gpu", num_ranks)
    for other in others:
        builder.join(middle, other, wire)
    return builder.done(f"star:{num_ranks}")


def switch(
    num_ranks: int, *, bandwidth: str | float = DEFAULT_BANDWIDTH, latency: str | float = 0.0
) -> Topology:
    """Build ranks on one non-blocking switch; a message passes two links, each with the latency.

    Examples:
        >>> switch(4).num_links, len(switch(4).shortest_route(0, 3))
        (8, 2)
    """
    check_count("num_ranks", num_ranks)
    builder, wire = Builder(), Wire(bandwidth, latency)
    names = builder.row("gpu", num_ranks)
    middle = builder.node("switch0", "switch")
    for name in names:
        builder.join(name, middle, wire)
    return builder.done(f"switch:{num_ranks}")


def _wires(
    bandwidth: str | float | Sequence[str | float], latency: str | float
) -> Wire | list[Wire]:
    if isinstance(bandwidth, str | int | float):
        return Wire(bandwidth, latency)
    return [Wire(rate, latency) for rate in bandwidth]


def _grid(name: str, shape: Sequence[int], *, wrap: bool, wire: Wire | list[Wire]) -> Topology:
    if not isinstance(shape, Collection) or not len(shape):
        raise ConfigurationError(f"a {name} needs a shape; got {shape!r}", hint="such as (4, 4)")
    for size in shape:
        check_count(f"every dimension of a {name}", size)
    wires = wire if isinstance(wire, list) else [wire] * len(shape)
    if len(wires) != len(shape):
        raise ConfigurationError(
            f"a {name} of shape {tuple(shape)} got {len(wires)} bandwidths",
            hint=f"give one for all, or {len(shape)}: one per dimension",
        )
    check_count(f"the product of the dimensions of a {name}", math.prod(shape))
    builder = Builder()
    names = builder.row("gpu", math.prod(shape))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        for axis, size in enumerate(shape):
            forward = (place[axis] + 1) % size
            # Two in a dimension are neighbours once; a mesh does not wrap.
            if forward == place[axis] + 1 or (wrap and size > 2):
                neighbour = rank + (forward - place[axis]) * strides[axis]
                builder.join(names[rank], names[neighbour], wires[axis])
    return builder.done(f"{name}:{'x'.join(map(str, shape))}")


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
    """Build ranks on routers, routers of a group all joined, groups joined by global links.

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
