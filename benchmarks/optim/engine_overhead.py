"""What the engine itself costs, with communication switched off: per step and per round.

Models of 1 to 200 million parameters take real optimizer steps (forward, backward, AdamW) while
``OuterSync`` runs over a transport whose all-reduces cost nothing. Measured in turn, five times:
the step alone, one boundary, a call of ``sync.step()`` within a round, one ``copy_`` of the model,
and the bare arithmetic of the same outer update on whole buffers with nothing around it.

    python -m benchmarks.optim.engine_overhead [--sizes 1,10,50,200] [--threads 1,2] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.optim import CO2, LocalSGD, OuterRule, OuterSync
from fivefold.train import Transformer
from fivefold.train.config import ModelConfig

RESULTS = Path(__file__).parents[1] / "results" / "optim" / "engine_overhead.json"
MODELS = {
    1: ModelConfig(layers=5, width=128, heads=4),
    10: ModelConfig(layers=6, width=384, heads=6),
    50: ModelConfig(layers=7, width=768, heads=12),
    200: ModelConfig(layers=7, width=1536, heads=24),
}
BATCH = (4, 128)  # sequences, bytes: few tokens, so that the engine's share is at its largest
VOCABULARY = 256
TAU = 8
STEP_SHARE = 0.02
INNER_CALLS = 20_000
REPETITIONS = 5
WORLD_SIZE = 2


class _Landed:
    """An all-reduce that has arrived when it starts."""

    sent_bytes = 0

    def __init__(self) -> None:
        self.launched_at_s = time.perf_counter()
        self.completed_at_s: float | None = self.launched_at_s

    def wait(self) -> bool:
        return True


class FreeTransport:
    """Two ranks of which the other sends nothing; no bytes are moved and nothing is waited for."""

    rank = 0
    world_size = WORLD_SIZE

    def prepare(
        self, payloads: Sequence[torch.Tensor], *, fragment: int, num_exact: int = 0
    ) -> None:
        """Nothing is kept."""

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> _Landed:
        """Leave the payloads as they are: the sum with a peer's zeros."""
        del payloads, metadata, fragment, what
        return _Landed()

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Rank 0 has its own tensors already."""

    def gather_objects(self, value: object) -> list[Any]:
        """The other rank agrees."""
        return [value] * WORLD_SIZE


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Whole-model buffers for the bare operations, apart from the engine's.

    Attributes:
        anchor: x.
        momentum: m.
        payload: The sum that arrived.
        local: What the model would go on from.
        fresh: The next payload.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor
    payload: torch.Tensor
    local: torch.Tensor
    fresh: torch.Tensor


def make_buffers(num_parameters: int) -> Buffers:
    """Five buffers of the model's size, written once so that their memory exists."""
    made = [torch.full((num_parameters,), 1e-3) for _ in range(5)]
    return Buffers(anchor=made[0], momentum=made[1], payload=made[2], local=made[3], fresh=made[4])


def bare_update(rule: OuterRule, buffers: Buffers) -> None:
    """The arithmetic of one boundary without the final copy, one operation after another.

    fresh = x - y;  m = clamp(beta m + D / L);  x = x - alpha m; and the two norms of L, where the
    rule has them. Without momentum: x = x - D.
    """
    torch.sub(buffers.anchor, buffers.local, out=buffers.fresh)
    if rule.outer_momentum == 0:
        buffers.anchor.add_(buffers.payload, alpha=-rule.outer_lr / WORLD_SIZE)
        return
    torch.linalg.vector_norm(buffers.payload)
    buffers.momentum.mul_(rule.outer_momentum).add_(buffers.payload, alpha=1 / WORLD_SIZE)
    if rule.clip is not None:
        buffers.momentum.clamp_(-rule.clip, rule.clip)
    torch.linalg.vector_norm(buffers.momentum)
    buffers.anchor.add_(buffers.momentum, alpha=-rule.outer_lr)


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


class Subject:
    """One model with its optimizer; engines come and go on it."""

    def __init__(self, size: int) -> None:
        self.model = Transformer(MODELS[size], vocab_size=VOCABULARY, sequence_length=BATCH[1])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, BATCH, generator=generator)

    def step(self) -> None:
        """One whole optimizer step."""
        loss = self.model.loss(self.tokens, self.tokens)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def engine(self, rule: OuterRule) -> OuterSync:
        """A new engine; replicas are not compared, since the other rank has none."""
        return OuterSync(
            self.model,
            self.optimizer,
            rule=rule,
            transport=FreeTransport(),
            check_every_rounds=0,
        )


