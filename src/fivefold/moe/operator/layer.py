"""The mixture-of-experts layer as a module: router, experts, shared expert."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fivefold.errors import ConfigurationError, require_number, require_one_of, require_whole
from fivefold.moe.operator.activations import activation_named
from fivefold.moe.operator.fused import OperatorGroup, backends, fused_moe
from fivefold.moe.operator.operands import as_autocast, as_given, check_weight_on_input
from fivefold.moe.routing.families import layer_options
from fivefold.moe.routing.router import (
    DropPolicy,
    Router,
    Routing,
    capacity_for,
    check_capacity,
    counts_of,
    drop_beyond_capacity,
    load_balancing_loss,
    route,
    router_z_loss,
)


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Assignments that each expert got from all ranks of a group, int64 [E]."""

    routed: torch.Tensor  # by the router
    kept: torch.Tensor  # left after dropping beyond the capacity


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and options of a layer.

    Attributes:
        hidden: Width of a token, H.
        intermediate: Inner width of an expert, I.
        experts: How many, E.
        router: How tokens choose.
        activation: A key of ``ACTIVATIONS``.
        bias: Whether experts have biases.
        shared_intermediate: Inner width of an expert that every token goes through, unweighted;
            0 for none.
        shared_gate: Whether that expert's output is multiplied by a sigmoid of the token.
        weight_on_input: As in ``fused_moe``.
        selection_bias: Whether the router has a bias for choosing (no gradient; move it with
            ``updated_selection_bias``).
        capacity_factor: Capacity of an expert in units of the even load; None drops nothing.
        drop_policy: Who is dropped beyond the capacity.
        backend: As in ``fused_moe``.
        recompute: As in ``fused_moe``.

    Raises:
        ConfigurationError: A size is not positive, or the options do not fit together.
    """

    hidden: int
    intermediate: int
    experts: int
    router: Router = field(default_factory=lambda: Router(top_k=2))
    activation: str = "swiglu"
    bias: bool = False
    shared_intermediate: int = 0
    shared_gate: bool = False
    weight_on_input: bool = False
    selection_bias: bool = False
    capacity_factor: float | None = None
    drop_policy: DropPolicy = "position"
    backend: str = "auto"
    recompute: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts"):
            require_whole(name, getattr(self, name))
        require_whole("shared_intermediate", self.shared_intermediate, least=0)
        if self.shared_gate and not self.shared_intermediate:
            message = "shared_gate needs a shared expert"
            raise ConfigurationError(message, hint="set shared_intermediate, its inner width")
        if not isinstance(self.router, Router):
            raise ConfigurationError(f"router is {self.router!r:.40}", hint="use Router(top_k=...)")
        check_weight_on_input(self.router.top_k, weight_on_input=self.weight_on_input)
        check_capacity(None, self.drop_policy)
        require_one_of(self.backend, ("auto", *backends()), f"there is no backend {self.backend!r}")
        if self.capacity_factor is not None:
            hint = "use None to drop nothing"
            require_number("capacity_factor", self.capacity_factor, positive=True, hint=hint)
        activation_named(self.activation)
        self.router.check_experts(self.experts)


LocalExperts = Callable[..., torch.Tensor]
"""Experts of a process: from tokens, ids, weights and, where they reach others', ``group``."""


class LayerGroup(Protocol):
    """Ranks that share out the experts of a layer."""

    def experts_of(self, num_experts: int) -> range:
        """Return the experts whose weights this process has."""

    def check_layer(self, config: MoEConfig) -> None:
        """Refuse a layer that the group was not made for."""

    def apply(
        self,
        tokens: torch.Tensor,
        routing: Routing,
        ids: torch.Tensor,
        local: LocalExperts,
        *,
        own: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ExpertLoad]:
        """Return the experts' weighted sums [T, H] and the load of all ranks' tokens.

        ``ids`` is ``routing.ids_TK``, or has -1 for what is dropped; ``own`` are the experts'
        parameters, which a group may compare over its ranks.
        """


