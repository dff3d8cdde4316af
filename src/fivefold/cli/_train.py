"""``fivefold train``: one rank, or the start of several."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fivefold.cli._later import later
from fivefold.cli._options import ConfigArgument

with later():
    from fivefold.runs import rank_process
    from fivefold.train import launch, load_config, train


def train_command(
    config: ConfigArgument,
    *,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start this many ranks on this machine. Leave out under torchrun or a scheduler.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key, such as run.steps=50, sync.tau=auto or "
            "sync.auto_tau.maximum=64; repeatable.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="With --nproc: start all ranks again this often after a failure."),
    ] = 0,
) -> None:
    """Train a language model as CONFIG says, or resume where a run stopped.

    On one machine: fivefold train config.toml --nproc 2. Under torchrun or a
    scheduler, which set RANK and WORLD_SIZE, leave --nproc out: the command is one rank.

    How the ranks are kept together is table [sync]: method (none, ddp, local_sgd, slowmo, diloco,
    co2, delay_corrected, overlap_local_sgd, eager_diloco, streaming_diloco, outer_optimizer,
    delayed_gradients), tau (local steps per round, or auto), codec (fp32, bf16, fp16, int8, int4)
    and the method's own keys. A key that the method does not take is an error that says which
    methods do.

    The same command resumes a run from its newest whole checkpoint. SIGTERM or Ctrl-C writes a
    checkpoint on all ranks and ends with exit code 0; a second Ctrl-C aborts.
    """
    if nproc is not None and "RANK" not in os.environ:
        load_config(config, overrides or [])  # what is wrong in it is said before torch is loaded
        raise typer.Exit(launch(config, overrides or [], nproc=nproc, max_restarts=max_restarts))
    with rank_process():
        checked = load_config(config, overrides or [])
        train(checked)
