"""A data set on disk: a folder with a graph, feature rows, labels and splits, all in containers.

``indices[indptr[v]:indptr[v + 1]]`` of graph.fvf are the sources of the edges into v: messages flow
from them to v. Its attribute "files" names the fingerprints of the others; edge_features.fvf has
rows by ``edge_ids``. Of several types there is such a folder for each, listed in dataset.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import DataError
from fivefold.files import read_checked_json
from fivefold.gnn.data.parts import EdgePart, FeaturePart, Progress, Source
from fivefold.gnn.sampling import Adjacency, HeteroAdjacency
from fivefold.gnn.sampling.batches import EdgeType
from fivefold.gnn.storage import Container
from fivefold.gnn.storage.files import Closing
from fivefold.gnn.storage.pages import Ids

GRAPH_FILE = "graph.fvf"
FEATURES_FILE = "features.fvf"
LABELS_FILE = "labels.fvf"
EDGE_FEATURES_FILE = "edge_features.fvf"
HETERO_FILE = "dataset.json"
NAMES_FILE = "names.parquet"


class Dataset(Closing):
    """A homogeneous graph with features and labels in a folder; made by ``Dataset.open``.

    Files stay open until ``close``. Labels and splits are read into memory when first asked for (8
    bytes per node), features never are.

    Args:
        folder: Where the files lie.
        graph: The opened graph.fvf.

    Attributes:
        folder: Where the files lie.
        graph: Container with ``indptr``, ``indices`` and, for weighted edges, ``weights``.

    Examples:
        >>> import tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with generate_graph(folder, nodes=100, dim=8, seed=1) as dataset:
        ...         dataset.num_nodes, dataset.dim, dataset.row_bytes, dataset.num_classes
        (100, 8, 32, 32)
    """

    def __init__(self, folder: Path, graph: Container) -> None:
        self.folder = folder
        self.graph = graph
        self._opened: list[Container] = [graph]

    @classmethod
    def open(cls, folder: str | Path) -> Dataset:
        """Open a folder that ``ingest``, ``generate_graph`` or a loader wrote.

        Raises:
            DataError: The folder holds no finished data set, one of several node types, or files
                of several data sets.
        """
        folder = Path(folder)
        if (folder / HETERO_FILE).is_file():
            raise DataError(
                f"{folder} holds a graph of several node or edge types",
                hint="fivefold gnn train and infer, HeteroDataset and DiskLoader.from_dataset take "
                "it; the single commands sample, plan and pack do not",
            )
        if not (folder / GRAPH_FILE).is_file():
            raise DataError(
                f"{folder} holds no data set: {GRAPH_FILE} is missing", hint=_cause(folder)
            )
        dataset = cls(folder, Container.open(folder / GRAPH_FILE, kind="graph"))
        try:
            dataset._check()
        except BaseException:
            dataset.close()
            raise
        return dataset

    def _check(self) -> None:
        files = self.graph.attributes.get("files")
        if files is None:
            raise DataError(
                f"{self.graph.path} does not say which features and labels belong to it",
                hint="ingest the graph into a new folder",
            )
        beside = (
            (FEATURES_FILE, self._features),
            (LABELS_FILE, self._labels),
            (EDGE_FEATURES_FILE, self.edge_features),
        )
        for name, found in beside:
            check_belongs(self.folder / name, found, files.get(name), named_by=GRAPH_FILE)

    @property
    def name(self) -> str:
        """Return the name of the data set, for people."""
        return str(self.graph.attributes["name"])

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return int(self.graph.attributes["num_nodes"])

    @property
    def num_edges(self) -> int:
        """Return the number of directed edges."""
        return int(self.graph.sections["indices"].shape[0])

    @property
    def weighted(self) -> bool:
        """Return whether edges have weights."""
        return "weights" in self.graph.sections

    def topology(self, *, mapped: bool = False, progress: Progress | None = None) -> Adjacency:
        """Return the edges, in memory or as a memory map.

        Args:
            mapped: Map the file instead of keeping it in memory; it is read through once and
                verified in any case.
            progress: Told of ("topology", done, total) meanwhile.

        Returns:
            In-neighbours in compressed rows.
        """
        return Adjacency.open(self.graph, mapped, progress)

    @property
    def features(self) -> Container:
        """Return the container with the section ``x``.

        Raises:
            DataError: The data set has no features.
        """
        if self._features is None:
            raise DataError(
                f"{self.folder} has no features: {FEATURES_FILE} is missing",
                hint=_cause(self.folder),
            )
        return self._features

    @property
    def has_features(self) -> bool:
        """Return whether nodes have feature rows."""
        return self._features is not None

    @property
    def has_labels(self) -> bool:
        """Return whether there are labels."""
        return self._labels is not None

    @property
    def dim(self) -> int:
        """Return the number of elements of a feature row."""
        return int(self.features.sections["x"].shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of a feature element."""
        return np.dtype(self.features.sections["x"].dtype)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a feature row."""
        return self.dim * self.dtype.itemsize

    @cached_property
    def labels(self) -> Ids:
        """Return the class of every node, -1 where unknown."""
        return self._read_labels("y")

    @cached_property
    def train(self) -> Ids:
        """Return the ids of the training nodes."""
        return self._read_labels("train")

    @cached_property
    def valid(self) -> Ids:
        """Return the ids of the validation nodes."""
        return self._read_labels("valid")

    @cached_property
    def test(self) -> Ids:
        """Return the ids of the test nodes."""
        return self._read_labels("test")

    @property
    def num_classes(self) -> int:
        """Return one more than the largest label; 0 without labels."""
        return 0 if self._labels is None else int(self._labels.attributes["num_classes"])

    @property
    def class_names(self) -> list[str] | None:
        """Return the names of the classes, where the source had names."""
        return None if self._labels is None else self._labels.attributes.get("class_names")

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all files' fingerprints: other contents, other fingerprint."""
        files = [self.graph, self._features, self._labels]
        files += [] if self.edge_features is None else [self.edge_features]
        text = " ".join("-" if file is None else file.fingerprint for file in files)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def containers(self) -> dict[str, Container]:
        """Return the files that are there, by name."""
        files = (self.graph, self._features, self._labels, self.edge_features)
        names = (GRAPH_FILE, FEATURES_FILE, LABELS_FILE, EDGE_FEATURES_FILE)
        return {name: file for name, file in zip(names, files, strict=True) if file is not None}

    def close(self) -> None:
        """Close all files; arrays that were read stay."""
        while self._opened:
            self._opened.pop().close()

    @cached_property
    def _features(self) -> Container | None:
        return self._open_optional(FEATURES_FILE, "features")

    @cached_property
    def _labels(self) -> Container | None:
        return self._open_optional(LABELS_FILE, "labels")

    @cached_property
    def edge_features(self) -> Container | None:
        """Return the container with the edges' rows ``x`` [E, F]; None where they have none."""
        return self._open_optional(EDGE_FEATURES_FILE, "features")

    def _open_optional(self, name: str, kind: str) -> Container | None:
        path = self.folder / name
        if not path.is_file():
            return None
        container = Container.open(path, kind=kind)
        self._opened.append(container)
        return container

    def _read_labels(self, section: str) -> Ids:
        if self._labels is None:
            raise DataError(
                f"{self.folder} has no labels: {LABELS_FILE} is missing", hint=_cause(self.folder)
            )
        values: Ids = self._labels.read(section)
        return values


