"""Times of a case: ours in turns with everyone else's, and what they mean; and one tile's time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.moe._gpu._bench import TOLERANCE, Bench, error_of
from benchmarks.moe._gpu._cases import Case, kind_of, timed_cases
from benchmarks.moe._gpu._clock import Ceilings, Clock, arithmetic_of, ceilings_of
from benchmarks.moe._gpu._operands import Operands, operands_of
from benchmarks.moe._gpu._rungs import options_of
from benchmarks.moe._gpu._variants import OUR_BACKENDS, Variant, tuned_variants, variants_of
from fivefold.moe import fused_moe
from fivefold.moe.kernels import launch as launches
from fivefold.moe.kernels.arguments import Tiles

__all__ = [
    "SWEPT",
    "SWEPT_BACKWARD",
    "ceilings",
    "sweep",
    "sweep_backward",
    "swept_cases",
    "time_case",
    "time_training",
    "time_tuned",
]

_PEER_TOLERANCE = 3e-2  # peers round in between; enough to see one that computes something else
SWEPT_CASES = (0, 1, 13)
"""Places among the timed cases: the paper's, Qwen3 of 8,192 tokens, Qwen3 decoding 8 tokens."""


def _swept() -> list[tuple[Tiles, dict[str, Any]]]:
    """Tiles and what else may be chosen; the first is what is shipped for bfloat16 and swiglu."""
    usual = Tiles(rows=128, columns=128, second_columns=256, depth=64, stages=4)
    small = Tiles(rows=64, columns=128, second_columns=256, depth=64, warps=4)
    made = [usual, *(replace(usual, stages=s, group=g) for s in (4, 3) for g in (8, 4, 16))]
    made += [replace(usual, second_columns=128, stages=s) for s in (3, 4)]
    made += [replace(usual, second_columns=128, stages=4, group=16), small]
    made += [replace(small, second_columns=128, stages=4, group=4)]
    made += [replace(usual, columns=256, stages=s) for s in (3, 4)]  # where nothing is gated
    found: list[tuple[Tiles, dict[str, Any]]] = [(tiles, {}) for tiles in dict.fromkeys(made)]
    found += [(usual, {"lag": lag}) for lag in (1, 2, 1 << 20)]
    return found


SWEPT = _swept()
_USUAL = SWEPT[0][0]
SWEPT_BACKWARD = [
    _USUAL,
    replace(_USUAL, stages=3),
    replace(_USUAL, group=16),
    replace(_USUAL, second_columns=128),
]


@cache
def _clock(device: torch.device) -> Clock:
    return Clock(device)


@cache
def _ceilings(device: torch.device) -> Ceilings:
    return ceilings_of(_clock(device))


def _case_operands(case: Case, bench: Bench) -> Operands:
    return operands_of(case, bench.device)


def _turns(bench: Bench) -> int:
    return 15 if bench.on_gpu else 1


def _wanted(case: Case, given: Operands) -> torch.Tensor:
    """In float32, by the path that runs anywhere: too large for float64."""
    return fused_moe(
        given.x.float(), given.w13.float(), given.w2.float(), given.ids, given.weights,
        activation=case.activation, backend="reference", check=False,
    )  # fmt: skip


def _variants(case: Case, bench: Bench) -> dict[str, Variant]:
    compiler = ("inductor" if bench.on_gpu else "eager") if case.compiled else None
    return variants_of(case, bench.device, compiler=compiler)


def _usable(
    case: Case, given: Operands, bench: Bench, allowed: set[str], variants: dict[str, Variant]
) -> tuple[dict[str, Variant], list[str]]:
    """Who computes the right thing; ours first. A call each, which warms up as well."""
    wanted, usable = _wanted(case, given), {}
    for name, run in variants.items():
        if name in OUR_BACKENDS and name not in allowed:
            continue
        limit = TOLERANCE[kind_of(case)] if name in OUR_BACKENDS else _PEER_TOLERANCE
        try:
            call = partial(run, given)
            found = bench.run(call) if name in OUR_BACKENDS else call()
        except Exception as reason:
            if name in OUR_BACKENDS:
                raise
            bench.row(
                f"{name}: left out", "calls", 1, why=f"{type(reason).__name__}: {reason}"[:300]
            )
            continue
        error = error_of(found, wanted)
        bench.row(
            f"{name}: error", "ratio", error, **({"most": limit} if name in OUR_BACKENDS else {})
        )
        if error <= limit:
            usable[name] = run
    return usable, [name for name in usable if name in OUR_BACKENDS]


def time_tuned(peer: str, case: Case, bench: Bench, allowed: set[str]) -> None:
    """Do ``time_case`` with one who tunes itself first."""
    time_case(case, bench, allowed, tuned_variants(case, bench.device, peer))


