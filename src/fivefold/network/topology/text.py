"""Topologies as text: one line such as ``torus:4x4``, TOML files, and files of other programs.

A file holds ``nodes``, ``links`` and ``switches`` as lists of small tables; ``generate`` begins
with a topology in one line of text, and ``changes`` gives links other values. Every quantity has a
unit, and numbers are written so that reading them gives the same float to the last bit.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import ConfigurationError, FivefoldError, require_one_of
from fivefold.files import nearest_file, parse_toml, read_toml
from fivefold.network.topology import _direct, _fabrics
from fivefold.network.topology._build import HostSpec
from fivefold.network.topology._fabrics import Port, clos
from fivefold.network.topology._graph import Aggregation, Link, Node, SwitchAbility
from fivefold.network.topology._machines import MACHINES, load_lingjun, named_topology
from fivefold.network.topology._taccl import PUBLISHED, TacclProfile
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers import (
    FORMATS,
    FileText,
    file_of,
    format_of,
    read_other,
    unknown_file,
)
from fivefold.reading import Reading
from fivefold.units import parse_bytes, parse_bytes_per_s, parse_duration_s

_MOST_DIGITS = 18  # of a count; what is longer is no number, and refused as such
_HOST_KEYS = tuple(field.name for field in fields(HostSpec))
_PORT_KEYS = tuple(field.name for field in fields(Port))
_GRAPH_KEYS = ("generate", "nodes", "links", "switches", "changes")
_TOP_KEYS = ("name", "source", *_GRAPH_KEYS)
# Of the same file, which a planner reads too: GPUs, their software, and links as tiers.
_MACHINE_KEYS = (
    *("base", "stack", "device", "tier", "sources", "topology"),
    *("gpus", "gpus_per_node", "nic", "nics_per_node"),
)
_NODE_KEYS = ("name", "kind", "host")
_QUANTITIES = frozenset(
    {"bandwidth", "latency", "global_latency", "nvlink", "nvlink_latency", "pcie", "pcie_latency"}
)
_LINK_KEYS = ("source", "target", "bandwidth", "latency", "count", "both_ways")
_CHANGE_KEYS = ("source", "target", "bandwidth", "latency", "count", "both_ways", "remove")
_SWITCH_KEYS = ("node", "multicast", "aggregation")
_AGGREGATION_KEYS = ("slots", "slot_size", "rate", "dtypes")


@dataclass(frozen=True)
class _Generator:
    build: Callable[..., Topology]
    example: str

    @property
    def first(self) -> str:
        """Name of the argument that needs no key."""
        return next(iter(inspect.signature(self.build).parameters))


_GENERATORS: Mapping[str, _Generator] = {
    example.partition(":")[0]: _Generator(build, example)
    for build, example in (
        (_direct.ring, "ring:8"),
        (_direct.line, "line:8"),
        (_direct.mesh, "mesh:4x4"),
        (_direct.torus, "torus:4x4x4"),
        (_direct.hypercube, "hypercube:6"),
        (_direct.fully_connected, "fully_connected:8"),
        (_direct.star, "star:8"),
        (_direct.switch, "switch:8"),
        (_fabrics.fat_tree, "fat_tree:8,gpus=8,nics=4"),
        (_fabrics.leaf_spine, "leaf_spine:16,leaves=4,spines=2"),
        (_fabrics.clos, "clos:4x8x16,aggs=8,cores=32,gpus=8"),
        (_fabrics.rail_optimized, "rail_optimized:16,spines=8"),
        (_fabrics.rail_only, "rail_only:16"),
        (_fabrics.dual_plane, "dual_plane:16,hosts_per_segment=8,aggs_per_plane=4"),
        (_direct.dragonfly, "dragonfly:4"),
    )
}


class Catalogue(NamedTuple):
    """Names that :func:`parse_topology` knows."""

    machines: Mapping[str, str]
    generators: Mapping[str, tuple[str, str]]
    profiles: tuple[str, ...]
    files: Mapping[str, str]


def catalogue() -> Catalogue:
    """Return all that :func:`parse_topology` knows by name."""
    generators = {}
    for name, generator in _GENERATORS.items():
        summary = (inspect.getdoc(generator.build) or "").partition("\n")[0]
        summary = summary.removeprefix("Build ")
        generators[name] = generator.example, summary[:1].upper() + summary[1:]
    machines = {name: machine.source for name, machine in MACHINES.items()}
    files = {form.name: form.what for form in FORMATS}
    return Catalogue(machines, generators, tuple(PUBLISHED), files)


def parse_topology(
    text: str,
    *,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    folder: Path | None = None,
) -> Topology:
    """Make a topology from one line of text.

    ``NAME:VALUE,KEY=VALUE,...`` calls a generator (``torus:4x4``, ``leaf_spine:16,leaves=4,
    spines=2,gpus=8``), the keys being its arguments and those of :class:`HostSpec`;
    ``MACHINE:BOXES`` is a named machine (``dgx_a100:2``), ``taccl:PROFILE:BOXES`` one of TACCL's
    profiles, ``lingjun:PATH`` a Lingjun file, and anything that ends in ``.toml`` a topology file.
    A file of another program is known by its content: ``PATH``, ``PATH:BOXES`` or
    ``PATH:BOXES,KEY=VALUE,...`` with what it does not say (``nic=400Gbit/s``). What was assumed
    about it is logged; :func:`topology_with_reading` returns it.

    Args:
        text: The line.
        bandwidth: Of the links that the generator's ``bandwidth`` means; only for generators.
        latency: Of those links; only for generators.
        folder: Where a file may lie, besides the working directory.

    Raises:
        ConfigurationError: The line says no topology.

    Examples:
        >>> parse_topology("torus:4x4", bandwidth="50 GB/s").num_links
        64
        >>> parse_topology("dgx_h100:2").num_ranks, parse_topology("fat_tree:4,gpus=2").num_ranks
        (16, 32)
    """
    topology, reading = topology_with_reading(
        text, bandwidth=bandwidth, latency=latency, folder=folder
    )
    if reading is not None:
        reading.log()
    return topology


def topology_with_reading(
    text: str,
    *,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    folder: Path | None = None,
) -> tuple[Topology, Reading | None]:
    """Make a topology from one line of text, with the account of a file of another program.

    Args:
        text: The line.
        bandwidth: As of :func:`parse_topology`.
        latency: As of :func:`parse_topology`.
        folder: Where a file may lie, besides the working directory.

    Returns:
        The topology; and what of a file was read, assumed and left out, None for what is ours.

    Raises:
        ConfigurationError: The line says no topology.
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"{text!r:.60} is no topology", hint='such as "ring:8"')
    name, _, rest = text.strip().partition(":")
    if name in _GENERATORS:
        return _generate(name, rest, {"bandwidth": bandwidth, "latency": latency}), None
    if bandwidth is not None or latency is not None:
        raise ConfigurationError(
            f"bandwidth and latency of {text!r} are given by what it describes",
            hint=f"only generators take them: {', '.join(_GENERATORS)}",
        )
    if name in MACHINES:
        return named_topology(name, boxes=_count(rest or "1", text)), None
    if name == "lingjun":
        return load_lingjun(rest), None
    if name == "taccl":
        file = file_of(rest, folder=folder)
        if file is not None:
            return _of_file(file)
        profile, _, boxes = rest.partition(":")
        return TacclProfile.load(profile).to_topology(boxes=_count(boxes or "1", text)), None
    file = file_of(text, folder=folder)
    if file is None and not text.endswith(".toml"):
        raise _unknown(name)
    return _of_file(file or FileText(Path(text), 1, {}))


