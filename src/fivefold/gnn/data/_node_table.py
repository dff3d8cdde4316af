"""Tables of nodes: what each column is, decided in one place, and the parts that come of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from fivefold.errors import DataError, InfeasibleError
from fivefold.gnn.data._csv import DECIMAL_COMMA, CsvReader, is_number
from fivefold.gnn.data._tables import (
    TableColumns,
    TableReader,
    check_column,
    check_whole,
    open_table,
    rest_of,
)
from fivefold.gnn.data.arrays import SEVERAL_LABELS, as_labels
from fivefold.gnn.data.parts import SPLITS, LabelPart
from fivefold.gnn.storage.pages import Array, Ids
from fivefold.reading import Reading

_BLOCK_ROWS = 1 << 16
_MOST_CLASSES = 1 << 20
_IDS = ("id", "node", "node_id", "nodeid", "nid", "vertex", "vertex_id", "key")
_LABELS = ("label", "labels", "y", "class", "target", "category", "subject")
_SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "": "", "none": ""}
_SPLIT_NAMES |= dict.fromkeys(("valid", "val", "validation", "dev"), "valid")
_ROW_NUMBERS = re.compile(r"(unnamed: ?\d+)?|index|level_\d+|__index_level_\d+__|row_?names?|row")
_MASK = re.compile(r"(?:is_)?(train|training|valid|val|validation|dev|test)(?:_?mask)?")
_YES = {"1", "1.0", "true", "t", "yes", "y"}
_NO = {"0", "0.0", "false", "f", "no", "n", ""}
_LIST = re.compile(r"\s*\[?\s*[-+.\d][-+.\deE]*(\s*[,; ]\s*[-+.\d][-+.\deE]*)+\s*\]?\s*")


_NUMBERED_LABEL = re.compile(r"(?:is_)?(?:labels?|y|class|targets?|category)[_ .]?\d+")
_FOLD = re.compile(r"(k_?|cv_?)?fold(_?(id|no|number))?|split[_ ]?\d+|partition|subset")
_THOUSANDS = re.compile(r"\s*-?\d{1,3}(,\d{3})+\s*")
_MISSING_WORDS = {"na", "n/a", "nan", "null", "?"}


def names_nodes(names: list[str]) -> bool:
    """Return whether a line names the columns of a node table."""
    lower = [name.lower() for name in names]
    return lower[:1] != [""] and bool(
        {*lower} & {*_IDS, "name", "split"} or (lower and lower[0].endswith(("_id", " id")))
    )


class NodeTable:
    """Features, labels and splits by row.

    Every column has one fate, which ``reading`` tells: id, label, split, mask, feature, or left
    out.
    """

    def __init__(self, path: Path, columns: TableColumns) -> None:
        self.columns, self.reading = columns, Reading(path.name)
        self._named_twice = set[str]()  # columns of labels that name each node by itself
        self.table = table = open_table(
            path,
            columns,
            lambda names: self._known(names, columns),
            lambda _, above: all(above) or sum(above) > 1,
        )
        self.types = dict(zip(table.names, table.types, strict=True))
        for name in (columns.node, columns.label, columns.split, *(columns.features or ())):
            check_column(table, name)
        self.id = columns.node or self._find_id()
        self.label = columns.label or self._find_label()
        self.split = columns.split or self._only_one(("split",), "split")
        self.masks = self._find_masks()
        self._split_by_words = self.split is None and not self.masks
        if self._split_by_words:
            self.split = self._find_split_by_words()
        if self.label is not None and self._is_text(self.label) and isinstance(table, CsvReader):
            self._refuse_words(self.label, blanks=False)
        self._order: Ids | None = None  # of the rows, where they go by their ids
        self._sorted: Array | None = None
        self._parsed: set[str] = set()  # columns of text that hold lists of numbers
        self.feature_names = self._find_features()
        self.widths = {name: self._width(name) for name in self.feature_names}
        for name, width in self.widths.items():
            if not width:
                raise DataError(
                    f"feature column {name!r} is of type {self.types[name]}",
                    hint="use numbers or lists of one length",
                )
        self.dim = sum(self.widths.values())
        self._find_types()
        first = table.names[:1]
        as_text = [pa.string()] * len(first) if isinstance(table, CsvReader) else None
        self.num_rows = sum(batch.num_rows for batch in table.batches(first, as_text))
        self._tell()

    @staticmethod
    def _known(names: list[str], columns: TableColumns) -> bool:
        chosen = [columns.node, columns.label, columns.split, *(columns.features or ())]
        given = [name for name in chosen if name is not None]
        return names_nodes(names) or bool(given and set(given) <= set(names))

    # -- which column is what ----------------------------------------------------------------------

    def _only_one(self, wanted: Sequence[str], role: str) -> str | None:
        """Return the only column of these names."""
        found = [name for name in self.table.names if name.lower() in wanted]
        if len(found) > 1:
            raise DataError(
                f"columns {' and '.join(map(repr, found))} of {self.table.path} may both be the "
                f"{role}",
                hint=f"name it: --column {role}=NAME",
            )
        return found[0] if found else None

    def _find_id(self) -> str | None:
        names = self.table.names
        exact = [name for name in names if name.lower() in _IDS]
        if len(exact) == 1:
            return exact[0]
        if len(exact) > 1:
            self._only_one(_IDS, "node")
        taken = {self.columns.label, self.columns.split, *(self.columns.features or ())}
        free = [name for name in names if name not in taken]
        first = next(iter(names), None)
        suspects = [name for name in free if name != first and _counts_rows(name)]
        if first in free and first.lower() not in {*_LABELS, "split"}:
            is_id = _is_id(first, self.types[first]) or first.lower() == "name"
            if is_id and self._distinct(first):
                return first
            suspects.insert(0, first)
        if (found := next(filter(self._looks_like_ids, suspects), None)) is not None:
            raise DataError(
                f"column {found!r} of {self.table.path} looks like the ids of nodes: no two rows "
                "have the same",
                hint=f"say what it is: --column node={found}, or name the features: --column "
                "features=NAME,...",
            )
        return None

    def _looks_like_ids(self, name: str) -> bool:
        if self.columns.features is not None or _is_mask(name):
            return False
        kind = self.types[name]
        may_be = _counts_rows(name) or pa.types.is_integer(kind)
        return may_be and self._distinct(name)

    def _distinct(self, name: str, *, least: int = 2) -> bool:
        """Return whether no value of a column stands twice, of at least so many."""
        kind = pa.int64() if pa.types.is_signed_integer(self.types[name]) else pa.string()
        parts = [batch.column(0) for batch in self.table.batches([name], [kind])]
        values = pa.chunked_array(parts, kind)
        return len(values) >= least and len(values.unique()) == len(values)

    def _find_label(self) -> str | None:
        """Return the column of classes; one that names every node by itself is none."""
        found = self._only_one(_LABELS, "label")
        if found is not None and self._is_text(found) and self._distinct(found, least=20):
            self._named_twice.add(found)
            return None
        return found

    def _find_masks(self) -> dict[str, str]:
        """Return the columns that say which nodes are in a split, whatever their type."""
        found: dict[str, str] = {}
        others = {self.id, self.label, self.split, *(self.columns.features or ())}
        for name in self.table.names:
            match = _MASK.fullmatch(name.lower())
            if match is None or name in others:
                continue
            split = _SPLIT_NAMES[match[1]]
            if split in found:
                raise DataError(
                    f"columns {found[split]!r} and {name!r} of {self.table.path} may both be the "
                    f"mask of {split}",
                    hint="leave one of them",
                )
            found[split] = name
        return found

    def _find_split_by_words(self) -> str | None:
        """Return the column all whose words are those of splits, whatever its name."""
        found = []
        for name in self.table.names:
            kind = self.types[name]
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            chosen = {self.id, self.label, *(self.columns.features or ())}
            if name in chosen or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                continue
            words = set[str]()
            for batch in self.table.batches([name], [pa.string()]):
                words |= {(w or "").strip().lower() for w in batch.column(0).unique().to_pylist()}
                if not words <= set(_SPLIT_NAMES):
                    break
            if words <= set(_SPLIT_NAMES) and words & {"train", "training"} and len(words) > 1:
                found.append(name)
        if len(found) > 1:
            self._only_one([name.lower() for name in found], "split")
        return next(iter(found), None)

    def _find_features(self) -> list[str]:
        others = {self.id, self.label, self.split, *self.masks.values()}
        if self.columns.features is not None:
            chosen = list(self.columns.features)
        else:
            self._refuse_labels_as_features()
            chosen = [
                name for name in self.table.names
                if name not in others
                and not (_is_id(name, self.types[name]) or _counts_rows(name) or _is_fold(name))
                and _FOLD.fullmatch(name.lower()) is None
                and self._may_be_feature(name)
            ]  # fmt: skip
        for name in chosen:
            if self._is_text(name) and self._is_list_of_numbers(name):
                self._parsed.add(name)
        return chosen

    def _refuse_labels_as_features(self) -> None:
        """Refuse class_0, class_1, ...: as features they would tell what is to be learned."""
        found = [name for name in self.table.names if _NUMBERED_LABEL.fullmatch(name.lower())]
        found = [name for name in found if name not in {self.id, self.label, self.split}]
        if found:
            raise DataError(
                f"columns {', '.join(found)[:80]} of {self.table.path} may be labels, which are no "
                "features",
                hint="--column features=NAME,... names the features; labels are one class per "
                "node, in one column: of one column per class the place of the 1",
            )

    def _is_text(self, name: str) -> bool:
        kind = self.types[name]
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    def _is_list_of_numbers(self, name: str) -> bool:
        if not isinstance(self.table, CsvReader):
            return False
        values = [value for value in self.table.values(name) if value.strip()]
        lists = bool(values) and all(map(_LIST.fullmatch, values))
        decimals = [value for value in values if DECIMAL_COMMA.fullmatch(value)]
        whole = [value for value in values if re.fullmatch(r"\s*-?\d+\s*", value)]
        thousands = lists and all(map(_THOUSANDS.fullmatch, values))
        alike = len(decimals) + len(whole) == len(values) and not thousands
        # Between commas, "6,7" in each row is a list as DGL writes it.
        if decimals and alike and (whole or self.table.delimiter != ","):
            raise DataError(
                f"column {name!r} of {self.table.path} may hold numbers with a comma before the "
                f"decimals, or lists of numbers: {decimals[0]!r}",
                hint="write a point for the comma, 0.5, or put brackets around lists: [0,5]",
            )
        if thousands:
            raise DataError(
                f"column {name!r} of {self.table.path} may hold numbers with commas between "
                f"thousands, or lists of numbers: {values[0]!r}",
                hint="take the commas out, or put brackets around lists: [1,234]",
            )
        return lists

    def _may_be_feature(self, name: str) -> bool:
        """Return whether a column holds numbers; one of numbers and words is refused."""
        if self._is_text(name) and isinstance(self.table, CsvReader):
            if self._is_list_of_numbers(name):
                return True
            self._refuse_words(name)
            return False
        return self._width(name) > 0

    def _refuse_words(self, name: str, *, blanks: bool = True) -> None:
        """Refuse a column most of whose fields are numbers; name the first one that is none."""
        row, numbers, words = 0, 0, list[tuple[int, str]]()
        for batch in self.table.batches([name], [pa.string()]):
            for value in batch.column(0).to_pylist():
                row += 1
                if value is None or not (value.strip() or blanks):
                    continue
                if is_number(value):
                    numbers += 1
                elif len(words) <= numbers:
                    words.append((row, value))
                if len(words) > 1000 and len(words) > numbers:
                    return
        if words and numbers > len(words):
            raise DataError(
                f"column {name!r} of {self.table.path} has {words[0][1]!r} in row {words[0][0]}, "
                f"where {numbers} of {row} rows have numbers",
                hint=f"--missing {words[0][1]!r} where it stands for no value; or choose the "
                "features: --column features=NAME,...",
            )

    def _width(self, name: str) -> int:
        """Return the number of elements of a feature column; 0 where it is none."""
        kind = self.types[name]
        if name in self._parsed and isinstance(self.table, CsvReader):
            return len(_split_list(next(v for v in self.table.values(name) if v.strip())))
        if is_list(kind):
            if not _is_numeric(kind.value_type):
                return 0
            for batch in self.table.batches([name]):
                if batch.num_rows:
                    return len(batch.column(0)[0] or ())  # the others must be as long
            return 0
        return int(_is_numeric(kind))

    def _find_types(self) -> None:
        self.dtype, self._feature_types = np.dtype(np.float32), None
        kinds = [self.types[name] for name in self.feature_names]
        if isinstance(self.table, CsvReader):
            # Arrow would guess by the first block, where 1.5 may come later; text has no precision.
            self._feature_types = [
                pa.string() if name in self._parsed
                else kind if pa.types.is_boolean(kind) else pa.float32()
                for name, kind in zip(self.feature_names, kinds, strict=True)
            ]  # fmt: skip
        elif kinds:
            elements = (kind.value_type if is_list(kind) else kind for kind in kinds)
            self.dtype = np.result_type(*(kind.to_pandas_dtype() for kind in elements))

    def _tell(self) -> None:
        """Say of every column what became of it."""
        told, parts = self.reading, {self.id: "ids of nodes", self.label: "labels"}
        splits = {name: f"{split} split, a mask" for split, name in self.masks.items()}
        splits |= {self.split: "split"} if self.split else {}
        kind = f"features as {self.dtype}"  # in which a whole number may be rounded
        parts |= {name: f"{self.widths[name]} {kind}" for name in self.feature_names}
        for name in self.table.names:
            if name == self.split and self._split_by_words and self.label is not None:
                told.assume(name, "split", "its words are those of splits, its name is another")
            elif name in parts and (large := self._rounded(name)) is not None:
                told.assume(name, f"{np.float32(large):.0f}", f"float32 holds no {large}: rounded")
            elif name in parts:
                told.take(name, parts[name])
            elif name in splits and self.label is not None and self.split in {None, name}:
                told.take(name, splits[name])
            else:
                told.leave_out(name, self._why_not(name, splits))
        if self.id is None:
            told.assume("ids", "rows from 0", "no column has the name of ids")
        for word in self.columns.missing:
            told.assume(f"missing {word!r}", 0, "in features; no label in labels")

    def _rounded(self, name: str) -> int | None:
        """Return a whole number of a feature in the first lines that float32 does not hold."""
        if not isinstance(self.table, CsvReader) or name not in self.feature_names:
            return None
        whole = pa.types.is_integer(self.types[name])
        values = (int(value) for value in self.table.values(name) if value.strip()) if whole else ()
        return next((value for value in values if int(np.float32(value)) != value), None)

    def _why_not(self, name: str, splits: dict[str, str]) -> str:
        """Return why a column is left out."""
        if name in splits:
            if self.label is None:
                return f"{splits[name]}, but there is no column of labels"
            return f"column {self.split!r} says the splits"
        if name in self._named_twice:
            return "names: no two rows have the same, so it holds no classes"
        if _is_id(name, self.types[name]) or _counts_rows(name):
            return "a number of something else, by its name: no feature"
        if _is_fold(name) or _FOLD.fullmatch(name.lower()):
            return "one of several splits, by its name: make train_mask, val_mask, ... of one"
        return f"{self.types[name]}: neither a number nor a known name"

    # -- the parts ---------------------------------------------------------------------------------

    def names(self) -> Iterator[Any]:
        """Yield the ids as text, in the order of rows; without an id column the rows' numbers."""
        if self.id is None:
            for first in range(0, self.num_rows, _BLOCK_ROWS):
                numbers = np.arange(first, min(first + _BLOCK_ROWS, self.num_rows))
                yield pa.array(numbers).cast(pa.string())
            return
        for batch in self.table.batches([self.id], [pa.string()]):
            check_whole(batch, self.table.path)
            yield batch.column(0)

    def describe(self) -> list[Any]:
        """Return what decides the result, beside the file."""
        return [
            *(self.id, self.label, self.split, self.feature_names, *self.masks.values()),
            *self.columns.missing,
        ]

    def ids_are_numbers(self) -> bool:
        """Return whether the ids are 0, 1, 2, ..., in any order, as without an id column."""
        if self.id is None:
            return True
        if not pa.types.is_integer(self.types[self.id]):
            return False
        return _is_permutation(self._ids())

    def _ids(self) -> Ids:
        parts = [np.empty(0, np.int64)]
        for batch in self.table.batches([str(self.id)], [pa.int64()]):
            check_whole(batch, self.table.path)
            parts.append(batch.column(0).to_numpy())
        return np.concatenate(parts)

    def go_by_id(self) -> None:
        """Hand out rows in the order of their ids, which are numbers."""
        if self.id is None:
            return
        ids = self._ids()
        if not _is_permutation(ids):
            raise DataError(
                f"the ids in column {self.id!r} of {self.table.path} are not 0, 1, 2, ..., each "
                "once: as numbers they do not say which row is whose",
                hint="--ids text takes them as names; or leave --ids out",
            )
        if not np.array_equal(ids, np.arange(ids.size)):
            self._order = np.argsort(ids)

    def check_memory(self, memory_bytes: int) -> None:
        """Refuse to put rows in order that memory does not hold."""
        size = self.num_rows * self.dim * self.dtype.itemsize
        if self._order is not None and 2 * size > memory_bytes:
            raise InfeasibleError(
                f"the rows of {self.table.path} are not in the order of their ids, and sorting "
                f"them takes more than memory_bytes={memory_bytes}",
                hint=f"allow {2 * size} (--memory), or sort the table by {self.id!r}",
            )

    def blocks(self, first_row: int, max_rows: int) -> Iterator[Array]:
        """Yield the feature rows from ``first_row`` on, in blocks of at most ``max_rows``."""
        if self._order is None:
            yield from self._as_they_lie(first_row, max_rows)
            return
        if self._sorted is None:
            self._sorted = np.concatenate(list(self._as_they_lie(0, max_rows)))[self._order]
        for first in range(first_row, self.num_rows, max_rows):
            yield self._sorted[first : first + max_rows]

    def _as_they_lie(self, first_row: int, max_rows: int) -> Iterator[Array]:
        batches = self.table.batches(self.feature_names, self._feature_types)
        for part, row in rest_of(batches, first_row, max_rows):
            yield self._block(part, row - part.num_rows)

    def _block(self, batch: Any, first_row: int) -> Array:
        block, place = np.empty((batch.num_rows, self.dim), self.dtype), 0
        for name, given in zip(self.feature_names, batch.columns, strict=True):
            column = given.fill_null(0) if self.columns.missing and given.null_count else given
            width, values, even = self.widths[name], column, True
            if name in self._parsed:
                block[:, place : place + width] = self._lists(name, column, first_row)
                place += width
                continue
            if is_list(column.type):
                values = column.flatten()
                even = compute.all(compute.equal(compute.list_value_length(column), width)).as_py()
            if column.null_count or values.null_count or even is False:
                raise DataError(
                    f"column {name!r} of {self.table.path} has empty fields or lists of several "
                    "lengths",
                    hint="every node needs a whole feature row; --missing '' makes 0 of empty "
                    "fields",
                )
            array = values.to_numpy(zero_copy_only=False)
            block[:, place : place + width] = array.reshape(batch.num_rows, width)
            place += width
        return block

    def _lists(self, name: str, column: Any, first_row: int) -> Array:
        """Return the numbers that stand in the fields of a column of text."""
        rows = np.empty((len(column), self.widths[name]), np.float32)
        for row, text in enumerate(column.to_pylist()):
            found = _split_list(text or "")
            if len(found) != rows.shape[1] or not all(map(is_number, found)):
                raise DataError(
                    f"column {name!r} of {self.table.path} has {str(text)[:40]!r} in row "
                    f"{first_row + row + 1}, the first row has {rows.shape[1]} numbers",
                    hint="every node needs as many",
                )
            rows[row] = [float(value) for value in found]
        return rows

    def labels(self) -> LabelPart | None:
        """Return the label and split columns."""
        if self.label is None:
            return None
        names = self._label_names(self.label)
        return LabelPart(
            lambda _first: self._label_blocks(names), self._splits(), class_names=names
        )

    def _label_names(self, label: str) -> list[str] | None:
        """Return the classes of a column of words; None for numbers, also where they are text.

        Words are in alphabetical order, categories of Arrow in their own.
        """
        kind, order = self.types[label], dict[str, None]()
        by_category = pa.types.is_dictionary(kind)
        kind = kind.value_type if by_category else kind
        if pa.types.is_nested(kind):
            raise DataError(
                f"column {label!r} of {self.table.path} is of type {kind}: several labels for each "
                "node",
                hint=SEVERAL_LABELS,
            )
        if _is_numeric(kind):
            return None  # what a first block of blanks or dates is taken for is read as words
        for batch in self.table.batches([label], None if by_category else [pa.string()]):
            column = batch.column(0)
            values = column.dictionary if by_category else column.unique()
            words = ((word or "").strip() for word in values.to_pylist())
            order.update(dict.fromkeys(filter(None, words)))
            if len(order) > _MOST_CLASSES:
                raise DataError(
                    f"column {label!r} has more than {_MOST_CLASSES} classes",
                    hint="name the label column",
                )
        if order and all(re.fullmatch(r"-?\d+", value) for value in order):
            return None
        self._check_classes(label, order)
        return list(order) if by_category else sorted(order)

    def _check_classes(self, label: str, order: Iterable[str]) -> None:
        """Refuse classes that a misread field would make."""
        missing = [word for word in order if word.lower() in _MISSING_WORDS]
        if missing and not self.columns.missing and isinstance(self.table, CsvReader):
            raise DataError(
                f"a class of column {label!r} of {self.table.path} is {missing[0]!r}",
                hint=f"--missing {missing[0]!r} where it stands for no label; --missing '' where "
                "it is a class",
            )
        if all(map(_LIST.fullmatch, order)):
            raise DataError(
                f"the labels in column {label!r} of {self.table.path} are lists of numbers: "
                f"{next(iter(order))!r}",
                hint=SEVERAL_LABELS,
            )
        quoted = next((value for value in order if '"' in {value[0], value[-1]}), None)
        if quoted and isinstance(self.table, CsvReader) and self.columns.quote is None:
            raise DataError(
                f"a class of column {label!r} of {self.table.path} is {quoted[:60]}",
                hint="say what quotation marks mean: --quote none or --quote '\"'",
            )

    def _label_blocks(self, names: list[str] | None) -> Iterator[Ids]:
        given = self.types[str(self.label)]
        is_text = names is not None or not _is_numeric(given)
        kind = [pa.string() if is_text else given if pa.types.is_boolean(given) else pa.float64()]
        if self._order is not None:
            yield np.concatenate([np.empty(0, np.int64), *self._labels_as_they_lie(names, kind)])[
                self._order
            ]
            return
        yield from self._labels_as_they_lie(names, kind)

    def _labels_as_they_lie(self, names: list[str] | None, kind: list[Any]) -> Iterator[Ids]:
        is_text = kind == [pa.string()]
        for batch in self.table.batches([str(self.label)], kind):
            column = batch.column(0)
            if is_text:
                column = compute.utf8_trim_whitespace(column)
                column = compute.if_else(compute.equal(column, ""), None, column)
            if names is not None:
                column = compute.index_in(column, value_set=pa.array(names, pa.string()))
            elif is_text:
                column = column.cast(pa.int64())
            if pa.types.is_boolean(column.type):
                column = column.cast(pa.int64())
            yield as_labels(column.fill_null(-1).to_numpy(zero_copy_only=False))

    def _splits(self) -> dict[str, Ids]:
        found: dict[str, list[Ids]] = {name: [np.empty(0, np.int64)] for name in SPLITS}
        row = 0
        columns = [self.split] if self.split else list(self.masks.values())
        kinds = [pa.string()] * len(columns)
        for batch in self.table.batches(columns, kinds) if columns else ():
            for name, member in self._members(batch, row).items():
                found[name].append(np.flatnonzero(member) + row)
            row += batch.num_rows
        rows = {name: np.concatenate(parts) for name, parts in found.items()}
        if self._order is None:
            return rows
        ids = np.argsort(self._order)  # of each row
        return {name: np.sort(ids[members]) for name, members in rows.items()}

    def _members(self, batch: Any, first_row: int) -> dict[str, Array]:
        """Return by split which rows of a batch are in it."""
        if not self.split:
            return {
                split: self._mask(batch.column(place), name, first_row)
                for place, (split, name) in enumerate(self.masks.items())
            }
        words = [(word or "").strip().lower() for word in batch.column(0).to_pylist()]
        unknown = sorted(set(words) - set(_SPLIT_NAMES))
        if unknown:
            raise DataError(
                f"column {self.split!r} of {self.table.path} has {unknown[0]!r}",
                hint="it says train, valid or test, or nothing for nodes of no split",
            )
        splits = np.array([_SPLIT_NAMES[word] for word in words], np.str_)
        return {name: splits == name for name in SPLITS}

    def _mask(self, column: Any, name: str, first_row: int) -> Array:
        words = [(word or "").strip().lower() for word in column.to_pylist()]
        wrong = next((n for n, word in enumerate(words) if word not in _YES | _NO), None)
        if wrong is not None:
            raise DataError(
                f"column {name!r} of {self.table.path} is a mask by its name, but has "
                f"{words[wrong]!r} in row {first_row + wrong + 1}",
                hint="masks say 0 or 1, true or false; where it is a feature, name all features: "
                "--column features=NAME,...",
            )
        return np.array([word in _YES for word in words], bool)


