"""Checkpoints: one container file each, in place whole or not at all.

Rank 0 writes model and optimizer, which are equal on all ranks, and every rank's own part
(generators, place in the epoch). The pages are checksummed; a damaged file is skipped and the
one before it is taken. This module knows nothing of the loop.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.errors import CheckpointError, DataError, StorageError
from fivefold.gnn.storage import Container, ContainerWriter
from fivefold.gnn.training._state import flatten_state, restore_state

_LOG = logging.getLogger(__name__)
_KIND = "checkpoint"
_PREFIX, _SUFFIX = "step-", ".fvf"


def write_checkpoint(
    folder: Path, state: dict[str, Any], *, step: int, description: dict[str, Any], keep: int
) -> Path:
    """Write one checkpoint and remove those that are too old.

    Args:
        folder: Folder of the checkpoints.
        state: Nested state.
        step: Optimizer steps done; names the file.
        description: What a run must share with this one to go on from it.
        keep: How many of the newest stay.

    Returns:
        The file.

    Raises:
        CheckpointError: The disk is full or refuses; earlier checkpoints are untouched.
    """
    path = folder / f"{_PREFIX}{step:08d}{_SUFFIX}"
    data, record = flatten_state(state)
    writer = None
    try:
        writer = ContainerWriter(
            path,
            kind=_KIND,
            sections={"data": (np.uint8, data.shape)},
            attributes={"step": step, "description": description, "state": record},
        )
        writer.write("data", 0, data)
        writer.commit().close()
    except (StorageError, OSError) as error:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.abort()
        message = f"cannot write the checkpoint {path}: {error}"
        hint = "free space, then run the same command again; earlier checkpoints are untouched"
        raise CheckpointError(message, hint=hint) from error
    for old in [file for file in checkpoint_files(folder) if _step(file) <= step][keep:]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint; every page is verified.

    Returns:
        Its state and its description.

    Raises:
        CheckpointError: It is damaged, or no checkpoint.
    """
    try:
        with Container.open(path, kind=_KIND) as container:
            record = container.attributes
            state = restore_state(container.read("data"), record["state"])
            return state, record["description"]
    except (DataError, StorageError, KeyError, ValueError, TypeError) as error:
        reason = error.message if isinstance(error, DataError | StorageError) else repr(error)
        message = f"{path.name} is not whole: {reason}"
        raise CheckpointError(message, hint="remove it to resume from the one before") from error


def checkpoint_files(folder: Path) -> list[Path]:
    """Finished checkpoints, newest first; whether they are whole is not looked at."""
    found = [path for path in folder.glob(f"{_PREFIX}*{_SUFFIX}") if _step(path) >= 0]
    return sorted(found, key=_step, reverse=True)


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """The newest checkpoint that is whole, its state and description; None where there is none.

    Raises:
        CheckpointError: There are checkpoints, but none is whole.
    """
    skipped: list[str] = []
    for path in checkpoint_files(folder):
        try:
            state, description = read_checkpoint(path)
        except CheckpointError as error:
            skipped.append(error.message)
            continue
        for reason in skipped:
            _LOG.warning("checkpoint %s; skipped, resuming from %s", reason, path.name)
        return path, state, description
    if skipped:
        message = f"no checkpoint in {folder} is whole: {'; '.join(skipped)}"
        hint = "remove that folder to start afresh, or choose another run.output"
        raise CheckpointError(message, hint=hint)
    return None


def _step(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isdecimal() else -1
