"""Table ``[model.moe]``: experts in place of the feed-forward layers. Knows nothing of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fivefold.errors import ConfigurationError
from fivefold.runs import Count, Positive, Section

_Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MixtureConfig(Section):
    """Table ``[model.moe]``: a mixture of experts in place of the feed-forward layers.

    Raises:
        ConfigurationError: Through ``load_config``; the numbers do not fit together.

    Examples:
        >>> MixtureConfig(experts=16, top_k=4).expert_parallel
        1
    """

    experts: Positive = 8
    """experts of a layer"""
    top_k: Positive = 2
    """experts that a token goes to"""
    shared: Count = 0
    """experts that every token goes to besides, unweighted"""
    expert_width: Positive | None = None
    """inner width of an expert; left out, a token's work is that of the dense layer"""
    every: Positive = 1
    """a mixture in every so many-th block, counted from the last"""
    activation: Literal["swiglu", "geglu", "geglu_tanh", "reglu"] = "swiglu"
    """function between an expert's two products"""
    score: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    """way in which router logits become weights"""
    normalize: bool = True
    """whether a token's weights sum to one"""
    scale: _Factor = 1.0
    """factor on all weights"""
    groups: Positive = 1
    """equal groups of experts"""
    top_groups: Positive = 1
    """groups that a token may use"""
    capacity_factor: _Factor | None = None
    """most tokens of an expert, in units of the even load; left out, nothing is dropped"""
    drop_policy: Literal["position", "weight"] = "position"
    """who is dropped beyond the capacity"""
    balance_loss: _Coefficient = 0.01
    """coefficient of the load balancing loss"""
    z_loss: _Coefficient = 0.001
    """coefficient of the router's z loss"""
    bias_rate: _Coefficient = 0.0
    """step of balancing by a selection bias, without a loss; 0 for none"""
    expert_parallel: Positive = 1
    """ranks that share out a layer's experts"""
    exchange: Literal["auto", "all_to_all", "one_sided"] = "auto"
    """way of tokens between ranks that share experts: messages, or stores into a peer's memory;
    auto is one_sided on GPUs that can, else all_to_all"""
    exchange_room: _Factor | None = None
    """one_sided: rows that a rank has room for, in units of the even load; left out, the most that
    may come"""
    backend: Literal["auto", "reference", "fused", "split"] = "auto"
    """what computes the experts"""
    recompute: bool = True
    """whether the backward computes the experts' first product again; false keeps it in memory"""

    @model_validator(mode="after")
    def _fits(self) -> MixtureConfig:
        if self.experts % self.groups or self.top_groups > self.groups:
            raise ConfigurationError(
                "model.moe.groups must divide model.moe.experts, and top_groups be at most groups; "
                f"got experts {self.experts}, groups {self.groups}, top_groups {self.top_groups}",
                hint="choose a divisor of the number of experts",
            )
        reachable = self.experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise ConfigurationError(
                f"model.moe.top_k is {self.top_k}, but a token can reach {reachable} experts only",
                hint="lower top_k, or raise experts or top_groups",
            )
        if self.experts % self.expert_parallel:
            raise ConfigurationError(
                "model.moe.experts must be a multiple of model.moe.expert_parallel; got "
                f"{self.experts} experts over {self.expert_parallel} ranks",
                hint=f"use {-(-self.experts // self.expert_parallel) * self.expert_parallel} "
                "experts, or fewer ranks per layer",
            )
        self._check_exchange()
        return self

    def _check_exchange(self) -> None:
        if self.exchange == "one_sided" and self.capacity_factor is not None:
            raise ConfigurationError(
                'model.moe.exchange "one_sided" does not go with model.moe.capacity_factor '
                f"{self.capacity_factor}: the ranks would not see one another's loads",
                hint='use exchange = "all_to_all", or leave out capacity_factor',
            )
        if self.exchange == "one_sided" and not self.recompute:
            message = 'model.moe.exchange "one_sided" keeps nothing for the backward'
            raise ConfigurationError(message, hint='set recompute = true, or use "all_to_all"')
        if self.exchange_room is not None and self.exchange_room < 1:
            raise ConfigurationError(
                f"model.moe.exchange_room is {self.exchange_room}, less than the even load",
                hint="use 1 or more, or leave it out for room for whatever may come",
            )
