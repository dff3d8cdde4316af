"""What of a model is not brought together: what each rank keeps, and a rank's own experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim.transport import Transport

_OF_DDP = "_ddp_params_and_buffers_to_ignore"


def plain_name(name: str) -> str:
    """Return a tensor's name without what ``torch.compile`` puts into it."""
    return name.replace("_orig_mod.", "")


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """Return the plain names of a model's tensors, by their identity."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {id(tensor): plain_name(name) for name, tensor in named}


def kept_names(model: torch.nn.Module, ignore: Sequence[str]) -> frozenset[str]:
    """Return the plain names of what each rank keeps for itself.

    Args:
        model: The model. Its list for DistributedDataParallel counts too, but not for what a
            module with a ``rank_share`` owns: such experts are in it because their gradients have
            a mean of their own, and are brought together like all that is trained.
        ignore: Names of parameters and buffers.

    Raises:
        ConfigurationError: The model has not what ``ignore`` names.
    """
    known = {
        plain_name(name)
        for name, _ in itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    }
    given = [ignore] if isinstance(ignore, str) else [*ignore]
    strange = [name for name in given if not isinstance(name, str) or plain_name(name) not in known]
    if isinstance(ignore, str) or strange:
        message = f"ignore names {ignore if isinstance(ignore, str) else strange[0]!r}"
        hint = "give a list of names as model.named_parameters() and named_buffers() have them"
        raise ConfigurationError(f"{message}, which the model has not", hint=hint)
    shared_out = {
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        if isinstance(getattr(module, "rank_share", None), str)
        for name, _ in module.named_parameters()
    }
    of_ddp = {plain_name(name) for name in getattr(model, _OF_DDP, ())}
    return frozenset({plain_name(name) for name in given} | (of_ddp - shared_out))


def own_shares(model: torch.nn.Module) -> list[str]:
    """Return what of a model is this rank's own: what its modules' ``rank_share`` says."""
    asked = ((name, getattr(module, "rank_share", None)) for name, module in model.named_modules())
    return [f"{name}: {share}" for name, share in asked if isinstance(share, str)]


def require_same_shares(transport: Transport, model: torch.nn.Module) -> None:
    """Refuse ranks that have other experts than this one; a collective call."""
    mine = own_shares(model)
    for rank, theirs in enumerate(transport.gather_objects(mine)):
        if theirs != mine:
            pairs = itertools.zip_longest(theirs, mine, fillvalue="nothing")
            other, own = next((a, b) for a, b in pairs if a != b)
            raise ConfigurationError(
                f"rank {rank} has {other!r:.90} where rank {transport.rank} has {own!r:.90}: they "
                "are no replicas of one another",
                hint="give OuterSync the ranks with the same experts: process_group="
                "prepare_experts(model, process_group=...).workers",
            )
