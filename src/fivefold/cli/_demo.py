"""``fivefold demo``: the main job, from nothing to a report, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._options import output_option


def demo_command(
    *,
    output: Annotated[Path, output_option("The runs and the report.", metavar="FOLDER")] = Path(
        "runs/demo"
    ),
    rate: Annotated[str, typer.Option(help="Rate of each host's link.")] = "100Mbit/s",
    steps: Annotated[int, typer.Option(min=40, help="Optimizer steps per rank.")] = 120,
) -> None:
    """Profile a slow link, plan, train with DDP and as recommended, compare with the plan.

    Two emulated hosts on this machine, one rank each, from the same seed, on the source code of
    Python's standard library. Needs root or user namespaces for the links; without them it runs
    over loopback and says so. An earlier demo in the same folder is replaced.
    """
    from fivefold.cli._demo_work import run_demo

    run_demo(output, rate, steps)