def _of_file(file: FileText) -> tuple[Topology, Reading | None]:
    form = format_of(file.path) if file.path.is_file() else None
    if form is not None:
        return read_other(file, form)
    if file.path.suffix != ".toml" and not _is_own(file.path):
        raise unknown_file(file.path)
    if file.boxes > 1 or file.told:
        message = f"{file.path} says all of its links itself"
        raise ConfigurationError(message, hint="change the file, and name it alone")
    return read_topology(file.path), None


def _is_own(path: Path) -> bool:
    """Return whether a file is a topology in fivefold's own form, whatever its ending."""
    try:
        return describes_graph(read_toml(path))
    except ConfigurationError:
        return False


def _generate(name: str, rest: str, given: Mapping[str, str | float | None]) -> Topology:
    generator = _GENERATORS[name]
    accepted = _accepted(generator)
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for position, part in enumerate(rest.split(",") if rest else ()):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            if position:
                raise ConfigurationError(
                    f"{part!r} in {name}:{rest} has no key", hint=f"write {generator.example}"
                )
            key, value = generator.first, key
        require_one_of(key, accepted, f"{name} takes no {key!r}")
        if key in values:
            raise ConfigurationError(f"{name}:{rest} says its {key} twice", hint="say it once")
        # Quantities stay text: a number would be taken as bytes per second, or seconds.
        values[key] = value if key in _QUANTITIES else _value(value)
    if generator.first not in values:
        raise ConfigurationError(
            f"{name} needs its {generator.first}", hint=f"write {generator.example}"
        )
    return _call(generator, values)