def _is_permutation(ids: Ids) -> bool:
    known = np.zeros(ids.size, bool)
    known[ids[(ids >= 0) & (ids < ids.size)]] = True
    return bool(known.all())


def _is_mask(name: str) -> bool:
    return _MASK.fullmatch(name.lower()) is not None


def _is_id(name: str, kind: Any) -> bool:
    """Return whether a name says that the column numbers something; "paid" of floats does not."""
    if name.lower() in _IDS or re.search(r"(?i:(_| )id)$|[a-z](Id|ID)$", name):
        return True
    return name.endswith("id") and pa.types.is_integer(kind)


def _counts_rows(name: str) -> bool:
    """Return whether a name is one that pandas and R give to the numbers of rows."""
    return _ROW_NUMBERS.fullmatch(name.lower()) is not None


def _is_fold(name: str) -> bool:
    """Return whether a name is that of a mask of one of several splits, as train_mask_3."""
    found = re.fullmatch(r"(.*?)[_ .]?\d+", name.lower())
    return found is not None and found[1].endswith("mask") and _is_mask(found[1])


def _split_list(text: str) -> list[str]:
    return [part for part in re.split(r"[\s,;\[\]]+", text) if part]


def is_list(kind: Any) -> bool:
    """Return whether a type of Arrow is one of lists."""
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _is_numeric(kind: Any) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(is_kind(kind) for is_kind in kinds)


__all__ = ["NodeTable", "TableReader", "is_list", "names_nodes"]
