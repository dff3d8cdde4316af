"""Plain ``DistributedDataParallel``, watched: the baseline of every comparison.

A communication hook does exactly what DDP does without one (divide by the number of ranks,
all-reduce the bucket) and notes when each bucket was launched and when it was complete. With a
codec the bucket travels in half precision, as with torch's own compression hooks. The
exposed wait of a step is the time from the last bucket's launch to the return of backward:
earlier buckets travel while gradients are still being computed. This module knows nothing of
data or files.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fivefold.runs.ranks import Ranks
from fivefold.tasks import ScheduledReduction
from fivefold.train._expert_ranks import ExpertRanks
from fivefold.train._methods import CommunicationTotals, LanguageModel, Method
from fivefold.train._mixture import Mixtures
from fivefold.train._spans import Span, union_s
from fivefold.train.config import TasksConfig

_MIB = 2**20
_WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Loss(torch.nn.Module):
    """DDP acts on ``forward`` only, so the loss is made a module's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, so that DDP sees one forward."""
        return cast("LanguageModel", self.model).loss(inputs, targets)


def _no_buffers_in_forward() -> dict[str, Any]:
    """Keep DDP from sending buffers, which are constant tables, in every forward pass."""
    known = inspect.signature(DistributedDataParallel).parameters
    # torch 2.13 renamed the argument and warns about the old name.
    renamed = "forward_sync_buffers" in known
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


