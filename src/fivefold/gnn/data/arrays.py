"""A graph given as arrays, read in blocks of rows: in memory, in .npy files, in .npz archives.

Files are read from front to back with plain reads. A memory map would do as well, but its pages
count as memory of the process, and a member of an archive cannot be mapped.
"""

from __future__ import annotations

import copy
import math
import os
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import DataError
from fivefold.gnn.data.parts import SPLITS, EdgeBlock, EdgePart, LabelPart
from fivefold.reading import Reading


class Rows(Protocol):
    """An array of at least one dimension, in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stamp: Any

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Any]:
        """Yield rows from ``first_row`` on, at most ``max_rows`` at a time."""


class ArrayRows:
    """An array in memory, or a memory map."""

    def __init__(self, array: NDArray[Any], stamp: Any = None) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.stamp = stamp or [list(array.shape), array.dtype.str, self._hash()]

    def _hash(self) -> str:
        total = 0
        for block in self.blocks(0, max(1, (8 << 20) // max(1, self.array[:1].nbytes))):
            data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            total = xxhash.xxh64_intdigest(data.data, total)
        return f"{total:016x}"

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Any]:
        """Yield views of the array."""
        for first in range(first_row, len(self.array), max_rows):
            yield self.array[first : first + max_rows]

    def halves(self) -> list[ArrayRows]:
        """Return the two rows of the array, as arrays of their own."""
        return [ArrayRows(row, self.stamp) for row in self.array]


class FileRows:
    """An array in a .npy file, or in a member of an archive."""

    def __init__(self, path: str | os.PathLike[str], member: str | None = None) -> None:
        self.path = path = existing(path)
        self.member = None if member is None else f"{member}.npy"
        self.place = str(path) if member is None else f"{path}:{self.member}"
        with self._open() as file:
            self.shape, fortran, self.dtype = _read_header(file, self.place)
            self.offset = file.tell()  # of the first element, in bytes
        if not self.shape:
            self.shape = (1,)
        if fortran and len(self.shape) > 1:
            # In C order it is the transpose: the columns come one after another.
            self.shape = self.shape[::-1]
        self.transposed = fortran and len(self.shape) > 1
        self.stamp = file_stamp(path)

    def _open(self) -> IO[bytes]:
        try:
            if self.member is None:
                return self.path.open("rb")
            return zipfile.ZipFile(self.path).open(self.member)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read {self.place}: {error}", hint="check the path") from error

    def halves(self) -> list[FileRows]:
        """Return the two rows of the array, as arrays of their own."""
        first, second = copy.copy(self), copy.copy(self)
        first.shape = second.shape = self.shape[1:]
        second.offset += self.shape[1] * self.dtype.itemsize
        return [first, second]

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Any]:
        """Yield rows read from the file."""
        end = self.shape[0]
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        with self._open() as file:
            file.seek(self.offset + first_row * row_bytes)
            for first in range(first_row, end, max_rows):
                count = min(max_rows, end - first)
                try:
                    data = file.read(count * row_bytes)
                except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                    message = f"{self.place} is damaged: {error}"
                    raise DataError(message, hint="get the file again") from error
                if len(data) < count * row_bytes:
                    raise DataError(
                        f"{self.place} is cut short: {count * row_bytes - len(data)} bytes are "
                        "missing",
                        hint="get the file again",
                    )
                yield np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])


def one_split(rows: Rows, column: int | None) -> Rows:
    """Return one of several masks that stand side by side; one column is handed back."""
    if column is None or len(rows.shape) < 2:
        return rows
    turned = getattr(rows, "transposed", False)
    if not 0 <= column < rows.shape[0 if turned else 1]:
        raise DataError(
            f"split {column} was asked for, but masks have shape {list(rows.shape)}",
            hint="columns count from 0",
        )
    if turned:
        parts = [next(rows.blocks(column, 1))[0]]
    else:
        parts = [block[:, column] for block in rows.blocks(0, 1 << 20)]
    return ArrayRows(np.concatenate(parts), stamp=[rows.stamp, column])


def _read_header(file: IO[bytes], place: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        shape, fortran, dtype = readers[version](file)
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{place} is no .npy array: {error}", hint="write it with np.save"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{place} holds Python objects", hint="save an array of numbers; pickles are not read"
        )
    return shape, fortran, dtype


def file_stamp(path: Path) -> list[Any]:
    """Return the name, size and date of a file: when they are the same, so are its contents."""
    state = path.stat()
    return [path.name, state.st_size, state.st_mtime_ns]


def existing(path: str | os.PathLike[str], *, hint: str = "check the path") -> Path:
    """Return the path of a file that is there."""
    place = Path(path)
    if not place.is_file():
        raise DataError(f"there is no file {place}", hint=hint)
    return place


def leave_out_rest(reading: Reading, folder: Path, used: Collection[Path], why: str) -> None:
    """Name the files of a folder that are not used; a folder with none that is, by its name."""
    inside = {path.resolve() for path in used}
    within = {parent for path in inside for parent in path.parents}
    for path in sorted(folder.rglob("*")):
        place = path.resolve()
        if place in inside or place in within or path.parent.resolve() not in within:
            continue
        reading.leave_out(str(path.relative_to(folder)) + ("/" if path.is_dir() else ""), why)


def npz_members(path: Path) -> list[str]:
    """Return the names of the arrays in an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path}: {error}", hint="get the file again") from error


