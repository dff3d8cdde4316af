"""What a plan asks of the layers below: compute of a rank, and messages of each axis of its mesh.

Times here hold on links that cost nothing; who carries the messages, and how long that takes, is
decided below. The rank is one of the slowest stage: the others wait for it.
"""

from __future__ import annotations

import dataclasses

from fivefold.collectives.pricing import FabricSpec, Tier
from fivefold.errors import require_whole
from fivefold.strategy._adapters import trained_head, trained_operators
from fivefold.strategy._columns import Columns
from fivefold.strategy._muon import whole_bytes
from fivefold.strategy._operators import LayerShape
from fivefold.strategy.cluster import DeviceSpec, element_bytes
from fivefold.strategy.cost import evaluate_plan
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.pipeline import pipeline_shape
from fivefold.strategy.plan import ParallelPlan, PlanTable
from fivefold.tasks.iteration import IterationDemand, Message

_FREE_BYTES_PER_S = 1e30
_MOST_SEGMENTS = 4


def axis_groups(plan: ParallelPlan, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of an axis, by position in the mesh."""
    group = plan.group(axis)
    return tuple(
        tuple(first + member * group.stride for member in range(group.size))
        for first in range(plan.num_gpus)
        if first // group.stride % group.size == 0
    )


def plan_demand(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, gpus_per_node: int = 8
) -> IterationDemand:
    """Return what a plan computes and sends."""
    # ZeRO changes messages and the optimizer's share of work, never what layers compute.
    free = _free_fabric(plan.num_gpus, gpus_per_node)
    quiet = evaluate_plan(model, device, free, plan=dataclasses.replace(plan, tau=1)).time
    columns = Columns(model, device, free, PlanTable.of([plan]))
    layers = max(int(count[0]) for count in columns.counts)
    segments = max(1, min(layers, _MOST_SEGMENTS))
    forward_s, input_s, weight_s = (
        float(columns.layer[name][0]) for name in ("forward_s", "input_s", "weight_s")
    )
    forward_share = forward_s / (forward_s + input_s + weight_s)
    once_s = (quiet.compute_s + quiet.recompute_s) / plan.num_micro_batches / segments
    return IterationDemand(
        segments=segments,
        micro_batches=plan.num_micro_batches,
        forward_s=forward_share * once_s,
        backward_s=(1 - forward_share) * once_s,
        messages=(
            *_layer_messages(
                model, columns.shape(0), plan, share=layers / segments, segments=segments
            ),
            *_state_messages(columns, plan, segments=segments),
        ),
        p2p=_pipeline_messages(model, device, plan),
        bubble_s=max(quiet.pipeline_bubble_s, 0.0),  # uneven stages count in the compute already
        optimizer_s=quiet.optimizer_s,
        overhead_s=quiet.overhead_s + quiet.offload_s,
    )


def _free_fabric(gpus: int, gpus_per_node: int) -> FabricSpec:
    """Return links without cost, with nodes as large as they are."""
    require_whole("gpus_per_node", gpus_per_node, hint="the number of GPUs of a host")
    sizes = (gpus_per_node, gpus_per_node * max(2, -(-gpus // gpus_per_node)))
    return FabricSpec(
        name="free",
        tiers=tuple(
            Tier(
                name=f"free {size}", gpus=size, bandwidth_bytes_per_s=_FREE_BYTES_PER_S,
                efficiency=1.0, base_s=0.0, hop_s=0.0,
            )
            for size in sizes
        ),
    )  # fmt: skip


def _layer_messages(
    model: ModelSpec, shape: LayerShape, plan: ParallelPlan, *, share: float, segments: int
) -> tuple[Message, ...]:
    """Return what ``share`` mean layers send per micro-batch, axis by axis."""
    sizes: dict[str, float] = {}
    for weight, kind in model.layer_kinds:
        for op in trained_operators(model, shape, kind):
            if op.message:
                once = op.message == "expert" and shape.device.dispatches_once
                copies = op.copies(plan.expert) if once else 1.0
                size = weight * share * op.message_bytes * copies
                sizes[op.message] = sizes.get(op.message, 0.0) + size
    if plan.tensor > 1 and plan.pipeline == 1 and not model.stages:
        head = trained_head(model, shape)
        sizes["tensor"] += sum(op.message_bytes for op in head) / segments
    kinds = {"tensor": "all_reduce", "context": "all_gather", "expert": "all_to_all"}
    hidden = {
        "tensor": plan.tensor_overlap != "none",
        "context": True,
        "expert": plan.expert_overlap,
    }
    again = 2 if plan.recompute == "full" else 1  # backward runs forward, messages and all, first
    found: list[Message] = []
    for axis, size in sizes.items():
        if plan.group(axis).size == 1:
            continue
        # Keys and values come round again in backward, and their gradients with them.
        backward = size * (again if axis != "context" else again + 1)
        one = Message(
            axis=axis, kind=kinds[axis], size_bytes=round(size), phase="forward",
            hidden=hidden[axis],
        )  # fmt: skip
        found += [one, dataclasses.replace(one, phase="backward", size_bytes=round(backward))]
    return tuple(found)


def _state_messages(columns: Columns, plan: ParallelPlan, *, segments: int) -> tuple[Message, ...]:
    """Return the gradients and parameters of a segment."""
    device = columns.device
    kept, routed = columns.outer_parameters()[:, 0].tolist()
    found: list[Message] = []
    local = plan.tau > 1
    wide = device.outer_wire_bytes / plan.tau if local else device.gradient_wire_bytes
    wire = float(columns.parameter_wire_bytes[0])
    frozen = columns.frozen_bytes(0, width=columns.parameter_wire_bytes)[:, 0].tolist()
    if plan.zero < 3:  # not gathered, and never summed
        frozen = [0.0, 0.0]
    for count, fixed, whole, shards, replica in (
        (kept, frozen[0], "data", "shard", "replica"),
        (routed, frozen[1], "expert_data", "expert_shard", "expert_replica"),
    ):
        summed = round(wide * count / segments)
        if not (summed or fixed) or plan.group(whole).size == 1:
            continue
        over = whole
        if plan.zero > 0:
            gradient = round(device.gradient_wire_bytes * count / segments)
            parameter = round((wire * count + fixed) / segments)
            found += _sharded(plan, shards, gradient=gradient, parameter=parameter)
            over, summed = replica, summed // plan.group(shards).size
        if summed and plan.group(over).size > 1:
            found.append(
                Message(axis=over, kind="all_reduce", size_bytes=summed, phase="reduce",
                        hidden=local)
            )  # fmt: skip
    if plan.zero == 3 and plan.optimizer == "muon":
        wholes = [round(size / segments) for size in whole_bytes(columns)[:, 0].tolist()]
        found += [
            Message(axis=axis, kind="all_to_all", size_bytes=size, phase="reduce")
            for axis, size in zip(("shard", "expert_shard"), wholes, strict=True)
            if size and plan.group(axis).size > 1
        ]
    return tuple(found)


def _sharded(plan: ParallelPlan, axis: str, *, gradient: int, parameter: int) -> list[Message]:
    """Return what ZeRO sends instead of an all-reduce: once, or for every micro-batch."""
    if plan.group(axis).size == 1:
        return []
    scatter = Message(axis=axis, kind="reduce_scatter", size_bytes=gradient, phase="reduce")
    gather = dataclasses.replace(scatter, kind="all_gather", size_bytes=parameter, phase="gather")
    if plan.zero == 1:
        return [scatter, gather]
    each = dataclasses.replace(scatter, phase="backward", hidden=plan.data_overlap)
    if plan.zero == 2:
        return [each, gather]
    forward = dataclasses.replace(gather, phase="forward", hidden=plan.data_overlap)
    gathers = [forward, dataclasses.replace(forward, phase="backward")]
    return [*gathers, each] if gradient else gathers  # frozen parameters have no gradients


def _pipeline_messages(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan
) -> tuple[Message, ...]:
    """Return activations to the next stage and their gradients back, per micro-batch."""
    if plan.pipeline == 1 or model.stages:
        return ()
    size = (
        element_bytes(plan.dtype) * plan.micro_batch * model.seq_len / plan.context * model.hidden
    )
    if plan.sequence_parallel or (device.splits_stage_messages and plan.tensor > 1):
        size /= plan.tensor
    shape = pipeline_shape(
        plan.schedule, stages=plan.pipeline, micro_batches=plan.num_micro_batches,
        virtual=plan.virtual, forward_s=1.0, input_s=1.0, weight_s=1.0,
    )  # fmt: skip
    ahead = Message(
        axis="pipeline", kind="send", size_bytes=round(size * shape.p2p_messages),
        phase="forward", hidden=plan.pipeline_overlap,
    )  # fmt: skip
    return ahead, dataclasses.replace(ahead, kind="return", phase="backward")
