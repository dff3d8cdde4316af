"""Data sets on disk: ingestion from any source, and a generator.

A source of another kind is any object of the form of ``parts.Source``. Sizes, degrees and the check
of a whole data set are in ``statistics``.
"""

from fivefold.gnn.data._dataset import Dataset, HeteroDataset, HeteroSource, open_dataset
from fivefold.gnn.data._find_source import SourceOptions, find_source
from fivefold.gnn.data._generate import generate_graph
from fivefold.gnn.data._ingest import ingest
from fivefold.gnn.data._pyg import pyg_source
from fivefold.gnn.data._table_source import table_source
from fivefold.gnn.data._tables import TableColumns
from fivefold.gnn.data._write_graph import EdgeRules
from fivefold.gnn.data.arrays import array_source

__all__ = [
    "Dataset",
    "EdgeRules",
    "HeteroDataset",
    "HeteroSource",
    "SourceOptions",
    "TableColumns",
    "array_source",
    "find_source",
    "generate_graph",
    "ingest",
    "open_dataset",
    "pyg_source",
    "table_source",
]
