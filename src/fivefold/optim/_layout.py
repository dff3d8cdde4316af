"""How a model is cut up for the engine: what is synchronised, what is averaged, what stays fixed.

Trainable parameters are synchronised by the rule. Floating-point buffers that are part of the state
dict (running statistics) are averaged. Frozen parameters and all other buffers are made equal once,
at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import flat_groups
from fivefold.optim._fragment import Fragment, Surroundings
from fivefold.optim._rule import OuterRule
from fivefold.optim._schedule import RoundSchedule
from fivefold.optim._staleness import GapPenalty

__all__ = ["fixed_tensors", "make_fragments", "shard_sum_of", "state_extras"]


def state_extras(rule: OuterRule, *, may_lose: bool) -> tuple[str, ...]:
    """Return the buffers that a rule needs beside anchor and payload.

    Args:
        rule: The rule.
        may_lose: Whether the transport may lose a flight, whose work must then be kept.

    Raises:
        ConfigurationError: The rule does not survive lost flights.
    """
    penalty = rule.penalty
    by_element = isinstance(penalty, GapPenalty) and penalty.norm == "element"
    extras = []
    if (rule.outer_momentum > 0 or by_element) and rule.merge != "hand over":
        extras.append("momentum")
    if rule.merge in {"correct", "eager"}:
        extras.append("sent")
    if rule.merge == "eager":
        if may_lose:
            message = f"{rule.name} cannot be used with a transport that may lose a round"
            raise ConfigurationError(message, hint="use CO2, DelayCorrected or DiLoCo")
        extras += ["start", "own_momentum"] if rule.outer_momentum > 0 else ["start"]
    if rule.merge == "hand over":
        extras.append("gradient")
    if may_lose and rule.merge in {"replace", "hand over"}:
        extras.append("sent")
    return tuple(extras)


def make_fragments(
    model: torch.nn.Module, surroundings: Surroundings, *, extras: Iterable[str]
) -> list[Fragment]:
    """Cut the trainable parameters into the rule's fragments, in the model's order.

    Args:
        model: The model.
        surroundings: What the fragments share.
        extras: Buffers that the rule needs.

    Returns:
        The fragments; the first one also averages the model's buffers.

    Raises:
        ConfigurationError: There is nothing to train, fewer parameters than fragments, or a
            parameter of an unknown kind.
    """
    rule = surroundings.rule
    trainable = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    if not trainable:
        message = "the model has no parameter with requires_grad=True"
        raise ConfigurationError(message, hint="nothing would be synchronised; check the model")
    parts = _cut(trainable, rule.num_fragments)
    return [
        Fragment(
            index,
            flat_groups(part, extras=extras),
            averaged=flat_groups(averaged_buffers(model), extras=("sent",)) if index == 0 else [],
            schedule=_schedule(rule, index),
            surroundings=surroundings,
        )
        for index, part in enumerate(parts)
    ]


def _schedule(rule: OuterRule, index: int) -> RoundSchedule:
    tau, number = rule.first_tau, rule.num_fragments
    # With uneven step counts one rank may have open steps at a drain where another has none, and
    # both must do the same.
    uneven = rule.auto_tau is not None and rule.auto_tau.balance
    return RoundSchedule(
        tau=tau,
        delayed=rule.delayed,
        delay_steps=rule.delay_steps,
        # Staggered evenly: the last fragment's first round is a whole one.
        first_round_steps=max(tau * (index + 1) // number, 1),
        first_round_synchronous=rule.bootstrap == "sync",
        always_sends=rule.keeps_local or uneven,
    )


def _cut(parameters: list[torch.nn.Parameter], number: int) -> list[list[torch.nn.Parameter]]:
    """Cut a list into runs of about equal numbers of elements, none of them empty."""
    if len(parameters) < number:
        message = f"fragments={number} is more than the model's {len(parameters)} parameters"
        raise ConfigurationError(message, hint=f"use at most fragments={len(parameters)}")
    total = sum(p.numel() for p in parameters)
    parts: list[list[torch.nn.Parameter]] = [[]]
    seen = 0
    for position, parameter in enumerate(parameters):
        left = len(parameters) - position
        missing = number - len(parts)
        full = seen + parameter.numel() / 2 > total * len(parts) / number
        if parts[-1] and missing and (full or left <= missing):
            parts.append([])
        parts[-1].append(parameter)
        seen += parameter.numel()
    return parts


def averaged_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Floating-point buffers of the state dict, each once."""
    kept = set(model.state_dict(keep_vars=True))
    found = [b for name, b in model.named_buffers() if name in kept and b.is_floating_point()]
    return list(dict.fromkeys(found))


def fixed_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Frozen parameters and the buffers that are not averaged."""
    averaged = set(averaged_buffers(model))
    frozen = [p for p in dict.fromkeys(model.parameters()) if not p.requires_grad]
    return [*frozen, *(b for b in dict.fromkeys(model.buffers()) if b not in averaged)]


def shard_sum_of(model: torch.nn.Module) -> Callable[[list[float]], list[float]]:
    """Return what sums numbers over the ranks that hold a worker's shards; nothing to do for one.

    Raises:
        ConfigurationError: Parameters are sharded over different groups, or over more than one
            dimension of a mesh, or replicated within one.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            groups[_shard_group(name, parameter)] = name
    if not groups:
        return lambda values: values
    if len(groups) > 1:
        message = f"parameters {sorted(groups.values())} are sharded over different groups"
        raise ConfigurationError(message, hint="shard the whole model over one group of ranks")
    group = next(iter(groups))

    def shard_sum(values: list[float]) -> list[float]:
        # Gathered and added in rank order: the same bits on every rank.
        size = dist.get_world_size(group)
        mine = torch.tensor(values, dtype=torch.float64)
        parts: list[list[float]] = [[] for _ in range(size)]
        dist.all_gather_object(parts, mine.tolist(), group=group)
        return [sum(column) for column in zip(*parts, strict=True)]

    return shard_sum


def _shard_group(name: str, parameter: DTensor) -> dist.ProcessGroup:
    mesh = parameter.device_mesh
    if mesh.ndim != 1 or not isinstance(parameter.placements[0], Shard):
        message = (
            f"parameter {name} has placements {parameter.placements} on a mesh of {mesh.ndim} "
            "dimensions; OuterSync takes parameters that are sharded over one dimension"
        )
        hint = (
            'call fully_shard with mesh["shard"] alone, so that gradients stay inside the worker, '
            'and OuterSync with process_group=mesh["replicate"]'
        )
        raise ConfigurationError(message, hint=hint)
    return mesh.get_group()
