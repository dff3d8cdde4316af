"""Time and memory of plans in columns, one entry per plan; a single plan is a table of one.

An iteration is: every micro-batch through the slowest stage, the pipeline bubble, what of the
gradients' and parameters' communication is exposed, and the optimizer's step. Layers are looked up
(``_layer`` computes the few hundred different ones), the rest is arithmetic on columns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fivefold.collectives.pricing import FabricSpec
from fivefold.collectives.pricing.closed_form import chain_time_s
from fivefold.errors import ConfigurationError, require_number
from fivefold.strategy._columns import Columns
from fivefold.strategy._layer import Floats
from fivefold.strategy._memory import MemoryUse, fullest_bytes, memory_use
from fivefold.strategy._muon import muon_s
from fivefold.strategy.cluster import Cluster, DeviceSpec
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.pipeline import pipeline_shape
from fivefold.strategy.plan import WAITING_SCHEDULES, ParallelPlan, PlanTable, plan_problem
from fivefold.tasks.schedule import exposed_s


@dataclass(frozen=True, kw_only=True)
class TimeUse:
    """Time of an iteration by what it goes into; the parts add up.

    Args:
        compute_s: Forward and backward of all micro-batches on the slowest stage.
        recompute_s: Forward computed again.
        tensor_s: Exposed communication of the tensor group.
        context_s: Exposed communication of the context group.
        expert_s: Exposed dispatch and combine of tokens between experts.
        pipeline_p2p_s: Exposed pipeline p2p.
        pipeline_bubble_s: The pipeline bubble.
        data_s: Exposed communication of gradients and parameters.
        offload_s: Exposed transfers to and from host memory.
        optimizer_s: The optimizer's step.
        overhead_s: The stack's fixed time and the lag of the slowest rank.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0
    pipeline_p2p_s: float = 0.0
    pipeline_bubble_s: float = 0.0
    data_s: float = 0.0
    offload_s: float = 0.0
    optimizer_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the iteration."""
        return float(sum(getattr(self, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, kw_only=True)
class PlanPrediction:
    """Time and memory of one iteration of a plan.

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
        """Return seconds of an iteration."""
        return self.time.total_s


@dataclass(frozen=True)
class CostTable:
    """Time of an iteration and bytes on the fullest GPU, per plan.

    ``least_tau`` is the shortest round that hides a plan's outer updates: 0 without local updates,
    inf where ranks wait for them.
    """

    time_s: Floats
    memory_bytes: Floats
    least_tau: Floats


def evaluate_plan(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, plan: ParallelPlan
) -> PlanPrediction:
    """Predict time and memory of one iteration.

    Raises:
        ConfigurationError: The plan cannot run the model.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> cluster = load_cluster("a100-megatron")
        >>> plan = ParallelPlan(global_batch=8, data=8)
        >>> found = evaluate_plan(load_model("gpt3-1.3b"), cluster.device, cluster.fabric,
        ...                       plan=plan)
        >>> 0.1 < found.time_s < 0.3
        True
    """
    problem = plan_problem(model, plan)
    if problem is not None:
        raise ConfigurationError(problem, hint="choose degrees that divide the model")
    columns = Columns(model, device, fabric, PlanTable.of([plan]))
    memory = memory_use(columns)
    time = TimeUse(**{name: float(column[0]) for name, column in _time_parts(columns).items()})
    peak = device.peak_matrix_flops(dtype=plan.dtype)
    flops = plan.global_batch * model.flops_per_sequence()
    return PlanPrediction(
        plan=plan,
        time=time,
        memory=memory,
        fits=memory.total_bytes <= device.memory_bytes,
        mfu=flops / (time.total_s * plan.num_gpus * peak),
    )


