"""GraphSAGE, GAT and GCN for both forms of a mini-batch, and GraphSAGE of several types.

Given layered blocks, a layer computes only the nodes that later layers need. Parameters have names
and shapes of PyTorch Geometric's. N input nodes, T targets, E edges, H heads. References: arXiv
1706.02216, 1710.10903 and 1609.02907 (the random-walk form: a sample knows no sources' degrees).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fivefold.errors import ConfigurationError, UnsupportedError, require_number, require_whole
from fivefold.gnn.loading import Block
from fivefold.gnn.loading.batch import import_geometric
from fivefold.gnn.sampling.batches import EdgeType

Graph: TypeAlias = "Tensor | Sequence[Block]"
"""An ``edge_index`` [2, E], or one block per layer, outermost first."""

Pair: TypeAlias = tuple[Tensor, Tensor]


class _Bags:
    """The sources of the edges, target by target: what ``embedding_bag`` sums without messages.

    Against gathering a message per edge and adding it up, that takes a sixth of the time forward
    and half of it backward (450 k edges, rows of 128), and no memory per edge.
    """

    def __init__(self, edge_index: Tensor, num_targets: int) -> None:
        sources, self.targets = edge_index
        self.order: Tensor | None = None
        if bool((self.targets[1:] < self.targets[:-1]).any()):
            self.order = torch.argsort(self.targets, stable=True)
            sources, self.targets = sources[self.order], self.targets[self.order]
        self.sources, self.num_targets = sources, num_targets
        ends = torch.bincount(self.targets, minlength=num_targets).cumsum(0)
        self.starts = functional.pad(ends[:-1], (1, 0))

    def mean(self, rows: Tensor) -> Tensor:
        """Return the mean [T, D] of each target's source rows; zero where it has none."""
        return functional.embedding_bag(self.sources, rows, self.starts, mode="mean")

    def sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sum [T, D] of each target's source rows, weighted by edge."""
        return functional.embedding_bag(
            self.sources, rows, self.starts, mode="sum", per_sample_weights=weights
        )

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the softmax [E, H] of scores over the edges of each target."""
        places = self.targets[:, None].expand_as(scores)
        shape = (self.num_targets, scores.shape[1])
        most = scores.detach().new_full(shape, float("-inf"))
        most = most.scatter_reduce(0, places, scores.detach(), "amax")
        powers = (scores - most.index_select(0, self.targets)).exp()
        totals = scores.new_zeros(shape).index_add(0, self.targets, powers)
        return powers / totals.index_select(0, self.targets)


class SAGEConv(torch.nn.Module):
    """A linear map of the mean over a node's in-neighbours, plus one of the node itself."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.lin_l = torch.nn.Linear(in_dim, out_dim)
        self.lin_r = torch.nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, pair: Pair, edge_index: Tensor) -> Tensor:
        """Return outputs [T, out_dim] of the targets."""
        mean = _mean_map(_Bags(edge_index, len(pair[1])), pair[0], self.lin_l)
        out: Tensor = mean + self.lin_r(pair[1])
        return out


class GCNConv(torch.nn.Module):
    """A linear map of the mean over a node and its in-neighbours."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_dim, out_dim)

    def forward(self, pair: Pair, edge_index: Tensor) -> Tensor:
        """Return outputs [T, out_dim] of the targets; the edges must hold one self-loop of each."""
        return _mean_map(_Bags(edge_index, len(pair[1])), pair[0], self.lin)


def _mean_map(bags: _Bags, rows: Tensor, linear: torch.nn.Linear) -> Tensor:
    """Return the linear map of the means; the narrower side of it has less to gather."""
    if linear.out_features < linear.in_features:
        means = bags.mean(rows @ linear.weight.T)
        return means if linear.bias is None else means + linear.bias
    out: Tensor = linear(bags.mean(rows))
    return out


class GATConv(torch.nn.Module):
    """A sum over a node's in-neighbours, by head weighted with a softmax of additive scores."""

    def __init__(self, in_dim: int, head_dim: int, *, heads: int, concat: bool) -> None:
        super().__init__()
        self.heads, self.concat, self.negative_slope = heads, concat, 0.2
        self.lin = torch.nn.Linear(in_dim, heads * head_dim, bias=False)
        self.att_src = torch.nn.Parameter(torch.empty(1, heads, head_dim))
        self.att_dst = torch.nn.Parameter(torch.empty(1, heads, head_dim))
        self.bias = torch.nn.Parameter(torch.zeros(heads * head_dim if concat else head_dim))
        for weight in (self.lin.weight, self.att_src, self.att_dst):
            torch.nn.init.xavier_uniform_(weight)

    def forward(self, pair: Pair, edge_index: Tensor) -> Tensor:
        """Return outputs [T, heads * head_dim], or their mean [T, head_dim], of the targets."""
        bags = _Bags(edge_index, len(pair[1]))
        shape = (-1, *self.att_src.shape[1:])
        sources, targets = (self.lin(rows).view(shape) for rows in pair)
        of_sources, of_targets = (sources * self.att_src).sum(-1), (targets * self.att_dst).sum(-1)
        scores = of_sources.index_select(0, bags.sources) + of_targets.index_select(0, bags.targets)
        weights = bags.softmax(functional.leaky_relu(scores, self.negative_slope))
        parts = [
            bags.sum(sources[:, head].contiguous(), weights[:, head].contiguous())
            for head in range(self.heads)
        ]
        joined = torch.cat(parts, dim=1) if self.concat else torch.stack(parts).mean(0)
        return joined + self.bias


