"""Measured links: alpha and beta between running ranks, alone and under contention.

Importing this package loads no torch; :func:`profile_links` does when it is called for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.network.profiling.profile import Profile

if TYPE_CHECKING:
    from fivefold.network.profiling._measure import profile_links

__all__ = ["Profile", "profile_links"]


def __getattr__(name: str) -> Any:
    if name == "profile_links":
        from fivefold.network.profiling._measure import profile_links  # noqa: PLC0415 - torch

        return profile_links
    raise AttributeError(f"module 'fivefold.network.profiling' has no attribute {name!r}")
