"""Which experts a token goes to and with what weight: every common router as one function.

Shapes: T tokens, E experts, K experts per token. Ties go to the lower expert number, so that a
routing is a function of the logits alone, on every device.

References: Shazeer et al. 2017, arXiv 1701.06538 (top-k); Fedus et al. 2021, arXiv 2101.03961
(auxiliary loss); Zoph et al. 2022, arXiv 2202.08906 (z loss); DeepSeek-V2, arXiv 2405.04434
(group-limited) and DeepSeek-V3, arXiv 2412.19437 (sigmoid scores, selection bias).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from fivefold.errors import (
    ConfigurationError,
    DataError,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.moe.routing.families import router_options

DropPolicy = Literal["position", "weight"]
_MOST = 2**62  # more than there are assignments, and an int64


def check_capacity(capacity: int | None, policy: str) -> int | None:
    """Return the capacity as a number that tensors can be compared with."""
    require_one_of(policy, ("position", "weight"), f"drop policy is {policy!r}")
    return None if capacity is None else _within_int64(capacity)


def _within_int64(capacity: int) -> int:
    hint = "capacity_for makes one from a factor"
    return min(require_whole("capacity", capacity, least=0, hint=hint), _MOST)


def capacity_for(num_tokens: int, num_experts: int, *, top_k: int, factor: float = 1.0) -> int:
    """Return the tokens per expert at a capacity factor: ceil(T K / E * factor).

    Raises:
        ConfigurationError: A number is out of range.

    Examples:
        >>> capacity_for(10, 4, top_k=2, factor=1.25)
        7
    """
    require_number("factor", factor)
    require_whole("num_experts", num_experts)
    require_whole("num_tokens", num_tokens, least=0)
    require_whole("top_k", top_k)
    # Rounded first: 1.1 * 10 is a little more than 11 in binary.
    return math.ceil(round(num_tokens * top_k / num_experts * factor, 9))


def drop_beyond_capacity(
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    capacity: int,
    policy: DropPolicy = "position",
) -> torch.Tensor:
    """Return which assignments stay when no expert takes more than ``capacity``.

    Args:
        ids: Experts, shape [T, K]; -1 for none.
        weights: Shape [T, K].
        num_experts: E.
        capacity: Most tokens per expert.
        policy: ``"position"``: first choices of all tokens first, in token order, then second
            choices, and so on. ``"weight"``: larger weights first, ties as by position.

    Returns:
        True where an assignment stays, shape [T, K].

    Raises:
        ConfigurationError: The capacity is no whole number or negative, the policy unknown, or the
            shapes do not fit.

    Examples:
        >>> ids, weights = torch.tensor([[0], [0], [1]]), torch.tensor([[0.2], [0.9], [0.5]])
        >>> kept = drop_beyond_capacity(ids, weights, num_experts=2, capacity=1, policy="weight")
        >>> kept.flatten().tolist()
        [False, True, True]
    """
    check_capacity(None, policy)
    most = _within_int64(capacity)
    require_whole("num_experts", num_experts)
    if ids.ndim != 2 or weights.shape != ids.shape:
        raise ConfigurationError(
            f"ids are {tuple(ids.shape)}, weights {tuple(weights.shape)}",
            hint="both are [tokens, top_k]",
        )
    named = torch.where(ids < num_experts, ids, -1)
    by_slot = named.t().reshape(-1)  # first choices of all tokens, then second choices
    order = torch.arange(by_slot.numel(), device=ids.device)
    if policy == "weight":
        order = torch.sort(weights.detach().t().reshape(-1), descending=True, stable=True).indices
    experts = by_slot[order]
    grouped = torch.sort(experts, stable=True)
    counts = counts_of(experts, num_experts)
    starts = torch.cumsum(counts, 0) - counts + (len(experts) - counts.sum())
    rank = torch.arange(len(experts), device=ids.device) - starts[grouped.values.clamp_min(0)]
    kept = torch.empty_like(experts, dtype=torch.bool)
    kept[order[grouped.indices]] = (rank < most) & (grouped.values >= 0)
    return kept.view(ids.shape[1], ids.shape[0]).t().contiguous()


def counts_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the assignments of each expert, int64 [E]; what is no expert's number is not counted.

    Not ``bincount``: that waits for the device, and its shape depends on the values.
    """
    flat = ids.reshape(-1).long()
    place = torch.where((flat >= 0) & (flat < num_experts), flat + 1, 0)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))[1:]


