"""Algorithms without a shape of their own: straight from source to target, and in two levels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fivefold.collectives.algorithms._hierarchical import hierarchical_moves
from fivefold.collectives.algorithms._library import SPREADS, made_by, schedule_of, spread_of
from fivefold.collectives.algorithms._moves import Ints, Moves, moves_of
from fivefold.collectives.algorithms._personalised import (
    direct_exchange_moves,
    grouped_exchange_moves,
    pairwise_exchange_moves,
)
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


def direct(collective: Collective, topology: Topology | None = None) -> Schedule:
    """Everything goes straight from where it is to where it must be, in one step.

    Sums are added by the receiver; an all-reduce is a direct reduce-scatter and a direct
    all-gather.

    Args:
        collective: Any named collective, or a custom one that copies.
        topology: Network to keep with the schedule.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The collective is a custom one that sums.
    """
    if collective.name == "custom" and not collective.reducing:
        moves = _from_nearest_holder(collective)
        return schedule_of("direct", collective, moves, sums=0, topology=topology)
    spread, exchange = SPREADS["direct"], direct_exchange_moves
    return made_by("direct", collective, spread=spread, exchange=exchange, topology=topology)


def _from_nearest_holder(collective: Collective) -> Moves:
    """Each chunk to each receiver that lacks it, from the holder of nearest rank."""
    found: list[tuple[int, int, int]] = []
    for chunk in range(collective.num_chunks):
        holders = collective.holders(chunk)
        for target in np.setdiff1d(collective.receivers(chunk), holders):
            source = holders[int(np.argmin(np.abs(holders - target)))]
            found.append((chunk, int(source), int(target)))
    table: Ints = np.array(found, dtype=np.int32).reshape(-1, 3)
    return moves_of(table[:, 0], table[:, 1], table[:, 2], 0)


def direct_all_to_all(collective: Collective, topology: Topology | None = None) -> Schedule:
    """An all-to-all in one step, every pair at once; `direct` by its full name.

    Args:
        collective: All-to-all, of even or uneven sizes.
        topology: Network to keep with the schedule.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The collective is no all-to-all.
    """
    _require_all_to_all("direct_all_to_all", collective)
    return direct(collective, topology)


def pairwise_all_to_all(collective: Collective, topology: Topology | None = None) -> Schedule:
    """An all-to-all in n - 1 steps, in each of which every rank sends to one and hears from one.

    Args:
        collective: All-to-all, of even or uneven sizes.
        topology: Network to keep with the schedule.

    Returns:
        The schedule; partners are r xor k where n is a power of two, else r + k.

    Raises:
        ConfigurationError: The collective is no all-to-all.
    """
    _require_all_to_all("pairwise_all_to_all", collective)
    exchange = pairwise_exchange_moves
    return made_by("pairwise", collective, exchange=exchange, topology=topology)


def _require_all_to_all(name: str, collective: Collective) -> None:
    if collective.name not in ("all_to_all", "all_to_allv"):
        raise ConfigurationError(
            f"{name} does not do {collective.name}", hint="give it an all_to_all or all_to_allv"
        )


def hierarchical(
    collective: Collective,
    topology: Topology | None = None,
    *,
    groups: Iterable[Sequence[int]] | None = None,
    intra: str = "ring",
    inter: str = "ring",
) -> Schedule:
    """Two levels: inside groups of ranks and across groups, each with its own algorithm.

    An all-reduce sums inside, then across among ranks of the same place, then spreads inside. An
    all-to-all goes inside to the member with the target's place, then across.

    Args:
        collective: Any but scatter, gather and custom ones.
        topology: Network to keep with the schedule; its hosts are the groups.
        groups: Ranks of each group, each rank once; None for the hosts of the topology.
        intra: Algorithm inside groups: one that `ring` and its like name.
        inter: Algorithm across groups.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: There are no groups, they miss a rank, or an algorithm cannot be a
            level.
    """
    members = _checked_groups(collective, topology, groups)
    levels = {"intra": spread_of(intra), "inter": spread_of(inter)}

    def spread(_: int, owners: Ints) -> Moves:
        return hierarchical_moves(owners, members, **levels)

    def exchange(_: int, chunks: Ints, sources: Ints, targets: Ints) -> Moves:
        return grouped_exchange_moves(chunks, sources, targets, members)

    pairwise = exchange if collective.name in ("all_to_all", "all_to_allv") else None
    return made_by("hierarchical", collective, spread=spread, exchange=pairwise, topology=topology)


def _checked_groups(
    collective: Collective,
    topology: Topology | None,
    groups: Iterable[Sequence[int]] | None,
) -> list[Ints]:
    if groups is None:
        if topology is None or not topology.hosts:
            message = "hierarchical needs groups of ranks"
            raise ConfigurationError(
                message, hint="pass groups, or a topology whose nodes name their hosts"
            )
        groups = topology.hosts.values()
    members = [np.asarray(list(group), dtype=np.int32) for group in groups]
    listed = np.concatenate(members) if members else np.zeros(0, dtype=np.int32)
    whole = np.array_equal(np.sort(listed), np.arange(collective.num_ranks))
    if not whole or any(group.size == 0 for group in members):
        raise ConfigurationError(
            f"the groups {[group.tolist() for group in members]!r:.80} do not hold each of "
            f"{collective.num_ranks} ranks once",
            hint="put each rank into one group; no group may be empty",
        )
    return members
