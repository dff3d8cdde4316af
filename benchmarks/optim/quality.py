"""What hidden communication costs in quality: bits per byte of each method at equal tokens.

Four workers, the real engine on each, train the model of ``_workload`` on the same tokens. The
ranks are threads of one process that hand their payloads over in memory: what a rule learns does
not depend on how fast the network is, only on which step a mean is merged at. Codecs are simulated
with the real codec, at the sender and at the owner, with error feedback at both. DDP is the mean of
the four gradients at every step. Every method is run at the same learning rates, and its best one
by the mean over the seeds is reported. Runs go seed by seed; finished ones are kept in --keep and
not repeated, and no run is begun after --minutes. With --stacked the workers of a run are one
batched model (``_stacked``), which takes half of the time, and its rows say "simulated".

    python -m benchmarks.optim.quality --keep FOLDER [--steps 600] [--seeds 0,1,2] [--width 128]
        [--layers 3] [--optimizers AdamW,Muon] [--lrs 4e-3,8e-3] [--only WORDS] [--minutes 60]
        [--stacked [--device cuda]]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.optim._stacked import train_ddp_stacked, train_rule_stacked
from benchmarks.optim._workload import (
    CLIP_NORM,
    MODEL,
    Problem,
    Worker,
    corpus,
    make_model,
    validate,
)
from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.optim import (
    CO2,
    DelayCorrected,
    DelayedGradients,
    DiLoCo,
    LocalSGD,
    OuterRule,
    OuterSync,
    SlowMo,
    StreamingDiLoCo,
)
from fivefold.optim.codecs import Codec, is_exact, named_codec
from fivefold.testing import InMemoryTransport, run_world

RESULTS = Path(__file__).parents[1] / "results" / "optim" / "quality.json"
WORLD_SIZE = 4
TARGET_BEHIND_DDP = 0.02  # bits per byte, of a method that hides its communication
_TIMEOUT_S = 36_000.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of training.

    Attributes:
        rule: Makes its rule; None for DDP.
        codec: How payloads travel.
        hides: Whether nothing is waited for.
    """

    rule: Callable[[], OuterRule] | None
    codec: str = "fp32"
    hides: bool = True


def _fragments(tau: int, fragments: int, codec: str = "fp32") -> Method:
    return Method(rule=lambda: DelayCorrected(tau=tau, fragments=fragments), codec=codec)


DDP = "DDP"
METHODS: dict[str, Method] = {
    DDP: Method(rule=None, hides=False),
    "delay-corrected tau 8, 8 fragments": _fragments(8, 8),
    "delayed gradients": Method(rule=lambda: DelayedGradients(max_norm=CLIP_NORM)),
    "delayed gradients, extrapolated": Method(
        rule=lambda: DelayedGradients(max_norm=CLIP_NORM, extrapolation=1.0)
    ),
    "Local SGD tau 8": Method(rule=lambda: LocalSGD(tau=8), hides=False),
    "delay-corrected tau 8, whole": _fragments(8, 1),
    "CO2 tau 8": Method(rule=lambda: CO2(tau=8, outer_lr=0.5, outer_momentum=0.0)),
    "CO2 tau 8, 8 fragments": Method(
        rule=lambda: CO2(tau=8, fragments=8, outer_lr=1.0, outer_momentum=0.0)
    ),
    "CO2 tau 8, 8 fragments, momentum 0.2": Method(
        rule=lambda: CO2(tau=8, fragments=8, outer_lr=1.0)
    ),
    "Streaming DiLoCo tau 8, 8 fragments": Method(
        rule=lambda: StreamingDiLoCo(tau=8, fragments=8, outer_momentum=0.5)
    ),
    "delay-corrected tau 2, 2 fragments, int8": _fragments(2, 2, "int8"),
    "delay-corrected tau 8, 8 fragments, int8": _fragments(8, 8, "int8"),
    "delay-corrected tau 8, 8 fragments, int4": _fragments(8, 8, "int4"),
    "delayed gradients, extrapolated, int4": Method(
        rule=lambda: DelayedGradients(max_norm=CLIP_NORM, extrapolation=1.0), codec="int4"
    ),
    "delay-corrected tau 8, 8 fragments, first 100 steps synchronous": Method(
        rule=lambda: DelayCorrected(tau=8, fragments=8, synchronous_start=100)
    ),
    "delay-corrected tau 8, 4 fragments": _fragments(8, 4),
    "delay-corrected tau 2, 2 fragments": _fragments(2, 2),
    "delay-corrected tau 32, 8 fragments": _fragments(32, 8),
    "delay-corrected tau 32, 8 fragments, int8": _fragments(32, 8, "int8"),
    "delay-corrected tau 32, whole": _fragments(32, 1),
    "delay-corrected tau 8, 8 fragments, topk": _fragments(8, 8, "topk"),
    "SlowMo tau 8": Method(rule=lambda: SlowMo(tau=8, outer_momentum=0.2), hides=False),
    "DiLoCo tau 8": Method(rule=lambda: DiLoCo(tau=8, outer_momentum=0.5), hides=False),
    "Local SGD tau 32": Method(rule=lambda: LocalSGD(tau=32), hides=False),
}


