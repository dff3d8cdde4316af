"""Topology files: TOML with a unit in every quantity, read strictly and written exactly.

A file holds ``nodes``, ``links`` and ``switches`` as lists of small tables; ``generate`` begins
with a topology in one line of text, and ``changes`` gives links other values. Numbers are written
so that reading them gives the same float to the last bit. Errors name the table, the key and the
key that was probably meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.files import parse_toml, read_toml
from fivefold.network.topology._elements import Aggregation, Link, Node, SwitchAbility
from fivefold.network.topology._topology import Topology
from fivefold.units import parse_bytes, parse_bytes_per_s, parse_duration_s

_TOP_KEYS = ("name", "source", "generate", "nodes", "links", "switches", "changes")
_NODE_KEYS = ("name", "kind", "host")
_LINK_KEYS = ("source", "target", "bandwidth", "latency", "count", "both_ways")
_CHANGE_KEYS = ("source", "target", "bandwidth", "latency", "count", "both_ways", "remove")
_SWITCH_KEYS = ("node", "multicast", "aggregation")
_AGGREGATION_KEYS = ("slots", "slot_size", "rate", "dtypes")
_RATES = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def read_topology(source: str | Path) -> Topology:
    """Read a topology from a file or from text, see :meth:`Topology.from_toml`.

    Raises:
        ConfigurationError: The file is missing, is not TOML, or describes no topology.
    """
    if isinstance(source, str) and ("\n" in source or "=" in source):
        place, default_name = "the topology's text", ""
        tables = parse_toml(source, where=place)
    else:
        place, default_name = f"topology file {source}", Path(source).stem
        tables = read_toml(source, what="topology file")
    try:
        return _topology(tables, default_name=default_name)
    except FivefoldError as error:
        raise type(error)(f"{place}: {error.message}", hint=error.hint) from None


def format_topology(topology: Topology) -> str:
    """Write a topology as TOML, see :meth:`Topology.to_toml`."""
    lines = [f"name = {_quoted(topology.name)}"]
    if topology.source:
        lines.append(f"source = {_quoted(topology.source)}")
    lines += ["", "nodes = [", *map(_node_line, topology.nodes), "]"]
    lines += ["", "links = [", *map(_link_line, topology.links), "]"]
    for ability in topology.switches:
        lines += ["", *_switch_lines(ability)]
    return "\n".join(lines) + "\n"


def _topology(tables: Mapping[str, Any], *, default_name: str) -> Topology:
    _check_keys(tables, _TOP_KEYS, "the file")
    base = _generated(tables)
    nodes = [
        Node(
            _text(entry, "name", place),
            _text(entry, "kind", place),  # type: ignore[arg-type]  # Node checks it
            _text(entry, "host", place) if "host" in entry else None,
        )
        for entry, place in _entries(tables, "nodes", _NODE_KEYS)
    ]
    links = [
        link
        for entry, place in _entries(tables, "links", _LINK_KEYS)
        for link in _links(entry, place)
    ]
    switches = [
        _switch(entry, place) for entry, place in _entries(tables, "switches", _SWITCH_KEYS)
    ]
    name = _text(tables, "name", "the file") if "name" in tables else default_name or "topology"
    source = _text(tables, "source", "the file") if "source" in tables else ""
    if base is not None:
        described = {ability.node for ability in switches}
        nodes, links = [*base.nodes, *nodes], [*base.links, *links]
        switches = [*(one for one in base.switches if one.node not in described), *switches]
        source = source or base.source
    found = Topology(name, nodes, links, switches=switches, source=source)
    for entry, place in _entries(tables, "changes", _CHANGE_KEYS):
        found = _changed(found, entry, place)
    return found


def _generated(tables: Mapping[str, Any]) -> Topology | None:
    if "generate" not in tables:
        return None
    from fivefold.network.topology._parse import parse_topology  # noqa: PLC0415 - a cycle

    text = _text(tables, "generate", "the file")
    if text.endswith(".toml") or Path(text).is_file():  # a file that names itself never ends
        raise ConfigurationError(
            f"generate names the file {text!r}", hint='write a generator, such as "torus:4x4"'
        )
    return parse_topology(text)


def _changed(topology: Topology, entry: Mapping[str, Any], place: str) -> Topology:
    """One of the ``changes``; both directions unless it says otherwise."""
    ends = _text(entry, "source", place), _text(entry, "target", place)
    both_ways, remove = (
        _boolean(entry, key, place, default=key == "both_ways") for key in ("both_ways", "remove")
    )
    values = {
        key: _quantity(entry, key, place, example)
        for key, example in (("bandwidth", "25 GB/s"), ("latency", "1 us"))
        if key in entry
    }
    if remove == bool(values or "count" in entry):
        raise ConfigurationError(
            f"{place} must either change something or remove the link",
            hint='write bandwidth = "1 GB/s", or remove = true',
        )
    if not remove:
        return topology.with_changed_link(
            *ends, **values, count=entry.get("count"), both_ways=both_ways
        )
    gone = {ends, ends[::-1]} if both_ways else {ends}
    kept = [link for link in topology.links if (link.source, link.target) not in gone]
    if len(kept) == topology.num_links:
        message = f"{place}: there is no link {ends[0]!r} -> {ends[1]!r} to remove"
        raise ConfigurationError(message, hint=_near_links(topology, ends))
    return topology.with_links(kept)


def _near_links(topology: Topology, ends: tuple[str, str]) -> str:
    """What leads from the node, or that there is no such node."""
    if ends[0] not in {node.name for node in topology.nodes}:
        return f"there is no node {ends[0]!r} either"
    targets = sorted({link.target for link in topology.links if link.source == ends[0]})
    return f"from {ends[0]!r} links lead to {', '.join(targets[:6]) or 'nowhere'}"


def _links(entry: Mapping[str, Any], place: str) -> Iterator[Link]:
    ends = _text(entry, "source", place), _text(entry, "target", place)
    both_ways = _boolean(entry, "both_ways", place, default=False)
    for first, second in (ends, ends[::-1]) if both_ways else (ends,):
        yield Link(
            first,
            second,
            bandwidth_bytes_per_s=parse_bytes_per_s(
                _quantity(entry, "bandwidth", place, "25 GB/s")
            ),
            latency_s=parse_duration_s(
                _quantity({"latency": "0 s", **entry}, "latency", place, "1 us")
            ),
            count=entry.get("count", 1),
        )


def _switch(entry: Mapping[str, Any], place: str) -> SwitchAbility:
    node = _text(entry, "node", place)
    multicast = _boolean(entry, "multicast", place, default=False)
    if "aggregation" not in entry:
        return SwitchAbility(node, multicast=multicast)
    table, place = entry["aggregation"], f"{place}.aggregation"
    if not isinstance(table, dict):
        raise ConfigurationError(f"{place} must be a table; got {table!r}")
    _check_keys(table, _AGGREGATION_KEYS, place)
    _require(table, "slots", place)
    rate = (
        parse_bytes_per_s(_quantity(table, "rate", place, "25 GB/s")) if "rate" in table else None
    )
    return SwitchAbility(
        node,
        multicast=multicast,
        aggregation=Aggregation(
            slots=table["slots"],
            slot_bytes=parse_bytes(_quantity(table, "slot_size", place, "256 B")),
            rate_bytes_per_s=rate,
            dtypes=table.get("dtypes", ()),
        ),
    )


def _entries(
    tables: Mapping[str, Any], key: str, allowed: tuple[str, ...]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    entries = tables.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(
            f"{key} must be a list of tables; got {str(entries)[:60]}",
            hint=f"write {key} = [{{ ... }}, ...] or [[{key}]]",
        )
    for position, entry in enumerate(entries):
        place = f"{key}[{position}]"
        _check_keys(entry, allowed, place)
        yield entry, place


def _check_keys(table: Mapping[str, Any], allowed: tuple[str, ...], place: str) -> None:
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(
                f"{place} has the unknown key {key!r}",
                hint=f"{hint}the keys are {', '.join(allowed)}",
            )


def _require(table: Mapping[str, Any], key: str, place: str) -> Any:
    if key not in table:
        raise ConfigurationError(f"{place} has no {key}", hint=f"add {key} = ...")
    return table[key]


def _text(table: Mapping[str, Any], key: str, place: str) -> str:
    value = _require(table, key, place)
    if not isinstance(value, str):
        raise ConfigurationError(f"{place}: {key} must be text in quotes; got {value!r}")
    return value


def _boolean(table: Mapping[str, Any], key: str, place: str, *, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{place}: {key} must be true or false; got {value!r}")
    return value


def _quantity(table: Mapping[str, Any], key: str, place: str, example: str) -> str:
    """A quantity as text; plain numbers are refused, for a file must say its units."""
    value = _require(table, key, place)
    if not isinstance(value, str) or not any(letter.isalpha() for letter in value.strip()[-1:]):
        raise ConfigurationError(
            f"{place}: {key} must have a unit; got {value!r}", hint=f'write it as "{example}"'
        )
    return value


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped as well.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _node_line(node: Node) -> str:
    host = f", host = {_quoted(node.host)}" if node.host is not None else ""
    return f"  {{ name = {_quoted(node.name)}, kind = {_quoted(node.kind)}{host} }},"


def _link_line(link: Link) -> str:
    parts = [
        f"source = {_quoted(link.source)}",
        f"target = {_quoted(link.target)}",
        f'bandwidth = "{_rate(link.bandwidth_bytes_per_s)}"',
    ]
    if link.latency_s > 0:
        parts.append(f'latency = "{_time(link.latency_s)}"')
    if link.count > 1:
        parts.append(f"count = {link.count}")
    return f"  {{ {', '.join(parts)} }},"


def _switch_lines(ability: SwitchAbility) -> Iterator[str]:
    yield "[[switches]]"
    yield f"node = {_quoted(ability.node)}"
    yield f"multicast = {str(ability.multicast).lower()}"
    if (unit := ability.aggregation) is not None:
        yield "[switches.aggregation]"
        yield f"slots = {unit.slots}"
        yield f'slot_size = "{unit.slot_bytes} B"'
        if unit.rate_bytes_per_s is not None:
            yield f'rate = "{_rate(unit.rate_bytes_per_s)}"'
        if unit.dtypes:
            yield f"dtypes = [{', '.join(map(_quoted, unit.dtypes))}]"


def _rate(bytes_per_s: float) -> str:
    for unit, scale in _RATES:
        if bytes_per_s >= scale:
            text = f"{_shortest(bytes_per_s / scale)} {unit}"
            if parse_bytes_per_s(text) == bytes_per_s:
                return text
    return f"{_shortest(bytes_per_s)} B/s"


def _time(seconds: float) -> str:
    for unit, scale in _TIMES:
        if seconds >= scale:
            text = f"{_shortest(seconds / scale)} {unit}"
            if len(text) < 12 and parse_duration_s(text) == seconds:
                return text
            rounded = f"{seconds / scale:.6g} {unit}"
            if parse_duration_s(rounded) == seconds:
                return rounded
    return f"{_shortest(seconds)} s"


def _shortest(number: float) -> str:
    text = repr(float(number))
    return text.removesuffix(".0")
