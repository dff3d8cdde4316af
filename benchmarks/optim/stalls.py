"""What a link that stalls at random costs the merges with a short delay.

Two hosts of the emulated cluster send 8 MiB. A step of computation is a sleep, so that only the
engine, the link and the stalls are measured, beside whatever else runs. While a stall lasts, one
host's uplink carries 1 Mbit/s; stalls follow one another at random (exponential gaps, uniform
lengths) and are the same for every variant of a repetition. Each variant runs on the calm link and
on the stalling one, half of it before its window. A delay of d steps is a stall of d steps less the
message that costs nothing; what is longer is waited for, so the limit is 0.

    python -m benchmarks.optim.stalls [--rate 400] [--step 0.05] [--repetitions 3] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.lab import LabSpec, run_lab
from fivefold.optim import DelayCorrected, LocalSGD, OuterRule, OuterSync

RESULTS = Path(__file__).parents[1] / "results" / "optim" / "stalls.json"
TENSORS, WIDTH = 8, 512  # 1 MiB each: a fragment of the smallest size that is chosen
FRAME_BYTES = 9000  # one of them passes in 72 ms while the link stalls, so it goes on at once
STALLED_RATE = "1mbit"
MEAN_GAP_S, SHORTEST_S, LONGEST_S = 1.5, 0.05, 0.25
CALM, STALLING = "calm", "stalling"


@dataclass(frozen=True)
class Variant:
    """One way of bringing two replicas together.

    Attributes:
        name: What rows call it.
        rule: The outer rule.
        codec: How payloads travel.
    """

    name: str
    rule: OuterRule
    codec: str = "fp32"


VARIANTS = [
    Variant("waits at every step", LocalSGD(tau=1)),
    *(
        Variant(f"tau 8, {parts} fragment(s), {8 // parts} step(s) late", rule)
        for parts in (8, 4, 2, 1)
        for rule in [DelayCorrected(tau=8, fragments=parts)]
    ),
    Variant('tau="auto"', DelayCorrected(tau="auto")),
    Variant('tau="auto", codec="auto"', DelayCorrected(tau="auto"), "auto"),
]


@contextmanager
def stalls(rate: str, *, seed: int) -> Iterator[None]:
    """Let this host's uplink stall at random while the block runs."""
    draw, ended = random.Random(seed), threading.Event()  # noqa: S311 - no secret

    def limit(to: str) -> None:
        words = f"tc qdisc change dev eth0 root tbf rate {to} burst 128kb limit 16mb"
        subprocess.run(words.split(), check=True)

    def run() -> None:
        while not ended.wait(draw.expovariate(1 / MEAN_GAP_S)):
            limit(STALLED_RATE)
            time.sleep(draw.uniform(SHORTEST_S, LONGEST_S))
            limit(rate)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def sample(variant: Variant, *, step_s: float, steps: int) -> dict[str, Any]:
    """Run warm-up and window; the figures of the rank that waited longer."""
    model = torch.nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(TENSORS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = OuterSync(model, optimizer, rule=variant.rule, codec=variant.codec)

    if not variant.rule.delayed:
        steps //= 4  # of several times the length

    def run() -> float:
        began_s = time.perf_counter()
        for _ in range(steps):
            time.sleep(step_s)
            sync.step()
        return time.perf_counter() - began_s

    run()
    before = sync.statistics()
    wall_s = run()
    after = sync.statistics()
    sync.finalize()
    waited = torch.tensor((after.exposed_wait_s - before.exposed_wait_s) / wall_s)
    dist.all_reduce(waited, op=dist.ReduceOp.MAX)
    return {
        "wait_share": float(waited),
        "tau": after.tau,
        "fragments": after.fragments,
        "delay_steps": after.delay_steps,
    }


def worker(output: Path, rate: str, step_s: float, steps: int, repetitions: int) -> None:
    """Run all variants in turn; rank 0 writes one line per sample."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for repetition in range(repetitions):
        for variant in VARIANTS:
            for link in (CALM, STALLING):
                if rank == 0 and link == STALLING:
                    with stalls(rate, seed=repetition):
                        figures = sample(variant, step_s=step_s, steps=steps)
                else:
                    figures = sample(variant, step_s=step_s, steps=steps)
                if rank == 0:
                    record = {"variant": variant.name, "link": link, **figures}
                    with output.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                    print(record, flush=True)
    dist.destroy_process_group()


def rows_of(samples: list[dict[str, Any]]) -> list[BenchmarkRow]:
    """One row of waits for each variant, and what was chosen where something chooses."""
    rows = []
    for variant in VARIANTS:
        found = {
            link: [s for s in samples if (s["variant"], s["link"]) == (variant.name, link)]
            for link in (CALM, STALLING)
        }
        calm, _ = median_and_spread([s["wait_share"] for s in found[CALM]])
        ours, spread = median_and_spread([s["wait_share"] for s in found[STALLING]])
        rows.append(
            BenchmarkRow(
                case=variant.name, metric="exposed wait, share of wall time", unit="ratio",
                ours=ours, spread=spread, peers={"calm link": calm}, limit=0.0,
            )
        )  # fmt: skip
        if variant.rule.auto_tau is None:
            continue
        for key in ("tau", "fragments", "delay_steps"):
            calm, _ = median_and_spread([float(s[key]) for s in found[CALM]])
            ours, spread = median_and_spread([float(s[key]) for s in found[STALLING]])
            rows.append(
                BenchmarkRow(
                    case=variant.name, metric=f"{key.replace('_', ' ')} at the end", unit="",
                    ours=ours, spread=spread, peers={"calm link": calm},
                )
            )  # fmt: skip
    return rows


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=240, help="before the window, and in it")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        worker(given.worker, f"{given.rate}mbit", given.step, given.steps, given.repetitions)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples.jsonl"
        options = {key: getattr(given, key) for key in ("rate", "step", "steps", "repetitions")}
        command = [sys.executable, "-m", "benchmarks.optim.stalls", "--worker", str(output)]
        command += [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        spec = LabSpec(hosts=2, rate=f"{given.rate}Mbit/s", mtu=FRAME_BYTES)
        result = run_lab(spec, command, log_folder=Path(folder) / "logs")
        if result.exit_code != 0:
            sys.exit(result.exit_code)
        samples = [json.loads(line) for line in output.read_text().splitlines()]
    rows = rows_of(samples)
    write_results(given.output, topic="optim/stalls", rows=rows)
    for row in rows:
        print(f"{row.case:34} {row.metric:34} {row.ours:.4g} {row.spread} {row.peers}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
