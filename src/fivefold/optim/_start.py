"""What is checked and agreed when an engine is made: arguments, workers, equal settings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.errors import ConfigurationError
from fivefold.optim._layout import require_countable
from fivefold.optim._rule import OuterRule
from fivefold.optim._shards import WorkerGroup, local_tensor, worker_group_of
from fivefold.optim._transport import Transport


def may_lose(transport: Transport) -> bool:
    """Return whether all-reduces of a transport may be lost, so that their work must be kept."""
    return bool(getattr(transport, "may_lose", False))


def find_worker(
    model: torch.nn.Module,
    shard_group: dist.ProcessGroup | DeviceMesh | None,
    *,
    rule: OuterRule,
    transport: Transport,
    timeout_s: float,
) -> WorkerGroup | None:
    """Find the ranks of this worker and give them the same plain tensors; None for one rank."""
    peers = getattr(transport, "global_ranks", None)
    worker = worker_group_of(model, shard_group, peers=peers, timeout_s=timeout_s)
    if worker is None:
        return None
    if may_lose(transport):
        message = "a worker of several ranks cannot use a transport that may lose a round"
        raise ConfigurationError(message, hint="use one rank for each worker, or no elastic")
    require_countable(model, rule)
    worker.broadcast([*model.parameters(), *model.buffers()])
    return worker


def parameter_shapes(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, local shapes and data types, for the comparison of the ranks."""
    named = model.named_parameters()
    return [(name, tuple(local_tensor(p).shape), str(p.dtype)) for name, p in named]


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
                hint = "all ranks must use the same model and the same rule"
                raise ConfigurationError(message, hint=hint)


def outer_device_of(name: str) -> torch.device | None:
    """Return where the outer state lives; None for beside the parameters."""
    if name not in {"same", "cpu"}:
        message = f"outer_device must be 'same' or 'cpu'; got {name!r}"
        raise ConfigurationError(message, hint="'cpu' saves device memory, 'same' is faster")
    return None if name == "same" else torch.device("cpu")


def require_usable(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, timeout_s: float, every: int
) -> None:
    """Refuse arguments of ``OuterSync`` that cannot work."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        message = "the model is wrapped in DistributedDataParallel, which communicates every step"
        raise ConfigurationError(message, hint="pass the bare module: OuterSync(model.module, ...)")
    if not isinstance(optimizer, torch.optim.Optimizer):
        message = f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}"
        raise ConfigurationError(message)
    if timeout_s <= 0:
        raise ConfigurationError(f"timeout_s must be positive; got {timeout_s}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        message = f"check_every_rounds must be an integer of at least 0; got {every!r}"
        raise ConfigurationError(message, hint="0 switches the replica check off")
