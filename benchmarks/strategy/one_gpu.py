"""Measures how far predicted steps and memory are from plain PyTorch training on one GPU.

Llama models of 134M to 8B parameters are trained for some steps each: PyTorch's own operators, not
compiled, attention by FlashAttention (``scaled_dot_product_attention``), AdamW. What cannot be
counted of the stack of plain PyTorch was fitted on half of the kept rows, drawn by a seed; the
other half judges it. Beside it stand clusters of other stacks, to which what the states take
(2-byte states, or 4-byte ones under autocast) is told, as a user would in a cluster's file.

    python -m benchmarks.strategy.one_gpu [--seconds 80] [--output FILE.json] [--raw FILE.jsonl]
                                          [--case WORD] [--quick]
    python -m benchmarks.strategy.one_gpu --from-rows FILE.jsonl [--fit]

``--raw`` also writes a JSON line per case as soon as it is measured; ``--quick`` runs a tiny model,
without a GPU too, and writes no results. ``--from-rows`` predicts such lines again, without a GPU,
and rewrites the results, whose machine and versions stay; ``--fit`` shows the constants instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.results_file import BenchmarkRow, read_results, write_results
from benchmarks.strategy._calibration import MeasuredRun, fit_constants, with_constants
from fivefold.strategy import (
    Cluster,
    ModelSpec,
    ParallelPlan,
    PlanPrediction,
    evaluate_plan,
    load_cluster,
)

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "one_gpu.json"
KEPT = RESULTS.with_name("one_gpu_rows.jsonl")
TARGET = 0.15  # of the measured step and of the measured memory
MEAN_TARGETS = {"step": 0.10, "memory": 0.08}  # of the rows that judge
SEED = 0
WARM_UP, STEPS = 3, 10
LAYOUT: dict[str, Any] = {
    "gated": True, "learned_positions": False, "dropout": False, "biases": False,
}  # fmt: skip


def llama(name: str, layers: int, width: int, heads: int, **sizes: Any) -> ModelSpec:
    """Return the shape of a Llama model."""
    return ModelSpec(name=name, num_layers=layers, hidden=width, num_heads=heads, **LAYOUT, **sizes)


SMALL = llama("134M", 12, 768, 12, ffn=2048, vocab=32000, seq_len=2048, tied=False)
TINY_LLAMA = llama(
    "TinyLlama 1.1B", 22, 2048, 32, ffn=5632, vocab=32000, seq_len=2048, tied=False, num_kv_heads=4
)
LLAMA_1B = llama(
    "Llama 3.2 1B", 16, 2048, 32, ffn=8192, vocab=128256, seq_len=4096, tied=True, num_kv_heads=8
)
LLAMA_3B = llama(
    "Llama 3.2 3B", 28, 3072, 24, ffn=8192, vocab=128256, seq_len=4096, tied=True, num_kv_heads=8
)
LLAMA_8B = llama(
    "Llama 3 8B", 32, 4096, 32, ffn=14336, vocab=128256, seq_len=2048, tied=False, num_kv_heads=8
)
QUICK = llama("quick", 2, 64, 4, ffn=128, vocab=256, seq_len=64, tied=False, num_kv_heads=2)

# What the planner is told of states: bytes per parameter in memory, and moved by a step of AdamW.
STATES = {
    "bf16": (2, 4, 14),
    "autocast": (4, 12, 28),
}
STACKS = {"bf16": "pytorch-2.11", "autocast": "pytorch-2.11-autocast"}
# Plain PyTorch, and clusters whose constants come from other people's runs on the same GPU.
BASES = {
    "H100": ("h100-pytorch", "h100-llmfoundry", "h100-nemo"),
    "H200": ("h200-pytorch", "h200-nemo"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of training one model."""

    model: ModelSpec
    batch: int
    states: str = "bf16"
    fused: bool = True  # AdamW
    recompute: bool = False
    accumulation: int = 1

    @property
    def name(self) -> str:
        """Return what tells it from the others."""
        words = [f"{self.model.name}, {self.model.seq_len} tokens, batch {self.batch}", self.states]
        words += ["AdamW not fused"] * (not self.fused) + ["recomputation"] * self.recompute
        words += [f"{self.accumulation} micro-batches"] * (self.accumulation > 1)
        return ", ".join(words)

    @property
    def plan(self) -> ParallelPlan:
        """Return the same as a plan."""
        return ParallelPlan(
            global_batch=self.batch * self.accumulation,
            micro_batch=self.batch,
            recompute="full" if self.recompute else "none",
        )


