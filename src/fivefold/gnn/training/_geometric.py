"""The convolutions of PyTorch Geometric, imported in one place because the import needs care."""

from __future__ import annotations

import warnings

from fivefold.errors import UnsupportedError

__all__ = ["GATConv", "GeometricGAT", "GeometricGraphSAGE", "SAGEConv", "SimpleConv"]

try:
    with warnings.catch_warnings():
        # torch_geometric scripts a class while it is imported, which newer torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch_geometric.nn import GAT as GeometricGAT  # noqa: N811 - a class
        from torch_geometric.nn import GATConv, SAGEConv, SimpleConv
        from torch_geometric.nn import GraphSAGE as GeometricGraphSAGE
except ImportError as _error:
    _MESSAGE = "the models need torch_geometric, which is not installed"
    raise UnsupportedError(_MESSAGE, hint="pip install 'fivefold[gnn]'") from _error
