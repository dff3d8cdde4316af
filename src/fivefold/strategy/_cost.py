"""One plan: where the time of an iteration goes, and the memory of its fullest GPU.

Times are those of ``_table_cost``, of a table of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.collectives.pricing import FabricSpec
from fivefold.errors import ConfigurationError
from fivefold.strategy._device import DeviceSpec
from fivefold.strategy._layer import LayerKey, head_cost, mean_layer_cost
from fivefold.strategy._memory import MemoryUse, memory_use
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._plan import ParallelPlan, plan_problem
from fivefold.strategy._table import PlanTable
from fivefold.strategy._table_cost import time_parts


@dataclass(frozen=True, kw_only=True)
class TimeUse:
    """Where the time of an iteration goes; the parts add up.

    Args:
        compute_s: Forward and backward of all micro-batches on the slowest stage.
        recompute_s: Forward computed again.
        tensor_s: Exposed communication of the tensor group.
        context_s: Exposed communication of the context group.
        expert_s: Exposed exchange of tokens between experts.
        boundary_s: Exposed messages between stages.
        idle_s: Waiting in the pipeline.
        data_s: Exposed communication of gradients and parameters.
        offload_s: Exposed transfers to and from host memory.
        optimizer_s: The optimizer's step.
        overhead_s: The stack's fixed time and the lag of the slowest rank.

    Examples:
        >>> TimeUse(compute_s=1.0, idle_s=0.5).total_s
        1.5
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0
    boundary_s: float = 0.0
    idle_s: float = 0.0
    data_s: float = 0.0
    offload_s: float = 0.0
    optimizer_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The iteration."""
        return float(sum(getattr(self, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one iteration of a plan costs.

    Args:
        plan: The plan.
        time: Where the time goes.
        memory: Bytes on the fullest GPU.
        fits: Whether these are at most the device's.
        mfu: Model FLOPs (no recomputation) by what the GPUs could do in that time.
    """

    plan: ParallelPlan
    time: TimeUse
    memory: MemoryUse
    fits: bool
    mfu: float

    @property
    def time_s(self) -> float:
        """Seconds of an iteration."""
        return self.time.total_s


def evaluate_plan(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan
) -> Prediction:
    """Predict time and memory of one iteration.

    Args:
        model: What is trained.
        device: On which GPU and stack.
        fabric: Joined how.
        plan: Split how.

    Raises:
        ConfigurationError: The plan cannot run the model.

    Examples:
        >>> gpt = ModelSpec(name="22B", num_layers=48, hidden=6144, num_heads=64, seq_len=2048,
        ...                 vocab=51200)
        >>> device = DeviceSpec(name="a100", peak_flops=312e12, memory_bytes=80e9,
        ...                     memory_bandwidth_bytes_per_s=2.0e12, multiprocessors=108)
        >>> from fivefold.collectives.pricing import Tier
        >>> node = FabricSpec(name="node", tiers=(Tier(name="node", gpus=8,
        ...                                            bandwidth_bytes_per_s=300e9),))
        >>> plan = ParallelPlan(global_batch=4, micro_batch=4, tensor=8, recompute="full")
        >>> 1.2 < evaluate_plan(gpt, device, node, plan=plan).time_s < 1.7
        True
    """
    problem = plan_problem(model, plan)
    if problem is not None:
        raise ConfigurationError(problem, hint="choose degrees that divide the model")
    layer = mean_layer_cost(model, device, fabric, key=LayerKey.of(plan))
    head = head_cost(model, device, fabric, key=LayerKey.of(plan))
    memory = memory_use(model, device, plan, layer=layer, head=head)
    parts = time_parts(model, device, fabric, table=PlanTable.of([plan]))
    time = TimeUse(**{name: float(column[0]) for name, column in parts.items()})
    peak = device.peak_flops_fp8 if plan.dtype == "fp8" else device.peak_flops
    flops = plan.global_batch * model.flops_per_sequence()
    return Prediction(
        plan=plan,
        time=time,
        memory=memory,
        fits=memory.total_bytes <= device.memory_bytes,
        mfu=flops / (time.total_s * plan.num_gpus * peak),
    )