def check_belongs(path: Path, found: Container | None, named: str | None, *, named_by: str) -> None:
    """Refuse a file that is not the one its data set was written with, or is not there."""
    if (None if found is None else found.fingerprint) == named:
        return
    if found is None:
        message = f"{path} is missing; {named_by} says that its fingerprint is {named}"
    else:
        told = "that there is none" if named is None else f"that its fingerprint is {named}"
        message = f"{path} does not belong to this data set: {named_by} says {told}"
    raise DataError(
        message,
        hint="put the right file back, or ingest the data set again into a new folder",
    )


def _cause(folder: Path) -> str:
    if not folder.is_dir():
        return "the folder does not exist: check the path"
    if any(folder.glob("*.partial")):
        return "it was begun but not finished: run the same ingest command again, it goes on"
    return "make one with 'fivefold gnn ingest' or 'fivefold gnn generate'"


HETERO_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class HeteroSource:
    """A graph of several types somewhere else.

    Attributes:
        name: For people.
        nodes: Features and labels of each node type; their edges are not asked for.
        edges: Edges of each type (source type, relation, target type).
        edge_features: Feature rows of the edge types that have some; their edges are ``numbered``.
    """

    name: str
    nodes: Mapping[str, Source]
    edges: Mapping[EdgeType, EdgePart]
    edge_features: Mapping[EdgeType, FeaturePart] = field(default_factory=dict)


class HeteroDataset(Closing):
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
        """Open a folder with ``dataset.json``.

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

    def topology(
        self, *, mapped: bool = False, progress: Progress | None = None
    ) -> HeteroAdjacency:
        """Return the edges of all types, in memory or as memory maps, as ``Dataset`` does."""
        edges = {kind: Adjacency.open(self.graph(kind), mapped, progress) for kind in self._edges}
        return HeteroAdjacency(self.num_nodes, edges)

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

    def edge_features(self, edge_type: EdgeType) -> Container | None:
        """Return the container with the rows ``x`` of an edge type; None where it has none."""
        path = self._edges[edge_type] / EDGE_FEATURES_FILE
        return self._container(path, "features") if path in self._files else None

    def labels(self, node_type: str) -> Ids:
        """Return the class of every node of a type, -1 where unknown."""
        return self._label_section(node_type, "y")

    def num_classes(self, node_type: str) -> int:
        """Return one more than the largest label of a type; 0 without labels."""
        if not self.has_labels(node_type):
            return 0
        file = self._container(self._node_folder(node_type) / LABELS_FILE, "labels")
        return int(file.attributes["num_classes"])

    def split(self, node_type: str, name: str) -> Ids:
        """Return the ids of a node type's split: ``train``, ``valid`` or ``test``."""
        return self._label_section(node_type, name)

    def _label_section(self, node_type: str, name: str) -> Ids:
        file = self._container(self._node_folder(node_type) / LABELS_FILE, "labels")
        values: Ids = file.read(name)
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


def open_dataset(folder: str | Path) -> Dataset | HeteroDataset:
    """Open a folder, whether its graph is of one type or of several.

    Raises:
        DataError: It holds no finished data set.
    """
    if (Path(folder) / HETERO_FILE).is_file():
        return HeteroDataset.open(folder)
    return Dataset.open(folder)
