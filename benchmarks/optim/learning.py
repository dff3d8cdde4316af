"""What the methods learn: bits per byte at equal tokens, and time to DDP's final loss.

Two hosts of the emulated cluster train the reference trainer's model on the source code of
Python's standard library, once per method and seed, over the same link and from the same tokens.
Every method runs with the outer settings that ``--tune`` found best for it at seed 100, which no
counted run uses. Time to target: the first moment at which a run's validation curve (linear
between its points) reaches the final bits per byte of the DDP run of the same seed; a second,
longer CO2 run is counted beside the one at equal tokens.

    python -m benchmarks.optim.learning [--rate 100Mbit/s] [--steps 120] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.lab import LabSpec, run_lab
from fivefold.report import read_run
from fivefold.report.summary import time_to_value

RESULTS = Path(__file__).parents[1] / "results" / "optim" / "learning.json"
CONFIG = """
[run]
output = "{output}"
seed = {seed}
steps = {steps}
log_every_steps = 10
validate_every_steps = {validate_every}
timeout_s = 300.0
[data]
sequence_length = 128
[model]
layers = 6
width = 192
heads = 6
[optim]
lr = {lr}
warmup_steps = 15
batch_size = 8
precision = "fp32"
validation_batches = 12
[sync]
method = "{method}"
{settings}
"""
POINTS = 10
FRAME_BYTES = 60_000  # see hidden_communication.py
TARGET_SPEED_UP = 3.0


@dataclass(frozen=True)
class Case:
    """One method with its outer settings."""

    name: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    length: float = 1.0
    lr: float = 4e-3

    def toml(self) -> str:
        """The settings as lines of the [sync] section."""
        return "\n".join(f"{key} = {json.dumps(value)}" for key, value in self.settings.items())


TAU = 5
# The best of each method in a run with --tune (benchmarks/results/optim/tuning.json); SlowMo's was
# momentum 0, which is Local SGD, so it gets the best of the others.
CO2_SETTINGS = {"tau": TAU, "outer_lr": 0.5, "outer_momentum": 0.0, "staleness": "gap"}
CASES = [
    Case("DDP", "ddp"),
    Case(f"Local SGD tau {TAU}", "local_sgd", {"tau": TAU}),
    Case(f"SlowMo tau {TAU}", "slowmo", {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.2}),
    Case(f"CO2 tau {TAU}", "co2", CO2_SETTINGS),
    Case(f"CO2 tau {TAU}, longer", "co2", CO2_SETTINGS, length=1.6),
    Case(f"delay-corrected tau {TAU}", "delay_corrected", {"tau": TAU}),
]


def candidates() -> list[Case]:
    """What --tune tries."""
    found = [
        Case(f"SlowMo {lr}/{beta}", "slowmo", {"tau": TAU, "outer_lr": lr, "outer_momentum": beta})
        for lr, beta in [(1.0, 0.0), (1.0, 0.2), (1.0, 0.4)]
    ]
    for tau, lr, beta, staleness, inner_lr in [
        (TAU, 1.0, 0.0, "gap", 4e-3),
        (TAU, 0.7, 0.2, "gap", 4e-3),
        (TAU, 0.5, 0.0, "gap", 4e-3),
        (TAU, 0.5, 0.2, "gap", 4e-3),
        (TAU, 0.5, 0.0, "none", 4e-3),
        (TAU, 0.35, 0.0, "none", 4e-3),
        (TAU, 0.7, 0.2, "gap", 2e-3),
        (TAU, 0.7, 0.0, "gap", 2e-3),
        (TAU, 0.5, 0.0, "none", 2e-3),
    ]:
        settings = {"tau": tau, "outer_lr": lr, "outer_momentum": beta, "staleness": staleness}
        name = f"CO2 tau {tau} {lr}/{beta} {staleness} inner {inner_lr}"
        found.append(Case(name, "co2", settings, lr=inner_lr))
    return found


def train(case: Case, *, rate: str | None, steps: int, seed: int, folder: Path) -> Path:
    """Run one training in the lab, unless a run kept from before has finished; its folder."""
    output = folder / f"{case.name.replace(' ', '_').replace('/', '-').replace(',', '')}-{seed}"
    if (output / "result.json").exists():
        return output
    config = folder / f"{output.name}.toml"
    steps = round(steps * case.length)
    text = CONFIG.format(
        output=output.as_posix(),
        seed=seed,
        steps=steps,
        method=case.method,
        lr=case.lr,
        validate_every=max(round(steps / POINTS / case.length), 1),
        settings=case.toml(),
    )
    config.write_text(text)
    command = [sys.executable, "-m", "fivefold", "train", str(config)]
    logs = folder / "logs" / output.name
    result = run_lab(
        LabSpec(hosts=2, rate=rate, mtu=FRAME_BYTES), command, log_folder=logs, stream=False
    )
    if result.exit_code != 0:
        sys.exit(f"{case.name}, seed {seed}: exit code {result.exit_code}, see {logs}")
    return output


def outcome(run_folder: Path) -> dict[str, Any]:
    """What a finished run reached, with its validation curve."""
    result = json.loads((run_folder / "result.json").read_text())
    run = read_run(run_folder)
    curve = [(point.wall_s, point.bits_per_byte) for point in run.metrics.validation]
    return {
        "bits_per_byte": result["bits_per_byte"],
        "wall_s": result["wall_s"],
        "tokens_per_s": result["tokens_per_s"],
        "overlap": result["communication"]["overlap_fraction"],
        "curve": curve,
    }


def rows_of(outcomes: dict[str, list[dict[str, Any]]], *, link: str) -> list[BenchmarkRow]:
    """Bits per byte, speed and time to DDP's final loss of every method."""
    rows = []
    ddp = outcomes["DDP"]
    for name, found in outcomes.items():
        case = f"{link}, {name}"
        for metric, unit in (("bits_per_byte", "bit"), ("tokens_per_s", "tokens/s")):
            ours, spread = median_and_spread([one[metric] for one in found])
            peers = {} if name == "DDP" else {"DDP": median_and_spread([d[metric] for d in ddp])[0]}
            label = "final validation loss" if metric == "bits_per_byte" else "speed"
            rows.append(
                BenchmarkRow(
                    case=case, metric=label, unit=f"{unit} per byte" if unit == "bit" else unit,
                    ours=ours, spread=spread, peers=peers,
                )
            )  # fmt: skip
        if name == "DDP":
            continue
        times = [
            time_to_value(one["curve"], base["bits_per_byte"])
            for one, base in zip(found, ddp, strict=True)
        ]
        reached = sum(time is not None for time in times)
        rows.append(
            BenchmarkRow(
                case=case, metric="seeds that reached DDP's final loss", unit="seeds",
                ours=float(reached), peers={"seeds": float(len(times))},
            )
        )  # fmt: skip
        if reached == len(times):
            ratios = [
                base["wall_s"] / time
                for base, time in zip(ddp, times, strict=True)
                if time is not None
            ]
            ours, spread = median_and_spread(ratios)
            target = TARGET_SPEED_UP if name.startswith("CO2") else None
            rows.append(
                BenchmarkRow(
                    case=case, metric="speed-up to DDP's final loss", unit="ratio", ours=ours,
                    spread=spread, target=target, met=None if target is None else ours >= target,
                )
            )  # fmt: skip
    return rows


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Train every method for every seed, in turn, and write the results."""
    outcomes: dict[str, list[dict[str, Any]]] = {case.name: [] for case in CASES}
    for seed in [int(seed) for seed in arguments.seeds.split(",")]:
        for case in CASES:
            run = train(case, rate=arguments.rate, steps=arguments.steps, seed=seed, folder=folder)
            found = outcome(run)
            outcomes[case.name].append(found)
            print(
                f"seed {seed}  {case.name:28} {found['bits_per_byte']:.4f} bits per byte  "
                f"{found['wall_s']:7.1f} s  {found['tokens_per_s']:7.0f} tokens/s",
                flush=True,
            )
    rows = rows_of(outcomes, link=arguments.rate)
    write_results(arguments.output, topic="optim/learning", rows=rows)


def tune(arguments: argparse.Namespace, folder: Path) -> None:
    """Short runs at a seed of their own, without a shaped link: only the loss matters."""
    rows = []
    for case in candidates():
        found = outcome(train(case, rate=None, steps=arguments.steps, seed=100, folder=folder))
        print(f"{case.name:28} {found['bits_per_byte']:.4f} bits per byte", flush=True)
        rows.append(
            BenchmarkRow(
                case=case.name, metric="final validation loss", unit="bit per byte",
                ours=found["bits_per_byte"],
            )
        )  # fmt: skip
    write_results(arguments.output.with_name("tuning.json"), topic="optim/learning", rows=rows)


def main() -> None:
    """Compare, or tune."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100Mbit/s")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--tune", action="store_true", help="search the outer settings instead")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (tune if arguments.tune else compare)(arguments, folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
