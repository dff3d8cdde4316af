"""What communicates beside the engine: modules and optimizers that reach ranks of other workers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Container, Iterable, Sequence
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
    """Finds optimizers whose own ``step()`` communicates with other workers.

    One that shares its matrices out over the ranks, or averages gradients, makes all workers take
    the same step, or mixes those of different rounds. Torch counts the collectives of each group;
    those of an optimizer's first steps are looked at. What a rank has seen it announces with its
    next round, so that all ranks end together.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], *, others: Collection[int]
    ) -> None:
        self._others = others
        self._kinds = [type(optimizer).__name__ for optimizer in optimizers]
        self._before: dict[int, dict[dist.ProcessGroup, int]] = {}  # of each optimizer in a step
        self._depths = [0] * len(optimizers)
        self._steps = [0] * len(optimizers)
        self._seen = [0] * len(optimizers)
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(self)  # an optimizer may outlive the engine

        def watch(optimizer: torch.optim.Optimizer, number: int) -> None:
            def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                # A closure is the loop's own: it may sum what it logs.
                closure = args[1] if len(args) > 1 else kwargs.get("closure")
                if (watch := me()) is not None:
                    watch.begin(number, by_itself=closure is None)

            def after(*_: Any) -> None:
                if (watch := me()) is not None:
                    watch.end(number)

            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))

        for number, optimizer in enumerate(optimizers if others else ()):
            watch(optimizer, number)

    def begin(self, number: int, *, by_itself: bool) -> None:
        """Note how many collectives there have been before a step."""
        self._depths[number] += 1
        if self._depths[number] == 1:  # and not the step of a base class, within this one
            watched = by_itself and self._steps[number] < _STEPS_WATCHED
            self._before.pop(number, None)  # of a step that raised
            if watched:
                self._before[number] = self._collectives()

    def end(self, number: int) -> None:
        """Look at how many there have been since."""
        self._depths[number] -= 1
        if self._depths[number] > 0 or number not in self._before:
            return
        before = self._before.pop(number)
        now = self._collectives().items()
        self._steps[number] += 1
        self._seen[number] += any(count != before.get(group, count) for group, count in now)

    def announced(self) -> float:
        """Return the number, from 1, of an optimizer that has been seen to; 0 for none."""
        self._depths = [0] * len(self._depths)  # a step that raised has no end
        return float(next((n for n, s in enumerate(self._seen, start=1) if s >= _TIMES), 0))

    def require_none(self, announced: Sequence[float]) -> None:
        """Refuse what any rank has announced, on all ranks alike.

        Raises:
            ConfigurationError: Names the optimizer and the ranks.
        """
        ranks = [rank for rank, number in enumerate(announced) if number]
        if ranks:
            name = self._kinds[int(announced[ranks[0]]) - 1]
            message = f"{name} communicates in its step(), with other workers too, on ranks {ranks}"
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