def anchored(
    cluster: Cluster, model: ModelSpec, *, plan: ParallelPlan, measured_s: float
) -> Cluster:
    """Return the cluster with all predictions multiplied by what one measured run needs.

    What one run of a stack on a GPU is off by, its other runs mostly are, too.

    Args:
        cluster: Where it ran.
        model: What was trained.
        plan: Split how.
        measured_s: Seconds of an iteration.

    Raises:
        ConfigurationError: The plan cannot run the model, or the time is not positive.

    Examples:
        >>> from fivefold.strategy import load_cluster, load_model
        >>> model, plan = load_model("gpt3-1.3b"), ParallelPlan(global_batch=8, data=8)
        >>> known = anchored(load_cluster("a100-megatron"), model, plan=plan, measured_s=0.25)
        >>> found = evaluate_plan(model, known.device, known.fabric, plan=plan)
        >>> round(found.time_s, 9)
        0.25
    """
    require_number("measured_s", measured_s, positive=True, hint="seconds of one iteration")
    plain = dataclasses.replace(cluster.device, anchor=1.0)
    time_s = evaluate_plan(model, plain, cluster.fabric, plan=plan).time_s
    device = dataclasses.replace(plain, anchor=measured_s / time_s)
    return dataclasses.replace(cluster, device=device)


def evaluate_table(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, table: PlanTable
) -> CostTable:
    """Predict time and memory of every plan of a table that can run the model."""
    columns = Columns(model, device, fabric, table)
    times, least_tau = _time_columns(columns, _layer_of(columns))
    time_s = sum(times.values(), np.zeros(len(table)))
    return CostTable(time_s=time_s, memory_bytes=fullest_bytes(columns), least_tau=least_tau)


def _layer_of(columns: Columns) -> dict[str, Floats]:
    return _gathering_layer(columns, exchanging_layer(columns))


def _time_parts(columns: Columns) -> dict[str, Floats]:
    """Return the fields of ``TimeUse`` for every plan of a table."""
    table, head, layer = columns.table, columns.head, _layer_of(columns)
    times, _ = _time_columns(columns, layer)
    m, layers = columns.micro_batches, np.max(columns.counts, axis=0)
    one = table.pipeline == 1
    parts = {
        name: columns.device.anchor * m * (layers * layer[name] + np.where(one, head[name], 0.0))
        for name in ("recompute_s", "tensor_s", "context_s", "expert_s")
    }
    return {"compute_s": times.pop("busy_s") - sum(parts.values()), **parts, **times}


def _stage_times(columns: Columns, layer: dict[str, Floats]) -> list[list[Floats]]:
    one = columns.table.pipeline == 1
    return [
        _passes(
            columns, layer, count, outside_s=_outside_s(columns, layer, number),
            opening=np.where(one | (number == 0), 1.0, 0.0),
            closing=np.where(one | (number == 2), 1.0, 0.0),
        )
        for number, count in enumerate(columns.counts)
    ]  # fmt: skip


def _mean_stage(columns: Columns, layer: dict[str, Floats]) -> list[Floats]:
    p = columns.table.pipeline
    outside_s = (_outside_s(columns, layer, 0) + _outside_s(columns, layer, 2)) / p
    count = columns.model.num_layers / p
    return _passes(columns, layer, count, opening=1 / p, closing=1 / p, outside_s=outside_s)


def _passes(
    columns: Columns, layer: dict[str, Floats], count: Floats, *, opening: Floats, closing: Floats,
    outside_s: Floats,
) -> list[Floats]:  # fmt: skip
    """Return forward, and both halves of backward, of layers with shares of embedding and head."""
    embedding_s = opening * _embedding_s(columns)
    forward_s, input_s, weight_s = (
        count * layer[name] + closing * columns.head[name]
        for name in ("forward_s", "input_s", "weight_s")
    )
    # Of a frozen embedding nothing is learned.
    learned_s = embedding_s if columns.model.adapters is None else 0.0
    return [forward_s + outside_s[0] + embedding_s, input_s + outside_s[1], weight_s + learned_s]


