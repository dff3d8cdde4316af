"""Times of a case: ours in turns with everyone else's, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.moe._h200._cases import Case
from benchmarks.moe._h200._checks import TOLERANCE, error_of
from benchmarks.moe._h200._clock import Ceilings, Clock, arithmetic_of
from benchmarks.moe._h200._operands import Operands, operands_of
from benchmarks.moe._h200._variants import LIGER, OURS, Variant, variants_of
from benchmarks.results_file import BenchmarkRow, median_and_spread
from fivefold.errors import FivefoldError
from fivefold.moe import Workspace, fused_moe

__all__ = ["Plan", "time_case"]

Say = Callable[[str], None]
_PEER_TOLERANCE = 3e-2  # peers round in between; enough to see one that computes something else


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to measure.

    Attributes:
        clock: Of the device.
        ceilings: Of the machine.
        repetitions: Turns of each variant.
        compiler: Backend of torch.compile.
        say: Tells people.
    """

    clock: Clock
    ceilings: Ceilings
    repetitions: int
    compiler: str
    say: Say


def time_case(case: Case, plan: Plan) -> list[BenchmarkRow]:
    """All rows of a case.

    Args:
        case: What.
        plan: How.

    Returns:
        Rows: time, speed, shares of the ceilings, launches, memory.

    Raises:
        FivefoldError: Our result is wrong at this size.
    """
    clock = plan.clock
    given = operands_of(case, clock.device)
    compiler = plan.compiler if case.compiled else None
    variants = variants_of(case, clock.device, compiler=compiler)
    built_s = clock.seconds(lambda: variants[OURS](given))
    rows = [_row(case, "first call, with what was not compiled before", "s", built_s)]
    with torch.no_grad():
        usable = _agreeing(case, given, variants, plan)
        rows += _forward_rows(case, given, usable, plan)
    if case.backward:
        rows += _backward_rows(case, given, usable, plan)
    return rows


def _agreeing(
    case: Case, given: Operands, variants: dict[str, Variant], plan: Plan
) -> dict[str, Variant]:
    """Who computes the right thing; a call each, which warms up as well."""
    wanted = fused_moe(
        given.x.float(),
        given.w13.float(),
        given.w2.float(),
        given.ids,
        given.weights,
        activation=case.activation,
        backend="reference",
        check=False,
    )
    limit = TOLERANCE[arithmetic_of(case.dtype, case.precision)]
    usable = {}
    for name, run in variants.items():
        try:
            error = error_of(run(given), wanted)
        except Exception as reason:
            if name == OURS:
                raise
            plan.say(f"left out: {name} in {case}: {type(reason).__name__}: {str(reason)[:200]}")
            continue
        if name == OURS and error > limit:
            raise FivefoldError(
                f"{case}: error {error:.1e}, at most {limit:.1e} is right",
                hint="a wrong result has no speed",
            )
        if error > _PEER_TOLERANCE:
            plan.say(f"left out: {name} in {case}: it differs by {error:.1e}")
            continue
        usable[name] = run
    return usable


def _forward_rows(
    case: Case, given: Operands, usable: dict[str, Variant], plan: Plan
) -> list[BenchmarkRow]:
    calls = {name: _bound(run, given) for name, run in usable.items()}
    seconds = plan.clock.in_turns(calls, repetitions=plan.repetitions)
    middle = {name: median_and_spread(values) for name, values in seconds.items()}
    bytes_moved = case.least_bytes(given.used_experts)
    peak = plan.ceilings.flops_per_s[arithmetic_of(case.dtype, case.precision)]
    floor_s = max(case.flops / peak, bytes_moved / plan.ceilings.bytes_per_s)
    times = {name: value for name, (value, _) in middle.items()}
    rows = [
        _row(
            case,
            "forward",
            "s",
            times,
            spread=middle[OURS][1],
            limit=floor_s,
            target=case.target_s,
            met=None if case.target_s is None else times[OURS] <= case.target_s,
        ),
        _row(
            case,
            "forward, speed",
            "FLOP/s",
            {name: case.flops / value for name, value in times.items()},
            limit=peak,
            target=case.target_flops_per_s,
            met=None
            if case.target_flops_per_s is None
            else case.flops / times[OURS] >= case.target_flops_per_s,
        ),
    ]
    for metric, ceiling_s in (
        ("forward, share of the measured product ceiling", case.flops / peak),
        ("forward, share of the measured copy ceiling", bytes_moved / plan.ceilings.bytes_per_s),
    ):
        shares = {name: 100 * ceiling_s / value for name, value in times.items()}
        rows.append(_row(case, metric, "%", shares, limit=100.0))
    plan.say(f"{case}: {times[OURS] * 1e3:.3f} ms, floor {floor_s * 1e3:.3f} ms; {_said(times)}")
    return rows + _memory_rows(case, calls, plan, "forward")


