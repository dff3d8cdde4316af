"""Which ranks share out the experts, which hold the same ones, and what that asks of gradients.

With ``expert_parallel`` = P, each P consecutive ranks share out every mixture's experts and send
tokens to one another; ranks P apart hold the same experts. Everything else is on all ranks alike.
The loss of the run is the mean over all ranks, so an expert's gradient, which its owner gets from
the tokens of P ranks, is added over the owners and divided by the number of all ranks. This module
knows nothing of models or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fivefold.errors import ConfigurationError
from fivefold.moe import ExpertGroup
from fivefold.train._one_sided import is_one_sided, open_exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fivefold.moe import ExchangeFlight, ExpertExchange
    from fivefold.runs.ranks import Ranks
    from fivefold.train._config import ModelConfig, TrainConfig
    from fivefold.train._one_sided import OneSided


def require_shares(config: ModelConfig, *, world_size: int) -> None:
    """Refuse a number of ranks that cannot share out the experts.

    Raises:
        ConfigurationError: It is no multiple of ``expert_parallel``.
    """
    share = 1 if config.moe is None else config.moe.expert_parallel
    if world_size % share:
        raise ConfigurationError(
            f"model.moe.expert_parallel = {share} needs a multiple of {share} ranks; "
            f"got world_size={world_size}",
            hint=f"start {-(-world_size // share) * share} ranks, or change expert_parallel",
        )


def share_experts(config: TrainConfig, ranks: Ranks) -> ExpertRanks | None:
    """Form the groups; a collective call where experts are shared out, else None.

    Raises:
        ConfigurationError: The number of ranks does not fit.
        CommunicationError: A peer died or did not answer in time.
        UnsupportedError: The one-sided exchange is asked for and cannot work here.
    """
    model = config.model
    require_shares(model, world_size=ranks.world_size)
    if model.moe is None or model.moe.expert_parallel == 1:
        return None
    share = model.moe.expert_parallel
    everyone = range(ranks.world_size)
    # Every rank takes part in making every group, in the same order.
    with ranks.guard("forming the groups of experts"):
        group = _group_of(
            ranks, [list(everyone[first : first + share]) for first in everyone[::share]]
        )
        replicas = None
        if ranks.world_size > share:
            replicas = _group_of(
                ranks, [list(everyone[first::share]) for first in everyone[:share]]
            )
    return ExpertRanks(
        ranks=ranks,
        group=ExpertGroup(group, guard=ranks.guard),
        replicas=replicas,
        one_sided=open_exchange(config, ranks, group) if is_one_sided(config, ranks) else None,
    )


def _group_of(ranks: Ranks, members: list[list[int]]) -> dist.ProcessGroup:
    found = None
    for group_ranks in members:
        group = dist.new_group(group_ranks, timeout=ranks.timeout)
        found = group if ranks.rank in group_ranks else found
    assert isinstance(found, dist.ProcessGroup), "every rank is in one of the groups"
    return found


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """The groups of one rank.

    Args:
        ranks: All ranks.
        group: Ranks that share the experts out.
        replicas: Ranks with the same experts; None where there are none.
        one_sided: The exchange of the layers' tokens; None where they go by all-to-all.
    """

    ranks: Ranks
    group: ExpertGroup
    replicas: dist.ProcessGroup | None
    one_sided: OneSided | None = None

    @property
    def for_layers(self) -> ExpertGroup | ExpertExchange:
        """What the layers send their tokens by."""
        return self.group if self.one_sided is None else self.one_sided.exchange

    def take_flights(self) -> list[ExchangeFlight]:
        """Exchanges since the last call.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        flights = self.group.take_flights()
        return flights if self.one_sided is None else [*flights, self.one_sided.take_flight()]

    def close(self) -> None:
        """Give the memory of the exchange back, when no rank is in a step any more."""
        if self.one_sided is not None:
            self.one_sided.close()

    def reduce(self, gradients: Sequence[torch.Tensor], *, wire: torch.dtype | None) -> int:
        """Turn gradients of this rank's experts into those of the run's loss, in place.

        Args:
            gradients: Summed over the tokens that came here.
            wire: Type on the wire; None for their own.

        Returns:
            Bytes of what was to be summed.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        for gradient in gradients:
            gradient.div_(self.ranks.world_size)
            if self.replicas is None:
                continue
            sent = gradient if wire is None else gradient.to(wire)
            with self.ranks.guard("the all-reduce of the experts' gradients"):
                dist.all_reduce(sent, group=self.replicas)
            if wire is not None:
                gradient.copy_(sent)
        return 0 if self.replicas is None else sum(g.nbytes for g in gradients)

    def clip(
        self,
        replicated: Sequence[torch.Tensor],
        experts: Sequence[torch.Tensor],
        *,
        max_norm: float,
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient; equal on all ranks, bit for bit.

        Args:
            replicated: Gradients that all ranks have.
            experts: Gradients of this rank's experts.
            max_norm: Largest norm; inf for no clipping.

        Returns:
            The norm before clipping.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        own = torch.nn.utils.get_total_norm(experts).double().square().view(1)
        shares = self.group.gather(own, name="gradient norms")
        common = torch.nn.utils.get_total_norm(replicated).double().square()
        norm = (common + shares.sum()).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in (*replicated, *experts):
            gradient.mul_(factor.to(gradient.dtype))
        return norm