def _embedding_s(columns: Columns) -> Floats:
    t, model, device = columns.table, columns.model, columns.device
    if model.stages:
        return np.zeros(len(t))
    moved = 8.0 * t.micro_batch * model.seq_len / t.context * model.hidden
    return moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def _time_columns(columns: Columns, layer: dict[str, Floats]) -> tuple[dict[str, Floats], Floats]:
    """Return the seconds of an iteration and ``CostTable.least_tau``.

    The seconds are ``busy_s`` in layers, and the other fields of ``TimeUse``.
    """
    t, device = columns.table, columns.device
    p, m = t.pipeline, columns.micro_batches
    stages = np.array(_stage_times(columns, layer))
    totals = stages.sum(axis=1)
    slowest = np.argmax(totals, axis=0)
    slow = np.take_along_axis(stages, slowest[None, None, :], axis=0)[0]
    slowest_s = totals.max(axis=0)
    mean = _mean_stage(columns, layer)
    waits_s = _offload_waits_s(columns, layer, slow)
    passes_s = slow + waits_s
    mean = [*(mean + _offload_waits_s(columns, layer, np.array(mean)))]
    bubble_s, messages = _schedule_columns(columns, mean)
    # Where stages are uneven, the bubble of these schedules is shorter.
    even = t.is_word("schedule", "gpipe", "1f1b", "interleaved")
    bubble_s = bubble_s - np.where(even, (sum(passes_s) - sum(mean)) / t.virtual, 0.0)
    message_s, through_s = _message_s(columns)
    p2p_s = 2.0 * message_s * messages
    # While an interleaved pipeline fills or drains, nothing runs beside its messages: overlap
    # needs a forward beside a backward, and (v - 1) p chunks of v m come before that.
    filling = np.where(t.is_word("schedule", "interleaved"), (1.0 - 1.0 / t.virtual) * p / m, 0.0)
    overlaps = (t.pipeline_overlap == 1) & ~t.is_word("schedule", *WAITING_SCHEDULES)
    share = np.where(overlaps, 1.0 - np.minimum(filling, 1.0), 0.0)
    # Ports are as free in a bubble as beside compute: passes that fill one hide no more for it.
    each_s = sum(passes_s) + bubble_s / m
    beside_s = exposed_s(p2p_s, each_s, slowdown=device.overlap_slowdown)
    sent_s = m * (p2p_s - share * (p2p_s - beside_s))
    # What hides pipeline p2p hides no gradients: both leave by the same ports.
    left = 1.0 - share * np.minimum(p2p_s / each_s, 1.0)
    bubble_s = bubble_s + 2.0 * through_s
    states = columns.outer_parameters()
    offload_s = m * sum(waits_s) + _offload_optimizer_s(columns)
    optimizer_s = _optimizer_s(columns, states)
    local_s = m * slowest_s + bubble_s + sent_s + offload_s + optimizer_s
    tied_s = _tied_s(columns)
    data_s = _data_s(columns, states, left * passes_s)
    nodes = np.maximum(t.num_gpus / columns.fabric.gpus_per_node, 1.0)
    lag = device.jitter * np.log2(nodes)
    # Local updates synchronise once in tau iterations, hidden behind as many as the rule gives.
    local = t.tau > 1
    lag_s = lag * (local_s + tied_s + np.where(local, 0.0, data_s)) + device.step_overhead_s
    behind_s = device.outer_window * (local_s + lag_s)
    outer_s = exposed_s(data_s / t.tau, behind_s, slowdown=device.overlap_slowdown)
    least_tau = np.full(len(t), np.inf)
    np.divide(data_s, behind_s, out=least_tau, where=behind_s > 0)
    least_tau = np.where(local, least_tau, 0.0)
    data_s = np.where(local, outer_s, data_s) + tied_s
    parts = {
        "busy_s": m * slowest_s, "pipeline_p2p_s": sent_s, "pipeline_bubble_s": bubble_s,
        "data_s": data_s, "offload_s": offload_s, "optimizer_s": optimizer_s, "overhead_s": lag_s,
    }  # fmt: skip
    return {name: device.anchor * part_s for name, part_s in parts.items()}, least_tau


def least_time_s(columns: Columns) -> Floats:
    """Return a lower bound: micro-batches on a stage of mean speed, the bubble at that speed."""
    mean = _mean_stage(columns, exchanging_layer(columns))
    least_s: Floats = columns.micro_batches * sum(mean) + _schedule_columns(columns, mean)[0]
    return columns.device.anchor * least_s


