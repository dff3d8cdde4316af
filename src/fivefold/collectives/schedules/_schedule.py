"""A schedule: which chunk goes from which rank to which, in which order, kept as arrays.

One all-gather of 4,096 ranks has 16.7 million transfers, so a schedule is a struct of arrays and
never a list of objects; `Transfer` is what iterating over a small one yields.

**What the order means.** A transfer reads its chunk at the source and writes it at the target.
With steps, all transfers of a step read what was there when the step began. Without steps but with
times, a transfer reads at its start and writes at its end. With neither, transfers take effect one
after another in the order in which they are listed; that order is also the priority on a link.
A transfer with ``reduces`` adds to what the target holds, one without replaces it.

This module moves no data and knows no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.collectives.schedules._arrays import Array, Floats, Ints, Longs, frozen
from fivefold.collectives.schedules._collective import Collective
from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One chunk that goes from one rank to another.

    Args:
        chunk: Number of the chunk.
        source: Rank that sends it.
        target: Rank that receives it.
        reduces: Whether the target adds it to what it holds.
        step: Step of a synchronous schedule; -1 for none.
        start_s: When it starts; None where the schedule has no times.
        end_s: When it has arrived; None where the schedule has no times.
        route: Indices of the links it takes; None for the shortest route.

    Examples:
        >>> Transfer(chunk=0, source=1, target=2).reduces
        False
    """

    chunk: int
    source: int
    target: int
    reduces: bool = False
    step: int = -1
    start_s: float | None = None
    end_s: float | None = None
    route: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Chunk transfers that do a collective; see the module for what their order means.

    Args:
        collective: What is to be done.
        chunks: Chunk of each transfer, int32 [T].
        sources: Sending rank of each transfer, int32 [T].
        targets: Receiving rank of each transfer, int32 [T].
        reduces: Whether the target adds what arrives to what it holds, bool [T]; None for no.
        steps: Step of each transfer, int32 [T], -1 for none; None for none at all.
        starts_s: Start of each transfer, float64 [T]; None where there are no times.
        ends_s: Arrival of each transfer, float64 [T]; None where there are no times.
        route_offsets: Where the links of each transfer begin in ``route_links``, int64 [T + 1];
            None where every transfer takes the shortest route.
        route_links: Link indices of all routes, one after another, int32.
        topology: The network it was made for; None where it fits any.
        name: The algorithm, for people.
        solver: What made it, for people.
        attributes: Anything else worth keeping; it must be fit for JSON.

    Raises:
        ConfigurationError: Arrays differ in length, or a chunk, rank or link is out of range.

    Examples:
        >>> from fivefold.collectives.schedules import broadcast
        >>> moves = [Transfer(chunk=0, source=0, target=1), Transfer(chunk=0, source=1, target=2)]
        >>> schedule = Schedule.from_transfers(moves, collective=broadcast(3))
        >>> schedule.num_transfers, [move.target for move in schedule]
        (2, [1, 2])
    """

    collective: Collective
    chunks: Ints = field(repr=False)
    sources: Ints = field(repr=False)
    targets: Ints = field(repr=False)
    reduces: Array = field(default=None, repr=False)  # type: ignore[arg-type]
    steps: Ints = field(default=None, repr=False)  # type: ignore[arg-type]
    starts_s: Floats | None = field(default=None, repr=False)
    ends_s: Floats | None = field(default=None, repr=False)
    route_offsets: Longs | None = field(default=None, repr=False)
    route_links: Ints | None = field(default=None, repr=False)
    topology: Topology | None = field(default=None, repr=False)
    name: str = ""
    solver: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        count = len(self.chunks)
        flags = np.broadcast_to(False if self.reduces is None else self.reduces, (count,))
        steps = np.broadcast_to(np.int32(-1) if self.steps is None else self.steps, (count,))
        arrays = {
            "chunks": frozen(self.chunks, np.int32),
            "sources": frozen(self.sources, np.int32),
            "targets": frozen(self.targets, np.int32),
            "reduces": frozen(flags, np.bool_),
            "steps": frozen(steps, np.int32),
        }
        for name in ("starts_s", "ends_s"):
            if (times := getattr(self, name)) is not None:
                arrays[name] = frozen(times, np.float64)
        for name, array in arrays.items():
            if array.shape != (count,):
                raise ConfigurationError(
                    f"{name} has the shape {array.shape}, but there are {count} chunks",
                    hint="give one entry for each transfer",
                )
            object.__setattr__(self, name, array)
        if (self.starts_s is None) != (self.ends_s is None):
            message = "a schedule has starts_s or ends_s, but not both"
            raise ConfigurationError(message, hint="give both or none")
        object.__setattr__(self, "attributes", dict(self.attributes))
        self._check_ranges()
        self._check_routes()

    def _check_ranges(self) -> None:
        limits = {
            "chunks": self.collective.num_chunks,
            "sources": self.collective.num_ranks,
            "targets": self.collective.num_ranks,
        }
        for name, limit in limits.items():
            values = getattr(self, name)
            if values.size and (values.min() < 0 or values.max() >= limit):
                at = int(np.argmax((values < 0) | (values >= limit)))
                raise ConfigurationError(
                    f"transfer {at} has {values[at]} in {name}",
                    hint=f"the collective allows 0 to {limit - 1}",
                )
        if self.steps.size and self.steps.min() < -1:
            message = "a step is below -1"
            raise ConfigurationError(message, hint="number steps from 0; -1 is none")
        if self.topology is not None and self.topology.num_ranks != self.collective.num_ranks:
            raise ConfigurationError(
                f"the collective has {self.collective.num_ranks} ranks, "
                f"the topology {self.topology.num_ranks}",
                hint="make the collective for topology.num_ranks ranks",
            )

    def _check_routes(self) -> None:
        if (self.route_offsets is None) != (self.route_links is None):
            message = "a schedule has route_offsets or route_links, but not both"
            raise ConfigurationError(message, hint="give both")
        if self.route_offsets is None or self.route_links is None:
            return
        offsets, links = frozen(self.route_offsets, np.int64), frozen(self.route_links, np.int32)
        whole = offsets.shape == (self.num_transfers + 1,) and offsets[0] == 0
        if not whole or offsets[-1] != links.size or (np.diff(offsets) < 0).any():
            message = "route_offsets do not cut route_links into one route for each transfer"
            raise ConfigurationError(
                message, hint="they start at 0, never fall and end at the number of route_links"
            )
        object.__setattr__(self, "route_offsets", offsets)
        object.__setattr__(self, "route_links", links)

    # -- views ---------------------------------------------------------------------------------

    @property
    def num_transfers(self) -> int:
        """Number of transfers T."""
        return int(self.chunks.size)

    @property
    def has_times(self) -> bool:
        """Whether the transfers have starts and ends."""
        return self.starts_s is not None

    @cached_property
    def has_steps(self) -> bool:
        """Whether every transfer has a step (a schedule without transfers has none)."""
        return self.num_transfers > 0 and bool((self.steps >= 0).all())

    @cached_property
    def num_steps(self) -> int:
        """Steps, counted to the last one used; 0 where there are none."""
        return int(self.steps.max(initial=-1)) + 1

    def __len__(self) -> int:
        return self.num_transfers

    def __iter__(self) -> Iterator[Transfer]:
        return (self.transfer(index) for index in range(self.num_transfers))

    def transfer(self, index: int) -> Transfer:
        """The transfer of this number, as an object."""
        return Transfer(
            chunk=int(self.chunks[index]),
            source=int(self.sources[index]),
            target=int(self.targets[index]),
            reduces=bool(self.reduces[index]),
            step=int(self.steps[index]),
            start_s=None if self.starts_s is None else float(self.starts_s[index]),
            end_s=None if self.ends_s is None else float(self.ends_s[index]),
            route=self._route(index),
        )

    def _route(self, index: int) -> tuple[int, ...] | None:
        if self.route_offsets is None or self.route_links is None:
            return None
        first, last = self.route_offsets[index], self.route_offsets[index + 1]
        return tuple(int(link) for link in self.route_links[first:last])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        if self.collective != other.collective or self.topology != other.topology:
            return False
        names = ("chunks", "sources", "targets", "reduces", "steps")
        optional = ("starts_s", "ends_s", "route_offsets", "route_links")
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names) and all(
            _same(getattr(self, n), getattr(other, n)) for n in optional
        )

    __hash__ = None  # type: ignore[assignment]

    # Made anew in another process: arrays would come back writable.
    def __reduce__(self) -> tuple[Any, ...]:
        names = tuple(self.__dataclass_fields__)
        return _rebuild, ({name: getattr(self, name) for name in names},)

    # -- making --------------------------------------------------------------------------------

    @classmethod
    def from_transfers(
        cls,
        transfers: Iterable[Transfer],
        *,
        collective: Collective,
        topology: Topology | None = None,
        name: str = "",
        solver: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """A schedule from transfer objects, in their order.

        Args:
            transfers: The transfers; times and routes for all of them or for none.
            collective: What they do.
            topology: The network they were made for.
            name: The algorithm.
            solver: What made it.
            attributes: Anything else worth keeping.

        Returns:
            The schedule.

        Raises:
            ConfigurationError: Only some of the transfers have times or routes.
        """
        moves = list(transfers)
        timed = _all_or_none(
            "times", [m.start_s is not None and m.end_s is not None for m in moves]
        )
        routed = _all_or_none("routes", [m.route is not None for m in moves])
        routes = [m.route or () for m in moves]
        lengths = np.array([0, *(len(r) for r in routes)], dtype=np.int64)
        links = np.array([link for r in routes for link in r], dtype=np.int32)
        return cls(
            collective=collective,
            chunks=np.array([m.chunk for m in moves], dtype=np.int32),
            sources=np.array([m.source for m in moves], dtype=np.int32),
            targets=np.array([m.target for m in moves], dtype=np.int32),
            reduces=np.array([m.reduces for m in moves], dtype=np.bool_),
            steps=np.array([m.step for m in moves], dtype=np.int32),
            starts_s=np.array([m.start_s for m in moves], dtype=np.float64) if timed else None,
            ends_s=np.array([m.end_s for m in moves], dtype=np.float64) if timed else None,
            route_offsets=np.cumsum(lengths) if routed else None,
            route_links=links if routed else None,
            topology=topology,
            name=name,
            solver=solver,
            attributes=attributes or {},
        )

    def replaced(self, **changes: Any) -> Schedule:
        """The same schedule with some fields changed, as `dataclasses.replace` does it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Schedule(**{**fields, **changes})

    # -- changing ------------------------------------------------------------------------------

    def inverted(self) -> Schedule:
        """The schedule run backwards, which does the inverse collective on the reversed network.

        Redundant transfers are left out first: run backwards they would add twice.

        Returns:
            Transfers in reverse, each from target to source; copies to many become sums.

        Raises:
            ConfigurationError: The collective has no inverse, or an all-reduce sums in more than
                one place and cannot be run backwards.
        """
        from fivefold.collectives.schedules._transform import inverted  # noqa: PLC0415 - needs this

        return inverted(self)

    def replicated(self, pieces: int) -> Schedule:
        """The schedule with each chunk cut into equal pieces that follow one another.

        Args:
            pieces: Pieces of each chunk; those of one transfer have its times, and are one message.

        Returns:
            The finer schedule, of ``pieces`` times as many transfers.
        """
        from fivefold.collectives.schedules._transform import (  # noqa: PLC0415 - needs this module
            replicated,
        )

        return replicated(self, pieces)

    def pruned(self) -> Schedule:
        """The schedule without transfers that bring a rank what it has, or what no one needs.

        Returns:
            The same schedule if it sums or has nothing to leave out.
        """
        from fivefold.collectives.schedules._transform import pruned  # noqa: PLC0415 - needs this

        return pruned(self)

    def to_json(self) -> str:
        """The schedule as JSON text, topology included; `from_json` reads it."""
        from fivefold.collectives.schedules._json import to_json  # noqa: PLC0415 - needs this module

        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """A schedule from the text of `to_json`; see `read_schedule` for the errors."""
        from fivefold.collectives.schedules._json import (  # noqa: PLC0415 - needs this module
            read_schedule,
        )

        return read_schedule(text)


def _rebuild(fields: dict[str, Any]) -> Schedule:
    return Schedule(**fields)


def _same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)


def _all_or_none(what: str, has: list[bool]) -> bool:
    if any(has) and not all(has):
        raise ConfigurationError(
            f"transfer {has.index(False)} has no {what}, though others have",
            hint=f"give {what} to every transfer or to none",
        )
    return bool(has) and all(has)
