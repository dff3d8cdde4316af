"""Exceptions of fivefold: one root, few leaves.

Every leaf is also a subclass of the nearest built-in, so that callers who know nothing of
fivefold can still catch it. A message says what is wrong and the value got; the hint says what
is allowed and what to do. The command line prints the two as ``error:`` and ``hint:`` and maps
the class to an exit code. This module imports nothing else of fivefold.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigurationError",
    "DataError",
    "FivefoldError",
    "InfeasibleError",
    "NonFiniteError",
    "ReplicaMismatchError",
    "StorageError",
    "UnsupportedError",
]


class FivefoldError(Exception):
    """Root of all errors that fivefold raises on purpose.

    Args:
        message: What is wrong, with the value that was got.
        hint: What is allowed and what to do next; None where the message says it all.

    Examples:
        >>> str(FivefoldError("tau is 0", hint="use a positive integer"))
        'tau is 0; use a positive integer'
    """

    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is pickled as a call with its positional arguments; the hint is none.
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[FivefoldError], message: str, hint: str | None) -> FivefoldError:
    return kind(message, hint=hint)


class ConfigurationError(FivefoldError, ValueError):
    """An argument, a configuration key or a combination of them is not allowed."""


class DataError(FivefoldError, ValueError):
    """Input data is missing, empty, of the wrong kind or damaged."""


class CheckpointError(FivefoldError, OSError):
    """A checkpoint could not be written, or none that is whole could be read."""


class CommunicationError(FivefoldError, ConnectionError):
    """A collective failed or timed out; names rank, step and collective."""


class StorageError(FivefoldError, OSError):
    """The disk did not do what was asked: an I/O error, a short read or write, no space left."""


class ReplicaMismatchError(FivefoldError, RuntimeError):
    """Replicas that must be equal bit for bit are not; names the ranks that differ."""


class NonFiniteError(FivefoldError, ArithmeticError):
    """Training gave not-a-number or infinity on every rank; names ranks, round and parameters."""


class UnsupportedError(FivefoldError, RuntimeError):
    """This machine lacks something that the request needs (a permission, a tool, a device)."""


class InfeasibleError(FivefoldError, ValueError):
    """The request is well formed, but nothing satisfies it.

    Examples:
        >>> InfeasibleError("no plan fits 16 GB").exit_code
        3
    """

    exit_code = 3


def optional_module(name: str, *, extra: str, use: str) -> Any:
    """Return a module of a package that is installed with an extra; say which one where it is not.

    Args:
        name: The module, such as ``"matplotlib.figure"``.
        extra: The extra of fivefold that brings the package.
        use: What needs it, for the message.

    Raises:
        UnsupportedError: The package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{use} needs the package {name.partition('.')[0]}, which is not installed"
        raise UnsupportedError(message, hint=f"pip install 'fivefold[{extra}]'") from error


def require_one_of(value: object, allowed: Iterable[object], message: str) -> None:
    """Refuse a value that is none of those allowed; the hint names the nearest one and all."""
    known = list(allowed)
    if value not in known:
        names = list(map(str, known))
        near = difflib.get_close_matches(str(value), names, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(message, hint=f"{meant}choose one of {', '.join(names)}")


def require_whole(
    what: str, value: object, *, least: int = 1, most: int | None = None, hint: str | None = None
) -> int:
    """Return a whole number as ``int``; refuse what is none from ``least`` to ``most``.

    A ``most`` of None is no limit.
    """
    whole = isinstance(value, int | Integral) and not isinstance(value, bool)  # also NumPy's
    if not whole or not least <= value <= (value if most is None else most):  # type: ignore[operator]
        end = "" if most is None else f" to {most:,}"
        message = f"{what} must be a whole number from {least}{end}; got {value!r:.40}"
        raise ConfigurationError(message, hint=hint)
    return int(value)  # type: ignore[call-overload,no-any-return]


def require_flag(what: str, value: object) -> bool:
    """Return what is True or False; refuse all else: "no" would be taken for True."""
    if type(value).__name__ not in {"bool", "bool_"}:  # also NumPy's
        raise ConfigurationError(f"{what} is {value!r:.40}", hint="use True or False")
    return bool(value)


def require_number(
    what: str, value: object, *, positive: bool = False, hint: str | None = None
) -> float:
    """Return a finite number as ``float``; refuse what is none, or negative (or zero)."""
    try:  # booleans are numbers to Python, and some whole ones are larger than any float
        real = isinstance(value, int | float | Real) and not isinstance(value, bool)
        number = float(value) if real else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf or (positive and number == 0):
        kind = "finite and above 0" if positive else "finite and at least 0"
        raise ConfigurationError(f"{what} must be a number, {kind}; got {value!r:.40}", hint=hint)
    return number
