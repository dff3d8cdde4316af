"""Times of collectives on a fabric of tiers, as arrays: one entry per group.

A ring over a group leaves a unit by the shares of all its members inside. Ranks lie on units in
their order, so a group that does not divide a unit lies across two in some places: all its places
are looked at, and the slowest counts. Latencies follow NCCL's own model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing.fabric import FabricSpec, Group, Groups
from fivefold.collectives.pricing.phases import TREE_SHARE
from fivefold.errors import require_number, require_one_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Places:
    """Positions of groups on the tiers, one entry for each way in which a group lies on them."""

    row: Ints | None
    size: Ints
    units: list[Ints]
    members: list[Ints]


def _places(fabric: FabricSpec, groups: Groups) -> _Places:
    levels = (1, *(tier.gpus for tier in fabric.merged[:-1]))
    size, stride = groups.size, groups.stride
    block = size * stride
    odd = np.zeros(size.shape, dtype=bool)
    for level in levels:
        whole = (level % stride == 0) & ((block % level == 0) | (level % block == 0))
        odd |= (size > 1) & (stride < level) & ~whole
    members = [np.clip(level // stride, 1, size) for level in levels]
    units = [size // inside for inside in members]
    if not odd.any():
        return _Places(None, size, units, members)
    even, rows = np.flatnonzero(~odd), np.flatnonzero(odd)
    key = np.zeros(len(rows), dtype=np.int64)
    for column in (groups.size, groups.stride, groups.ranks):
        values, number = np.unique(column[rows], return_inverse=True)
        key = key * len(values) + number
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    ways = [
        _ways(int(groups.size[i]), int(groups.stride[i]), int(groups.ranks[i]), levels)
        for i in rows[first]
    ]
    counts = np.array([len(way) for way in ways])
    starts = (np.cumsum(counts) - counts)[which]
    repeats = counts[which]
    within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    found = np.concatenate(ways)[np.repeat(starts, repeats) + within]
    row = np.concatenate([even, np.repeat(rows, repeats)])
    return _Places(
        row,
        size[row],
        [np.concatenate([kept[even], found[:, 0, i]]) for i, kept in enumerate(units)],
        [np.concatenate([kept[even], found[:, 1, i]]) for i, kept in enumerate(members)],
    )


@functools.lru_cache(maxsize=10_000)
def _ways(size: int, stride: int, ranks: int, levels: tuple[int, ...]) -> Ints:
    """Return the different units touched and fewest members, by level, of an axis's groups."""
    period = min(ranks, math.lcm(size * stride, levels[-1]))  # beyond it, places repeat
    first = np.arange(max(period, 1))
    first = first[
        (first // stride % size == 0) & (first + (size - 1) * stride < max(period, ranks))
    ]
    member = (first if len(first) else np.zeros(1, np.int64))[:, None] + stride * np.arange(size)
    found = np.empty((len(member), 2, len(levels)), dtype=np.int64)
    for i, level in enumerate(levels):
        unit = member // level
        opens = np.ones(unit.shape, dtype=bool)
        opens[:, 1:] = unit[:, 1:] != unit[:, :-1]
        found[:, 0, i] = opens.sum(axis=1)
        runs = np.flatnonzero(opens.ravel())
        lengths = np.diff(runs, append=opens.size)
        found[:, 1, i] = np.minimum.reduceat(lengths, np.flatnonzero(runs % size == 0))
    return np.unique(found, axis=0)


class _Rings:
    """Hops of rings over groups, tier by tier."""

    def __init__(self, fabric: FabricSpec, groups: Groups, *, ends: bool = False) -> None:
        places = _places(fabric, groups)
        self.tiers, self._row, self._count = fabric.merged, places.row, len(groups.size)
        self.size, units, self.members = places.size, places.units, places.members
        if ends:
            self.size = np.minimum(self.size, 2)
            units = [np.minimum(touched, 2) for touched in units]
            self.members = [np.where(touched > 1, 1, self.size) for touched in units]
        self.units = [*units, np.ones_like(self.size)]
        # A tier is crossed where the group has several units inside one of the next.
        self.crossed = [a > b for a, b in zip(self.units, self.units[1:], strict=False)]
        # Between nodes, what crosses an outer tier has come through those below it.
        self.carries = [self.crossed[0], *(touched > 1 for touched in units[1:])]

    def of(self, values: Floats) -> Floats:
        """Return values by group for each of its places."""
        return values if self._row is None else values[self._row]

    def slowest(self, time_s: Floats) -> Floats:
        """Return times by place as the worst of each group."""
        if self._row is None:
            return time_s
        worst_s = np.zeros(self._count)
        np.maximum.at(worst_s, self._row, time_s)
        return worst_s

    def most(self, name: str) -> Floats:
        """Return the largest value of a constant over the tiers crossed."""
        most = np.zeros(self.size.shape)
        for tier, crossed in zip(self.tiers, self.crossed, strict=True):
            most = np.where(crossed, np.maximum(most, getattr(tier, name)), most)
        return most

    def reach(self, tier: int) -> Floats:
        """Return the share of a tier's bandwidth that leads to other members of the group."""
        peers = np.maximum(-(-self.units[tier] // self.units[tier + 1]) - 1, 1)
        share: Floats = np.minimum(1.0, self.tiers[tier].peer_share * peers)
        return share

    @functools.cached_property
    def rate(self) -> Floats:
        """Return what the narrowest tier carries of a ring."""
        rate = np.full(self.size.shape, np.inf)
        for i, tier in enumerate(self.tiers):
            share = tier.rate_bytes_per_s * self.members[i] * self.reach(i)
            rate = np.where(self.carries[i], np.minimum(rate, share), rate)
        return rate

    @functools.cached_property
    def gain(self) -> Floats:
        """Gain of switches that reduce, where the group crosses only their tier."""
        gain, number = np.ones(self.size.shape), np.zeros(self.size.shape, dtype=np.int64)
        for tier, crossed in zip(self.tiers, self.crossed, strict=True):
            gain = np.where(crossed, tier.all_reduce_gain, gain)
            number += crossed
        return np.where(number == 1, gain, 1.0)

    def latency_s(self, *, tree: bool) -> Floats:
        """Return the latency as NCCL counts it: a ring's members, the log of a tree's nodes."""
        total = self.most("base_s")
        for i, tier in enumerate(self.tiers):
            outer, inner = self.units[i], self.units[i + 1]
            steps = (outer - inner).astype(np.float64)
            if tree:
                steps = np.ceil(np.log2(outer)) - np.ceil(np.log2(inner))
                if i == 0:  # a tree of nodes is a chain inside each
                    steps = np.where(inner > 1, np.ceil(outer / inner) - 1.0, steps)
            total = total + steps * tier.hop_s
        return total

    def tree_s(self, size_bytes: Floats) -> Floats:
        """Price two trees of half the data each: a unit sends 2 (units - 1) / units of it.

        Over two nodes that is half of what the ring carries, for the ring passes by every member.
        """
        slowest = np.zeros(self.size.shape)
        for i, tier in enumerate(self.tiers):
            share = 2.0 * (self.units[i] - 1.0) / self.units[i]
            rate = tier.rate_bytes_per_s * self.members[i] * self.reach(i)
            sent_s = share * size_bytes / rate
            slowest = np.where(self.carries[i], np.maximum(slowest, sent_s), slowest)
        return slowest / TREE_SHARE

    def filling_s(self, size_bytes: Floats) -> Floats:
        """Return what a pipelined collective needs to fill."""
        filling: Floats = 2.0 * np.sqrt(self.most("fill_s") * size_bytes / self.rate)
        return filling


def _gather_s(
    fabric: FabricSpec, *, size_bytes: Floats, groups: Groups, rooted: bool = False
) -> Floats:
    """Return all-gathers or reduce-scatters of one group each, or broadcasts along the ring."""
    ring = _Rings(fabric, groups)
    whole, size = ring.of(size_bytes), ring.size
    moved = whole if rooted else whole * (size - 1) / size
    time_s = ring.latency_s(tree=False) + moved / ring.rate + ring.filling_s(whole)
    return ring.slowest(time_s)


def _all_reduce_s(
    fabric: FabricSpec,
    *,
    size_bytes: Floats,
    groups: Groups,
    ends: bool = False,
    by: str | None = None,
) -> Floats:
    """Return all-reduces of one group each, or of its two ends: the faster of ring and tree."""
    ring = _Rings(fabric, groups, ends=ends)
    whole, size = ring.of(size_bytes), ring.size
    moved = 2.0 * whole * (size - 1) / size
    ring_s = 2.0 * ring.latency_s(tree=False) + moved / (ring.rate * ring.gain)
    tree_s = 2.0 * ring.latency_s(tree=True) + ring.tree_s(whole) / ring.gain
    fastest_s = {None: np.minimum(ring_s, tree_s), "ring": ring_s, "tree": tree_s}[by]
    time_s = fastest_s - ring.most("base_s") + ring.filling_s(whole)
    return ring.slowest(time_s)


def _all_to_all_s(fabric: FabricSpec, *, size_bytes: Floats, groups: Groups) -> Floats:
    """Price all-to-alls: each tier carries what goes beyond the unit below; the slowest counts."""
    ring = _Rings(fabric, groups)
    whole, size = ring.of(size_bytes), ring.size
    sent_s, start_s = np.zeros(size.shape), np.zeros(size.shape)
    for i, tier in enumerate(ring.tiers):
        outside = size - ring.members[i]
        rate = tier.exchange_rate_bytes_per_s * ring.reach(i)
        beyond_s = whole * outside / size / rate
        sent_s = np.where(ring.carries[i], np.maximum(sent_s, beyond_s), sent_s)
        outermost_s = tier.base_s + tier.hop_s * np.ceil(np.log2(outside + 1))
        start_s = np.where(ring.crossed[i], outermost_s, start_s)
    return ring.slowest(start_s + sent_s)


_KINDS: Mapping[str, Callable[..., Floats]] = {
    "all_reduce": _all_reduce_s,
    "all_reduce_of_ends": functools.partial(_all_reduce_s, ends=True),
    "all_reduce_by_ring": functools.partial(_all_reduce_s, by="ring"),
    "all_reduce_by_tree": functools.partial(_all_reduce_s, by="tree"),
    "broadcast": functools.partial(_gather_s, rooted=True),
    "all_gather": _gather_s,
    "reduce_scatter": _gather_s,
    "all_to_all": _all_to_all_s,
    "point_to_point": lambda fabric, **asked: chain_time_s(fabric, **asked)[0],
}


@overload
def collective_time_s(
    fabric: FabricSpec, kind: str, *, size_bytes: float, group: Group
) -> float: ...
@overload
def collective_time_s(
    fabric: FabricSpec, kind: str, *, size_bytes: Floats, group: Groups
) -> Floats: ...
def collective_time_s(
    fabric: FabricSpec, kind: str, *, size_bytes: float | Floats, group: Group | Groups
) -> float | Floats:
    """Return the time of one collective of a group, with all its sister groups at work as well.

    Args:
        fabric: The tiers.
        kind: ``"all_reduce"`` (the faster of ``"all_reduce_by_ring"`` and
            ``"all_reduce_by_tree"``), ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"`` (down
            the ring), ``"all_to_all"``, ``"point_to_point"`` (the slowest pair of neighbours) or
            ``"all_reduce_of_ends"`` (of the first and the last member alone, as for tied
            embeddings).
        size_bytes: As the collective counts it: the buffer, the gathered output, what one GPU
            holds before an exchange, the message. One number, or an array for ``Groups``.
        group: Who takes part.

    Returns:
        Seconds, 0 for a group of one; an array for ``Groups``.

    Raises:
        ConfigurationError: The kind is unknown, or the size is no number from 0.

    Examples:
        >>> from fivefold.collectives.pricing import Tier
        >>> net = FabricSpec(name="x", tiers=(Tier(name="node", gpus=8, bandwidth_bytes_per_s=1e11,
        ...                                        efficiency=1.0, base_s=0.0, hop_s=0.0),))
        >>> collective_time_s(net, "all_gather", size_bytes=8e9, group=Group(size=8))
        0.07
    """
    require_one_of(kind, _KINDS, f"collective {kind!r} is unknown")
    if isinstance(group, Groups):
        some = (group.size > 1) & (np.asarray(size_bytes) > 0)
        return np.where(some, _KINDS[kind](fabric, size_bytes=size_bytes, groups=group), 0.0)
    return _one_time_s(fabric, kind, require_number("size_bytes", size_bytes), group)


@functools.lru_cache(maxsize=100_000)
def _one_time_s(fabric: FabricSpec, kind: str, size_bytes: float, group: Group) -> float:
    ranks = group.size * group.stride if group.ranks is None else group.ranks
    size, stride, mesh = (np.array([number]) for number in (group.size, group.stride, ranks))
    groups = Groups(size=size, stride=stride, ranks=mesh)
    sizes = np.array([size_bytes])
    return float(collective_time_s(fabric, kind, size_bytes=sizes, group=groups)[0])


def chain_time_s(
    fabric: FabricSpec, *, size_bytes: Floats, groups: Groups
) -> tuple[Floats, Floats]:
    """Return the times of messages from each member to the next, as between pipeline stages.

    All pairs of their kind share the tiers that lie between them.
    """
    ring = _Rings(fabric, groups)
    whole = ring.of(size_bytes)
    slowest, total, rate = np.zeros(whole.shape), np.zeros(whole.shape), np.inf
    for i, tier in enumerate(ring.tiers):
        # Pairs in one node use its links; those of different nodes every tier from there on.
        own = tier.exchange_rate_bytes_per_s * tier.peer_share
        rate = own if i < 2 else min(rate, own)
        message_s = tier.base_s + tier.hop_s + whole / rate
        pairs = ring.units[i] - ring.units[i + 1]
        slowest = np.where(pairs > 0, np.maximum(slowest, message_s), slowest)
        total = total + pairs * message_s
    some = (groups.size > 1) & (size_bytes > 0)
    return np.where(some, ring.slowest(slowest), 0.0), np.where(some, ring.slowest(total), 0.0)