def boundary_samples(subject: Subject, rule: OuterRule, repetitions: int) -> dict[str, list[float]]:
    """A boundary, the copy and the bare update, in turn."""
    sync = subject.engine(rule)
    buffers = make_buffers(subject.model.num_parameters)
    samples: dict[str, list[float]] = {"boundary": [], "copy": [], "update": []}
    actions: dict[str, Callable[[], object]] = {
        "boundary": sync.step,
        "copy": lambda: buffers.local.copy_(buffers.anchor),
        "update": lambda: bare_update(rule, buffers),
    }
    for repetition in range(-2, repetitions):  # two rounds fill the pipeline and touch all memory
        for name, action in actions.items():
            taken_s = seconds_of(action)
            if repetition >= 0:
                samples[name].append(taken_s)
    return samples


def inner_call_samples(subject: Subject, repetitions: int) -> list[float]:
    """Seconds of one ``sync.step()`` that ends no round."""
    sync = subject.engine(CO2(tau=(repetitions + 2) * INNER_CALLS))

    def calls() -> None:
        for _ in range(INNER_CALLS):
            sync.step()

    return [seconds_of(calls) / INNER_CALLS for _ in range(repetitions)]


def measure(size: int, threads: int, repetitions: int) -> list[BenchmarkRow]:
    """All rows of one model size and number of threads."""
    torch.set_num_threads(threads)
    subject = Subject(size)
    millions = subject.model.num_parameters / 1e6
    case = f"{millions:.1f} M parameters, {threads} thread{'s' if threads > 1 else ''}"
    subject.step()
    steps_s = [seconds_of(subject.step) for _ in range(repetitions)]
    step_s, step_spread = median_and_spread(steps_s)
    rows = [BenchmarkRow(case=case, metric="step", unit="s", ours=step_s, spread=step_spread)]
    inner_s, inner_spread = median_and_spread(inner_call_samples(subject, repetitions))
    rows.append(
        BenchmarkRow(
            case=case, metric="sync.step() within a round", unit="s", ours=inner_s,
            spread=inner_spread,
        )
    )  # fmt: skip
    subject.optimizer.zero_grad()  # gives back the gradients' memory
    for rule in (CO2(tau=1), LocalSGD(tau=1)):
        samples = boundary_samples(subject, rule, repetitions)
        rows += rows_of(f"{case}, {rule.name}", samples, steps_s=steps_s, inner_s=inner_s)
        gc.collect()
    return rows


def rows_of(
    case: str, samples: dict[str, list[float]], *, steps_s: list[float], inner_s: float
) -> list[BenchmarkRow]:
    """The boundary against copy and update, and the engine's share of a step."""
    boundary_s, boundary_spread = median_and_spread(samples["boundary"])
    copy_s, update_s = (median_and_spread(samples[name])[0] for name in ("copy", "update"))
    bounds = [a + b for a, b in zip(samples["copy"], samples["update"], strict=True)]
    ratio, ratio_spread = median_and_spread(
        [a / b for a, b in zip(samples["boundary"], bounds, strict=True)]
    )
    added = [boundary / TAU + inner_s for boundary in samples["boundary"]]
    share, share_spread = median_and_spread([a / b for a, b in zip(added, steps_s, strict=True)])
    return [
        BenchmarkRow(
            case=case, metric="one boundary", unit="s", ours=boundary_s, spread=boundary_spread,
            peers={"one copy of the model": copy_s, "bare update": update_s},
        ),
        BenchmarkRow(
            case=case, metric="boundary / (copy + bare update)", unit="ratio", ours=ratio,
            spread=ratio_spread, target=1.0, met=ratio <= 1.0,
        ),
        BenchmarkRow(
            case=case, metric=f"added per step at tau {TAU}, share of the step", unit="ratio",
            ours=share, spread=share_spread, target=STEP_SHARE, met=share < STEP_SHARE,
        ),
    ]  # fmt: skip


def main() -> None:
    """Measure every size with every number of threads and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, MODELS)), help="million parameters")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="small models once, no results file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes = "1,10"
    rows = []
    for size in map(int, arguments.sizes.split(",")):
        for threads in map(int, arguments.threads.split(",")):
            found = measure(size, threads, 1 if arguments.quick else REPETITIONS)
            gc.collect()
            for row in found:
                met = "" if row.met is None else (" met" if row.met else " NOT MET")
                print(f"{row.case:44} {row.metric:46} {row.ours:.4g} {row.unit}{met}", flush=True)
            rows += found
    if not arguments.quick:
        write_results(arguments.output, topic="optim/engine_overhead", rows=rows)


if __name__ == "__main__":
    main()
