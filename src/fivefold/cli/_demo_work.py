"""The work of ``fivefold demo``."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fivefold.cli._plan_files import as_sent, read_job, runnable
from fivefold.lab import LabSpec, run_lab
from fivefold.runs import write_text
from fivefold.strategy import Cluster, load_cluster, search_plans, space_of_target

_TEMPLATE = files("fivefold.cli") / "templates" / "demo.toml"

# What docs/guides/which_rule_when.md recommends for a link that is the bottleneck; the planner
# chooses tau, and as many fragments.
METHODS = {
    "none": 'method = "none"',
    "ddp": 'method = "ddp"',
    "recommended": 'method = "delay_corrected"\ntau = "auto"',
}
_MOST_TAU = 16  # of so short a training


@dataclass(frozen=True, kw_only=True)
class Demo:
    folder: Path
    spec: LabSpec
    steps: int

    def write(self, method: str, *, steps: int) -> Path:
        """Write the configuration of one method, before it is planned."""
        config = self.folder / f"{method}.toml"
        text = _TEMPLATE.read_text(encoding="utf-8").format(
            output=(self.folder / method).as_posix(),
            steps=steps,
            sync=METHODS[method],
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
