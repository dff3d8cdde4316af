"""TACCL's topology files (``taccl/examples/topo``): JSON with the times of one chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.errors import DataError
from fivefold.files import parse_json
from fivefold.network.topology._taccl import TacclProfile
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers.boxes import Source

OPTIONS = ("chunk", "time_scale", "connections")
_READ = (
    *("name", "gpus_per_node", "nics_per_node", "alpha", "betas", "invbws", "links"),
    *("node_betas_list", "node_invbws_list", "remote_alpha", "remote_beta", "remote_invbw"),
)


def recognises(text: str) -> bool:
    """Return whether a text is JSON with TACCL's keys."""
    return text.lstrip().startswith("{") and '"gpus_per_node"' in text and '"alpha"' in text


def read(text: str, source: Source, *, name: str) -> Topology:
    """Return the topology of a profile.

    Raises:
        DataError: It is no JSON, or a key is missing or wrong.
        ConfigurationError: The size of the chunk is not told.
    """
    reading, told = source.reading, source.told
    table = parse_json(text, where=reading.source)
    if not isinstance(table, Mapping):
        raise DataError(f"{reading.source} is no table of keys", hint="see TACCL's examples/topo")
    chosen = "links" if "links" in table else "node_"
    for key in table:
        listed = {"links": ("node_betas_list", "node_invbws_list"), "node_": ("betas", "invbws")}
        remote = key.startswith("remote_") and source.boxes == 1
        if key not in _READ or key in listed[chosen]:
            reading.leave_out(
                key, "not known of TACCL's topologies, or not looked at beside others"
            )
        elif remote:
            reading.ignore(key, "between boxes, and there is one")
        else:
            reading.take(key)
    if "chunk" not in told:
        raise source.question("chunk", "for how large a chunk its times are")  # noqa: EM101 - a key
    source.told_or("chunk", 0, "")
    scale = source.told_or("time_scale", 1.0, "microseconds as they are", name="time_scale")
    profile = replace(
        TacclProfile.load({"name": name, **table}, chunk_bytes=told["chunk"], time_scale=scale),
        source=f"{reading.source}, a TACCL profile",
    )
    if source.boxes == 1:
        return profile.to_topology()
    pairs: Any = source.told_or("connections", "relay", "who sends to whom, as in its sketches")
    return profile.to_topology(boxes=source.boxes, connections=pairs)
