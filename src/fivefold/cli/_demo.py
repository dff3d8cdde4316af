"""``fivefold demo``: the main job, from nothing to a report, in a few minutes."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fivefold.cli._later import later
from fivefold.errors import ConfigurationError

with later():
    from fivefold.lab import LabSpec, run_lab
    from fivefold.report import (
        build_report,
        print_page,
        report_page,
        report_text,
        write_html,
        write_timeline,
    )
    from fivefold.runs import FolderLock


_HOSTS = 2
# Large frames, as network cards handle them: emulating small ones takes processor time from the
# training beside it.
_FRAME_BYTES = 60_000

# The model that both methods train: 2.7 million parameters, 10.8 MB of float32 per all-reduce.
# At 100 Mbit/s a two-host all-reduce takes about 0.9 s against 0.2 s of compute per step on a
# server core, so tau = 6 hides it with room to spare. The outer settings are the best of
# benchmarks/optim/learning.py --tune. Precision is fixed, so that all machines learn the same.
_CONFIG = """\
# Written by `fivefold demo`. Run it again: fivefold train THIS_FILE --nproc 2
[run]
output = "{output}"
seed = 0
steps = {steps}
log_every_steps = 5
validate_every_steps = {validate_every}
[data]
path = "stdlib"
sequence_length = 128
[model]
layers = 6
width = 192
heads = 6
[optim]
lr = 4e-3
warmup_steps = 15
batch_size = 8
precision = "fp32"
validation_batches = 8
[sync]
method = "{method}"
{settings}"""

_METHODS = {"none": "", "ddp": "", "co2": "tau = 6\nouter_lr = 0.5\nouter_momentum = 0.0\n"}


@dataclass(frozen=True, kw_only=True)
class _Demo:
    folder: Path
    spec: LabSpec
    steps: int
    console: Console

    def train(self, method: str, *, title: str, steps: int) -> None:
        """Train with one method on all hosts of the lab."""
        self.console.rule(f"[bold]{title}")
        run = self.folder / method
        config = self.folder / f"{method}.toml"
        validate_every = steps // 5 if method != "none" else 0
        config.write_text(
            _CONFIG.format(
                output=run.as_posix(),
                steps=steps,
                method=method,
                settings=_METHODS[method],
                validate_every=validate_every,
            )
        )
        command = [sys.executable, "-m", "fivefold", "train", str(config)]
        result = run_lab(
            self.spec, command, log_folder=self.folder / "logs" / method, allow_unshaped=True
        )
        result.check()


def demo_command(
    *,
    output: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path(
        "runs/demo"
    ),
    rate: Annotated[str, typer.Option(help="Rate of each host's link.")] = "100Mbit/s",
    steps: Annotated[int, typer.Option(min=40, help="Optimizer steps per rank.")] = 150,
) -> None:
    """Train the same model with DDP and with CO2 over a slow link, and report what was hidden.

    Two emulated hosts on this machine, one rank each, from the same seed, on the source code of
    Python's standard library. Needs root or user namespaces for the links; without them it runs
    over loopback and says so. An earlier demo in the same folder is replaced.
    """
    console = Console(stderr=True)
    with FolderLock(output, "--output"):
        _clear(output)
        demo = _Demo(
            folder=output,
            spec=LabSpec(hosts=_HOSTS, rate=rate, mtu=_FRAME_BYTES),
            steps=steps,
            console=console,
        )
        alone = max(steps // 4, 20)
        title = f"1/3 compute only: {alone} steps without communication"
        demo.train("none", title=title, steps=alone)
        demo.train("ddp", title=f"2/3 DDP: {steps} steps over {rate}", steps=steps)
        demo.train("co2", title=f"3/3 CO2: {steps} steps over {rate}", steps=steps)
        report = build_report([output])
        print_page(report_text(report))
        for run in report.runs:
            write_timeline(run, run.path / "timeline.json")
        page = write_html(report_page(report), output / "report.html")
    for line in (
        f"\nreport: {page}  (open it in a browser; works offline)",
        f"timelines: {output}/*/timeline.json (open in ui.perfetto.dev)",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _clear(output: Path) -> None:
    """Make room for a new demo; refuse to delete what a demo did not write."""
    for method in _METHODS:
        run = output / method
        if run.exists():
            if not (output / f"{method}.toml").exists():
                message = f"{run} exists and was not written by the demo"
                raise ConfigurationError(message, hint="choose another folder with --output")
            shutil.rmtree(run)
