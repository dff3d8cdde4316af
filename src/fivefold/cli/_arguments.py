"""Values of options and arguments: what is wrong with one is a wrong command line, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.cli._later import later
from fivefold.errors import ConfigurationError
from fivefold.files import read_toml
from fivefold.units import parse_bytes, parse_duration_s

with later():
    from fivefold.network.topology import Topology, parse_topology
    from fivefold.network.topology.text import catalogue, describes_graph
    from fivefold.strategy import load_cluster, named_clusters


class ArgumentError(ConfigurationError):
    """An option or argument of the command line has a value that it does not take."""

    exit_code = 2


@contextmanager
def typed_arguments() -> Iterator[None]:
    """Report what the library refuses in here as a wrong command line."""
    try:
        yield
    except ConfigurationError as error:
        raise ArgumentError(error.message, hint=error.hint) from error


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as "16 MB"."""
    with typed_arguments():
        return parse_bytes(text)


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as "5 us"."""
    with typed_arguments():
        return parse_duration_s(text)


def topology_of(text: str, *, bandwidth: str | None = None, latency: str | None = None) -> Topology:
    """Return the topology of a name or a file: of links, or of a cluster as a planner takes it."""
    path = Path(text)
    if path.is_file():  # what is wrong in a file is no wrong command line
        if path.suffix == ".toml" and not describes_graph(read_toml(path, what="topology file")):
            return _of_cluster(text)
        return parse_topology(text, bandwidth=bandwidth, latency=latency)
    with typed_arguments():
        known = catalogue()
        named = {*known.machines, *known.generators, "lingjun", "taccl"}
        if text.partition(":")[0].replace("-", "_") not in named and path.suffix != ".toml":
            return _of_cluster(text)
        return parse_topology(text, bandwidth=bandwidth, latency=latency)


def _of_cluster(text: str) -> Topology:
    if Path(text).suffix != ".toml" and text.partition(":")[0] not in named_clusters():
        return parse_topology(text)  # which knows what is near
    return load_cluster(text).graph()
