"""The registry of backends: what can compute the operator here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe._grouped import backward_grouped, forward_grouped

__all__ = ["Backend", "backend_for", "backends"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute the operator.

    Attributes:
        name: What ``fused_moe(backend=...)`` takes.
        forward: As ``experts_one_by_one``.
        backward: Its gradients.
        missing: Says why it cannot work on a device, or None where it can.
    """

    name: str
    forward: Callable[..., torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    missing: Callable[[torch.device], str | None]


def _never_missing(device: torch.device) -> str | None:
    del device
    return None


_BACKENDS = (
    Backend(
        name="reference",
        forward=forward_grouped,
        backward=backward_grouped,
        missing=_never_missing,
    ),
)


def backends(device: str | torch.device = "cpu") -> dict[str, str | None]:
    """All backends in order of preference, with what is missing for each on a device, or None.

    Args:
        device: Where the tokens would be.

    Returns:
        Reasons by name.

    Example:
        >>> backends("cpu")["reference"] is None
        True
    """
    return {backend.name: backend.missing(torch.device(device)) for backend in _BACKENDS}


def backend_for(name: str, x: torch.Tensor) -> Backend:
    """The backend of a name, or the best one where it is "auto".

    Args:
        name: "auto" or a backend's name.
        x: The tokens; their device decides.

    Returns:
        The backend.

    Raises:
        ConfigurationError: There is no such backend.
        UnsupportedError: It cannot work here.
    """
    known: dict[str, Any] = {backend.name: backend for backend in _BACKENDS}
    if name == "auto":
        return next(backend for backend in _BACKENDS if backend.missing(x.device) is None)
    if name not in known:
        raise ConfigurationError(
            f"there is no backend {name!r}", hint=f"use auto, {', '.join(known)}"
        )
    reason = known[name].missing(x.device)
    if reason is not None:
        raise UnsupportedError(f"backend {name!r} cannot work here: {reason}", hint="use auto")
    found: Backend = known[name]
    return found
