"""The library's algorithms as functions: each makes the schedule of a collective it can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.collectives.algorithms._hierarchical import hierarchical_moves
from fivefold.collectives.algorithms._library import (
    SPREADS,
    available_algorithms,
    made_by,
    schedule_of,
    spread_of,
)
from fivefold.collectives.algorithms._moves import Ints, Moves, moves_of
from fivefold.collectives.algorithms._orders import ring_order
from fivefold.collectives.algorithms._personalised import (
    binomial_exchange_moves,
    bruck_exchange_moves,
    direct_exchange_moves,
    grouped_exchange_moves,
    pairwise_exchange_moves,
)
from fivefold.collectives.algorithms._spread import pat_moves
from fivefold.collectives.algorithms._summing import doubling_sums, one_shot_sums
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

__all__ = [
    "bidirectional_ring",
    "binary_tree",
    "binomial_tree",
    "bruck",
    "direct",
    "direct_all_to_all",
    "double_binary_tree",
    "hierarchical",
    "one_shot",
    "pairwise_all_to_all",
    "pat",
    "recursive_doubling",
    "recursive_halving_doubling",
    "ring",
]


def ring(
    collective: Collective,
    topology: Topology | None = None,
    *,
    order: Sequence[int] | None = None,
) -> Schedule:
    """Chunks go round a ring of the ranks, once in one direction.

    n - 1 steps; every rank sends as many bytes as it must. An all-reduce goes round twice.

    Args:
        collective: All-gather, reduce-scatter, all-reduce, broadcast or reduce.
        topology: Network to keep with the schedule; it also chooses the order of the ring.
        order: Ranks along the ring; None for `ring_order` of the topology, or 0, 1, ..., n - 1.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective, or the order misses a rank.

    Example:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> ring(all_reduce(4)).num_steps
        6
    """
    places = _ring_places(order, topology)
    return made_by("ring", collective, spread=SPREADS["ring"], topology=topology, ranks=places)


def bidirectional_ring(
    collective: Collective,
    topology: Topology | None = None,
    *,
    order: Sequence[int] | None = None,
) -> Schedule:
    """Chunks go half way round a ring in each direction: half the steps, both directions busy.

    Args:
        collective: All-gather, reduce-scatter, all-reduce, broadcast or reduce.
        topology: Network to keep with the schedule; it also chooses the order of the ring.
        order: Ranks along the ring; None as in `ring`.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective, or the order misses a rank.

    Example:
        >>> from fivefold.collectives.schedules import all_gather
        >>> bidirectional_ring(all_gather(8)).num_steps
        4
    """
    places, spread = _ring_places(order, topology), SPREADS["bidirectional_ring"]
    return made_by("bidirectional_ring", collective, spread=spread, topology=topology, ranks=places)


def _ring_places(order: Sequence[int] | None, topology: Topology | None) -> Sequence[int] | None:
    if order is not None or topology is None:
        return order
    return ring_order(topology)


def binary_tree(collective: Collective, topology: Topology | None = None) -> Schedule:
    """Chunks go down a complete binary tree, one behind the other.

    Args:
        collective: Broadcast, reduce or all-reduce (up to rank 0, then down).
        topology: Network to keep with the schedule.

    Returns:
        The schedule; with k chunks and depth d it takes k + d - 1 steps one way.

    Raises:
        ConfigurationError: The algorithm does not do this collective.

    Example:
        >>> from fivefold.collectives.schedules import broadcast
        >>> binary_tree(broadcast(7, 4)).num_steps
        5
    """
    _require_rooted("binary_tree", collective)
    return made_by("binary_tree", collective, spread=SPREADS["binary_tree"], topology=topology)


def double_binary_tree(collective: Collective, topology: Topology | None = None) -> Schedule:
    """Half of the chunks go down one tree, half down another whose inner ranks are its leaves.

    Args:
        collective: Broadcast, reduce or all-reduce (up to rank 0, then down).
        topology: Network to keep with the schedule.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective.

    References:
        Sanders, Speck and Traeff, Parallel Computing 35(12), 2009.

    Example:
        >>> from fivefold.collectives.schedules import all_reduce, verify
        >>> verify(double_binary_tree(all_reduce(6, 4))).num_transfers
        40
    """
    _require_rooted("double_binary_tree", collective)
    spread = SPREADS["double_binary_tree"]
    return made_by("double_binary_tree", collective, spread=spread, topology=topology)


def _require_rooted(name: str, collective: Collective) -> None:
    if name not in available_algorithms(collective):
        made_by(name, collective)  # raises, and says what there is


def binomial_tree(collective: Collective, topology: Topology | None = None) -> Schedule:
    """A binomial tree from every owner of chunks: ceil(log2 n) steps, far ranks first.

    Args:
        collective: All but the all-to-alls.
        topology: Network to keep with the schedule.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective.

    Example:
        >>> from fivefold.collectives.schedules import broadcast, scatter
        >>> binomial_tree(broadcast(9)).num_steps, binomial_tree(scatter(8)).num_transfers
        (4, 12)
    """
    if collective.name in ("scatter", "gather"):
        exchange = binomial_exchange_moves
        return made_by("binomial_tree", collective, exchange=exchange, topology=topology)
    spread = SPREADS["binomial_tree"]
    return made_by("binomial_tree", collective, spread=spread, topology=topology)


def recursive_doubling(collective: Collective, topology: Topology | None = None) -> Schedule:
    """Pairs at distance 1, 2, 4, ... exchange all they have: ceil(log2 n) steps.

    An all-reduce swaps whole sums, which is fast for small sizes; `recursive_halving_doubling`
    moves less. Where n is no power of two, the ranks too many act through a partner.

    Args:
        collective: All-gather, reduce-scatter (then halving), all-reduce, broadcast or reduce.
        topology: Network to keep with the schedule.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective.

    Example:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> recursive_doubling(all_reduce(8, 1)).num_steps
        3
    """
    name = "recursive_doubling"
    if collective.name != "all_reduce":
        return made_by(name, collective, spread=SPREADS[name], topology=topology)
    moves, sums = doubling_sums(collective.num_ranks, collective.num_chunks)
    return schedule_of(name, collective, moves, sums=sums, topology=topology)


def recursive_halving_doubling(
    collective: Collective, topology: Topology | None = None
) -> Schedule:
    """Sums are halved among pairs at distance n/2, ..., 2, 1, then doubled back.

    2 log2 n steps at the fewest bytes, where n is a power of two; for other n the ranks too many
    add theirs to a partner's first and get the sums at last.

    Args:
        collective: All-reduce, or one half of it: reduce-scatter, all-gather, reduce, broadcast.
        topology: Network to keep with the schedule.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective.

    References:
        Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005.

    Example:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> recursive_halving_doubling(all_reduce(8)).num_steps
        6
    """
    name = "recursive_halving_doubling"
    return made_by(name, collective, spread=SPREADS[name], topology=topology)


def bruck(collective: Collective, topology: Topology | None = None, *, radix: int = 2) -> Schedule:
    """Blocks travel by the binary digits of the distance: ceil(log2 n) steps for any n.

    Args:
        collective: All-to-all, or any that `ring` does.
        topology: Network to keep with the schedule.
        radix: Base of the digits of an all-to-all: larger ones take more steps and fewer hops.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective, or the radix is below 2.

    References:
        Bruck et al., IEEE TPDS 8(11), 1997.

    Example:
        >>> from fivefold.collectives.schedules import all_gather, all_to_all
        >>> bruck(all_gather(6)).num_steps, bruck(all_to_all(8)).num_steps
        (3, 3)
    """
    if radix < 2:
        raise ConfigurationError(f"radix is {radix}", hint="digits need a base of at least 2")
    exchange = partial(bruck_exchange_moves, radix=radix)
    spread = SPREADS["bruck"]
    return made_by("bruck", collective, spread=spread, exchange=exchange, topology=topology)


def pat(
    collective: Collective, topology: Topology | None = None, *, most_chunks: int | None = None
) -> Schedule:
    """Parallel aggregated trees: a binomial tree from every rank, far ranks first.

    As many steps as `bruck`, but the farthest rank gets one block instead of half of them. With
    ``most_chunks`` a message aggregates at most so many blocks: the steps become more, the
    buffers between them stay small.

    Args:
        collective: All-gather, reduce-scatter, all-reduce, broadcast or reduce.
        topology: Network to keep with the schedule.
        most_chunks: Blocks that a message may carry; None for no limit.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: The algorithm does not do this collective, or ``most_chunks`` is below 1.

    References:
        Jeaugey, arXiv 2506.20252.

    Example:
        >>> from fivefold.collectives.schedules import all_gather
        >>> pat(all_gather(16)).num_steps, pat(all_gather(16), most_chunks=2).num_steps
        (4, 8)
    """
    if most_chunks is not None and most_chunks < 1:
        raise ConfigurationError(
            f"most_chunks is {most_chunks}", hint="a message carries at least 1 block"
        )
    spread = partial(pat_moves, most_chunks=most_chunks)
    return made_by("pat", collective, spread=spread, topology=topology)


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

    Example:
        >>> from fivefold.collectives.schedules import all_to_all, custom
        >>> direct(all_to_all(3)).num_transfers, direct(custom(3, [(0, 1)], post=[(0, 2)])).num_steps
        (6, 1)
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

    Example:
        >>> from fivefold.collectives.schedules import all_to_allv
        >>> direct_all_to_all(all_to_allv([[0, 1], [0, 0]])).num_transfers
        1
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

    Example:
        >>> from fivefold.collectives.schedules import all_to_all
        >>> pairwise_all_to_all(all_to_all(6)).num_steps
        5
    """
    _require_all_to_all("pairwise_all_to_all", collective)
    exchange = pairwise_exchange_moves
    return made_by("pairwise", collective, exchange=exchange, topology=topology)


