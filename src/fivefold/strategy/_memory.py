"""Bytes on the fullest GPU: weights, gradients, optimizer states, activations, buffers.

Nothing is fitted here. Weights are 2 bytes, Adam keeps 12 (master copy and two moments), and the
gradients' width is the stack's. Three stages can be the fullest: the first (embedding, most
micro-batches in flight), the one after it (most layers) and the last (head and logits).
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.strategy._device import DeviceSpec
from fivefold.strategy._layer import LayerCost
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._pipeline import pipeline_shape, stage_layers, stored_at
from fivefold.strategy._plan import ParallelPlan

WEIGHT_BYTES = 2.0
OPTIMIZER_BYTES = 12.0
_LOCAL_UPDATE_COPIES = 2
_GATHERED_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on the fullest GPU.

    Args:
        weights_bytes: Parameters in working precision.
        gradients_bytes: Gradients.
        optimizer_bytes: Master copy and moments.
        activations_bytes: Stored between forward and backward.
        working_bytes: Buffers: a recomputed layer, gathered layers, copies of local updates.
        reserved_bytes: The stack's own.
        host_bytes: What was moved to host memory, per GPU.

    Examples:
        >>> MemoryUse(weights_bytes=2e9, gradients_bytes=4e9, optimizer_bytes=12e9,
        ...           activations_bytes=1e9, working_bytes=0.0, reserved_bytes=1e9).total_bytes
        20000000000.0
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float
    reserved_bytes: float
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All that is on the device."""
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
            + self.activations_bytes + self.working_bytes + self.reserved_bytes
        )  # fmt: skip

    @property
    def states_bytes(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def stage_parameters(model: ModelSpec, plan: ParallelPlan, stage: str) -> tuple[float, float]:
    """Parameters on one GPU of a stage: those copied over all data ranks, and routed experts.

    Args:
        model: The model.
        plan: The plan.
        stage: ``"first"``, ``"middle"`` or ``"last"``; with one stage all are the same.

    Examples:
        >>> gpt = ModelSpec(name="22B", num_layers=48, hidden=6144, num_heads=64, seq_len=2048,
        ...                 vocab=51200)
        >>> plan = ParallelPlan(global_batch=4, micro_batch=4, tensor=8)
        >>> round(stage_parameters(gpt, plan, "first")[0] / 1e9, 2)
        2.76
    """
    if model.stages:
        return model.num_parameters / plan.pipeline, 0.0
    counts = stage_layers(model.num_layers, plan.pipeline, embedding_layers=plan.embedding_layers)
    layers = counts[("first", "middle", "last").index(stage)]
    expert_share = model.num_expert_layers / model.num_layers
    kept = model.attention_parameters / plan.tensor + model.norm_parameters
    kept += (1 - expert_share) * model.dense_parameters / plan.tensor
    kept += expert_share * model.unrouted_parameters / plan.tensor
    routed = expert_share * model.routed_parameters / (plan.tensor * plan.expert)
    outside = 0.0
    if stage == "first" or plan.pipeline == 1:
        outside += model.embedding_parameters / plan.tensor
    if stage == "last" or plan.pipeline == 1:
        own = model.head_parameters
        copy = model.vocab * model.hidden if model.tied and plan.pipeline > 1 else 0
        outside += (own + copy) / plan.tensor
    return layers * kept + outside, layers * routed


def memory_use(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, layer: LayerCost, head: LayerCost
) -> MemoryUse:
    """Bytes on the fullest GPU of a plan.

    Args:
        model: The model.
        device: For the gradients' width and what is reserved.
        plan: The plan.
        layer: Cost of a mean layer.
        head: Cost of the head.
    """
    stages = {"first": 0, "last": plan.pipeline - 1}
    if plan.pipeline > 2:
        stages["middle"] = 1
    uses = [
        _stage_use(model, device, plan, stage=(name, index), costs=(layer, head))
        for name, index in stages.items()
    ]
    return max(uses, key=lambda use: use.total_bytes)


def _stage_use(
    model: ModelSpec, device: DeviceSpec, plan: ParallelPlan, *, stage: tuple[str, int],
    costs: tuple[LayerCost, LayerCost],
) -> MemoryUse:  # fmt: skip
    kept, routed = stage_parameters(model, plan, stage[0])
    copies = _copies(plan)
    expert_shards = max(plan.shards / plan.expert, 1.0)

    def share(level: int, width: float) -> float:
        if plan.zero < level:
            return width * (kept + routed)
        return width * (kept / plan.shards + routed / expert_shards)

    weights = copies * share(3, WEIGHT_BYTES)
    gradients = copies * share(2, device.gradient_bytes)
    optimizer = share(1, OPTIMIZER_BYTES)
    stored = _stored_bytes(model, plan, stage=stage, costs=costs)
    working = costs[0].working_bytes
    if plan.zero == 3:
        layers = max(model.num_layers / plan.pipeline, 1.0)
        working += (
            _GATHERED_LAYERS * (WEIGHT_BYTES + device.gradient_bytes) * (kept + routed) / layers
        )
    if plan.tau > 1:
        working += _LOCAL_UPDATE_COPIES * WEIGHT_BYTES * (kept + routed)
    host = 0.0
    if plan.offload_weights:
        layers = max(model.num_layers / plan.pipeline, 1.0)
        host, weights = host + weights, weights * min(_GATHERED_LAYERS / layers, 1.0)
    if plan.offload_optimizer:
        host, optimizer = host + optimizer, 0.0
    if plan.offload_activations:
        flying = _GATHERED_LAYERS * costs[0].stored_bytes
        host, stored = host + max(stored - flying, 0.0), min(stored, flying)
    return MemoryUse(
        weights_bytes=weights, gradients_bytes=gradients, optimizer_bytes=optimizer,
        activations_bytes=stored, working_bytes=working, reserved_bytes=device.reserved_bytes,
        host_bytes=host,
    )  # fmt: skip


def _copies(plan: ParallelPlan) -> float:
    ones = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}
    shape = pipeline_shape(
        plan.schedule, stages=plan.pipeline, micro_batches=plan.num_micro_batches,
        virtual=plan.virtual, **ones,
    )  # fmt: skip
    return shape.parameter_copies


def _stored_bytes(
    model: ModelSpec, plan: ParallelPlan, *, stage: tuple[str, int],
    costs: tuple[LayerCost, LayerCost],
) -> float:  # fmt: skip
    name, index = stage
    layer, head = costs
    counts = stage_layers(model.num_layers, plan.pipeline, embedding_layers=plan.embedding_layers)
    layers = counts[("first", "middle", "last").index(name)]
    flying = stored_at(
        plan.schedule, stage=index, stages=plan.pipeline, micro_batches=plan.num_micro_batches,
        virtual=plan.virtual,
    )  # fmt: skip
    stored = flying * layers * layer.stored_bytes
    if index == 0 and model.dropout and not model.stages:
        split = plan.context * (plan.tensor if plan.sequence_parallel else 1)
        # The embedding's dropout marks one byte per element.
        stored += flying * plan.micro_batch * model.seq_len * model.hidden / split
    if index == plan.pipeline - 1:
        stored += head.stored_bytes * (flying if plan.schedule == "gpipe" else 1)
    return stored