class _Gate(nn.Module):
    """Router weights, [E, H], and the bias for choosing, which no cast of the layer narrows.

    Biases of a balanced router differ in their last bits only: in 16 bits they choose other experts
    (DeepSeek-V3, section 2.1.2, keeps its own in float32).
    """

    selection_bias: torch.Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        wide = _wide(torch.get_default_dtype())
        bias = torch.zeros(config.experts, dtype=wide) if config.selection_bias else None
        self.register_buffer("selection_bias", bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _Gate:  # noqa: FBT001, FBT002 - torch's signature
        before = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        after = self.selection_bias
        if before is not None and after is not None and after.dtype != _wide(after.dtype):
            self.selection_bias = before.to(after.device, _wide(after.dtype))
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **more: Any
    ) -> None:
        name = f"{prefix}selection_bias"
        if isinstance(bias := state_dict.get(name), torch.Tensor):
            state_dict[name] = bias.to(_wide(bias.dtype))  # also where it is assigned, not copied
        super()._load_from_state_dict(state_dict, prefix, *others, **more)

    def bias(self) -> torch.Tensor | None:
        """Return the bias for choosing; refuse one that something has narrowed."""
        bias = self.selection_bias
        if bias is not None and bias.dtype != _wide(bias.dtype):
            raise ConfigurationError(
                f"gate.selection_bias has become {bias.dtype}, which sends tokens to other experts",
                hint="keep it in float32: layers cast by .to() and load_state_dict do; leave it "
                "out of what casts buffers (buffer_dtype of a mixed-precision policy)",
            )
        return bias


def _wide(kind: torch.dtype) -> torch.dtype:
    """Return the type that a router computes in."""
    return torch.promote_types(kind, torch.float32)


