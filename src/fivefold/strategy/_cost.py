"""Time of one iteration of a plan, written to be read: the scalar reference of the search.

An iteration is: every micro-batch through the slowest stage, the pipeline's idle time, what of
the gradients' and parameters' communication is not hidden, and the optimizer's step. The search
uses ``_table``, which computes the same on columns and is tested equal to this.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from fivefold.errors import ConfigurationError
from fivefold.strategy._device import DeviceSpec, memory_time_s
from fivefold.strategy._fabric import FabricSpec, Group, collective_time_s
from fivefold.strategy._layer import LayerCost, LayerKey, head_cost, layer_cost
from fivefold.strategy._memory import WEIGHT_BYTES, MemoryUse, memory_use, stage_parameters
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._pipeline import pipeline_shape, stage_layers
from fivefold.strategy._plan import ParallelPlan, plan_problem

__all__ = ["Prediction", "TimeUse", "evaluate_plan"]

_EVEN = {"gpipe", "1f1b", "interleaved"}


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

    Example:
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


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Forward and the two backwards of one micro-batch on one stage, without messages out."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


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

    Example:
        >>> gpt = ModelSpec(name="22B", num_layers=48, hidden=6144, num_heads=64, seq_len=2048,
        ...                 vocab=51200)
        >>> device = DeviceSpec(name="a100", peak_flops=312e12, memory_bytes=80e9,
        ...                     memory_bandwidth_bytes_per_s=2.0e12, multiprocessors=108)
        >>> from fivefold.strategy._fabric import Tier
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
    layer = _exchanging_layer(device, plan=plan, layer=layer)
    layer = _gathering_layer(model, device, fabric, plan=plan, layer=layer)
    time = _time_use(model, device, fabric, plan=plan, costs=(layer, head))
    peak = device.peak_flops_fp8 if plan.dtype == "fp8" else device.peak_flops
    flops = plan.global_batch * model.flops_per_sequence()
    return Prediction(
        plan=plan,
        time=time,
        memory=memory,
        fits=memory.total_bytes <= device.memory_bytes,
        mfu=flops / (time.total_s * plan.num_gpus * peak),
    )


def mean_layer_cost(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey
) -> LayerCost:
    """Cost of a layer, averaged over dense layers and those with experts."""
    dense = expert = LayerCost()
    if model.num_dense_layers:
        dense = layer_cost(model, device, fabric, key=key)
    if model.num_expert_layers:
        expert = layer_cost(model, device, fabric, key=key, expert_layer=True)
    share = model.num_expert_layers / model.num_layers
    return LayerCost(
        **{
            name: (1 - share) * getattr(dense, name) + share * getattr(expert, name)
            for name in dense.__dataclass_fields__
        }
    )


def _exchanging_layer(device: DeviceSpec, *, plan: ParallelPlan, layer: LayerCost) -> LayerCost:
    """DualPipe runs a forward beside a backward, each computing while the other exchanges."""
    if plan.schedule not in {"dualpipe", "dualpipe_v"} or plan.pipeline == 1:
        return layer
    computed_s = layer.forward_s + layer.input_s + layer.weight_s - layer.expert_s
    hidden_s = (1.0 - device.overlap_slowdown) * min(layer.expert_s, computed_s)
    return dataclasses.replace(
        layer,
        forward_s=layer.forward_s - hidden_s / 2,
        input_s=layer.input_s - hidden_s / 2,
        expert_s=layer.expert_s - hidden_s,
    )


def _gathering_layer(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan,
    layer: LayerCost,
) -> LayerCost:  # fmt: skip
    """The layer's times once its shared parameters have to be gathered first (ZeRO-3)."""
    if plan.zero < 3:
        return layer
    gather_s, reduce_s = _layer_gather_s(model, device, fabric, plan=plan)
    fields = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
    forward_s = _beside(device, layer.forward_s, gather_s, overlap=plan.data_overlap)
    backward_s = layer.input_s + layer.weight_s
    both_s = _beside(device, backward_s, gather_s + reduce_s, overlap=plan.data_overlap)
    fields["forward_s"] = forward_s
    fields["input_s"] = layer.input_s + both_s - backward_s
    return LayerCost(**fields)


