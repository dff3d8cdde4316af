"""Errors as plain records, to hand them from one process to another.

An exception with keyword arguments does not survive pickling, and a peer's traceback helps
nobody; class, message and hint do. This module knows nothing of torch.
"""

from __future__ import annotations

from typing import Any

from fivefold import errors
from fivefold.errors import FivefoldError


def error_to_record(error: BaseException) -> dict[str, Any]:
    """Class, message and hint of an error.

    Examples:
        >>> error_to_record(errors.DataError("empty", hint="add text"))
        {'kind': 'DataError', 'message': 'empty', 'hint': 'add text'}
    """
    if isinstance(error, FivefoldError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    message = f"{type(error).__name__}: {error}"
    return {"kind": None, "message": message, "hint": None}


def error_from_record(record: dict[str, Any]) -> Exception:
    """The error that a record describes; a RuntimeError where it was none of ours.

    Examples:
        >>> error_from_record({"kind": "DataError", "message": "empty", "hint": None})
        DataError('empty', None)
    """
    if record["kind"] in errors.__all__:
        kind: type[FivefoldError] = getattr(errors, record["kind"])
        return kind(record["message"], hint=record["hint"])
    return RuntimeError(record["message"])
