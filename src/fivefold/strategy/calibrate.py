"""What measurements say of predictions: how far off they may be, and constants that make them true.

The shipped table holds ln(predicted / measured) of public rows per kind of row: the root mean
square over sources (a table of one publisher and one release of its software is one source, for its
rows err alike), how far the means of the sources lie apart, and what is left between plans of one
pair of model and GPU. Of dense rows that constants were fitted to, a pair's error is taken less the
mean of other models on the same GPU and stack, as a fit without it would have centred those.
``benchmarks.strategy.recent`` writes it, and judges it with each source left out whole.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from fivefold.collectives.pricing import FabricSpec, Group, collective_time_s
from fivefold.errors import ConfigurationError, DataError, require_number
from fivefold.measured import consistent_times_s
from fivefold.strategy._operators import NARROW
from fivefold.strategy.cluster import Cluster, DeviceSpec, named_stacks, stack_of
from fivefold.strategy.cost import evaluate_plan
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan

_GENERATIONS = {
    "v100": "Volta", "a100": "Ampere", "h100": "Hopper", "h200": "Hopper", "h800": "Hopper",
    "b200": "Blackwell", "b300": "Blackwell", "gb200": "Blackwell", "gb300": "Blackwell",
}  # fmt: skip
_SMALL_STEP_S = 0.5
_FEWEST_SOURCES = 5
_FRESH_MONTHS = 6
_PER_DOUBLING = 0.08  # DeepSeek-V3 keeps 0.59 of its rate from 512 to 8,192 GPUs, 0.92 is predicted
_ASSUMED = 0.15  # that a rate may be off which nobody measured on that GPU
# Student's t at 95 % on one side, by sources less one: 90 % of new sources lie inside.
_STUDENT = ((1, 6.31), (2, 2.92), (3, 2.35), (4, 2.13), (5, 2.02), (6, 1.94), (8, 1.86),
            (10, 1.81), (15, 1.75), (20, 1.72), (30, 1.70),
            (60, 1.67), (math.inf, 1.645))  # fmt: skip


def kinds_of(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, time_s: float
) -> tuple[str, ...]:
    """Return keys of the table, from the rows most like a run of ``time_s`` to all rows."""
    gpu = device.gpu or device.name.partition("-")[0]
    precision = "NVFP4" if plan.dtype == "nvfp4" else "FP8" if plan.dtype in NARROW else "16 bits"
    parts = (
        "adapters" if model.adapters else "dense" if model.experts is None else "experts",
        device.framework if device.framework == "Megatron" else "another framework",
        precision,
        _GENERATIONS.get(gpu, "another GPU"),
        "small steps" if time_s < _SMALL_STEP_S else "steps",
    )
    keys = [", ".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return (*keys, "all")


@dataclass(frozen=True)
class ErrorBar:
    """Distance of measured times from predicted ones, for nine rows of ten like it.

    Args:
        share: Measured lies between predicted / (1 + share) and predicted x (1 + share).
        plan_share: The same of the ratio of two plans of one job, whose common error cancels.
        count: Rows that say so.
        sources: Independent sources of these rows.
        like: What those rows have in common, and what of the run none of them has.
    """

    share: float
    plan_share: float
    count: int
    sources: int
    like: str

    def interval_s(self, time_s: float) -> tuple[float, float]:
        """Return the lowest and the highest time."""
        return time_s / (1.0 + self.share), time_s * (1.0 + self.share)

    def equal(self, first_s: float, second_s: float) -> bool:
        """Return whether two plans of one job cannot be told apart."""
        return max(first_s, second_s) <= min(first_s, second_s) * (1.0 + self.plan_share)


@functools.cache
def _table() -> dict[str, dict[str, float]]:
    text = (files("fivefold.strategy") / "residuals.json").read_text()
    table: dict[str, dict[str, float]] = json.loads(text)["groups"]
    return table


def _quantile(freedom: float) -> float:
    return next(t for most, t in _STUDENT if freedom <= most)


def spread_of(
    table: Mapping[str, Mapping[str, float]], keys: Sequence[str], *, num_gpus: int
) -> tuple[float, str]:
    """Return the error that nine of ten new rows stay under, in ln, and the key it is of.

    Five sources at least say it; a kind that fewer have seen is as wide as these have been, and one
    that none has seen is wider by as much as sources differ; so is a run on more GPUs than any row,
    by each doubling.
    """
    enough = (
        i for i, key in enumerate(keys) if table.get(key, {}).get("sources", 0) >= _FEWEST_SOURCES
    )
    place = next(enough, len(keys) - 1)
    found = table[keys[place]]
    sigma = max(table[key]["error"] for key in keys[: place + 1] if key in table)
    if keys[0] not in table:
        sigma = math.hypot(sigma, found["between_sources"])
    doublings = max(math.log2(num_gpus / found["gpus"]), 0.0)
    sigma = math.hypot(sigma, _PER_DOUBLING * doublings)
    return _quantile(found["sources"] - 1) * sigma, keys[place]


def error_bar(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, time_s: float
) -> ErrorBar:
    """Return the error bar of a prediction, from public rows like it.

    A device that was anchored at a measured run has only the error between plans left.

    Raises:
        ConfigurationError: ``time_s`` is no number above 0.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> plan = ParallelPlan(global_batch=128, data=8, tensor=8, dtype="fp8")
        >>> bar = error_bar(load_model("llama3-70b"), load_cluster("h100-nemo").device, plan,
        ...                 time_s=10.0)
        >>> 0.0 < bar.share < 0.5 and bar.count >= 8
        True
    """
    require_number("time_s", time_s, positive=True, hint="the predicted seconds of an iteration")
    keys, table = kinds_of(model, device, plan, time_s=time_s), _table()
    error, key = spread_of(table, keys, num_gpus=plan.num_gpus)
    found = table[key]
    sources = dict(device.sources)
    if sources.get("gemm_efficiency", "").startswith(("assumed", "as ")):
        error = math.hypot(error, _quantile(math.inf) * _ASSUMED)
    # Two rows of one pair differ by both their errors, and never by more than strangers do.
    between = _quantile(found["pairs"]) * found["between_plans"]
    between = min(between, error) * math.sqrt(2.0)
    share = math.expm1(min(between, error) if device.anchor != 1.0 else error)
    # What of a run none of the table's rows has.
    unseen = next((known for known in reversed(keys) if known not in table), None)
    words = [key]
    if unseen is not None:
        words.append(f"none is of {unseen}")
    if plan.num_gpus > found["gpus"]:
        words.append(f"none has more than {int(found['gpus']):,} GPUs")
    words += ["none with Muon"] * (plan.optimizer == "muon")
    return ErrorBar(
        share=share, plan_share=math.expm1(between), count=int(found["rows"]),
        sources=int(found["sources"]), like="; ".join(words),
    )  # fmt: skip


def release_warning(device: DeviceSpec, *, today: dt.date) -> str | None:
    """Return what is to be said of a software release that is over six months old; None: nothing.

    Examples:
        >>> from fivefold.strategy import load_cluster
        >>> import datetime as dt
        >>> device = load_cluster("gb200-bridge").device
        >>> print(release_warning(device, today=dt.date(2026, 11, 28)))
        megatron-bridge-26.02 is of 2026-03, 8 months ago: newer software may be faster; known is \
