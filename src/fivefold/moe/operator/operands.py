"""Checks of an operator's operands: every mistake is named before anything is computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from fivefold.errors import ConfigurationError, DataError, UnsupportedError, require_one_of
from fivefold.moe.operator.activations import Activation
from fivefold.moe.routing.router import PLAIN_TYPES, is_plain

Precision = Literal["ieee", "tf32x3", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32x3", "tf32")
"""Arithmetic for float32, best first."""

_ID_TYPES = (torch.int32, torch.int64)
_FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_eager(tensors: tuple[Any, ...]) -> bool:
    """Return whether a call is just computed: nobody traces, compiles, counts or transforms it."""
    return (
        all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in tensors)
        and is_plain(tensors[0])
        and torch._C._len_torch_dispatch_stack() == 0  # noqa: SLF001 - no public name for it
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - as above
    )


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def as_autocast(first: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Cast all but float64 to the type of torch.autocast, as it does, where on for the first."""
    device, tensors = first.device.type, (first, *others)
    if not _autocasts(device):
        return tensors
    kind = torch.get_autocast_dtype(device)
    return tuple(
        t.to(kind)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def as_given(x: torch.Tensor) -> AbstractContextManager[object]:
    """Compute products in the type of their operands, also where torch.autocast is on."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if _autocasts(device) else nullcontext()


def check_forward_mode(tensors: tuple[Any, ...]) -> None:
    """Refuse derivatives in forward mode: torch would take those of a custom op for zeros."""
    mode: Any = torch.autograd.forward_ad  # untyped in torch
    if getattr(mode, "_current_level", -1) < 0 or torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and mode.unpack_dual(tensor).tangent is not None:
            message = "fused_moe has no derivative in forward mode"
            raise UnsupportedError(message, hint="use backward()")


def check_transforms(tensors: tuple[Any, ...]) -> None:
    """Refuse the transformations of torch.func, of which an opaque operator knows nothing."""
    active = torch._C._are_functorch_transforms_active  # noqa: SLF001 - no public name for it
    if torch.compiler.is_compiling() or not active():
        return
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - as above
    if any(isinstance(tensor, torch.Tensor) and wrapped(tensor) for tensor in tensors):
        message = "fused_moe does not work inside of torch.func's vmap, grad and the like"
        hint = "use backward(), with a batch folded into the tokens"
        raise UnsupportedError(message, hint=hint)


def check_operands(  # noqa: PLR0913 - the operator's own operands
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: Activation,
    b13: torch.Tensor | None,
    b2: torch.Tensor | None,
) -> None:
    """Check shapes, data types and devices, without looking at values."""
    biases = {"b13": b13, "b2": b2}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    _check_tensors(x=x, w13=w13, w2=w2, topk_ids=ids, topk_weights=weights, **given)
    if x.ndim != 2 or w13.ndim != 3 or w2.ndim != 3:
        raise ConfigurationError(
            f"x, w13 and w2 have shapes {tuple(x.shape)}, {tuple(w13.shape)}, {tuple(w2.shape)}",
            hint="they are [tokens, hidden], [experts, rows, hidden], [experts, hidden, inner]",
        )
    experts, hidden, inner = w2.shape
    if 0 in (experts, hidden, inner):
        raise ConfigurationError(
            f"w2 has shape {tuple(w2.shape)}: experts, hidden and inner size must be positive",
            hint="only the number of tokens may be 0",
        )
    expected = {
        "x": (x, (x.shape[0], hidden)),
        "w13": (w13, (experts, activation.width(inner), hidden)),
        "b13": (b13, (experts, activation.width(inner))),
        "b2": (b2, (experts, hidden)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{name} has shape {tuple(tensor.shape)}, but w2 {tuple(w2.shape)} and activation "
                f"{activation.name!r} make it {shape}",
                hint="a gated activation has 2 * inner rows in w13, gate rows first",
            )
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ConfigurationError(
            f"topk_ids has shape {tuple(ids.shape)}, topk_weights {tuple(weights.shape)}, x has "
            f"{x.shape[0]} tokens",
            hint="ids and weights are [tokens, top_k]",
        )
    if ids.dtype not in _ID_TYPES:
        raise ConfigurationError(f"topk_ids has dtype {ids.dtype}", hint="use int32 or int64")
    floats = {"x": x, "w13": w13, "w2": w2, **biases}
    _check_alike(x, floats)
    if weights.dtype not in _FLOAT_TYPES:
        raise ConfigurationError(f"topk_weights has dtype {weights.dtype}", hint="use float32")
    for name, tensor in {"topk_ids": ids, "topk_weights": weights, **floats}.items():
        if tensor is not None and tensor.device != x.device:
            raise ConfigurationError(
                f"{name} is on {tensor.device}, x on {x.device}", hint="move them to one device"
            )


def _check_tensors(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ConfigurationError(f"{name} is a {kind}", hint="it must be a torch.Tensor")


def _check_alike(x: torch.Tensor, floats: dict[str, torch.Tensor | None]) -> None:
    if x.dtype not in _FLOAT_TYPES:
        raise ConfigurationError(
            f"x has dtype {x.dtype}", hint="use bfloat16, float16, float32 or float64"
        )
    for name, tensor in floats.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise ConfigurationError(
                f"{name} has dtype {tensor.dtype}, x has {x.dtype}",
                hint="cast them to one type, or run under torch.autocast",
            )


def check_ids(ids: torch.Tensor, num_experts: int) -> None:
    """Check that experts exist and that no token has one twice; waits for the device."""
    if ids.numel() == 0:
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < -1 or largest >= num_experts:
        raise ConfigurationError(
            f"topk_ids holds {smallest if smallest < -1 else largest}, there are {num_experts} "
            "experts",
            hint="use 0 to experts - 1, and -1 for a dropped assignment",
        )
    ordered = torch.sort(ids, dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token = int(twice.any(dim=-1).nonzero()[0, 0])
        raise ConfigurationError(
            f"token {token} is routed to an expert twice: {ids[token].tolist()}",
            hint="the experts of a token are distinct",
        )


def check_values(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> None:
    """Do ``check_ids`` and check that the weights are numbers; waits for the device."""
    check_ids(ids, num_experts)
    if bool(torch.isnan(weights.detach().sum())):  # one pass where all is well
        bad = torch.isnan(weights)
        if bool(bad.any()):  # and not infinities of both signs
            token = int(bad.any(dim=-1).nonzero()[0, 0])
            raise DataError(
                f"topk_weights of token {token} hold NaN: {weights[token].tolist()}",
                hint="look for a diverged router before this call",
            )


def check_weight_on_input(top_k: int, *, weight_on_input: bool) -> None:
    """Check that tokens can take their weights with them."""
    if weight_on_input and top_k != 1:
        raise ConfigurationError(
            f"weight_on_input needs top_k 1; got {top_k}",
            hint="with more experts per token the weights belong to the outputs",
        )


def check_precision(precision: str) -> None:
    """Check the name of an arithmetic for float32."""
    require_one_of(precision, PRECISIONS, f"there is no precision {precision!r}")
