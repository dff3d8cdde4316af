"""A data set on disk: a folder with a graph, feature rows, labels and splits, all in containers.

``indices[indptr[v]:indptr[v + 1]]`` of graph.fvf are the sources of the edges into v: messages flow
from them to v. Its attribute "files" names the fingerprints of the others; edge_features.fvf has
rows by ``edge_ids``. Of several types there is such a folder for each, listed in dataset.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
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
from fivefold.gnn.storage.files import Closing, closed_error
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.reading import Reading

GRAPH_FILE = "graph.fvf"
FEATURES_FILE = "features.fvf"
LABELS_FILE = "labels.fvf"
EDGE_FEATURES_FILE = "edge_features.fvf"
EDGE_PARTS_FILE = "edge_parts.fvf"
NODE_PARTS_FILE = "node_parts.fvf"
HETERO_FILE = "dataset.json"
NAMES_FILE = "names.parquet"
BESIDE_GRAPH = {
    FEATURES_FILE: "features",
    LABELS_FILE: "labels",
    EDGE_FEATURES_FILE: "features",
    NODE_PARTS_FILE: "parts",
    EDGE_PARTS_FILE: "parts",
}


class _Files(Closing):
    """The files of a data set, opened when first used and checked to belong to it.

    ``named`` has the fingerprint of each by its place in the folder, as ``named_by`` says.
    """

    def __init__(self, folder: Path, named: Mapping[str, str], named_by: str) -> None:
        self.folder = folder
        self._named, self._named_by = named, named_by
        self._opened: dict[str, Container] = {}
        self._closed = False

    def _container(self, place: str, kind: str | None = None) -> Container:
        if place in self._opened:
            return self._opened[place]
        if self._closed:
            raise closed_error(self.folder)
        path, named = self.folder / place, self._named.get(place)
        if named is None:
            raise DataError(f"there is no {path}", hint="this type was ingested without it")
        wrong = "is missing"
        if path.is_file():
            found = Container.open(path, kind=kind)
            if found.fingerprint == named:
                self._opened[place] = found
                return found
            found.close()
            wrong = "does not belong to this data set"
        raise DataError(
            f"{path} {wrong}: {self._named_by} says that its fingerprint is {named}",
            hint=_RIGHT_FILE,
        )

    @property
    def containers(self) -> dict[str, Container]:
        """Return all files, by their place in the folder."""
        return {place: self._container(place) for place in self._named}

    def close(self) -> None:
        """Close all files; arrays that were read stay."""
        self._closed = True
        for container in self._opened.values():  # they stay, for what was read of their headers
            container.close()


_RIGHT_FILE = "put the right file back, or ingest the data set again into a new folder"


class Dataset(_Files):
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
        files = graph.attributes.get("files") or {}
        beside = {name: files[name] for name in BESIDE_GRAPH if name in files}
        super().__init__(folder, {GRAPH_FILE: graph.fingerprint, **beside}, GRAPH_FILE)
        self.graph = graph
        self._opened[GRAPH_FILE] = graph

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
        if self.graph.attributes.get("files") is None:
            raise DataError(
                f"{self.graph.path} does not say which features and labels belong to it",
                hint="ingest the graph into a new folder",
            )
        for name, kind in BESIDE_GRAPH.items():
            if name in self._named:
                self._container(name, kind)
            elif (self.folder / name).is_file():
                raise DataError(
                    f"{self.folder / name} does not belong to this data set: {GRAPH_FILE} says "
                    "that there is none",
                    hint=_RIGHT_FILE,
                )

    def _needed(self, name: str, what: str) -> Container:
        if name not in self._named:
            raise DataError(
                f"{self.folder} has no {what}: {name} is missing", hint=_cause(self.folder)
            )
        return self._container(name)

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
        return self._needed(FEATURES_FILE, "features")

    @property
    def has_features(self) -> bool:
        """Return whether nodes have feature rows."""
        return FEATURES_FILE in self._named

    @property
    def has_labels(self) -> bool:
        """Return whether there are labels."""
        return LABELS_FILE in self._named

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
        return self._needed(LABELS_FILE, "labels").read("y")

    @cached_property
    def train(self) -> Ids:
        """Return the ids of the training nodes."""
        return self._needed(LABELS_FILE, "labels").read("train")

    @cached_property
    def valid(self) -> Ids:
        """Return the ids of the validation nodes."""
        return self._needed(LABELS_FILE, "labels").read("valid")

    @cached_property
    def test(self) -> Ids:
        """Return the ids of the test nodes."""
        return self._needed(LABELS_FILE, "labels").read("test")

    @property
    def num_classes(self) -> int:
        """Return one more than the largest label; 0 without labels."""
        return int(self._about_labels.get("num_classes", 0))

    @property
    def class_names(self) -> list[str] | None:
        """Return the names of the classes, where the source had names."""
        names: list[str] | None = self._about_labels.get("class_names")
        return names

    @property
    def _about_labels(self) -> dict[str, Any]:
        return self._container(LABELS_FILE).attributes if self.has_labels else {}

    @property
    def fingerprint(self) -> str:
        """Return a hash of all files' fingerprints: other contents, other fingerprint."""
        files = [self._named.get(name, "-") for name in (GRAPH_FILE, FEATURES_FILE, LABELS_FILE)]
        more = (EDGE_FEATURES_FILE, NODE_PARTS_FILE, EDGE_PARTS_FILE)
        # Of data sets without them nothing has changed.
        return _digest([*files, *(self._named[name] for name in more if name in self._named)])

    @property
    def edge_features(self) -> Container | None:
        """Return the container with the edges' rows ``x`` [E, F]; None where they have none."""
        return self._container(EDGE_FEATURES_FILE) if EDGE_FEATURES_FILE in self._named else None

    def part_names(self, of: str) -> list[str]:
        """Return what nodes or edges (``of``) carry by names of their own, such as times."""
        file = f"{of}_parts.fvf"
        return list(self._container(file).sections) if file in self._named else []

    def part(self, of: str, name: str) -> Array:
        """Return what each node or each edge of the source carries under a name.

        Args:
            of: "node", in the order of ids, or "edge", in the order of the source (``e_id``).
            name: One of ``part_names``.

        Raises:
            DataError: There is no such part.
        """
        names = self.part_names(of)
        if name not in names:
            raise DataError(
                f"the {of}s of {self.folder} have no part {name!r}",
                hint=f"they have {', '.join(names) or 'none'}",
            )
        rows = self._container(f"{of}_parts.fvf").read(name)
        return rows[:, 0] if rows.shape[1] == 1 else rows


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


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
        edge_features: Feature rows of the edge types that have some, in the order of the edges.
        reading: What was read, and what was not.
    """

    name: str
    nodes: Mapping[str, Source]
    edges: Mapping[EdgeType, EdgePart]
    edge_features: Mapping[EdgeType, FeaturePart] = field(default_factory=dict)
    reading: Reading = field(default_factory=lambda: Reading("graph"))


class HeteroDataset(_Files):
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
        files = {
            f"{entry['folder']}/{name}": fingerprint
            for entry in (*listing["nodes"].values(), *listing["edges"])
            for name, fingerprint in entry["files"].items()
        }
        super().__init__(folder, files, HETERO_FILE)
        self.name = str(listing["name"])
        self.num_nodes = {name: int(e["num_nodes"]) for name, e in listing["nodes"].items()}
        self._nodes: dict[str, str] = {name: e["folder"] for name, e in listing["nodes"].items()}
        self._edges: dict[EdgeType, str] = {tuple(e["type"]): e["folder"] for e in listing["edges"]}

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
    def fingerprint(self) -> str:
        """Return a hash of all files' fingerprints: other contents, other fingerprint."""
        return _digest(f"{place} {fingerprint}" for place, fingerprint in self._named.items())

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
        return self._container(f"{self._edges[edge_type]}/{GRAPH_FILE}", "graph")

    def has_features(self, node_type: str) -> bool:
        """Return whether the nodes of a type have feature rows."""
        return self._place(node_type, FEATURES_FILE) in self._named

    def has_labels(self, node_type: str) -> bool:
        """Return whether the nodes of a type have labels."""
        return self._place(node_type, LABELS_FILE) in self._named

    def features(self, node_type: str) -> Container:
        """Return the container with the section ``x`` of a node type."""
        return self._container(self._place(node_type, FEATURES_FILE), "features")

    def edge_features(self, edge_type: EdgeType) -> Container | None:
        """Return the container with the rows ``x`` of an edge type; None where it has none."""
        place = f"{self._edges[edge_type]}/{EDGE_FEATURES_FILE}"
        return self._container(place, "features") if place in self._named else None

    def labels(self, node_type: str) -> Ids:
        """Return the class of every node of a type, -1 where unknown."""
        return self._labels(node_type).read("y")

    def num_classes(self, node_type: str) -> int:
        """Return one more than the largest label of a type; 0 without labels."""
        if not self.has_labels(node_type):
            return 0
        return int(self._labels(node_type).attributes["num_classes"])

    def split(self, node_type: str, name: str) -> Ids:
        """Return the ids of a node type's split: ``train``, ``valid`` or ``test``."""
        return self._labels(node_type).read(name)

    def _labels(self, node_type: str) -> Container:
        return self._container(self._place(node_type, LABELS_FILE), "labels")

    def _place(self, node_type: str, name: str) -> str:
        if node_type not in self._nodes:
            raise DataError(
                f"there is no node type {node_type!r}",
                hint=f"there are {', '.join(self._nodes) or 'none'}",
            )
        return f"{self._nodes[node_type]}/{name}"


def open_dataset(folder: str | Path) -> Dataset | HeteroDataset:
    """Open a folder, whether its graph is of one type or of several.

    Raises:
        DataError: It holds no finished data set.
    """
    if (Path(folder) / HETERO_FILE).is_file():
        return HeteroDataset.open(folder)
    return Dataset.open(folder)