def _beside(device: DeviceSpec, compute_s: float, sent_s: float, *, overlap: bool) -> float:
    if not overlap:
        return compute_s + sent_s
    return max(compute_s, sent_s) + device.overlap_slowdown * min(compute_s, sent_s)


def _layer_gather_s(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan
) -> tuple[float, float]:
    """Gathering one layer's parameters, and scattering its gradients, of the mean layer."""
    layers = model.num_layers / plan.pipeline
    kept, routed = stage_parameters(model, plan, "middle")
    expert_group = Group(
        size=max(plan.shards // plan.expert, 1), stride=plan.group("expert_data").stride
    )
    parts = ((kept / layers, plan.group("shard")), (routed / layers, expert_group))
    times = []
    for kind, width in (
        ("all_gather", device.parameter_wire_bytes), ("reduce_scatter", device.gradient_wire_bytes)
    ):  # fmt: skip
        times.append(
            sum(
                collective_time_s(
                    fabric, kind, size_bytes=width * count / device.shard_gather_share, group=group
                )
                for count, group in parts
            )
        )
    return times[0], times[1]


def _stages(
    model: ModelSpec, device: DeviceSpec, *, plan: ParallelPlan,
    costs: tuple[LayerCost, LayerCost],
) -> tuple[_Stage, ...]:  # fmt: skip
    """First, fullest middle and last stage; one where there is only one."""
    layer, head = costs
    counts = stage_layers(model.num_layers, plan.pipeline, embedding_layers=plan.embedding_layers)
    found = []
    for name, layers in zip(("first", "middle", "last"), counts, strict=True):
        forward_s, input_s, weight_s = (
            layers * layer.forward_s, layers * layer.input_s, layers * layer.weight_s
        )  # fmt: skip
        if name == "first" or plan.pipeline == 1:
            embedding_s = _embedding_s(model, device, plan)
            forward_s, weight_s = forward_s + embedding_s, weight_s + embedding_s
        if name == "last" or plan.pipeline == 1:
            forward_s += head.forward_s
            input_s += head.input_s
            weight_s += head.weight_s
        found.append(_Stage(forward_s=forward_s, input_s=input_s, weight_s=weight_s))
    return tuple(found)


def _embedding_s(model: ModelSpec, device: DeviceSpec, plan: ParallelPlan) -> float:
    if model.stages:
        return 0.0
    tokens = plan.micro_batch * model.seq_len / plan.context
    return memory_time_s(device, 8.0 * tokens * model.hidden)


def _time_use(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan,
    costs: tuple[LayerCost, LayerCost],
) -> TimeUse:  # fmt: skip
    stages = _stages(model, device, plan=plan, costs=costs)
    p, m = plan.pipeline, plan.num_micro_batches
    slowest = max(stages, key=lambda stage: stage.total_s)
    mean = _mean_stage(model, device, plan=plan, costs=costs)
    shape = pipeline_shape(
        plan.schedule, stages=p, micro_batches=m, virtual=plan.virtual,
        forward_s=mean.forward_s, input_s=mean.input_s, weight_s=mean.weight_s,
    )  # fmt: skip
    message_s = _message_s(model, device, fabric, plan=plan)
    boundary_s = 2.0 * message_s * shape.boundary_messages
    idle_s = shape.idle_s + 2.0 * message_s * (p - 1)
    if plan.schedule in _EVEN:
        idle_s -= (slowest.total_s - mean.total_s) / plan.virtual
    layer, head = costs
    layers = max(stage_layers(model.num_layers, p, embedding_layers=plan.embedding_layers))
    exposed = {
        name: m * (layers * getattr(layer, name) + getattr(head, name) * (p == 1))
        for name in ("recompute_s", "tensor_s", "context_s", "expert_s")
    }
    offload_s = _offload_s(model, device, plan=plan, layer=layer, stage_s=slowest.total_s)
    data_s = _data_s(model, device, fabric, plan=plan, stage=slowest)
    optimizer_s = _optimizer_s(model, device, plan=plan)
    busy_s = m * slowest.total_s
    if plan.pipeline_overlap:
        hidden_s = (1.0 - _filling_share(plan)) * min(boundary_s, slowest.total_s)
        boundary_s += (device.overlap_slowdown - 1.0) * hidden_s
    sent_s = m * boundary_s
    local_s = busy_s + idle_s + sent_s + offload_s + optimizer_s
    nodes = max(plan.num_gpus / fabric.gpus_per_node, 1.0)
    lag = device.jitter * math.log2(nodes)
    if plan.tau > 1:  # one synchronisation in tau iterations, hidden behind all of them
        lag_s = lag * local_s
        data_s = max(0.0, data_s / plan.tau - local_s - lag_s - device.step_overhead_s)
    else:
        lag_s = lag * (local_s + data_s)
    # Recomputation holds its communication too; what is counted there is not counted twice.
    recompute_s = exposed["recompute_s"] - m * layers * _repeated_s(plan, layer)
    known_s = recompute_s + exposed["tensor_s"] + exposed["context_s"] + exposed["expert_s"]
    return TimeUse(
        compute_s=busy_s - known_s, recompute_s=recompute_s, tensor_s=exposed["tensor_s"],
        context_s=exposed["context_s"], expert_s=exposed["expert_s"], boundary_s=sent_s,
        idle_s=idle_s, data_s=data_s, offload_s=offload_s, optimizer_s=optimizer_s,
        overhead_s=lag_s + device.step_overhead_s,
    )  # fmt: skip


def _repeated_s(plan: ParallelPlan, layer: LayerCost) -> float:
    """Communication inside full recomputation: about a third of all exposed."""
    if plan.recompute != "full":
        return 0.0
    return (layer.tensor_s + layer.context_s + layer.expert_s) / 3.0


def _mean_stage(
    model: ModelSpec, device: DeviceSpec, *, plan: ParallelPlan,
    costs: tuple[LayerCost, LayerCost],
) -> _Stage:  # fmt: skip
    layer, head = costs
    layers, p = model.num_layers / plan.pipeline, plan.pipeline
    embedding_s = _embedding_s(model, device, plan) / p
    return _Stage(
        forward_s=layers * layer.forward_s + embedding_s + head.forward_s / p,
        input_s=layers * layer.input_s + head.input_s / p,
        weight_s=layers * layer.weight_s + embedding_s + head.weight_s / p,
    )


def _message_s(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan
) -> float:
    """One micro-batch's activations (or their gradients) from one stage to the next."""
    if plan.pipeline == 1 or model.stages:
        return 0.0
    size_bytes = 2.0 * plan.micro_batch * model.seq_len / plan.context * model.hidden
    group = plan.group("pipeline")
    gather_s = 0.0
    if plan.sequence_parallel:
        size_bytes /= plan.tensor
    elif device.splits_stage_messages and plan.tensor > 1:
        gather_s = collective_time_s(
            fabric, "all_gather", size_bytes=size_bytes, group=plan.group("tensor")
        )
        size_bytes /= plan.tensor
    return gather_s + collective_time_s(
        fabric, "point_to_point", size_bytes=size_bytes, group=group
    )


def _filling_share(plan: ParallelPlan) -> float:
    """Share of an interleaved pipeline's messages sent while it fills or drains: none is hidden.

    Overlap needs a forward beside a backward. Filling takes (v - 1) p chunks of v m before that,
    beyond the time that the first message needs to pass all stages.
    """
    if plan.schedule != "interleaved":
        return 0.0
    chunks = (plan.virtual - 1) * plan.pipeline
    return min(chunks / (plan.virtual * plan.num_micro_batches), 1.0)


def _offload_s(
    model: ModelSpec, device: DeviceSpec, *, plan: ParallelPlan, layer: LayerCost, stage_s: float
) -> float:
    """Transfers that compute does not hide, over the whole iteration."""
    kept, routed = stage_parameters(model, plan, "middle")
    layers = model.num_layers / plan.pipeline
    moved = 0.0
    if plan.offload_weights:
        moved += 2.0 * WEIGHT_BYTES * (kept + routed)
    if plan.offload_activations:
        moved += 2.0 * layers * layer.stored_bytes
    exposed_s = max(moved / device.host_bandwidth_bytes_per_s - stage_s, 0.0)
    total_s = plan.num_micro_batches * exposed_s
    if plan.offload_optimizer:
        shards = plan.shards if plan.zero else 1
        total_s += 24.0 * (kept + routed) / shards / device.host_bandwidth_bytes_per_s
    return total_s


def _optimizer_s(model: ModelSpec, device: DeviceSpec, *, plan: ParallelPlan) -> float:
    kept, routed = max(stage_parameters(model, plan, stage) for stage in ("first", "last"))
    count = kept + routed
    if plan.zero:
        count = kept / plan.shards + routed / max(plan.shards / plan.expert, 1.0)
    return memory_time_s(device, device.optimizer_bytes_per_parameter * count)


def _data_s(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan,
    stage: _Stage,
) -> float:  # fmt: skip
    """Exposed communication of gradients and parameters, on the stage that has most of it."""
    kept, routed = max(stage_parameters(model, plan, name) for name in ("first", "last"))
    reduce_s, gather_s = _state_messages_s(device, fabric, plan=plan, kept=kept, routed=routed)
    tied_s = 0.0
    if model.tied and plan.pipeline > 1 and not model.stages:
        size = device.gradient_wire_bytes * model.vocab * model.hidden / plan.tensor
        pair = Group(size=2, stride=plan.group("pipeline").stride * (plan.pipeline - 1))
        tied_s = collective_time_s(fabric, "all_reduce", size_bytes=size, group=pair)
    if not plan.data_overlap or plan.tau > 1:
        return reduce_s + gather_s + tied_s
    # The last micro-batch's backward hides gradients, the first one's forward parameters; with
    # several chunks a stage, those that end early hide more.
    rounds = 1.0
    if plan.virtual > 1:
        rounds = max(1.0, min(plan.pipeline, plan.num_micro_batches) * (1 - 1 / plan.virtual))
    backward_s = rounds * (stage.input_s + stage.weight_s)
    layers = max(model.num_layers / plan.pipeline, 1.0)
    return (
        tied_s
        + _exposed_s(device, reduce_s, backward_s, parts=layers)
        + _exposed_s(device, gather_s, rounds * stage.forward_s, parts=layers)
    )


def _exposed_s(device: DeviceSpec, sent_s: float, window_s: float, *, parts: float) -> float:
    tail_s = sent_s / parts
    hidden_s = min(sent_s - tail_s, window_s)
    return sent_s - hidden_s + device.overlap_slowdown * hidden_s


def _state_messages_s(
    device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan, kept: float, routed: float
) -> tuple[float, float]:
    """Reducing gradients and gathering parameters once an iteration (nothing of it is ZeRO-3)."""
    gradients, parameters = device.gradient_wire_bytes, device.parameter_wire_bytes
    replicas = ((kept, plan.group("data")), (routed, plan.group("expert_data")))
    if plan.zero == 0:
        return _sum_s(fabric, "all_reduce", gradients, replicas), 0.0
    across = ((kept / plan.shards, plan.group("replica")),)
    reduce_s = _sum_s(fabric, "all_reduce", gradients, across)
    if plan.zero == 3:  # gathered and scattered layer by layer
        return reduce_s, 0.0
    expert_group = Group(
        size=max(plan.shards // plan.expert, 1), stride=plan.group("expert_data").stride
    )
    shards = ((kept, plan.group("shard")), (routed, expert_group))
    rounds = plan.num_micro_batches if plan.zero == 2 else 1
    reduce_s += rounds * _sum_s(fabric, "reduce_scatter", gradients, shards)
    return reduce_s, _sum_s(fabric, "all_gather", parameters, shards)


def _sum_s(
    fabric: FabricSpec, kind: str, width: float, parts: tuple[tuple[float, Group], ...]
) -> float:
    return sum(
        collective_time_s(fabric, kind, size_bytes=width * count, group=group)
        for count, group in parts
    )
