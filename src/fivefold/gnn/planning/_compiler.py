"""The compiler of hot loops, with one clear error where it is not installed."""

from __future__ import annotations

import functools

from fivefold.errors import UnsupportedError

try:
    import numba
except ImportError as error:  # pragma: no cover - the development environment has it
    message = "numba is not installed, and fivefold.gnn compiles its hot loops with it"
    raise UnsupportedError(message, hint="pip install 'fivefold[gnn]'") from error

__all__ = ["njit"]

njit = functools.partial(numba.njit, nogil=True, cache=True)
