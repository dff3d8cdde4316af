"""The work of ``fivefold demo``."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from fivefold.cli._plan_files import as_sent, read_job, runnable
from fivefold.errors import ConfigurationError
from fivefold.lab import LabSpec, run_lab
from fivefold.report import (
    build_report,
    print_page,
    report_page,
    report_text,
    write_html,
    write_timeline,
)
from fivefold.runs import FolderLock, write_text
from fivefold.strategy import Cluster, load_cluster, search_plans, space_of_target

_HOSTS = 2
# Large frames, as network cards handle them: emulating small ones takes processor time from the
# training beside it.
_FRAME_BYTES = 60_000
_TEMPLATE = files("fivefold.cli") / "templates" / "demo.toml"

# What docs/guides/which_rule_when.md recommends for a link that is the bottleneck; the planner
# chooses tau, and as many fragments.
_METHODS = {
    "none": 'method = "none"',
    "ddp": 'method = "ddp"',
    "recommended": 'method = "delay_corrected"\ntau = "auto"',
}
_MOST_TAU = 16  # of so short a training


@dataclass(frozen=True, kw_only=True)
class _Demo:
    folder: Path
    spec: LabSpec
    steps: int

    def write(self, method: str, *, steps: int) -> Path:
        """Write the configuration of one method, before it is planned."""
        config = self.folder / f"{method}.toml"
        text = _TEMPLATE.read_text(encoding="utf-8").format(
            output=(self.folder / method).as_posix(),
            steps=steps,
            sync=_METHODS[method],
            validate_every=steps // 5 if method != "none" else 0,
        )
        write_text(config, text)
        return config

    def run(self, name: str, *words: str) -> None:
        """Run a command of fivefold on all hosts of the lab."""
        command = [sys.executable, "-m", "fivefold", *words]
        result = run_lab(
            self.spec, command, log_folder=self.folder / "logs" / name, allow_unshaped=True
        )
        result.check()

    def profile(self) -> Cluster:
        """Measure the links and the model's step on all hosts."""
        config = self.write("recommended", steps=self.steps)
        file = self.folder / "cluster.toml"
        words = ("--sizes", "64KiB,1MiB,4MiB", "--repetitions", "3", "--output", str(file))
        self.run("profile", "profile", "--job", str(config), *words)
        return load_cluster(file)

    def plan(self, method: str, cluster: Cluster) -> Path:
        """Plan one method; its configuration then has what is expected of a step."""
        config = self.write(method, steps=self.steps)
        planned = read_job(config, cluster, {})
        cluster = as_sent(cluster, planned.config)
        space = planned.job.space
        taus = (1,) if method == "ddp" else tuple(t for t in space.tau if 1 < t <= _MOST_TAU)
        found = search_plans(
            planned.job.model, cluster.device, cluster.fabric,
            space=space_of_target(
                dataclasses.replace(space, tau=taus), "train",
                gpus_per_node=cluster.fabric.gpus_per_node,
            ),
        ).best[0]  # fmt: skip
        write_text(config, runnable("train", planned, found, cluster, base=None))
        return config


def run_demo(output: Path, rate: str, steps: int) -> None:
    """Profile, plan, train and compare, each named on standard error as it begins."""
    console = Console(stderr=True)
    with FolderLock(output, "--output"):
        _clear(output)
        demo = _Demo(
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
        report = build_report([output / method for method in _METHODS])
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
    for method in (*_METHODS, "co2"):  # the last: of earlier versions
        run = output / method
        if run.exists():
            if not (output / f"{method}.toml").exists():
                message = f"{run} exists and was not written by the demo"
                raise ConfigurationError(message, hint="choose another folder with --output")
            shutil.rmtree(run)