Array = ArrayLike | str | os.PathLike[str]


def as_rows(value: Any, name: str = "an array") -> Rows:
    """Return the rows of an array, a tensor, or the .npy file at a path; messages say ``name``."""
    if isinstance(value, str | os.PathLike):
        return FileRows(value)
    if hasattr(value, "blocks") and hasattr(value, "stamp"):
        rows: Rows = value
        return rows
    return ArrayRows(np.atleast_1d(as_array(value, name)))


def as_array(value: Any, name: str = "an array") -> NDArray[Any]:
    """Return a dense array of numbers or text from an array, a list or a tensor."""
    kind = type(value).__name__
    sparse = hasattr(value, "tocoo") or str(getattr(value, "layout", "")).startswith("torch.sparse")
    if sparse:
        raise DataError(
            f"{name} is a sparse {kind}",
            hint="make features dense; of an adjacency matrix give the indices as edge_index",
        )
    if np.ma.is_masked(value):
        raise DataError(f"{name} has masked elements", hint="fill them: array.filled(0)")
    try:
        if hasattr(value, "detach"):  # a tensor, without importing torch
            return np.asarray(value.detach().cpu().numpy())
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        dtype = getattr(value, "dtype", None)
        what = f"has dtype {dtype}, which NumPy has not" if dtype else f"is no array: {error}"
        raise DataError(f"{name} {what}", hint="convert it to float16 or float32") from error
    if array.dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects ({kind})", hint="give an array or a tensor of numbers"
        )
    return array


def array_source(  # noqa: PLR0913 - the parts of a graph, all by name
    edge_index: Array | None,
    *,
    features: Array | None = None,
    labels: Array | None = None,
    weights: Array | None = None,
    edge_features: Array | None = None,
    splits: Mapping[str, Array] | None = None,
    node_parts: Mapping[str, Array] | None = None,
    edge_parts: Mapping[str, Array] | None = None,
    num_nodes: int | None = None,
    name: str = "graph",
) -> ArraySource:
    """Return a graph given as arrays; each is an array, a tensor or the path of a .npy file.

    Files are read in blocks, never as a whole.

    Args:
        edge_index: ``[2, E]`` (sources, then targets) or ``[E, 2]``; integers. None: nodes only.
        features: ``[N, D]`` of any dtype.
        labels: ``[N]`` or ``[N, 1]``; classes from 0, unknown -1 or NaN.
        weights: ``[E]``, finite and not negative.
        edge_features: ``[E, F]`` or ``[E]`` of any dtype, in the order of ``edge_index``.
        splits: ``train``, ``valid`` and ``test``, each node ids or a mask of N booleans.
        node_parts: Whatever else nodes carry, by name: numbers ``[N]`` or ``[N, K]``.
        edge_parts: The same of edges, in the order of ``edge_index``, such as their times.
        num_nodes: Number of nodes; None: rows of the features or labels, else the largest id + 1.
        name: For people.

    Raises:
        DataError: A file is missing, or shapes or dtypes do not fit.

    Examples:
        >>> import numpy as np
        >>> source = array_source([[0, 1], [1, 2]], features=np.zeros((3, 4), np.float16))
        >>> source.num_nodes, source.features().dim
        (3, 4)
    """
    unknown = sorted(set(splits or {}) - set(SPLITS))
    if unknown:
        raise DataError(f"there is no split {unknown[0]!r}", hint="use train, valid and test")

    def rows(value: Any, what: str) -> Rows | None:
        return None if value is None else as_rows(value, what)

    return ArraySource(
        name=name,
        edge_rows=rows(edge_index, "edge_index"),
        feature_rows=rows(features, "features"),
        label_rows=rows(labels, "labels"),
        weight_rows=rows(weights, "weights"),
        edge_feature_rows=rows(edge_features, "edge_features"),
        split_rows={key: as_rows(value, key) for key, value in (splits or {}).items()},
        node_part_rows={key: as_rows(value, key) for key, value in (node_parts or {}).items()},
        edge_part_rows={key: as_rows(value, key) for key, value in (edge_parts or {}).items()},
        given_nodes=num_nodes,
    )


