"""``fivefold elastic``: the meeting place of workers that come and go."""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import FrameType
from typing import Annotated

import typer

from fivefold.cli._arguments import seconds_of
from fivefold.cli._help import command_group
from fivefold.cli._later import later

with later():
    from fivefold.optim import start_lighthouse


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
    """Run the meeting place that elastic workers vote at, until Ctrl-C or SIGTERM.

    By default only this machine reaches it. For workers on others give an address that they
    reach, and who may connect: --bind 0.0.0.0:29510 --allow 10.0.0.0/24. It has no password:
    whoever may connect can take part in the job, and run code in its workers.

    Give its address to every worker (elastic_transport(lighthouse="host:29510")). It prints its
    port as one line of JSON on standard output and shows who is there as a page on the same port.
    It keeps nothing on disk: after it was started again the workers find one another within a
    round.

    Make --join-timeout longer than the slowest worker's lag behind the fastest in a round.

    Raises:
        FivefoldError: The options are not allowed, torchft is missing, or the port is taken.
    """
    server = start_lighthouse(
        bind,
        allow=allow or (),
        min_workers=min_workers,
        join_timeout_s=seconds_of(join_timeout),
        heartbeat_timeout_s=seconds_of(heartbeat_timeout),
    )
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    sys.stdout.write(json.dumps({"port": server.port, "min_workers": min_workers}) + "\n")
    sys.stdout.flush()
    stop.wait()
    server.close()


app = command_group(
    "elastic",
    help="Training whose workers may leave and join while it goes on.",
    commands={"lighthouse": lighthouse},
)