megatron-bridge-26.06, behind an @ in the cluster's name
    """
    if re.fullmatch(r"\d{4}-\d{2}", device.released) is None:
        return None
    year, month = map(int, device.released.split("-"))
    months = 12 * (today.year - year) + today.month - month
    if months <= _FRESH_MONTHS:
        return None
    family = device.stack.rpartition("-")[0]
    dated = {name: stack_of(name).released for name in named_stacks()}
    newer = [name for name in dated if name.rpartition("-")[0] == family]
    newer = [name for name in newer if dated[name] > device.released]
    said = (
        f"{device.stack} is of {device.released}, {months} months ago: newer software may be faster"
    )
    if newer:
        said += f"; known is {newer[-1]}, behind an @ in the cluster's name"
    return said


_EFFICIENCIES = (
    "gemm_efficiency", "gemm_efficiency_fp8", "gemm_efficiency_mxfp8", "gemm_efficiency_fp4",
    "attention_efficiency", "memory_efficiency",
)  # fmt: skip
_PEAKS = (
    "peak_flops", "peak_flops_fp8", "peak_flops_fp4", "peak_flops_fp32",
    "memory_bandwidth_bytes_per_s",
)  # fmt: skip
_LEAST_SHARE = 1e-6  # that an efficiency may be
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

    All rates are scaled by predicted over measured time of the passes; other jobs are then
    extrapolations. ``plan`` is of one rank: its micro-batch and as many samples as it takes in a
    step; ``rest_s`` is what else a step takes, ``memory_bytes`` the most that a rank held (None:
    the stack's own stays as it is).

    Raises:
        ConfigurationError: A time is not positive, or the plan is of several ranks.
    """
    positive = 0 < model_s < math.inf and 0 < optimizer_s < math.inf and 0 <= rest_s < math.inf
    if plan.num_gpus != 1 or not positive:  # also NaN
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
    shares = [getattr(device, name) * factor for name in _EFFICIENCIES]
    stays = max(shares) <= 1 and min(share for share in shares if share) >= _LEAST_SHARE
    names = _EFFICIENCIES if stays else _PEAKS
    rates = {name: getattr(device, name) * factor for name in names}
    return dataclasses.replace(
        device, **rates, **{name: getattr(device, name) / factor for name in _FIXED}
    )


def calibrated_fabric(
    cluster: Cluster, *, ranks: int, sizes_bytes: Sequence[float], times_s: Sequence[float]
) -> FabricSpec:
    """Return the fabric on which an all-reduce over all ranks takes what was measured.

    The outermost tier's efficiency follows from the slope between the smallest and the largest
    size (``sizes_bytes`` ascend), its fixed time from what is left of the largest. Times that no
    link can have are made consistent first (``fivefold.measured``).

    Raises:
        ConfigurationError: There are fewer than two sizes, they do not ascend, the larger took no
            longer, or a time is not above 0 and finite.
    """
    try:
        steady_s = consistent_times_s(sizes_bytes, times_s)
    except DataError as error:
        raise ConfigurationError(error.message, hint=error.hint) from error
    rise_s, last_s = steady_s[-1] - steady_s[0], steady_s[-1]
    if not rise_s > 0:
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
    outer = dataclasses.replace(outer, base_s=max(last_s - predicted_s(sizes_bytes[-1]), 0.0))
    return dataclasses.replace(fabric, tiers=(*fabric.tiers[:-1], outer))