def _schedule_columns(columns: Columns, mean: list[Floats]) -> tuple[Floats, Floats]:
    """Return the bubble, and messages per pair of stages."""
    t = columns.table
    bubble_s, messages = np.zeros(len(t)), np.zeros(len(t))
    for schedule in t.words("schedule"):
        shape = pipeline_shape(
            schedule, stages=t.pipeline, micro_batches=columns.micro_batches, forward_s=mean[0],
            input_s=mean[1], weight_s=mean[2], virtual=t.virtual,
        )  # fmt: skip
        rows = t.is_word("schedule", schedule)
        bubble_s = np.where(rows, shape.bubble_s, bubble_s)
        messages = np.where(rows, shape.p2p_messages, messages)
    # Where layers do not divide into chunks, filling goes at the pace of the larger ones.
    layers = columns.model.num_layers + np.where(t.embedding_layers == 1, 2, 0)
    each = layers / (t.pipeline * t.virtual)
    uneven = t.is_word("schedule", "interleaved")
    bubble_s = bubble_s * np.where(uneven, np.ceil(each) / each, 1.0)
    return bubble_s, messages


def _message_s(columns: Columns) -> tuple[Floats, Floats]:
    """Return the time of a message to the next stage: of the slowest pair, and of all in turn.

    The slowest pair sets the pace of a filled pipeline; filling it takes all, one after the other.
    """
    t, model, fabric = columns.table, columns.model, columns.fabric
    if model.stages:
        return np.zeros(len(t)), np.zeros(len(t))
    whole = columns.element_bytes * t.micro_batch * model.seq_len / t.context * model.hidden
    parallel = t.sequence_parallel == 1
    split = ~parallel & (t.tensor > 1) & columns.device.splits_stage_messages
    gather_s = columns.time_s("all_gather", whole, "tensor")
    gather_s = np.where(split & (t.pipeline > 1), gather_s, 0.0)
    size = np.where(parallel | split, whole / t.tensor, whole)
    slowest_s, through_s = chain_time_s(fabric, size_bytes=size, groups=columns.group("pipeline"))
    return gather_s + slowest_s, (t.pipeline - 1) * gather_s + through_s


def _offload_waits_s(columns: Columns, layer: dict[str, Floats], slow: Floats) -> Floats:
    """Return a micro-batch's waits for the host: in forward, and in each half of backward.

    Weights come twice, activations go and come again, each time beside one of the passes.
    """
    t, device = columns.table, columns.device
    stored = columns.model.num_layers / t.pipeline * layer["stored_bytes"]
    stored = stored * columns.share_of_layers("offload_layers")
    width = columns.element_bytes
    weights = width * columns.parameters(1) + columns.frozen_bytes(1, width=width)
    moved = np.where(t.offload_weights == 1, weights.sum(0), 0.0)
    moved = moved + np.where(t.offload_activations == 1, stored, 0.0)
    moved_s = moved / device.host_bandwidth_bytes_per_s
    backward_s = exposed_s(moved_s, slow[1] + slow[2])
    return np.array([exposed_s(moved_s, slow[0]), np.zeros(len(t)), backward_s])


def _offload_optimizer_s(columns: Columns) -> Floats:
    t, device = columns.table, columns.device
    states = columns.parameters(1).sum(0) / np.where(t.zero > 0, columns.shards[0], 1)
    host_s = 24.0 * states / device.host_bandwidth_bytes_per_s
    return np.where(t.offload_optimizer == 1, host_s, 0.0)


def _optimizer_s(columns: Columns, states: Floats) -> Floats:
    device = columns.device
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    return device.optimizer_bytes_per_parameter * columns.held(states) / rate + muon_s(columns)


def _data_s(columns: Columns, states: Floats, slow: Floats) -> Floats:
    t, device = columns.table, columns.device
    reduce_s, gather_s = _state_messages_s(columns, states)
    reduce_starts_s, gather_starts_s = _starts_s(columns, states.sum(0))
    reduce_s = reduce_s + np.where(t.zero < 3, reduce_starts_s, 0.0)
    gather_s = gather_s + np.where((t.zero == 1) | (t.zero == 2), gather_starts_s, 0.0)
    rounds = np.maximum(1.0, np.minimum(t.pipeline, columns.micro_batches) * (1 - 1 / t.virtual))
    rounds = np.where(t.virtual > 1, rounds, 1.0)
    beside = (t.data_overlap == 1) & (t.tau == 1)
    # The last bucket waits for all of its gradients, the first forward for all of the first one.
    pieces = np.clip(_buckets(columns, states.sum(0)), 1.0, columns.each)
    data_s = np.zeros(len(t))
    for sent_s, window_s, can in (
        (reduce_s, slow[1] + slow[2], device.reduces_beside),
        (gather_s, slow[0], device.gathers_beside),
    ):
        left_s = exposed_s(
            sent_s, rounds * window_s, pieces=pieces, slowdown=device.overlap_slowdown
        )
        data_s = data_s + np.where(beside & can, left_s, sent_s)
    return data_s


