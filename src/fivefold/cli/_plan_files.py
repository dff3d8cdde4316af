"""What ``fivefold plan --write`` leaves in a folder: the plan in the words of other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import typer

from fivefold.cli._later import later
from fivefold.errors import DataError, UnsupportedError

with later():
    from fivefold.runs import write_text
    from fivefold.strategy import (
        Job,
        ParallelPlan,
        device_mesh,
        megatron_flags,
        plan_to_toml,
        torchtitan_config,
        trainer_config,
    )


def write_plan_files(folder: Path, job: Job, plan: ParallelPlan, *, base: str | None) -> None:
    """Write each form that the plan has, and say why where it has none.

    Args:
        folder: Where to write; made where it is not there.
        job: The job.
        plan: Its plan.
        base: torchtitan's configuration of the model; None to find it.

    Raises:
        DataError: The folder cannot be made.
    """
    make_folder(folder)
    forms: dict[str, Callable[[], str]] = {
        "plan.toml": lambda: plan_to_toml(plan),
        "mesh.json": lambda: json.dumps(device_mesh(plan)) + "\n",
        "megatron_flags.txt": lambda: " ".join(megatron_flags(job.model, plan)) + "\n",
        "torchtitan_planned.py": lambda: torchtitan_config(job.model, plan, base=base),
        "fivefold_train.toml": lambda: trainer_config(job.model, plan),
    }
    for name, make in forms.items():
        try:
            write_text(folder / name, make())
        except UnsupportedError as error:
            typer.echo(f"not written: {name}: {error.message}", err=True)
        else:
            typer.echo(f"written: {folder / name}", err=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        DataError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be made: {error.strerror}",
            hint="name another one, or check the permissions",
        ) from error
