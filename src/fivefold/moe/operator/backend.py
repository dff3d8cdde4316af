"""The registry of backends: what can compute the operator here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe.kernels.launch import (
    DTYPES,
    backward_fused,
    forward_fused,
    forward_split,
    missing_fused,
)
from fivefold.moe.kernels.workspace import Workspace
from fivefold.moe.operator._grouped import backward_grouped, forward_grouped
from fivefold.moe.operator._recorded import recorded_grouped


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute the operator.

    Attributes:
        name: What ``fused_moe(backend=...)`` takes.
        forward: The operator; what the backward needs goes to ``hidden``.
        backward: Its gradients, from ``hidden`` where that is not None.
        recorded: ``forward`` with a record for autograd of its own, for plain tensors outside of
            graphs; None: the custom op records.
        missing: Says why it cannot work on a device, or None where it can.
        dtypes: What it takes; None: every floating-point type.
        automatic: Whether "auto" may choose it.
        deterministic: Whether it gives the same bits every time.
    """

    name: str
    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    missing: Callable[[torch.device], str | None]
    recorded: Callable[..., torch.Tensor] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    automatic: bool = True
    deterministic: bool = True

    def refuses(self, x: torch.Tensor) -> str | None:
        """Why it cannot take these tokens, or None where it can."""
        if self.dtypes is not None and x.dtype not in self.dtypes:
            names = ", ".join(sorted(str(dtype) for dtype in self.dtypes))
            return f"it takes {names}; got {x.dtype}"
        return self.missing(x.device)


def _never_missing(device: torch.device) -> str | None:
    del device
    return None


def _forward_reference(
    *operands: torch.Tensor, precision: str, workspace: Workspace | None, **options: Any
) -> torch.Tensor:
    del precision, workspace  # torch's own products: never less precise than asked for on the CPU
    return forward_grouped(*operands, **options)


def _backward_reference(
    *operands: torch.Tensor, precision: str, **options: Any
) -> tuple[torch.Tensor | None, ...]:
    del precision  # as in the forward
    return backward_grouped(*operands, **options)


def _recorded_reference(
    *operands: torch.Tensor, precision: str, workspace: Workspace | None, **options: Any
) -> torch.Tensor:
    del precision, workspace  # as in the forward
    return recorded_grouped(*operands, **options)


# "auto" does not choose the kernels yet: they have not run on a GPU.
_BACKENDS = (
    Backend(
        name="fused",
        forward=forward_fused,
        backward=backward_fused,
        missing=missing_fused,
        dtypes=DTYPES,
        automatic=False,
    ),
    Backend(
        name="split",
        forward=forward_split,
        backward=backward_fused,
        missing=missing_fused,
        dtypes=DTYPES,
        automatic=False,
    ),
    Backend(
        name="reference",
        forward=_forward_reference,
        backward=_backward_reference,
        recorded=_recorded_reference,
        missing=_never_missing,
    ),
)


def backends(device: str | torch.device = "cpu") -> dict[str, str | None]:
    """Return all backends, with what is missing for each on a device, or None.

    "fused" is the single kernel, "split" the same work in five launches, both with the same kernels
    for the backward; "reference" is plain torch.

    Args:
        device: Where the tokens would be.

    Returns:
        Reasons by name.

    Examples:
        >>> backends("cpu")["reference"] is None
        True
    """
    return {backend.name: backend.missing(torch.device(device)) for backend in _BACKENDS}


def backend_for(name: str, x: torch.Tensor) -> Backend:
    """Return the backend of a name, or the best one where it is "auto".

    Args:
        name: "auto" or a backend's name.
        x: The tokens; their device and data type decide.

    Returns:
        The backend.

    Raises:
        ConfigurationError: There is no such backend.
        UnsupportedError: It cannot work here.
    """
    known: dict[str, Any] = {backend.name: backend for backend in _BACKENDS}
    if name == "auto":
        usable = (b for b in _BACKENDS if b.automatic and b.refuses(x) is None)
        return next(usable)
    if name not in known:
        raise ConfigurationError(
            f"there is no backend {name!r}", hint=f"use auto, {', '.join(known)}"
        )
    reason = known[name].refuses(x)
    if reason is not None:
        raise UnsupportedError(f"backend {name!r} cannot work here: {reason}", hint="use auto")
    found: Backend = known[name]
    return found
