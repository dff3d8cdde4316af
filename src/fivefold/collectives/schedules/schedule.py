"""A schedule: which chunk goes from which rank to which, in which order, kept as arrays.

An all-gather of 4,096 ranks has 16.7 million transfers, and a table over all chunks and ranks 68
billion entries; the pairs that are really read or written are as many as transfers. So each
transfer gets the slot it reads and the slot it writes, and one number is kept for each slot.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fivefold._compiler import njit
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules.arrays import (
    Array,
    Floats,
    Ints,
    Longs,
    frozen,
    group_by_key,
    number_slots,
    of_one_kind,
    rows_of,
)
from fivefold.collectives.schedules.constructors import collective_from_data, collective_to_data
from fivefold.collectives.schedules.messages import checked_messages, runs_of, step_messages
from fivefold.errors import ConfigurationError, DataError, require_whole
from fivefold.files import parse_json
from fivefold.network.topology import Topology, read_topology

_SCHEMA = "fivefold.schedule.1"
_ARRAYS = ("chunks", "sources", "targets")
_OPTIONAL = ("starts_s", "ends_s", "route_offsets", "route_links", "messages")
_SHORT = ("reduces", "steps")  # written as one number where all are equal
_KEYS = {"schema", "name", "solver", "collective", "topology", "attributes"}


LISTED, BY_STEPS, BY_TIMES = 0, 1, 2  # what orders the transfers


def require_match(collective: Collective, topology: Topology) -> None:
    """Refuse a collective and a topology of different numbers of ranks."""
    if collective.num_ranks != topology.num_ranks:
        raise ConfigurationError(
            f"the collective has {collective.num_ranks} ranks, the topology {topology.num_ranks}",
            hint="make the collective for topology.num_ranks ranks",
        )


class ScheduleError(DataError):
    """A schedule is wrong: it names the first broken transfer, or the condition that is not met.

    Args:
        message: What is wrong.
        hint: What to do next.
        transfer: Index of the first broken transfer; None where a postcondition is not met.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, transfer: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.transfer = transfer

    def __reduce__(self) -> tuple[object, ...]:
        made = functools.partial(ScheduleError, hint=self.hint, transfer=self.transfer)
        return made, (self.message,)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One chunk that goes from one rank to another, alone or in a message with others.

    Args:
        chunk: Number of the chunk.
        source: Rank that sends it.
        target: Rank that receives it.
        reduces: Whether the target adds it to what it holds.
        step: Step of a synchronous schedule; -1 for none.
        start_s: When it starts; None where the schedule has no times.
        end_s: When it has arrived; None where the schedule has no times.
        route: Indices of the links it takes; None for the shortest route.
        message: Number of the message that it travels in, with those listed next to it that have
            the same number; None for a message of its own.
    """

    chunk: int
    source: int
    target: int
    reduces: bool = False
    step: int = -1
    start_s: float | None = None
    end_s: float | None = None
    route: tuple[int, ...] | None = None
    message: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Chunk transfers that do a collective.

    A transfer reads its chunk at the source and writes it at the target. With steps, all transfers
    of a step read what was there when the step began. Without steps but with times, a transfer
    reads at its start and writes at its end. With neither, transfers take effect one after another
    as listed; that order is also the priority on a link.

    Several chunks may travel as one message, which pays its latency once, leaves when its source
    has all of them and arrives as a whole. Without ``messages``, those that times without steps
    show to leave and arrive together are one, and every other transfer is a message of its own.

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
        messages: Message of each transfer, int32 [T], numbered from 0 as listed; transfers of one
            message are listed one after another, and have one source, target, step, time and
            route, and all or none of them add. None for what is said above.
        topology: The network it was made for; None where it fits any.
        name: The algorithm, for people.
        solver: What made it, for people.
        attributes: Anything else worth keeping; it must be fit for JSON.

    Raises:
        ConfigurationError: Arrays differ in length, a chunk, rank or link is out of range, or a
            message's transfers differ in more than the chunk.

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
    messages: Ints | None = field(default=None, repr=False)
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
        if self.messages is not None:
            object.__setattr__(self, "messages", checked_messages(self.messages, self))

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
        if self.topology is not None:
            require_match(self.collective, self.topology)

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
        """Return the number of transfers T."""
        return int(self.chunks.size)

    @property
    def total_s(self) -> float:
        """Return when the last transfer has arrived; 0 where there are no times."""
        return 0.0 if self.ends_s is None else float(self.ends_s.max(initial=0.0))

    @property
    def has_times(self) -> bool:
        """Return whether the transfers have starts and ends."""
        return self.starts_s is not None

    @property
    def has_routes(self) -> bool:
        """Return whether the transfers have routes of their own."""
        return self.route_offsets is not None

    @property
    def num_messages(self) -> int:
        """Return the number of messages; T where each transfer is one of its own."""
        if self.messages is None or not self.num_transfers:
            return self.num_transfers
        return int(self.messages[-1]) + 1

    @cached_property
    def has_steps(self) -> bool:
        """Return whether every transfer has a step (a schedule without transfers has none)."""
        return self.num_transfers > 0 and bool((self.steps >= 0).all())

    @cached_property
    def num_steps(self) -> int:
        """Steps, counted to the last one used; 0 where there are none."""
        return int(self.steps.max(initial=-1)) + 1

    @property
    def order_mode(self) -> int:
        """Return what orders the transfers: `LISTED`, `BY_STEPS` or `BY_TIMES`."""
        if self.has_steps:
            return BY_STEPS
        return BY_TIMES if self.has_times else LISTED

    def slots(self) -> tuple[Ints, Ints, Array, Longs]:
        """Return the (chunk, rank) slots of the transfers, and the order of these.

        Returns:
            Slot that each transfer reads, slot that it writes, int32 [T]; slots filled at first,
            bool [slots]; the transfers as listed, or sorted by step or start, int64 [T].
        """
        read, written, filled = self._numbered(
            self.collective.pre_offsets, self.collective.pre_ranks
        )
        keys = {LISTED: None, BY_STEPS: self.steps, BY_TIMES: self.starts_s}[self.order_mode]
        order = np.arange(self.num_transfers, dtype=np.int64)
        if keys is not None and (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
        return read, written, filled, order

    def _numbered(self, offsets: Longs, ranks: Ints) -> tuple[Ints, Ints, Array]:
        grouped = group_by_key(*of_one_kind(self.chunks), self.collective.num_chunks)
        ends = of_one_kind(self.sources, self.targets)
        found: tuple[Ints, Ints, Array] = number_slots(
            grouped, *ends, of_one_kind(offsets, ranks), self.collective.num_ranks
        )
        return found

    def __len__(self) -> int:
        return self.num_transfers

    def __iter__(self) -> Iterator[Transfer]:
        return (self.transfer(index) for index in range(self.num_transfers))

    def transfer(self, index: int) -> Transfer:
        """Return the transfer of this number, as an object."""
        route = None
        if self.route_offsets is not None and self.route_links is not None:
            first, last = self.route_offsets[index : index + 2]
            route = tuple(self.route_links[first:last].tolist())
        return Transfer(
            chunk=int(self.chunks[index]),
            source=int(self.sources[index]),
            target=int(self.targets[index]),
            reduces=bool(self.reduces[index]),
            step=int(self.steps[index]),
            start_s=None if self.starts_s is None else float(self.starts_s[index]),
            end_s=None if self.ends_s is None else float(self.ends_s[index]),
            route=route,
            message=None if self.messages is None else int(self.messages[index]),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        if self.collective != other.collective or self.topology != other.topology:
            return False
        pairs = ((getattr(self, n), getattr(other, n)) for n in (*_ARRAYS, *_SHORT, *_OPTIONAL))
        return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    # Made anew in another process: arrays would come back writable.
    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return functools.partial(Schedule, **fields), ()

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
        """Make a schedule from transfer objects, in their order.

        Args:
            transfers: The transfers; times, routes and messages for all of them or for none.
            collective: What they do.
            topology: The network that they were made for.
            name: The algorithm.
            solver: What made it.
            attributes: Anything else worth keeping.
        """
        moves = list(transfers)
        ends = [m.start_s is not None and m.end_s is not None for m in moves]
        timed = _all_or_none("times", ends)
        routed = _all_or_none("routes", [m.route is not None for m in moves])
        joined = _all_or_none("message", [m.message is not None for m in moves])
        routes = [m.route or () for m in moves]
        links = np.array([link for route in routes for link in route], dtype=np.int32)
        return cls(
            chunks=np.array([m.chunk for m in moves]),
            sources=np.array([m.source for m in moves]),
            targets=np.array([m.target for m in moves]),
            reduces=np.array([m.reduces for m in moves]),
            steps=np.array([m.step for m in moves]),
            starts_s=np.array([m.start_s for m in moves], dtype=np.float64) if timed else None,
            ends_s=np.array([m.end_s for m in moves], dtype=np.float64) if timed else None,
            route_offsets=np.cumsum([0, *map(len, routes)]) if routed else None,
            route_links=links if routed else None,
            messages=np.array([m.message for m in moves]) if joined else None,
            collective=collective,
            topology=topology,
            name=name,
            solver=solver,
            attributes=attributes or {},
        )

    def replaced(self, **changes: Any) -> Schedule:
        """Return the same schedule with some fields changed, as `dataclasses.replace` does it."""
        return dataclasses.replace(self, **changes)

    # -- changing ------------------------------------------------------------------------------

    def selected(self, transfers: ArrayLike, **changes: Any) -> Schedule:
        """Return only these transfers, in this order, with some fields changed.

        Args:
            transfers: Their indices; one that is named twice is there twice.
            **changes: New values of other fields.
        """
        kept = np.asarray(transfers)
        names = [*_ARRAYS, *_SHORT, *(["starts_s", "ends_s"] if self.has_times else [])]
        parts: dict[str, Any] = {name: getattr(self, name)[kept] for name in names}
        if self.route_offsets is not None and self.route_links is not None:
            parts["route_offsets"], places = rows_of(self.route_offsets, kept)
            parts["route_links"] = self.route_links[places]
        if self.messages is not None:
            parts["messages"] = runs_of(self.messages[kept])
        return self.replaced(**{**parts, **changes})

    def joined(self) -> Schedule:
        """Return the schedule with what a step sends from one rank to another as one message.

        Returns:
            The same transfers, those of a message next to each other; the schedule itself where it
            has no steps, has messages already, or sends one chunk at a time.
        """
        if self.messages is not None or not self.has_steps:
            return self
        found = step_messages(self)
        if found is None:
            return self
        order, messages = found
        return self.selected(order, messages=messages)

    def inverted(self) -> Schedule:
        """Return the schedule run backwards: the inverse collective on the reversed network.

        Redundant transfers are left out first: run backwards they would add twice.

        Returns:
            Transfers in reverse, each from target to source; copies to many become sums.

        Raises:
            ConfigurationError: The collective has no inverse.
        """
        collective = self.collective.inverted()
        lean = self if self.collective.reducing else self.pruned()
        numbers = self.collective.inverse_numbering
        chunks = lean.chunks if numbers is None else numbers[lean.chunks]
        changes: dict[str, Any] = {}
        if lean.has_steps:
            changes["steps"] = np.int32(lean.num_steps - 1) - lean.steps[::-1]
        if lean.starts_s is not None and lean.ends_s is not None:
            changes["starts_s"] = lean.total_s - lean.ends_s[::-1]
            changes["ends_s"] = lean.total_s - lean.starts_s[::-1]
        if lean.route_offsets is not None and lean.route_links is not None:
            changes["route_offsets"] = lean.route_offsets[-1] - lean.route_offsets[::-1]
            changes["route_links"] = lean.route_links[::-1]
        if lean.messages is not None:
            changes["messages"] = runs_of(lean.messages[::-1])
        return lean.replaced(
            collective=collective,
            chunks=chunks[::-1],
            sources=lean.targets[::-1],
            targets=lean.sources[::-1],
            reduces=collective.reducing,
            topology=None if lean.topology is None else lean.topology.reversed(),
            **changes,
        )

    def replicated(self, pieces: int, *, apart: bool = False) -> Schedule:
        """Return the schedule with each chunk cut into equal pieces that follow one another.

        Args:
            pieces: Pieces of each chunk; those of one transfer have its times.
            apart: Whether each piece of a message is one; else the message stays one.

        Returns:
            The finer schedule, of ``pieces`` times as many transfers.
        """
        count = require_whole("pieces", pieces)
        if count == 1:
            return self
        chunks = np.repeat(self.chunks * np.int32(count), count)
        chunks += np.tile(np.arange(count, dtype=np.int32), self.num_transfers)
        rows = np.repeat(np.arange(self.num_transfers), count)
        finer = self.collective.replicated(count)
        if not apart:  # a transfer that travels by itself becomes a message, unless times say so
            said = self.messages is not None or self.has_times
            own = {} if said else {"messages": rows}
            return self.selected(rows, collective=finer, chunks=chunks, **own)
        if self.messages is None:
            return self.selected(rows, collective=finer, chunks=chunks)
        pieces_of = np.tile(np.arange(count), self.num_transfers)
        messages = self.messages[rows].astype(np.int64) * count + pieces_of
        order = np.argsort(messages, kind="stable")
        bare = self.replaced(messages=None)
        return bare.selected(
            rows[order],
            collective=finer,
            chunks=chunks[order],
            messages=runs_of(messages[order]),
        )

    def pruned(self) -> Schedule:
        """Return the schedule without copies that a rank has already, or that no one needs.

        Returns:
            The same schedule if it sums or has nothing to leave out.
        """
        if self.collective.reducing or not self.num_transfers:
            return self
        keys: Any = {LISTED: None, BY_STEPS: self.steps, BY_TIMES: self.ends_s}[self.order_mode]
        if keys is None:
            keys = np.arange(self.num_transfers)
        wanted = self._numbered(self.collective.post_offsets, self.collective.post_ranks)[2]
        keep = _needed(self.slots(), wanted, *of_one_kind(keys))
        return self if keep.all() else self.selected(np.flatnonzero(keep))

    # -- writing and reading -------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the schedule as JSON text, topology included; `from_json` reads it."""
        found: dict[str, Any] = {
            "schema": _SCHEMA,
            "name": self.name,
            "solver": self.solver,
            "collective": collective_to_data(self.collective),
            "topology": None if self.topology is None else self.topology.to_toml(),
            "attributes": dict(self.attributes),
        }
        found |= {key: getattr(self, key).tolist() for key in _ARRAYS}
        found["reduces"] = _short(self.reduces.astype(np.int8))
        found["steps"] = _short(self.steps)
        for key in _OPTIONAL:
            if (array := getattr(self, key)) is not None:
                found[key] = array.tolist()
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return a schedule from the text that `to_json` writes; `verify_schedule` has not seen it.

        Raises:
            DataError: The text is no JSON, of another schema, or lacks or has wrong entries.
        """
        data = parse_json(text, where="the schedule")
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != _SCHEMA:
            raise DataError(
                f"the text is no schedule: its schema is {schema!r}", hint=f"expected {_SCHEMA!r}"
            )
        unknown = sorted(set(data) - _KEYS - {*_ARRAYS, *_SHORT, *_OPTIONAL})
        if unknown:
            raise DataError(f"the schedule has an unknown entry {unknown[0]!r}", hint="remove it")
        for key in ("name", "solver"):
            if not isinstance(value := data.get(key, ""), str):
                message = f"the schedule has a wrong entry: {key} is {value!r:.60}, not text"
                raise DataError(message, hint="write it again with Schedule.to_json")
        try:
            arrays = {key: _numbers(data, key) for key in (*_ARRAYS, *_OPTIONAL) if key in data}
            toml = data["topology"]
            return cls(
                collective=collective_from_data(data["collective"]),
                **{**{key: data[key] for key in _ARRAYS}, **arrays},
                reduces=frozen(data["reduces"], np.bool_),
                steps=frozen(data["steps"], np.int32),
                topology=None if toml is None else read_topology(toml),
                name=data["name"],
                solver=data["solver"],
                attributes=data["attributes"],
            )
        except KeyError as error:
            raise DataError(f"the schedule has no entry {error}", hint="write it again") from None
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            message = f"the schedule has a wrong entry: {error}"
            raise DataError(message, hint="write it again with Schedule.to_json") from None


def _all_or_none(what: str, has: list[bool]) -> bool:
    if any(has) and not all(has):
        raise ConfigurationError(
            f"transfer {has.index(False)} has no {what}, though others have",
            hint=f"give {what} to every transfer or to none",
        )
    return bool(has) and all(has)


@njit
def _needed(slots: tuple[Any, Any, Any, Any], wanted: Any, keys: Any) -> Any:
    """Return the first arrivals that the postcondition or a needed transfer after them asks for."""
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


def _short(array: Array) -> int | list[int]:
    """Return one number where all are equal."""
    if array.size and (array == array[0]).all():
        return int(array[0])
    return [int(value) for value in array]


def _numbers(data: dict[str, Any], key: str) -> Array:
    array = frozen(data[key], np.float64 if key.endswith("_s") else np.int64)
    if array.ndim != 1:
        message = f"{key} is no list of numbers"
        raise DataError(message, hint="write the schedule with Schedule.to_json")
    return array


def compose_all_reduce(first: Schedule, second: Schedule, *, name: str = "") -> Schedule:
    """Make an all-reduce of a schedule that sums and one that spreads the sums.

    Steps, and times, are kept where both have them; the second's come after all of the first's.
    """
    collective = _joined_collective(first.collective, second.collective)
    topology = first.topology if first.topology is not None else second.topology
    if second.topology is not None and second.topology != topology:
        message = "the two schedules were made for different topologies"
        raise ConfigurationError(message, hint="make both for the same one")
    if first.num_transfers and second.num_transfers and first.has_routes != second.has_routes:
        message = "only one of the two schedules has routes"
        raise ConfigurationError(message, hint="give routes to both or to none")
    parts: dict[str, Any] = {
        key: np.concatenate([getattr(first, key), getattr(second, key)])
        for key in ("chunks", "sources", "targets", "reduces")
    }
    if all(part.has_steps or not part.num_transfers for part in (first, second)):
        later = second.steps + np.int32(first.num_steps)
        parts["steps"] = np.concatenate([first.steps, later])
    if first.ends_s is not None and second.ends_s is not None:
        for key in ("starts_s", "ends_s"):
            parts[key] = np.concatenate([getattr(first, key), getattr(second, key) + first.total_s])
    if first.messages is not None or second.messages is not None:
        every = [
            np.arange(part.num_transfers) if part.messages is None else part.messages
            for part in (first, second)
        ]
        parts["messages"] = np.concatenate([every[0], every[1] + first.num_messages])
    routes = [
        (np.diff(part.route_offsets), part.route_links)
        for part in (first, second)
        if part.route_offsets is not None and part.route_links is not None
    ]
    if routes:
        lengths = np.concatenate([[0], *(length for length, _ in routes)])
        parts["route_offsets"] = np.cumsum(lengths, dtype=np.int64)
        parts["route_links"] = np.concatenate([links for _, links in routes])
    return Schedule(
        collective=collective,
        topology=topology,
        name=name or " + ".join(dict.fromkeys(part for part in (first.name, second.name) if part)),
        solver=first.solver if first.solver == second.solver else "",
        attributes={**second.attributes, **first.attributes},
        **parts,
    )


def _joined_collective(first: Collective, second: Collective) -> Collective:
    same_chunks = (
        first.num_ranks == second.num_ranks
        and np.array_equal(first.chunk_weights, second.chunk_weights)
        and np.array_equal(first.post_chunks, second.pre_chunks)
        and np.array_equal(first.post_ranks, second.pre_ranks)
    )
    if not same_chunks:
        raise ConfigurationError(
            f"{second.name} does not begin with what {first.name} leaves",
            hint="both need the same chunks, and the second's pre must be the first's post",
        )
    everywhere = first.num_ranks * first.num_chunks
    whole = first.pre_chunks.size == second.post_chunks.size == everywhere and first.reducing
    if not whole or (second.reducing and not second.single_source):
        raise ConfigurationError(
            f"{first.name} and {second.name} make no all-reduce",
            hint="give a reduce-scatter and an all-gather, or a reduce and a broadcast",
        )
    return second.replaced(
        name="all_reduce",
        reducing=True,
        root=None,
        pre_chunks=first.pre_chunks,
        pre_ranks=first.pre_ranks,
    )
