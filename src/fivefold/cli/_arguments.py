"""Values of options and arguments: what is wrong with one is a wrong command line, exit code 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.cli._later import later
from fivefold.errors import ConfigurationError
from fivefold.units import parse_bytes, parse_duration_s

with later():
    from fivefold.network.topology import Topology, parse_topology


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
    """Return the topology of a name or a file."""
    if os.path.isfile(text):  # noqa: PTH113 - what is wrong in a file is no wrong command line
        return parse_topology(text, bandwidth=bandwidth, latency=latency)
    with typed_arguments():
        return parse_topology(text, bandwidth=bandwidth, latency=latency)
