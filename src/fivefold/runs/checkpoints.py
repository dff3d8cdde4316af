"""Checkpoints of a run: written whole or not at all, by all ranks together, and read back.

Every rank writes its own state through ``torch.distributed.checkpoint`` under names that begin
with its rank, since under local updates the ranks' parameters differ. The files go to
``step-XXXXXXXX.tmp``; a manifest holds the size and CRC-32 of each, and its own; rank 0 renames
the folder when everything is on disk. The folder must be one that all ranks see. A failure on any
rank is an error on all, and what was there before stays.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fivefold.errors import CheckpointError, ConfigurationError
from fivefold.files import parse_json, sync_folder, write_atomically
from fivefold.runs.ranks import Ranks
from fivefold.units import format_bytes

_LOG = logging.getLogger(__name__)
Value = TypeVar("Value")

_MANIFEST = "manifest.json"
_SCHEMA = 2
_PARTIAL = ".tmp"
_BLOCK_BYTES = 1 << 20
_STRUCTURE = "structure"


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """Path and size of a written checkpoint."""

    path: Path
    num_bytes: int


def write_checkpoint(
    output: Path,
    state: dict[str, Any],
    *,
    step: int,
    description: dict[str, Any],
    ranks: Ranks,
    keep: int,
) -> CheckpointRecord:
    """Write one checkpoint; a collective call."""
    root = _root(output)
    final = root / f"step-{step:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    try:
        _together(ranks, lambda: _prepare(root, partial), folder=root, on_main=True)
        _save(state, partial, ranks=ranks)
        files = _together(ranks, lambda: _own_files(partial, ranks.rank), folder=root)
        merged = {name: entry for part in files for name, entry in part.items()}
        manifest = {
            "schema": _SCHEMA,
            "step": step,
            "world_size": ranks.world_size,
            "description": description,
            "files": merged,
        }
        manifest["crc32"] = _crc_of(manifest)
        _together(ranks, lambda: _publish(partial, final, manifest), folder=root, on_main=True)
    except CheckpointError:
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if ranks.is_main:
        _prune(output, newest_step=step, keep=keep)
    return CheckpointRecord(path=final, num_bytes=sum(entry["bytes"] for entry in merged.values()))


def read_checkpoint(path: Path, *, rank: int) -> dict[str, Any]:
    """Read one rank's state; no communication."""
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


