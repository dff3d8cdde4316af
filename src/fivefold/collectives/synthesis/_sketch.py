"""Communication sketches: what a person knows about a good algorithm, as constraints.

Which logical links there are between boxes and who may use them, which ranks share a switch, which
symmetries the algorithm has (TACCL, arXiv 2111.04867, section 3). Ranks inside a box are numbered
from 0 and all boxes are alike. ``_sketched`` applies the description to a topology.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from fivefold.errors import ConfigurationError, DataError, require_one_of, require_whole
from fivefold.files import parse_json, parse_toml, read_json, read_toml

Policy = Literal["uc-min", "uc-max", "any"]
Balance = Literal["none", "minmax", "maxmin"]
Connections = Literal["all", "direct-map", "fully-connected"] | Mapping[int, tuple[int, ...]]
_POLICIES = ("uc-min", "uc-max", "any")
_NAMED_CONNECTIONS = ("all", "direct-map", "fully-connected")
_BALANCES = ("none", "minmax", "maxmin")


@dataclass(frozen=True, kw_only=True)
class SwitchSketch:
    """Ranks of a box that share a switch, and how many connections it should serve.

    Args:
        ranks: Ranks inside the box.
        policy: "uc-min": few distinct connections (large sizes: less congestion), "uc-max":
            many (small sizes: less latency), "any": no preference.

    Raises:
        ConfigurationError: Fewer than two ranks, a rank twice, or an unknown policy.

    Examples:
        >>> SwitchSketch(ranks=(0, 1, 2), policy="uc-max").policy
        'uc-max'
    """

    ranks: tuple[int, ...]
    policy: Policy = "any"

    def __post_init__(self) -> None:
        numbers = isinstance(self.ranks, Iterable) and all(isinstance(r, int) for r in self.ranks)
        if not numbers:
            raise ConfigurationError(
                f"ranks of a switch are whole numbers; got {self.ranks!r}",
                hint="write ranks = [0, 1, 2]",
            )
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) < 2 or min(self.ranks) < 0:
            message = f"a switch joins two or more different ranks; got {list(self.ranks)}"
            raise ConfigurationError(message, hint="write ranks = [0, 1, 2]")
        require_one_of(self.policy, _POLICIES, f"switch policy {self.policy!r} is unknown")


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """Sketch of an algorithm: what it may use and what it must look like.

    Args:
        name: Name, for logs and the cache.
        boxes: Number of equal boxes; their ranks follow one another.
        chunks: Chunks that a rank's buffer is cut into.
        switches: Ranks inside a box that share a switch.
        balance: "minmax" also minimises the largest, "maxmin" also maximises the smallest load
            of a link; "none": neither.
        connections: Logical links between boxes: "all" that the topology has, "direct-map" (rank
            i to rank i), "fully-connected", or sending rank to receiving ranks, inside the box.
        senders: Sending rank to the ranks whose chunks leave the box only through it; None: any.
        own_chunks_first: Whether a sender sends its own chunks before those it relays.
        symmetry: Pairs (offset, size): rank r is as good as
            (r mod size + offset) mod size + (r div size) * size.

    Raises:
        ConfigurationError: A number is out of range, or a value is unknown.

    References:
        TACCL, arXiv 2111.04867, section 3.

    Examples:
        >>> relay = Sketch(name="relay", boxes=2, connections={0: (1,)}, symmetry=((8, 16),))
        >>> Sketch.from_toml(relay.to_toml()) == relay
        True
    """

    name: str = "sketch"
    boxes: int = 1
    chunks: int = 1
    switches: tuple[SwitchSketch, ...] = ()
    balance: Balance = "none"
    connections: Connections = "all"
    senders: Mapping[int, tuple[int, ...]] | None = None
    own_chunks_first: bool = False
    symmetry: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for key in ("boxes", "chunks"):
            require_whole(f"{key} of a sketch", getattr(self, key), hint=f"write {key} = 2")
        require_one_of(self.balance, _BALANCES, f"balance {self.balance!r} is unknown")
        for key, kind, example in (("name", str, '"relay"'), ("own_chunks_first", bool, "true")):
            if not isinstance(value := getattr(self, key), kind):
                raise ConfigurationError(
                    f"{key} of a sketch is {value!r}", hint=f"write {key} = {example}"
                )
        if isinstance(self.connections, str):
            if self.connections not in _NAMED_CONNECTIONS:
                message = f"connections {self.connections!r} is unknown"
                hint = f"use one of {', '.join(_NAMED_CONNECTIONS)}, or sender to receivers"
                raise ConfigurationError(message, hint=hint)
        else:
            object.__setattr__(self, "connections", _rank_map("connections", self.connections))
        if self.senders is not None:
            object.__setattr__(self, "senders", _rank_map("senders", self.senders))
            served = [rank for ranks in self.senders.values() for rank in ranks]
            if len(set(served)) < len(served):
                message = f"rank {max(served, key=served.count)} has several senders"
                raise ConfigurationError(message, hint="name each rank under one sender")
        if not isinstance(self.symmetry, Iterable):
            raise _no_symmetry(self.symmetry)
        object.__setattr__(self, "symmetry", tuple(_offset(pair) for pair in self.symmetry))

    def reversed(self) -> Sketch:
        """Return the sketch for the same links the other way round, for sums solved as copies.

        Examples:
            >>> Sketch(boxes=2, connections={0: (1,)}).reversed().connections
            {1: (0,)}
        """
        if isinstance(self.connections, str):
            return self
        turned: dict[int, tuple[int, ...]] = {}
        for sender, receivers in sorted(self.connections.items()):
            for receiver in receivers:
                turned[receiver] = (*turned.get(receiver, ()), sender)
        senders = self.senders
        if senders is not None:
            ends = {sender: (others or (sender,))[0] for sender, others in self.connections.items()}
            merged: dict[int, tuple[int, ...]] = {}
            for sender, ranks in senders.items():
                end = ends.get(sender, sender)
                merged[end] = (*merged.get(end, ()), *ranks)
            senders = merged
        return replace(self, senders=senders, connections=turned)

    def connects(self, source: int, target: int) -> bool:
        """Return whether a rank of a box may send to one of another; both count inside the box."""
        if isinstance(self.connections, str):
            return self.connections != "direct-map" or source == target
        return target in self.connections.get(source, ())

    def to_toml(self) -> str:
        """Return the sketch as a TOML file."""
        name = json.dumps(self.name, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines = [f"name = {name}", f"boxes = {self.boxes}"]
        lines += [f"chunks = {self.chunks}", f'balance = "{self.balance}"']
        lines += [f"own_chunks_first = {str(self.own_chunks_first).lower()}"]
        lines += [f"symmetry = {json.dumps([list(pair) for pair in self.symmetry])}"]
        if isinstance(self.connections, str):
            lines.append(f'connections = "{self.connections}"')
        for switch in self.switches:
            ranks = json.dumps(list(switch.ranks))
            lines += ["", "[[switches]]", f"ranks = {ranks}", f'policy = "{switch.policy}"']
        for key, table in (("connections", self.connections), ("senders", self.senders)):
            if table is not None and not isinstance(table, str):
                lines += ["", f"[{key}]"]
                lines += [f"{rank} = {json.dumps(list(others))}" for rank, others in table.items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, source: str | Path) -> Sketch:
        """Read a sketch: a path, or the text of a TOML file.

        Raises:
            ConfigurationError: The text is no TOML, a key is unknown or a value is not allowed.
        """
        table = (
            read_toml(source, what="sketch")
            if _is_file(source, ".toml")
            else parse_toml(str(source), where="the sketch")
        )
        for key in table:
            require_one_of(key, [one.name for one in fields(cls)], f"a sketch has no key {key!r}")
        switches = table.pop("switches", [])
        if not isinstance(switches, list) or not all(isinstance(one, dict) for one in switches):
            message = f"switches of a sketch are tables; got {switches!r}"
            raise ConfigurationError(message, hint="write [[switches]] and ranks = [0, 1]")
        return cls(**table, switches=tuple(_switch(entry) for entry in switches))

    @classmethod
    def from_taccl(cls, source: str | Path | Mapping[str, Any], *, name: str = "taccl") -> Sketch:
        """Read a sketch file of TACCL: a path, JSON text, or the parsed table.

        Raises:
            ConfigurationError: A strategy is unknown or a key is missing.
            DataError: The text is no JSON.

        Examples:
            >>> table = {"nnodes": 1, "intranode_sketch": {"strategy": "none"},
            ...          "symmetry_offsets": [], "hyperparameters": {"input_chunkup": 6}}
            >>> Sketch.from_taccl(table).chunks
            6
        """
        table = _json_table(source)
        try:
            inside = table["intranode_sketch"]
            between = table.get("internode_sketch", {})
            return cls(
                name=name,
                boxes=table["nnodes"],
                chunks=table["hyperparameters"]["input_chunkup"],
                switches=_taccl_switches(inside),
                balance=_taccl_balance(inside["strategy"]),
                connections=_taccl_connections(between),
                senders=between.get("gpus_to_sender_rev_map"),
                own_chunks_first=between.get("enforce_ordering", False),
                symmetry=tuple(table.get("symmetry_offsets", ())),
            )
        except KeyError as error:
            raise ConfigurationError(f"the TACCL sketch has no key {error}") from error
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"the TACCL sketch has a value of a wrong type: {error}",
                hint="compare it with the sketches that TACCL ships",
            ) from error


def _is_file(source: str | Path, suffix: str) -> bool:
    return isinstance(source, Path) or ("\n" not in source and source.endswith(suffix))


def _json_table(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    table = (
        read_json(source, what="TACCL sketch")
        if _is_file(source, ".json")
        else parse_json(str(source), where="the TACCL sketch")
    )
    if not isinstance(table, dict):
        raise DataError(f"the TACCL sketch is a {type(table).__name__}", hint="it begins with {")
    return table


def _taccl_switches(inside: Mapping[str, Any]) -> tuple[SwitchSketch, ...]:
    if inside["strategy"] != "switch":
        return ()
    policies = inside["switch_hyperedge_strategy"]
    if len(policies) != len(inside["switches"]):
        message = f"{len(inside['switches'])} switches, but {len(policies)} policies"
        raise ConfigurationError(message, hint="give one policy for each switch")
    pairs = zip(inside["switches"], policies, strict=True)
    return tuple(SwitchSketch(ranks=tuple(ranks), policy=policy) for ranks, policy in pairs)


def _taccl_balance(strategy: str) -> Balance:
    message = f"intranode strategy {strategy!r} is unknown"
    require_one_of(strategy, ("switch", *_BALANCES), message)
    return "none" if strategy == "switch" else cast("Balance", strategy)


def _taccl_connections(between: Mapping[str, Any]) -> Connections:
    if not between:
        return "all"
    if between.get("strategy") != "relay":
        message = f"internode strategy {between.get('strategy')!r} is not supported"
        raise ConfigurationError(message, hint="use relay")
    return cast("Connections", between["internode_conn"])


def _switch(entry: Mapping[str, Any]) -> SwitchSketch:
    unknown = set(entry) - {"ranks", "policy"}
    if unknown or "ranks" not in entry:
        message = f"a switch of a sketch has ranks and policy; got {sorted(entry)}"
        raise ConfigurationError(message, hint='write ranks = [0, 1] and policy = "uc-min"')
    return SwitchSketch(**entry)


def _rank_map(key: str, table: Mapping[Any, Iterable[int]]) -> dict[int, tuple[int, ...]]:
    try:
        ranks = {  # the keys of a file are text
            int(rank) if isinstance(rank, str) else operator.index(rank): tuple(
                operator.index(other) for other in others
            )
            for rank, others in table.items()
        }
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        message = f"{key} of a sketch maps ranks to lists of ranks; got {table!r}"
        hint = f"write [{key}] and a line such as 0 = [1, 3]"
        raise ConfigurationError(message, hint=hint) from error
    numbers = [*ranks, *(other for others in ranks.values() for other in others)]
    if min(numbers, default=0) < 0:
        raise ConfigurationError(
            f"{key} of a sketch names rank {min(numbers)}", hint="ranks are counted from 0"
        )
    return ranks


def _offset(pair: Iterable[int]) -> tuple[int, int]:
    numbers = tuple(pair) if isinstance(pair, Iterable) else ()
    whole = all(isinstance(number, int) for number in numbers)
    if len(numbers) != 2 or not whole or not 0 < numbers[0] <= numbers[1]:
        raise _no_symmetry(pair)
    return numbers[0], numbers[1]


def _no_symmetry(got: object) -> ConfigurationError:
    shown = list(got) if isinstance(got, tuple) else got
    message = f"a symmetry is [offset, size] with 0 < offset <= size; got {shown}"
    return ConfigurationError(message, hint="symmetry = [[8, 16]] exchanges two boxes of 8 ranks")


def published_sketch(name: str) -> Sketch:
    """Return one of TACCL's published sketches.

    Args:
        name: Its name, such as ``sk1-dgx2-n2``.

    Raises:
        ConfigurationError: The name is unknown.

    Examples:
        >>> sketch = published_sketch("sk1-ndv2-n2")
        >>> sketch.boxes, sketch.connections, sketch.symmetry
        (2, {0: (1,)}, ((8, 16),))
    """
    require_one_of(name, _PUBLISHED, f"there is no published sketch {name!r}")
    return _PUBLISHED[name]


def _dgx2(name: str, policy: Policy, **more: Any) -> Sketch:
    symmetry = ((2, 16), (16, 32)) if more.get("boxes") == 2 else ((2, 16),)
    return Sketch(
        name=name,
        switches=(SwitchSketch(ranks=tuple(range(16)), policy=policy),),
        symmetry=symmetry,
        **more,
    )


def _ndv2(name: str, boxes: int, connections: Connections) -> Sketch:
    symmetry = ((8, 8 * boxes),) if boxes > 1 else ()
    return Sketch(name=name, boxes=boxes, connections=connections, symmetry=symmetry)


_PUBLISHED = {
    sketch.name: sketch
    for sketch in (
        _dgx2("sk-dgx2-n1", "uc-min", chunks=2),
        _dgx2("sk1-dgx2-n1", "uc-min"),
        _dgx2(
            "sk1-dgx2-n2",
            "uc-min",
            boxes=2,
            chunks=2,
            connections={odd: (odd - 1,) for odd in range(1, 16, 2)},
            senders={odd: (odd - 1, odd) for odd in range(1, 16, 2)},
            own_chunks_first=True,
        ),
        _dgx2(
            "sk2-dgx2-n2",
            "uc-max",
            boxes=2,
            connections="direct-map",
            senders={rank: (rank,) for rank in range(16)},
        ),
        Sketch(name="sk-ndv2-n1-cUp6", chunks=6),
        _ndv2("sk1-ndv2-n1", 1, "all"),
        _ndv2("sk1-ndv2-n2", 2, {0: (1,)}),
        _ndv2("sk1-ndv2-n4", 4, {0: (1,)}),
        _ndv2("sk2-ndv2-n2", 2, "fully-connected"),
        _ndv2("sk2-ndv2-n4", 4, "fully-connected"),
        _ndv2("sk3-ndv2-n2", 2, "direct-map"),
    )
}
