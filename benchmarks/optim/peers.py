"""Ours against DDP, PowerSGD, PostLocalSGD, fairscale SlowMo and torchft, on slow links.

Four hosts of the emulated cluster, one rank each; same model, seed and text for every method.
The computation of a step is simulated: the ranks share few cores, so each does its real forward
pass, backward pass and update and sleeps what is left of a stated time, in the forward pass, in
the backward pass between the model's blocks (where DDP's buckets travel), and in the update. See
``_peers/_pace.py``; steps in which the real work took longer are counted.

Three measurements. *Timing*: for each link rate all methods in turn, ``--repeats`` times over,
windows of whole rounds. *Memory*: on a larger model. *Learning*: the same steps without link and
pace, because a loss depends on neither; the time to a loss is a run's step number times the
measured time of a step, plus the method's drain. The target is DDP's final loss of the same seed;
methods also run with ``--longer`` times the tokens, ours and peers alike, and the better counts.
A loss is that of the mean of the ranks' parameters.

    python -m benchmarks.optim.peers [--rates 50,200,1000] [--only DDP,CO2] [--keep FOLDER]

Peers come with ``pip install 'fivefold[peers]'``. A method that fails is named and left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.optim._peers._case import Case
from benchmarks.optim._peers._figures import curve_of, error_of, timing_of
from benchmarks.optim._peers._host import Answer, read_answers, run_host
from benchmarks.optim._peers._rows import Measured, print_table, rows_of
from benchmarks.optim._peers._table import AUTO, CASES, choice_text, find_case, with_choice
from benchmarks.optim._workload import BATCH_SIZE, SEQUENCE_LENGTH, corpus, make_model
from benchmarks.results_file import write_results
from fivefold.lab import LabSpec, run_lab

HOSTS = 4
FRAME_BYTES = 60_000  # as a network card would cut them; small frames cost the processor too much
VALIDATE_EVERY_STEPS = 16
RESULTS = Path(__file__).parents[1] / "results" / "optim" / "peers.json"
MEASUREMENTS = ("timing", "memory", "learning")

Job = dict[str, Any]


def chosen_cases(only: str | None) -> list[Case]:
    """The cases whose names contain one of the words; the two references always."""
    words = only.split(",") if only else [""]
    always = {CASES[0].name, "DDP"}
    return [case for case in CASES if case.name in always or any(w in case.name for w in words)]


def timing_jobs(cases: Sequence[Case], arguments: argparse.Namespace) -> list[Job]:
    """All methods in turn, several times over."""
    return [
        {"measurement": "timing", "case": case.name, "step_s": arguments.step_time, "turn": turn}
        for turn in range(arguments.repeats)
        for case in cases
    ]


def learning_jobs(cases: Sequence[Case], arguments: argparse.Namespace) -> Iterator[Job]:
    """One run per case and seed, and the longer ones."""
    for seed in map(int, arguments.seeds.split(",")):
        for case in cases:
            if case.kind == "alone":
                continue
            lengths = [arguments.steps]
            if case.longer:
                lengths.append(round(arguments.longer * arguments.steps))
            for steps in lengths:
                problem = {"steps": steps, "seed": seed, "lr": case.lr}
                yield {
                    "measurement": "learning",
                    "case": case.name,
                    "problem": problem,
                    "every": VALIDATE_EVERY_STEPS,
                }


def carry_out(jobs: list[Job], rate: str | None, keep: Path | None) -> list[list[Answer]]:
    """Run jobs in the lab, but for those whose answers were kept.

    Args:
        jobs: What to run.
        rate: Of the links; None for unshaped ones.
        keep: Folder of answers of earlier runs.
    """
    kept = {number: _kept(job, rate, keep) for number, job in enumerate(jobs)}
    missing = [number for number, path in kept.items() if path is None or not path.exists()]
    answers: dict[int, list[Answer]] = {}
    if missing:
        found = _in_lab([jobs[number] for number in missing], rate)
        answers = dict(zip(missing, found, strict=True))
    for number, path in kept.items():
        if number not in answers:
            assert path is not None, "only kept answers are not run for"
            answers[number] = json.loads(path.read_text(encoding="utf-8"))
        elif path is not None and error_of(answers[number]) is None:
            path.write_text(json.dumps(answers[number]), encoding="utf-8")
    return [answers[number] for number in range(len(jobs))]


def _in_lab(jobs: list[Job], rate: str | None) -> list[list[Answer]]:
    print(f"{len(jobs)} jobs, links of {rate or 'no limit'}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        spec = LabSpec(hosts=HOSTS, rate=rate, mtu=FRAME_BYTES)
        command = [sys.executable, "-m", "benchmarks.optim.peers", "--worker", str(folder)]
        run_lab(spec, command, log_folder=folder / "logs").check()
        return read_answers(folder, jobs, HOSTS)


def _kept(job: Job, rate: str | None, keep: Path | None) -> Path | None:
    """Where a job's answers are kept: under what it ran, with all settings."""
    if keep is None:
        return None
    settings = asdict(find_case(job["case"]))
    del settings["lr"]  # a learning run has it in its problem, no other measurement reads it
    text = json.dumps([job, rate, settings], sort_keys=True, default=dict)
    return keep / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def measure(arguments: argparse.Namespace) -> Measured:
    """All measurements of all cases."""
    cases = chosen_cases(arguments.only)
    rates = [f"{rate}Mbit/s" for rate in arguments.rates.split(",")]
    measured = Measured(
        cases=cases,
        rates=rates,
        tokens_per_step=HOSTS * BATCH_SIZE * SEQUENCE_LENGTH,
        payload_bytes=4 * make_model(0).num_parameters,
    )
    wanted = arguments.measure.split(",")
    if "timing" in wanted:
        for rate in rates:
            _take_timings(measured, timing_jobs(cases, arguments), rate, arguments.keep)
    if "memory" in wanted:
        jobs: list[Job] = [{"measurement": "memory", "case": case.name} for case in cases]
        _take_memory(measured, jobs, arguments.keep)
    if "learning" in wanted:
        cases = _with_chosen_rounds(measured)
        _take_curves(measured, list(learning_jobs(cases, arguments)), arguments)
    return measured


