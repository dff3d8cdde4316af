"""Random operands of a case, and where its tokens go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.moe._gpu._cases import Case
from fivefold.moe.operator.activations import activation_named

__all__ = ["Operands", "operands_of"]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """What ``fused_moe`` takes."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None

    @property
    def positional(self) -> tuple[torch.Tensor, ...]:
        """As ``fused_moe`` takes them by place."""
        return self.x, self.w13, self.w2, self.ids, self.weights

    @property
    def used_experts(self) -> int:
        """Experts with at least one token."""
        flat = self.ids.reshape(-1)
        return int((torch.bincount(flat[flat >= 0]) > 0).sum())

    def leaves(self) -> Operands:
        """The same tensors, with gradients of their own for all but the ids."""
        return Operands(
            x=self.x.detach().requires_grad_(),
            w13=self.w13.detach().requires_grad_(),
            w2=self.w2.detach().requires_grad_(),
            ids=self.ids,
            weights=self.weights.detach().requires_grad_(),
            b13=self.b13,
            b2=self.b2,
        )


def operands_of(case: Case, device: torch.device, *, seed: int = 0) -> Operands:
    """Draw them: rows of weights have length 1, so that outputs are about as large as inputs.

    Args:
        case: Sizes and routing.
        device: Where.
        seed: Of the generator.

    Returns:
        Operands, the same for the same seed and kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*sizes: int) -> torch.Tensor:
        made = torch.empty(*sizes, dtype=case.dtype, device=device)
        return made.normal_(generator=generator)

    rows = activation_named(case.activation).width(case.inner)
    uniform = torch.rand(case.tokens, case.experts, device=device, generator=generator)
    gumbel = -(-uniform.clamp(1e-9, 1 - 1e-7).log()).log()
    ids = (gumbel + _popularity(case).to(device)).topk(case.top_k).indices
    if case.routing == "dropped":
        ids.view(-1)[::7] = -1
    raw = torch.rand(case.tokens, case.top_k, device=device, generator=generator) + 0.1
    return Operands(
        x=draw(case.tokens, case.hidden),
        w13=draw(case.experts, rows, case.hidden).mul_(case.hidden**-0.5),
        w2=draw(case.experts, case.hidden, case.inner).mul_(case.inner**-0.5),
        ids=ids,
        weights=raw / raw.sum(-1, keepdim=True),
        b13=draw(case.experts, rows) if case.biases else None,
        b2=draw(case.experts, case.hidden) if case.biases else None,
    )


def _popularity(case: Case) -> torch.Tensor:
    """Logarithm of how likely each expert is; with Gumbel noise, the top k are draws of it.

    Balanced: equally likely. Zipf: as 1 / rank. Worst: all tokens choose the same experts.
    """
    rank = torch.arange(1, case.experts + 1, dtype=torch.float32)
    if case.routing == "worst":
        return -1e3 * rank
    return -rank.log() if case.routing == "Zipf" else torch.zeros(case.experts)