class _Experts(nn.Module):
    """Weights of some of E experts, stacked; its state says which, and a whole one is cut."""

    def __init__(self, here: range, total: int, sizes: tuple[int, int], config: MoEConfig) -> None:
        super().__init__()
        self.share = (here.start, here.stop, total)
        self._on_gradient: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._hooked: dict[str, Callable[[], object]] = {}
        experts, (hidden, intermediate) = len(here), sizes
        rows = activation_named(config.activation).width(intermediate)
        self.w13 = nn.Parameter(torch.empty(experts, rows, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.b13 = nn.Parameter(torch.zeros(experts, rows)) if config.bias else None
        self.b2 = nn.Parameter(torch.zeros(experts, hidden)) if config.bias else None

    @property
    def is_prepared(self) -> bool:
        """Return whether gradients are made those of all ranks' loss."""
        return self._on_gradient is not None

    def prepare(self, on_gradient: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Pass the gradients of all parameters through a function from now on."""
        self._on_gradient = on_gradient
        self.follow_parameters()

    def follow_parameters(self) -> None:
        """Do so too for parameters that were assigned anew or may learn since."""
        if self._on_gradient is None or torch.compiler.is_compiling():
            return
        for name, parameter in self.named_parameters():
            known = self._hooked.get(name, lambda: None)() is parameter
            if parameter.requires_grad and not known:
                parameter.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # untyped in torch
                self._hooked[name] = weakref.ref(parameter)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 - torch's signature
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.share[1] - self.share[0] < self.share[2]:
            metadata = getattr(destination, "_metadata", {})
            metadata.get(prefix[:-1], {})["experts"] = self.share

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *others: Any,
    ) -> None:
        first, stop, total = self.share
        theirs = local_metadata.get("experts")
        for name, _ in self.named_parameters():
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape[:1] == (total,) != (stop - first,):
                state_dict[prefix + name] = given[first:stop].clone()
            elif theirs is not None and tuple(theirs) != self.share and given is not None:
                raise ConfigurationError(
                    f"{prefix}{name} of this state are experts {theirs[0]} to {theirs[1] - 1} of "
                    f"{theirs[2]}; this rank has {first} to {stop - 1} of {total}",
                    hint="load each rank's own state, or the whole one, which "
                    "prepare_experts(model).whole_state_dict() makes",
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """Routing of the last forward with its graph: for the losses, and for this layer alone.

    A copy of the layer starts without: what has a graph can be neither copied nor pickled.
    """

    routing: Routing
    logits: torch.Tensor

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class MoE(nn.Module):
    """A feed-forward layer of which each token uses a few experts.

    Weights: ``gate.weight`` [E, H], ``experts.w13`` [E, 2I, H] (gate rows, then up rows; [E, I, H]
    for plain activations), ``experts.w2`` [E, H, I], biases ``experts.b13`` and ``experts.b2``,
    ``shared.*`` as one more expert, and its gate ``shared_gate`` [1, H]. ``convert_checkpoint``
    makes these from the layouts of Mixtral, Qwen3-MoE, DeepSeek and torchtitan. With a group each
    rank holds E / P of the experts, in order, and everything else whole; forward and backward are
    then collective calls.

    Args:
        config: Sizes and options.
        group: Ranks that share the experts out; None: all are here. An ``AllToAllGroup`` sends
            rows by all-to-all, an ``OneSidedGroup`` one-sided (a virtual one has all experts
            here, and the tokens as evenly as can be).

    Attributes:
        last_routing: What the last forward decided, for statistics; without a graph, which
            ``auxiliary_loss`` has.
        last_logits: The router logits of the last forward, without a graph.
        last_load: Assignments per expert of the last forward, over all ranks of the group; of this
            process alone where an ``OneSidedGroup`` does not know better (with a capacity).

    Raises:
        ConfigurationError: The experts cannot be shared out equally, or the group was made for
            another layer.
        UnsupportedError: ``recompute`` is off, and the group keeps nothing for the backward.

    Examples:
        >>> layer = MoE(MoEConfig(hidden=8, intermediate=16, experts=4))
        >>> layer(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
        >>> int(layer.last_routing.load_E.sum())  # 6 tokens, 2 experts each
        12
    """

    def __init__(self, config: MoEConfig, group: LayerGroup | None = None) -> None:
        super().__init__()
        if group is not None:
            group.check_layer(config)
        self.config, self.group = config, group
        self.gate = _Gate(config)
        here = range(config.experts) if group is None else group.experts_of(config.experts)
        width = config.hidden
        self.experts = _Experts(here, config.experts, (width, config.intermediate), config)
        shared = config.shared_intermediate
        self.shared = _Experts(range(1), 1, (width, shared), config) if shared else None
        self.shared_gate = (
            nn.Parameter(torch.empty(1, config.hidden)) if config.shared_gate else None
        )
        self.last_routing: Routing | None = None
        self.last_logits: torch.Tensor | None = None
        self.last_load: ExpertLoad | None = None
        self._decision: _Decision | None = None
        self._told = False
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, group: LayerGroup | None = None, **changes: Any) -> MoE:
        """Make the mixture-of-experts layer of a model of Hugging Face transformers.

        Its weights are drawn anew; ``convert_checkpoint`` brings the model's.

        Args:
            config: The model's configuration, such as ``model.config``.
            group: As for the layer.
            **changes: Fields of ``MoEConfig`` to set otherwise, such as ``backend``.

        Returns:
            A layer that computes what the model's own block does, with its shared expert.

        Raises:
            ConfigurationError: It is no configuration of transformers, or lacks a number.
            UnsupportedError: The family is not known, or its block does more than this layer.

        Examples:
            >>> from transformers import MixtralConfig  # doctest: +SKIP
            >>> MoE.from_config(MixtralConfig()).config.experts  # doctest: +SKIP
            8
        """
        options = {"router": Router.from_config(config), **layer_options(config)}
        return cls(MoEConfig(**options | changes), group)

    def reset_parameters(self) -> None:
        """Draw weights uniformly within 1 / sqrt(inputs), as ``nn.Linear``; biases are zero.

        Experts are drawn one by one, whatever the device's generator makes of larger tensors, and a
        rank keeps its own: from the same seed ranks have the experts of one process, and not each
        the same ones.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                bound = 1.0 / math.sqrt(parameter.shape[-1])
                if name.endswith(("b13", "b2")):
                    parameter.zero_()
                elif name.startswith("experts."):
                    first, stop, total = self.experts.share
                    one = torch.empty_like(parameter[0])
                    for expert in range(total):
                        one.uniform_(-bound, bound)
                        if first <= expert < stop:
                            parameter[expert - first] = one
                else:
                    parameter.uniform_(-bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send tokens through their experts.

        Args:
            x: Shape [..., H].

        Returns:
            The same shape and data type; autocast's type under autocast.

        Raises:
            CommunicationError: A rank of the group died or did not answer in time.
            ConfigurationError: The last dimension is not H, or the tokens do not fit the group.
        """
        config = self.config
        if x.shape[-1:] != (config.hidden,):
            raise ConfigurationError(
                f"tokens have shape {tuple(x.shape)}, the layer has width {config.hidden}",
                hint="the last dimension is the hidden size",
            )
        tokens = x.reshape(-1, config.hidden)
        logits = self._logits(tokens)
        routing = route(logits, config.router, selection_bias=self.gate.bias())
        self._tell_of_idle_router()
        self._decision = _Decision(routing=routing, logits=logits)
        self.last_routing, self.last_logits = routing.detached(), logits.detach()
        ids = self._within_capacity(routing)
        tokens = as_autocast(tokens)[0]  # the operator takes one type for all
        local = functools.partial(self._through, experts=self.experts)
        if self.group is None:
            output = local(tokens, ids, routing.weights_TK)
            kept = counts_of(ids, config.experts)
            self.last_load = ExpertLoad(routed=routing.load_E, kept=kept)
        else:
            self.experts.follow_parameters()
            own = dict(self.experts.named_parameters())
            output, self.last_load = self.group.apply(tokens, routing, ids, local, own=own)
        if self.shared is not None:
            every = torch.zeros(len(tokens), 1, dtype=torch.int64, device=x.device)
            weights = self._shared_weights(tokens)
            output = output + self._through(tokens, every, weights, experts=self.shared)
        return output.view(x.shape)

    def _shared_weights(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the shared expert's output is multiplied by, [T, 1]."""
        if self.shared_gate is None:
            kind = torch.promote_types(tokens.dtype, torch.float32)
            return torch.ones(len(tokens), 1, dtype=kind, device=tokens.device)
        return torch.sigmoid(nn.functional.linear(tokens, as_autocast(self.shared_gate)[0]))

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        # Not in 16 bits, whoever asks for them (autocast, a cast layer, sharded parameters): a
        # rounded logit sends a token to another expert (selective precision, arXiv 2101.03961,
        # section 2.4).
        with as_given(tokens):
            wide = _wide(torch.promote_types(tokens.dtype, self.gate.weight.dtype))
            return nn.functional.linear(tokens.to(wide), self.gate.weight.to(wide))

    def _tell_of_idle_router(self) -> None:
        """Warn once, where training begins, of a router that no loss of the task reaches."""
        if torch.compiler.is_compiling():  # asked first: a graph must not hang on what was told
            return
        if self._told or not (self.training and torch.is_grad_enabled()):
            return
        self._told = True
        reason = self.config.router.why_constant(self.config.experts)
        if reason is not None and self.gate.weight.requires_grad:
            warnings.warn(
                f"gate.weight gets no gradient of the task's loss: {reason}", stacklevel=3
            )

    def _within_capacity(self, routing: Routing) -> torch.Tensor:
        """Return expert ids with -1 for the dropped; a rank's tokens compete among themselves."""
        config, ids, factor = self.config, routing.ids_TK, self.config.capacity_factor
        if factor is None:
            return ids
        capacity = capacity_for(len(ids), config.experts, top_k=ids.shape[1], factor=factor)
        room = {"num_experts": config.experts, "capacity": capacity}
        kept = drop_beyond_capacity(ids, routing.weights_TK, **room, policy=config.drop_policy)
        return ids.masked_fill(~kept, -1)

    def _through(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        experts: _Experts,
        group: OperatorGroup | None = None,
    ) -> torch.Tensor:
        return fused_moe(
            tokens,
            experts.w13,
            experts.w2,
            ids,
            weights,
            activation=self.config.activation,
            b13=experts.b13,
            b2=experts.b2,
            backend=self.config.backend,
            weight_on_input=self.config.weight_on_input and experts is self.experts,
            precision="ieee" if group is None else group.precision,
            group=group,
            recompute=self.config.recompute,
            check=False,  # the router's own ids are in range and distinct
        )

    def auxiliary_loss(self, *, balance: float = 0.01, z: float = 0.0) -> torch.Tensor:
        """Return the last forward's losses to add to the task's: balance * aux + z * z loss.

        Args:
            balance: Coefficient of ``load_balancing_loss``.
            z: Coefficient of ``router_z_loss``.

        Returns:
            A scalar with gradients to the router; 0 with a graph where there were no tokens.

        Raises:
            ConfigurationError: This layer had no forward yet (a copy has none of its own), or in
                training a forward without a graph, so that the loss would reach no router.
        """
        if self._decision is None:
            message = "there is no routing yet"
            raise ConfigurationError(message, hint="call the layer before its losses")
        learns = self.training and torch.is_grad_enabled() and self.gate.weight.requires_grad
        if learns and not self._decision.logits.requires_grad:
            message = "the last forward of this layer kept no graph: its losses reach no router"
            raise ConfigurationError(
                message,
                hint="run the layer with gradients before its losses: not under torch.no_grad, "
                "and under torch.utils.checkpoint with use_reentrant=False; to measure only, call "
                "eval() first or read the losses under torch.no_grad",
            )
        load = None if self.last_load is None else self.last_load.routed
        loss = balance * load_balancing_loss(self._decision.routing, load=load)
        return loss + z * router_z_loss(self._decision.logits) if z else loss

    @property
    def rank_share(self) -> str | None:
        """Return which experts are this rank's own; None where all are here.

        Engines that bring ranks together ask modules for it: ranks with other answers must not be
        made equal.
        """
        first, stop, total = self.experts.share
        return None if stop - first == total else f"experts {first} to {stop - 1} of {total}"

    @property
    def expert_parameters(self) -> list[str]:
        """Return the names of the parameters that each rank of the group has a share of."""
        return [f"experts.{name}" for name, _ in self.experts.named_parameters()]

    def extra_repr(self) -> str:
        """Return the sizes, for ``print``."""
        config = self.config
        return (
            f"hidden={config.hidden}, intermediate={config.intermediate}, "
            f"experts={config.experts}, top_k={config.router.top_k}, "
            f"activation={config.activation!r}"
        )
