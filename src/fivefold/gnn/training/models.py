"""GraphSAGE, GAT and GCN on PyTorch Geometric's convolutions, for both forms of a mini-batch.

Given an ``edge_index``, every layer computes all nodes. Given layered blocks, a layer computes
only the nodes that later layers need, and the seeds' outputs are the same. The models know
nothing of where batches come from.

Shapes: N nodes of the input, T targets of a layer, E edges.

References: GraphSAGE, arXiv 1706.02216; GAT, arXiv 1710.10903; GCN, arXiv 1609.02907, here with
the mean over a node and its in-neighbours (section 3.1's random-walk form): the symmetric form
needs degrees of the sources, which a sampled batch knows only for nodes that were expanded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.gnn.loading import Block
from fivefold.gnn.loading.batch import import_geometric

_geometric = import_geometric("nn")


Graph: TypeAlias = "Tensor | Sequence[Block]"
"""An ``edge_index`` [2, E], or one block per layer, outermost first."""


class GCNConv(torch.nn.Module):
    """A linear map of the mean over a node and its in-neighbours."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.mean = _geometric.SimpleConv(aggr="mean")
        self.lin = torch.nn.Linear(in_dim, out_dim)

    def forward(
        self,
        pair: tuple[Tensor, Tensor],
        edge_index: Tensor,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return outputs [T, out_dim] of the targets; the edges must hold one self-loop of each."""
        rows, targets = pair  # [N, in_dim], [T, in_dim]
        if self.lin.out_features < self.lin.in_features:  # the narrower side has less to gather
            weight = self.lin.weight
            narrow = (rows @ weight.T, targets @ weight.T)
            mean: Tensor = self.mean(narrow, edge_index, size=size)
            return mean + self.lin.bias
        out: Tensor = self.lin(self.mean(pair, edge_index, size=size))
        return out


class LayeredModel(torch.nn.Module):
    """What the three models share: convolutions with ReLU and dropout between them."""

    name = "layered"
    adds_self_loops = False

    def __init__(
        self,
        in_dim: int,
        hidden_dim: int,
        num_classes: int,
        *,
        num_layers: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"in_dim": in_dim, "hidden_dim": hidden_dim, "num_classes": num_classes}
        for key, value in {**sizes, "num_layers": num_layers}.items():
            if value < 1:
                raise ConfigurationError(f"{key} must be at least 1; got {value}")
        self.in_dim, self.num_classes, self.num_layers = in_dim, num_classes, num_layers
        self.dropout = torch.nn.Dropout(dropout)
        dims = [in_dim, *[hidden_dim] * (num_layers - 1), num_classes]
        self.convs = torch.nn.ModuleList(
            self._conv(before, after, last=layer == num_layers - 1)
            for layer, (before, after) in enumerate(itertools.pairwise(dims))
        )

    def _conv(self, before: int, after: int, *, last: bool) -> torch.nn.Module:
        raise NotImplementedError

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """Return class scores: of all nodes given an ``edge_index``, of the seeds given blocks."""
        rows = x.to(next(self.parameters()).dtype)
        if isinstance(graph, Tensor):
            edges = self._edges(graph, rows.shape[0])
            for layer, conv in enumerate(self.convs):
                rows = self.between(conv((rows, rows), edges), layer)
            return rows
        if len(graph) != self.num_layers:
            message = f"the batch has {len(graph)} blocks, but the model {self.num_layers} layers"
            raise ConfigurationError(message, hint="sample one hop per layer of the model")
        for layer, (conv, block) in enumerate(zip(self.convs, graph, strict=True)):
            edges = self._edges(block.edge_index, block.num_targets, block.target_rows)
            # With self-loops the targets are among the sources, whose rows the size counts.
            targets = conv((rows, block.targets(rows)), edges, size=block.size)
            rows = self.between(targets, layer)
        return rows

    def between(self, targets: Tensor, layer: int) -> Tensor:
        """Apply ReLU and dropout after the convolution of a layer; nothing after the last."""
        return targets if layer == self.num_layers - 1 else self.dropout(targets.relu())

    def _edges(
        self, edge_index: Tensor, num_targets: int, target_rows: Tensor | None = None
    ) -> Tensor:
        """Return the edges; where the model adds self-loops, exactly one of every target."""
        if not self.adds_self_loops:
            return edge_index
        numbers = torch.arange(num_targets, device=edge_index.device)
        own = numbers if target_rows is None else target_rows
        kept = edge_index[0] != own[edge_index[1]]
        return torch.cat([edge_index[:, kept], torch.stack([own, numbers])], dim=1)


class GraphSAGE(LayeredModel):
    """GraphSAGE with mean aggregation.

    ``h_v' = W mean(h_u, u in N(v)) + R h_v + b``; the mean over no neighbours is zero.

    Args:
        in_dim: Width of the features.
        hidden_dim: Width of the hidden layers.
        num_classes: Width of the output.
        num_layers: Number of convolutions, one per hop.
        dropout: Share of hidden values dropped in training.

    Raises:
        ConfigurationError: A size is below 1.

    Examples:
        >>> model = GraphSAGE(4, 8, 3, num_layers=2)
        >>> model(torch.ones(5, 4), torch.tensor([[1, 2], [0, 0]])).shape
        torch.Size([5, 3])
    """

    name = "sage"

    def _conv(self, before: int, after: int, *, last: bool) -> torch.nn.Module:
        del last
        conv: torch.nn.Module = _geometric.SAGEConv(before, after)
        return conv


class GCN(LayeredModel):
    """GCN in its random-walk form, which does not depend on degrees of the sources.

    ``h_v' = W mean(h_u, u in N(v) and v itself) + b``; self-loops of the graph count once.

    Args:
        in_dim: Width of the features.
        hidden_dim: Width of the hidden layers.
        num_classes: Width of the output.
        num_layers: Number of convolutions, one per hop.
        dropout: Share of hidden values dropped in training.

    Raises:
        ConfigurationError: A size is below 1.

    Examples:
        >>> model = GCN(4, 8, 3, num_layers=2)
        >>> model(torch.ones(5, 4), torch.tensor([[1, 2], [0, 0]])).shape
        torch.Size([5, 3])
    """

    name = "gcn"
    adds_self_loops = True

    def _conv(self, before: int, after: int, *, last: bool) -> torch.nn.Module:
        del last
        return GCNConv(before, after)


class GAT(LayeredModel):
    """Graph attention: a softmax over a node's in-neighbours and itself, per head.

    Hidden layers concatenate their heads, the last one averages them.

    Args:
        in_dim: Width of the features.
        hidden_dim: Width of the hidden layers over all heads, a multiple of ``heads``.
        num_classes: Width of the output.
        num_layers: Number of convolutions, one per hop.
        dropout: Share of hidden values dropped in training.
        heads: Attention heads.

    Raises:
        ConfigurationError: A size is below 1, or the heads do not divide the width.

    Examples:
        >>> model = GAT(4, 8, 3, num_layers=2, heads=2)
        >>> model(torch.ones(5, 4), torch.tensor([[1, 2], [0, 0]])).shape
        torch.Size([5, 3])
    """

    name = "gat"
    adds_self_loops = True

    def __init__(
        self,
        in_dim: int,
        hidden_dim: int,
        num_classes: int,
        *,
        num_layers: int = 3,
        dropout: float = 0.0,
        heads: int = 4,
    ) -> None:
        if heads < 1 or hidden_dim % heads:
            message = f"hidden_dim must be a multiple of heads; got {hidden_dim} and {heads}"
            raise ConfigurationError(message, hint="use for example hidden_dim=128, heads=4")
        self.heads = heads
        super().__init__(in_dim, hidden_dim, num_classes, num_layers=num_layers, dropout=dropout)

    def _conv(self, before: int, after: int, *, last: bool) -> torch.nn.Module:
        width = after if last else after // self.heads
        conv: torch.nn.Module = _geometric.GATConv(
            before, width, heads=self.heads, concat=not last, add_self_loops=False
        )
        return conv


def make_model(
    name: str,
    in_dim: int,
    hidden_dim: int,
    num_classes: int,
    *,
    num_layers: int,
    dropout: float = 0.0,
    heads: int = 4,
) -> LayeredModel:
    """Make a model by its name in a configuration."""
    sizes = (in_dim, hidden_dim, num_classes)
    if name == "gat":
        return GAT(*sizes, num_layers=num_layers, dropout=dropout, heads=heads)
    if name == "sage":
        return GraphSAGE(*sizes, num_layers=num_layers, dropout=dropout)
    if name == "gcn":
        return GCN(*sizes, num_layers=num_layers, dropout=dropout)
    raise ConfigurationError(f"there is no model {name!r}", hint="use sage, gat or gcn")


def as_layered(model: torch.nn.Module) -> LayeredModel:
    """Return a model of ours with the convolutions of one of PyTorch Geometric."""
    if isinstance(model, LayeredModel):
        return model
    kind: Any = type(model)
    if kind not in (_geometric.GraphSAGE, _geometric.GAT):
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
    if isinstance(model, _geometric.GAT):
        heads = model.convs[0].heads
        layered = GAT(*sizes, num_layers=model.num_layers, heads=heads)
    else:
        layered = GraphSAGE(*sizes, num_layers=model.num_layers)
    layered.convs = model.convs
    return layered.eval()


def _unusual(model: Any) -> Iterator[str]:
    """Yield options that make other equations, in the words of PyG's arguments."""
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
    if type(conv) is _geometric.SAGEConv:
        usual = {"aggr": "mean", "normalize": False, "root_weight": True, "project": False}
        linear = conv.lin_l
    elif type(conv) is _geometric.GATConv:
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
