"""Constants of a cluster from what one job was measured to take on it.

A cluster's file has constants of a kind of device; the one at hand is faster or slower, for this
job. The rates of the device are scaled so that the job's passes take what they were measured to
take; the optimizer's traffic, the fixed time of a step and the stack's memory likewise, and the
outermost tier's efficiency so that an all-reduce does. Other jobs are then extrapolations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fivefold.collectives.pricing import FabricSpec, Group, collective_time_s
from fivefold.errors import ConfigurationError
from fivefold.strategy.cluster import Cluster, DeviceSpec
from fivefold.strategy.cost import evaluate_plan
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan

_EFFICIENCIES = ("gemm_efficiency", "attention_efficiency", "memory_efficiency")
_PEAKS = ("peak_flops", "peak_flops_fp8", "memory_bandwidth_bytes_per_s")
_ROUNDS = 8
_FIXED = ("tile_start_s", "kernel_gap_s", "host_kernel_s")


def calibrated_device(
    cluster: Cluster,
    model: ModelSpec,
    plan: ParallelPlan,
    *,
    model_s: float,
    optimizer_s: float,
    rest_s: float,
    memory_bytes: float | None = None,
) -> DeviceSpec:
    """Return the device with which a step of one replica takes what was measured.

    All rates are scaled by predicted over measured time of the passes; times that depend on the
    device by the inverse, so that the prediction of this job becomes the measurement.

    Args:
        cluster: Where the constants begin.
        model: What was trained.
        plan: Of one rank: its micro-batch and as many samples as it takes in a step.
        model_s: Forward and backward passes of a step, seconds.
        optimizer_s: The optimizer's update, seconds.
        rest_s: What else a step takes, seconds.
        memory_bytes: Most memory that a rank held; None leaves the stack's own as it is.

    Raises:
        ConfigurationError: A time is not positive, or the plan is of several ranks.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> cluster, model = load_cluster("cpu-lab"), load_model("gpt3-1.3b")
        >>> plan = ParallelPlan(global_batch=1)
        >>> device = calibrated_device(cluster, model, plan, model_s=60.0, optimizer_s=2.0,
        ...                            rest_s=0.1)
        >>> round(evaluate_plan(model, device, cluster.fabric, plan=plan).time_s, 6)
        62.1
    """
    if plan.num_gpus != 1 or min(model_s, optimizer_s) <= 0 or rest_s < 0:
        message = f"a step of {plan.num_gpus} ranks took {model_s:g} and {optimizer_s:g} s"
        raise ConfigurationError(message, hint="give positive times of one rank alone")
    quiet = dataclasses.replace(cluster.device, step_overhead_s=0.0, jitter=0.0)
    found = evaluate_plan(model, quiet, cluster.fabric, plan=plan).time
    device = _faster(quiet, (found.compute_s + found.recompute_s) / model_s)
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    device = dataclasses.replace(
        device,
        step_overhead_s=rest_s,
        optimizer_bytes_per_parameter=optimizer_s * rate / model.num_parameters,
    )
    if memory_bytes is None:
        return device
    used = evaluate_plan(model, device, cluster.fabric, plan=plan).memory
    own = memory_bytes - used.total_bytes + used.reserved_bytes
    return dataclasses.replace(device, reserved_bytes=max(own, 0.0))


def _faster(device: DeviceSpec, factor: float) -> DeviceSpec:
    """Return the device with all rates times ``factor``: as efficiencies where they stay shares."""
    shares = {name: getattr(device, name) * factor for name in _EFFICIENCIES}
    rates = shares if max(shares.values()) <= 1 else {
        name: getattr(device, name) * factor for name in _PEAKS
    }  # fmt: skip
    return dataclasses.replace(
        device, **rates, **{name: getattr(device, name) / factor for name in _FIXED}
    )


def calibrated_fabric(
    cluster: Cluster, *, ranks: int, sizes_bytes: Sequence[float], times_s: Sequence[float]
) -> FabricSpec:
    """Return the fabric on which an all-reduce over all ranks takes what was measured.

    The outermost tier's efficiency follows from the slope between the smallest and the largest
    size, its fixed time from what is left of the largest.

    Args:
        cluster: Where the constants begin.
        ranks: Ranks that took part.
        sizes_bytes: Payloads, ascending.
        times_s: Seconds of an all-reduce of each.

    Raises:
        ConfigurationError: Times do not grow with the size, or there are fewer than two.
    """
    rise_s = times_s[-1] - times_s[0]
    if len(sizes_bytes) < 2 or rise_s <= 0:
        message = f"all-reduces of {list(sizes_bytes)} bytes took {list(times_s)} s"
        raise ConfigurationError(message, hint="measure larger sizes, whose times grow")
    fabric, outer = cluster.fabric, cluster.fabric.tiers[-1]

    def predicted_s(size_bytes: float) -> float:
        return collective_time_s(
            fabric, "all_reduce", size_bytes=size_bytes, group=Group(size=ranks, ranks=ranks)
        )

    outer = dataclasses.replace(outer, base_s=0.0, fill_s=0.0)
    for _ in range(_ROUNDS):  # another rate may make another algorithm the faster one
        slope = (predicted_s(sizes_bytes[-1]) - predicted_s(sizes_bytes[0])) / rise_s
        outer = dataclasses.replace(outer, efficiency=outer.efficiency * slope)
        fabric = dataclasses.replace(fabric, tiers=(*fabric.tiers[:-1], outer))
    outer = dataclasses.replace(outer, base_s=max(times_s[-1] - predicted_s(sizes_bytes[-1]), 0.0))
    return dataclasses.replace(fabric, tiers=(*fabric.tiers[:-1], outer))
