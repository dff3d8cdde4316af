"""What hidden communication costs in quality: bits per byte of each rule at equal tokens.

Four workers, the real engine on each, train the model of ``_workload`` on the same tokens. The
ranks are threads of one process that hand their payloads over in memory: what a rule learns does
not depend on how fast the network is, only on which step a mean is merged at. DDP is the mean of
the four gradients at every step. Finished runs are kept in --keep and not repeated.

    python -m benchmarks.optim.quality --keep FOLDER [--steps 600] [--seeds 0,1,2] [--lrs 4e-3]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.optim._workload import Problem, Worker, corpus, validate
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.optim import CO2, DelayCorrected, LocalSGD, OuterRule, OuterSync, StreamingDiLoCo
from fivefold.testing import InMemoryTransport, run_world

RESULTS = Path(__file__).parents[1] / "results" / "optim" / "quality.json"
WORLD_SIZE = 4
_TIMEOUT_S = 36_000.0
DDP = "DDP"
RULES: dict[str, Callable[[], OuterRule]] = {
    "Local SGD tau 8 (waits)": lambda: LocalSGD(tau=8),
    "delay-corrected tau 8": lambda: DelayCorrected(tau=8),
    "delay-corrected tau 8, 4 fragments": lambda: DelayCorrected(tau=8, fragments=4),
    "delay-corrected tau 8, 8 fragments": lambda: DelayCorrected(tau=8, fragments=8),
    "Streaming DiLoCo tau 8, 8 fragments": lambda: StreamingDiLoCo(
        tau=8, fragments=8, outer_momentum=0.5
    ),
    "CO2 tau 8": lambda: CO2(tau=8, outer_lr=0.5, outer_momentum=0.0),
}


def train_ddp(problem: Problem) -> float:
    """Train one model on the mean of all workers' gradients; bits per byte."""
    workers = [Worker(problem, rank=rank, world_size=WORLD_SIZE) for rank in range(WORLD_SIZE)]
    models = [list(worker.model.parameters()) for worker in workers]
    for copies in zip(*models, strict=True):  # one storage: an update of the first is one of all
        for copy in copies[1:]:
            copy.data = copies[0].data
    for _ in range(problem.steps):
        for worker in workers:
            worker.gradient()
        for copies in zip(*models, strict=True):
            gradients = [copy.grad for copy in copies if copy.grad is not None]
            copies[0].grad = torch.stack(gradients).mean(dim=0)
        workers[0].update()
        for worker in workers[1:]:
            worker.optimizer.zero_grad()
            worker.steps_done += 1
    return validate(workers[0].model)


def train_rule(problem: Problem, rule: OuterRule) -> float:
    """Train with one rule; bits per byte of the drained model."""

    def work(transport: InMemoryTransport) -> float:
        worker = Worker(problem, rank=transport.rank, world_size=WORLD_SIZE)
        sync = OuterSync(worker.model, worker.optimizer, rule=rule, transport=transport)
        for _ in range(problem.steps):
            worker.step()
            sync.step()
        sync.finalize()
        return validate(worker.model) if transport.rank == 0 else 0.0

    return run_world(WORLD_SIZE, work, timeout_s=_TIMEOUT_S)[0]


def outcome(name: str, problem: Problem, folder: Path) -> float:
    """Return a run's bits per byte, from its file where it has been run before."""
    words = "".join(letter if letter.isalnum() else "_" for letter in name)
    path = folder / f"{words}-{problem.steps}-{problem.lr:g}-{problem.seed}.json"
    if not path.exists():
        found = train_ddp(problem) if name == DDP else train_rule(problem, RULES[name]())
        path.write_text(json.dumps({"bits_per_byte": found}))
        print(f"{path.stem}: {found:.4f} bits per byte", flush=True)
    return float(json.loads(path.read_text())["bits_per_byte"])


def main() -> None:
    """Run what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lrs", default="4e-3")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    corpus()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rows = []
    for lr in map(float, arguments.lrs.split(",")):
        problems = [Problem(steps=arguments.steps, lr=lr, seed=seed) for seed in seeds]
        found = {
            name: [outcome(name, problem, arguments.keep) for problem in problems]
            for name in (DDP, *RULES)
        }
        for name, values in found.items():
            ours, spread = median_and_spread(values)
            peers = {} if name == DDP else {DDP: median_and_spread(found[DDP])[0]}
            case = f"{name}, AdamW lr {lr:g}, {arguments.steps} steps, {len(seeds)} seeds"
            rows.append(
                BenchmarkRow(
                    case=case, metric="final validation loss", unit="bit per byte", ours=ours,
                    spread=spread, peers=peers,
                )
            )  # fmt: skip
    write_results(arguments.output, topic="optim/quality", rows=rows)


if __name__ == "__main__":
    main()