def time_case(
    case: Case, bench: Bench, allowed: set[str], variants: dict[str, Variant] | None = None
) -> None:
    """Forward: seconds, FLOP/s and shares of the machine's ceilings, each turn's raw seconds."""
    clock, given = _clock(bench.device), _case_operands(case, bench)
    variants = _variants(case, bench) if variants is None else variants
    with torch.no_grad():
        usable, ours = _usable(case, given, bench, allowed, variants)
        calls = {name: (lambda run=run: run(given)) for name, run in usable.items()}
        seconds = clock.in_turns(calls, repetitions=_turns(bench))
    ceilings = _ceilings(bench.device)
    peak = ceilings.flops_per_s[arithmetic_of(case.dtype, case.precision)]
    moved_s = case.least_bytes(given.used_experts) / ceilings.bytes_per_s
    floor_s = max(case.flops / peak, moved_s)
    for name, raw in seconds.items():
        middle = statistics.median(raw)
        more = {}
        if name == "fused" and case.target_s is not None:
            more = {"target": case.target_s, "target_met": middle <= case.target_s}
        elif name == "fused" and case.target_flops_per_s is not None:
            longest = case.flops / case.target_flops_per_s
            more = {"target": longest, "target_met": middle <= longest}
        bench.row(
            f"{name}: forward", "s", middle, raw=raw, floor=floor_s,
            flops_per_s=case.flops / middle, host_s=clock.host_seconds(calls[name]),
            launches=clock.launches(calls[name]),
            peak_bytes=clock.peak_bytes(calls[name]), **more,
        )  # fmt: skip
    if not ours:
        bench.row("backends of ours that were right", "backends", 0)


def time_training(case: Case, bench: Bench, allowed: set[str]) -> None:
    """Forward and backward together, since what is kept is part of the price."""
    clock, given = _clock(bench.device), _case_operands(case, bench)
    leaves, gradient = given.leaves(), torch.ones_like(given.x)
    usable, _ = _usable(case, given, bench, allowed, _variants(case, bench))
    calls: dict[str, Callable[[], object]] = {}
    for name, run in usable.items():

        def train(run: Variant = run) -> None:
            for leaf in (leaves.x, leaves.w13, leaves.w2, leaves.weights):
                leaf.grad = None
            torch.autograd.backward(run(leaves), gradient)

        try:
            train()
        except Exception as reason:
            if name in OUR_BACKENDS:
                raise
            bench.row(
                f"{name}: no backward", "calls", 1, why=f"{type(reason).__name__}: {reason}"[:300]
            )
            continue
        calls[name] = train
    for name, raw in clock.in_turns(calls, repetitions=_turns(bench)).items():
        middle = statistics.median(raw)
        speed = 3 * case.flops / middle
        bench.row(f"{name}: forward and backward", "s", middle, raw=raw, flops_per_s=speed)


def ceilings(bench: Bench) -> None:
    """What the machine itself can do."""
    found = bench.run(lambda: _ceilings(bench.device))
    for kind, value in found.flops_per_s.items():
        bench.row(f"products in {kind}", "FLOP/s", value)
    bench.row("copy", "bytes/s", found.bytes_per_s)


def sweep(case: Case, bench: Bench, which: int) -> None:
    """The single kernel with other tiles: right, and how long."""
    given, (tiles, more) = _case_operands(case, bench), SWEPT[which]
    if not bench.on_gpu:
        tiles = Tiles(
            rows=16, columns=16, second_columns=16, depth=16, group=2, stages=tiles.stages,
            combine_columns=16,
        )  # fmt: skip
    options = options_of(case, given) | {"tiles": tiles} | more
    clock = _clock(bench.device)

    def forward() -> torch.Tensor:
        return launches.forward_fused(*given.positional, **options)

    bench.error("the forward", bench.run(forward), _wanted(case, given), TOLERANCE[kind_of(case)])
    raw = clock.in_turns({"": forward}, repetitions=_turns(bench))[""]
    middle = statistics.median(raw)
    speed = case.flops / middle
    made = {"tiles": vars(tiles)} | more
    bench.row("fused: forward", "s", middle, raw=raw, flops_per_s=speed, **made)


def sweep_backward(case: Case, bench: Bench, which: int) -> None:
    """The backward's launches with other tiles: as with the usual ones, and how long."""
    given, options = _case_operands(case, bench), options_of(case, _case_operands(case, bench))
    gradient, clock = torch.ones_like(given.x), _clock(bench.device)

    def backward(tiles: Tiles) -> tuple[torch.Tensor | None, ...]:
        return launches.backward_fused(gradient, *given.positional, **options, tiles=tiles)

    usual, found = backward(_USUAL), bench.run(lambda: backward(SWEPT_BACKWARD[which]))
    for name, ours, wanted in zip(("x", "w13", "w2", "weights"), found, usual, strict=False):
        assert ours is not None
        assert wanted is not None
        bench.error(f"d_{name}", ours, wanted, 2 * TOLERANCE[kind_of(case)])
    raw = clock.in_turns({"": lambda: backward(SWEPT_BACKWARD[which])}, repetitions=_turns(bench))
    middle = statistics.median(raw[""])
    speed = (2 + 1 / 3 if case.gated else 2.5) * case.flops / middle
    tiles = vars(SWEPT_BACKWARD[which])
    bench.row("backward", "s", middle, raw=raw[""], flops_per_s=speed, tiles=tiles)


def swept_cases() -> list[Case]:
    """The shapes of the sweep."""
    cases = timed_cases()
    return [replace(cases[place], compiled=False) for place in SWEPT_CASES]
