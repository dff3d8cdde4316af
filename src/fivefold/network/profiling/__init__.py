"""Measured links: alpha and beta between running ranks, alone and under contention.

Importing this package loads no torch; :func:`profile_links` does when it is called for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.network.profiling._profile import Contention, LineFit, Profile, fit_line

if TYPE_CHECKING:
    from fivefold.network.profiling._measure import DEFAULT_SIZES_BYTES, profile_links

__all__ = [
    "DEFAULT_SIZES_BYTES",
    "Contention",
    "LineFit",
    "Profile",
    "fit_line",
    "profile_links",
]


def __getattr__(name: str) -> Any:
    if name in {"DEFAULT_SIZES_BYTES", "profile_links"}:
        from fivefold.network.profiling import _measure  # noqa: PLC0415 - it loads torch

        return getattr(_measure, name)
    message = f"module 'fivefold.network.profiling' has no attribute {name!r}"
    raise AttributeError(message)
