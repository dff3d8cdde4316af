"""The library by name: which algorithm serves which collective, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.collectives.algorithms._hierarchical import Spread
from fivefold.collectives.algorithms._moves import Ints, Moves, backwards, joined
from fivefold.collectives.algorithms._spread import (
    bidirectional_ring_moves,
    binary_tree_moves,
    binomial_moves,
    bruck_moves,
    core_ranks,
    direct_moves,
    double_tree_moves,
    pat_moves,
    recursive_doubling_moves,
    ring_moves,
)
from fivefold.collectives.schedules import Collective, Schedule
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

SPREADS: Mapping[str, Spread] = {
    "ring": ring_moves,
    "bidirectional_ring": bidirectional_ring_moves,
    "binary_tree": binary_tree_moves,
    "double_binary_tree": double_tree_moves,
    "binomial_tree": binomial_moves,
    "recursive_doubling": recursive_doubling_moves,
    "recursive_halving_doubling": recursive_doubling_moves,
    "bruck": bruck_moves,
    "pat": pat_moves,
    "direct": direct_moves,
}
_ROOTED_SPREADS = ("binary_tree", "double_binary_tree")  # these need one owner of all chunks
_FROM_ALL = ("all_gather", "reduce_scatter")
_FROM_ROOT = ("broadcast", "reduce")
_ONE_TO_ONE = ("all_to_all", "all_to_allv", "scatter", "gather")
_EXCHANGES = ("direct", "pairwise", "bruck", "hierarchical")
_ALIASES = {"direct_all_to_all": "direct", "pairwise_all_to_all": "pairwise"}


def available_algorithms(collective: Collective) -> tuple[str, ...]:
    """Names of the library's algorithms that do this collective.

    Args:
        collective: The collective.

    Returns:
        Names for `build_algorithm`; for a custom collective only ``"direct"``, and nothing where
        it sums.

    Examples:
        >>> from fivefold.collectives.schedules import all_to_all, broadcast
        >>> available_algorithms(all_to_all(4))
        ('direct', 'pairwise', 'bruck', 'hierarchical')
        >>> "double_binary_tree" in available_algorithms(broadcast(4))
        True
    """
    name = collective.name
    if name in _FROM_ALL:
        return (*(key for key in SPREADS if key not in _ROOTED_SPREADS), "hierarchical")
    if name in _FROM_ROOT:
        return (*SPREADS, "hierarchical")
    if name == "all_reduce":
        return (*SPREADS, "hierarchical", "one_shot")
    if name in ("scatter", "gather"):
        return ("direct", "binomial_tree")
    if name in _ONE_TO_ONE:
        return _EXCHANGES
    return () if collective.reducing else ("direct",)


def spread_of(name: str) -> Spread:
    """The spreading algorithm of this name."""
    if name not in SPREADS or name in _ROOTED_SPREADS:
        allowed = [key for key in SPREADS if key not in _ROOTED_SPREADS]
        raise ConfigurationError(
            f"{name!r} cannot be one level of a hierarchy",
            hint=f"choose one of {', '.join(allowed)}",
        )
    return SPREADS[name]


def made_by(
    name: str,
    collective: Collective,
    *,
    spread: Spread | None = None,
    exchange: Callable[[int, Ints, Ints, Ints], Moves] | None = None,
    topology: Topology | None = None,
    ranks: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of an algorithm for a collective, by whichever of its forms fits."""
    kind = collective.name
    if kind in _ONE_TO_ONE and exchange is not None:
        moves, sums = _exchanged(collective, exchange), 0
    elif kind in (*_FROM_ALL, *_FROM_ROOT, "all_reduce") and spread is not None:
        moves, sums = _spread_out(name, collective, spread, ranks)
    else:
        raise ConfigurationError(
            f"{name} does not do {kind}",
            hint=f"for {kind} there are: {', '.join(available_algorithms(collective)) or 'none'}",
        )
    return schedule_of(name, collective, moves, sums=sums, topology=topology)