def _buckets(columns: Columns, parameters: Floats) -> Floats:
    device = columns.device
    bucket = np.maximum(
        device.bucket_parameters, device.bucket_parameters_per_rank * columns.replicas
    )
    buckets: Floats = np.ceil(parameters / bucket)
    return buckets


def _starts_s(columns: Columns, parameters: Floats) -> tuple[Floats, Floats]:
    """Return what every further collective of gradients and of parameters costs to start.

    Rings start slowly. In place of a gather, each rank that owns parameters broadcasts them.
    """
    t, device = columns.table, columns.device
    one = np.ones(len(t))
    beside = (t.data_overlap == 1) & (t.tau == 1)
    buckets = np.maximum(_buckets(columns, parameters) - 1.0, 0.0)
    reduced = np.where(beside & device.reduces_beside, buckets, 0.0)
    start_s = columns.time_s("all_gather", one, "shard")
    if not device.owned_per_layer:
        gathered = np.where(beside & device.gathers_beside, buckets, 0.0)
        return reduced * start_s, gathered * start_s
    group = columns.group("shard")
    owners = np.minimum(group.size, columns.each * device.owned_per_layer)
    hop_s, reach = np.zeros(len(t)), 1
    for tier in columns.fabric.tiers:  # NCCL counts every step of a broadcast as its slowest
        hop_s = np.where((group.size - 1) * group.stride >= reach, tier.hop_s, hop_s)
        reach = tier.gpus
    steps_s = np.where(group.size > 1, owners * group.size * hop_s, 0.0)
    return reduced * columns.time_s("all_reduce", one, "data"), steps_s


def _tied_s(columns: Columns) -> Floats:
    t, model = columns.table, columns.model
    if not model.tied or model.stages or model.adapters is not None:
        return np.zeros(len(t))
    size = columns.device.gradient_wire_bytes * model.vocab * model.hidden / t.tensor
    return columns.time_s("all_reduce_of_ends", size, "pipeline")


