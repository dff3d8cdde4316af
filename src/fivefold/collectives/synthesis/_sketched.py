"""A sketch applied to a topology: the logical links, rules and symmetries that a router sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.schedules import Collective
from fivefold.collectives.synthesis._instance import (
    UNREACHABLE,
    Logical,
    all_reduce_halves,
    boxes_of,
    hops_from,
    logical_of,
    map_chunks,
    map_links,
)
from fivefold.collectives.synthesis._sketch import Connections, Policy, Sketch, SwitchSketch
from fivefold.collectives.synthesis._solver import check_time
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import Topology

_CHEAP_CONNECTIONS = 2_000  # logical links between boxes that a router can look at


@dataclass(frozen=True)
class Sketched:
    """Sketch applied to a collective on a topology."""

    logical: Logical
    sketch: Sketch
    symmetries: tuple[NDArray[np.int32], ...]
    policies: NDArray[np.int64]
    allowed: NDArray[np.bool_]


def rotation(offset: int, size: int, *, num_ranks: int) -> NDArray[np.int32]:
    """Return the permutation r -> (r mod size + offset) mod size + (r div size) * size."""
    if num_ranks % size:
        message = f"symmetry [{offset}, {size}] does not divide {num_ranks} ranks"
        raise ConfigurationError(message, hint="give a size that divides the number of ranks")
    ranks = np.arange(num_ranks)
    return ((ranks % size + offset) % size + ranks // size * size).astype(np.int32)


def sketched(collective: Collective, topology: Topology, sketch: Sketch) -> Sketched:
    """Apply a sketch."""
    count = topology.num_ranks
    if count % sketch.boxes:
        message = f"sketch {sketch.name!r} is for {sketch.boxes} boxes, but there are {count} ranks"
        fitting = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise ConfigurationError(message, hint=f"boxes may be {', '.join(fitting)}")
    size = count // sketch.boxes
    _check_ranks(sketch, size)
    boxes = [range(box * size, (box + 1) * size) for box in range(sketch.boxes)]
    logical = logical_of(collective, topology, allow=_allow(sketch, size), boxes=boxes)
    allowed = _allowed(logical, sketch, size)
    _check_ways(logical, allowed, sketch)
    permutations = tuple(rotation(*pair, num_ranks=count) for pair in sketch.symmetry)
    for permutation in permutations:
        map_links(logical, permutation)
        map_chunks(logical, permutation)
    return Sketched(logical, sketch, permutations, _policies(logical, sketch, size), allowed)


def _allow(sketch: Sketch, size: int) -> Callable[[int, int], bool]:
    """Return which logical links, from rank to rank, a sketch of boxes of this size has."""

    def allow(source: int, target: int) -> bool:
        inside = source // size == target // size
        return inside or sketch.connects(source % size, target % size)

    return allow


def _check_ranks(sketch: Sketch, size: int) -> None:
    named = [rank for switch in sketch.switches for rank in switch.ranks]
    for table in (sketch.connections, sketch.senders):
        if table is not None and not isinstance(table, str):
            named += [*table, *(rank for ranks in table.values() for rank in ranks)]
    if max(named, default=0) >= size:
        message = f"sketch {sketch.name!r} names rank {max(named)}, but a box has {size} ranks"
        raise ConfigurationError(message, hint="ranks of a sketch are counted inside a box")


def _policies(logical: Logical, sketch: Sketch, size: int) -> NDArray[np.int64]:
    signs = {"uc-min": 1, "uc-max": -1, "any": 0}
    policies = np.zeros(logical.num_links, np.int64)
    sources, targets = logical.sources, logical.targets
    inside = sources // size == targets // size
    for switch in sketch.switches:
        under = np.isin(sources % size, switch.ranks) & np.isin(targets % size, switch.ranks)
        policies[inside & under] = signs[switch.policy]
    return policies


def _allowed(logical: Logical, sketch: Sketch, size: int) -> NDArray[np.bool_]:
    """Let chunks leave the box that holds them only through the sender of a rank that does."""
    allowed = np.ones((logical.num_chunks, logical.num_links), np.bool_)
    if sketch.senders is None:
        return allowed
    sender_of = {rank: sender for sender, ranks in sketch.senders.items() for rank in ranks}
    for chunk, holders in enumerate(logical.holders):
        check_time()
        for holder in holders:
            if (sender := sender_of.get(holder % size)) is not None:
                leaves = logical.crosses & (logical.sources // size == holder // size)
                allowed[chunk] &= ~leaves | (logical.sources % size == sender)
    return allowed


def _check_ways(logical: Logical, allowed: NDArray[np.bool_], sketch: Sketch) -> None:
    for chunk, holders in enumerate(logical.holders):
        check_time()
        ends = logical.sources[allowed[chunk]], logical.targets[allowed[chunk]]
        hops = hops_from(holders, *ends, logical.num_ranks)
        lost = [rank for rank in sorted(logical.wanted[chunk]) if hops[rank] == UNREACHABLE]
        if lost:
            message = f"sketch {sketch.name!r} leaves no way for chunk {chunk} from rank"
            hint = "allow more connections or senders"
            raise InfeasibleError(f"{message} {sorted(holders)} to rank {lost[0]}", hint=hint)


def derive_sketch(
    topology: Topology, collective: Collective, *, size_bytes: float = 1e6, name: str = "derived"
) -> Sketch:
    """Return a sketch from what the topology itself shows.

    Boxes are its hosts (where they are equal and follow one another), switches are those that
    join ranks of a box, connections between boxes are all there are, or one rail per rank where
    all would be too many, and symmetries are the rotations inside and across boxes that leave
    links, rates and the collective unchanged.

    Args:
        topology: Where.
        collective: What is to be done; a sum is looked at as its inverse.
        size_bytes: Size of the collective: small ones prefer many connections per switch.
        name: Name of the sketch.

    Raises:
        ConfigurationError: Ranks of collective and topology differ, or ``size_bytes`` is no
            size.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> from fivefold.network.topology import ring
        >>> derive_sketch(ring(4), all_gather(4)).symmetry
        ((1, 4),)
    """
    collective.chunk_bytes(size_bytes)  # refuses what is no size
    copied, place = collective, topology
    if collective.name == "all_reduce":
        copied = all_reduce_halves(collective)[0]
    elif collective.reducing:
        copied, place = collective.inverted(), topology.reversed()
    hosts = boxes_of(topology)
    in_order = [rank for host in hosts for rank in host] == list(range(topology.num_ranks))
    boxes = len(hosts) if in_order and len(set(map(len, hosts))) == 1 else 1
    logical = logical_of(copied, place)
    size = topology.num_ranks // boxes
    plan = Sketch(name=name, boxes=boxes, connections=_connections(logical, size))
    logical = logical_of(copied, place, allow=_allow(plan, size))
    switches = _switches(logical, size, size_bytes)
    return replace(plan, switches=switches, symmetry=_symmetries(logical))


def _connections(logical: Logical, size: int) -> Connections:
    """Choose rails where each rank has one and boxes can spread what comes in, or all are many.

    Behind a switch between boxes a rank's connections share its link: rails cost no more.
    """
    if size == logical.num_ranks:
        return "all"
    crossing = np.flatnonzero(logical.crosses)
    rails = logical.sources[crossing] % size == logical.targets[crossing] % size
    boxes = logical.num_ranks // size
    railed = int(rails.sum()) >= boxes * (boxes - 1) * size and not bool(rails.all())
    switched = all(len(logical.resources[link]) > 1 for link in crossing.tolist())
    copies = max((len(ranks) for ranks in logical.wanted), default=0) > 1
    many = len(crossing) > _CHEAP_CONNECTIONS
    return "direct-map" if railed and ((switched and copies) or many) else "all"


def _switches(logical: Logical, size: int, size_bytes: float) -> tuple[SwitchSketch, ...]:
    """Return the ranks of the first box that reach one another through a switch."""
    groups: dict[int, set[int]] = {}
    ends = zip(logical.sources.tolist(), logical.targets.tolist(), strict=True)
    for (source, target), route in zip(ends, logical.resources, strict=True):
        if source < size and target < size and len(route) == 2:
            switch = int(logical.topology.link_targets[route[0]])
            if logical.topology.nodes[switch].host == logical.topology.host_of(source):
                groups.setdefault(switch, set()).update((source, target))
    if not groups:
        return ()
    chunk_bytes = float(np.max(logical.collective.chunk_bytes(size_bytes), initial=0.0))
    sending_s = float(np.median(chunk_bytes * logical.seconds_per_byte()))
    policy: Policy = "uc-max" if sending_s < float(np.median(logical.latencies_s)) else "uc-min"
    ranks = sorted({tuple(sorted(group)) for group in groups.values()})
    return tuple(SwitchSketch(ranks=group, policy=policy) for group in ranks)


def _symmetries(logical: Logical) -> tuple[tuple[int, int], ...]:
    """Return the rotations that keep links, rates, sharing and chunks, the widest blocks first.

    Their group must move every rank: a symmetry that leaves a rank where it is would forbid it to
    treat two equal neighbours one after the other.
    """
    count = logical.num_ranks
    found: list[tuple[int, int]] = []
    generators: list[tuple[int, ...]] = []
    group = {tuple(range(count))}
    for block in reversed(_divisors(count)):
        for offset in _divisors(block)[:-1]:
            check_time()
            permutation = rotation(offset, block, num_ranks=count)
            element = tuple(permutation.tolist())
            if element in group:
                break
            larger = _generated([*generators, element])
            if larger is not None and _keeps(logical, permutation):
                found.append((offset, block))
                generators.append(element)
                group = larger
                break  # a smaller offset generates the larger ones
    return tuple(found)


def _generated(generators: list[tuple[int, ...]]) -> set[tuple[int, ...]] | None:
    """Return the group of these, None if anything but the identity leaves a rank where it is."""
    ranks = range(len(generators[0]))
    group, fresh = {tuple(ranks)}, [tuple(ranks)]
    while fresh:
        check_time()
        member = fresh.pop()
        for one in generators:
            product = tuple(member[rank] for rank in one)
            if product in group:
                continue
            # A group that moves every rank has at most as many members as ranks.
            if len(group) == len(ranks) or any(product[rank] == rank for rank in ranks):
                return None
            group.add(product)
            fresh.append(product)
    return group


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _keeps(logical: Logical, permutation: NDArray[np.int32]) -> bool:
    try:
        image = map_links(logical, permutation)
        map_chunks(logical, permutation)
    except ConfigurationError:
        return False
    prices = np.stack([logical.latencies_s, logical.seconds_per_byte()])
    if not np.array_equal(prices, prices[:, image]):
        return False
    shared: dict[int, int] = {}
    for link, other in enumerate(image.tolist()):
        route, mapped = logical.resources[link], logical.resources[other]
        if len(route) != len(mapped):
            return False
        for resource, becomes in zip(route, mapped, strict=True):
            if shared.setdefault(resource, becomes) != becomes:
                return False
    return len(set(shared.values())) == len(shared)