def schedule_of(
    name: str, collective: Collective, moves: Moves, *, sums: int | Any, topology: Topology | None
) -> Schedule:
    """A schedule of moves, of which the first ``sums`` (or those flagged) add up."""
    flags: Any = np.arange(moves.chunks.size) < sums if isinstance(sums, int) else sums
    if isinstance(sums, int) and sums in (0, moves.chunks.size):
        flags = bool(sums)  # one flag for all takes no memory
    return Schedule(
        collective=collective,
        chunks=moves.chunks,
        sources=moves.sources,
        targets=moves.targets,
        reduces=flags,
        steps=moves.steps,
        topology=topology,
        name=name,
        solver="library",
    )


def _exchanged(collective: Collective, exchange: Callable[[int, Ints, Ints, Ints], Moves]) -> Moves:
    # One source and one target each, so both lists are in the order of the chunks.
    return exchange(
        collective.num_ranks, collective.pre_chunks, collective.pre_ranks, collective.post_ranks
    )


def _owners(name: str, collective: Collective) -> Ints:
    """Who spreads each chunk: its owner, the root, or for an all-reduce whoever suits."""
    n, count = collective.num_ranks, collective.num_chunks
    if collective.name in ("all_gather", "broadcast"):
        return collective.pre_ranks
    if collective.name in ("reduce_scatter", "reduce"):
        return collective.post_ranks
    if name in _ROOTED_SPREADS or name == "binomial_tree":
        return np.zeros(count, dtype=np.int32)
    chunks = np.arange(count, dtype=np.int64)
    if name in ("recursive_doubling", "recursive_halving_doubling"):
        core = core_ranks(n)[0]
        return core[chunks * core.size // count]
    return (chunks * n // max(count, 1)).astype(np.int32)


def _spread_out(
    name: str, collective: Collective, spread: Spread, ranks: Sequence[int] | None
) -> tuple[Moves, Any]:
    """Moves of a spreading algorithm, run forwards, backwards or both, and which of them add."""
    n, owners = collective.num_ranks, _owners(name, collective)
    order = np.arange(n) if ranks is None else np.asarray(ranks)
    if not np.array_equal(np.sort(order), np.arange(n)):
        raise ConfigurationError(
            f"order is {list(order)!r:.80}", hint="name each rank once, in the order of the ring"
        )

    def run(along: Ints) -> Moves:
        return spread(n, np.argsort(along).astype(np.int32)[owners]).renamed(along)

    forward = order.astype(np.int32)
    if not collective.reducing:
        return run(forward), 0
    # Sums run backwards: on a ring the other way round, so that they take the same links.
    up = backwards(run(forward[::-1] if name == "ring" else forward))
    if collective.name != "all_reduce":
        return up, up.chunks.size
    return _there_and_back(up, run(forward), owners)


def _there_and_back(up: Moves, moves: Moves, owners: Ints) -> tuple[Moves, Any]:
    """Sum, then spread; each chunk's spreading starts as early as its sum allows."""
    count = owners.size
    if count and (owners == owners[0]).all():
        # Backwards the last chunk comes first: number them so that sums end in the order in
        # which they are spread, and both halves overlap.
        up = up._replace(chunks=np.int32(count - 1) - up.chunks)
    ends = np.zeros(count, dtype=np.int64)
    begins = np.full(count, moves.num_steps, dtype=np.int64)
    np.maximum.at(ends, up.chunks, up.steps + 1)
    np.minimum.at(begins, moves.chunks, moves.steps)
    wait = int((ends - begins).max(initial=0))
    both = joined([up, moves.later(max(wait, 0))])
    adds = np.zeros(up.chunks.size + moves.chunks.size, dtype=np.bool_)
    # `joined` sorts by step and keeps the order within: find where the sums went.
    steps = np.concatenate([up.steps, moves.steps + np.int32(max(wait, 0))])
    adds[: up.chunks.size] = True
    if (steps[1:] < steps[:-1]).any():
        adds = adds[np.argsort(steps, kind="stable")]
    return both, adds