def _with_chosen_rounds(measured: Measured) -> list[Case]:
    """The cases, but each round that one chose by itself at a rate as a case of its own.

    Without a given number of fragments a fixed tau chooses too: by the link.
    """
    found: dict[str, Case] = {}
    for case in measured.cases:
        chosen = {
            rate: statistics.mode(map(choice_text, choices))
            for rate in measured.rates
            if (choices := _choices(measured, rate, case))
        }
        if not _adapts(case) and len(set(chosen.values())) < 2:
            found[case.name] = case
            continue
        for rate, choice in chosen.items():
            fixed = with_choice(case, choice)
            found[fixed.name] = fixed
            measured.chosen[rate, case.name] = fixed.name
    measured.cases = [*measured.cases, *(c for c in found.values() if c not in measured.cases)]
    return list(found.values())


def _choices(measured: Measured, rate: str, case: Case) -> list[Mapping[str, Any]]:
    windows = measured.timings.get((rate, case.name), [])
    return [timing.chosen for timing in windows if timing.chosen is not None]


def _adapts(case: Case) -> bool:
    return dict(case.settings.get("options", {})).get("tau") == AUTO


def _failed(measured: Measured, what: str, job: Job, answers: list[Answer]) -> bool:
    error = error_of(answers)
    if error is not None:
        measured.failures[what, job["case"]] = error
    return error is not None


def _take_timings(measured: Measured, jobs: list[Job], rate: str, keep: Path | None) -> None:
    for job, answers in zip(jobs, carry_out(jobs, rate, keep), strict=True):
        if not _failed(measured, f"timing at {rate}", job, answers):
            measured.timings.setdefault((rate, job["case"]), []).append(timing_of(answers))


def _take_memory(measured: Measured, jobs: list[Job], keep: Path | None) -> None:
    for job, answers in zip(jobs, carry_out(jobs, None, keep), strict=True):
        if not _failed(measured, "memory", job, answers):
            added = max(answer["added_bytes_per_parameter"] for answer in answers)
            measured.added_bytes[job["case"]] = added


def _take_curves(measured: Measured, jobs: list[Job], arguments: argparse.Namespace) -> None:
    for job, answers in zip(jobs, carry_out(jobs, None, arguments.keep), strict=True):
        if not _failed(measured, "learning", job, answers):
            equal = job["problem"]["steps"] == arguments.steps
            runs = measured.equal if equal else measured.longer
            runs.setdefault(job["case"], []).append(curve_of(answers))


def peer_versions() -> dict[str, str]:
    """Versions of the peers that are installed."""
    found = {}
    for package in ("fairscale", "torchft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="50,200,1000", help="Mbit/s, comma-separated")
    parser.add_argument("--only", help="words in the names of cases, comma-separated")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=192, help="of a learning run")
    parser.add_argument("--longer", type=float, default=1.5, help="times the tokens")
    parser.add_argument("--repeats", type=int, default=3, help="turns of the timing")
    parser.add_argument("--step-time", type=float, default=0.1, help="simulated compute, s")
    parser.add_argument("--measure", default=",".join(MEASUREMENTS))
    parser.add_argument("--keep", type=Path, help="use and keep answers in this folder")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a look: one rate, no results file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rates, arguments.repeats, arguments.steps = "200", 1, 40
    return arguments


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    if arguments.worker is not None:
        run_host(arguments.worker)
        return
    corpus()  # tokenised once, here
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    measured = measure(arguments)
    print_table(measured)
    if not arguments.quick:
        rows = rows_of(measured)
        write_results(arguments.output, topic="optim/peers", rows=rows, versions=peer_versions())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
