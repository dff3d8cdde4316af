"""Tables of nodes: ids, features, labels and splits by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from fivefold.errors import DataError
from fivefold.gnn.data._array_source import as_labels
from fivefold.gnn.data._parts import LabelPart
from fivefold.gnn.data._tables import ParquetReader, TableReader, open_table, rest_of

_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
    "": "",
    "none": "",
}
_MASKS = {
    "train": ("train_mask",),
    "valid": ("val_mask", "valid_mask"),
    "test": ("test_mask",),
}
_SPLITS = ("train", "valid", "test")
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Which column is what, by name; of a table without header the names are 0, 1, 2, ...

    Attributes:
        source: Of the edge tables; None: the first column.
        target: Of the edge tables; None: the second column.
        weight: Of the edge tables; None: edges have no weights.
        node: Id column of the node table; None: ``id`` or ``node`` if there is one, else rows
            are numbered.
        label: Of the node table; None: ``label`` or ``y`` if there is one.
        split: Of the node table, with train, valid or test; None: ``split`` if there is one.
        features: Of the node table; None: all other numeric columns.
        names: Whether CSV files begin with a line of names; None: found, where that is safe.
    """

    source: str | None = None
    target: str | None = None
    weight: str | None = None
    node: str | None = None
    label: str | None = None
    split: str | None = None
    features: Sequence[str] | None = None
    names: bool | None = None


def check_column(table: TableReader, name: str | None) -> None:
    """Raise unless the table has the column; None is none."""
    if name is not None and name not in table.names:
        raise DataError(
            f"{table.path} has no column {name!r}", hint=f"it has {', '.join(table.names)}"
        )


def check_whole(batch: Any, path: Path) -> None:
    """Raise where a field is empty."""
    if any(column.null_count for column in batch.columns):
        raise DataError(f"{path} has an empty field", hint="fill it or leave it out")


