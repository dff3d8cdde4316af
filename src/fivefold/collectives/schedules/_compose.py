"""Schedules one after another, and all-reduces made of two halves."""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.collectives.schedules._arrays import Ints, Longs
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._routes import explicit_routes
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology


def concatenate(first: Schedule, second: Schedule, *, name: str = "") -> Schedule:
    """Put one schedule after another: what the first leaves is what the second begins with.

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
    """Make an all-reduce of a schedule that sums and one that spreads the sums.

    Args:
        first: A reduce-scatter or a reduce.
        second: The all-gather or broadcast of the same chunks.
        name: Name of the whole; empty to join the two names.

    Returns:
        The all-reduce.

    Raises:
        ConfigurationError: The two do not make an all-reduce.
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
            tables.append(explicit_routes(part, topology))
        else:
            tables.append((part.route_offsets, part.route_links))
    (offsets, links), (more_offsets, more_links) = tables
    joined = np.concatenate([offsets, more_offsets[1:] + offsets[-1]])
    return joined, np.concatenate([links, more_links])
