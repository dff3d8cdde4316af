"""Correctness before speed: against float64, the same bits every time, memory poisoned before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.moe._h200._cases import Case
from benchmarks.moe._h200._clock import arithmetic_of
from benchmarks.moe._h200._operands import Operands, operands_of
from benchmarks.moe._h200._variants import OUR_BACKENDS, Variant, variants_of
from benchmarks.results_file import BenchmarkRow
from fivefold.errors import FivefoldError
from fivefold.moe import fused_moe

__all__ = ["TOLERANCE", "check", "error_of", "wrong_rows"]

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "tf32": 1e-3, "ieee": 2e-6}
"""Relative Frobenius error against float64, forward; gradients may have twice as much."""


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error; infinite where something is not a number."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    norm = wanted.double().norm().clamp_min(1e-30)
    return float((found.double() - wanted.double()).norm() / norm)


def check(
    case: Case, device: torch.device, *, repetitions: int, say: Callable[[str], None]
) -> list[BenchmarkRow]:
    """Compare our backends with float64, forward and gradients, and with themselves.

    Args:
        case: Sizes.
        device: Where.
        repetitions: Calls whose bits must be equal.
        say: Tells people what a backend raised; its error is then infinite.

    Returns:
        A row for each backend and thing compared.
    """
    given = operands_of(case, device)
    limit = TOLERANCE[arithmetic_of(case.dtype, case.precision)]
    wanted, slopes = _with_gradients(_exact(case), _as_float64(given))
    rows = []
    for name, run in variants_of(case, device, compiler=None).items():
        if name not in OUR_BACKENDS:
            continue
        try:
            found, ours = _with_gradients(run, given)
            _poison_freed_memory(given)
            differing = sum(not torch.equal(run(given), found) for _ in range(repetitions))
        except Exception as reason:  # noqa: BLE001 - the others are worth a look all the same
            say(f"{name} in {case}: {type(reason).__name__}: {str(reason)[:400]}")
            figures = {"error of the forward": (float("inf"), limit)}
        else:
            worst = max(error_of(a, b) for a, b in zip(ours, slopes, strict=True))
            figures = {
                "error of the forward": (error_of(found, wanted), limit),
                "worst error of a gradient": (worst, 2 * limit),
                f"calls of {repetitions} with other bits": (float(differing), 0.0),
            }
        for metric, (value, most) in figures.items():
            rows.append(
                BenchmarkRow(
                    case=f"check, {case}",
                    metric=f"{name}: {metric}",
                    unit="ratio" if "error" in metric else "calls",
                    ours=min(value, 1e30),
                    target=most,
                    met=value <= most,
                )
            )
    return rows


def wrong_rows(rows: list[BenchmarkRow]) -> None:
    """Stop where a check was not met, of any backend.

    Args:
        rows: Of ``check``.

    Raises:
        FivefoldError: One was not.
    """
    wrong = [row for row in rows if row.met is False]
    if wrong:
        first = wrong[0]
        raise FivefoldError(
            f"{len(wrong)} of {len(rows)} checks failed; the first: {first.case}, {first.metric} "
            f"is {first.ours:.1e}, at most {first.target:.1e} is right",
            hint="nothing was timed: a wrong result has no speed",
        )


def _exact(case: Case) -> Variant:
    def run(given: Operands) -> torch.Tensor:
        return fused_moe(
            given.x,
            given.w13,
            given.w2,
            given.ids,
            given.weights,
            activation=case.activation,
            backend="reference",
        )

    return run


def _as_float64(given: Operands) -> Operands:
    return Operands(
        x=given.x.double(),
        w13=given.w13.double(),
        w2=given.w2.double(),
        ids=given.ids,
        weights=given.weights.double(),
    )


def _with_gradients(run: Variant, given: Operands) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = given.leaves()
    output = run(leaves)
    steepness = torch.linspace(-1.0, 1.0, output.shape[1], device=output.device)
    slope = steepness.to(output.dtype).expand(output.shape)
    torch.autograd.backward(output, slope)
    tensors = (leaves.x, leaves.w13, leaves.w2, leaves.weights)
    return output.detach(), [t.grad for t in tensors if t.grad is not None]


def _poison_freed_memory(given: Operands) -> None:
    """Leave NaN where torch's allocator will likely take the next outputs from."""
    if given.x.device.type == "cuda":
        for count in (given.x.numel(), given.w13.numel(), given.w2.numel()):
            torch.full((count,), float("nan"), dtype=given.x.dtype, device=given.x.device)