class NodeTable:
    """Features, labels and splits by row."""

    def __init__(self, path: Path, columns: TableColumns) -> None:
        self.table = table = open_table(path, header=columns.names)
        self.types = dict(zip(table.names, table.types, strict=True))
        self.id = columns.node or _first_of(table.names, ("id", "node"))
        self.label = columns.label or _first_of(table.names, ("label", "y"))
        self.split = columns.split or _first_of(table.names, ("split",))
        for name in (self.id, self.label, self.split, *(columns.features or ())):
            check_column(table, name)
        self.masks = {} if self.split else self._found_masks()
        taken = {self.id, self.label, self.split, *self.masks.values()}
        self.feature_names = (
            [name for name in table.names if name not in taken and self._width(name)]
            if columns.features is None
            else list(columns.features)
        )
        self.widths = {name: self._width(name) for name in self.feature_names}
        for name, width in self.widths.items():
            if not width:
                raise DataError(
                    f"feature column {name!r} is of type {self.types[name]}",
                    hint="use numbers or lists of one length",
                )
        self.dim = sum(self.widths.values())
        self._is_typed = isinstance(table, ParquetReader)
        self.dtype = self._feature_dtype()
        first = [table.names[0]] if table.names else []
        as_text = None if self._is_typed else [pa.string()] * len(first)
        self.num_rows = sum(batch.num_rows for batch in table.batches(first, as_text))

    def _found_masks(self) -> dict[str, str]:
        """Return the columns that say of every node whether it is in a split, by split."""
        found = {split: _first_of(self.table.names, names) for split, names in _MASKS.items()}
        return {
            split: name
            for split, name in found.items()
            if name is not None and pa.types.is_boolean(self.types[name])
        }

    def _width(self, name: str) -> int:
        """Return the number of elements of a feature column; 0 where it is none."""
        kind = self.types[name]
        if _is_list(kind):
            if not _is_numeric(kind.value_type):
                return 0
            for batch in self.table.batches([name]):
                if batch.num_rows:
                    return len(batch.column(0)[0] or ())  # the others must be as long
            return 0
        return int(_is_numeric(kind))

    def _feature_types(self) -> list[Any] | None:
        """Return types for text: Arrow would guess by the first block, where 1.5 may come later."""
        if self._is_typed:
            return None
        kinds = [self.types[name] for name in self.feature_names]
        return [kind if pa.types.is_boolean(kind) else pa.float32() for kind in kinds]

    def _feature_dtype(self) -> np.dtype[Any]:
        kinds = [_element(self.types[name]).to_pandas_dtype() for name in self.feature_names]
        if not kinds:
            return np.dtype(np.float32)
        kind = np.result_type(*kinds)
        # Text has no single precision: numbers of a CSV file are stored as float32.
        return kind if self._is_typed else np.dtype(np.float32)

    def names(self) -> Iterator[Any]:
        """Yield the ids as text, in the order of rows; without an id column the rows' numbers."""
        row = 0
        columns = [self.id or self.table.names[0]]
        for batch in self.table.batches(columns, [pa.string()] if self.id else None):
            if self.id is None:
                numbers = pa.array(np.arange(row, row + batch.num_rows))
                yield numbers.cast(pa.string())
            else:
                check_whole(batch, self.table.path)
                yield batch.column(0)
            row += batch.num_rows

    def describe(self) -> list[Any]:
        """Return what decides the result, beside the file."""
        return [self.id, self.label, self.split, self.feature_names, *self.masks.values()]

    def ids_are_rows(self) -> bool:
        """Return whether the ids are 0, 1, 2, ... as without an id column."""
        if self.id is None:
            return True
        if not pa.types.is_integer(self.types[self.id]):
            return False
        row = 0
        for batch in self.table.batches([self.id]):
            ids = batch.column(0).to_numpy(zero_copy_only=False)
            if not np.array_equal(ids, np.arange(row, row + ids.size)):
                return False
            row += ids.size
        return True

    def blocks(self, first_row: int, max_rows: int) -> Iterator[NDArray[Any]]:
        batches = self.table.batches(self.feature_names, self._feature_types())
        for part, _ in rest_of(batches, first_row, max_rows):
            yield self._block(part)

    def _block(self, batch: Any) -> NDArray[Any]:
        block, place = np.empty((batch.num_rows, self.dim), self.dtype), 0
        for name, column in zip(self.feature_names, batch.columns, strict=True):
            width = self.widths[name]
            values = column.flatten() if _is_list(column.type) else column
            if column.null_count or values.null_count or not _all_of(column, width):
                raise DataError(
                    f"column {name!r} of {self.table.path} has empty fields or lists of several "
                    "lengths",
                    hint="every node needs a whole feature row",
                )
            array = values.to_numpy(zero_copy_only=False)
            block[:, place : place + width] = array.reshape(batch.num_rows, width)
            place += width
        return block

    def labels(self) -> LabelPart | None:
        """Return the label and split columns."""
        if self.label is None:
            return None
        names = self._label_names(self.label)
        return LabelPart(
            lambda _first: self._label_blocks(names), self._splits(), class_names=names
        )

    def _label_names(self, label: str) -> list[str] | None:
        """Return the classes of a text column in alphabetical order; None for numbers."""
        kind = self.types[label]
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return None
        found: set[str] = set()
        for batch in self.table.batches([label], [pa.string()]):
            found.update(value for value in batch.column(0).unique().to_pylist() if value)
            if len(found) > _MOST_CLASSES:
                raise DataError(
                    f"column {label!r} has more than {_MOST_CLASSES} classes",
                    hint="name the label column",
                )
        return sorted(found)

    def _label_blocks(self, names: list[str] | None) -> Iterator[NDArray[np.int64]]:
        kind = [pa.float64() if names is None else pa.string()]
        for batch in self.table.batches([str(self.label)], kind):
            column = batch.column(0)
            if names is not None:
                column = pa.compute.index_in(column, value_set=pa.array(names, pa.string()))
            yield as_labels(column.fill_null(-1).to_numpy(zero_copy_only=False))

    def _splits(self) -> dict[str, NDArray[np.int64]]:
        found: dict[str, list[NDArray[np.int64]]] = {name: [] for name in _SPLITS}
        row = 0
        columns = [self.split] if self.split else list(self.masks.values())
        kinds = [pa.string() if self.split else pa.bool_()] * len(columns)
        for batch in self.table.batches(columns, kinds) if columns else ():
            for name, rows in self._members(batch).items():
                found[name].append(rows + row)
            row += batch.num_rows
        nothing = [np.empty(0, np.int64)]
        return {name: np.concatenate(parts or nothing) for name, parts in found.items()}

    def _members(self, batch: Any) -> dict[str, NDArray[np.int64]]:
        """Return the rows of a batch that are in each split."""
        if not self.split:
            masks = zip(self.masks, batch.columns, strict=True)
            return {
                name: np.flatnonzero(column.fill_null(False).to_numpy(zero_copy_only=False))
                for name, column in masks
            }
        words = [(word or "").strip().lower() for word in batch.column(0).to_pylist()]
        unknown = sorted(set(words) - set(_SPLIT_NAMES))
        if unknown:
            raise DataError(
                f"column {self.split!r} of {self.table.path} has {unknown[0]!r}",
                hint="it says train, valid or test, or nothing for nodes of no split",
            )
        splits = np.array([_SPLIT_NAMES[word] for word in words])
        return {name: np.flatnonzero(splits == name) for name in _SPLITS}


def _first_of(names: list[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in names if name.lower() in wanted), None)


def _element(kind: Any) -> Any:
    return kind.value_type if _is_list(kind) else kind


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_numeric(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _all_of(column: Any, width: int) -> bool:
    """Return whether all lists of a column have this length; numbers have."""
    if not _is_list(column.type):
        return True
    lengths = pa.compute.list_value_length(column).to_numpy(zero_copy_only=False)
    return bool(np.all(lengths == width))