class CodedTransport:
    """An in-memory transport whose payloads are rounded as a codec rounds them on the wire.

    Args:
        inner: What sums.
        codec: Applied to what a rank sends and to the sum, with a residual for each.
    """

    def __init__(self, inner: InMemoryTransport, codec: Codec) -> None:
        self._inner, self._codec = inner, codec
        self._residuals: dict[tuple[str, int, int], torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> Any:
        """Sum what the wire holds of each payload, and round the sum alike on all ranks."""
        for index, payload in enumerate(payloads):
            self._round(payload, key=("sent", fragment, index))
        pending = self._inner.launch(payloads, metadata=metadata, fragment=fragment, what=what)
        plain_wait = pending.wait

        def wait() -> bool:
            arrived = plain_wait()
            for index, payload in enumerate(payloads):
                self._round(payload, key=("owned", fragment, index))
            return arrived

        pending.wait = wait  # type: ignore[method-assign]  # of this all-reduce alone
        return pending

    def _round(self, payload: torch.Tensor, *, key: tuple[str, int, int]) -> None:
        residual = self._residuals.setdefault(key, torch.zeros_like(payload))
        size = self._codec.encoded_bytes(payload.numel())
        wire = torch.empty(size, dtype=torch.uint8, device=payload.device)
        self._codec.encode_with_feedback_(residual, wire, values=payload)
        self._codec.decode_(wire, payload)


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


def train_rule(problem: Problem, rule: OuterRule, *, codec: str = "fp32") -> float:
    """Train with one rule; bits per byte of the drained model."""
    # Delayed gradients clip the mean, and nothing before it.
    clip_norm = None if isinstance(rule, DelayedGradients) else CLIP_NORM

    def work(transport: InMemoryTransport) -> float:
        worker = Worker(problem, rank=transport.rank, world_size=WORLD_SIZE, clip_norm=clip_norm)
        coded = _coded(transport, codec)
        sync = OuterSync(worker.model, worker.optimizer, rule=rule, transport=coded)
        for _ in range(problem.steps):
            worker.step()
            sync.step()
        sync.finalize()
        return validate(worker.model) if transport.rank == 0 else 0.0

    return run_world(WORLD_SIZE, work, timeout_s=_TIMEOUT_S)[0]


def _coded(transport: InMemoryTransport, codec: str) -> Any:
    """Return the transport with a codec round it, where there is one."""
    found = named_codec(codec)
    return transport if is_exact(found) else CodedTransport(transport, found)


def train_stacked(problem: Problem, method: Method, *, device: str = "cpu") -> float:
    """Train one method with its workers in one batched model; bits per byte."""
    if method.rule is None:
        return validate(train_ddp_stacked(problem, world_size=WORLD_SIZE, device=device))
    model = train_rule_stacked(
        problem, method.rule(), world_size=WORLD_SIZE, coded=lambda t: _coded(t, method.codec),
        device=device,
    )  # fmt: skip
    return validate(model)


class Study:
    """Outcomes of finished runs, kept as files of one folder."""

    def __init__(self, folder: Path, *, minutes: float, stacked: bool, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._stacked, self._device = stacked, device
        self._ends_s = time.monotonic() + 60 * minutes

    def outcome(self, name: str, problem: Problem) -> float | None:
        """Bits per byte of a run, which is done now where there is time; None otherwise."""
        words = "".join(letter if letter.isalnum() else "_" for letter in name)
        shape = f"{problem.width}x{problem.layers}"
        words = f"stacked_{words}" if self._stacked else words
        run = f"{words}-{problem.optimizer}-{shape}-{problem.steps}-{problem.lr:g}-{problem.seed}"
        path = self._folder / f"{run}.json"
        if not path.exists():
            if time.monotonic() > self._ends_s:
                return None
            method = METHODS[name]
            if self._stacked:
                found = train_stacked(problem, method, device=self._device)
            elif method.rule is None:
                found = train_ddp(problem)
            else:
                found = train_rule(problem, method.rule(), codec=method.codec)
            path.write_text(json.dumps({"bits_per_byte": found}))
            print(f"{time.strftime('%H:%M:%S')} {run}: {found:.4f} bits per byte", flush=True)
        return float(json.loads(path.read_text())["bits_per_byte"])


def rows_of(found: dict[tuple[str, str, float, int], float], *, what: str) -> list[BenchmarkRow]:
    """One row per optimizer and method: its best learning rate, over the seeds that ended.

    Args:
        found: Bits per byte by optimizer, method, learning rate and seed.
        what: Length and size of the runs.
    """
    rows = []
    for optimizer, name in dict.fromkeys((o, n) for o, n, _, _ in found):
        best = _best(found, optimizer, name)
        if best is None:
            continue
        lr, values = best
        ours, spread = median_and_spread(list(values.values()))
        peers, target = {}, None
        reference = None if name == DDP else _best(found, optimizer, DDP)
        if reference is not None:  # the same seeds, so that their luck cancels
            shared = [seed for seed in values if seed in reference[1]]
            if shared == list(values):
                peers[DDP] = median_and_spread([reference[1][seed] for seed in shared])[0]
                target = peers[DDP] + TARGET_BEHIND_DDP if METHODS[name].hides else None
        tried = sorted({rate for o, n, rate, _ in found if (o, n) == (optimizer, name)})
        rates = _numbers(tried)
        case = f"{name}, {optimizer} lr {lr:g} of {rates}, {what}, seeds {_numbers(values)}"
        rows.append(
            BenchmarkRow(
                case=case, metric="final validation loss", unit="bit per byte", ours=ours,
                spread=spread, peers=peers, target=target,
                met=None if target is None else ours <= target,
            )
        )  # fmt: skip
    return rows


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _best(
    found: dict[tuple[str, str, float, int], float], optimizer: str, name: str
) -> tuple[float, dict[int, float]] | None:
    """The learning rate with the lowest mean over the most seeds, and its values by seed."""
    by_rate: dict[float, dict[int, float]] = {}
    for (o, n, lr, seed), value in found.items():
        if (o, n) == (optimizer, name):
            by_rate.setdefault(lr, {})[seed] = value
    if not by_rate:
        return None
    most = max(map(len, by_rate.values()))
    full = {lr: values for lr, values in by_rate.items() if len(values) == most}
    return min(full.items(), key=lambda item: statistics.fmean(item[1].values()))


def main() -> None:
    """Run what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="folder of finished runs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--optimizers", default="AdamW")
    parser.add_argument("--lrs", default="4e-3")
    parser.add_argument("--only", default="", help="parts of names of methods, between semicolons")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--stacked", action="store_true", help="simulate in one batched model")
    parser.add_argument("--device", default="cpu", help="of --stacked: cpu or cuda")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus()
    if arguments.device != "cpu" and not arguments.stacked:
        parser.error("--device goes with --stacked: the others train in threads of the CPU")
    study = Study(
        arguments.keep, minutes=arguments.minutes, stacked=arguments.stacked,
        device=arguments.device,
    )  # fmt: skip
    words = arguments.only.split(";")
    names = [name for name in METHODS if any(word in name for word in words)]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rates = [float(lr) for lr in arguments.lrs.split(",")]
    found = {}
    for seed, name, optimizer, lr in itertools.product(
        seeds, names, arguments.optimizers.split(","), rates
    ):
        problem = Problem(
            steps=arguments.steps, lr=lr, seed=seed, optimizer=optimizer,
            width=arguments.width, layers=arguments.layers,
        )  # fmt: skip
        value = study.outcome(name, problem)
        if value is not None:
            found[optimizer, name, lr, seed] = value
    shape = MODEL.model_copy(update={"width": arguments.width, "layers": arguments.layers})
    size = sum(p.numel() for p in make_model(0, shape).parameters())
    what = f"{arguments.steps} steps, {size / 1e6:.2f} M parameters"
    what += ", simulated" if arguments.stacked else ""
    given = ["FOLDER" if word == str(arguments.keep) else word for word in sys.argv[1:]]
    command = " ".join(["python -m benchmarks.optim.quality", *given])
    write_results(
        arguments.output, topic="optim/quality", rows=rows_of(found, what=what), command=command
    )


if __name__ == "__main__":
    main()
