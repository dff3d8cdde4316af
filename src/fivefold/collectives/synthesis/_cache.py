"""Synthesised schedules on disk, by what was asked.

One JSON file per question: topology and collective by their contents, size, method, model, sketch
and seed. Whatever is read is verified again by the caller. A file that is damaged or of another
version counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.collectives.schedules import Schedule
from fivefold.errors import FivefoldError, StorageError
from fivefold.files import read_json, write_atomically

_VERSION = 1
_LOG = logging.getLogger(__name__)


def cache_key(parts: Mapping[str, Any]) -> str:
    """A name for a question: 32 hexadecimal digits.

    Args:
        parts: What the answer depends on, fit for JSON.
    """
    text = json.dumps({"version": _VERSION, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(folder: Path, key: str) -> tuple[Schedule, dict[str, Any]] | None:
    """The schedule of a key and what was noted with it; None where there is none that is whole."""
    path = folder / f"{key}.json"
    try:
        record = read_json(path)
        if record["version"] != _VERSION:
            return None
        return Schedule.from_json(record["schedule"]), dict(record["notes"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, FivefoldError) as error:
        _LOG.warning("ignoring the damaged cache file %s: %s", path, error)
        return None


def store(folder: Path, key: str, schedule: Schedule, notes: Mapping[str, Any]) -> Path:
    """Write a schedule; a reader sees the old file or the new one, never a part.

    Raises:
        StorageError: The folder cannot be written.
    """
    path = folder / f"{key}.json"
    record = {"version": _VERSION, "schedule": schedule.to_json(), "notes": dict(notes)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record))
    except OSError as error:
        message = f"the cache {folder} cannot be written: {error}"
        raise StorageError(message, hint="give another cache folder, or cache=None") from error
    return path