class DataParallelMethod(Method):
    """Gradients averaged over the ranks in every backward pass."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        ranks: Ranks,
        codec: str = "fp32",
        experts: ExpertRanks | None = None,
    ) -> None:
        super().__init__(model)
        self._ranks, self._experts = ranks, experts
        self._mixtures: Mixtures | None = getattr(model, "mixtures", None)
        shares = set(getattr(model, "sharded_parameters", []))
        named = list(model.named_parameters())
        self._shares = [parameter for name, parameter in named if name in shares]
        self._replicated = [parameter for name, parameter in named if name not in shares]
        self._wire = _WIRES[codec]
        self._landed: list[Span] = []
        self._last_launch_s: float | None = None
        # A group of its own, so that its timeout is the run's also where the caller made the
        # default group.
        with ranks.guard("setting up DistributedDataParallel"):
            self._group = dist.new_group(timeout=ranks.timeout)
            devices = [ranks.device.index] if ranks.device.type == "cuda" else None
            loss = _Loss(model)
            # DDP's own way to leave parameters alone; private only in its name.
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]  # noqa: SLF001 - untyped in torch
                loss, [f"model.{name}" for name in shares]
            )
            self._wrapped = DistributedDataParallel(
                loss,
                device_ids=devices,
                process_group=self._group,
                **_no_buffers_in_forward(),
                **self._wrapping(),
            )
            self._attach()

    def _wrapping(self) -> dict[str, Any]:
        """Return further arguments of DDP."""
        return {}

    def _attach(self) -> None:
        """Take over what DDP does with a bucket of gradients."""
        # A lambda: DDP inspects a hook's annotations and refuses postponed ones, which are text.
        self._wrapped.register_comm_hook(None, lambda state, bucket: self._launch_bucket(bucket))  # noqa: ARG005 - DDP asks for these two names

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Run one forward and backward, and drop the gradients.

        DDP regroups its buckets after its first backward pass. gloo's ring sums in an order
        that depends on the bucket's layout, so with three ranks or more a resumed run would
        round differently in its first step than the run that was not interrupted.
        """
        counted = None if self._mixtures is None else self._mixtures.state_dict()
        totals, self.totals = self.totals, CommunicationTotals()
        self.backward(self.loss(inputs, targets))
        for parameter in self._wrapped.parameters():
            parameter.grad = None
        if self._mixtures is not None and counted is not None:
            self._mixtures.load_state_dict(counted)
        if self._experts is not None:
            self._experts.take_calls()
        self._spans.clear()
        self.totals = totals

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the forward pass of one micro-batch."""
        with self._ranks.guard("the broadcast of the bucket layout"):
            result: torch.Tensor = self._wrapped(inputs, targets)
        return result

    def accumulating(self) -> AbstractContextManager[None]:
        """Hold the all-reduce back until the last micro-batch."""
        return self._wrapped.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass; return when the averaged gradients are there."""
        self._last_launch_s = None
        with self._ranks.guard("the all-reduce of the gradients"):
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if self._last_launch_s is not None:
            self._wait(self._last_launch_s, time.perf_counter())
            landed, self._landed = self._landed, []
            self._count(landed)
        if self._experts is not None and self._wrapped.require_backward_grad_sync:
            self._reduce_experts(self._experts)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all parameters of all ranks that share experts."""
        if self._experts is None:
            return torch.nn.utils.clip_grad_norm_(self._replicated, max_norm)
        common, shares = (
            [parameter.grad for parameter in parameters if parameter.grad is not None]
            for parameters in (self._replicated, self._shares)
        )
        return self._experts.clip(common, shares, max_norm=max_norm)

    def after_step(self) -> None:
        """Count what travelled between experts."""
        if self._experts is None:
            return
        for call in self._experts.take_calls():
            size = {"payload_bytes": call.payload_bytes, "sent_bytes": call.sent_bytes}
            self._note(f"experts: {call.name}", call.start_s, call.end_s, **size)
            if self._mixtures is not None:
                seconds = call.end_s - call.start_s
                self._mixtures.count_exchange(**size, seconds=seconds)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Judge the parameters, which are equal on all ranks; its exchanges are no training."""
        try:
            yield
        finally:
            if self._experts is not None:
                self._experts.take_calls()

    def _wait(self, start_s: float, end_s: float) -> None:
        self.totals.exposed_wait_s += end_s - start_s
        self._spans.append(Span(lane="wait", name="gradients", start_s=start_s, end_s=end_s))

    def _count(self, landed: Sequence[Span]) -> None:
        self.totals.in_flight_s += union_s(landed)
        for span in landed:
            self.totals.add(in_flight_s=0.0, waited_s=0.0, **span.details)
        self._spans += landed

    def _reduce_experts(self, experts: ExpertRanks) -> None:
        start_s = time.perf_counter()
        gradients = [share.grad for share in self._shares if share.grad is not None]
        payload = experts.reduce(gradients, wire=self._wire)
        if payload:
            replicas = self._ranks.world_size // experts.group.size
            width = 1.0 if self._wire is None else self._wire.itemsize / 4
            sent = int(2 * (replicas - 1) * payload * width) // replicas
            now_s = time.perf_counter()
            self._note("experts' gradients", start_s, now_s, payload_bytes=payload, sent_bytes=sent)

    def _note(self, name: str, start_s: float, end_s: float, **size: int) -> None:
        """Record a blocking exchange: all of it is a wait."""
        span = Span(lane="in_flight", name=name, start_s=start_s, end_s=end_s, details=size)
        self._spans += [Span(lane="wait", name=name, start_s=start_s, end_s=end_s), span]
        self.totals.add(in_flight_s=end_s - start_s, waited_s=end_s - start_s, **size)

    def _ring_bytes(self, num_bytes: int) -> int:
        """Return what a ring all-reduce sends per rank; DDP's backend does not say."""
        world_size = self._ranks.world_size
        return 2 * (world_size - 1) * num_bytes // world_size

    def _launch_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        # Runs on the thread of backward.
        payload = bucket.buffer().div_(self._ranks.world_size)
        launched_s = time.perf_counter()
        self._last_launch_s = launched_s
        name = f"all-reduce bucket {bucket.index()}"
        wire = payload if self._wire is None else payload.to(self._wire)
        work = dist.all_reduce(wire, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective of a member returns its work"

        def landed(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # Runs on one of the backend's threads: an append is atomic, a sum would not be.
            (result,) = future.value()
            end_s = time.perf_counter()
            size = {"payload_bytes": payload.nbytes, "sent_bytes": self._ring_bytes(wire.nbytes)}
            span = Span(lane="in_flight", name=name, start_s=launched_s, end_s=end_s, details=size)
            self._landed.append(span)
            return result if self._wire is None else payload.copy_(result)

        result: torch.futures.Future[torch.Tensor] = work.get_future().then(landed)
        return result


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
        """Reset the gradient for the next pass."""
        self._part.zero_grad(set_to_none=set_to_none)


class ScheduledDataParallelMethod(DataParallelMethod):
    """DDP whose buckets go in chunks, in an order that was planned from measurements."""

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
        """Run one pass and drop the gradients, as for plain DDP."""
        super().warm_up(inputs, targets)
        self._finish("the gradients of the warm-up")
        self._reduction.sent()
        self._reduction.waited()
        self._spans.clear()
        self.armed = True

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass; with ``overlap_forward`` gradients may arrive after it."""
        # Nothing may be left of the pass before when gradients are added to.
        self._finish("the gradients of the step before")
        begun_s = time.perf_counter()
        super().backward(loss)
        handed_over_s = self._reduction.handed_over_s
        if not self._tasks.overlap_forward and handed_over_s > begun_s:
            self._wait(handed_over_s, time.perf_counter())

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip where all gradients are there; else their norm is not a number."""
        if self._tasks.overlap_forward:
            return torch.tensor(float("nan"))
        return super().clip_gradients(max_norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update what has arrived; the rest when its layer's next forward pass needs it."""
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
        """Apply what is on its way."""
        self._finish("the last gradients")

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Judge parameters to which all gradients were applied."""
        self._finish("the gradients before a validation")
        self._count_waits()
        with super().evaluation():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the totals; what is on its way is applied first."""
        self._finish("the gradients before a checkpoint")
        self._count_waits()
        self._count_sent()
        return super().state_dict()

    def _count_waits(self) -> None:
        """Count waits within a validation or a checkpoint, which has a span of its own."""
        self.totals.exposed_wait_s += sum(end - start for start, end in self._reduction.waited())

    def take_spans(self) -> list[Span]:
        """Return the spans since the last call: one per chunk, and waits."""
        self._count_sent()
        for start_s, end_s in self._reduction.waited():
            self._wait(start_s, end_s)
        return super().take_spans()

    def _count_sent(self) -> None:
        landed = [
            Span(
                lane="in_flight",
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

    def _finish(self, what: str) -> None:
        with self._ranks.guard(what):
            self._reduction.finish()