class LayeredModel(torch.nn.Module):
    """Base of the three models: convolutions with ReLU and dropout between them.

    Args:
        in_dim: Width of the features.
        hidden_dim: Width of the hidden layers.
        num_classes: Width of the output.
        num_layers: Number of convolutions, one per hop.
        dropout: Share of hidden values dropped in training.

    Raises:
        ConfigurationError: A size is below 1.
    """

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
            require_whole(key, value)
        self.in_dim, self.num_classes, self.num_layers = in_dim, num_classes, num_layers
        if require_number("dropout", dropout) > 1:
            raise ConfigurationError(f"dropout is {dropout}", hint="give a share from 0 to 1")
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
            targets = conv((rows, block.targets(rows)), edges)
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
    """GraphSAGE with mean aggregation; sizes as of ``LayeredModel``.

    ``h_v' = W mean(h_u, u in N(v)) + R h_v + b``; the mean over no neighbours is zero.

    Examples:
        >>> model = GraphSAGE(4, 8, 3, num_layers=2)
        >>> model(torch.ones(5, 4), torch.tensor([[1, 2], [0, 0]])).shape
        torch.Size([5, 3])
    """

    name = "sage"

    def _conv(self, before: int, after: int, *, last: bool) -> torch.nn.Module:
        del last
        return SAGEConv(before, after)


class GCN(LayeredModel):
    """GCN in its random-walk form, which does not depend on degrees of the sources.

    ``h_v' = W mean(h_u, u in N(v) and v itself) + b``; self-loops of the graph count once. Sizes
    as of ``LayeredModel``.

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

    Hidden layers concatenate their heads, the last one averages them. Sizes as of
    ``LayeredModel``; ``heads`` must divide ``hidden_dim``, the width over all heads.

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
        if require_whole("hidden_dim", hidden_dim) % require_whole("heads", heads):
            message = f"hidden_dim must be a multiple of heads; got {hidden_dim} and {heads}"
            raise ConfigurationError(message, hint="use for example hidden_dim=128, heads=4")
        self.heads = heads
        super().__init__(in_dim, hidden_dim, num_classes, num_layers=num_layers, dropout=dropout)

    def _conv(self, before: int, after: int, *, last: bool) -> torch.nn.Module:
        width = after if last else after // self.heads
        return GATConv(before, width, heads=self.heads, concat=not last)


class TypedLayer(torch.nn.Module):
    """A layer of ``TypedSAGE``: a map of the rows of each type, one of the means by edge type."""

    def __init__(
        self,
        in_dims: Mapping[str, int],
        targets: Sequence[str],
        edge_types: Sequence[EdgeType],
        out_dim: int,
    ) -> None:
        super().__init__()
        self.targets = tuple(targets)
        self.edge_types = tuple(kind for kind in edge_types if kind[2] in targets)
        self.own = torch.nn.ModuleList(
            torch.nn.Linear(in_dims[name], out_dim) for name in self.targets
        )
        self.neighbors = torch.nn.ModuleList(
            torch.nn.Linear(in_dims[source], out_dim, bias=False)
            for source, _, _ in self.edge_types
        )

    @property
    def own_maps(self) -> dict[str, torch.nn.Linear]:
        """Return the map of the rows of each type."""
        return dict(zip(self.targets, self.own, strict=True))  # type: ignore[arg-type]

    @property
    def into(self) -> dict[EdgeType, torch.nn.Linear]:
        """Return the map of the means by edge type."""
        return dict(zip(self.edge_types, self.neighbors, strict=True))  # type: ignore[arg-type]

    def forward(
        self, rows: Mapping[str, Tensor], edge_index_dict: Mapping[EdgeType, Tensor]
    ) -> dict[str, Tensor]:
        """Return outputs [nodes, out_dim] of the targets' types."""
        out = {name: linear(rows[name]) for name, linear in self.own_maps.items()}
        for kind, linear in self.into.items():
            bags = _Bags(edge_index_dict[kind], len(rows[kind[2]]))
            out[kind[2]] = out[kind[2]] + _mean_map(bags, rows[kind[0]], linear)
        return out


