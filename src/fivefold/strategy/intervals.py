"""How far off a prediction may be: intervals from the errors on public rows like it.

The shipped table holds, per kind of row, how many rows there are, the root mean square of their
errors ln(predicted / measured), and that of the errors once the mean error of each pair of model
and device is taken away: what is left between plans of one job. ``benchmarks.strategy.recent``
writes it from rows that are not among those it judges.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib.resources import files

from fivefold.strategy.cluster import DeviceSpec
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan

__all__ = ["ErrorBar", "error_bar", "kinds_of"]

_GENERATIONS = {
    "v100": "Volta", "a100": "Ampere", "h100": "Hopper", "h200": "Hopper", "h800": "Hopper",
    "b200": "Blackwell", "b300": "Blackwell", "gb200": "Blackwell", "gb300": "Blackwell",
}  # fmt: skip
_NARROW = {"fp8", "mxfp8", "nvfp4"}
_SMALL_STEP_S = 0.5
_FEWEST_ROWS = 8
# Student's t at 95 % on one side, by rows: 90 % of rows like these lie inside.
_STUDENT = ((8, 1.86), (10, 1.81), (15, 1.75), (20, 1.72), (30, 1.70), (60, 1.67),
            (math.inf, 1.645))  # fmt: skip


def kinds_of(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, time_s: float
) -> tuple[str, ...]:
    """Return keys of the table, from the rows most like a run to all of its kind.

    Args:
        model: What is trained: dense or with experts.
        device: On which GPU and stack; its name begins with the GPU's.
        plan: Split how; products in 16 bits or narrow.
        time_s: Seconds of an iteration; small steps are below half a second.
    """
    gpu = device.gpu or device.name.partition("-")[0]
    parts = (
        "dense" if model.experts is None else "experts",
        _GENERATIONS.get(gpu, "other"),
        "narrow" if plan.dtype in _NARROW else "16 bits",
        "small steps" if time_s < _SMALL_STEP_S else "steps",
    )
    return tuple(", ".join(parts[:count]) for count in range(len(parts), 0, -1))


@dataclass(frozen=True)
class ErrorBar:
    """How far measured times lie from predicted ones, for nine rows of ten like it.

    Args:
        share: Measured lies between predicted / (1 + share) and predicted x (1 + share).
        plan_share: The same of the ratio of two plans of one job, whose common error cancels.
        count: Rows that say so.
        like: What those rows have in common, and what of the run none of them has.
    """

    share: float
    plan_share: float
    count: int
    like: str

    def interval_s(self, time_s: float) -> tuple[float, float]:
        """Return the lowest and the highest time.

        Examples:
            >>> ErrorBar(share=0.25, plan_share=0.1, count=12, like="dense").interval_s(10.0)
            (8.0, 12.5)
        """
        return time_s / (1.0 + self.share), time_s * (1.0 + self.share)

    def equal(self, first_s: float, second_s: float) -> bool:
        """Return whether two plans of one job cannot be told apart.

        Examples:
            >>> bar = ErrorBar(share=0.25, plan_share=0.1, count=12, like="dense")
            >>> bar.equal(10.0, 10.5), bar.equal(10.0, 12.0)
            (True, False)
        """
        return max(first_s, second_s) <= min(first_s, second_s) * (1.0 + self.plan_share)


@functools.cache
def _table() -> dict[str, dict[str, float]]:
    text = (files("fivefold.strategy") / "residuals.json").read_text()
    table: dict[str, dict[str, float]] = json.loads(text)["groups"]
    return table


def error_bar(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, time_s: float
) -> ErrorBar:
    """Return the error bar of a prediction, from public rows like it.

    A device that was anchored at a measured run has only the error between plans left.

    Args:
        model: What is trained.
        device: On which GPU and stack.
        plan: Split how.
        time_s: Predicted seconds of an iteration.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> plan = ParallelPlan(global_batch=128, data=8, tensor=8, dtype="fp8")
        >>> bar = error_bar(load_model("llama3-70b"), load_cluster("h100-nemo").device, plan,
        ...                 time_s=10.0)
        >>> 0.0 < bar.share < 0.5 and bar.count >= 8
        True
    """
    keys = kinds_of(model, device, plan, time_s=time_s)
    table = _table()
    key = next(
        (key for key in keys if table.get(key, {}).get("count", 0) >= _FEWEST_ROWS), keys[-1]
    )
    count = int(table[key]["count"])
    times = next(t for most, t in _STUDENT if count <= most)
    # Few rows are weighed with all of their kind: constants were fitted to some of them.
    parent = table[keys[-1]]
    error, between = (
        times * math.sqrt(
            (count * table[key][name] ** 2 + _FEWEST_ROWS * parent[name] ** 2)
            / (count + _FEWEST_ROWS)
        )
        for name in ("error", "between_plans")
    )  # fmt: skip
    # Two rows of one pair differ by both their errors, and never by more than strangers do.
    between = min(between, error) * math.sqrt(2.0)
    share = math.expm1(min(between, error) if device.anchor != 1.0 else error)
    like = "; ".join([key, *(f"none with {what}" for what in _unseen(model, plan))])
    return ErrorBar(share=share, plan_share=math.expm1(between), count=count, like=like)


def _unseen(model: ModelSpec, plan: ParallelPlan) -> list[str]:
    """Return what of a run none of the table's rows has."""
    parts = (("adapters", model.adapters), ("layers of Mamba", model.mamba),
             ("Muon", plan.optimizer == "muon"))  # fmt: skip
    return [what for what, has in parts if has]
