"""Data sets of several node and edge types: a folder per type and a list of them.

dataset.json             name, node types and edge types with their folders and fingerprints
nodes/0_paper/           features.fvf and labels.fvf, as for one type
edges/0_cites/           graph.fvf: rows are targets, indices are nodes of the source type
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import DataError
from fivefold.files import read_checked_json
from fivefold.gnn.data._dataset import (
    FEATURES_FILE,
    GRAPH_FILE,
    HETERO_FILE,
    LABELS_FILE,
    check_belongs,
)
from fivefold.gnn.data._parts import EdgePart, Source
from fivefold.gnn.sampling import HeteroTopology, Topology
from fivefold.gnn.sampling.batches import EdgeType
from fivefold.gnn.storage import Container

HETERO_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class HeteroSource:
    """A graph of several types somewhere else.

    Attributes:
        name: For people.
        nodes: Features and labels of each node type; their edges are not asked for.
        edges: Edges of each type (source type, relation, target type).
    """

    name: str
    nodes: Mapping[str, Source]
    edges: Mapping[EdgeType, EdgePart]


class HeteroDataset:
    """A graph of several node and edge types in a folder; made by ``HeteroDataset.open``.

    Args:
        folder: Where the files lie.
        listing: What dataset.json says.

    Attributes:
        folder: Where the files lie.
        name: For people.
        num_nodes: Nodes of each type.
    """

    def __init__(self, folder: Path, listing: Mapping[str, Any]) -> None:
        self.folder = folder
        self.name = str(listing["name"])
        self.num_nodes = {name: int(e["num_nodes"]) for name, e in listing["nodes"].items()}
        self._nodes: dict[str, Path] = {
            name: folder / e["folder"] for name, e in listing["nodes"].items()
        }
        self._edges: dict[EdgeType, Path] = {
            tuple(e["type"]): folder / e["folder"] for e in listing["edges"]
        }
        self._files: dict[Path, str] = {
            folder / e["folder"] / name: fingerprint
            for e in (*listing["nodes"].values(), *listing["edges"])
            for name, fingerprint in e["files"].items()
        }
        self._opened: dict[Path, Container] = {}

    @classmethod
    def open(cls, folder: str | Path) -> HeteroDataset:
        """Open a folder.

        Args:
            folder: The one with dataset.json.

        Returns:
            The data set; its files are opened when first used.

        Raises:
            DataError: The folder holds no such data set.
        """
        folder = Path(folder)
        path = folder / HETERO_FILE
        if not path.is_file():
            raise DataError(
                f"{folder} holds no graph of several types: {HETERO_FILE} is missing",
                hint="open a graph of one type with Dataset.open; an unfinished one goes on when "
                "it is ingested again",
            )
        try:
            listing = read_checked_json(path)
        except DataError as error:
            raise DataError(error.message, hint="ingest it again") from error
        if listing["version"] != HETERO_VERSION:
            raise DataError(f"{path} is of version {listing['version']}", hint="ingest it again")
        return cls(folder, listing)

    @property
    def node_types(self) -> list[str]:
        """Return the names of the node types."""
        return list(self.num_nodes)

    @property
    def edge_types(self) -> list[EdgeType]:
        """Return the edge types (source type, relation, target type)."""
        return list(self._edges)

    def topology(self, *, mapped: bool = False) -> HeteroTopology:
        """Return the edges of all types, in memory or as memory maps."""
        edges = {kind: Topology.open(self.graph(kind), mapped=mapped) for kind in self._edges}
        return HeteroTopology(self.num_nodes, edges)

    def graph(self, edge_type: EdgeType) -> Container:
        """Return the container of the edges of a type."""
        return self._container(self._edges[edge_type] / GRAPH_FILE, "graph")

    def has_features(self, node_type: str) -> bool:
        """Return whether the nodes of a type have feature rows."""
        return self._node_folder(node_type) / FEATURES_FILE in self._files

    def has_labels(self, node_type: str) -> bool:
        """Return whether the nodes of a type have labels."""
        return self._node_folder(node_type) / LABELS_FILE in self._files

    def features(self, node_type: str) -> Container:
        """Return the container with the section ``x`` of a node type."""
        return self._container(self._node_folder(node_type) / FEATURES_FILE, "features")

    def labels(self, node_type: str) -> NDArray[np.int64]:
        """Return the class of every node of a type, -1 where unknown."""
        return self._label_section(node_type, "y")

    def split(self, node_type: str, name: str) -> NDArray[np.int64]:
        """Return the ids of a node type's split: ``train``, ``valid`` or ``test``."""
        return self._label_section(node_type, name)

    def _label_section(self, node_type: str, name: str) -> NDArray[np.int64]:
        file = self._container(self._node_folder(node_type) / LABELS_FILE, "labels")
        values: NDArray[np.int64] = file.read(name)
        return values

    @property
    def containers(self) -> dict[str, Container]:
        """Return all files, by their place in the folder."""
        return {
            str(path.relative_to(self.folder)): self._container(path, None) for path in self._files
        }

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all files' fingerprints: other contents, other fingerprint."""
        text = " ".join(f"{name} {file.fingerprint}" for name, file in self.containers.items())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _node_folder(self, node_type: str) -> Path:
        if node_type not in self._nodes:
            raise DataError(
                f"there is no node type {node_type!r}",
                hint=f"there are {', '.join(self._nodes) or 'none'}",
            )
        return self._nodes[node_type]

    def _container(self, path: Path, kind: str | None) -> Container:
        if path not in self._opened:
            if path not in self._files:
                raise DataError(f"there is no {path}", hint="this type was ingested without it")
            found = Container.open(path, kind=kind) if path.is_file() else None
            check_belongs(path, found, self._files[path], named_by=HETERO_FILE)
            assert found is not None, "a file that is missing does not belong"
            self._opened[path] = found
        return self._opened[path]

    def close(self) -> None:
        """Close all files; arrays that were read stay."""
        while self._opened:
            self._opened.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
