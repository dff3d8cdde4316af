"""Checkpoints: written whole or not at all, by all ranks together.

Every rank writes its own state through ``torch.distributed.checkpoint`` under names that begin
with its rank, since under local updates the ranks' parameters differ. The files go to
``step-XXXXXXXX.tmp``; a manifest holds the size and CRC-32 of each, and its own; rank 0 renames
the folder when everything is on disk. The folder must be one that all ranks see. A failure on any
rank is an error on all, and what was there before stays. This module knows nothing of models,
methods or the loop.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import warnings
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fivefold.errors import CheckpointError
from fivefold.files import parse_json
from fivefold.train._state import flatten_state, restore_state
from fivefold.train._world import guard
from fivefold.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from fivefold.train._world import World

MANIFEST = "manifest.json"
SCHEMA = 2
_PARTIAL = ".tmp"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """What was written.

    Args:
        path: The checkpoint's folder.
        num_bytes: Size of its files over all ranks.
    """

    path: Path
    num_bytes: int


def write_checkpoint(
    root: Path,
    state: dict[str, Any],
    *,
    step: int,
    description: dict[str, Any],
    world: World,
    keep: int,
) -> CheckpointRecord:
    """Write one checkpoint; a collective call.

    Args:
        root: Folder of the checkpoints, seen by all ranks.
        state: This rank's nested state.
        step: Optimizer steps done; names the folder.
        description: What a run must share with this one to resume from it.
        world: The ranks.
        keep: How many of the newest checkpoints stay.

    Returns:
        Folder and size.

    Raises:
        CheckpointError: A rank could not write; raised on every rank, and the partial folder
            is gone.
        CommunicationError: A peer died or did not answer in time.
    """
    final = root / f"step-{step:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    try:
        _on_main(world, lambda: _prepare(root, partial), folder=root)
        _save(state, partial, world=world)
        files = _together(world, lambda: _own_files(partial, world.rank), folder=root)
        merged = {name: entry for part in files for name, entry in part.items()}
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "world_size": world.world_size,
            "description": description,
            "files": merged,
        }
        manifest["crc32"] = _crc_of(manifest)
        _on_main(world, lambda: _publish(partial, final, manifest), folder=root)
    except CheckpointError:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if world.is_main:
        _prune(root, newest_step=step, keep=keep)
    return CheckpointRecord(path=final, num_bytes=sum(entry["bytes"] for entry in merged.values()))


def read_checkpoint(path: Path, *, rank: int) -> dict[str, Any]:
    """Read one rank's state; no communication.

    Raises:
        CheckpointError: The checkpoint cannot be read, or holds nothing of this rank.
    """
    prefix = f"rank{rank}"
    try:
        reader = FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if name.startswith(f"{prefix}/") and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            # "torch.distributed is disabled": reading alone is what is wanted here.
            warnings.simplefilter("ignore", UserWarning)
            load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
        return restore_state(tensors, prefix=prefix)
    except (OSError, RuntimeError, LookupError, ValueError, CheckpointException) as error:
        message = f"rank {rank} cannot read the checkpoint {path}: {_one_line(error)}"
        hint = "remove that folder to resume from the one before it"
        raise CheckpointError(message, hint=hint) from error


def checkpoint_folders(root: Path) -> list[Path]:
    """Finished checkpoints, newest first; whether they are whole is not looked at."""
    if not root.is_dir():
        return []
    found = [path for path in root.glob("step-*") if _is_checkpoint(path)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check the manifest against its checksum, and every file of every rank against the manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: Something is missing, truncated, changed or of another step; the message
            says what.
    """
    manifest = _read_manifest(path)
    step, files = manifest["step"], manifest["files"]
    if _is_checkpoint(path) and int(path.name[5:]) != step:
        raise _damaged(path, f"it holds step {step}")
    for rank in range(manifest["world_size"]):
        if not any(name.startswith(f"__{rank}_") for name in files):
            raise _damaged(path, f"{MANIFEST} names no file of rank {rank}")
    for name, entry in files.items():
        try:
            found = _checksum(path / name)
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read: {_one_line(error)}") from error
        if found["bytes"] != entry["bytes"]:
            reason = f"{name} has {found['bytes']} bytes instead of {entry['bytes']}"
            raise _damaged(path, reason)
        if found != entry:
            raise _damaged(path, f"the checksum of {name} does not match")
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        _require_file(path / MANIFEST)
        manifest: dict[str, Any] = parse_json(
            (path / MANIFEST).read_bytes(), where=MANIFEST, finite=False
        )
        schema, stored = manifest["schema"], manifest.pop("crc32", None)
    except FileNotFoundError:
        raise _damaged(path, f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read: {_one_line(error)}") from error
    if schema != SCHEMA:
        reason = f"its {MANIFEST} is of schema {schema!r}; this version reads {SCHEMA}"
        raise _damaged(path, reason)
    if stored != _crc_of(manifest):
        raise _damaged(path, f"the checksum of {MANIFEST} does not match")
    return manifest


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") and path.name[5:].isdecimal()


def _damaged(path: Path, reason: str) -> CheckpointError:
    hint = "the file system lost data; remove the folder, or resume from another checkpoint"
    return CheckpointError(f"{path.name} is not whole: {reason}", hint=hint)


def _prepare(root: Path, partial: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"*{_PARTIAL}"):
        shutil.rmtree(leftover)
    partial.mkdir()


def _save(state: dict[str, Any], partial: Path, *, world: World) -> None:
    tensors = flatten_state(state, prefix=f"rank{world.rank}")
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    # One file per rank, synced to disk before the manifest is written.
    writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
    writer.fs = _Disk()
    alone = world.control is None
    try:
        with guard(world, "writing a checkpoint together"), warnings.catch_warnings():
            if alone:  # dcp warns when there is no process group, which is as it should be
                warnings.simplefilter("ignore", UserWarning)
            save(tensors, storage_writer=writer, process_group=world.control, no_dist=alone)
    except CheckpointException as error:
        # Raised on every rank alike; it is no Exception, so nothing above would catch it.
        rank, (cause, _) = next(iter(error.failures.items()))
        size = format_bytes(sum(tensor.nbytes for tensor in tensors.values()))
        text = f"{_one_line(cause)} (a rank's part takes about {size})"
        raise _cannot_write(partial.parent, rank=rank, cause=text) from error


class _Disk(FileSystem):
    """The disk as torch writes to it.

    Of a full disk torch makes "unexpected pos 704 vs 598"; here the disk's own words are kept.
    """

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        file = _NotingFile(path, mode)
        try:
            with io.BufferedWriter(file) as buffered:
                yield buffered
        except RuntimeError as error:
            if file.error is None:
                raise
            raise file.error from error


class _NotingFile(io.FileIO):
    """A file that remembers why it could not be written."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _own_files(partial: Path, rank: int) -> dict[str, dict[str, int]]:
    names = [path.name for path in partial.glob(f"__{rank}_*")]
    if rank == 0:
        names.append(".metadata")
    return {name: _checksum(partial / name) for name in sorted(names)}


def _require_file(path: Path) -> None:
    if not path.is_file() and path.exists():  # to open a FIFO would wait for who writes to it
        raise OSError(f"{path.name} is not a file")


def _checksum(path: Path) -> dict[str, int]:
    _require_file(path)
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


def _publish(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if final.exists():  # a damaged one of the same step, which was skipped on resume
        replaced = final.with_name(f"{final.name}-replaced{_PARTIAL}")
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(path: Path) -> None:
    # Without it a rename may be on disk before the names of the files in the folder.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, *, newest_step: int, keep: int) -> None:
    """Remove what is older than the ``keep`` newest; damaged newer ones do not count."""
    past = [path for path in checkpoint_folders(root) if int(path.name[5:]) <= newest_step]
    for path in past[keep:]:
        # Renamed first: a run that is killed here leaves a leftover, not a damaged checkpoint.
        doomed = path.with_name(path.name + _PARTIAL)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _on_main(world: World, action: Callable[[], None], *, folder: Path) -> None:
    _together(world, action if world.is_main else _nothing, folder=folder)


def _nothing() -> None:
    """Wait for rank 0 in an agreement."""


def _together(world: World, action: Callable[[], Any], *, folder: Path) -> list[Any]:
    """Run on every rank; all get all results, or all raise."""
    value, cause = None, None
    try:
        value = action()
    except OSError as error:
        cause = _one_line(error)
    outcomes = world.gather((value, cause), what="the outcome of a checkpoint")
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise _cannot_write(folder, rank=rank, cause=failed)
    return [result for result, _ in outcomes]


def _cannot_write(folder: Path, *, rank: int, cause: str) -> CheckpointError:
    message = f"rank {rank} cannot write a checkpoint to {folder}: {cause}"
    hint = (
        "free space or fix the folder (it must be one that all ranks share), then run the same "
        "command again; earlier checkpoints are untouched"
    )
    return CheckpointError(message, hint=hint)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__
