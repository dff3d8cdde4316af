"""Elementwise arithmetic that gives the same bits on all processors.

IEEE 754 fixes the result of one sum, product, quotient or square root. It leaves open whether
``a + b * c`` is rounded once (a fused multiply-add) or twice, and torch's kernels do the one or the
other by processor, and by whether an element falls into a whole vector or into the remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten


class SeparateRounding(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch
    """Carry out torch's fused elementwise operations as single ones, each rounded by itself.

    Covers the operations of the elementwise optimizers of ``torch.optim`` in their plain form
    (not ``foreach`` or ``fused``). Sums over elements and matrix products are left as they are.

    Examples:
        >>> x = torch.ones(3)
        >>> with SeparateRounding():
        ...     x.addcmul_(x, x, value=0.5)
        tensor([1.5000, 1.5000, 1.5000])
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
