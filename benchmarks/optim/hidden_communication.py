"""How much of the communication is hidden: steps per second against the same step without any.

Two hosts of the emulated cluster, one rank and one core each, train the trainer's transformer on
real text. For every link rate the same processes run, in turn and several times over: the step
with communication switched off, DDP, Local SGD, and what hides: CO2 at several tau, delay-corrected
in 8 fragments, delayed gradients in int4. Each sample is a window of whole rounds that begins and
ends right after a boundary, with the pipeline full.

The overlap law predicts a step time of max(T_step, T_allreduce / tau), so the limit of the
fraction is min(1, tau * T_step / T_allreduce) with both times measured here, the all-reduce's in
proportion to the codec's bytes.

    python -m benchmarks.optim.hidden_communication [--rates 50,200,1000] [--taus 1,4,8,16]
        [--output FILE]
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.lab import LabSpec, run_lab
from fivefold.optim import CO2, DelayCorrected, DelayedGradients, LocalSGD, OuterRule, OuterSync
from fivefold.optim._metadata import replica_hash
from fivefold.train import ShardedSampler, Transformer, load_corpus, load_tokenizer
from fivefold.train.config import DataConfig, ModelConfig
from fivefold.train.sampler import gather_batch

SEQUENCE_LENGTH = 128
BATCH_SIZE = 10
MODEL = ModelConfig(layers=6, width=192, heads=6)
HIDDEN_FRACTION = 0.95
WAIT_SHARE = 0.02
LOCAL_SGD_TAU = 8
# Frames as large as the kernel's own: emulating small ones takes so much processor time from the
# step (120 ms per all-reduce at 1500 bytes) that it would be measured instead of the overlap. A
# network card cuts and joins frames by itself.
FRAME_BYTES = 60_000
RESULTS = Path(__file__).parents[1] / "results" / "optim" / "hidden_communication.json"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and where.

    Attributes:
        model: Its shape.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of a rank's step.
        device: "cpu", or "cuda", which all ranks share.
        autocast: Whether passes are in bfloat16, with parameters in float32.
        compiled: Whether the passes are compiled, once for all variants.
    """

    model: ModelConfig = MODEL
    sequence_length: int = SEQUENCE_LENGTH
    batch_size: int = BATCH_SIZE
    device: str = "cpu"
    autocast: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Variant:
    """One way of keeping two replicas together (or not), with its window.

    Attributes:
        name: What rows call it.
        warm_up_steps: Steps before the window.
        steps: Steps of the window.
        rule: What the outer synchronisation does; None for none.
        codec: How its payloads travel.
        hides: Whether it is one of those that hide their communication.
    """

    name: str
    warm_up_steps: int
    steps: int
    rule: OuterRule | None = None
    codec: str = "fp32"
    hides: bool = True


_SHARE_OF_BYTES = {"fp32": 1.0, "int4": 0.52 / 4}  # scales counted


def variants(taus: list[int]) -> list[Variant]:
    """What is run in turn; windows of a few seconds each."""
    found = [Variant("none", 2, 14, hides=False), Variant("DDP", 1, 3, hides=False)]
    local = LocalSGD(tau=LOCAL_SGD_TAU)
    found.append(
        Variant(f"Local SGD tau {local.tau}", 0, 2 * LOCAL_SGD_TAU, rule=local, hides=False)
    )
    for tau in taus:
        rounds = {1: 4, 4: 3}.get(tau, 2)
        found.append(Variant(f"CO2 tau {tau}", tau, rounds * tau, rule=CO2(tau=tau)))
    late = DelayedGradients(extrapolation=1.0)
    found.append(Variant("delayed gradients, int4", 4, 12, rule=late, codec="int4"))
    parts = DelayCorrected(tau=8, fragments=8)
    found.append(Variant("delay-corrected tau 8, 8 fragments", 16, 16, rule=parts))
    return found


# -- one rank -----------------------------------------------------------------------------------


