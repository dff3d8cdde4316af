"""Data sets on disk: ingestion and a generator."""

from fivefold.gnn.data._array_source import ArraySource, array_source
from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._find_source import SOURCE_KINDS, SourceOptions, find_source
from fivefold.gnn.data._generate import GraphRecipe, generate_graph
from fivefold.gnn.data._hetero import HeteroDataset, HeteroSource
from fivefold.gnn.data._ingest import ingest
from fivefold.gnn.data._node_table import TableColumns
from fivefold.gnn.data._ogb import mag240m_source, ogb_adds_reverse, ogb_source
from fivefold.gnn.data._parts import EdgeBlock, EdgePart, FeaturePart, LabelPart, Progress, Source
from fivefold.gnn.data._pyg import pyg_source
from fivefold.gnn.data._statistics import describe, open_dataset, verify
from fivefold.gnn.data._table_source import TableSource, table_source
from fivefold.gnn.data._write_graph import EdgeRules

__all__ = [
    "SOURCE_KINDS",
    "ArraySource",
    "Dataset",
    "EdgeBlock",
    "EdgePart",
    "EdgeRules",
    "FeaturePart",
    "GraphRecipe",
    "HeteroDataset",
    "HeteroSource",
    "LabelPart",
    "Progress",
    "Source",
    "SourceOptions",
    "TableColumns",
    "TableSource",
    "array_source",
    "describe",
    "find_source",
    "generate_graph",
    "ingest",
    "mag240m_source",
    "ogb_adds_reverse",
    "ogb_source",
    "open_dataset",
    "pyg_source",
    "table_source",
    "verify",
]