class TypedSAGE(torch.nn.Module):
    """GraphSAGE of several types of nodes and edges, which classifies the nodes of one type.

    ``h_v' = R_t h_v + b_t + sum over edge types e into t of W_e mean(h_u, u in N_e(v))``, t being
    the type of v: PyG's ``HeteroConv`` of ``SAGEConv`` with one map R_t for all edge types. What
    no output depends on has no parameters.
    """

    name = "sage of several types"

    def __init__(
        self,
        in_dims: Mapping[str, int],
        edge_types: Sequence[EdgeType],
        node_type: str,
        hidden_dim: int,
        num_classes: int,
        *,
        num_layers: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.node_type, self.dropout = node_type, torch.nn.Dropout(dropout)
        layers, wanted = [], {node_type}
        for number in reversed(range(num_layers)):
            dims = in_dims if number == 0 else dict.fromkeys(in_dims, hidden_dim)
            out_dim = num_classes if number == num_layers - 1 else hidden_dim
            targets = [name for name in in_dims if name in wanted]
            layers.append(TypedLayer(dims, targets, edge_types, out_dim))
            wanted = {*targets, *(kind[0] for kind in layers[-1].edge_types)}
        self.layers = torch.nn.ModuleList(reversed(layers))

    @property
    def typed_layers(self) -> list[TypedLayer]:
        """Return the layers."""
        return list(self.layers)  # type: ignore[arg-type]

    def forward(
        self, x_dict: Mapping[str, Tensor], edge_index_dict: Mapping[EdgeType, Tensor]
    ) -> Tensor:
        """Return class scores [nodes, classes] of all nodes of ``node_type`` in the batch."""
        dtype = next(self.parameters()).dtype
        rows = {name: x.to(dtype) for name, x in x_dict.items()}
        for number, layer in enumerate(self.layers):
            rows = layer(rows, edge_index_dict)
            if number < len(self.layers) - 1:
                rows = {name: self.dropout(out.relu()) for name, out in rows.items()}
        return rows[self.node_type]


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
    kinds: dict[str, type[LayeredModel]] = {"sage": GraphSAGE, "gat": GAT, "gcn": GCN}
    if name not in kinds:
        raise ConfigurationError(f"there is no model {name!r}", hint="use sage, gat or gcn")
    options: dict[str, Any] = {"num_layers": num_layers, "dropout": dropout}
    options |= {"heads": heads} if name == "gat" else {}
    return kinds[name](in_dim, hidden_dim, num_classes, **options)


def as_layered(model: torch.nn.Module) -> LayeredModel:
    """Return a model of ours with the convolutions of one of PyTorch Geometric."""
    if isinstance(model, LayeredModel):
        return model
    kind: Any = type(model)
    geometric = None
    if kind.__module__.startswith("torch_geometric."):
        geometric = import_geometric("nn")
    if geometric is None or kind not in (geometric.GraphSAGE, geometric.GAT):
        message = f"layer-wise inference knows no {kind.__module__}.{kind.__qualname__}"
        hint = "use GraphSAGE or GAT of either library, or our GCN; or sample the nodes"
        raise UnsupportedError(message, hint=hint)
    odd = next(_unusual(model, geometric), None)
    if odd is not None:
        raise UnsupportedError(
            f"layer-wise inference knows no {kind.__name__} with {odd}",
            hint="leave that option as it is by default, or sample the nodes",
        )
    taken: Any = model
    gat = kind is geometric.GAT
    layered = make_model(
        "gat" if gat else "sage",
        taken.in_channels,
        taken.hidden_channels,
        taken.out_channels,
        num_layers=taken.num_layers,
        heads=taken.convs[0].heads if gat else 1,
    )
    layered.convs = taken.convs
    return layered.eval()


def _unusual(model: Any, geometric: Any) -> Iterator[str]:
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
        yield from _unusual_conv(conv, geometric)


def _unusual_conv(conv: Any, geometric: Any) -> Iterator[str]:
    if type(conv) is geometric.SAGEConv:
        usual = {"aggr": "mean", "normalize": False, "root_weight": True, "project": False}
        linear = conv.lin_l
    elif type(conv) is geometric.GATConv:
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