def _memory_rows(
    case: Case, calls: dict[str, Callable[[], object]], plan: Plan, what: str
) -> list[BenchmarkRow]:
    launches = {name: float(plan.clock.launches(call)) for name, call in calls.items()}
    rows = [_row(case, f"{what}, launches", "launches", launches)]
    peaks = {name: plan.clock.peak_bytes(call) for name, call in calls.items()}
    known = {name: float(value) for name, value in peaks.items() if value is not None}
    if known:
        rows.append(_row(case, f"{what}, peak memory", "bytes", known))
    if what == "forward":
        size = Workspace.size(
            num_tokens=case.tokens,
            hidden=case.hidden,
            intermediate=case.inner,
            num_experts=case.experts,
            top_k=case.top_k,
            dtype=case.dtype,
        )
        rows.append(_row(case, "workspace", "bytes", float(size)))
    return rows


def _backward_rows(
    case: Case, given: Operands, usable: dict[str, Variant], plan: Plan
) -> list[BenchmarkRow]:
    """Forward and backward together, since what is kept is part of the price."""
    leaves = given.leaves()
    gradient = torch.ones_like(given.x)
    calls: dict[str, Callable[[], object]] = {}
    for name, run in usable.items():

        def train(run: Variant = run) -> None:
            for leaf in (leaves.x, leaves.w13, leaves.w2, leaves.weights):
                leaf.grad = None
            torch.autograd.backward(run(leaves), gradient)

        try:
            train()
        except Exception as reason:
            if name == OURS:
                raise
            plan.say(f"no backward: {name} in {case}: {type(reason).__name__}: {str(reason)[:200]}")
            continue
        calls[name] = train
    seconds = plan.clock.in_turns(calls, repetitions=plan.repetitions)
    middle = {name: median_and_spread(values) for name, values in seconds.items()}
    times = {name: value for name, (value, _) in middle.items()}
    liger = times.get(LIGER)
    peak = plan.ceilings.flops_per_s[arithmetic_of(case.dtype, case.precision)]
    rows = [
        _row(
            case,
            "forward and backward",
            "s",
            times,
            spread=middle[OURS][1],
            limit=3 * case.flops / peak,
            target=liger,
            met=None if liger is None else times[OURS] <= liger,
        ),
        _row(
            case,
            "forward and backward, speed",
            "FLOP/s",
            {name: 3 * case.flops / value for name, value in times.items()},
            limit=peak,
        ),
    ]
    plan.say(f"{case}, with backward: {times[OURS] * 1e3:.3f} ms; {_said(times)}")
    return rows + _memory_rows(case, calls, plan, "forward and backward")


def _bound(run: Variant, given: Operands) -> Callable[[], object]:
    return lambda: run(given)


def _said(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {value * 1e3:.3f}" for name, value in times.items() if name != OURS)


def _row(  # noqa: PLR0913 - a row's fields
    case: Case,
    metric: str,
    unit: str,
    values: dict[str, float] | float,
    *,
    spread: tuple[float, float] | None = None,
    limit: float | None = None,
    target: float | None = None,
    met: bool | None = None,
) -> BenchmarkRow:
    by_name = values if isinstance(values, dict) else {OURS: values}
    return BenchmarkRow(
        case=str(case),
        metric=metric,
        unit=unit,
        ours=by_name[OURS],
        spread=spread,
        peers={name: value for name, value in by_name.items() if name != OURS},
        limit=limit,
        target=target,
        met=met,
    )
