"""Experts that are one rank's alone, and whoever takes them for replicas.

What knows nothing of experts (a wrapper, an engine, a broadcast of a state) gives every rank those
of one of them: names and shapes are the same. Two ranks whose experts are the same bits show it. A
sample of each parameter travels with the counts of every forward; where two ranks' samples are
equal, all ranks compare whole parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import ConfigurationError, ReplicaMismatchError

_SAMPLED = 64  # numbers of a parameter
_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = (1 << 31) - 1  # prime; products of two residues fit int64
_HINT = (
    "call prepare_experts(model) before DistributedDataParallel, fully_shard or OuterSync, and "
    "load each rank's own state or the whole one; where experts are equal on purpose, make the "
    "group with AllToAllGroup(..., check_experts=False)"
)


def sample_of(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a number for each parameter, int64 [N]; no wait for the device."""
    parts = []
    for parameter in own.values():
        flat = parameter.detach().reshape(-1)
        part = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].float().view(torch.int32)
        places = torch.arange(1, len(part) + 1, device=part.device)
        parts.append((part.long() * places).sum())
    return torch.stack(parts)


def columns_alike(rows: list[list[int]]) -> list[int]:
    """Return the columns in which two rows have the same number."""
    columns = enumerate(zip(*rows, strict=True))
    return [n for n, column in columns if len(set(column)) < len(column)]


def require_own(
    own: Mapping[str, torch.Tensor],
    suspects: Collection[int],
    *,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Refuse parameters that are the same bits on two ranks; a collective call.

    Args:
        own: This rank's parameters by name.
        suspects: Which of them to compare; the same on all ranks.
        gather: Returns all ranks' numbers [P, N] from [N] of each.

    Raises:
        ReplicaMismatchError: Two ranks have the same experts, which differ among themselves.
    """
    names = [name for number, name in enumerate(own) if number in suspects]
    device = next(iter(own.values())).device
    mine = [(_hash(own[name]), _all_alike(own[name])) for name in names]
    told = gather(torch.tensor(mine, dtype=torch.int64, device=device).flatten()).tolist()
    for number, name in enumerate(names):
        first: dict[int, int] = {}
        for rank, row in enumerate(told):
            found, alike = row[2 * number : 2 * number + 2]
            if found in first and not alike:
                raise ReplicaMismatchError(
                    f"ranks {first[found]} and {rank} of the expert group have the same bits in "
                    f"experts.{name}: something took each rank's own experts for replicas",
                    hint=_HINT,
                )
            first.setdefault(found, rank)


def _hash(parameter: torch.Tensor) -> int:
    flat = parameter.detach().contiguous().reshape(-1)
    bits, found = flat.view(_INTEGERS[flat.element_size()]), 0
    for part in torch.split(bits, _CHUNK):
        places = torch.arange(1, len(part) + 1, device=part.device)
        found = (found * 31 + int((part.long() % _MODULUS * places % _MODULUS).sum())) % _MODULUS
    return found


def _all_alike(parameter: torch.Tensor) -> bool:
    """Return whether equal bits mean nothing: one number throughout, or each expert the same."""
    first = parameter.detach()[:1]
    one = first.reshape(-1)[:1]
    same = len(parameter) > 1 and torch.equal(parameter.detach(), first.expand_as(parameter))
    return same or bool((parameter.detach() == one).all())


_CHECKED: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()


def refuse_replicating(own: Mapping[str, torch.Tensor], members: Collection[int]) -> None:
    """Refuse a DistributedDataParallel around the layer that averages these parameters.

    It may have begun from other weights, so that no two ranks are equal, and pull all together.

    Args:
        own: This rank's parameters by name.
        members: The ranks that share the experts out, by the default group's numbers.

    Raises:
        ConfigurationError: They are not left out of it.
    """
    find = getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)
    wrapper = find()
    key = id(next(iter(own.values())))
    if wrapper is None or key in _CHECKED.setdefault(wrapper, set()):
        return
    averaged = set(dist.get_process_group_ranks(wrapper.process_group)) & set(members)
    wanted = {id(parameter) for parameter in own.values()}
    ignored = set(wrapper.parameters_to_ignore)
    for name, parameter in wrapper.module.named_parameters():
        if len(averaged) > 1 and id(parameter) in wanted and name not in ignored:
            raise ConfigurationError(
                f"DistributedDataParallel takes {name} for a replica, but each rank of the expert "
                "group has experts of its own there",
                hint="call prepare_experts(model) before wrapping the same model",
            )
    _CHECKED[wrapper].add(key)