@dataclass(kw_only=True)
class ArraySource:
    """A source over arrays that are read in blocks; made by ``array_source`` and others."""

    name: str
    edge_rows: Rows | None
    edge_pairs: bool | None = None  # as ``[E, 2]``; None: by the shape
    feature_rows: Rows | None = None
    label_rows: Rows | None = None
    weight_rows: Rows | None = None
    edge_feature_rows: Rows | None = None
    split_rows: Mapping[str, Rows] = field(default_factory=dict)
    node_part_rows: Mapping[str, Rows] = field(default_factory=dict)
    edge_part_rows: Mapping[str, Rows] = field(default_factory=dict)
    given_nodes: int | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    kind: str = "arrays"

    def __post_init__(self) -> None:
        self.reading = Reading(self.name)
        self.edge_part: Any = None
        count, of_edges = 0, self.edge_feature_rows
        if self.edge_rows is not None:
            self.edge_part = ArrayEdges(
                self.edge_rows,
                self.weight_rows,
                pairs=self.edge_pairs,
            )
            count = self.edge_part.num_edges
        self._edge_features = None
        if of_edges is not None:
            self._edge_features = ArrayFeatures(of_edges, what="edge features")
            if self._edge_features.num_rows != count:
                raise DataError(
                    f"there are {self._edge_features.num_rows} rows of edge features for "
                    f"{count} edges",
                    hint="give one row per edge, in the order of edge_index",
                )
        self._features = None if self.feature_rows is None else ArrayFeatures(self.feature_rows)
        self.num_nodes = self._count_nodes()
        self.parts_of: dict[str, Mapping[str, Any]] = {
            "node": _named_parts(self.node_part_rows, self.num_nodes, "node"),
            "edge": _named_parts(self.edge_part_rows, count, "edge"),
        }
        rows = {
            "edges": self.edge_rows,
            "features": self.feature_rows,
            "labels": self.label_rows,
            "weights": self.weight_rows,
            "edge_features": self.edge_feature_rows,
            **self.split_rows,
            **{f"node part {name}": part for name, part in self.node_part_rows.items()},
            **{f"edge part {name}": part for name, part in self.edge_part_rows.items()},
        }
        stamps = {key: row.stamp for key, row in rows.items() if row is not None}
        self.recipe: Mapping[str, Any] = {
            "source": self.kind,
            "num_nodes": self.num_nodes,
            "num_classes": self.num_classes,
            **stamps,
        }

    def _count_nodes(self) -> int:
        if self.given_nodes is not None:
            given = as_array(self.given_nodes, "num_nodes")  # PyG may have a tensor
            if given.size != 1 or given.dtype.kind not in "iuf" or given != given // 1 or given < 0:
                message = f"num_nodes is {self.given_nodes!r}"
                raise DataError(message, hint="use a whole number from 0")
            return int(given.item())
        if self._features is not None:
            return self._features.num_rows
        if self.label_rows is not None:
            return self.label_rows.shape[0]
        if self.edge_part is None:
            return 0
        count, num_edges = count_ids(self.edge_part)
        hint = "number the nodes 0, 1, 2, ..., or say how many there are with num_nodes"
        check_gaps(count, num_edges, hint=hint)
        return count

    def edges(self) -> Any:
        """Return the edges."""
        return self.edge_part

    def features(self) -> ArrayFeatures | None:
        """Return the feature rows."""
        return self._features

    def edge_features(self) -> ArrayFeatures | None:
        """Return the feature rows of the edges."""
        return self._edge_features

    def node_parts(self) -> Mapping[str, Any]:
        """Return what else nodes carry, by name."""
        return self.parts_of["node"]

    def edge_parts(self) -> Mapping[str, Any]:
        """Return what else edges carry, by name."""
        return self.parts_of["edge"]

    def labels(self) -> LabelPart | None:
        """Return the labels and splits."""
        if self.label_rows is None:
            if self.split_rows:
                message = "there are splits but no labels"
                raise DataError(message, hint="give labels as well; unknown ones are -1")
            return None
        rows = self.label_rows
        splits = {
            name: as_split(self.split_rows.get(name), self.num_nodes, name) for name in SPLITS
        }
        return LabelPart(
            lambda first: _label_blocks(rows, first), splits, self.num_classes, self.class_names
        )


