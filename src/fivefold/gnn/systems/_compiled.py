"""numba's decorator, or an error that says how to get it."""

from __future__ import annotations

from fivefold.errors import UnsupportedError

try:
    from numba import njit, types
except ImportError as error:  # pragma: no cover - the extra is there in our own tests
    raise UnsupportedError(
        "the systems need numba, which is not installed", hint="pip install 'fivefold[gnn]'"
    ) from error

__all__ = ["njit", "types"]
