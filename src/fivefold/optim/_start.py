"""The start of all ranks alike: settings are compared, and rank 0's tensors are sent."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._fragment import Fragment
from fivefold.optim._inner_optimizers import optimizer_settings
from fivefold.optim._kept_apart import plain_name, require_same_shares
from fivefold.optim._metadata import names_apart, replica_hash, require_equal
from fivefold.optim._shards import local_tensor
from fivefold.optim._state import EngineContext, plain_settings
from fivefold.optim.transport import Transport


@torch.no_grad()
def start_equal(
    model: torch.nn.Module,
    context: EngineContext,
    fragments: Sequence[Fragment],
    *,
    optimizers: Iterable[torch.optim.Optimizer],
    fixed: Mapping[str, torch.Tensor],
    averaged_states: Mapping[str, int],
) -> None:
    """Compare what the ranks must have alike, and begin at rank 0's tensors; a collective call.

    Raises:
        ConfigurationError: Names the first difference and the ranks that have it.
    """
    worker, transport = context.worker, context.transport
    mine: dict[str, Any] = {
        "rule": plain_settings(context.rule),
        "parameters": parameter_shapes(model, apart=context.apart),
        "optimizer": optimizer_settings(
            optimizers, at_any_time=bool(getattr(transport, "may_lose", False))
        ),
        "codec": wire_format(transport),
        "check": context.check_every_rounds,
        "outlier_factor": context.outlier_factor,
        "place within its worker": worker and (worker.place, worker.size),
        "average_states": averaged_states,
    }
    anchors = [anchor for fragment in fragments for anchor in fragment.anchors]
    local = [local_tensor(tensor) for tensor in fixed.values()]
    for key, tensors in (("set of averaged tensors", anchors), ("set of fixed tensors", local)):
        mine[key] = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    require_same_shares(transport, model)
    require_equal_settings(transport, mine)  # last: workers that join compare these
    transport.broadcast([*anchors, *local])
    context.fixed.begin()
    for fragment in fragments:
        fragment.begin()


def require_equal_at_the_end(context: EngineContext, fragments: Sequence[Fragment]) -> None:
    """Compare what all ranks end with, also where a run had too few rounds for a check.

    Raises:
        ReplicaMismatchError: Names the ranks and the tensors that differ.
    """
    if not context.check_every_rounds:
        return
    transport = context.transport
    fixed = context.fixed.digest(context.check_every_rounds - 1)
    hashes = [replica_hash(fragment.anchors) for fragment in fragments]
    found = transport.gather_objects((hashes, fixed))
    for number, fragment in enumerate(fragments):
        require_equal(
            {rank: theirs[number] for rank, (theirs, _) in enumerate(found)},
            round_number=fragment.schedule.round,
            apart=functools.partial(names_apart, fragment.names, fragment.all_groups, transport),
            of_gradients=context.rule.sends_gradients,
        )
    context.fixed.compare([digest for _, digest in found], [1.0] * len(found))


def parameter_shapes(
    model: torch.nn.Module, *, apart: Container[str]
) -> list[tuple[str, tuple[int, ...], str, str]]:
    """Return what the ranks must have alike of each parameter."""
    kinds = {True: "trainable", False: "frozen"}
    return [
        (name, tuple(local_tensor(p).shape), str(p.dtype), kinds[p.requires_grad])
        for name, p in model.named_parameters()
        if plain_name(name) not in apart
    ]


def wire_format(transport: Transport) -> tuple[str, int, int] | None:
    """Return what the ranks must have alike of a transport's codec; None where it has none."""
    if getattr(transport, "chooses_codec", False):
        return "auto", 0, 0
    codec = getattr(transport, "codec", None)
    return codec and (codec.name, codec.granule, codec.encoded_bytes(2**16))


def require_equal_settings(transport: Transport, mine: dict[str, Any]) -> None:
    """Compare settings over the ranks; a collective call."""
    if transport.world_size < 2:
        message = "outer synchronisation needs at least two ranks; got world_size=1"
        hint = "start more ranks (fivefold train --nproc 2, torchrun --nproc-per-node 2)"
        raise ConfigurationError(message, hint=hint)
    for rank, other in enumerate(transport.gather_objects(mine)):
        for key, value in mine.items():
            if other[key] != value:
                message = f"rank {rank} has another {key} than rank {transport.rank}"
                theirs, ours = other[key], value
                if isinstance(ours, list):
                    pairs = itertools.zip_longest(theirs, ours, fillvalue="nothing")
                    theirs, ours = next((a, b) for a, b in pairs if a != b)
                message += f": {theirs!r:.90} instead of {ours!r:.90}"
                hint = "all ranks must use the same model, rule and options"
                raise ConfigurationError(message, hint=hint)
