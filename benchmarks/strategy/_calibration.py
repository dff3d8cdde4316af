"""Fitting a few constants of a device or fabric to measured iterations.

A constant is named by its field (``"gemm_efficiency"``) or by tier and field
(``"cluster.efficiency"``). The fit minimises the squared logarithm of predicted over measured
time, softened so that single disturbed runs do not rule it. What is fitted, on what, stays with
the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import least_squares

from fivefold.errors import ConfigurationError
from fivefold.strategy import Cluster, ModelSpec, ParallelPlan, evaluate_plan

_SOFTENED_AT = 0.05  # relative errors beyond this count less and less


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One measured iteration.

    Args:
        case: For people.
        model: What was trained.
        plan: Split how.
        measured_s: Seconds of an iteration.

    Examples:
        >>> model = ModelSpec(name="x", num_layers=1, hidden=64, num_heads=1, seq_len=8, vocab=10)
        >>> MeasuredRun(case="x", model=model, plan=ParallelPlan(global_batch=1),
        ...             measured_s=1.0).case
        'x'
    """

    case: str
    model: ModelSpec
    plan: ParallelPlan
    measured_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.measured_s) and self.measured_s > 0):
            message = f"measured_s={self.measured_s!r} of {self.case!r} is not a time"
            raise ConfigurationError(message, hint="positive seconds")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted constants and the cluster that has them.

    Args:
        cluster: With the constants in place.
        constants: By name.
        mean_error: Mean relative error on the rows of the fit.
        cases: Which rows.
    """

    cluster: Cluster
    constants: dict[str, float]
    mean_error: float
    cases: tuple[str, ...]


def with_constants(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    """A cluster with some constants replaced.

    Args:
        cluster: The cluster.
        constants: New values by name.

    Raises:
        ConfigurationError: There is no such constant or tier.

    Examples:
        >>> from fivefold.strategy import load_cluster
        >>> changed = with_constants(load_cluster("h100-nemo"), {"cluster.efficiency": 0.5})
        >>> changed.fabric.tiers[1].efficiency
        0.5
    """
    device, tiers = cluster.device, {tier.name: tier for tier in cluster.fabric.tiers}
    for name, value in constants.items():
        place, _, field = name.rpartition(".")
        if place and place not in tiers:
            message = f"{cluster.name!r} has no tier {place!r}"
            raise ConfigurationError(message, hint=f"use one of {', '.join(tiers)}")
        target = tiers[place] if place else device
        if field not in {f.name for f in dataclasses.fields(target)}:
            message = f"there is no constant {name!r}"
            raise ConfigurationError(message, hint="name a field of DeviceSpec or tier.field")
        if place:
            tiers[place] = dataclasses.replace(tiers[place], **{field: value})  # type: ignore[arg-type]
        else:
            device = dataclasses.replace(device, **{field: value})  # type: ignore[arg-type]
    fabric = dataclasses.replace(cluster.fabric, tiers=tuple(tiers.values()))
    return dataclasses.replace(cluster, device=device, fabric=fabric)


def predicted_s(cluster: Cluster, run: MeasuredRun) -> float:
    """Seconds that the model predicts for a run."""
    return evaluate_plan(run.model, cluster.device, cluster.fabric, plan=run.plan).time_s


def fit_constants(
    cluster: Cluster, runs: Sequence[MeasuredRun], *, limits: Mapping[str, tuple[float, float]]
) -> Fit:
    """Fit constants to measured iterations.

    Args:
        cluster: Where the search starts.
        runs: Measured iterations.
        limits: Which constants may change, each between two physical limits.

    Raises:
        ConfigurationError: There are fewer runs than constants.
        UnsupportedError: SciPy is not installed.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> cluster = load_cluster("a100-megatron")
        >>> plan = ParallelPlan(global_batch=8, data=8)
        >>> run = MeasuredRun(case="x", model=load_model("gpt3-1.3b"), plan=plan, measured_s=0.5)
        >>> fit = fit_constants(cluster, [run], limits={"gemm_efficiency": (0.1, 1.0)})
        >>> fit.mean_error < 1e-3
        True
    """
    if len(runs) < len(limits) or not limits:
        message = f"{len(limits)} constants cannot be fitted to {len(runs)} runs"
        raise ConfigurationError(message, hint="give at least one constant, and as many runs")
    names = list(limits)
    scale = [high - low for low, high in limits.values()]

    def changed(shares: Sequence[float]) -> Cluster:
        values = {
            name: limits[name][0] + float(share) * width
            for name, share, width in zip(names, shares, scale, strict=True)
        }
        return with_constants(cluster, values)

    def errors(shares: Sequence[float]) -> list[float]:
        guess = changed(shares)
        return [math.log(predicted_s(guess, run) / run.measured_s) for run in runs]

    start = [min(max(_share(cluster, name, limits[name]), 0.02), 0.98) for name in names]
    answer = least_squares(
        errors, start, bounds=(0.0, 1.0), loss="soft_l1", f_scale=_SOFTENED_AT, diff_step=0.01
    )
    best = changed(answer.x)
    constants = {name: _value(best, name) for name in names}
    relative = [abs(predicted_s(best, run) / run.measured_s - 1) for run in runs]
    return Fit(
        cluster=best, constants=constants, mean_error=sum(relative) / len(relative),
        cases=tuple(run.case for run in runs),
    )  # fmt: skip


def _value(cluster: Cluster, name: str) -> float:
    place, _, field = name.rpartition(".")
    if not place:
        return float(getattr(cluster.device, field))
    tier = next(tier for tier in cluster.fabric.tiers if tier.name == place)
    value = getattr(tier, field)
    return float(tier.efficiency if value is None else value)


def _share(cluster: Cluster, name: str, limits: tuple[float, float]) -> float:
    return (_value(cluster, name) - limits[0]) / (limits[1] - limits[0])