def _require_all_to_all(name: str, collective: Collective) -> None:
    if collective.name not in ("all_to_all", "all_to_allv"):
        raise ConfigurationError(
            f"{name} does not do {collective.name}", hint="give it an all_to_all or all_to_allv"
        )


def one_shot(collective: Collective, topology: Topology | None = None) -> Schedule:
    """An all-reduce in one step: everyone sends everything to everyone, and all add up alike.

    Args:
        collective: All-reduce.
        topology: Network to keep with the schedule.

    Returns:
        The schedule; it moves n - 1 times the buffer, and is fastest for the smallest sizes.

    Raises:
        ConfigurationError: The collective is no all-reduce.

    Example:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> one_shot(all_reduce(4, 1)).num_transfers
        12
    """
    if collective.name != "all_reduce":
        made_by("one_shot", collective)  # raises, and says what there is
    moves, sums = one_shot_sums(collective.num_ranks, collective.num_chunks)
    return schedule_of("one_shot", collective, moves, sums=sums, topology=topology)


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

    Example:
        >>> from fivefold.collectives.schedules import all_reduce
        >>> schedule = hierarchical(all_reduce(8), groups=[range(4), range(4, 8)])
        >>> schedule.num_steps
        8
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


BUILDERS: dict[str, Any] = {
    "ring": ring,
    "bidirectional_ring": bidirectional_ring,
    "binary_tree": binary_tree,
    "double_binary_tree": double_binary_tree,
    "binomial_tree": binomial_tree,
    "recursive_doubling": recursive_doubling,
    "recursive_halving_doubling": recursive_halving_doubling,
    "bruck": bruck,
    "pat": pat,
    "direct": direct,
    "direct_all_to_all": direct_all_to_all,
    "pairwise": pairwise_all_to_all,
    "pairwise_all_to_all": pairwise_all_to_all,
    "one_shot": one_shot,
    "hierarchical": hierarchical,
}


