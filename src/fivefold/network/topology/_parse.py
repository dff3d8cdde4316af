"""Topologies as the command line spells them: ``torus:4x4``, ``dgx_a100:2``, a path, and so on."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError
from fivefold.network.topology import _clusters, _dragonfly, _rails, _regular
from fivefold.network.topology._clusters import Port, clos
from fivefold.network.topology._hosts import HostSpec
from fivefold.network.topology._lingjun import load_lingjun
from fivefold.network.topology._machines import machine_names, named_topology
from fivefold.network.topology._taccl import load_taccl_profile, taccl_profile_names
from fivefold.network.topology._topology import Topology

_MOST_DIGITS = 18  # of a count; what is longer is no number, and refused as such


@dataclass(frozen=True)
class _Generator:
    """A generator by name: its function, what the first value is called, and an example."""

    build: Callable[..., Topology]
    first: str
    example: str


_GENERATORS: Mapping[str, _Generator] = {
    "ring": _Generator(_regular.ring, "num_ranks", "ring:8"),
    "line": _Generator(_regular.line, "num_ranks", "line:8"),
    "mesh": _Generator(_regular.mesh, "shape", "mesh:4x4"),
    "torus": _Generator(_regular.torus, "shape", "torus:4x4x4"),
    "hypercube": _Generator(_regular.hypercube, "dimensions", "hypercube:6"),
    "fully_connected": _Generator(_regular.fully_connected, "num_ranks", "fully_connected:8"),
    "star": _Generator(_regular.star, "num_ranks", "star:8"),
    "switch": _Generator(_regular.switch, "num_ranks", "switch:8"),
    "fat_tree": _Generator(_clusters.fat_tree, "k", "fat_tree:8,gpus=8,nics=4"),
    "leaf_spine": _Generator(_clusters.leaf_spine, "hosts", "leaf_spine:16,leaves=4,spines=2"),
    "clos": _Generator(clos, "shape", "clos:4x8x16,aggs=8,cores=32,gpus=8"),
    "rail_optimized": _Generator(_rails.rail_optimized, "hosts", "rail_optimized:16,spines=8"),
    "rail_only": _Generator(_rails.rail_only, "hosts", "rail_only:16"),
    "dual_plane": _Generator(
        _rails.dual_plane, "hosts", "dual_plane:16,hosts_per_segment=8,aggs_per_plane=4"
    ),
    "dragonfly": _Generator(_dragonfly.dragonfly, "routers_per_group", "dragonfly:4"),
}
_HOST_KEYS = tuple(field.name for field in fields(HostSpec))
_PORT_KEYS = tuple(field.name for field in fields(Port))


def generator_names() -> tuple[str, ...]:
    """The generators that :func:`parse_topology` knows.

    Examples:
        >>> "torus" in generator_names()
        True
    """
    return tuple(_GENERATORS)


def generator_usage(name: str) -> tuple[str, str]:
    """An example of a generator's spelling and its one-line description.

    Raises:
        ConfigurationError: There is no such generator.

    Examples:
        >>> generator_usage("hypercube")[0]
        'hypercube:6'
    """
    generator = _GENERATORS.get(name)
    if generator is None:
        raise _unknown(name)
    summary = (inspect.getdoc(generator.build) or "").partition("\n")[0]
    return generator.example, summary


def parse_topology(
    text: str, *, bandwidth: str | float | None = None, latency: str | float | None = None
) -> Topology:
    """A topology from one line of text.

    ``NAME:VALUE,KEY=VALUE,...`` calls a generator (``torus:4x4``, ``leaf_spine:16,leaves=4,
    spines=2,gpus=8``), the keys being its arguments and those of :class:`HostSpec`;
    ``MACHINE:BOXES`` is a named machine (``dgx_a100:2``), ``taccl:PROFILE:BOXES`` one of TACCL's
    profiles, ``lingjun:PATH`` a Lingjun file, and anything that ends in ``.toml`` a topology file.

    Args:
        text: The line.
        bandwidth: Of the links that the generator's ``bandwidth`` means; only for generators.
        latency: Of those links; only for generators.

    Returns:
        The topology.

    Raises:
        ConfigurationError: The line says no topology.

    Examples:
        >>> parse_topology("torus:4x4", bandwidth="50 GB/s").num_links
        64
        >>> parse_topology("dgx_h100:2").num_ranks, parse_topology("fat_tree:4,gpus=2").num_ranks
        (16, 32)
    """
    name, _, rest = text.strip().partition(":")
    if name in _GENERATORS:
        return _generate(name, rest, {"bandwidth": bandwidth, "latency": latency})
    if bandwidth is not None or latency is not None:
        raise ConfigurationError(
            f"bandwidth and latency of {text!r} are given by what it describes",
            hint=f"only generators take them: {', '.join(_GENERATORS)}",
        )
    if name in machine_names():
        return named_topology(name, boxes=_count(rest or "1", text))
    if name == "lingjun":
        return load_lingjun(rest)
    if name == "taccl":
        profile, _, boxes = rest.partition(":")
        return load_taccl_profile(profile, boxes=_count(boxes or "1", text))
    if text.endswith(".toml") or Path(text).is_file():
        return Topology.from_toml(Path(text))
    raise _unknown(name)


def _generate(name: str, rest: str, given: Mapping[str, str | float | None]) -> Topology:
    generator = _GENERATORS[name]
    accepted = _accepted(generator)
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for position, part in enumerate(rest.split(",") if rest else ()):
        key, equals, value = part.strip().partition("=")
        if not equals:
            if position:
                raise ConfigurationError(
                    f"{part!r} in {name}:{rest} has no key", hint=f"write {generator.example}"
                )
            key, value = generator.first, key
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(
                f"{name} takes no {key!r}", hint=f"{hint}it takes {', '.join(accepted)}"
            )
        values[key] = _value(value.strip())
    if generator.first not in values:
        raise ConfigurationError(
            f"{name} needs its {generator.first}", hint=f"write {generator.example}"
        )
    return _call(generator, values)


def _accepted(generator: _Generator) -> list[str]:
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
        if len(first) != 3:
            message = "clos needs pods x racks x hosts"
            raise ConfigurationError(message, hint=f"write {generator.example}")
        own["port"] = Port(**{key: value for key, value in values.items() if key in _PORT_KEYS})
    host = {key: value for key, value in values.items() if key in _HOST_KEYS}
    if host and "host" in parameters:
        default = parameters["host"].default or HostSpec()
        own["host"] = HostSpec(**{**{k: getattr(default, k) for k in _HOST_KEYS}, **host})
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
    """A whole number, a shape such as 4x4, a plain number, or text such as 25GB/s."""
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
    known = [*machine_names(), *_GENERATORS, "lingjun", "taccl"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigurationError(
        f"{name!r} is no topology",
        hint=f"{hint}name a machine ({', '.join(machine_names())}), a generator "
        f"({', '.join(_GENERATORS)}), lingjun:PATH, taccl:{'|'.join(taccl_profile_names())} or a "
        ".toml file",
    )
