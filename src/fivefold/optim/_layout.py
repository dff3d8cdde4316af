"""How a model is cut up for the engine: what is synchronised, what is averaged, what stays fixed.

Trainable parameters are synchronised by the rule. Floating-point buffers that are part of the state
dict (running statistics) are averaged. Frozen parameters and all other buffers are made equal once,
at the start.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from fivefold.errors import ConfigurationError
from fivefold.optim._codecs import Codec, ExactCodec, named_codec
from fivefold.optim._flat import flat_groups
from fivefold.optim._fragment import Fragment
from fivefold.optim._rule import OuterRule
from fivefold.optim._schedule import RoundSchedule
from fivefold.optim._shards import RowShare
from fivefold.optim._staleness import GapPenalty
from fivefold.optim._state import EngineContext


def state_extras(rule: OuterRule, *, may_lose: bool) -> tuple[str, ...]:
    """Return the buffers that a rule needs beside anchor and payload."""
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
    model: torch.nn.Module, context: EngineContext, *, extras: Iterable[str]
) -> list[Fragment]:
    """Cut the trainable parameters into the rule's fragments, in the model's order."""
    rule = context.rule
    trainable = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
    if not trainable:
        message = "the model has no parameter with requires_grad=True"
        raise ConfigurationError(message, hint="nothing would be synchronised; check the model")
    worker = context.worker
    share = RowShare() if worker is None else worker.share
    device = context.outer_device
    parts = _cut(trainable, rule.num_fragments)
    buffers = averaged_buffers(model)
    return [
        Fragment(
            index,
            flat_groups(part, extras=extras, share=share, device=device),
            averaged=flat_groups(
                buffers if index == 0 else [], extras=("sent",), share=share, device=device
            ),
            # Staggered evenly: the last fragment's first round is a whole one.
            schedule=_schedule(
                rule,
                tau=rule.first_tau,
                first_round_steps=max(rule.first_tau * (index + 1) // rule.num_fragments, 1),
            ),
            context=context,
        )
        for index, part in enumerate(parts)
    ]


def late_fragment(
    parameters: Iterable[torch.Tensor],
    context: EngineContext,
    *,
    index: int,
    first: RoundSchedule,
    extras: Iterable[str],
) -> Fragment:
    """Make a fragment of parameters that joined late, whose rounds end with the first one's."""
    rule, worker = context.rule, context.worker
    share = RowShare() if worker is None else worker.share
    left = first.tau - first.steps_in_round
    return Fragment(
        index,
        flat_groups(parameters, extras=extras, share=share, device=context.outer_device),
        averaged=[],
        schedule=_schedule(rule, tau=first.tau, first_round_steps=left),
        context=context,
    )


def _schedule(rule: OuterRule, *, tau: int, first_round_steps: int) -> RoundSchedule:
    # With uneven step counts one rank may have open steps at a drain where another has none, and
    # both must do the same.
    uneven = rule.auto_tau is not None and rule.auto_tau.balance
    return RoundSchedule(
        tau=tau,
        delayed=rule.delayed,
        delay_steps=rule.delay_steps,
        first_round_steps=first_round_steps,
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


def require_countable(model: torch.nn.Module, rule: OuterRule) -> None:
    """Refuse a rule that needs norms over a model of which only some parameters are sharded."""
    if not isinstance(rule.penalty, GapPenalty):
        return
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = [name for name, p in trainable.items() if not isinstance(p, DTensor)]
    if plain and len(plain) < len(trainable):
        message = f"the gap penalty needs norms, but {plain[0]} is not sharded as the others are"
        raise ConfigurationError(message, hint='shard all, or use staleness="none"')


_ELEMENT_BYTES = 4  # the outer state is float32 for parameters of at most 32 bits


def outer_state_bytes(
    rule: OuterRule,
    num_parameters: int,
    *,
    num_workers: int = 2,
    num_shards: int = 1,
    codec: str | Codec = "fp32",
) -> int:
    """Return the bytes of outer state that each rank keeps for float32 or 16-bit parameters.

    Per parameter: 4 for the anchor, 4 for the payload, 4 for the momentum where the rule has one,
    4 for what delay-corrected merges sent, 12 more for the eager merge with momentum, 4 for the
    gradient of an outer optimizer (whose own state is not counted), and 4 + 4 / num_workers for
    the residuals of a lossy codec; all of it divided by ``num_shards``.

    Args:
        rule: The outer rule.
        num_parameters: Trainable parameters of the model.
        num_workers: Number of workers.
        num_shards: Ranks that act as one worker.
        codec: How payloads travel.

    Raises:
        ConfigurationError: A number is not positive.

    References:
        CO2, arXiv 2401.16265, Algorithm 2.

    Examples:
        >>> from fivefold.optim import CO2
        >>> outer_state_bytes(CO2(tau=8), 1_000_000, num_shards=4)
        3000000
    """
    counts = {
        "num_parameters": num_parameters,
        "num_workers": num_workers,
        "num_shards": num_shards,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigurationError(f"{name} must be positive; got {value!r}")
    buffers = 2.0 + len(state_extras(rule, may_lose=False))
    if not isinstance(named_codec(codec) if isinstance(codec, str) else codec, ExactCodec):
        buffers += 1 + 1 / num_workers
    return round(_ELEMENT_BYTES * buffers * num_parameters / num_shards)
