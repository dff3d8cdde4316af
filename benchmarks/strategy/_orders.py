"""Whether the right plan comes first: regret and order over measured plans of one job.

A group is one model, cluster, number of GPUs, batch and type of products under at least three
plans. Regret is how much slower the plan that is predicted fastest was than the fastest measured;
Kendall's tau is the share of pairs in the right order less that in the wrong one.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.results_file import BenchmarkRow
from fivefold.strategy import ModelSpec, ParallelPlan

__all__ = ["MeasuredPlan", "order_rows"]

REGRET_TARGET = 2.0
TAU_TARGET = 0.8
_LEAST_PLANS = 3


@dataclass(frozen=True)
class MeasuredPlan:
    """One plan of a job: where, what, and seconds measured and predicted."""

    cluster: str
    model: ModelSpec
    plan: ParallelPlan
    measured_s: float
    predicted_s: float

    @property
    def job(self) -> tuple[object, ...]:
        """What rows of one group share."""
        plan, model = self.plan, dataclasses.replace(self.model, name="")
        return (self.cluster, model, plan.num_gpus, plan.global_batch, plan.dtype)


@dataclass(frozen=True)
class _Group:
    case: str
    times: list[tuple[float, float]]  # measured, predicted

    @property
    def regret(self) -> float:
        """How much slower the plan that is predicted fastest was than the fastest, in percent."""
        picked = min(self.times, key=lambda pair: pair[1])[0]
        return 100.0 * (picked / min(measured for measured, _ in self.times) - 1.0)

    @property
    def pairs(self) -> list[int]:
        """1 for a pair in the right order, -1 in the wrong one, 0 where predictions tie."""
        found = []
        for (ours, said), (other, said_other) in itertools.combinations(self.times, 2):
            if ours != other:
                product = (ours - other) * (said - said_other)
                found.append((product > 0) - (product < 0))
        return found


def _groups(title: str, rows: Iterable[MeasuredPlan]) -> list[_Group]:
    jobs: dict[tuple[object, ...], dict[ParallelPlan, list[MeasuredPlan]]] = {}
    for row in rows:
        jobs.setdefault(row.job, {}).setdefault(row.plan, []).append(row)
    groups = []
    for plans in jobs.values():
        if len(plans) < _LEAST_PLANS:
            continue
        # A plan that was measured several times counts once, at its mean.
        times = [(statistics.fmean(r.measured_s for r in same), same[0].predicted_s)
                 for same in plans.values()]  # fmt: skip
        one = next(iter(plans.values()))[0]
        shape = f"{one.model.num_layers} layers of {one.model.hidden}"
        where = f"{one.plan.num_gpus} GPUs, batch {one.plan.global_batch}, {one.plan.dtype}"
        groups.append(_Group(f"{title}, {one.cluster}, {shape}, {where}", times))
    return groups


def order_rows(
    title: str, rows: Iterable[MeasuredPlan], *, each: bool = True
) -> list[BenchmarkRow]:
    """Regret and tau of each group, and over all of a table's.

    Args:
        title: Of the table.
        rows: Its measured plans; groups of fewer than three plans are left out.
        each: Whether every group has rows of its own.
    """
    groups = _groups(title, rows)
    if not groups:
        return []
    lines = []
    for group in groups if each else []:
        lines += _pair_of_rows(f"{group.case}, {len(group.times)} plans", group.regret, group.pairs)
    regrets = [group.regret for group in groups]
    plans = sum(len(group.times) for group in groups)
    case = f"{title}, {len(groups)} groups, {plans} plans"
    within = 100.0 * statistics.fmean(regret <= REGRET_TARGET for regret in regrets)
    lines.append(
        BenchmarkRow(case=case, metric="groups whose regret is within 2 %", unit="%", ours=within,
                     target=100.0, met=within >= 100.0)
    )  # fmt: skip
    signs = [sign for group in groups for sign in group.pairs]
    spread = (min(regrets), max(regrets))
    return lines + _pair_of_rows(case, statistics.fmean(regrets), signs, spread=spread)


def _pair_of_rows(
    case: str, regret: float, pairs: list[int], *, spread: tuple[float, float] | None = None
) -> list[BenchmarkRow]:
    tau = statistics.fmean(pairs) if pairs else 1.0
    return [
        BenchmarkRow(case=case, metric="regret of the predicted best plan", unit="%", ours=regret,
                     spread=spread, target=REGRET_TARGET, met=regret <= REGRET_TARGET),
        BenchmarkRow(case=case, metric="Kendall's tau of measured and predicted times",
                     unit="ratio", ours=tau, target=TAU_TARGET, met=tau >= TAU_TARGET),
    ]  # fmt: skip
