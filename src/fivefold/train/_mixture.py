"""The mixtures of experts of a language model: how they are made, drawn, balanced and watched.

The layers themselves are those of ``fivefold.moe``. This module knows nothing of data, files or
steps; who calls it says when a step ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fivefold.moe import (
    AllToAllGroup,
    MoE,
    MoEConfig,
    OneSidedGroup,
    Router,
    updated_selection_bias,
)
from fivefold.train.config import MixtureConfig, ModelConfig


def mixture_blocks(config: ModelConfig) -> frozenset[int]:
    """Return the blocks that have a mixture: every so many-th, counted from the last."""
    if config.moe is None:
        return frozenset()
    return frozenset(range(config.layers - 1, -1, -config.moe.every))


def make_mixture(model: ModelConfig, *, group: AllToAllGroup | OneSidedGroup | None) -> MoE:
    """Make one layer, with undrawn parameters."""
    assert model.moe is not None, "only made where there are experts"
    config, inner = model.moe, model.expert_width
    router = Router(
        top_k=config.top_k,
        score=config.score,
        normalize=config.normalize,
        groups=config.groups,
        top_groups=config.top_groups,
        group_score=config.group_score,
        scale=config.scale,
    )
    return MoE(
        MoEConfig(
            hidden=model.width,
            intermediate=inner,
            experts=config.experts,
            router=router,
            activation=config.activation,
            shared_intermediate=config.shared * inner,
            selection_bias=config.bias_rate > 0,
            capacity_factor=config.capacity_factor,
            drop_policy=config.drop_policy,
            backend=config.backend,
            recompute=config.recompute,
        ),
        group,
    )


def draw_experts(
    layer: MoE, *, std: float, residual_std: float, generator: torch.Generator
) -> None:
    """Draw all experts' weights in order and keep those of this rank: equal for any share."""
    nn.init.normal_(layer.gate.weight, std=std, generator=generator)
    number = layer.config.experts
    here = range(number) if layer.group is None else layer.group.experts_of(number)
    for stack, scale in ((layer.experts.w13, std), (layer.experts.w2, residual_std)):
        one = torch.empty_like(stack[0])
        for expert in range(number):
            nn.init.normal_(one, std=scale, generator=generator)
            if expert in here:
                with torch.no_grad():
                    stack[expert - here.start] = one
    if layer.shared is not None:
        nn.init.normal_(layer.shared.w13, std=std, generator=generator)
        nn.init.normal_(layer.shared.w2, std=residual_std, generator=generator)


class Mixtures:
    """All mixtures of a model: their losses, their loads, their selection biases.

    Loads are of the tokens of this rank, or of all ranks of its expert group where there is one.
    """

    def __init__(self, config: MixtureConfig, layers: dict[int, MoE]) -> None:
        self.config, self.layers = config, layers
        self.ranks = config.expert_parallel
        blank = torch.zeros((len(layers), config.experts), dtype=torch.int64)
        # Of this step, since the last line of metrics, and since the beginning of the run.
        self._step_LE, self._interval_2LE = blank, torch.stack([blank, blank])
        self._total_2LE = self._interval_2LE.clone()
        self._new_2LE: torch.Tensor | None = None  # on the layers' device, not in those yet
        self.bytes = {"payload_bytes": 0, "sent_bytes": 0}
        self.exchange_s = 0.0
        self._told = dict(self.bytes)

    @property
    def exchange(self) -> str:
        """Return how tokens travel between ranks that share experts: as the table says, or none."""
        if self.ranks == 1:
            return "none"
        groups = [layer.group for layer in self.layers.values()]
        return "one_sided" if isinstance(groups[0], OneSidedGroup) else "all_to_all"

    def auxiliary_loss(self) -> torch.Tensor:
        """Return the sum over the layers of balancing and z losses of the last forward."""
        config = self.config
        losses = [
            layer.auxiliary_loss(balance=config.balance_coefficient, z=config.z_loss)
            for layer in self.layers.values()
        ]
        return torch.stack(losses).sum()

    def observe(self) -> None:
        """Count the loads of the last forward, where they are: the host does not wait for them."""
        loads = [layer.last_load for layer in self.layers.values()]
        routed = torch.stack([load.routed for load in loads if load is not None])
        kept = torch.stack([load.kept for load in loads if load is not None])
        both = torch.stack([routed, kept])
        self._new_2LE = both if self._new_2LE is None else self._new_2LE + both

    def _collect(self) -> None:
        """Take in what was counted on the device."""
        if self._new_2LE is None:
            return
        new, self._new_2LE = self._new_2LE.cpu(), None
        self._step_LE = self._step_LE + new[0]
        self._interval_2LE += new
        self._total_2LE += new

    def end_step(self, summed: Callable[[Sequence[float]], list[float]]) -> None:
        """Move the selection biases by the step's loads; a collective call where they exist."""
        if self.config.bias_rate > 0:
            self._collect()
            flat = summed([float(n) for n in self._step_LE.flatten().tolist()])
            loads = torch.tensor(flat, dtype=torch.float64).view(self._step_LE.shape)
            for load, layer in zip(loads, self.layers.values(), strict=True):
                bias = layer.gate.selection_bias
                assert bias is not None, "a bias rate makes a bias"
                bias.copy_(updated_selection_bias(bias, load.to(bias), rate=self.config.bias_rate))
        self._step_LE = torch.zeros_like(self._step_LE)

    def count_exchange(self, *, payload_bytes: int, sent_bytes: int, seconds: float) -> None:
        """Add one exchange of this rank to the totals."""
        self.bytes["payload_bytes"] += payload_bytes
        self.bytes["sent_bytes"] += sent_bytes
        self.exchange_s += seconds

    def take_interval(self) -> dict[str, Any]:
        """Return what happened since the last call, for a line of metrics."""
        self._collect()
        routed, kept = self._interval_2LE.tolist()
        since = {name: count - self._told[name] for name, count in self.bytes.items()}
        self._interval_2LE.zero_()
        self._told = dict(self.bytes)
        return {"blocks": list(self.layers), "ranks": self.ranks, "load": routed} | {
            "dropped": [sum(r) - sum(k) for r, k in zip(routed, kept, strict=True)],
            "imbalance": [_imbalance(row) for row in routed],
            **since,
        }

    def record(self) -> dict[str, Any]:
        """Return the totals of the run, for result.json."""
        self._collect()
        routed, kept = self._total_2LE.tolist()
        return {
            "blocks": list(self.layers),
            "experts": self.config.experts,
            "top_k": self.config.top_k,
            "ranks": self.ranks,
            "exchange": self.exchange,
            "load": routed,
            "dropped": [sum(r) - sum(k) for r, k in zip(routed, kept, strict=True)],
            "imbalance": [_imbalance(row) for row in routed],
            "exchange_s": self.exchange_s,
            **self.bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, for a checkpoint; the biases are with the model."""
        self._collect()
        return {
            "interval": self._interval_2LE.clone(),
            "total": self._total_2LE.clone(),
            "bytes": dict(self.bytes),
            "told": dict(self._told),
            "exchange_s": self.exchange_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, or forget what was counted since."""
        self._step_LE, self._new_2LE = torch.zeros_like(self._step_LE), None
        self._interval_2LE, self._total_2LE = state["interval"].clone(), state["total"].clone()
        self.bytes, self._told = dict(state["bytes"]), dict(state["told"])
        self.exchange_s = state["exchange_s"]


def _imbalance(load: list[int]) -> float:
    """Return the largest load over the mean one: 1 where even, E where one expert has all."""
    total = sum(load)
    return max(load) * len(load) / total if total else math.nan
