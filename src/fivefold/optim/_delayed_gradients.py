"""Delayed gradients: the all-reduce of a step's gradients runs behind the next step.

The part of the engine that swaps gradients, and the hooks that put it before the inner optimizer's
step.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import FlatGroup, Piece
from fivefold.optim._fragment import Fragment
from fivefold.optim._merge import MergeTask
from fivefold.optim._rules.delayed_gradients import DelayedGradients
from fivefold.optim._shards import local_tensor
from fivefold.optim._state import InAllReduce
from fivefold.optim._update import PieceStatistics, all_finite, each_finite

_UNFUSE = "call scaler.unscale_(optimizer) before scaler.step(optimizer), or use fused=False"


class GradientFragment(Fragment):
    """A fragment whose payload is the gradient, whose anchor is what the parameters are.

    Its momentum, where the rule extrapolates, is the last update u.
    """

    _landed: InAllReduce | None = None
    _has_own = False
    # How often each buffer was written when a swap found them all finite; None where it did not.
    _writes_when_finite: list[int] | None = None

    @torch.no_grad()
    def swap(self, *, own: bool) -> None:
        """Put the mean that arrived, or nothing, where the gradients are, which are to be sent.

        Without ``own`` the gradients do not count.
        """
        if self._in_flight is not None:
            self._landed = super()._arrive()
        reading = None if self._landed is None else self._landed.reading
        total = 0.0 if reading is None else reading.total_weight
        measured = PieceStatistics()
        for group in self.groups:
            gradients = [_gradient(parameter) for parameter in group.tensors]
            for piece in group.pieces(of=gradients):
                _swap(piece, scale=1.0 / total if total else 0.0, own=own)
                measured.look_at(piece.payload)
            if total:
                self._share_rows(gradients)
        if reading is not None:
            self._frozen.agree(reading)
            for parameter in self._frozen.held:
                parameter.grad = None
        self._has_own = own
        buffers = PieceStatistics()
        for group in self.averaged:
            buffers.look_at_all(group.parts())
        self._finite, buffers_are_finite = each_finite(measured, buffers)
        self._writes_when_finite = self._writes_of_buffers() if buffers_are_finite else None
        if self._first_non_finite():  # then the parameters may be as bad
            self.write_anchor()
        if not total:
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Leave the parameters without gradients."""
        for parameter in (parameter for group in self.groups for parameter in group.tensors):
            parameter.grad = None

    def _arrive(self) -> InAllReduce:
        landed, self._landed = self._landed, None
        return super()._arrive() if landed is None else landed

    @torch.no_grad()
    def _merge(
        self, landed: InAllReduce | None, *, send: bool, settles: bool, waits: bool = False
    ) -> None:
        """Follow the optimizer's step with the anchor; what is sent is in the payload already."""
        del waits
        rule = self._shared.rule
        assert isinstance(rule, DelayedGradients)
        coefficients = None if landed is None else self._coefficients(landed)
        share = rule.extrapolation * min(1.0, (self.schedule.round - 1) / rule.ramp_steps)
        if coefficients is not None:
            for piece in self._pieces(of=self.groups):
                _follow(piece, share=share)
        if send and not self._has_own:
            self._state.weight = 0.0
        weight = self._weight() if send else 1.0
        if weight != 1.0:
            for group in self.groups:
                group.payload.mul_(weight)
        self._frozen.hold(None, send=send)
        task = MergeTask(
            rule=rule, coefficients=coefficients, send=send, settles=settles, weight=weight
        )
        # What a swap found finite and nothing has written since need not be waited for again: a
        # mean that arrives is finite, and so is what it makes of finite values. (A forward in
        # training mode behind the optimizer's step would not be seen: its writes are not counted.)
        # Where there is nothing to wait for they are looked at again.
        waits = any(tensor.is_cuda for group in self.averaged for tensor in group.tensors)
        known_finite = waits and self._writes_when_finite == self._writes_of_buffers()
        averaged = self._average(task, landed)
        buffers = (tensor for group in self.averaged for tensor in group.tensors)
        self._share_rows(self.tensors() if share else buffers)
        if coefficients is not None:
            elements = sum(group.anchor.numel() for group in self.groups)
            self._shared.meter.add_merge(gap=1.0, clipped=0, elements=elements)
        self._finite = self._finite and (known_finite or all_finite(averaged))

    def _writes_of_buffers(self) -> list[int]:
        return [_writes(tensor) for group in self.averaged for tensor in group.tensors]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.layout != torch.strided:
        message = "a parameter has a sparse gradient, which delayed gradients cannot send"
        raise ConfigurationError(message, hint="make the embedding with sparse=False")
    return parameter.grad


def _swap(piece: Piece, *, scale: float, own: bool) -> None:
    """Exchange payload and gradient; ``local`` is the gradient here."""
    mean = torch.mul(piece.payload, scale, out=piece.scratch)
    if own:
        piece.payload.copy_(piece.local)
    else:
        piece.payload.zero_()
    piece.local.copy_(mean)


