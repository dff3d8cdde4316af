"""Small JSON files that are read back: all of their contents under a checksum of their own."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fivefold.errors import DataError
from fivefold.files import parse_json
from fivefold.gnn.storage._errors import storage_error
from fivefold.gnn.storage._files import open_to_read, write_atomically

_CHECKSUM = "checksum"
_MOST_BYTES = 64 << 20
_HINT = "make it again, or copy it again from its source"


def write_json_file(path: Path, value: dict[str, Any]) -> None:
    """Put a dictionary in place as JSON with its checksum; it is whole or not there.

    Args:
        path: The file.
        value: What JSON can hold.

    Raises:
        StorageError: The disk refused.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> write_json_file(path, {"epochs": 3})
        >>> read_json_file(path)
        {'epochs': 3}
    """
    plain = json.loads(json.dumps(value))  # keys become text, as they will be when read
    text = json.dumps({**plain, _CHECKSUM: _checksum(plain)}, sort_keys=True)
    write_atomically(path, text.encode())


def read_json_file(path: Path) -> dict[str, Any]:
    """Read what :func:`write_json_file` wrote.

    Args:
        path: The file.

    Returns:
        The dictionary, without the checksum.

    Raises:
        DataError: It is damaged, of something else, or an older version wrote it.
        FileNotFoundError: There is none.
        StorageError: The disk refused.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> _ = path.write_text('{"epochs": 3}')
        >>> read_json_file(path)
        Traceback (most recent call last):
            ...
        fivefold.errors.DataError: ... is without a checksum: ... an older version wrote it; ...
    """
    value = _parse(_read(path), path)
    found = value.pop(_CHECKSUM, None)
    if found is None:
        message = f"{path} is without a checksum: it is damaged, or an older version wrote it"
        raise DataError(message, hint=_HINT)
    if found != _checksum(value):
        raise DataError(f"{path} is damaged: its checksum is wrong", hint=_HINT)
    return value


def _read(path: Path) -> bytes:
    try:
        descriptor = open_to_read(path)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            data = file.read() if size <= _MOST_BYTES else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error.errno or 0, path, "reading") from error
    if size > _MOST_BYTES:
        raise DataError(f"{path} has {size} bytes, at most {_MOST_BYTES} are read", hint=_HINT)
    return data


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = parse_json(data, where=str(path), finite=False)
    except DataError as error:
        raise DataError(f"{path} is damaged: it cannot be read as JSON", hint=_HINT) from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it is no JSON object", hint=_HINT)
    return value


def _checksum(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
