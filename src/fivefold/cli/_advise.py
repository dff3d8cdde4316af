"""``fivefold advise``: a few steps of a job of the user's own, and what would make it faster."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Annotated

import typer

from fivefold.cli._options import ArgumentError, JsonOption, write_json


def advise_command(
    command: Annotated[
        list[str], typer.Argument(help="How the job is started, after --.", show_default=False)
    ],
    *,
    steps: Annotated[int, typer.Option(help="Steps to time, after three to warm up.", min=4)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Time some steps of your own job, and say what hiding its communication would gain.

    The job runs as it is, then for a few steps without DDP's all-reduce, and is ended: it writes
    no checkpoint at its end. It needs PyTorch, a process group and an optimizer, and no change.

    Examples:
        $ fivefold advise -- torchrun --nproc-per-node 2 train.py
    """
    if shutil.which(command[0]) is None:
        message = f"the command {command[0]!r} was not found"
        raise ArgumentError(message, hint="write it as you start the job, after --")

    from fivefold.cli._advise_work import measured_times, show_options
    from fivefold.optim.advise import options_for

    times = measured_times(command, steps)
    options = options_for(times)
    if as_json:
        write_json(
            {"measured": dataclasses.asdict(times)}
            | {"options": [dataclasses.asdict(one) for one in options]}
        )
    else:
        show_options(times, options)
