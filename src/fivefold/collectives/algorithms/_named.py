"""The library's algorithms as functions: each makes the schedule of a collective it can do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from fivefold.collectives.algorithms._library import (
    SPREADS,
    available_algorithms,
    made_by,
    schedule_of,
)
from fivefold.collectives.algorithms._orders import ring_order
from fivefold.collectives.algorithms._personalised import (
    binomial_exchange_moves,
    bruck_exchange_moves,
)
from fivefold.collectives.algorithms._spread import pat_moves
from fivefold.collectives.algorithms._summing import doubling_sums, one_shot_sums
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


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
        ConfigurationError: The algorithm does not do this collective, or ``most_chunks`` is
            below 1.

    References:
        Jeaugey, arXiv 2506.20252.
    """
    if most_chunks is not None and most_chunks < 1:
        raise ConfigurationError(
            f"most_chunks is {most_chunks}", hint="a message carries at least 1 block"
        )
    spread = partial(pat_moves, most_chunks=most_chunks)
    return made_by("pat", collective, spread=spread, topology=topology)


def one_shot(collective: Collective, topology: Topology | None = None) -> Schedule:
    """An all-reduce in one step: everyone sends everything to everyone, and all add up alike.

    Args:
        collective: All-reduce.
        topology: Network to keep with the schedule.

    Returns:
        The schedule; it moves n - 1 times the buffer, and is fastest for the smallest sizes.

    Raises:
        ConfigurationError: The collective is no all-reduce.
    """
    if collective.name != "all_reduce":
        made_by("one_shot", collective)  # raises, and says what there is
    moves, sums = one_shot_sums(collective.num_ranks, collective.num_chunks)
    return schedule_of("one_shot", collective, moves, sums=sums, topology=topology)
