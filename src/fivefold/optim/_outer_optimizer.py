"""Any ``torch.optim`` optimizer as the outer optimizer.

One parameter of it is one parameter of the model (a view of the flat anchor, in its shape), so
optimizers that look at shapes (Muon, Adafactor) see what they expect.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.errors import ConfigurationError
from fivefold.optim._rules.outer_optimizer import OuterOptimizer


class OuterOptimizerStep:
    """The optimizer of one fragment, on views of its anchors."""

    def __init__(
        self,
        rule: OuterOptimizer,
        anchors_and_gradients: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._rule = rule
        self._parameters = []
        for anchor, gradient in anchors_and_gradients:
            parameter = torch.nn.Parameter(anchor)
            parameter.grad = gradient
            self._parameters.append(parameter)
        self._rounding: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if all(parameter.device.type == "cpu" for parameter in self._parameters):
            self._rounding = SeparateRounding()  # type: ignore[no-untyped-call] # torch
        try:
            self._optimizer = self._fresh()
        except (TypeError, ValueError) as error:
            message = f"optimizer={rule.optimizer!r} refuses the model's parameters: {error}"
            hint = "some optimizers take matrices only; use an elementwise one, such as AdamW"
            raise ConfigurationError(message, hint=hint) from error
        self.steps = 0

    def _fresh(self) -> torch.optim.Optimizer:
        optimizer = self._rule.optimizer(self._parameters, **self._rule.options)
        if isinstance(self._rounding, SeparateRounding):
            for group in optimizer.param_groups:  # other ways to the same numbers
                group.update({name: False for name in ("foreach", "fused") if name in group})
        return optimizer

    def step(self) -> None:
        """Move the anchors by what is in the gradients."""
        with self._rounding:
            self._optimizer.step()
        self.steps += 1

    def entries(self) -> list[dict[str, Any]]:
        """Return each parameter's state; its structure is the same before the first step."""
        optimizer = self._optimizer
        if not self.steps:  # one that has moved copies
            copies = [torch.nn.Parameter(torch.zeros_like(p)) for p in self._parameters]
            for each in copies:
                each.grad = torch.zeros_like(each)
            optimizer = self._rule.optimizer(copies, **self._rule.options)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        return [state.get(index, {}) for index in range(len(self._parameters))]

    def load(self, steps: int, entries: Sequence[dict[str, Any]]) -> None:
        """Continue from the steps and the ``entries()`` of the same rule and shapes."""
        self.steps = int(steps)
        fresh = self._fresh()
        if self.steps:
            whole = fresh.state_dict()
            # Copies: torch keeps the tensors that it is given, and later steps write into them.
            whole["state"] = copy.deepcopy(dict(enumerate(entries[: len(self._parameters)])))
            fresh.load_state_dict(whole)
        self._optimizer = fresh


_ATEN = torch.ops.aten


class SeparateRounding(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch
    """Carry out torch's fused elementwise operations as single ones, each rounded by itself.

    Anchors then stay equal bit for bit across processors, if the optimizer is an elementwise one of
    ``torch.optim`` in its plain form: ``foreach`` and ``fused`` ones have operations that are not
    covered. Sums over elements and matrix products are left as they are.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        options = kwargs or {}
        in_place = _IN_PLACE.get(func)
        if in_place is not None:
            return in_place(*args, **options)
        out_of_place = _OUT_OF_PLACE.get(func)
        if out_of_place is not None:
            return out_of_place(args[0].clone(), *args[1:], **options)
        return func(*args, **options)


def _add_(x: torch.Tensor, other: Any, *, alpha: float = 1) -> torch.Tensor:
    return x.add_(other if alpha == 1 else other * alpha)


def _sub_(x: torch.Tensor, other: Any, *, alpha: float = 1) -> torch.Tensor:
    return x.sub_(other if alpha == 1 else other * alpha)


def _addcmul_(x: torch.Tensor, a: Any, b: Any, *, value: float = 1) -> torch.Tensor:
    return x.add_((a * b).mul_(value))


def _addcdiv_(x: torch.Tensor, a: Any, b: Any, *, value: float = 1) -> torch.Tensor:
    return x.add_((a / b).mul_(value))


def _lerp_(x: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    return x.add_((end - x).mul_(weight))


_IN_PLACE: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.add_.Tensor: _add_,
    _ATEN.sub_.Tensor: _sub_,
    _ATEN.addcmul_.default: _addcmul_,
    _ATEN.addcdiv_.default: _addcdiv_,
    _ATEN.lerp_.Scalar: _lerp_,
    _ATEN.lerp_.Tensor: _lerp_,
}
_OUT_OF_PLACE: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.add.Tensor: _add_,
    _ATEN.sub.Tensor: _sub_,
    _ATEN.addcmul.default: _addcmul_,
    _ATEN.addcdiv.default: _addcdiv_,
    _ATEN.lerp.Scalar: _lerp_,
    _ATEN.lerp.Tensor: _lerp_,
}
