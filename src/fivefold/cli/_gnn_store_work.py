"""The work of ``fivefold gnn sample``, ``probe``, ``plan`` and ``pack``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivefold.cli._options import (
    ArgumentError,
    typed_arguments,
)
from fivefold.errors import DataError
from fivefold.gnn.data import Dataset
from fivefold.gnn.planning.estimate import KNOWN_GRAPHS, GraphSize
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import probe_disk
from fivefold.units import parse_bytes_per_s


def speed_of_disk(given: str | None) -> tuple[float, float]:
    """Return bytes per second that are read and written."""
    if given is not None:
        with typed_arguments():
            return (parse_bytes_per_s(given),) * 2
    probed = probe_disk(Path.cwd())
    return probed.sequential_read_bytes_per_s, probed.sequential_write_bytes_per_s


def graph_size(text: str) -> GraphSize:
    """Return the counts of a known graph, of a data set, or as they are written."""
    known = {name.lower(): size for name, size in KNOWN_GRAPHS.items()}
    if text.lower() in known:
        return known[text.lower()]
    if "=" in text:
        return _written_size(text)
    with Dataset.open(text) as data:
        return GraphSize(
            name=data.name,
            nodes=data.num_nodes,
            edges=data.num_edges,
            row_bytes=data.row_bytes,
            seeds=max(1, len(data.train)),
        )


def _written_size(text: str) -> GraphSize:
    names = ("nodes", "edges", "row_bytes", "seeds")
    hint = "write nodes=1e8,edges=1.6e9,row_bytes=512,seeds=1e6"
    counts: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            counts[name] = int(float(value))
        except (ValueError, OverflowError):
            raise ArgumentError(f"{part!r} is no count", hint=hint) from None
    if odd := sorted(set(counts) ^ set(names)):
        raise ArgumentError(f"counts are missing or unknown: {', '.join(odd)}", hint=hint)
    with typed_arguments():
        return GraphSize(**counts, name="graph")


def check_graph(data: Dataset, sampled: SampleFile) -> None:
    """Refuse samples of another graph, whose rows would be right and whose edges would not."""
    if sampled.topology_fingerprint != data.graph.fingerprint:
        raise DataError(
            f"{sampled.path} was sampled from another graph than that of {data.folder}",
            hint="sample this data set, or name the one that was sampled",
        )
