"""What each setting of the outer rules does to the loss, at equal tokens, on real text.

Four workers train the transformer of ``_workload.py`` with the real engine. The network is not
shaped, since the loss does not depend on it. ``--tune`` gives every method the same number of
settings at a seed of its own; the sweeps start from each method's best and change one thing:
tau from 1 to 64, the staleness penalty, the clip, the outer momentum, the codec. Loss is that of
the drained model on held-out files, median and spread over the seeds.

    python -m benchmarks.optim.ablations --tune
    python -m benchmarks.optim.ablations [--sweeps tau,penalty,clip,momentum,codec] [--seeds 0,1,2]
    python -m benchmarks.optim.ablations --plot
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

from benchmarks.optim._kept import KeptOutcomes
from benchmarks.optim._runner import STEPS, Outcome, train
from benchmarks.optim._settings import CANDIDATES, LOSS_METRIC, METHODS, TUNING_RESULTS, Setting
from benchmarks.optim._sweeps import SWEEPS, draw_all, settings_of
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results

RESULTS = TUNING_RESULTS.with_name("ablations.json")
FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "optim"
TUNING_SEED = 100
QUICK_STEPS, QUICK_EVERY = 16, 8  # steps of a look, and of how many settings it takes one
TOPIC = "optim/ablations"


def rows_of(setting: Setting, outcomes: list[Outcome]) -> list[BenchmarkRow]:
    """The loss over the seeds, and what the engine counted."""
    finite = [one.bits_per_byte for one in outcomes if math.isfinite(one.bits_per_byte)]
    rows = []
    if finite:
        rows.append(_row(setting, LOSS_METRIC, "bit per byte", finite))
    if len(finite) < len(outcomes):
        rows.append(_row(setting, "diverged runs", "runs", [float(len(outcomes) - len(finite))]))
    gaps = [one.staleness_gap for one in outcomes if one.staleness_gap is not None]
    clipped = [one.clipped_fraction for one in outcomes if one.clipped_fraction]
    sent = [one.sent_bytes_per_step for one in outcomes if one.sent_bytes_per_step is not None]
    for metric, unit, values in (
        ("mean staleness gap", "ratio", [gap for gap in gaps if math.isfinite(gap)]),
        ("clipped share of the momentum", "ratio", clipped),
        ("sent per step and worker", "B", sent),
    ):
        if values:
            rows.append(_row(setting, metric, unit, values))
    return rows


def _row(setting: Setting, metric: str, unit: str, values: list[float]) -> BenchmarkRow:
    ours, spread = median_and_spread(values)
    return BenchmarkRow(
        case=setting.label,
        metric=metric,
        unit=unit,
        ours=ours,
        spread=spread if len(values) > 1 else None,
    )


def measure(
    settings: list[Setting], seeds: list[int], *, steps: int, kept: KeptOutcomes
) -> list[BenchmarkRow]:
    """Train every setting with every seed, settings in turn, and return all rows."""
    outcomes: dict[Setting, list[Outcome]] = {setting: [] for setting in settings}
    done = 0
    for seed in seeds:
        for setting in settings:
            start_s = time.perf_counter()
            found = kept.get(setting, seed, steps)
            if found is None:
                found = train(setting, seed=seed, steps=steps)
                kept.put(setting, seed, steps, found)
            outcomes[setting].append(found)
            done += 1
            print(
                f"{done}/{len(seeds) * len(settings)}  seed {seed}  {setting.label:64} "
                f"{found.bits_per_byte:.4f} bits per byte  {time.perf_counter() - start_s:5.1f} s",
                flush=True,
            )
    return [row for setting, found in outcomes.items() for row in rows_of(setting, found)]


def main() -> None:
    """Tune, measure or draw."""
    arguments = _arguments()
    if arguments.plot:
        print("\n".join(map(str, draw_all(arguments.output or RESULTS, FIGURES))))
        return
    if arguments.quick:
        arguments.seeds, arguments.steps = "0", QUICK_STEPS
    kept = KeptOutcomes(arguments.keep)
    if arguments.tune:
        methods = arguments.methods.split(",")
        settings = [setting for method in methods for setting in CANDIDATES[method]]
        settings = settings[:: QUICK_EVERY if arguments.quick else 1]
        rows = measure(settings, [TUNING_SEED], steps=arguments.steps, kept=kept)
        output = arguments.output or TUNING_RESULTS
    else:
        settings = settings_of(arguments.sweeps.split(","))
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        settings = settings[:: QUICK_EVERY if arguments.quick else 1]
        rows = measure(settings, seeds, steps=arguments.steps, kept=kept)
        output = arguments.output or RESULTS
    if arguments.quick:
        return
    # Kept outcomes are equal to fresh ones, so where they lay is no part of the command.
    write_results(output, topic=TOPIC, rows=rows, command=_command(arguments))
    if not arguments.tune:
        draw_all(output, FIGURES)


def _command(arguments: argparse.Namespace) -> str:
    parts = ["python -m benchmarks.optim.ablations", f"--steps {arguments.steps}"]
    if arguments.tune:
        parts.append(f"--tune --methods {arguments.methods}")
    else:
        parts.append(f"--sweeps {arguments.sweeps} --seeds {arguments.seeds}")
    return " ".join(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="search each method's settings instead")
    parser.add_argument("--plot", action="store_true", help="draw the plots from the results again")
    parser.add_argument("--sweeps", default=",".join(SWEEPS))
    parser.add_argument("--methods", default=",".join(METHODS), help="what --tune tunes")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=Path, help="file of outcomes; those of this commit are used")
    parser.add_argument("--quick", action="store_true", help="few settings, no results file")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
