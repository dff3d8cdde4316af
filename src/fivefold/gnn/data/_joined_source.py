"""Edges from tables, features and labels from arrays: ids are the rows of the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.errors import ConfigurationError
from fivefold.gnn.data._array_source import ArraySource
from fivefold.gnn.data._parts import LabelPart
from fivefold.gnn.data._table_source import TableSource


class JoinedSource:
    """A source over an edge table and arrays with a row per node."""

    def __init__(self, table: TableSource, arrays: ArraySource) -> None:
        if table.text_ids or table.node_table is not None:
            raise ConfigurationError(
                f"arrays were given to {table.name}, whose nodes are named by tables",
                hint="put features and labels into the node table; arrays go with ids 0, 1, 2, ...",
            )
        self.name, self.num_nodes = table.name, arrays.num_nodes
        self.recipe: Mapping[str, Any] = {**table.recipe, "arrays": dict(arrays.recipe)}
        self._table, self._arrays = table, arrays

    def edges(self) -> Any:
        """The edges of the table."""
        return self._table.edges()

    def features(self) -> Any:
        """The feature rows of the arrays."""
        return self._arrays.features()

    def labels(self) -> LabelPart | None:
        """Labels and splits of the arrays."""
        return self._arrays.labels()
