"""Measures the CPU reference path against the experts backends of transformers.

One module of expert weights of Qwen3-MoE's class; the same tokens and the same random routing go
through each of transformers' backends "eager", "grouped_mm" and "batched_mm" and through ours,
registered as one more, in turns, in each order equally often. Forward alone, and forward with the
gradients of tokens, weights and routing weights. Outputs and all gradients are compared first.
On one thread times are of the processor, so that other work on the machine counts for less.

Each case has two rows. One has the times, and as limit the larger of two: the products' operations
at the speed of a product of 1024 x 1024 matrices, and the weights' bytes (read once by the forward;
by training read twice, and their gradients written) at the speed of reading 64 MiB; both measured
in the same run. The other has the median over the turns of our time over the best peer's in the
same turn, with the 95 % interval of that median as its spread: where 1 is inside, the two are the
same within noise, whatever the medians say. The target is 1.

    python -m benchmarks.moe.cpu [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.errors import FivefoldError
from fivefold.moe import register_transformers_backend

RESULTS = Path(__file__).parents[1] / "results" / "moe" / "cpu.json"
OURS = "fivefold"
PEERS = ("eager", "grouped_mm", "batched_mm")
WARM_UPS = 2
TURNS = 48  # a multiple of the orders of three backends and of four
RARE_TURNS = 6  # one in so many, for a peer that is not near the best
NEAR = 3.0  # times the best
MOST_COPIED_BYTES = 2**28  # of weights by batched_mm, which copies them for each assignment
LEAST_S = 0.005  # of a turn: what is faster runs several times
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer and its load."""

    name: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.float32

    @property
    def flops(self) -> int:
        """Of a forward pass, gated."""
        return 6 * self.tokens * self.top_k * self.hidden * self.inner

    @property
    def peers(self) -> tuple[str, ...]:
        """Who takes part."""
        copied = self.tokens * self.top_k * self.weight_bytes(1)
        return PEERS if copied <= MOST_COPIED_BYTES else PEERS[:-1]

    def weight_bytes(self, busy_experts: int) -> int:
        """Of the experts that have tokens."""
        return 3 * self.hidden * self.inner * busy_experts * self.dtype.itemsize

    def __str__(self) -> str:
        """As a case of the results."""
        return (
            f"{self.name}: {self.tokens} tokens, H {self.hidden}, I {self.inner}, "
            f"{self.experts} experts, top {self.top_k}, {str(self.dtype).removeprefix('torch.')}, "
            f"on {torch.cpu.get_capabilities()['cpu_name']}"
        )


SHAPES = (
    Shape(name="few large", tokens=512, hidden=256, inner=512, experts=8, top_k=2),
    Shape(name="many", tokens=1024, hidden=512, inner=256, experts=32, top_k=4),
    Shape(name="many small", tokens=256, hidden=256, inner=128, experts=64, top_k=8),
    Shape(name="decode", tokens=16, hidden=256, inner=128, experts=64, top_k=8),
    Shape(name="one small token", tokens=1, hidden=256, inner=128, experts=64, top_k=8),
    Shape(name="one token", tokens=1, hidden=1024, inner=512, experts=32, top_k=4),
    Shape(
        name="one token of 16 bits",
        tokens=1,
        hidden=1024,
        inner=512,
        experts=32,
        top_k=4,
        dtype=torch.bfloat16,
    ),
    Shape(name="four tokens", tokens=4, hidden=1024, inner=512, experts=32, top_k=4),
    Shape(
        name="prompt of 16 bits",
        tokens=512,
        hidden=512,
        inner=256,
        experts=32,
        top_k=4,
        dtype=torch.bfloat16,
    ),
    Shape(
        name="16 bits",
        tokens=256,
        hidden=256,
        inner=256,
        experts=8,
        top_k=2,
        dtype=torch.bfloat16,
    ),
    Shape(name="single choice", tokens=192, hidden=384, inner=192, experts=24, top_k=1),
    Shape(name="every expert", tokens=40, hidden=320, inner=448, experts=8, top_k=8),
    Shape(
        name="half",
        tokens=96,
        hidden=512,
        inner=192,
        experts=32,
        top_k=4,
        dtype=torch.float16,
    ),
)


