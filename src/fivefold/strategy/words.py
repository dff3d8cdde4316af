"""A plan in a few words, for tables: its degrees, and the settings that are not the default."""

from __future__ import annotations

from fivefold.strategy.plan import WAITING_SCHEDULES, ParallelPlan

DEGREES = "d data, t tensor, p pipeline, c context, e expert, b micro-batch"
"""What the letters of ``degrees_of`` stand for."""


def degrees_of(plan: ParallelPlan) -> str:
    """Return the degrees over 1, and the micro-batch.

    Examples:
        >>> degrees_of(ParallelPlan(global_batch=64, data=4, tensor=8, micro_batch=2))
        'd4 t8 b2'
    """
    degrees = (("d", plan.data), ("t", plan.tensor), ("p", plan.pipeline), ("c", plan.context),
               ("e", plan.expert))  # fmt: skip
    words = [f"{letter}{degree}" for letter, degree in degrees if degree > 1]
    return " ".join([*words, f"b{plan.micro_batch}"])


def settings_of(plan: ParallelPlan) -> str:
    """Return the schedule, sharding, recomputation, local updates and offloading of a plan.

    Examples:
        >>> settings_of(ParallelPlan(global_batch=8, data=8, zero=3, recompute="full"))
        'ZeRO-3, recompute full'
    """
    words = []
    if plan.pipeline > 1:
        words.append(plan.schedule + (f" x{plan.virtual}" if plan.virtual > 1 else ""))
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}" + (f" over {plan.shard}" if plan.shard else ""))
    if plan.sequence_parallel:
        words.append("sequence parallel")
    if plan.recompute != "none":
        words.append(f"recompute {plan.recompute}")
    if plan.tau > 1:
        words.append(f"tau {plan.tau}")
    if plan.optimizer != "adamw":
        words.append(plan.optimizer.capitalize())
    words += [
        f"offload {name}"
        for name in ("weights", "activations", "optimizer")
        if getattr(plan, f"offload_{name}")
    ]
    return ", ".join(words) or "plain"


def overlap_of(plan: ParallelPlan) -> str:
    """Return which communication runs beside compute.

    Examples:
        >>> overlap_of(ParallelPlan(global_batch=8, data=8, data_overlap=True))
        'gradients'
    """
    words = []
    if plan.tensor > 1 and plan.tensor_overlap != "none":
        words.append("tensor")
    if plan.data * plan.context > 1 and (plan.data_overlap or plan.tau > 1):
        words.append("gradients" if plan.tau == 1 else "outer updates")
    if plan.pipeline > 1 and plan.pipeline_overlap and plan.schedule not in WAITING_SCHEDULES:
        words.append("stages")
    if plan.shared_overlap:
        words.append("shared experts")
    if plan.schedule.startswith("dualpipe") and plan.pipeline > 1 and plan.expert > 1:
        words.append("experts")
    return ", ".join(words) or "nothing"