Score = Literal["softmax", "topk_softmax", "sigmoid", "topk_sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "top2_sum"]
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_SMALL = 1e-20  # keeps a token whose scores all underflowed from dividing by zero
_LEAST_EPSILON = 1e-4  # one weight, normalised by itself and this, follows its score


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor has values now: it is not compiled, not fake, not on meta."""
    return type(x) in PLAIN_TYPES and x.device.type != "meta" and not torch.compiler.is_compiling()


@dataclass(frozen=True, kw_only=True)
class Router:
    """Rule by which logits become a routing.

    Attributes:
        top_k: Experts per token, K.
        score: ``"softmax"``: probabilities over all experts, then the K largest.
            ``"topk_softmax"``: the K largest logits, then a softmax over these. ``"sigmoid"``,
            ``"sqrtsoftplus"``: independent scores, then the K largest. ``"topk_sigmoid"``: the K
            largest logits, then their sigmoids: as "sigmoid", but for a selection bias.
        normalize: Divide the K weights by their sum; without effect for ``"topk_softmax"``.
        groups: Equal groups of consecutive experts.
        top_groups: How many of them a token may use.
        group_score: What a group is chosen by: its largest score, or the sum of its two largest.
        scale: Factor on all weights.
        epsilon: Added to the sum that weights are divided by.

    Raises:
        ConfigurationError: A number is out of range.

    Examples:
        >>> Router(top_k=2, score="sigmoid", groups=4, top_groups=2).top_k
        2
    """

    top_k: int
    score: Score = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    scale: float = 1.0
    epsilon: float = _SMALL

    @classmethod
    def from_config(cls, config: Any) -> Router:
        """Make the router of a model of Hugging Face transformers.

        Args:
            config: Its configuration, such as ``model.config``. DeepSeek-V4's router is that of its
                layers without hashing.

        Returns:
            A router whose routing is that of the model's own block.

        Raises:
            ConfigurationError: It is no configuration of transformers, or lacks a number.
            UnsupportedError: The family is not known, or its router does more than this one.

        Examples:
            >>> from transformers import DeepseekV3Config  # doctest: +SKIP
            >>> Router.from_config(DeepseekV3Config()).group_score  # doctest: +SKIP
            'top2_sum'
        """
        return cls(**router_options(config))

    def __post_init__(self) -> None:
        for name in ("top_k", "groups", "top_groups"):
            require_whole(name, getattr(self, name))
        require_one_of(self.score, get_args(Score), f"score is {self.score!r}")
        score, allowed = self.group_score, get_args(GroupScore)
        require_one_of(score, allowed, f"group_score is {score!r}")
        require_number("scale", self.scale, positive=True, hint="at 0 no expert would learn")
        require_number("epsilon", self.epsilon)
        if not 1 <= self.top_groups <= self.groups:
            raise ConfigurationError(
                f"top_groups must be between 1 and groups={self.groups}; got {self.top_groups}"
            )

    def check_experts(self, num_experts: int) -> None:
        """Check it against a number of experts.

        Raises:
            ConfigurationError: They do not fit.
        """
        if num_experts % self.groups:
            raise ConfigurationError(
                f"{num_experts} experts cannot be cut into {self.groups} equal groups",
                hint="choose a number of groups that divides the number of experts",
            )
        reachable = num_experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise ConfigurationError(
                f"top_k is {self.top_k}, but a token can reach {reachable} experts only",
                hint="lower top_k, or raise top_groups or the number of experts",
            )
        if self.group_score == "top2_sum" and num_experts // self.groups < 2:
            raise ConfigurationError(
                'group_score "top2_sum" needs two experts in each group; got '
                f"{num_experts} experts in {self.groups} groups",
                hint='use "max", or fewer groups',
            )

    def why_constant(self, num_experts: int) -> str | None:
        """Return why all weights are the same number, so that they teach no router; else None.

        Args:
            num_experts: Experts of the layer, E.

        Examples:
            >>> Router(top_k=1, score="sigmoid", normalize=False).why_constant(8) is None
            True
            >>> Router(top_k=1).why_constant(8).partition(";")[0]
            "top_k is 1 and normalize is set: each token's one weight is the same"
        """
        if num_experts == 1 and self.score == "softmax":
            return 'a softmax over one expert is always 1; use score="sigmoid", or more experts'
        alone = self.top_k == 1 and "each token's one weight is the same"
        advice = 'use normalize=False with score="softmax" or "sigmoid", or a larger top_k'
        if alone and self.score == "topk_softmax":
            return f'top_k is 1 and score "topk_softmax": {alone}; {advice}'
        if alone and self.normalize and self.epsilon < _LEAST_EPSILON:
            return f"top_k is 1 and normalize is set: {alone}; {advice}"
        return None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Decision of a router.

    Attributes:
        ids_TK: Experts of each token by descending score, int64; distinct within a token.
        weights_TK: Their weights, in the logits' data type (at least float32).
        scores_TE: Scores of all experts, for the losses: probabilities for the softmax routers,
            sigmoids or the like otherwise.
    """

    ids_TK: torch.Tensor  # noqa: N815 - shape suffix
    weights_TK: torch.Tensor  # noqa: N815 - shape suffix
    scores_TE: torch.Tensor  # noqa: N815 - shape suffix

    @property
    def load_E(self) -> torch.Tensor:  # noqa: N802 - shape suffix
        """Return the tokens per expert, int64 [E]."""
        return counts_of(self.ids_TK, self.scores_TE.shape[1])

    def detached(self) -> Routing:
        """Return the same routing without its graph."""
        weights, scores = self.weights_TK.detach(), self.scores_TE.detach()
        return Routing(ids_TK=self.ids_TK, weights_TK=weights, scores_TE=scores)


def route(
    logits: torch.Tensor, router: Router, *, selection_bias: torch.Tensor | None = None
) -> Routing:
    """Choose experts and weights from router logits; differentiable in the weights and scores.

    Args:
        logits: Shape [T, E]; computed with in float32 at least.
        router: How.
        selection_bias: Shape [E]; added to the scores for choosing only, not to the weights
            (auxiliary-loss-free balancing).

    Raises:
        ConfigurationError: Shapes or the router do not fit.
        DataError: A token's scores or weights are NaN, as from logits or a bias that are (looked
            at on the CPU only, and not while compiling: elsewhere it would wait for the device).

    Examples:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> routing = route(logits, Router(top_k=2))
        >>> routing.ids_TK.tolist(), round(float(routing.weights_TK.sum()), 6)
        ([[1, 2]], 1.0)
    """
    if logits.ndim != 2:
        raise ConfigurationError(
            f"logits must be [tokens, experts]; got {tuple(logits.shape)}",
            hint="flatten batch and sequence: logits.flatten(0, -2)",
        )
    num_experts = logits.shape[1]
    router.check_experts(num_experts)
    if selection_bias is not None and selection_bias.shape != (num_experts,):
        raise ConfigurationError(
            f"selection_bias must be [{num_experts}]; got {tuple(selection_bias.shape)}"
        )
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = _scores(values, router.score)
    wanted = values if router.score.startswith("topk") else scores
    choice = wanted.detach()
    if selection_bias is not None:
        choice = choice + selection_bias.detach().to(choice)
    if router.groups > 1:
        choice = _limited_to_groups(choice, router)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    weights = _weights(wanted.gather(1, ids), router)
    if is_plain(logits) and logits.device.type == "cpu":
        # An expert whose score is NaN would be chosen first, whatever its weight.
        odd = torch.isnan(choice).any(dim=1) | torch.isnan(weights).any(dim=1)
        if bool(odd.any()):
            raise DataError(
                f"the routing scores or weights of token {int(odd.nonzero()[0, 0])} are NaN",
                hint="its logits or the selection bias are NaN, infinite or all too low: look for "
                "a diverged router or input before this layer",
            )
    return Routing(ids_TK=ids, weights_TK=weights, scores_TE=scores)


def _scores(values: torch.Tensor, score: Score) -> torch.Tensor:
    if score in {"sigmoid", "topk_sigmoid"}:
        return torch.sigmoid(values)
    if score == "sqrtsoftplus":
        raised = torch.nn.functional.softplus(values)
        none = raised == 0.0  # underflowed; the slope of a root is infinite there
        return raised.masked_fill(none, 1.0).sqrt().masked_fill(none, 0.0)
    return torch.softmax(values, dim=-1)


def _weights(chosen: torch.Tensor, router: Router) -> torch.Tensor:
    if router.score == "topk_softmax":
        return torch.softmax(chosen, dim=-1) * router.scale
    if router.score == "topk_sigmoid":
        chosen = torch.sigmoid(chosen)
    if router.normalize:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + router.epsilon)
    return chosen * router.scale