def _named_parts(given: Mapping[str, Rows], count: int, of: str) -> dict[str, ArrayFeatures]:
    """Return what each node or edge carries by name; there must be a row for each."""
    found = {}
    for name, rows in given.items():
        part = ArrayFeatures(rows, what=f"the {of}s' {name}")
        if part.num_rows != count:
            raise DataError(
                f"{name} has {part.num_rows} rows for {count} {of}s",
                hint=f"give one per {of}, in their order, or leave it out: --leave-out {name}",
            )
        found[name] = part
    return found


def _label_blocks(rows: Rows, first_row: int) -> Iterator[NDArray[np.int64]]:
    for block in rows.blocks(first_row, 1 << 18):
        yield as_labels(block)


SEVERAL_LABELS = (
    "one class per node is what fivefold gnn train learns. For several labels or numbers: leave "
    "labels out, give them as node_y.npy (node_parts of array_source), and take "
    'dataset.part("node", "node_y")[batch.n_id] in a loop of your own over '
    "DiskLoader.from_dataset; a Data in memory gives batches with y as it is"
)


def as_labels(block: NDArray[Any]) -> NDArray[np.int64]:
    """Return the labels as int64, -1 where they are not a number."""
    if block.ndim > 1:
        if any(size != 1 for size in block.shape[1:]):
            rows = np.nan_to_num(np.asarray(block, np.float64)).reshape(len(block), -1)
            one_hot = bool(((rows == 0) | (rows == 1)).all() and (rows.sum(1) <= 1).all())
            raise DataError(
                f"labels have shape {list(block.shape)}"
                + ("" if one_hot else ": several for each node"),
                hint="give one class per node, [N]: labels.argmax(1)"
                if one_hot
                else SEVERAL_LABELS,
            )
        block = block.reshape(block.shape[0])
    if block.dtype.kind in "iub":
        return block.astype(np.int64)
    if block.dtype.kind != "f":
        raise DataError(f"labels have dtype {block.dtype}", hint="give integers")
    classes = np.where(np.isnan(block), -1, block)
    with np.errstate(invalid="ignore"):  # infinite ones differ, and are named below
        labels = classes.astype(np.int64)
    if not np.array_equal(labels, classes):
        wrong = float(classes[labels != classes][0])
        raise DataError(
            f"a label is {wrong}",
            hint=f"labels are classes: whole numbers from 0; {SEVERAL_LABELS}",
        )
    return labels


def as_split(rows: Rows | None, num_nodes: int, name: str) -> NDArray[np.int64]:
    """Return the ids of a split."""
    if rows is None:
        return np.empty(0, np.int64)
    nothing = np.empty((0, *rows.shape[1:]), rows.dtype)
    values = np.concatenate([nothing, *rows.blocks(0, 1 << 22)])
    if values.size and max(values.shape) != values.size:
        raise DataError(
            f"the {name} split has shape {list(values.shape)}",
            hint="several splits stand side by side: choose one, with --split 0 or mask[:, 0]",
        )
    values = values.reshape(-1)
    if values.dtype == bool:
        if values.size != num_nodes:
            raise DataError(
                f"the {name} mask has {values.size} entries for {num_nodes} nodes",
                hint="give one boolean per node, or ids",
            )
        return np.flatnonzero(values)
    if values.size and values.dtype.kind not in "iu":
        raise DataError(f"the {name} split has dtype {values.dtype}", hint="give integer ids")
    if values.size == num_nodes > 2 and values.min() >= 0 and values.max() <= 1:
        return np.flatnonzero(values)  # a mask of numbers: as ids, some would stand there twice
    return values.astype(np.int64)


def count_ids(edges: EdgePart) -> tuple[int, int]:
    """Return one more than the largest id, and the last position, after a pass over all edges."""
    count, position = 0, 0
    for block in edges.blocks(0, 1 << 20):
        if block.sources.size:
            count = max(count, int(block.sources.max()) + 1, int(block.targets.max()) + 1)
            position = block.position
    return count, position


def check_gaps(num_nodes: int, num_edges: int, *, hint: str) -> None:
    """Refuse ids that are plainly names: far more nodes than edges could have ends."""
    if num_nodes > max(1 << 24, 64 * 2 * num_edges):
        raise DataError(
            f"ids go up to {num_nodes - 1}, but there are {num_edges} edges: they have gaps",
            hint=hint,
        )


