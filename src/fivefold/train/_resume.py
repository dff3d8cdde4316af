"""Which checkpoint a run begins from: the newest whole one that belongs to this configuration.

Rank 0 looks, checks every file and tells the others, so that all ranks begin at the same step.
This module knows nothing of the loop.
"""

from __future__ import annotations

import difflib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import CheckpointError, ConfigurationError, FivefoldError
from fivefold.train._checkpoint import checkpoint_folders, read_checkpoint, verify_checkpoint
from fivefold.train._outcome import error_from_record, error_to_record

if TYPE_CHECKING:
    from fivefold.train._config import TrainConfig
    from fivefold.train._world import World

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths of a run's files.

    Args:
        root: The run's folder.
    """

    root: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """JSON lines of rank 0."""
        return self.root / "metrics.jsonl"

    @property
    def has_run(self) -> bool:
        """Whether a run wrote here before."""
        return self.metrics.exists() or bool(checkpoint_folders(self.checkpoints))


def describe_run(config: TrainConfig, *, data_fingerprint: str) -> dict[str, Any]:
    """What must be equal for a resumed run to continue the run that wrote a checkpoint.

    Paths, intervals, devices and timeouts may change; whatever decides the parameters may not.
    """
    sections = config.model_dump(mode="json", include={"model", "optim", "sync"})
    del sections["optim"]["validation_batches"]
    sections["run"] = {"seed": config.run.seed, "steps": config.run.steps}
    sections["data"] = {
        "tokenizer": config.data.tokenizer,
        "sequence_length": config.data.sequence_length,
        "fingerprint": data_fingerprint,
    }
    # As it will be read back: tuples become lists.
    normal: dict[str, Any] = json.loads(json.dumps(sections))
    return normal


def choose_checkpoint(
    folder: RunFolder, resume: str, *, description: dict[str, Any], world: World
) -> Path | None:
    """Pick the checkpoint to begin from; a collective call.

    Args:
        folder: The run's folder.
        resume: "auto", "never" or the path of a checkpoint.
        description: This run's :func:`describe_run`.
        world: The ranks.

    Returns:
        The checkpoint's folder, or None for a fresh run.

    Raises:
        CheckpointError: No checkpoint is whole, or it belongs to another run.
        ConfigurationError: "never", but the folder already has a run.
        CommunicationError: A peer died or did not answer in time.
    """
    chosen: Path | None = None
    failed: dict[str, Any] | None = None
    if world.is_main:
        try:
            chosen = _choose(folder, resume, description=description, world=world)
        except FivefoldError as error:
            failed = error_to_record(error)
    chosen, failed = world.broadcast((chosen, failed), what="the choice of a checkpoint")
    if failed is not None:
        raise error_from_record(failed)
    return chosen


def read_own_state(path: Path, *, world: World) -> dict[str, Any]:
    """Read this rank's part of a checkpoint; a collective call.

    Raises:
        CheckpointError: A rank cannot read its part; raised on every rank.
        CommunicationError: A peer died or did not answer in time.
    """
    state: dict[str, Any] = {}
    failed: dict[str, Any] | None = None
    try:
        state = read_checkpoint(path, rank=world.rank)
    except CheckpointError as error:
        failed = error_to_record(error)
    for other in world.gather(failed, what="the outcome of reading a checkpoint"):
        if other is not None:
            raise error_from_record(other)
    return state


def _choose(
    folder: RunFolder, resume: str, *, description: dict[str, Any], world: World
) -> Path | None:
    require_resumable(folder, resume)
    if resume == "never":
        return None
    if resume == "auto":
        path, manifest = _newest_whole(folder)
    else:
        path = Path(resume)
        manifest = verify_checkpoint(path)
    if path is not None:
        _require_same_run(path, manifest, description=description, world=world)
    return path


def require_resumable(folder: RunFolder, resume: str) -> None:
    """Refuse what can be told from the folders' names alone.

    Raises:
        CheckpointError: ``resume`` names no folder.
        ConfigurationError: "never", but the folder already has a run.
    """
    if resume == "never" and folder.has_run:
        message = f'run.resume is "never", but {folder.root} already has a run'
        raise ConfigurationError(message, hint='choose another run.output, or resume = "auto"')
    if resume not in {"auto", "never"} and not Path(resume).is_dir():
        close = difflib.get_close_matches(resume, ["auto", "never"], n=1)
        meant = f'did you mean "{close[0]}"? ' if close else ""
        message = f"run.resume names {resume}, which is not a folder"
        hint = f'{meant}Use "auto", "never" or a folder such as '
        raise CheckpointError(message, hint=f"{hint}{folder.checkpoints / 'step-00000100'}")


def _newest_whole(folder: RunFolder) -> tuple[Path | None, dict[str, Any]]:
    skipped: list[str] = []
    for path in checkpoint_folders(folder.checkpoints):
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            skipped.append(error.message)
            continue
        for reason in skipped:
            _LOG.warning("checkpoint %s; skipped, resuming from %s", reason, path.name)
        return path, manifest
    if skipped:
        message = f"no checkpoint in {folder.checkpoints} is whole: {'; '.join(skipped)}"
        hint = "remove that folder to start afresh, or choose another run.output"
        raise CheckpointError(message, hint=hint)
    return None, {}


def _require_same_run(
    path: Path, manifest: dict[str, Any], *, description: dict[str, Any], world: World
) -> None:
    then = manifest.get("world_size")
    if then != world.world_size:
        message = f"{path} was written by {then} ranks, but this run has {world.world_size}"
        hint = f"start {then} ranks, or choose another run.output to begin afresh"
        raise CheckpointError(message, hint=hint)
    stored = manifest.get("description", {})
    for section, values in description.items():
        for key, now in values.items():
            before = stored.get(section, {}).get(key)
            if before != now:
                what = "other data" if key == "fingerprint" else f"{section}.{key} = {before!r}"
                message = f"{path} was written with {what}; now it is {now!r}"
                hint = "use that run's config.toml, or choose another run.output to begin afresh"
                raise CheckpointError(message, hint=hint)