def _limited_to_groups(choice: torch.Tensor, router: Router) -> torch.Tensor:
    size = choice.shape[1] // router.groups
    grouped = choice.view(len(choice), router.groups, size)
    if router.group_score == "max":
        worth = grouped.amax(dim=-1)
    else:
        worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, value=False)
    opened = grouped.clamp_min(torch.finfo(choice.dtype).min)  # also -inf comes before the closed
    return opened.masked_fill(closed.unsqueeze(-1), float("-inf")).view_as(choice)


def load_balancing_loss(routing: Routing, *, load: torch.Tensor | None = None) -> torch.Tensor:
    """Return E * sum_e f_e P_e: 1 where the load is even, E where one expert has all.

    f_e is the share of all assignments that go to expert e (a constant for the gradient), P_e the
    mean score of e, with the scores of a token normalised to one. Multiply it by K to compare with
    implementations that divide by the number of tokens instead of assignments.

    Args:
        routing: A routing.
        load: Assignments per expert that f_e is the share of, [E]; None: this routing's own. With
            those of all ranks the mean of the ranks' losses is the loss of the whole batch, where
            they have as many tokens.

    Returns:
        A scalar; without tokens 0, with a graph, so that an empty rank's backward pass runs along
        with its peers'.
    """
    num_tokens, num_experts = routing.scores_TE.shape
    if num_tokens == 0:
        return routing.scores_TE.sum()
    counts = (routing.load_E if load is None else load).to(routing.scores_TE.dtype)
    share = counts / counts.sum()
    scores = routing.scores_TE
    probabilities = scores / (scores.sum(dim=-1, keepdim=True) + _SMALL)
    return num_experts * torch.dot(share, probabilities.mean(dim=0))


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of logsumexp(logits [T, E]) squared: keeps logits small.

    A scalar; without tokens 0, with a graph.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if len(values) == 0:
        return values.sum()
    return torch.logsumexp(values, dim=-1).square().mean()


def updated_selection_bias(
    bias: torch.Tensor, load: torch.Tensor, *, rate: float = 1e-3
) -> torch.Tensor:
    """Take a step of balancing without an auxiliary loss: raise the underused, lower the rest.

    bias + rate * sign(mean(load) - load), DeepSeek-V3, section 2.1.2.

    Args:
        bias: Shape [E].
        load: Tokens per expert over the step, summed over all ranks, shape [E].
        rate: Size of the step.

    Raises:
        ConfigurationError: The shapes differ, or the rate is no number from 0.

    Examples:
        >>> updated_selection_bias(torch.zeros(2), torch.tensor([3, 1]), rate=0.5).tolist()
        [-0.5, 0.5]
    """
    require_number("rate", rate)
    if load.shape != bias.shape:
        raise ConfigurationError(
            f"load is {tuple(load.shape)}, bias {tuple(bias.shape)}", hint="both are [experts]"
        )
    load = load.to(bias.device, torch.float64)  # counts in the bias's own type may be rounded
    return bias + rate * torch.sign(load.mean() - load).to(bias)
