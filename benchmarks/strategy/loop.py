"""Measures how far a planned step is from the trainer's own: profile, plan, train, report.

Every case goes through the commands that a user types, on two emulated hosts with one rank each:
the links and the model's step are profiled on both hosts at once, each method is planned from what
was found and trained as planned, and the report says what was predicted and what was measured. The
steps are real training, not sleeps. Each repetition profiles anew.

    python -m benchmarks.strategy.loop [--repetitions 3] [--case NAME] [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "loop.json"
HOSTS = 2
FRAME_BYTES = 60_000  # as a network card would cut them; small frames cost the processor too much
TARGET = 0.10  # of the measured step
PARTS = ("step", "compute", "exposed communication", "one exchange in flight", "memory")

DENSE = """[model]
layers = 6
width = 192
heads = 6
"""
WIDE = """[model]
layers = 3
width = 384
heads = 6
"""
EXPERTS = """[model]
layers = 4
width = 128
heads = 4
[model.moe]
experts = 8
top_k = 2
expert_parallel = {expert_parallel}
balance_loss = 0.01
"""
METHODS = {
    "DDP": 'method = "ddp"',
    "delay-corrected": 'method = "delay_corrected"\ntau = "auto"',
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a link.

    Attributes:
        name: For people.
        model: The model's tables of the configuration.
        rate: Of each host's link.
        methods: Ways of training, of ``METHODS``.
    """

    name: str
    model: str
    rate: str
    methods: tuple[str, ...] = tuple(METHODS)


CASES = (
    Case(name="narrow and deep", model=DENSE, rate="100Mbit/s"),
    Case(name="narrow and deep", model=DENSE, rate="400Mbit/s"),
    Case(name="wide", model=WIDE, rate="100Mbit/s"),
    Case(name="experts on both hosts", model=EXPERTS, rate="400Mbit/s", methods=("DDP",)),
)

QUICK_STEPS = 20
Figures = dict[str, tuple[float, float]]  # by part: predicted and measured


def configuration(case: Case, method: str, output: Path, steps: int) -> str:
    """Return the trainer's configuration of a case, before it is planned."""
    model = case.model.format(expert_parallel=HOSTS)
    return f"""[run]
output = "{output.as_posix()}"
steps = {steps}
log_every_steps = 5
[data]
path = "stdlib"
sequence_length = 128
{model}
[optim]
batch_size = 8
precision = "fp32"
warmup_steps = 10
[sync]
{METHODS[method]}
"""


def go_round(case: Case, steps: int) -> Iterator[tuple[str, Figures]]:
    """Profile once, then plan, train and report each method.

    Args:
        case: What runs.
        steps: Of each training.

    Yields:
        A method and its figures.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cluster = folder / "cluster.toml"
        for method in case.methods:
            config = folder / f"{method}.toml"
            run = folder / method
            config.write_text(configuration(case, method, run, steps), encoding="utf-8")
            if not cluster.exists():
                profile = ["profile", "--job", str(config), "--output", str(cluster)]
                on_hosts(case.rate, profile)
            planned = folder / f"{method}_planned.toml"
            words = ["--cluster", str(cluster), "--for", "train", "--output", str(planned)]
            fivefold(["plan", str(config), *words])
            on_hosts(case.rate, ["train", str(planned)])
            found = json.loads(fivefold(["report", str(run), "--json"]))
            yield method, figures_of(found)


def on_hosts(rate: str, words: list[str]) -> None:
    """Run a command of fivefold on all hosts of the lab."""
    lab = ["lab", "run", "--hosts", str(HOSTS), "--rate", rate, "--mtu", str(FRAME_BYTES)]
    fivefold([*lab, "--", sys.executable, "-m", "fivefold", *words])


def fivefold(words: list[str]) -> str:
    """Run a command of fivefold here; its output, or a failure with what it said."""
    command = [sys.executable, "-m", "fivefold", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"fivefold {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def figures_of(report: dict[str, Any]) -> Figures:
    """Return predicted and measured by part, of the report of one planned run."""
    (run,) = report["predicted"]
    for finding in run["findings"]:
        print(f"    {finding}", flush=True)
    return {
        part: (figures["predicted"], figures["measured"])
        for part, figures in run["parts"].items()
        if part in PARTS and figures["measured"] is not None
    }


def rows_of(name: str, rounds: list[Figures]) -> list[BenchmarkRow]:
    """Return the rows of a case and method: the step's error, and both figures of every part."""
    rows = []
    errors = [figures["step"][0] / figures["step"][1] - 1 for figures in rounds]
    median, spread = median_and_spread(errors)
    rows.append(
        BenchmarkRow(
            case=name,
            metric="error of the predicted step",
            unit="ratio",
            ours=median,
            spread=spread,
            target=TARGET,
            met=abs(median) <= TARGET,
        )
    )
    for part in PARTS:
        if all(part in figures for figures in rounds):
            predicted, spread = median_and_spread([figures[part][0] for figures in rounds])
            measured, _ = median_and_spread([figures[part][1] for figures in rounds])
            rows.append(
                BenchmarkRow(
                    case=name,
                    metric=f"{part}, predicted",
                    unit="B" if part == "memory" else "s",
                    ours=predicted,
                    spread=spread,
                    peers={"measured": measured},
                )
            )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    parser.add_argument("--case", help="only cases with this in their name")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="few steps once, no results file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = min(arguments.steps, QUICK_STEPS)
    found: dict[str, list[Figures]] = {}
    for repetition in range(1 if arguments.quick else arguments.repetitions):
        for case in CASES:
            if arguments.case is not None and arguments.case not in case.name:
                continue
            for method, figures in go_round(case, arguments.steps):
                name = f"{case.name}, {case.rate}, {method}"
                found.setdefault(name, []).append(figures)
                predicted, measured = figures["step"]
                print(
                    f"{repetition} {name}: step {predicted:.3f} s predicted, {measured:.3f} s "
                    f"measured, {predicted / measured - 1:+.1%}",
                    flush=True,
                )
    rows = [row for name, rounds in found.items() for row in rows_of(name, rounds)]
    if not arguments.quick:
        write_results(arguments.output, topic="strategy/loop", rows=rows)


if __name__ == "__main__":
    main()
