"""What the operator and the layer ask of ranks that share the experts out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from fivefold.moe.operator.operands import Precision

if TYPE_CHECKING:
    from fivefold.moe.operator._layer import MoEConfig


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """What the routing of all ranks of a group gave each expert.

    Attributes:
        routed: Assignments by the router, int64 [E].
        kept: Those left after dropping beyond the capacity, int64 [E].
    """

    routed: torch.Tensor
    kept: torch.Tensor


class LayerGroup(Protocol):
    """Ranks that share out the experts of a layer."""

    def experts_of(self, num_experts: int) -> range:
        """Return the experts whose weights this process has."""

    def check_layer(self, config: MoEConfig) -> None:
        """Refuse a layer that the group was not made for."""

    def apply(
        self,
        tokens: torch.Tensor,
        routed: torch.Tensor,
        *,
        ids: torch.Tensor,
        weights: torch.Tensor,
        num_experts: int,
        local: Callable[..., torch.Tensor],
    ) -> tuple[torch.Tensor, ExpertLoad]:
        """Return the experts' weighted sums [T, H] and the load of all ranks' tokens."""


@runtime_checkable
class OperatorGroup(Protocol):
    """Ranks between which ``fused_moe`` itself dispatches and combines."""

    @property
    def precision(self) -> Precision:
        """Return the arithmetic for float32 that the group computes in."""

    def fused_moe(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        """Compute ``fused_moe`` between the ranks; differentiable and collective."""