class ArrayFeatures:
    """Feature rows ``[N, D]`` of an array, or ``[N]`` as rows of one element."""

    def __init__(self, rows: Rows, *, what: str = "features") -> None:
        if getattr(rows, "transposed", False):  # every block needs a piece of every column
            if rows.member is not None:  # type: ignore[attr-defined]
                raise DataError(
                    f"{rows.place} is in Fortran order inside an archive",  # type: ignore[attr-defined]
                    hint="save it with np.ascontiguousarray",
                )
            rows = ArrayRows(np.load(rows.path, mmap_mode="r"), rows.stamp)  # type: ignore[attr-defined]
        if len(rows.shape) not in {1, 2}:
            raise DataError(f"{what} have shape {list(rows.shape)}", hint="give [N, D]")
        if rows.dtype.kind not in "iufb":
            raise DataError(f"{what} have dtype {rows.dtype}", hint="give numbers")
        self.rows, self.stamp = rows, rows.stamp
        self.num_rows, self.dim = (*rows.shape, 1)[:2]
        if self.dim == 0:
            raise DataError(f"{what} have shape {list(rows.shape)}", hint="leave them out")
        self.dtype = rows.dtype.newbyteorder("<")

    def blocks(self, first_row: int, max_rows: int) -> Iterator[NDArray[Any]]:
        """Yield the rows from ``first_row`` on."""
        for block in self.rows.blocks(first_row, max_rows):
            yield np.asarray(block, self.dtype).reshape(-1, self.dim)


class ArrayEdges:
    """Edges ``[2, E]`` or, with ``pairs``, ``[E, 2]``; by their shape where that is None."""

    def __init__(
        self,
        rows: Rows,
        weights: Rows | None,
        *,
        pairs: bool | None = None,
    ) -> None:
        if len(rows.shape) != 2 or 2 not in rows.shape:
            raise DataError(f"edges have shape {list(rows.shape)}", hint="give [2, E] or [E, 2]")
        if rows.dtype.kind not in "iu":
            raise DataError(f"edges have dtype {rows.dtype}", hint="give integer ids")
        # Two of two: PyG's order, sources first. A transposed file has its shape turned round.
        self.split = rows.shape[0] == 2
        if rows.shape == (2, 2) and getattr(rows, "transposed", False):
            self.split = False
        if pairs is not None:
            self.split = not pairs
        self.rows = rows
        self.num_edges = rows.shape[1] if self.split else rows.shape[0]
        self.expected_edges = self.num_edges
        self.weights = weights
        self.stamp = [rows.stamp, None if weights is None else weights.stamp]
        self.weighted = weights is not None
        if weights is not None and weights.dtype.kind not in "iufb":
            raise DataError(f"weights have dtype {weights.dtype}", hint="give real numbers")
        if weights is not None and weights.shape not in {(self.num_edges,), (self.num_edges, 1)}:
            raise DataError(
                f"weights have shape {list(weights.shape)} for {self.num_edges} edges",
                hint="give one weight per edge",
            )

    def blocks(self, position: int, max_edges: int) -> Iterator[EdgeBlock]:
        """Yield the edges from a position on."""
        weights = None if self.weights is None else self.weights.blocks(position, max_edges)
        for sources, targets in self._pairs(position, max_edges):
            position += sources.size
            numbers = None
            if weights is not None:
                with np.errstate(over="ignore"):  # infinite weights are refused by the writer
                    numbers = next(weights).reshape(-1).astype(np.float32)
            yield EdgeBlock(sources, targets, position, numbers)

    def _pairs(self, position: int, max_edges: int) -> Iterator[tuple[Any, Any]]:
        if not self.split:
            for block in self.rows.blocks(position, max_edges):
                yield _as_ids(block[:, 0]), _as_ids(block[:, 1])
            return
        halves = (end.blocks(position, max_edges) for end in self.rows.halves())  # type: ignore[attr-defined]
        for source, target in zip(*halves, strict=True):
            yield _as_ids(source), _as_ids(target)


def _as_ids(values: NDArray[Any]) -> NDArray[Any]:
    """Return contiguous ids in the machine's byte order."""
    most = int(values.max(initial=0)) if values.dtype.kind == "u" else 0
    if most > np.iinfo(np.int64).max:
        raise DataError(
            f"an edge has the end {most}, which int64 does not hold: ids are names",
            hint="number the nodes: numpy.unique(ids, return_inverse=True)[1]; of a table "
            "--ids text does",
        )
    kind = np.int64 if values.dtype.itemsize == 8 else values.dtype.newbyteorder("=")
    return np.ascontiguousarray(values, kind)
