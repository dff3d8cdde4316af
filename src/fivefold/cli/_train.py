"""``fivefold train``: one rank, or the start of several; ``fivefold elastic``: a lighthouse."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Annotated

import typer

from fivefold.cli._options import ConfigArgument, command_group, seconds_of
from fivefold.optim import outer_rules


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

    Table [sync] says how ranks synchronise: method (none, ddp, RULES), tau (local steps per
    round, or auto), codec (fp32, bf16, fp16, int8, int4) and the method's own keys. A key that the
    method does not take is an error that says which methods do.

    The same command resumes a run from its newest whole checkpoint. SIGTERM or Ctrl-C writes a
    checkpoint on all ranks and ends with exit code 0; a second Ctrl-C aborts.
    """
    from fivefold.runs import rank_process
    from fivefold.train import load_config  # the other names of the package load torch
    from fivefold.train.config import require_ranks

    if nproc is not None and "RANK" not in os.environ:
        checked = load_config(config, overrides or [])  # errors are said before torch is loaded
        require_ranks(checked, world_size=nproc)
        from fivefold.train import launch

        raise typer.Exit(launch(config, overrides or [], nproc=nproc, max_restarts=max_restarts))
    with rank_process():
        checked = load_config(config, overrides or [])
        from fivefold.train import train

        train(checked)


train_command.__doc__ = str(train_command.__doc__).replace("RULES", ", ".join(outer_rules()))


def lighthouse(
    *,
    bind: Annotated[
        str, typer.Option(help="Address and port to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:29510",
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Host, address or network that may connect; may be repeated."),
    ] = None,
    min_workers: Annotated[
        int, typer.Option(min=1, help="Fewer workers than this wait instead of training.")
    ] = 2,
    join_timeout: Annotated[
        str, typer.Option(help="How long a vote waits for a worker that is alive but slow.")
    ] = "60s",
    heartbeat_timeout: Annotated[
        str, typer.Option(help="A worker that is silent for this long counts as dead.")
    ] = "5s",
) -> None:
    """Run the lighthouse at which elastic workers meet, until Ctrl-C or SIGTERM.

    By default only this machine can reach it. For workers on other machines give an address that
    they can reach, and who may connect: --bind 0.0.0.0:29510 --allow 10.0.0.0/24. It has no
    password: whoever may connect can take part in the job, and run code in its workers.

    Give its address to every worker (elastic_transport(lighthouse="host:29510")). It prints its
    port as one line of JSON on standard output and serves a status page on the same port. It keeps
    nothing on disk: after a restart the workers find one another within a round.

    Make --join-timeout longer than the slowest worker's lag behind the fastest in a round.
    """
    from fivefold.optim import start_lighthouse

    server = start_lighthouse(
        bind,
        allow=allow or (),
        min_workers=min_workers,
        join_timeout_s=seconds_of(join_timeout),
        heartbeat_timeout_s=seconds_of(heartbeat_timeout),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sys.stdout.write(json.dumps({"port": server.port, "min_workers": min_workers}) + "\n")
    sys.stdout.flush()
    stop.wait()
    server.close()


elastic_app = command_group(
    "elastic",
    help="Training whose workers may leave and join at any time.",
    commands={"lighthouse": lighthouse},
)
