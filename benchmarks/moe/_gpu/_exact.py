# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""What is right, in float64: one expert at a time, by torch's own autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from benchmarks.moe._gpu._cases import Case
from benchmarks.moe._gpu._operands import Operands

__all__ = ["Exact"]

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "relu": torch.relu,
}


class Exact:
    """Every step of a layer in float64, by rows: slots sorted by expert, dropped ones left out.

    Args:
        case: Sizes, activation, and whether the weight is on the input.
        given: Operands; ids out of range are dropped.

    Attributes:
        slot_of_row, expert_of_row: int64 [R].
        z: W13 x [R, 2I or I], without bias.
        inner: Activated [R, I].
        outputs: W2 inner + b2 [R, H].
        out: [T, H].
    """

    def __init__(self, case: Case, given: Operands) -> None:
        self.case = case
        leaves = [
            None if t is None else t.double().requires_grad_()
            for t in (given.x, given.w13, given.w2, given.weights, given.b13, given.b2)
        ]
        x, w13, w2, weights, b13, _ = leaves
        self.leaves = leaves
        assert x is not None
        assert w13 is not None
        assert w2 is not None
        assert weights is not None
        flat = given.ids.reshape(-1).long()
        flat = torch.where((flat >= 0) & (flat < case.experts), flat, case.experts)
        order = flat.argsort(stable=True)
        self.slot_of_row = order[: int((flat < case.experts).sum())]
        self.expert_of_row = flat[self.slot_of_row]
        self.counts = torch.bincount(self.expert_of_row, minlength=case.experts)
        self.token = self.slot_of_row // case.top_k
        weight = weights.reshape(-1)[self.slot_of_row].unsqueeze(1)
        parts = x[self.token].split(self.counts.tolist())
        self.z = torch.cat([rows @ w13[e].T for e, rows in enumerate(parts)])
        self.pre = self.z * weight if case.weight_on_input else self.z
        if b13 is not None:
            self.pre = self.pre + b13[self.expert_of_row]
        self.inner = self.activated(self.pre)
        self.outputs = self.second(self.inner)
        shares = self.outputs if case.weight_on_input else self.outputs * weight
        self.out = torch.zeros_like(x).index_add(0, self.token, shares)
        self.weight = weight.detach()

    def activated(self, pre: torch.Tensor) -> torch.Tensor:
        """f(pre), times the other half where gated."""
        function = _FUNCTIONS[self.case.activation]
        if not self.case.gated:
            return function(pre)
        gate, up = pre.chunk(2, dim=1)
        return function(gate) * up

    def second(self, inner: torch.Tensor) -> torch.Tensor:
        """W2 inner + b2 for rows."""
        w2, b2 = self.leaves[2], self.leaves[5]
        assert w2 is not None
        parts = inner.split(self.counts.tolist())
        found = torch.cat([rows @ w2[e].T for e, rows in enumerate(parts)])
        return found if b2 is None else found + b2[self.expert_of_row]

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weighted sum of rows for every token."""
        shares = outputs if self.case.weight_on_input else outputs * self.weight
        return torch.zeros_like(self.out.detach()).index_add(0, self.token, shares)

    def gradients(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of the operands, and of what the activation takes, for an output's."""
        names = ("x", "w13", "w2", "weights", "b13", "b2")
        wanted = {n: t for n, t in zip(names, self.leaves, strict=True) if t is not None}
        wanted["pre"] = self.pre
        found = torch.autograd.grad(
            self.out, list(wanted.values()), gradient.double(), retain_graph=True
        )
        return dict(zip(wanted, found, strict=True))

    def tiles(self, rows: int) -> list[tuple[int, int, int]]:
        """Expert, first row and end of every row tile."""
        found, first = [], 0
        for expert, count in enumerate(self.counts.tolist()):
            found += [
                (expert, first + begin, first + min(begin + rows, count))
                for begin in range(0, count, rows)
            ]
            first += count
        return found
