"""``fivefold demo``: the main job, from nothing to a report, in a few minutes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fivefold.cli._options import output_option
from fivefold.errors import ConfigurationError

_HOSTS = 2
# Large frames, as network cards handle them: emulating small ones takes processor time from the
# training beside it.
_FRAME_BYTES = 60_000


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
    console = Console(stderr=True)

    from fivefold.cli._demo_work import METHODS, Demo
    from fivefold.lab import LabSpec
    from fivefold.report import (
        build_report,
        print_page,
        report_page,
        report_text,
        write_html,
        write_timeline,
    )
    from fivefold.runs import FolderLock

    with FolderLock(output, "--output"):
        _clear(output)
        demo = Demo(
            folder=output, spec=LabSpec(hosts=_HOSTS, rate=rate, mtu=_FRAME_BYTES), steps=steps
        )
        console.rule("[bold]1/4 profile: the link, and the model's step on both hosts")
        cluster = demo.profile()
        configs = {method: demo.plan(method, cluster) for method in ("ddp", "recommended")}
        alone = max(steps // 6, 20)
        console.rule(f"[bold]2/4 compute only: {alone} steps without communication")
        demo.run("none", "train", str(demo.write("none", steps=alone)))
        for number, (method, config) in enumerate(configs.items(), start=3):
            title = "DDP" if method == "ddp" else "the recommended rule"
            console.rule(f"[bold]{number}/4 {title}: {steps} steps over {rate}")
            demo.run(method, "train", str(config))
        report = build_report([output / method for method in METHODS])
        print_page(report_text(report))
        for run in report.runs:
            write_timeline(run, run.path / "timeline.json")
        page = write_html(report_page(report), output / "report.html")
    for line in (
        f"\nreport: {page}  (open it in a browser; works offline)",
        f"timelines: {output}/*/timeline.json (open in ui.perfetto.dev)",
        f"by hand: fivefold profile --job, plan --for train --cluster {output}/cluster.toml,",
        "  train, report (docs/guides/plan_outputs.md)",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _clear(output: Path) -> None:
    """Make room for a new demo; refuse to delete what a demo did not write."""
    from fivefold.cli._demo_work import METHODS

    for method in (*METHODS, "co2"):  # the last: of earlier versions
        run = output / method
        if run.exists():
            if not (output / f"{method}.toml").exists():
                message = f"{run} exists and was not written by the demo"
                raise ConfigurationError(message, hint="choose another folder with --output")
            shutil.rmtree(run)
