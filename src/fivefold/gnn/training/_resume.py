"""Which checkpoint a run begins from: the newest whole one that belongs to this configuration.

Every rank reads the same file, and rank 0's outcome decides, so that all begin at the same step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.errors import CheckpointError, ConfigurationError, FivefoldError
from fivefold.gnn.training._checkpoint import (
    checkpoint_files,
    newest_checkpoint,
    read_checkpoint,
)
from fivefold.gnn.training._config import GnnConfig
from fivefold.gnn.training._ranks import Ranks


def describe_run(config: GnnConfig, *, data: str, plan: str | None, ranks: Ranks) -> dict[str, Any]:
    """What must be equal for a run to go on from a checkpoint: whatever decides the parameters.

    The number of epochs may change, so that a finished run can be made longer.
    """
    sections = config.model_dump(mode="json", include={"model", "optim", "sampling"})
    del sections["sampling"]["threads"]
    # JSON knows no infinity.
    sections["optim"]["grad_clip"] = repr(config.optim.grad_clip)
    sections["run"] = {"seed": config.run.seed, "mode": config.run.mode}
    sections["loader"] = {"form": config.loader.form, "shuffle": config.loader.shuffle}
    sections["data"] = {"fingerprint": data}
    sections["plan"] = {"order": plan}
    sections["ranks"] = {"number": ranks.world_size}
    normal: dict[str, Any] = json.loads(json.dumps(sections))
    return normal


def check_before_work(config: GnnConfig, *, data: str, world_size: int) -> Callable[[str], None]:
    """Refuse a run that could not go on in its folder, before hours of sampling and packing.

    Args:
        config: The configuration.
        data: Fingerprint of the data set.
        world_size: Number of ranks.

    Returns:
        What refuses a plan, by its ``order_fingerprint``, that is not the checkpoint's.

    Raises:
        CheckpointError: No checkpoint is whole, or it belongs to another run.
        ConfigurationError: "never", but the folder has a run.
    """
    ranks = Ranks(world_size=world_size)
    description = describe_run(config, data=data, plan=None, ranks=ranks)
    del description["plan"]
    found = _choose(config.run.output, config.run.resume, description)
    changes = config.sampling.refresh_every_epochs > 0
    stored = None if found is None or changes else found[2]

    def accept(plan: str) -> None:
        if found is not None and stored is not None:
            _compare(found[0], stored, {"plan": {"order": plan}})

    return accept


def choose_checkpoint(
    folder: Path, resume: str, *, description: dict[str, Any], ranks: Ranks
) -> tuple[Path, dict[str, Any]] | None:
    """Pick the checkpoint to begin from and read it; a collective call.

    Args:
        folder: The run's folder.
        resume: "auto" or "never".
        description: This run's :func:`describe_run`.
        ranks: The ranks.

    Returns:
        The file and its state, or None for a fresh run.

    Raises:
        CheckpointError: No checkpoint is whole, or it belongs to another run.
        ConfigurationError: "never", but the folder has a run.
        CommunicationError: A peer died or did not answer in time.
    """
    found: tuple[Path, dict[str, Any]] | None = None
    failed: FivefoldError | None = None
    if ranks.is_main:
        try:
            chosen = _choose(folder, resume, description)
            found = None if chosen is None else chosen[:2]
        except FivefoldError as error:
            failed = error
    path, failed = ranks.gather((found and found[0], failed), what="the choice of a checkpoint")[0]
    if failed is not None:
        raise failed
    if path is None:
        return None
    return found if found is not None else (path, read_checkpoint(path)[0])


def _choose(
    folder: Path, resume: str, description: dict[str, Any]
) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """File, state and description of the checkpoint to begin from."""
    checkpoints = folder / "checkpoints"
    if resume == "never":
        if (folder / "metrics.jsonl").exists() or checkpoint_files(checkpoints):
            message = f'run.resume is "never", but {folder} already has a run'
            raise ConfigurationError(message, hint='choose another run.output, or resume = "auto"')
        return None
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        return None
    _compare(newest[0], newest[2], description)
    return newest


def _compare(path: Path, stored: dict[str, Any], description: dict[str, Any]) -> None:
    """Raise where this run differs from that of a checkpoint."""
    for section, values in description.items():
        for key, now in values.items():
            before = stored.get(section, {}).get(key)
            if before == now:
                continue
            hint = "use that run's config.toml, or choose another run.output to begin afresh"
            message = f"{path} was written with {section}.{key} = {before!r}; now it is {now!r}"
            if section == "data":
                message = f"{path} was written with other data; now it is {now!r}"
            if section == "plan":
                message = f"{path} was written with another plan of the packed rows"
                hint = f"give the budgets and [plan] of that run, and its store; {hint}"
            raise CheckpointError(message, hint=hint)