def checkpoint_folders(output: Path) -> list[Path]:
    """Return a run's checkpoints, newest first; whether they are whole is not looked at."""
    found = [path for path in _root(output).glob("step-*") if _is_checkpoint(path)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def newest_checkpoint(output: Path) -> tuple[Path, dict[str, Any]] | None:
    """Find a run's newest checkpoint that is whole, and its manifest; None where there is none."""
    skipped: list[str] = []
    for path in checkpoint_folders(output):
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            skipped.append(error.message)
            continue
        for reason in skipped:
            _LOG.warning("checkpoint %s; skipped, resuming from %s", reason, path.name)
        return path, manifest
    if skipped:
        message = f"no checkpoint in {_root(output)} is whole: {'; '.join(skipped)}"
        hint = "remove that folder to start afresh, or choose another run.output"
        raise CheckpointError(message, hint=hint)
    return None


def require_resumable(output: Path, resume: str) -> None:
    """Refuse what can be told from the names in a run's folder alone."""
    has_run = (output / "metrics.jsonl").exists() or bool(checkpoint_folders(output))
    if resume == "never" and has_run:
        message = f'run.resume is "never", but {output} already has a run'
        raise ConfigurationError(message, hint='choose another run.output, or resume = "auto"')
    if resume not in {"auto", "never"} and not Path(resume).is_dir():
        close = difflib.get_close_matches(resume, ["auto", "never"], n=1)
        meant = f'did you mean "{close[0]}"? ' if close else ""
        message = f"run.resume names {resume}, which is not a folder"
        hint = f'{meant}Use "auto", "never" or a folder such as '
        raise CheckpointError(message, hint=f"{hint}{_root(output) / 'step-00000100'}")
    given = Path(resume)
    inside = checkpoint_folders(given) or (
        given.name == _root(output).name and checkpoint_folders(given.parent)
    )
    if inside:
        message = f"run.resume names {resume}, a folder with checkpoints and none itself"
        raise CheckpointError(message, hint=f"name one of them, such as {inside[0]}")


def find_checkpoint(
    output: Path, resume: str, *, description: Mapping[str, Any], world_size: int
) -> tuple[Path, dict[str, Any]] | None:
    """Find the checkpoint to begin from; no communication."""
    require_resumable(output, resume)
    if resume == "never":
        return None
    if resume == "auto":
        found = newest_checkpoint(output)
    else:
        found = Path(resume), verify_checkpoint(Path(resume))
    if found is not None:
        _require_same_run(*found, description=description, world_size=world_size)
    return found


def choose_checkpoint(
    output: Path, resume: str, *, description: Mapping[str, Any], ranks: Ranks
) -> tuple[Path, dict[str, Any]] | None:
    """Find the checkpoint that all ranks begin from; a collective call under the folder's lock.

    Rank 0 looks and checks every file, and removes what a killed run left half done.
    """

    def choose() -> tuple[Path, dict[str, Any]] | None:
        found = find_checkpoint(
            output, resume, description=description, world_size=ranks.world_size
        )
        for leftover in _root(output).glob(f"*{_PARTIAL}"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in output.glob(f"*{_PARTIAL}"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        return found

    return ranks.on_main(choose, what="the choice of a checkpoint")


def read_own_state(path: Path, *, ranks: Ranks) -> dict[str, Any]:
    """Read this rank's part of a checkpoint; a collective call."""
    state: dict[str, Any] = {}
    ranks.together(
        lambda: state.update(read_checkpoint(path, rank=ranks.rank)),
        what="the outcome of reading a checkpoint",
    )
    return state


def _require_same_run(
    path: Path, manifest: Mapping[str, Any], *, description: Mapping[str, Any], world_size: int
) -> None:
    stored = manifest.get("description", {})
    foreign = sorted(set(stored) - set(description))
    if foreign and set(description) - set(stored):
        message = f"{path} is of another kind of training: it was written with [{foreign[0]}]"
        raise CheckpointError(message, hint="choose another run.output")
    then = manifest.get("world_size")
    if then != world_size:
        message = f"{path} was written by {then} ranks, but this run has {world_size}"
        hint = f"start {then} ranks, or choose another run.output to begin afresh"
        raise CheckpointError(message, hint=hint)
    for section, values in description.items():
        there = stored.get(section, {})
        for key in {**there, **values}:
            before, now = there.get(key), values.get(key)
            if before != now:
                what = "other data" if key == "fingerprint" else f"{section}.{key} = {before!r}"
                message = f"{path} was written with {what}; now it is {now!r}"
                hint = "use that run's config.toml, or choose another run.output to begin afresh"
                raise CheckpointError(message, hint=hint)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check the manifest against its checksum and all files against it; return the manifest."""
    manifest = _read_manifest(path)
    step, files = manifest["step"], manifest["files"]
    if _is_checkpoint(path) and int(path.name[5:]) != step:
        raise _damaged(path, f"it holds step {step}")
    for rank in range(manifest["world_size"]):
        if not any(name.startswith(f"__{rank}_") for name in files):
            raise _damaged(path, f"{_MANIFEST} names no file of rank {rank}")
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
        _require_file(path / _MANIFEST)
        manifest: dict[str, Any] = parse_json(
            (path / _MANIFEST).read_bytes(), where=_MANIFEST, finite=False
        )
        schema, stored = manifest["schema"], manifest.pop("crc32", None)
    except FileNotFoundError:
        raise _damaged(path, f"{_MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{_MANIFEST} cannot be read: {_one_line(error)}") from error
    if schema != _SCHEMA:
        reason = f"its {_MANIFEST} is of schema {schema!r}; this version reads {_SCHEMA}"
        raise _damaged(path, reason)
    if stored != _crc_of(manifest):
        raise _damaged(path, f"the checksum of {_MANIFEST} does not match")
    return manifest


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") and path.name[5:].isdecimal()


def _damaged(path: Path, reason: str) -> CheckpointError:
    hint = "the file system lost data; remove the folder, or resume from another checkpoint"
    return CheckpointError(f"{path.name} is not whole: {reason}", hint=hint)


def _root(output: Path) -> Path:
    return output / "checkpoints"


def _prepare(root: Path, partial: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"*{_PARTIAL}"):
        shutil.rmtree(leftover)
    partial.mkdir()


def _save(state: dict[str, Any], partial: Path, *, ranks: Ranks) -> None:
    tensors = flatten_state(state, prefix=f"rank{ranks.rank}")
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    # One file per rank, synced to disk before the manifest is written.
    writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
    writer.fs = _Disk()
    alone = ranks.control is None
    try:
        with ranks.guard("writing a checkpoint together"), warnings.catch_warnings():
            if alone:  # dcp warns when there is no process group, which is as it should be
                warnings.simplefilter("ignore", UserWarning)
            save(tensors, storage_writer=writer, process_group=ranks.control, no_dist=alone)
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
        """Open a file whose own error is raised instead of what torch makes of it."""
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
        """Write, and note an error before it is raised."""
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
    write_atomically(partial / _MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():  # a damaged one of the same step, which was skipped on resume
        replaced = final.with_name(f"{final.name}-replaced{_PARTIAL}")
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        partial.rename(final)
    sync_folder(final.parent)


def _prune(output: Path, *, newest_step: int, keep: int) -> None:
    """Remove what is older than the ``keep`` newest; damaged newer ones do not count."""
    past = [path for path in checkpoint_folders(output) if int(path.name[5:]) <= newest_step]
    for path in past[keep:]:
        # Renamed first: a run that is killed here leaves a leftover, not a damaged checkpoint.
        doomed = path.with_name(path.name + _PARTIAL)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _together(
    ranks: Ranks, action: Callable[[], Value], *, folder: Path, on_main: bool = False
) -> list[Value]:
    """Write on every rank, or on rank 0; what the disk refuses one is an error of all."""

    def write() -> Value:
        try:
            return action()
        except OSError as error:
            raise _cannot_write(folder, rank=ranks.rank, cause=_one_line(error)) from error

    what = "the outcome of a checkpoint"
    return [ranks.on_main(write, what=what)] if on_main else ranks.together(write, what=what)


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


# -- nested state as named tensors ------------------------------------------------------------


def flatten_state(state: dict[str, Any], *, prefix: str) -> dict[str, torch.Tensor]:
    """Split a state into named tensors."""
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(state, prefix, tensors)
    text = json.dumps(structure).encode()
    tensors[f"{prefix}/{_STRUCTURE}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def restore_state(tensors: dict[str, torch.Tensor], *, prefix: str) -> dict[str, Any]:
    """Undo :func:`flatten_state`."""
    text = bytes(tensors[f"{prefix}/{_STRUCTURE}"].tolist()).decode()
    state: dict[str, Any] = _decode(json.loads(text), tensors)
    return state


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        while name in tensors or name.endswith(f"/{_STRUCTURE}"):  # keys may hold anything
            name += "'"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[key, _encode(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold")


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def rng_state() -> dict[str, Any]:
    """Return the state of torch's generators on this rank."""
    # Not is_available(): asking a CUDA device for its state would start CUDA in a CPU run.
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
    cuda = torch.cuda.get_rng_state() if started else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng(state: dict[str, Any]) -> None:
    """Continue torch's generators where a checkpoint left them."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def parameters_sha256(model: torch.nn.Module) -> str:
    """Return the digest of this rank's parameters, bit for bit, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        own = getattr(parameter, "to_local", lambda kept=parameter: kept)()  # of a sharded one
        values = own.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()
