"""A convolution taken apart for inference out of core: messages, running sums, finish.

Each layer of a model becomes messages of sources (a function of the source's row alone), a
running aggregate per target that messages are added to in any order and in any number of parts,
and a finish that makes the output. That is what lets a hub's neighbours be read a few at a time.
Everything here is arrays of one chunk; files and ranges are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.errors import UnsupportedError
from fivefold.gnn.training._inference_kernels import add_attention, add_mean
from fivefold.gnn.training._models import GAT, GCN, GraphSAGE, LayeredModel

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregate:
    """What targets have received so far.

    Args:
        sums: Weighted sums of messages [targets, width].
        norms: Per target what to divide by and what else the layer keeps [targets, extra].
    """

    sums: Float32
    norms: Float64

    @classmethod
    def empty(cls, targets: int, parts: LayerParts) -> Aggregate:
        """Room for some targets; norms in float64, which counts any number of neighbours."""
        return cls(
            sums=np.zeros((targets, parts.width), np.float32),
            norms=np.zeros((targets, parts.extra), np.float64),
        )

    def first(self, targets: int) -> Aggregate:
        """The first places, cleared."""
        part = Aggregate(sums=self.sums[:targets], norms=self.norms[:targets])
        part.sums.fill(0)
        part.norms.fill(0)
        return part

    @staticmethod
    def bytes_per_target(parts: LayerParts) -> int:
        """What one target takes."""
        return 4 * parts.width + 8 * parts.extra


class LayerParts(Protocol):
    """One layer of a model, taken apart.

    Args:
        in_dim: Width of the layer's input.
        out_dim: Width of its output.
        width: Width of a message.
        extra: Numbers per target beside the sums.
        heads: Scores per message; 0 for none.
        drops_loops: Whether self-loops of the graph are left out, as the node counts itself.
        needs_own_at_start: Whether the aggregate begins from the target's own row.
        needs_own_at_finish: Whether the output needs the target's own row.
    """

    in_dim: int
    out_dim: int
    width: int
    extra: int
    heads: int
    drops_loops: bool
    needs_own_at_start: bool
    needs_own_at_finish: bool

    def messages(self, rows: Tensor) -> tuple[Float32, Float32]:
        """Values [S, width] and scores [S, heads] of source rows [S, in_dim]."""
        ...

    def begin(self, aggregate: Aggregate, start: int, own: Tensor) -> None:
        """Put the targets' own rows [T, in_dim] into the aggregate from place start on."""
        ...

    def add(
        self, aggregate: Aggregate, keys: Int64, shift: int, messages: tuple[Float32, Float32]
    ) -> None:
        """Add messages along sorted edges."""
        ...

    def finish(self, aggregate: Aggregate, places: slice, own: Tensor | None) -> Tensor:
        """Outputs [T, out_dim] of the targets at some places of the aggregate."""
        ...


def take_apart(model: LayeredModel) -> list[LayerParts]:
    """The layers of a model.

    Raises:
        UnsupportedError: The model is none of GraphSAGE, GCN and GAT.

    Examples:
        >>> [parts.width for parts in take_apart(GraphSAGE(16, 8, 3, num_layers=2))]
        [8, 3]
    """
    kinds: dict[type[LayeredModel], type[Any]] = {GraphSAGE: _Sage, GCN: _Gcn, GAT: _Gat}
    kind = kinds.get(type(model))
    if kind is None:
        message = f"layer-wise inference knows no {type(model).__name__}"
        raise UnsupportedError(message, hint="use GraphSAGE, GCN or GAT, or sample the nodes")
    return [kind(conv) for conv in model.convs]