class Bench:
    """One rank's model, data and timings.

    Args:
        workload: What is trained.
    """

    def __init__(self, workload: Workload | None = None) -> None:
        self.workload = work = workload or Workload()
        torch.set_num_threads(1)
        self._on_gpu = work.device != "cpu"
        # Metadata and an outer state in the host's memory are sent from there.
        dist.init_process_group("cpu:gloo,cuda:gloo" if self._on_gpu else "gloo")
        self.rank = dist.get_rank()
        tokenizer = load_tokenizer("bytes")
        corpus = load_corpus(DataConfig(sequence_length=work.sequence_length), tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self.tokens = corpus.train
        self.sampler = ShardedSampler(
            len(corpus.train),
            sequence_length=work.sequence_length,
            batch_size=work.batch_size,
            rank=self.rank,
            world_size=dist.get_world_size(),
            seed=0,
        )
        self.model = Transformer(
            work.model, vocab_size=self.vocab_size, sequence_length=work.sequence_length
        ).to(work.device)
        self._start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._loss = torch.compile(self.model.loss) if work.compiled else self.model.loss

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the model's loss in the workload's precision."""
        with torch.autocast(self.workload.device, torch.bfloat16, enabled=self.workload.autocast):
            found: torch.Tensor = self._loss(inputs, targets)
        return found

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's shard of the text, on the device."""
        step = 0
        while True:
            starts = self.sampler.batch_starts(step)
            pair = gather_batch(self.tokens, starts, self.workload.sequence_length)
            if self._on_gpu:  # pinned, so that the host does not wait for the copy
                pair = pair[0].pin_memory(), pair[1].pin_memory()
            yield tuple(part.to(self.workload.device, non_blocking=True) for part in pair)  # type: ignore[misc]
            step += 1

    def allreduce_s(self, repetitions: int = 2) -> float:
        """Mean seconds of a bare all-reduce of the payload, with nothing beside it."""
        payload = torch.zeros(self.model.num_parameters, device=self.workload.device)
        self._meet()
        start_s = time.perf_counter()
        for _ in range(repetitions):
            dist.all_reduce(payload)
        self._finish()
        return (time.perf_counter() - start_s) / repetitions

    def _finish(self) -> None:
        """Wait for what was issued to the device."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def _meet(self) -> None:
        self._finish()
        dist.barrier()

    def sample(self, variant: Variant, *, counts_waits: bool = False) -> dict[str, float]:
        """Run one window and return its figures; the slower rank's time counts.

        The loss is that of this rank's last step, and ``replicas_differ`` is 1 where parameters
        of two ranks differ after the drain, though the variant makes them equal.

        Args:
            variant: What is run.
            counts_waits: Whether a second window, on a GPU, counts how often the host waits.
        """
        model = self.model
        model.load_state_dict(self._start)
        model.zero_grad()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=self._on_gpu)
        replica = self._data_parallel() if variant.name == "DDP" else None
        sync = None
        if variant.rule is not None:
            sync = OuterSync(model, optimizer, rule=variant.rule, codec=variant.codec)
        batches = self.batches()
        marks: list[Any] = []
        loss = torch.zeros(())

        def run(steps: int) -> None:
            nonlocal loss
            for _ in range(steps):
                inputs, targets = next(batches)
                loss = self.loss(inputs, targets) if replica is None else replica(inputs, targets)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if sync is not None:
                    marks.append(self._mark())
                    sync.step()
                    marks.append(self._mark())

        run(variant.warm_up_steps)
        before = sync.statistics() if sync is not None else None
        marks.clear()
        self._meet()
        start_s = time.perf_counter()
        run(variant.steps)
        self._finish()
        wall_s = time.perf_counter() - start_s
        figures = {"wall_s": wall_s, "step_s": wall_s / variant.steps}
        if sync is not None and before is not None:
            after = sync.statistics()
            rounds = max(after.merged_rounds - before.merged_rounds, 1)
            figures["wait_share"] = (after.exposed_wait_s - before.exposed_wait_s) / wall_s
            figures["all_reduce_s"] = (after.in_flight_s - before.in_flight_s) / rounds
            figures["boundary_s"] = (after.boundary_s - before.boundary_s) / rounds
        if self._on_gpu:
            # What lies on the training stream between the optimizer's end and the next step's
            # begin: kernels of boundaries, and the time in which nothing came because the host
            # waited.
            pairs = zip(marks[::2], marks[1::2], strict=True)
            figures["between_steps_s"] = sum(a.elapsed_time(b) for a, b in pairs) / 1e3 / wall_s
        if self._on_gpu and counts_waits:
            figures["host_waits"] = _host_waits(lambda: run(variant.steps)) / variant.steps
        if sync is not None:
            sync.finalize()
        figures = self._slowest(figures)
        figures["loss"] = float(loss.detach())
        if sync is not None or replica is not None:
            figures["replicas_differ"] = float(self._replicas_differ())
        return figures

    def _mark(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _replicas_differ(self) -> bool:
        """Return whether any two ranks' parameters differ in a bit; little is sent for it."""
        mine = replica_hash([p.detach().cpu() for p in self.model.parameters()])
        hashes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, mine)
        return len(set(hashes)) > 1

    def _data_parallel(self) -> DistributedDataParallel:
        """DDP as it comes, but without sending the constant rotary tables in every pass."""
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {name: False}
        return DistributedDataParallel(_Loss(self.model, self.loss), **options)

    def _slowest(self, figures: dict[str, float]) -> dict[str, float]:
        values = torch.tensor(list(figures.values()), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return dict(zip(figures, values.tolist(), strict=True))


class _Loss(torch.nn.Module):
    """DDP needs the loss to be computed in ``forward``."""

    def __init__(
        self, model: Transformer, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(inputs, targets)


def _host_waits(work: Callable[[], None]) -> int:
    """Return how often torch says that the host waited for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def worker(output: Path, taus: list[int], repetitions: int) -> None:
    """Run all variants in turn; rank 0 writes one line per sample."""
    bench = Bench()
    bench.sample(Variant("none", 0, 10))  # warms the allocator and the caches
    for repetition in range(1, repetitions + 1):
        for variant in variants(taus):
            figures = bench.sample(variant)
            record = {"variant": variant.name, **figures}
            record["allreduce_s"] = bench.allreduce_s() if variant.name == "none" else 0.0
            if bench.rank == 0:
                with output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(
                    f"  {repetition}/{repetitions} {variant.name:34} {figures['step_s']:.3f} s/step"
                )
    dist.destroy_process_group()


# -- the comparison -----------------------------------------------------------------------------


def measure(rate: str, taus: list[int], repetitions: int) -> list[dict[str, Any]]:
    """All samples at one link rate."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples.jsonl"
        command = [
            sys.executable,
            "-m",
            "benchmarks.optim.hidden_communication",
            "--worker",
            str(output),
        ]
        command += ["--taus", ",".join(map(str, taus)), "--repetitions", str(repetitions)]
        print(f"link of {rate}")
        result = run_lab(
            LabSpec(hosts=2, rate=rate, mtu=FRAME_BYTES), command, log_folder=Path(folder) / "logs"
        )
        if result.exit_code != 0:
            sys.exit(result.exit_code)
        return [json.loads(line) for line in output.read_text().splitlines()]


def rows_of(
    rate: str, samples: list[dict[str, Any]], payload_bytes: int, taus: list[int]
) -> list[BenchmarkRow]:
    """Rows of one rate: the times first, then each variant's fraction and exposed wait."""

    def figures(name: str, key: str) -> list[float]:
        return [sample[key] for sample in samples if sample["variant"] == name]

    alone_s = figures("none", "step_s")
    step_s, step_spread = median_and_spread(alone_s)
    allreduce_s, allreduce_spread = median_and_spread(figures("none", "allreduce_s"))
    ddp, ddp_spread = _fraction(alone_s, figures("DDP", "step_s"))
    waiting = f"Local SGD tau {LOCAL_SGD_TAU}"
    local, _ = _fraction(alone_s, figures(waiting, "step_s"))
    bandwidth_limit_s = payload_bytes * 8 / (float(rate.removesuffix("Mbit/s")) * 1e6)
    peers = {"DDP": ddp, waiting: local}
    rows = [
        BenchmarkRow(
            case=rate, metric="T_step without communication", unit="s", ours=step_s,
            spread=step_spread,
        ),
        BenchmarkRow(
            case=rate, metric="T_allreduce of the payload", unit="s", ours=allreduce_s,
            spread=allreduce_spread, limit=bandwidth_limit_s,
        ),
        BenchmarkRow(case=rate, metric="payload", unit="MB", ours=payload_bytes / 1e6),
        BenchmarkRow(
            case=f"{rate}, DDP", metric="fraction of the compute-only rate", unit="ratio",
            ours=ddp, spread=ddp_spread,
        ),
    ]  # fmt: skip
    for variant in variants(taus):
        if variant.rule is None or not variant.hides:
            continue
        name, tau = variant.name, variant.rule.tau
        assert isinstance(tau, int), variant
        sent_s = allreduce_s * _SHARE_OF_BYTES[variant.codec]
        law = min(1.0, tau * step_s / sent_s)
        hides = sent_s <= tau * step_s
        fraction, spread = _fraction(alone_s, figures(name, "step_s"))
        wait, wait_spread = median_and_spread(figures(name, "wait_share"))
        all_reduce_s, all_reduce_spread = median_and_spread(figures(name, "all_reduce_s"))
        boundary_s, boundary_spread = median_and_spread(figures(name, "boundary_s"))
        case = f"{rate}, {name}"
        rows += [
            BenchmarkRow(
                case=case, metric="fraction of the compute-only rate", unit="ratio",
                ours=fraction, spread=spread, peers=peers, limit=law,
                target=HIDDEN_FRACTION if hides else None,
                met=fraction >= HIDDEN_FRACTION if hides else None,
            ),
            BenchmarkRow(
                case=case, metric="exposed wait, share of wall time", unit="ratio", ours=wait,
                spread=wait_spread, limit=max(0.0, 1 - law),
                target=WAIT_SHARE if hides else None, met=wait < WAIT_SHARE if hides else None,
            ),
            BenchmarkRow(
                case=case, metric="one all-reduce in flight", unit="s", ours=all_reduce_s,
                spread=all_reduce_spread,
            ),
            BenchmarkRow(
                case=case, metric="one boundary without the wait", unit="s", ours=boundary_s,
                spread=boundary_spread,
            ),
        ]  # fmt: skip
    return rows


def _fraction(alone_s: list[float], steps_s: list[float]) -> tuple[float, tuple[float, float]]:
    """Step rate against the compute-only one, paired within each repetition."""
    return median_and_spread([a / b for a, b in zip(alone_s, steps_s, strict=True)])


def main() -> None:
    """Measure every rate and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="50,200,1000", help="Mbit/s, comma-separated")
    parser.add_argument("--taus", default="1,4,8,16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    taus = [int(tau) for tau in arguments.taus.split(",")]
    if arguments.worker is not None:
        worker(arguments.worker, taus, arguments.repetitions)
        return
    tokenizer = load_tokenizer("bytes")
    load_corpus(DataConfig(sequence_length=SEQUENCE_LENGTH), tokenizer)  # tokenised once, here
    model = Transformer(MODEL, vocab_size=tokenizer.vocab_size, sequence_length=SEQUENCE_LENGTH)
    rows = []
    for rate in arguments.rates.split(","):
        name = f"{rate}Mbit/s"
        samples = measure(name, taus, arguments.repetitions)
        rows += rows_of(name, samples, 4 * model.num_parameters, taus)
    write_results(arguments.output, topic="optim/hidden_communication", rows=rows)
    for row in rows:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        print(f"{row.case:26} {row.metric:38} {row.ours:.4g} {row.unit}{met}")
    if any(math.isnan(row.ours) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
