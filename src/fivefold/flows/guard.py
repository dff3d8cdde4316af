"""Never worse: a candidate is taken only where it is predicted to be better for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class Guarded(Generic[_Plan]):
    """What the guard decided, and on which figures."""

    plan: _Plan  # the plan to use
    taken: bool  # whether that is the candidate
    baseline_s: Mapping[str, float]  # seconds of each job under the baseline
    candidate_s: Mapping[str, float]  # seconds of each job under the candidate
    worse: tuple[str, ...]  # jobs that the candidate would have made slower


def never_worse(
    candidate: _Plan,
    baseline: _Plan,
    *,
    predict: Callable[[_Plan], Mapping[str, float]],
    tolerance: float = 1e-9,
) -> Guarded[_Plan]:
    """Take the candidate where no job gets slower and some job gets faster.

    Args:
        candidate: What is proposed.
        baseline: What there is.
        predict: Seconds of each job under a plan.
        tolerance: Relative slowdown that is not counted.

    Returns:
        The decision.
    """
    before, after = predict(baseline), predict(candidate)
    worse = tuple(job for job in before if after[job] > before[job] * (1 + tolerance))
    better = any(after[job] < before[job] * (1 - tolerance) for job in before)
    taken = better and not worse
    return Guarded(candidate if taken else baseline, taken, before, after, worse)
