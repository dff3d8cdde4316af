"""Models of PyTorch Geometric for inference out of core: their layers under our models' names.

GraphSAGE and GAT of ``torch_geometric.nn.models`` are the same equations as ours where their
options are the usual ones; then the convolutions themselves are taken over, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fivefold.errors import UnsupportedError
from fivefold.gnn.training._geometric import (
    GATConv,
    GeometricGAT,
    GeometricGraphSAGE,
    SAGEConv,
)
from fivefold.gnn.training._models import GAT, GraphSAGE, LayeredModel


def as_layered(model: torch.nn.Module) -> LayeredModel:
    """A model of ours with the convolutions of one of PyTorch Geometric.

    Args:
        model: Ours, which is handed back, or PyG's GraphSAGE or GAT.

    Returns:
        The model; it shares its parameters.

    Raises:
        UnsupportedError: It is of another kind, or has options that ours has not.

    Examples:
        >>> from torch_geometric.nn import GraphSAGE as TheirGraphSAGE
        >>> as_layered(TheirGraphSAGE(4, 8, num_layers=2, out_channels=3)).num_classes
        3
    """
    if isinstance(model, LayeredModel):
        return model
    kind: Any = type(model)
    if kind not in (GeometricGraphSAGE, GeometricGAT):
        message = f"layer-wise inference knows no {kind.__module__}.{kind.__qualname__}"
        hint = "use GraphSAGE or GAT of either library, or our GCN; or sample the nodes"
        raise UnsupportedError(message, hint=hint)
    odd = next(_unusual(model), None)
    if odd is not None:
        raise UnsupportedError(
            f"layer-wise inference knows no {kind.__name__} with {odd}",
            hint="leave that option as it is by default, or sample the nodes",
        )
    return _taken_over(model)


def _taken_over(model: Any) -> LayeredModel:
    sizes = (model.in_channels, model.hidden_channels, model.out_channels)
    layered: LayeredModel
    if isinstance(model, GeometricGAT):
        heads = model.convs[0].heads
        layered = GAT(*sizes, num_layers=model.num_layers, heads=heads)
    else:
        layered = GraphSAGE(*sizes, num_layers=model.num_layers)
    layered.convs = model.convs
    return layered.eval()


def _unusual(model: Any) -> Iterator[str]:
    """Options that make other equations, in the words of PyG's arguments."""
    if not isinstance(model.in_channels, int):
        yield "in_channels of two numbers"
    if model.jk_mode is not None:
        yield f"jk={model.jk_mode!r}"
    if any(not isinstance(norm, torch.nn.Identity) for norm in model.norms):
        yield "norm"
    if not isinstance(model.act, torch.nn.ReLU):
        yield f"act {model.act}"
    for conv in model.convs:
        yield from _unusual_conv(conv)


def _unusual_conv(conv: Any) -> Iterator[str]:
    if type(conv) is SAGEConv:
        usual = {"aggr": "mean", "normalize": False, "root_weight": True, "project": False}
        linear = conv.lin_l
    elif type(conv) is GATConv:
        usual = {"aggr": "add", "add_self_loops": True, "edge_dim": None, "residual": False}
        linear = conv
    else:
        yield type(conv).__name__
        return
    usual["flow"] = "source_to_target"
    for name, value in usual.items():
        if getattr(conv, name) != value:
            yield f"{name}={getattr(conv, name)!r}"
    if linear.bias is None:
        yield "bias=False"