def _state_messages_s(columns: Columns, states: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of gradients reduced and parameters gathered once an iteration."""
    t, device = columns.table, columns.device
    wide = np.where(t.tau > 1, device.outer_wire_bytes, device.gradient_wire_bytes)
    across_s = columns.both_s("all_reduce", wide * states / columns.shards, "replica")
    scatter_s = np.where(t.zero == 2, columns.micro_batches, 1) * columns.both_s(
        "all_gather", wide * states, "shard"
    )
    reduce_s = np.where(t.zero == 3, across_s, scatter_s + across_s)
    whole = (t.zero == 0) | ((t.zero == 1) & (device.owned_per_layer > 0))
    reduce_s = np.where(whole, columns.both_s("all_reduce", wide * states, "data"), reduce_s)
    gather_s = columns.both_s("all_gather", columns.parameter_wire_bytes * states, "shard")
    return reduce_s, np.where((t.zero == 1) | (t.zero == 2), gather_s, 0.0)


def exchanging_layer(columns: Columns) -> dict[str, Floats]:
    """Return the costs of a layer, less what of dispatch and combine travels beside compute."""
    layer = columns.layer
    t = columns.table
    dual = t.is_word("schedule", "dualpipe", "dualpipe_v") & (t.pipeline > 1)
    if not (dual.any() or t.expert_overlap.any()):
        return layer
    whole_s = layer["forward_s"] + layer["input_s"] + layer["weight_s"]
    # What it waits for the host it waits in either case: that was filled by the exchange before.
    slowdown = columns.device.overlap_slowdown
    beside_s = layer["alone_s"] + exposed_s(layer["expert_s"], layer["alone_s"], slowdown=slowdown)
    hidden_s = np.maximum(whole_s - beside_s, 0.0)
    # The first stage's first chunks have no backward beside them, nor its last backwards.
    p, v = t.pipeline, t.virtual
    alone = (2 * (p - 1) + (v - 1) * p + 1) / (v * columns.micro_batches)
    overlapped = np.where(t.expert_overlap == 1, 1.0 - np.minimum(alone, 1.0), 0.0)
    hidden_s = np.where(dual, 1.0, overlapped) * hidden_s
    return {
        **layer,
        "forward_s": layer["forward_s"] - hidden_s / 2,
        "input_s": layer["input_s"] - hidden_s / 2,
        "expert_s": layer["expert_s"] - hidden_s,
    }


def _gathering_layer(columns: Columns, layer: dict[str, Floats]) -> dict[str, Floats]:
    """Price layers of ZeRO-3, which wait for parameters; ``spare`` more fits beside them."""
    shared = columns.table.zero == 3
    if not shared.any():
        return layer
    count = columns.counts[1]
    frozen = columns.frozen_bytes(1, width=columns.parameter_wire_bytes) / count
    gather_s, scatter_s = _shared_s(columns, columns.parameters(1) / count, frozen)
    backward_s = layer["input_s"] + layer["weight_s"]
    forward_s = _beside(columns, layer["forward_s"], gather_s)
    sent_s = gather_s + scatter_s
    # What the pass for the weights hides is hidden there: it cannot fill a bubble as well.
    input_s = _beside(columns, layer["input_s"], sent_s)
    weight_s = _beside(columns, backward_s, sent_s) - input_s
    return {
        **layer,
        "forward_s": np.where(shared, forward_s, layer["forward_s"]),
        "input_s": np.where(shared, input_s, layer["input_s"]),
        "weight_s": np.where(shared, weight_s, layer["weight_s"]),
        "spare_forward_s": np.maximum(layer["forward_s"] - gather_s, 0.0),
        "spare_backward_s": np.maximum(backward_s - gather_s - scatter_s, 0.0),
    }


def _shared_s(columns: Columns, states: Floats, frozen: Floats) -> tuple[Floats, Floats]:
    """Gather ZeRO-3's parameters, trained ones and bytes of frozen ones; scatter gradients."""
    share = columns.device.shard_gather_share
    gathered = columns.parameter_wire_bytes / share * states + frozen / share
    scattered = columns.device.gradient_wire_bytes / share * states
    return (
        columns.both_s("all_gather", gathered, "shard"),
        columns.both_s("all_gather", scattered, "shard"),
    )


def _outside_s(columns: Columns, layer: dict[str, Floats], number: int) -> Floats:
    """Return ZeRO-3's waits of both passes for embedding or head on a stage."""
    t = columns.table
    if "spare_forward_s" not in layer or number == 1:
        return np.zeros((2, len(t)))
    count = columns.counts[number]
    each = count / columns.counts[1]
    outside = columns.parameters(number) - each * columns.parameters(1)
    frozen, layers = (
        columns.frozen_bytes(place, width=columns.parameter_wire_bytes) for place in (number, 1)
    )
    frozen = frozen - each * layers
    # With one stage they are in the layers' share already; experts lie in layers.
    waits = (t.zero == 3) & (t.pipeline > 1) & (outside[0] + frozen[0] > 0)
    own, none = np.stack([waits, np.zeros_like(waits)]), np.zeros(len(t))
    gather_s, scatter_s = _shared_s(
        columns, np.where(own, outside, 0.0), np.where(own, frozen, 0.0)
    )
    forward_s = _beside(columns, none, gather_s, spare_s=count * layer["spare_forward_s"])
    both_s = gather_s + scatter_s
    backward_s = _beside(columns, none, both_s, spare_s=count * layer["spare_backward_s"])
    return np.where(waits, (forward_s, backward_s), 0.0)


def _beside(
    columns: Columns, compute_s: Floats, sent_s: Floats, *, spare_s: Floats | None = None
) -> Floats:
    """Compute and what of its messages is exposed, beside it or beside ``spare_s``."""
    room_s = compute_s if spare_s is None else spare_s
    beside_s = exposed_s(sent_s, room_s, slowdown=columns.device.overlap_slowdown)
    return compute_s + np.where(columns.table.data_overlap == 1, beside_s, sent_s)