def _follow(piece: Piece, *, share: float) -> None:
    """Carry the update on by ``share`` of its last change; the anchor is where it ends."""
    if piece.momentum is not None:
        update = torch.sub(piece.local, piece.anchor, out=piece.scratch)
        change = torch.sub(update, piece.momentum, out=piece.momentum)
        if share:
            piece.add(change.mul_(share))
        piece.momentum.copy_(update)
    piece.anchor.copy_(piece.local)


_LIVE: weakref.WeakSet[GradientHooks] = weakref.WeakSet()
_LOCK = threading.Lock()
_TORCH_OPTIMIZER = register_optimizer_step_pre_hook.__code__.co_filename


def _calling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a method while its object lives: an optimizer may outlive it."""
    kept: weakref.WeakMethod[Callable[..., Any]] = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> Any:
        alive = kept()
        return None if alive is None else alive(*arguments)

    return hook


def _steps_under_way(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps of an optimizer, and of its base classes, are on the stack."""
    # Torch wraps step() of each class whose object was made, to call its hooks, and calls no hook
    # behind a step that raised.
    count = 0
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no public way
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _TORCH_OPTIMIZER:
            count += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count


class GradientHooks:
    """Puts the swap before the inner optimizers' steps, and does the steps that a loop left out.

    A loop with a gradient scaler skips a step whose gradients are not finite; the mean of the
    others must be applied there all the same, or the replicas would part.
    """

    def __init__(
        self,
        rule: DelayedGradients,
        optimizers: Sequence[torch.optim.Optimizer],
        fragments: Sequence[Fragment],
        *,
        look: Callable[[Iterable[FlatGroup]], Mapping[str, torch.Tensor]],
    ) -> None:
        self._max_norm = rule.max_norm
        self._look = look  # for parameters that are not known yet
        self._optimizers = list(optimizers)
        self._all = fragments  # the engine's own list, which grows with late parameters
        self._swapped = False
        self._stepping = False
        self._ever_stepped = False
        self._stepped: list[torch.optim.Optimizer] = []
        self._running: torch.optim.Optimizer | None = None
        self._stranger: torch.optim.Optimizer | None = None
        self._ended = False  # by finalize(), until the next step
        # The gradients that a swap has left, by parameter, and how often each was written by then.
        self._left: dict[int, tuple[weakref.ref[torch.Tensor] | None, int]] = {}
        self._handles: list[RemovableHandle] = []
        for optimizer in self._optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                message = "LBFGS evaluates several gradients in a step, of which one would be sent"
                raise ConfigurationError(message, hint="use another optimizer, or DelayCorrected")
            self._handles.append(optimizer.register_step_pre_hook(_calling(self.before_step)))
            self._handles.append(optimizer.register_step_post_hook(_calling(self.after_step)))
        strangers = _calling(self.note_stranger), _calling(self.require_known)
        self._handles.append(register_optimizer_step_pre_hook(strangers[0]))
        self._handles.append(register_optimizer_step_post_hook(strangers[1]))
        mine = self._parameters()
        with _LOCK:
            for other in list(_LIVE):  # when one is collected is not the same on all ranks
                if not mine.isdisjoint(other._parameters()):  # noqa: SLF001 - its own
                    other.close()
            _LIVE.add(self)

    def _parameters(self) -> set[int]:
        return {id(p) for f in self._fragments() for g in f.groups for p in g.tensors}

    def note_stranger(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Remember another optimizer that begins to step, if it has parameters of the model."""
        own = any(optimizer is each for each in self._optimizers)
        # One may step within another, as the AdamW of a Muon does.
        if own or self._ended or self._stepping or self._stepped:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not held.isdisjoint(self._parameters()):
            self._stranger = optimizer

    def require_known(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse another optimizer that has stepped with this rank's own gradients."""
        if optimizer is not self._stranger:
            return
        self._stranger = None
        if not self._stepped:  # in its step none of ours took one, as in that of a wrapper
            message = f"{type(optimizer).__name__} was not given to OuterSync, and trains its model"
            hint = "give all optimizers at the start, or make a new OuterSync for a new one"
            raise ConfigurationError(message, hint=hint)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Swap before the step; where a closure computes the gradients, between the two."""
        # The step of its base class; a step that raised is no longer under way.
        within = optimizer is self._running and _steps_under_way(optimizer) > 1
        if within or self._stepping or (not self._in_flight and _only_makes_state(optimizer)):
            return None
        if any(optimizer is other for other in self._stepped):
            message = "optimizer.step() was called twice without OuterSync.step() between"
            raise ConfigurationError(message, hint="call OuterSync.step() after each step")
        self._stepped.append(optimizer)
        self._running = optimizer
        self._ended, self._ever_stepped = False, True
        _prepare_to_step(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._swap_for(optimizer)
            return None
        evaluated = False

        @functools.wraps(closure)
        def swapping() -> Any:
            nonlocal evaluated
            if evaluated:
                message = f"{type(optimizer).__name__} evaluates its closure more than once a step"
                hint = "of several gradients one would be sent; use DelayCorrected"
                raise ConfigurationError(message, hint=hint)
            evaluated = True
            loss = closure()
            self._swap_for(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], swapping, *args[2:]), kwargs
        return args, kwargs | {"closure": swapping}

    def after_step(self, *_: Any) -> None:
        """Note that the step, of its class or of a base class, is over."""
        self._running = None

    def _swap_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Swap before the first optimizer's step; refuse another that has gradients of its own."""
        if not self._swapped:
            self._swap(own=True)
            return
        held = (p for group in optimizer.param_groups for p in group["params"])
        if any(not _is_as_left(p.grad, *self._left.get(id(p), (None, 0))) for p in held):
            message = (
                f"the gradients of {type(optimizer).__name__} have changed since the first "
                "optimizer's step: what it would step with is this rank's alone"
            )
            hint = (
                "run every backward pass, unscale and clip before the first optimizer's step; for "
                "optimizers that alternate (a GAN) use DelayCorrected"
            )
            raise ConfigurationError(message, hint=hint)

    def complete(self) -> None:
        """Take the step with what arrived, before a launch, where the loop took none."""
        if not self._swapped:
            if not self._ever_stepped and any(
                fragment.has_moved(parameters_alone=True) for fragment in self._fragments()
            ):
                message = "the parameters moved, but none of the optimizers took a step"
                hint = (
                    "give the optimizer whose step() is called (not one that steps in hooks of the "
                    "backward pass), or use DelayCorrected"
                )
                raise ConfigurationError(message, hint=hint)
            self._step_with_what_arrived()
        elif len(self._stepped) < len(self._optimizers):
            message = f"{len(self._stepped)} of {len(self._optimizers)} optimizers took this step"
            raise ConfigurationError(message, hint="step all of them, or none, before sync.step()")
        self._swapped = False
        self._stepped.clear()
        self._running = None

    def close(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def drain(self) -> None:
        """Apply the gradient in flight, if there is one."""
        if self._in_flight:
            self._step_with_what_arrived()
            self._swapped = False
            self._stepped.clear()
        self._ended = True

    @property
    def _in_flight(self) -> bool:
        return any(each.schedule.in_flight_round is not None for each in self._all)

    def require_between_steps(self) -> None:
        """Refuse to save between ``optimizer.step()`` and ``OuterSync.step()``."""
        if self._swapped:
            message = "the gradient of this step has not been sent yet"
            raise ConfigurationError(message, hint="call OuterSync.step() after optimizer.step()")

    def _step_with_what_arrived(self) -> None:
        self._swap(own=False)
        self._stepping = True
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            self._stepping = False
        for fragment in self._fragments():
            fragment.forget_gradients()

    def _swap(self, *, own: bool) -> None:
        for parameter in self._look(g for f in self._fragments() for g in f.all_groups).values():
            parameter.grad = None  # this rank's alone, until all ranks have adopted it
        for fragment in self._fragments():
            fragment.swap(own=own)
        self._swapped = True
        if self._max_norm is not None:
            parameters = [p for f in self._fragments() for g in f.groups for p in g.tensors]
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
        if len(self._optimizers) > 1:
            held = (p for each in self._optimizers for g in each.param_groups for p in g["params"])
            self._left = {id(p): _as_left(p.grad) for p in held}

    def _fragments(self) -> list[GradientFragment]:
        return [each for each in self._all if isinstance(each, GradientFragment)]


def _as_left(gradient: torch.Tensor | None) -> tuple[weakref.ref[torch.Tensor] | None, int]:
    return (None, 0) if gradient is None else (weakref.ref(gradient), _writes(gradient))


def _is_as_left(
    gradient: torch.Tensor | None, left: weakref.ref[torch.Tensor] | None, writes: int
) -> bool:
    if gradient is None or left is None:
        return gradient is None and left is None
    return left() is gradient and _writes(gradient) == writes


def _writes(tensor: torch.Tensor) -> int:
    """Return torch's count of the operations that have written into a tensor."""
    return tensor._version + local_tensor(tensor)._version  # noqa: SLF001 - as torch's own hooks


def _prepare_to_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take the step with the mean; refuse one that steps when it cannot."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch has no public name for it
        message = "the optimizer steps within the backward pass, before all gradients are there"
        raise ConfigurationError(message, hint="step after backward(), or use DelayCorrected")
    if getattr(optimizer, "grad_scale", None) is not None:
        message = "a gradient scaler leaves its scale to this fused optimizer"
        raise ConfigurationError(message, hint=_UNFUSE)
    # A scaler lets a fused optimizer skip where this rank's own gradient is not finite. What it
    # steps with is the mean of those that were, on every rank.
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, torch.Tensor):
        optimizer.found_inf = torch.zeros_like(found_inf)  # type: ignore[attr-defined]


def _only_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is a loader's step: it makes the optimizer's state and moves nothing."""
    groups = optimizer.param_groups
    if any(float(group.get("lr", 1.0)) != 0 for group in groups):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return all(not bool(local_tensor(gradient).any()) for gradient in gradients)
