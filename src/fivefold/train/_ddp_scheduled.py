"""Data parallelism whose gradients are sent in a planned order: ``[tasks]`` of the trainer.

``fivefold.tasks.ScheduledReduction`` sends; here it is given the trainer's optimizer, one
parameter at a time, and its times become the run's spans. The order is planned after some
measured steps. Sums do not depend on the order: a run's parameters are those of the same run with
another order, bit for bit, and with two ranks those of plain DDP.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, cast

import torch

from fivefold.tasks import ScheduledReduction
from fivefold.train._ddp import DataParallelMethod
from fivefold.train._methods import CommunicationTotals
from fivefold.train._spans import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fivefold.runs.ranks import Ranks
    from fivefold.train._tasks_config import TasksConfig

_MIB = 2**20


class _OneParameter:
    """The trainer's optimizer for one parameter: its group's settings, its own state."""

    def __init__(self, owner: ScheduledDataParallelMethod, parameter: torch.nn.Parameter) -> None:
        self._owner, self._parameter = owner, parameter
        whole = owner.optimizer
        self._number = next(
            number
            for number, group in enumerate(whole.param_groups)
            if any(parameter is member for member in group["params"])
        )
        kind = cast("Any", type(whole))
        group = whole.param_groups[self._number]
        self._part: torch.optim.Optimizer = kind([{**group, "params": [parameter]}])

    def step(self) -> None:
        """Update the parameter; nothing while the run has not begun."""
        if not self._owner.armed:
            return
        # A resume puts other mappings there, a schedule another rate.
        whole = self._owner.optimizer
        self._part.state = whole.state
        group = whole.param_groups[self._number]
        settings = {name: value for name, value in group.items() if name != "params"}
        self._part.param_groups[0].update(settings)
        self._part.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Back to nothing for the next pass."""
        self._part.zero_grad(set_to_none=set_to_none)


class ScheduledDataParallelMethod(DataParallelMethod):
    """DDP whose buckets go in chunks, in an order that was planned from measurements.

    Args:
        model: The bare module; rank 0's parameters are broadcast.
        ranks: The ranks.
        tasks: Table ``[tasks]``.
        optimizer: The inner optimizer.

    Raises:
        CommunicationError: A peer died or did not answer in time.
        UnsupportedError: The model is not on CPU.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        ranks: Ranks,
        tasks: TasksConfig,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._tasks, self.optimizer = tasks, optimizer
        self.armed = False  # the warm-up's gradients are dropped
        self._steps = 0
        super().__init__(model, ranks=ranks)

    def _wrapping(self) -> dict[str, Any]:
        bucket = {"bucket_cap_mb": self._tasks.bucket / _MIB} if self._tasks.bucket else {}
        return {"gradient_as_bucket_view": True, **bucket}

    def _attach(self) -> None:
        def part(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
            (parameter,) = parameters
            return cast("torch.optim.Optimizer", _OneParameter(self, parameter))

        self._reduction = ScheduledReduction(
            self._wrapped,
            update=part if self._tasks.overlap_forward else None,
            chunk_bytes=self._tasks.chunk or None,
            credit=self._tasks.credit,
            timeout_s=self._ranks.timeout.total_seconds(),
        )

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One pass whose gradients are dropped, as for plain DDP."""
        super().warm_up(inputs, targets)
        self._finish("the gradients of the warm-up")
        self._reduction.sent()
        self._reduction.waited()
        self._spans.clear()
        self.totals = CommunicationTotals()
        self.armed = True

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass; with ``overlap_forward`` gradients may arrive after it.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        # Nothing may be left of the pass before when gradients are added to.
        self._finish("the gradients of the step before")
        begun_s = time.perf_counter()
        super().backward(loss)
        handed_over_s = self._reduction.handed_over_s
        if not self._tasks.overlap_forward and handed_over_s > begun_s:
            self._wait(handed_over_s, time.perf_counter())

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip where all gradients are there; the norm of gradients that are not is not a number.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self._tasks.overlap_forward:
            return torch.tensor(float("nan"))
        return super().clip_gradients(max_norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update what has arrived; the rest when its layer's next forward pass needs it.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if not self._tasks.overlap_forward:
            super().update(optimizer)
            return
        with self._ranks.guard("the all-reduce of the gradients"):
            self._reduction.step()

    def after_step(self) -> None:
        """Plan the order once it was measured long enough; a collective call then."""
        self._steps += 1
        if self._tasks.ordering == "priority" and self._steps == self._tasks.plan_after_steps:
            with self._ranks.guard("planning the order of the gradients"):
                self._reduction.plan(ordering="priority", chunk_bytes=self._tasks.chunk or None)

    def finalize(self) -> None:
        """Apply what is on its way.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        self._finish("the last gradients")

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Judge parameters to which all gradients were applied."""
        self._finish("the gradients before a validation")
        # Within the validation's own span, so that they are no spans of their own.
        self.totals.exposed_wait_s += sum(end - start for start, end in self._reduction.waited())
        with super().evaluation():
            yield

    def state_dict(self) -> dict[str, Any]:
        """The totals; what is on its way is applied first."""
        self._finish("the gradients before a checkpoint")
        return super().state_dict()

    def take_spans(self) -> list[Span]:
        """Spans since the last call: a flight per chunk, a wait where this rank stood still."""
        landed = [
            Span(
                lane="flight",
                name=f"all-reduce bucket {chunk.bucket}, chunk {chunk.chunk}",
                start_s=chunk.start_s,
                end_s=chunk.end_s,
                details={
                    "payload_bytes": chunk.size_bytes,
                    "sent_bytes": self._ring_bytes(chunk.size_bytes),
                },
            )
            for chunk in self._reduction.sent()
        ]
        self._count(landed)
        for start_s, end_s in self._reduction.waited():
            self._wait(start_s, end_s)
        return super().take_spans()

    def _wait(self, start_s: float, end_s: float) -> None:
        self.totals.exposed_wait_s += end_s - start_s
        self._spans.append(Span(lane="wait", name="gradients", start_s=start_s, end_s=end_s))

    def _finish(self, what: str) -> None:
        with self._ranks.guard(what):
            self._reduction.finish()