def _accepted(generator: _Generator) -> list[str]:
    """Return the keys that a generator takes: its own, and those of its host and port."""
    own = list(inspect.signature(generator.build).parameters)
    for key, expanded in (("host", _HOST_KEYS), ("port", _PORT_KEYS)):
        if key in own:
            own.remove(key)
            own += [one for one in expanded if one not in own]
    return own


def _call(generator: _Generator, values: dict[str, Any]) -> Topology:
    parameters = inspect.signature(generator.build).parameters
    own = {key: value for key, value in values.items() if key in parameters}
    first = own.pop(generator.first)
    if generator.first == "shape" and not isinstance(first, tuple):
        first = (first,)
    if generator.build is clos:
        own["port"] = Port(**{key: value for key, value in values.items() if key in _PORT_KEYS})
    host = {key: value for key, value in values.items() if key in _HOST_KEYS}
    if host and "host" in parameters:
        own["host"] = replace(parameters["host"].default or HostSpec(), **host)
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and key not in own and key != generator.first
    ]
    if missing:
        name = generator.example.partition(":")[0]
        message = f"{name} also needs {', '.join(missing)}"
        raise ConfigurationError(message, hint=f"write {generator.example}")
    return generator.build(first, **own)


def _value(text: str) -> int | float | str | tuple[int, ...]:
    """Read a whole number, a shape such as 4x4, a plain number, or text such as 25GB/s."""
    sizes = text.split("x")
    if all(size.isdecimal() and len(size) <= _MOST_DIGITS for size in sizes):
        return int(text) if len(sizes) == 1 else tuple(map(int, sizes))
    try:
        return float(text)
    except ValueError:
        return text