def build_algorithm(
    name: str, collective: Collective, topology: Topology | None = None, **options: Any
) -> Schedule:
    """The schedule of an algorithm of the library, by name.

    Args:
        name: One of `available_algorithms`; hyphens count as underscores.
        collective: What it is to do.
        topology: Network to keep with the schedule; rings and hierarchies also follow it.
        **options: Options of the algorithm's own function, such as ``groups`` or ``radix``.

    Returns:
        The schedule.

    Raises:
        ConfigurationError: There is no such algorithm or option, or it does not do this collective.

    Example:
        >>> from fivefold.collectives.schedules import all_reduce, verify
        >>> verify(build_algorithm("recursive-halving-doubling", all_reduce(6))).order
        'steps'
    """
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    if plain not in BUILDERS:
        raise ConfigurationError(
            f"there is no algorithm {name!r}",
            hint=f"for {collective.name} there are: "
            + (", ".join(available_algorithms(collective)) or "none"),
        )
    if topology is not None and topology.num_ranks != collective.num_ranks:
        raise ConfigurationError(
            f"the collective has {collective.num_ranks} ranks, the topology {topology.num_ranks}",
            hint="make the collective for topology.num_ranks ranks",
        )
    try:
        schedule: Schedule = BUILDERS[plain](collective, topology, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigurationError(
            f"{plain} has no such option: {error}", hint=f"see help({plain})"
        ) from None
    return schedule
