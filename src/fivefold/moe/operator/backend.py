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
from fivefold.moe.operator._grouped import backward_grouped, forward_grouped, recorded_grouped


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute the operator; the same bits every time."""

    name: str
    forward: Callable[..., torch.Tensor]  # what the backward needs goes to ``hidden``
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    missing: Callable[[torch.device], str | None]  # why it cannot work on a device
    recorded: Callable[..., torch.Tensor] | None = None
    """``forward`` with its own record for autograd, outside of graphs; None: the custom op's."""
    dtypes: frozenset[torch.dtype] | None = None  # None: every floating-point type

    def refuses(self, x: torch.Tensor) -> str | None:
        """Return why it cannot take these tokens, or None where it can."""
        if self.dtypes is not None and x.dtype not in self.dtypes:
            names = ", ".join(sorted(str(dtype) for dtype in self.dtypes))
            return f"it takes {names}; got {x.dtype}"
        return self.missing(x.device)


_KERNELS: dict[str, Any] = {"backward": backward_fused, "missing": missing_fused, "dtypes": DTYPES}
_BACKENDS = {
    "fused": Backend(name="fused", forward=forward_fused, **_KERNELS),
    "split": Backend(name="split", forward=forward_split, **_KERNELS),
    "reference": Backend(
        name="reference",
        forward=forward_grouped,
        backward=backward_grouped,
        recorded=recorded_grouped,
        missing=lambda _device: None,
    ),
}
_AUTO = "reference"  # the kernels have not run on a GPU yet


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
    return {name: found.missing(torch.device(device)) for name, found in _BACKENDS.items()}


def backend_for(name: str, x: torch.Tensor) -> Backend:
    """Return the backend of a name, or the best one for these tokens where it is "auto"."""
    found = _BACKENDS.get(_AUTO if name == "auto" else name)
    if found is None:
        raise ConfigurationError(
            f"there is no backend {name!r}", hint=f"use auto, {', '.join(_BACKENDS)}"
        )
    reason = found.refuses(x)
    if reason is not None:
        raise UnsupportedError(f"backend {name!r} cannot work here: {reason}", hint="use auto")
    return found
