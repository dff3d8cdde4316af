"""Schedules from schedules: one after another, backwards, in finer chunks, without waste."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold._compiler import njit
from fivefold.collectives.schedules._arrays import Array, Ints, Longs, require_count
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.collectives.schedules._slots import order_of, slots_of, wanted_slots
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


def concatenate(first: Schedule, second: Schedule, *, name: str = "") -> Schedule:
    """Two schedules one after the other: what the first leaves is what the second begins with.

    Steps are kept if both have them, times if both have them; the second's come after all of the
    first's. Without either the listed order says it.

    Args:
        first: What is done first.
        second: What is done then, on the same chunks.
        name: Name of the whole; empty to join the two names.

    Returns:
        One schedule; a reduce-scatter (or reduce) and an all-gather (or broadcast) make an
        all-reduce.

    Raises:
        ConfigurationError: The second does not begin where the first ends, or their topologies
            differ.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather
        >>> gather = build_algorithm("ring", all_gather(4))
        >>> concatenate(gather.inverted(), gather).collective.name
        'all_reduce'
    """
    collective = _joined(first.collective, second.collective)
    topology = first.topology if first.topology is not None else second.topology
    if second.topology is not None and second.topology != topology:
        message = "the two schedules were made for different topologies"
        raise ConfigurationError(message, hint="make both for the same one")
    stepped = all(part.has_steps or not part.num_transfers for part in (first, second))
    steps: list[Any] = [first.steps, second.steps + np.int32(first.num_steps)]
    times: dict[str, Any] = {"starts_s": None, "ends_s": None}
    if first.ends_s is not None and second.ends_s is not None:
        begin_s = float(first.ends_s.max(initial=0.0))
        for key in times:
            times[key] = np.concatenate([getattr(first, key), getattr(second, key) + begin_s])
    offsets, links = _joined_routes(first, second, topology)
    return Schedule(
        collective=collective,
        chunks=np.concatenate([first.chunks, second.chunks]),
        sources=np.concatenate([first.sources, second.sources]),
        targets=np.concatenate([first.targets, second.targets]),
        reduces=np.concatenate([first.reduces, second.reduces]),
        steps=np.concatenate(steps) if stepped else None,  # type: ignore[arg-type]
        **times,
        route_offsets=offsets,
        route_links=links,
        topology=topology,
        name=name or " + ".join(dict.fromkeys(part for part in (first.name, second.name) if part)),
        solver=first.solver if first.solver == second.solver else "",
        attributes={**second.attributes, **first.attributes},
    )


def compose_all_reduce(first: Schedule, second: Schedule, *, name: str = "") -> Schedule:
    """An all-reduce from a schedule that sums and one that spreads the sums.

    Args:
        first: A reduce-scatter or a reduce.
        second: The all-gather or broadcast of the same chunks.
        name: Name of the whole; empty to join the two names.

    Returns:
        The all-reduce.

    Raises:
        ConfigurationError: The two do not make an all-reduce.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather
        >>> gather = build_algorithm("ring", all_gather(4))
        >>> compose_all_reduce(gather.inverted(), gather).num_transfers
        24
    """
    whole = concatenate(first, second, name=name)
    if whole.collective.name != "all_reduce":
        raise ConfigurationError(
            f"{first.collective.name} and {second.collective.name} make no all-reduce",
            hint="give a reduce-scatter and an all-gather, or a reduce and a broadcast",
        )
    return whole


def _joined(first: Collective, second: Collective) -> Collective:
    same_chunks = (
        first.num_ranks == second.num_ranks
        and first.num_chunks == second.num_chunks
        and np.array_equal(first.chunk_weights, second.chunk_weights)
    )
    if not same_chunks or not (
        np.array_equal(first.post_chunks, second.pre_chunks)
        and np.array_equal(first.post_ranks, second.pre_ranks)
    ):
        raise ConfigurationError(
            f"{second.name} does not begin with what {first.name} leaves",
            hint="both need the same chunks, and the second's pre must be the first's post",
        )
    if second.reducing and not second.single_source:
        raise ConfigurationError(
            f"{second.name} would add sums of {first.name} again",
            hint="sum first, then copy",
        )
    everywhere = first.num_ranks * first.num_chunks
    whole = first.pre_chunks.size == second.post_chunks.size == everywhere and first.reducing
    return Collective(
        name="all_reduce" if whole else "custom",
        num_ranks=first.num_ranks,
        num_chunks=first.num_chunks,
        reducing=first.reducing or second.reducing,
        pre_chunks=first.pre_chunks,
        pre_ranks=first.pre_ranks,
        post_chunks=second.post_chunks,
        post_ranks=second.post_ranks,
        chunk_weights=first.chunk_weights,
    )


def _joined_routes(
    first: Schedule, second: Schedule, topology: Topology | None
) -> tuple[Longs | None, Ints | None]:
    if first.route_offsets is None and second.route_offsets is None:
        return None, None
    tables = []
    for part in (first, second):
        if part.route_offsets is None or part.route_links is None:
            if topology is None:
                message = "only one of the two schedules has routes"
                raise ConfigurationError(message, hint="give both a topology")
            from fivefold.collectives.schedules._routes import (  # noqa: PLC0415 - only here
                explicit_routes,
            )

            tables.append(explicit_routes(part, topology))
        else:
            tables.append((part.route_offsets, part.route_links))
    (offsets, links), (more_offsets, more_links) = tables
    joined = np.concatenate([offsets, more_offsets[1:] + offsets[-1]])
    return joined, np.concatenate([links, more_links])


def inverted(schedule: Schedule) -> Schedule:
    """The schedule run backwards; see `Schedule.inverted`."""
    collective = schedule.collective.inverted()
    if schedule.collective.name == "all_reduce":
        _require_two_trees(schedule)
    lean = schedule if schedule.collective.reducing else schedule.pruned()
    if not collective.reducing:
        flags: Array = np.zeros(lean.num_transfers, dtype=np.bool_)
    elif schedule.collective.reducing:  # an all-reduce: sums become copies and copies sums
        flags = ~lean.reduces[::-1]
    else:
        flags = np.ones(lean.num_transfers, dtype=np.bool_)
    numbers = schedule.collective.inverse_numbering
    chunks = lean.chunks if numbers is None else numbers[lean.chunks]
    times: dict[str, Any] = {}
    if lean.starts_s is not None and lean.ends_s is not None:
        total_s = lean.ends_s.max(initial=0.0)
        times = {"starts_s": total_s - lean.ends_s[::-1], "ends_s": total_s - lean.starts_s[::-1]}
    offsets, links = lean.route_offsets, lean.route_links
    if offsets is not None and links is not None:
        offsets, links = offsets[-1] - offsets[::-1], links[::-1]
    return Schedule(
        collective=collective,
        chunks=chunks[::-1],
        sources=lean.targets[::-1],
        targets=lean.sources[::-1],
        reduces=flags,
        steps=(np.int32(lean.num_steps - 1) - lean.steps[::-1]) if lean.has_steps else None,  # type: ignore[arg-type]
        **times,
        route_offsets=offsets,
        route_links=links,
        topology=None if lean.topology is None else lean.topology.reversed(),
        name=lean.name,
        solver=lean.solver,
        attributes=lean.attributes,
    )


def _require_two_trees(schedule: Schedule) -> None:
    """Every chunk is summed once, in one tree, and copied in one: else backwards is no sum."""
    sums = np.bincount(schedule.chunks[schedule.reduces], minlength=schedule.collective.num_chunks)
    moves = np.bincount(schedule.chunks, minlength=schedule.collective.num_chunks)
    edges = schedule.collective.num_ranks - 1
    if (sums != edges).any() or (moves != 2 * edges).any():
        chunk = int(np.argmax((sums != edges) | (moves != 2 * edges)))
        raise ConfigurationError(
            f"chunk {chunk} is summed in {sums[chunk]} and copied in {moves[chunk] - sums[chunk]} "
            f"transfers, so the all-reduce cannot be run backwards",
            hint=f"only one made of a reduce-scatter and an all-gather can: {edges} of each",
        )


def replicated(schedule: Schedule, pieces: int) -> Schedule:
    """The schedule with each chunk cut into pieces; see `Schedule.replicated`."""
    count = require_count("pieces", pieces)
    if count == 1:
        return schedule
    chunks = np.repeat(schedule.chunks * np.int32(count), count)
    chunks += np.tile(np.arange(count, dtype=np.int32), schedule.num_transfers)
    offsets, links = schedule.route_offsets, schedule.route_links
    if offsets is not None and links is not None:
        lengths = np.repeat(np.diff(offsets), count)
        begins = np.repeat(offsets[:-1], count)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        links = links[np.repeat(begins, lengths) + within]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Schedule(
        collective=schedule.collective.replicated(count),
        chunks=chunks,
        sources=np.repeat(schedule.sources, count),
        targets=np.repeat(schedule.targets, count),
        reduces=np.repeat(schedule.reduces, count),
        steps=np.repeat(schedule.steps, count),
        # Without their times transfers would take effect in the listed order, which may be wrong.
        starts_s=None if schedule.starts_s is None else np.repeat(schedule.starts_s, count),
        ends_s=None if schedule.ends_s is None else np.repeat(schedule.ends_s, count),
        route_offsets=offsets,
        route_links=links,
        topology=schedule.topology,
        name=schedule.name,
        solver=schedule.solver,
        attributes=schedule.attributes,
    )


def pruned(schedule: Schedule) -> Schedule:
    """The schedule without waste; see `Schedule.pruned`."""
    if schedule.collective.reducing or not schedule.num_transfers:
        return schedule
    keys: Array = np.arange(schedule.num_transfers)
    mode = order_of(schedule)
    if mode == 1:
        keys = np.ascontiguousarray(schedule.steps)
    elif mode == 2 and schedule.ends_s is not None:
        keys = schedule.ends_s
    keep = _needed(slots_of(schedule), wanted_slots(schedule), keys)
    return schedule if keep.all() else selected(schedule, np.flatnonzero(keep))


def selected(schedule: Schedule, kept: Longs) -> Schedule:
    """The schedule with only these transfers, in this order."""
    offsets, links = schedule.route_offsets, schedule.route_links
    if offsets is not None and links is not None:
        lengths = np.diff(offsets)[kept]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        links = links[np.repeat(offsets[:-1][kept], lengths) + within]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
    names = ("chunks", "sources", "targets", "reduces", "steps")
    parts: dict[str, Any] = {name: getattr(schedule, name)[kept] for name in names}
    if schedule.starts_s is not None and schedule.ends_s is not None:
        parts |= {"starts_s": schedule.starts_s[kept], "ends_s": schedule.ends_s[kept]}
    return schedule.replaced(**parts, route_offsets=offsets, route_links=links)


@njit
def _needed(slots: tuple[Any, Any, Any, Any], wanted: Any, keys: Any) -> Any:
    """First arrivals that the postcondition or a needed transfer after them asks for."""
    read, written, filled, order = slots
    first = np.full(filled.size, -1, np.int64)
    for index in order:
        slot = written[index]
        if not filled[slot] and (first[slot] < 0 or keys[index] < keys[first[slot]]):
            first[slot] = index
    needed = np.zeros(order.size, np.bool_)
    asked = wanted.copy()
    for place in range(order.size - 1, -1, -1):
        index = order[place]
        if first[written[index]] == index and asked[written[index]]:
            needed[index] = True
            asked[read[index]] = True
    return needed