class _Mean:
    """A mean of rows, or of rows made narrower first where the output is narrower."""

    heads, extra = 0, 1
    drops_loops = False
    needs_own_at_start = False
    needs_own_at_finish = False

    def __init__(self, linear: Any) -> None:
        self.weight: Tensor = linear.weight.detach().cpu()
        self.bias: Tensor = linear.bias.detach().cpu()
        self.out_dim, self.in_dim = int(self.weight.shape[0]), int(self.weight.shape[1])
        self.narrows = self.out_dim < self.in_dim
        self.width = min(self.in_dim, self.out_dim)

    def messages(self, rows: Tensor) -> tuple[Float32, Float32]:
        values = rows @ self.weight.T if self.narrows else rows
        return values.numpy(), np.empty((len(rows), 0), np.float32)

    def begin(self, aggregate: Aggregate, start: int, own: Tensor) -> None:
        values, _ = self.messages(own)
        aggregate.sums[start : start + len(own)] = values
        aggregate.norms[start : start + len(own)] = 1

    def add(
        self, aggregate: Aggregate, keys: Int64, shift: int, messages: tuple[Float32, Float32]
    ) -> None:
        add_mean(keys, shift, messages[0], aggregate.sums, aggregate.norms[:, 0])

    def finish(self, aggregate: Aggregate, places: slice, own: Tensor | None) -> Tensor:
        del own
        sums = torch.from_numpy(aggregate.sums[places])
        means = sums / torch.from_numpy(aggregate.norms[places]).clamp(min=1).float()
        return (means if self.narrows else means @ self.weight.T) + self.bias


class _Sage(_Mean):
    needs_own_at_finish = True

    def __init__(self, conv: Any) -> None:
        super().__init__(conv.lin_l)
        self.own_weight: Tensor = conv.lin_r.weight.detach().cpu()

    def finish(self, aggregate: Aggregate, places: slice, own: Tensor | None) -> Tensor:
        assert own is not None, "GraphSAGE adds the node's own row"
        return super().finish(aggregate, places, None) + own @ self.own_weight.T


class _Gcn(_Mean):
    drops_loops = True
    needs_own_at_start = True

    def __init__(self, conv: Any) -> None:
        super().__init__(conv.lin)


class _Gat:
    """Attention; the aggregate keeps running maxima, denominators and the targets' scores."""

    drops_loops = True
    needs_own_at_start = True
    needs_own_at_finish = False

    def __init__(self, conv: Any) -> None:
        self.weight: Tensor = conv.lin.weight.detach().cpu()
        self.bias: Tensor = conv.bias.detach().cpu()
        self.source: Tensor = conv.att_src.detach().cpu()[0]
        self.target: Tensor = conv.att_dst.detach().cpu()[0]
        self.heads, self.head_dim = self.source.shape
        self.slope, self.concat = float(conv.negative_slope), bool(conv.concat)
        self.width, self.in_dim = self.weight.shape
        self.out_dim = self.width if self.concat else self.head_dim
        self.extra = 3 * self.heads

    def messages(self, rows: Tensor) -> tuple[Float32, Float32]:
        values = rows @ self.weight.T
        return values.numpy(), self._scores(values, self.source).numpy()

    def _scores(self, values: Tensor, vector: Tensor) -> Tensor:
        return (values.view(-1, self.heads, self.head_dim) * vector).sum(-1)

    def begin(self, aggregate: Aggregate, start: int, own: Tensor) -> None:
        values = own @ self.weight.T
        places = slice(start, start + len(own))
        tops, totals, targets = self._norms(aggregate)
        score = self._scores(values, self.target)
        targets[places] = score.numpy()
        score = score + self._scores(values, self.source)
        tops[places] = torch.where(score > 0, score, score * self.slope).numpy()
        totals[places] = 1
        aggregate.sums[places] = values.numpy()

    def add(
        self, aggregate: Aggregate, keys: Int64, shift: int, messages: tuple[Float32, Float32]
    ) -> None:
        values, scores = messages
        add_attention(
            keys,
            shift,
            values,
            scores,
            slope=self.slope,
            sums=aggregate.sums,
            norms=aggregate.norms,
        )

    def finish(self, aggregate: Aggregate, places: slice, own: Tensor | None) -> Tensor:
        del own
        totals = torch.from_numpy(self._norms(aggregate)[1][places])
        sums = torch.from_numpy(aggregate.sums[places]).view(-1, self.heads, self.head_dim)
        heads = sums / totals.float().unsqueeze(-1)
        return (heads.flatten(1) if self.concat else heads.mean(1)) + self.bias

    def _norms(self, aggregate: Aggregate) -> tuple[Float64, Float64, Float64]:
        heads, norms = self.heads, aggregate.norms
        return norms[:, :heads], norms[:, heads : 2 * heads], norms[:, 2 * heads :]