def cases() -> list[Case]:
    """Return the cases, those that matter most first."""
    tiny, one = TINY_LLAMA, LLAMA_1B
    return [
        *(Case(model=tiny, batch=batch) for batch in (1, 2, 4, 8)),
        *(Case(model=one, batch=batch) for batch in (1, 2, 4)),
        Case(model=tiny, batch=4, recompute=True),
        Case(model=one, batch=4, recompute=True),
        Case(model=tiny, batch=4, states="autocast"),
        Case(model=one, batch=2, states="autocast"),
        Case(model=one, batch=2, states="autocast", recompute=True),
        *(Case(model=SMALL, batch=batch) for batch in (1, 4, 16)),
        Case(model=LLAMA_8B, batch=1, recompute=True),
        Case(model=LLAMA_3B, batch=1),
        Case(model=LLAMA_3B, batch=2, recompute=True),
        Case(model=tiny, batch=4, fused=False),
        Case(model=tiny, batch=2, accumulation=4),
        Case(model=SMALL, batch=16, states="autocast"),
    ]


# -- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a gated feed-forward part, each with a norm and a residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.pairs = spec.num_heads, spec.num_kv_heads or spec.num_heads
        self.width = spec.hidden // spec.num_heads
        rows = (self.heads + 2 * self.pairs) * self.width
        self.norm1, self.norm2 = nn.RMSNorm(spec.hidden), nn.RMSNorm(spec.hidden)
        self.queries = nn.Linear(spec.hidden, rows, bias=False)
        self.projection = nn.Linear(self.heads * self.width, spec.hidden, bias=False)
        assert spec.ffn is not None, "every model here says it"
        self.into = nn.Linear(spec.hidden, 2 * spec.ffn, bias=False)
        self.out = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the stream [batch, tokens, width] after this block."""
        batch, tokens, _ = x.shape
        mixed = self.queries(self.norm1(x)).view(batch, tokens, -1, self.width).transpose(1, 2)
        q, k, v = mixed.split([self.heads, self.pairs, self.pairs], dim=1)
        seen = functional.scaled_dot_product_attention(
            turned(q, turn), turned(k, turn), v, is_causal=True, enable_gqa=self.pairs < self.heads
        )
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, tokens, -1))
        gate, value = self.into(self.norm2(x)).chunk(2, dim=-1)
        stream: torch.Tensor = x + self.out(functional.silu(gate) * value)
        return stream


def turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate halves of the heads by their positions."""
    cosine, sine = (table.to(x.dtype) for table in turn)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Llama(nn.Module):
    """A language model in the shape of a ``ModelSpec``."""

    def __init__(self, spec: ModelSpec, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight
        width = spec.hidden // spec.num_heads
        rates = 10000.0 ** (-torch.arange(0, width, 2, device="cpu") / width)
        angles = torch.outer(torch.arange(spec.seq_len, device="cpu").float(), rates).repeat(1, 2)
        angles = angles.to(self.embedding.weight.device)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x, turn = self.embedding(tokens), (self.cosine, self.sine)
        for block in self.blocks:
            x = (
                checkpoint(block, x, turn, use_reentrant=False)
                if self.recompute
                else block(x, turn)
            )
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


# -- measuring ------------------------------------------------------------------------------------


class Clock:
    """Times of marks on the device's stream, read when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note this place in the stream."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans_s(self) -> list[float]:
        """Return the seconds between neighbouring marks."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in pairs]


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Train a model for some steps; return times, bytes and the loss."""
    torch.manual_seed(0)
    torch.set_default_device(device)
    model = Llama(case.model, recompute=case.recompute)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    autocast = case.states == "autocast"
    model = model if autocast else model.to(torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.fused)
    shape = (case.accumulation, 2, case.batch, case.model.seq_len)
    batches = torch.randint(0, case.model.vocab, shape)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    if autocast:
        context = lambda: torch.autocast(device.type, dtype=torch.bfloat16)  # noqa: E731
    clock, losses = Clock(device), []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP and device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        clock.mark()
        for tokens, targets in batches:
            with context():
                loss = model(tokens, targets) / case.accumulation
            loss.backward()
        clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    clock.mark()
    spans = clock.spans_s()[2 * WARM_UP :]
    passes, updates = spans[0::2], spans[1::2]
    steps = [a + b for a, b in zip(passes, updates, strict=True)]
    found = {
        "case": case.name, "parameters": count, "steps_s": steps, "passes_s": passes,
        "updates_s": updates, "first_loss": float(losses[0]), "last_loss": float(losses[-1]),
    }  # fmt: skip
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "used_bytes": total - free,  # what the allocator holds, and the context
        }
    return found


def try_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Measure a case; a case that does not fit says so."""
    try:
        found = measure(case, device)
    except torch.OutOfMemoryError as error:
        found = {"case": case.name, "out_of_memory": str(error).split(".")[0]}
    finally:
        torch.set_default_device("cpu")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


# -- predicting -----------------------------------------------------------------------------------


def told(base: str, states: str) -> Cluster:
    """Return a known cluster with what a training's states take."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        names = ("gradient_bytes", "optimizer_state_bytes", "optimizer_bytes_per_parameter")
        lines = [f"{name} = {value}" for name, value in zip(names, STATES[states], strict=True)]
        lines = ["[device]", *lines]
        if base.endswith("-pytorch"):
            lines = [f'stack = "{STACKS[states]}"']
        file.write_text("\n".join([f'base = "{base}"', *lines]), encoding="utf-8")
        return load_cluster(str(file))


def predictions(case: Case, gpu: str) -> dict[str, PlanPrediction]:
    """Return what the planner says by each of the known clusters of this GPU."""
    bases = next((found for mark, found in BASES.items() if mark in gpu), BASES["H100"])
    found = {}
    for base in bases:
        cluster = told(base, case.states)
        found[base] = evaluate_plan(case.model, cluster.device, cluster.fabric, plan=case.plan)
    return found


def rows_of(case: Case, measured: dict[str, Any], gpu: str) -> list[BenchmarkRow]:
    """Return predicted beside measured figures; the first known cluster is "ours"."""
    found = predictions(case, gpu)
    (first, ours), *others = found.items()
    if "out_of_memory" in measured:
        return [
            BenchmarkRow(
                case=case.name,
                metric=f"memory that did not fit, predicted by {first}",
                unit="bytes",
                ours=ours.memory.total_bytes,
            )
        ]
    parts: dict[str, tuple[Callable[[PlanPrediction], float], list[Any]]] = {
        "step": (lambda p: p.time_s, measured["steps_s"]),
        "passes": (lambda p: p.time_s - p.time.optimizer_s, measured["passes_s"]),
        "update": (lambda p: p.time.optimizer_s, measured["updates_s"]),
        "memory": (lambda p: p.memory.total_bytes, [measured.get("used_bytes")]),
    }  # fmt: skip
    rows = []
    group = "fitted" if case.name in fitted_cases() else "judged"
    for name, (value, samples) in parts.items():
        if samples[0] is None:
            continue
        median = statistics.median(samples)
        unit = "bytes" if name == "memory" else "s"
        peers = {"measured": median, "lowest": min(samples), "highest": max(samples)}
        peers |= {f"by {base}": float(value(other)) for base, other in others}
        rows.append(
            BenchmarkRow(
                case=case.name,
                metric=f"{name}, predicted by {first}",
                unit=unit,
                ours=float(value(ours)),
                peers=peers,
            )
        )
        if name in {"step", "memory"}:
            error = float(value(ours)) / median - 1
            rows.append(
                BenchmarkRow(
                    case=case.name,
                    metric=f"error of the predicted {name}, {group} row",
                    unit="ratio",
                    ours=error,
                    target=TARGET,
                    met=abs(error) <= TARGET,
                    peers={f"by {b}": float(value(other)) / median - 1 for b, other in others},
                )
            )
    return rows


def mean_errors(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """Return the mean errors of the rows that constants were fitted on, and of the others."""
    found = []
    for name, target in MEAN_TARGETS.items():
        for group in ("fitted", "judged"):
            ending = f"predicted {name}, {group} row"
            of = [row for row in rows if row.metric.endswith(ending)]
            if not of:
                continue
            mean = statistics.fmean(abs(row.ours) for row in of)
            judges = group == "judged"
            found.append(
                BenchmarkRow(
                    case=f"{group} rows ({len(of)})",
                    metric=f"mean error of the predicted {name}",
                    unit="ratio",
                    ours=mean,
                    target=target if judges else None,
                    met=mean <= target if judges else None,
                    peers={base: statistics.fmean(abs(row.peers[base]) for row in of)
                           for base in of[0].peers},
                )
            )  # fmt: skip
    return found


# -- kept rows ------------------------------------------------------------------------------------


def kept_rows(path: Path) -> list[dict[str, Any]]:
    """Return the measured cases of a file that ``--raw`` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@functools.cache
def fitted_cases() -> frozenset[str]:
    """Return the half of the kept rows that the constants of plain PyTorch were fitted on."""
    names = [row["case"] for row in kept_rows(KEPT)]
    return frozenset(random.Random(SEED).sample(names, len(names) // 2))  # noqa: S311 - a split


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what cannot be counted, by rows of 2-byte states: medians, and two rates of passes.

    The share of the memory's peak is that of AdamW, whose bytes are known; fragments are what the
    allocator holds over what it gave away.
    """
    named = {case.name: case for case in cases()}
    chosen = [row for row in rows if row["case"] in fitted_cases()]
    cluster = told(BASES["H200"][0], "bf16")
    device = cluster.device
    moved = device.optimizer_bytes_per_parameter / device.memory_bandwidth_bytes_per_s
    found = {
        "memory_efficiency": statistics.median(
            moved * row["parameters"] / statistics.median(row["updates_s"]) for row in chosen
        ),
        "fragments": statistics.median(
            row["peak_reserved_bytes"] / row["peak_allocated_bytes"] - 1 for row in chosen
        ),
    }
    cluster = with_constants(cluster, found)
    runs = []
    for row in chosen:
        case = named[row["case"]]
        assert case.states == "bf16", "the seed drew a row of 4-byte states"
        ours = evaluate_plan(case.model, cluster.device, cluster.fabric, plan=case.plan)
        measured_s = statistics.median(row["passes_s"]) + ours.time.optimizer_s
        runs.append(MeasuredRun(case=case.name, model=case.model, plan=case.plan,
                                measured_s=measured_s))  # fmt: skip
    limits = {"gemm_efficiency": (0.4, 1.0), "host_kernel_s": (5e-6, 5e-5)}
    return found | fit_constants(cluster, runs, limits=limits).constants


def predict_again(path: Path, output: Path) -> None:
    """Write the results of kept rows; machine and versions are those of the present results."""
    named = {case.name: case for case in cases()}
    lines, before = kept_rows(path), read_results(output)
    rows = [row for line in lines for row in rows_of(named[line["case"]], line, line["gpu"])]
    write_results(
        output, topic=before.topic, rows=[*rows, *mean_errors(rows)], machine=before.machine,
        versions=before.versions,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure, predict, show, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--case", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--from-rows", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args(arguments)
    if options.from_rows is not None and options.fit:
        print(json.dumps(fit(kept_rows(options.from_rows)), indent=2))
        return
    if options.from_rows is not None:
        predict_again(options.from_rows, options.output)
        return
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu and not options.quick:
        sys.exit("there is no GPU to measure on; --quick tries the script without one")
    gpu = torch.cuda.get_device_name(device) if on_gpu else "none"
    chosen = [case for case in cases() if options.case in case.name]
    if options.quick:
        tiny = Case(model=QUICK, batch=2)
        changes: list[dict[str, Any]] = [{}, {"states": "autocast"}, {"recompute": True},
                                         {"fused": False}, {"accumulation": 2}]  # fmt: skip
        chosen = [dataclasses.replace(tiny, **change) for change in changes]
    began_s, rows = time.perf_counter(), []
    for number, case in enumerate(chosen):
        if time.perf_counter() - began_s > options.seconds:
            left = [other.name for other in chosen[number:]]
            print(f"no time left for {len(left)} cases: {'; '.join(left)}")
            break
        measured = try_case(case, device)
        if options.raw is not None:
            with options.raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(measured | {"gpu": gpu, "torch": torch.__version__}) + "\n")
        found = rows_of(case, measured, gpu)
        rows += found
        if "parameters" in measured:
            assert measured["parameters"] == case.model.num_parameters, "another model was trained"
        errors = {r.metric: (f"{r.ours:+.1%}", {k: f"{v:+.1%}" for k, v in r.peers.items()})
                  for r in found if r.unit == "ratio"}  # fmt: skip
        steps = (
            f"{1e3 * statistics.median(measured['steps_s']):.1f} ms"
            if "steps_s" in measured
            else "-"
        )
        print(f"{case.name}: {steps} {errors} at {time.perf_counter() - began_s:.0f} s", flush=True)
    if options.quick:
        return
    versions = {"gpu": gpu, "cuda": str(torch.version.cuda)}
    rows += mean_errors(rows)
    write_results(options.output, topic="strategy/one_gpu", rows=rows, versions=versions)


if __name__ == "__main__":
    main(sys.argv[1:])
