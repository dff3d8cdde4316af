"""What communicates beside the engine: modules and optimizers that reach ranks of other workers."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Collection, Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from fivefold.errors import ConfigurationError
from fivefold.optim.transport import OWN_GROUP

_STEPS_WATCHED = 16
_TIMES = 2  # once may be another thread's, which saves a checkpoint


def require_local(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    others: Container[int],
) -> None:
    """Refuse modules and optimizers that communicate with ranks of other workers by themselves.

    Args:
        model: The model, whose modules may be wrapped in DistributedDataParallel.
        optimizers: The inner optimizers, which may be sharded ones.
        others: The ranks of other workers.

    Raises:
        ConfigurationError: Names the module or the optimizer.
    """
    parallel, norm = torch.nn.parallel.DistributedDataParallel, torch.nn.SyncBatchNorm
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, parallel):
            what = f"{name or 'the model'} is wrapped in DistributedDataParallel"
            found.append((what, module.process_group))
        elif isinstance(module, norm) and dist.is_initialized():
            what = f"{name or 'the model'} is a SyncBatchNorm, which sums its statistics"
            found.append((what, module.process_group or dist.group.WORLD))
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            what = "ZeroRedundancyOptimizer sends its part of the parameters to all ranks"
            found.append((what, getattr(optimizer, "process_group", None)))
    for what, group in found:
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        if any(rank in others for rank in ranks):
            message = f"{what}, over ranks {ranks}, at every step"
            hint = (
                "take it away (the running statistics of a BatchNorm are averaged with each round),"
                " or give it the ranks of one worker alone"
            )
            raise ConfigurationError(message, hint=hint)


class CommunicationWatch:
    """Refuses optimizers whose own ``step()`` communicates with other workers.

    One that shares its matrices out over the ranks, or averages gradients, makes all workers take
    the same step, or mixes those of different rounds. Torch counts the collectives of each group;
    those of an optimizer's first steps are looked at.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], *, others: Collection[int]
    ) -> None:
        self._others = others
        self._before: dict[dist.ProcessGroup, int] | None = None
        self._steps: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(self)  # an optimizer may outlive the engine

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            watch = me()
            if watch is not None:
                # A closure is the loop's own: it may sum what it logs.
                closure = args[1] if len(args) > 1 else kwargs.get("closure")
                watch.begin(optimizer, by_itself=closure is None)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            watch = me()
            if watch is not None:
                watch.end(optimizer)

        for optimizer in optimizers if others else ():
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))

    def begin(self, optimizer: torch.optim.Optimizer, *, by_itself: bool) -> None:
        """Note how many collectives there have been before a step."""
        watched = by_itself and self._steps[id(optimizer)] < _STEPS_WATCHED
        self._before = self._collectives() if watched else None

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at how many there have been since; refuse the second time.

        Raises:
            ConfigurationError: Names the optimizer and the ranks.
        """
        before, self._before = self._before, None
        if before is None:
            return
        key, now = id(optimizer), self._collectives()
        used = [group for group, count in now.items() if count != before.get(group, count)]
        self._steps[key] += 1
        self._seen[key] += bool(used)
        if used and self._seen[key] >= _TIMES:
            ranks = dist.get_process_group_ranks(used[0])
            name = type(optimizer).__name__
            message = f"{name} communicates in its step(), over ranks {ranks}, of other workers too"
            hint = (
                "take one that does not (MuonAdamW for a Muon that shares its matrices out), or "
                "give it the ranks of one worker alone"
            )
            raise ConfigurationError(message, hint=hint)

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _collectives(self) -> dict[dist.ProcessGroup, int]:
        found = {}
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():  # noqa: SLF001
            if not isinstance(group, dist.ProcessGroup):  # a group that this rank is not in
                continue
            if group.group_desc != OWN_GROUP and not ranks.keys().isdisjoint(self._others):
                with contextlib.suppress(RuntimeError):  # not every backend counts them
                    count: Any = group._get_sequence_number_for_group  # type: ignore[attr-defined]  # noqa: SLF001
                    found[group] = count()
        return found