class Bench:
    """One shape's weights, tokens and routing."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.config = transformers.Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inner,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
        )
        self.experts = Qwen3MoeExperts(self.config).to(shape.dtype)
        for parameter in self.experts.parameters():
            torch.nn.init.normal_(parameter, std=shape.hidden**-0.5)
        self.tokens = torch.randn(shape.tokens, shape.hidden, dtype=shape.dtype)
        scores = torch.rand(shape.tokens, shape.experts)
        self.ids = scores.topk(shape.top_k).indices
        self.weights = torch.rand(shape.tokens, shape.top_k).softmax(-1).to(shape.dtype)
        self.tolerance = TOLERANCE[shape.dtype]
        self.peers = shape.peers

    def forward(self, backend: str) -> torch.Tensor:
        """The output, without gradients."""
        self.config._experts_implementation = backend  # noqa: SLF001 - where transformers looks
        with torch.no_grad():
            output: torch.Tensor = self.experts(self.tokens, self.ids, self.weights)
        return output

    def train(self, backend: str) -> dict[str, torch.Tensor]:
        """Forward and backward; the gradients of all that has any."""
        self.config._experts_implementation = backend  # noqa: SLF001 - where transformers looks
        self.experts.zero_grad()
        tokens = self.tokens.clone().requires_grad_()
        weights = self.weights.clone().requires_grad_()
        self.experts(tokens, self.ids, weights).square().sum().backward()
        leaves = {"tokens": tokens, "weights": weights, **dict(self.experts.named_parameters())}
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def check(self) -> None:
        """Compare what all backends compute.

        Raises:
            FivefoldError: They do not compute the same.
        """
        wanted = {"output": self.forward(PEERS[0]), **self.train(PEERS[0])}
        for backend in (*self.peers[1:], OURS):
            found = {"output": self.forward(backend), **self.train(backend)}
            if found.keys() != wanted.keys() or len(found) != 5:
                message = f"{backend} has gradients of {sorted(found)}, not of {sorted(wanted)}"
                raise FivefoldError(message, hint="do not trust its times")
            for name, value in wanted.items():
                error = float((found[name].double() - value.double()).norm() / value.norm())
                if error > self.tolerance:
                    message = f"{name} of {backend} and {PEERS[0]} differ by {error:.1e}"
                    raise FivefoldError(message, hint="do not trust its times")


def measure(
    run: Callable[[str], Any], peers: tuple[str, ...], turns: int
) -> dict[str, list[float | None]]:
    """Seconds by backend, turn by turn; None where a slow one was left out."""
    backends = [OURS, *peers]
    first = {
        backend: min(_seconds(run, backend, 1) for _ in range(WARM_UPS)) for backend in backends
    }
    best_s = min(first.values())
    rare = {backend for backend in peers if first[backend] > NEAR * best_s}
    repeats = max(1, round(LEAST_S / best_s))
    seconds: dict[str, list[float | None]] = {backend: [] for backend in backends}
    orders = itertools.cycle(itertools.permutations(backends))
    for turn, order in zip(range(turns), orders, strict=False):
        for backend in order:
            left_out = backend in rare and turn % RARE_TURNS
            seconds[backend].append(None if left_out else _seconds(run, backend, repeats))
    return seconds


def _seconds(run: Callable[[str], Any], backend: str, repeats: int) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start_s = clock()
    for _ in range(repeats):
        run(backend)
    return (clock() - start_s) / repeats


def interval_of_median(samples: list[float]) -> tuple[float, float]:
    """In which the median lies with 95 %, whatever the distribution, by the order of samples."""
    count, tail, rank = len(samples), 0.0, 0
    while tail + math.comb(count, rank) / 2**count <= 0.025:
        tail += math.comb(count, rank) / 2**count
        rank += 1
    ordered = sorted(samples)
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[count - 1 - rank]


class Ceiling:
    """What one product and one pass over memory reach here."""

    def __init__(self) -> None:
        size = 1024
        self.flops_per_s = {}
        for dtype in TOLERANCE:
            matrix = torch.randn(size, size).to(dtype)
            self.flops_per_s[dtype] = 2 * size**3 / _median_s(partial(torch.mm, matrix, matrix))
        memory = torch.ones(2**24)
        self.bytes_per_s = 4 * 2**24 / _median_s(memory.sum)

    def seconds(self, shape: Shape, busy_experts: int, *, training: bool) -> float:
        """The least time for a shape: 3 times the operations and the bytes where it trains."""
        times = 3 if training else 1
        compute_s = shape.flops / self.flops_per_s[shape.dtype]
        memory_s = shape.weight_bytes(busy_experts) / self.bytes_per_s
        return times * max(compute_s, memory_s)


def _median_s(run: Callable[[], Any]) -> float:
    times = [_seconds(lambda _: run(), "", 1) for _ in range(WARM_UPS + 9)]
    return statistics.median(times[WARM_UPS:])


def rows_of(shape: Shape, turns: int, ceiling: Ceiling) -> list[BenchmarkRow]:
    """Times of a shape, and the ratio to the best peer, to be at most 1."""
    bench = Bench(shape)
    bench.check()
    busy = len(set(bench.ids.flatten().tolist()))
    rows = []
    for metric, run in (("forward", bench.forward), ("forward and backward", bench.train)):
        seconds = measure(run, shape.peers, turns)
        known = {name: [s for s in times if s is not None] for name, times in seconds.items()}
        ours, spread = median_and_spread(known[OURS])
        peers = {peer: median_and_spread(known[peer])[0] for peer in shape.peers}
        limit = ceiling.seconds(shape, busy, training=metric != "forward")
        rows.append(
            BenchmarkRow(
                case=str(shape),
                metric=metric,
                unit="s",
                ours=ours,
                spread=spread,
                peers=peers,
                limit=limit,
            )
        )
        rows.append(_against_best(shape, metric, seconds, peers))
        _tell(rows[-2], rows[-1])
    return rows


def _against_best(
    shape: Shape, metric: str, seconds: dict[str, list[float | None]], peers: dict[str, float]
) -> BenchmarkRow:
    best = min(peers, key=lambda peer: peers[peer])
    pairs = zip(seconds[OURS], seconds[best], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    ratio = statistics.median(ratios)
    return BenchmarkRow(
        case=str(shape),
        metric=f"{metric}, over {best}",
        unit="ratio",
        ours=ratio,
        spread=interval_of_median(ratios),
        target=1.0,
        met=ratio <= 1.0,
    )


def _tell(times: BenchmarkRow, ratio: BenchmarkRow) -> None:
    assert ratio.spread is not None, "it has one"
    low, high = ratio.spread
    verdict = "ahead" if high < 1 else "behind" if low > 1 else "the same within noise"
    peers = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in times.peers.items())
    print(
        f"{times.case}, {times.metric}: {times.ours * 1e3:.2f} ms; {peers}; "
        f"{ratio.ours:.3f} ({low:.3f} to {high:.3f}): {verdict}",
        flush=True,
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, six turns, no file")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    register_transformers_backend(OURS)
    shapes = SHAPES[3:5] if arguments.quick else SHAPES
    turns = 6 if arguments.quick else TURNS
    ceiling = Ceiling()
    rows = [row for shape in shapes for row in rows_of(shape, turns, ceiling)]
    if not arguments.quick:
        versions = {"transformers": transformers.__version__}
        write_results(RESULTS, topic="moe/cpu", rows=rows, versions=versions)


if __name__ == "__main__":
    main()
