"""Sums of chunks in the order of ranks: the same bits whoever adds and whatever arrives first.

Floating-point sums depend on their order, so the order is fixed: rank 0, then 1, and so on. Half
precision is added in single precision and rounded once at the end; integers are exact and wrap.
bfloat16, which numpy does not have, travels as ``uint16``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fivefold.errors import ConfigurationError, UnsupportedError

# Name: how elements are stored, how they are added. The order is the wire's numbering.
_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "float16": (np.float16, np.float32),
    "bfloat16": (np.uint16, np.float32),
    "int32": (np.int32, np.int32),
    "int64": (np.int64, np.int64),
}
DTYPES = tuple(_KINDS)
_BFLOAT16_NAN = 0x7FC0


def stored_as(dtype: str) -> Any:
    """Return the numpy type in which elements of a type are stored."""
    if dtype not in _KINDS:
        raise UnsupportedError(f"{dtype} cannot be summed", hint=f"use one of {', '.join(DTYPES)}")
    return np.dtype(_KINDS[dtype][0])


def dtype_name(array: np.ndarray, dtype: str | None) -> str:
    """Return the name of an array's element type, checked."""
    name = dtype or array.dtype.name
    if array.dtype != stored_as(name):
        raise ConfigurationError(
            f"an array of {array.dtype} cannot hold {name}", hint=f"use {stored_as(name)}"
        )
    return name


class OrderedSum:
    """A sum whose parts come in any order and are added in the order of ranks.

    A part that comes early is kept until its turn.
    """

    def __init__(self, dtype: str, parts: int) -> None:
        self._dtype = dtype
        self._parts = parts
        self._total: np.ndarray | None = None
        self._next = 0
        self._early: dict[int, np.ndarray] = {}

    @property
    def missing(self) -> list[int]:
        """Ranks whose part has not come."""
        return [rank for rank in range(self._next, self._parts) if rank not in self._early]

    def add(self, rank: int, values: np.ndarray) -> bool:
        """Take a rank's part."""
        self._early[rank] = values
        while self._next in self._early:
            part = _widened(self._early.pop(self._next), self._dtype)
            if self._total is None:
                self._total = part.copy()
            else:
                with np.errstate(all="ignore"):  # inf - inf is the caller's affair
                    np.add(self._total, part, out=self._total)
            self._next += 1
        return self._next == self._parts

    def result(self) -> np.ndarray:
        """Return the sum, in the type in which it is stored."""
        assert self._total is not None, "there are parts"
        return _narrowed(self._total, self._dtype)


def ordered_sum(parts: Sequence[np.ndarray], dtype: str | None = None) -> np.ndarray:
    """Sum of arrays as the switch forms it.

    Args:
        parts: Arrays of one type and shape, by rank.
        dtype: ``"bfloat16"`` for arrays of ``uint16`` that hold such numbers; None reads the type
            from the arrays.

    Returns:
        The sum.

    Raises:
        ConfigurationError: There are no parts.

    Examples:
        >>> ordered_sum([np.array([1e8], np.float32), np.float32([1.0]), np.float32([-1e8])])
        array([0.], dtype=float32)
    """
    if not parts:
        msg = "there is nothing to sum"
        raise ConfigurationError(msg, hint="give one array for each rank")
    total = OrderedSum(dtype_name(parts[0], dtype), len(parts))
    for rank, part in enumerate(parts):
        total.add(rank, part)
    return total.result()


def _widened(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(_KINDS[dtype][1], copy=False)


def _narrowed(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return total.astype(_KINDS[dtype][0], copy=False)
    bits = total.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return np.where(np.isnan(total), _BFLOAT16_NAN, rounded).astype(np.uint16)
