"""Network files of ASTRA-sim's analytical backend: YAML with one entry per dimension.

NPU 0 and its neighbours lie in the first dimension; every dimension joins, for each choice of the
other coordinates, its NPUs by a ring, pair by pair, or by a switch. As ASTRA-sim has it, bandwidth
is that of one link and direction, a GB is 2^30 bytes there, and latency is that of one link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fivefold.errors import ConfigurationError, DataError
from fivefold.files import parse_yaml
from fivefold.network.topology._build import Builder, Wire
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers.boxes import Source

OPTIONS: tuple[str, ...] = ()
_KEYS = ("topology", "npus_count", "bandwidth", "latency")
_GIBI = 1 << 30
_MOST_NPUS, _MOST_DIMENSIONS, _MOST_LINKS = 65_536, 16, 1_000_000
_HINT = "write such as topology: [ Ring, Switch ], npus_count: [ 8, 4 ]"


def recognises(text: str) -> bool:
    """Return whether a text has the keys of such a file at the beginning of lines."""
    starts = {line.partition(":")[0].strip() for line in text.splitlines() if ":" in line}
    return {"topology", "npus_count"} <= starts and not text.lstrip().startswith(("<", "{"))


def read(text: str, source: Source, *, name: str) -> Topology:
    """Return the topology of a file.

    Raises:
        DataError: It is no YAML, lacks a key, or its lists do not fit.
    """
    where, reading = source.reading.source, source.reading
    if source.boxes > 1:
        message = f"{where} says all of its NPUs; got {source.boxes} boxes"
        raise ConfigurationError(message, hint="add a dimension to the file")
    kinds, counts, rates, delays = _lists(_table(text, source), where)
    reading.assume("GB", "2^30 bytes", "as ASTRA-sim's own code counts them")
    inner = counts[0]
    reading.assume("NPUs of a host", inner, "those of the first dimension are one machine")
    builder = Builder()
    for npu in range(math.prod(counts)):
        builder.node(f"npu{npu}", "gpu", host=f"host{npu // inner}")
    for place, kind in enumerate(kinds):
        if counts[place] > 1:
            wire = Wire(rates[place] * _GIBI, delays[place] * 1e-9)
            for number, members in enumerate(_lines(counts, place)):
                _join(builder, kind, members, wire, f"dim{place}/switch{number}")
    return builder.done(name, source=f"{where}. Assumed: a GB is 2^30 bytes")


def _table(text: str, source: Source) -> dict[str, Any]:
    where, reading = source.reading.source, source.reading
    table = parse_yaml(text, where=where)
    if not isinstance(table, dict):
        raise DataError(f"{where} is no table of keys", hint=_HINT)
    missing = [key for key in _KEYS if key not in table]
    if missing:
        raise DataError(f"{where} has no {missing[0]}", hint=f"add the key; {_HINT}")
    for key in dict.fromkeys(map(str, table)):
        if key in _KEYS:
            reading.take(key)
        else:
            reading.leave_out(key, "not known of ASTRA-sim's network files")
    return table


def _lists(
    table: dict[str, Any], where: str
) -> tuple[list[str], list[int], list[float], list[float]]:
    values = [table[key] if isinstance(table[key], list) else [table[key]] for key in _KEYS]
    kinds, counts, rates, delays = values
    lengths = {key: len(value) for key, value in zip(_KEYS, values, strict=True)}
    if len(set(lengths.values())) > 1 or not 0 < len(kinds) <= _MOST_DIMENSIONS:
        said = ", ".join(f"{key} {number}" for key, number in lengths.items())
        raise DataError(f"{where} has lists of several lengths: {said}", hint="one per dimension")
    names = {"ring": "Ring", "fullyconnected": "FullyConnected", "switch": "Switch"}
    for kind in kinds:
        if str(kind).lower() not in names:
            message = f"{where} has the dimension {kind!r:.40}"
            raise DataError(message, hint=f"known are {', '.join(names.values())}")
    for key, numbers, least in (
        ("npus_count", counts, 1),
        ("bandwidth", rates, 0),
        ("latency", delays, 0),
    ):
        for number in numbers:
            plain = isinstance(number, int if key == "npus_count" else int | float)
            right = plain and not isinstance(number, bool) and math.isfinite(number)
            if not right or number < least or (key == "bandwidth" and number == 0):
                raise DataError(f"{key} of {where} has {number!r:.40}", hint=_HINT)
    if math.prod(counts) > _MOST_NPUS:
        message = f"{where} has {math.prod(counts):,} NPUs"
        raise DataError(message, hint=f"at most {_MOST_NPUS:,} are read")
    kinds = [str(kind).lower() for kind in kinds]
    links = sum(math.prod(counts) * _degree(*one) for one in zip(kinds, counts, strict=True))
    if links > _MOST_LINKS:
        message = f"{where} has {links:,} links"
        hint = f"at most {_MOST_LINKS:,} are read; a Switch joins as many with one link each"
        raise DataError(message, hint=hint)
    return kinds, counts, rates, delays


def _degree(kind: str, count: int) -> int:
    """Return the links that leave an NPU in a dimension, and those that come from its switch."""
    switched = 2 if count > 1 else 0
    return {"switch": switched, "ring": min(count - 1, 2), "fullyconnected": count - 1}[kind]


def _lines(counts: Sequence[int], place: int) -> Iterator[list[int]]:
    """Yield the NPUs along a dimension for each choice of the other coordinates."""
    step = math.prod(counts[:place])
    others = [range(n) for at, n in enumerate(counts) if at != place]
    steps = [math.prod(counts[:at]) for at in range(len(counts)) if at != place]
    for chosen in itertools.product(*reversed(others)):
        first = sum(a * b for a, b in zip(reversed(chosen), steps, strict=True))
        yield [first + step * n for n in range(counts[place])]


def _join(builder: Builder, kind: str, members: Sequence[int], wire: Wire, switch: str) -> None:
    names = [f"npu{member}" for member in members]
    if kind == "switch":
        middle = builder.node(switch, "switch")
        for name in names:
            builder.join(name, middle, wire)
        return
    pairs = list(itertools.combinations(names, 2))
    if kind == "ring" and len(names) > 2:
        pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    for pair in pairs:
        builder.join(*pair, wire)
