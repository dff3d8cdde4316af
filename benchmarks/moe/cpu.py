"""Measures the CPU reference path against the experts backends of transformers.

One module of expert weights of Qwen3-MoE's class; the same tokens and the same random routing go
through each of transformers' backends "eager" and "grouped_mm" and through ours, registered as one
more, in turns. Forward alone, and forward with the gradients of tokens, weights and routing
weights. The outputs are compared first.

    python benchmarks/moe/cpu.py [--quick] [--threads N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fivefold.errors import FivefoldError
from fivefold.moe import register_transformers_backend
from fivefold.report import BenchmarkRow, median_and_spread, write_results

RESULTS = Path(__file__).parents[1] / "results" / "moe" / "cpu.json"
OURS = "fivefold"
PEERS = ("eager", "grouped_mm")
WARM_UPS = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


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

    def __str__(self) -> str:
        """As a case of the results."""
        return (
            f"{self.name}: {self.tokens} tokens, H {self.hidden}, I {self.inner}, "
            f"{self.experts} experts, top {self.top_k}, {str(self.dtype).removeprefix('torch.')}"
        )


SHAPES = (
    Shape(name="few large", tokens=512, hidden=256, inner=512, experts=8, top_k=2),
    Shape(name="many", tokens=1024, hidden=512, inner=256, experts=32, top_k=4),
    Shape(name="many small", tokens=256, hidden=256, inner=128, experts=64, top_k=8),
    Shape(name="decode", tokens=16, hidden=256, inner=128, experts=64, top_k=8),
    Shape(
        name="16 bits",
        tokens=256,
        hidden=256,
        inner=256,
        experts=8,
        top_k=2,
        dtype=torch.bfloat16,
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

    def forward(self, backend: str) -> torch.Tensor:
        """The output, without gradients."""
        self.config._experts_implementation = backend  # noqa: SLF001 - where transformers looks
        with torch.no_grad():
            output: torch.Tensor = self.experts(self.tokens, self.ids, self.weights)
        return output

    def train(self, backend: str) -> torch.Tensor:
        """Forward and backward; the gradient of the tokens."""
        self.config._experts_implementation = backend  # noqa: SLF001 - where transformers looks
        self.experts.zero_grad()
        tokens = self.tokens.clone().requires_grad_()
        weights = self.weights.clone().requires_grad_()
        self.experts(tokens, self.ids, weights).square().sum().backward()
        assert tokens.grad is not None, "the output depends on the tokens"
        return tokens.grad

    def check(self) -> None:
        """Compare what all backends compute."""
        for run in (self.forward, self.train):
            wanted = run(PEERS[0]).double()
            for backend in (*PEERS[1:], OURS):
                error = float((run(backend).double() - wanted).norm() / wanted.norm())
                if error > self.tolerance:
                    message = f"{backend} differs from {PEERS[0]} by {error:.1e}"
                    raise FivefoldError(message, hint="do not trust its times")


def measure(run: Callable[[str], Any], repetitions: int) -> dict[str, list[float]]:
    """Seconds by backend, in turns; who begins changes from turn to turn."""
    backends = [OURS, *PEERS]
    seconds: dict[str, list[float]] = {backend: [] for backend in backends}
    for turn in range(WARM_UPS + repetitions):
        for place in range(len(backends)):
            backend = backends[(place + turn) % len(backends)]
            start_s = time.perf_counter()
            run(backend)
            if turn >= WARM_UPS:
                seconds[backend].append(time.perf_counter() - start_s)
    return seconds


def rows_of(shape: Shape, repetitions: int) -> list[BenchmarkRow]:
    """Times of a shape, ours to be at most the best peer's."""
    bench = Bench(shape)
    bench.check()
    rows = []
    for metric, run in (("forward", bench.forward), ("forward and backward", bench.train)):
        seconds = measure(run, repetitions)
        ours, spread = median_and_spread(seconds[OURS])
        peers = {peer: median_and_spread(seconds[peer])[0] for peer in PEERS}
        best = min(peers.values())
        rows.append(
            BenchmarkRow(
                case=str(shape),
                metric=metric,
                unit="s",
                ours=ours,
                spread=spread,
                peers=peers,
                target=best,
                met=ours <= best,
            )
        )
        times = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in peers.items())
        print(f"{shape}, {metric}: {ours * 1e3:.2f} ms; {times}", flush=True)
    return rows


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, five turns, no file")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    register_transformers_backend(OURS)
    shapes = SHAPES[3:] if arguments.quick else SHAPES
    repetitions = 5 if arguments.quick else 31
    rows = [row for shape in shapes for row in rows_of(shape, repetitions)]
    if not arguments.quick:
        versions = {"transformers": transformers.__version__}
        write_results(RESULTS, topic="moe/cpu", rows=rows, versions=versions)


if __name__ == "__main__":
    main()