def _count(text: str, whole: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigurationError(
            f"{text!r:.40} in {whole!r:.60} is no number of boxes", hint="write dgx_a100:2"
        )
    return int(text)


def _unknown(name: str) -> ConfigurationError:
    known = [*MACHINES, *_GENERATORS, "lingjun", "taccl"]
    if Path(name).suffix:
        near_file = nearest_file(name)
        hint = "give the path of a file" if near_file is None else f"did you mean {near_file}?"
        return ConfigurationError(f"topology file {name} does not exist", hint=hint)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigurationError(
        f"{name!r} is no topology",
        hint=f"{hint}name a machine ({', '.join(MACHINES)}), a generator "
        f"({', '.join(_GENERATORS)}), lingjun:PATH, taccl:{'|'.join(PUBLISHED)}, a .toml file, "
        f"or a file of another program ({', '.join(form.name for form in FORMATS)})",
    )


def read_topology(source: str | Path) -> Topology:
    """Read a topology from a TOML file, or from text in the same form.

    Args:
        source: A path, or TOML text (text with a line break or ``=`` is taken for TOML).

    Raises:
        ConfigurationError: The file is missing, is not TOML, or describes no topology.
    """
    if isinstance(source, str) and ("\n" in source or "=" in source):
        place, default_name = "the topology's text", ""
        tables = parse_toml(source, where=place)
    else:
        place, default_name = f"topology file {source}", Path(source).stem
        tables = topology_tables(source)
    try:
        return topology_from_tables(tables, default_name=default_name)
    except FivefoldError as error:
        raise type(error)(f"{place}: {error.message}", hint=error.hint) from None


def topology_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables of a topology file; what is wrong with it is told in its own words."""
    try:
        return read_toml(path, what="topology file")
    except ConfigurationError as error:
        if "is not TOML" not in error.message:
            raise
        hint = 'a topology file has nodes and links, or generate = "torus:4x4"; files of other '
        hint += "programs are known by what is in them"
        raise ConfigurationError(error.message, hint=hint) from None


def describes_graph(tables: Mapping[str, Any]) -> bool:
    """Return whether the tables of a file describe nodes and links themselves."""
    return any(key in tables for key in _GRAPH_KEYS)


def topology_from_tables(tables: Mapping[str, Any], *, default_name: str) -> Topology:
    """Return the topology of a file's tables; what it says of GPUs and software is passed over."""
    machine = [key for key in _MACHINE_KEYS if key in tables]
    _check_keys(tables, (*_TOP_KEYS, *_MACHINE_KEYS) if machine else _TOP_KEYS, "the file")
    if machine and not describes_graph(tables):
        if "topology" in tables:
            return parse_topology(_text(tables, "topology", "the file"))
        message = "the file describes GPUs and no links"
        raise ConfigurationError(
            message, hint='add topology = "..." (such as "fat_tree:4,gpus=2"), or nodes and links'
        )
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
    text = _text(tables, "generate", "the file")
    if text.endswith(".toml") or Path(text).is_file():  # a file that names itself never ends
        raise ConfigurationError(
            f"generate names the file {text!r}", hint='write a generator, such as "torus:4x4"'
        )
    return parse_topology(text)


def _changed(topology: Topology, entry: Mapping[str, Any], place: str) -> Topology:
    """Apply one of the ``changes``; both directions unless it says otherwise."""
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
        if ends[0] not in {node.name for node in topology.nodes}:
            raise ConfigurationError(message, hint=f"there is no node {ends[0]!r} either")
        targets = sorted({link.target for link in topology.links if link.source == ends[0]})
        shown = ", ".join(targets[:6]) or "nowhere"
        raise ConfigurationError(message, hint=f"from {ends[0]!r} links lead to {shown}")
    return topology.with_links(kept)


def _links(entry: Mapping[str, Any], place: str) -> Iterator[Link]:
    ends = _text(entry, "source", place), _text(entry, "target", place)
    both_ways = _boolean(entry, "both_ways", place, default=False)
    rate = parse_bytes_per_s(_quantity(entry, "bandwidth", place, "25 GB/s"))
    latency_s = 0.0
    if "latency" in entry:
        latency_s = parse_duration_s(_quantity(entry, "latency", place, "1 us"))
    for pair in (ends, ends[::-1]) if both_ways else (ends,):
        yield Link(
            *pair,
            bandwidth_bytes_per_s=rate,
            latency_s=latency_s,
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
    rate = None
    if "rate" in table:
        rate = parse_bytes_per_s(_quantity(table, "rate", place, "25 GB/s"))
    unit = Aggregation(
        slots=_require(table, "slots", place),
        slot_bytes=parse_bytes(_quantity(table, "slot_size", place, "256 B")),
        rate_bytes_per_s=rate,
        dtypes=table.get("dtypes", ()),
    )
    return SwitchAbility(node, multicast=multicast, aggregation=unit)


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
        require_one_of(key, allowed, f"{place} has the unknown key {key!r}")


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
    """Return a quantity as text; plain numbers are refused, for a file must say its units."""
    value = _require(table, key, place)
    if not isinstance(value, str) or not any(letter.isalpha() for letter in value.strip()[-1:]):
        raise ConfigurationError(
            f"{place}: {key} must have a unit; got {value!r}", hint=f'write it as "{example}"'
        )
    return value
