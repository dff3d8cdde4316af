"""Data sets on disk: ingestion, real graphs and a generator."""

from fivefold.gnn.data._dataset import Dataset
from fivefold.gnn.data._generate import GraphRecipe, generate_graph

__all__ = ["Dataset", "GraphRecipe", "generate_graph"]
