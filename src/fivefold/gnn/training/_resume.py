"""What a run on a graph must share with the one that it goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import CheckpointError
from fivefold.gnn.training._config import GnnConfig
from fivefold.runs.checkpoints import find_checkpoint


def describe_run(config: GnnConfig, *, data: str) -> dict[str, Any]:
    """Describe what decides the parameters and must be equal for a run to be resumed.

    The number of epochs may change, so that a finished run can be made longer.
    """
    sections = config.model_dump(mode="json", include={"model", "optim", "sampling"})
    del sections["sampling"]["threads"]
    # JSON knows no infinity.
    sections["optim"]["grad_clip"] = repr(config.optim.grad_clip)
    sections["run"] = {"seed": config.run.seed, "mode": config.run.mode}
    sections["loader"] = {"form": config.loader.form, "shuffle": config.loader.shuffle}
    sections["data"] = {"fingerprint": data}
    normal: dict[str, Any] = json.loads(json.dumps(sections))
    return normal


def check_before_work(config: GnnConfig, *, data: str, world_size: int) -> Callable[[str], None]:
    """Refuse a run that could not go on in its folder, before hours of sampling and packing.

    Returns what refuses a plan, by its ``order_fingerprint``, that is not the checkpoint's.
    """
    refuse_older_format(config.run.output)
    found = find_checkpoint(
        config.run.output,
        config.run.resume,
        description=describe_run(config, data=data),
        world_size=world_size,
    )

    def accept(plan: str) -> None:
        if found is not None and not config.sampling.refresh_every_epochs:
            require_same_plan(*found, plan=plan)

    return accept


def require_same_plan(path: Path, manifest: Mapping[str, Any], *, plan: str | None) -> None:
    """Refuse another order of the packed rows than the checkpoint's."""
    if manifest["description"]["plan"]["order"] != plan:
        raise CheckpointError(
            f"{path} was written with another plan of the packed rows",
            hint="give the budgets and [plan] of that run, and its store; use that run's "
            "config.toml, or choose another run.output to begin afresh",
        )


def refuse_older_format(output: Path) -> None:
    """Refuse checkpoints that were one file each: a run would begin afresh over them."""
    older = sorted((output / "checkpoints").glob("step-*.fvf"))
    if older:
        raise CheckpointError(
            f"{older[-1]} is a checkpoint of an earlier version, which this one does not read",
            hint="choose another run.output, or remove that folder to begin afresh",
        )
