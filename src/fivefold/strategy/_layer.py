"""Time and stored bytes of one layer for one micro-batch on one GPU, summed over its operators.

The few hundred layers that a search space holds differ only in a handful of settings, so their
costs are computed once each, here, and looked up by both evaluators.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from fivefold.collectives.pricing import FabricSpec, Group, collective_time_s
from fivefold.strategy._adapters import trained_head, trained_operators, widened_bytes
from fivefold.strategy._operators import ELEMENT_BYTES, LayerShape, Operator, tokens_of
from fivefold.strategy.cluster import (
    MATRIX_BYTES,
    DeviceSpec,
    element_bytes,
    gemm_time_s,
    memory_time_s,
)
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan
from fivefold.tasks.schedule import exposed_s

_ALIGNED = 8
_LOGIT_BYTES = 4.0
_WIDE_BYTES = 4.0
# 32-bit vector units against 16-bit products: A100 19.5 of 312 TFLOP/s, H100 67 of 989.
_VECTOR_SHARE = 1 / 16
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Types of products whose inputs are cast from 16 bits."""


@dataclass(frozen=True, kw_only=True)
class LayerKey:
    """Everything in a plan that a layer's cost depends on."""

    micro_batch: int
    tensor: int
    context: int
    expert: int
    data_stride: int
    ranks: int
    sequence_parallel: bool
    regather: bool
    recompute: str
    tensor_overlap: str
    dtype: str
    expert_tensor: int | None
    shared_overlap: bool = False

    @classmethod
    def of(cls, plan: ParallelPlan) -> LayerKey:
        """Return the key of a plan."""
        return cls(
            micro_batch=plan.micro_batch, tensor=plan.tensor, context=plan.context,
            expert=plan.expert,
            data_stride=plan.group("data").stride if plan.context * plan.expert > 1 else 0,
            ranks=plan.num_gpus,
            sequence_parallel=plan.sequence_parallel, regather=plan.regather,
            recompute=plan.recompute, tensor_overlap=plan.tensor_overlap, dtype=plan.dtype,
            expert_tensor=plan.expert_tensor, shared_overlap=plan.shared_overlap,
        )  # fmt: skip

    def shape(self, device: DeviceSpec) -> LayerShape:
        """Return the GPU's share of a layer."""
        return LayerShape(
            micro_batch=self.micro_batch, tensor=self.tensor, context=self.context,
            expert=self.expert, expert_tensor=self.expert_tensor,
            sequence_parallel=self.sequence_parallel,
            fused_attention=device.fused_attention, imbalance=device.expert_imbalance,
            expert_passes=device.expert_passes, element_bytes=element_bytes(self.dtype),
            stream_bytes=_WIDE_BYTES if device.autocast else element_bytes(self.dtype),
            fused_elementwise=device.fused_elementwise,
            pads_experts=device.dropless and self.dtype in NARROW,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one layer for one micro-batch on one GPU.

    Args:
        forward_s: Forward, communication included.
        input_s: Backward for the inputs, communication and recomputation included.
        weight_s: Backward for the weights.
        tensor_s: Exposed tensor communication in the sum of the three.
        context_s: Exposed context communication in it.
        expert_s: Exposed exchange of tokens in it.
        recompute_s: Recomputation in it, without the communication that it repeats.
        host_s: Least of the three together, at which the host can issue their kernels.
        stored_bytes: Kept between forward and backward.
        working_bytes: Needed in addition while one layer is recomputed.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0
    recompute_s: float = 0.0
    host_s: float = 0.0
    stored_bytes: float = 0.0
    working_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Forward, backward for inputs and backward for weights of some operators."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    def plus(self, other: _Times) -> _Times:
        """Return the sum, pass by pass."""
        return _Times(
            forward_s=self.forward_s + other.forward_s,
            input_s=self.input_s + other.input_s,
            weight_s=self.weight_s + other.weight_s,
        )


@functools.lru_cache(maxsize=100_000)
def layer_cost(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey, kind: str
) -> LayerCost:  # fmt: skip
    """Return the cost of one layer of a kind, in the letters of a pattern."""
    shape = key.shape(device)
    operators = trained_operators(model, shape, kind)
    stored = sum(_stored_bytes(op, device, key.dtype) for op in operators)
    dropped = 0.0
    if key.recompute == "selective":
        dropped = sum(
            _stored_bytes(op, device, key.dtype) for op in operators if _is_dropped(op, device)
        )
    inputs = shape.element_bytes * tokens_of(model, shape) * model.hidden
    kept = stored - dropped
    if key.sequence_parallel and not key.regather:
        # Two inputs of column-parallel products are kept whole instead of gathered again.
        kept += 2 * inputs * (1 - 1 / key.tensor)
    if key.recompute == "selective" and device.selective_products:
        kept = min(kept, _every_second_product(inputs, shape, operators))
        dropped = stored - kept
    if key.recompute == "full":
        kept = inputs * shape.stream_bytes / shape.element_bytes
        kept = kept / (key.tensor if key.sequence_parallel or device.splits_checkpoints else 1)
        kept = min(kept, stored)
        dropped = stored - kept
    cost = _timed(device, fabric, key=key, operators=operators, causal=model.causal)
    working = dropped + widened_bytes(model, shape, operators)
    return dataclasses.replace(cost, stored_bytes=kept, working_bytes=working)


def _stored_bytes(op: Operator, device: DeviceSpec, dtype: str) -> float:
    """Return what an operator keeps for backward: inputs of narrow products are kept narrow.

    Of a frozen product it is its adapter that keeps them, in 16 bits.

    Attention keeps its own result in 16 bits, beside the narrow copy that its projection keeps.
    """
    cast = ELEMENT_BYTES * _cast_weights(op, device, dtype)
    if op.kind != "gemm" or op.name == "router" or op.plain or op.frozen or dtype not in NARROW:
        return op.stored_bytes + cast
    share = device.input_bytes_fp8 * MATRIX_BYTES[dtype] / ELEMENT_BYTES
    return op.stored_bytes * (share + (1.0 if op.name == "attention projection" else 0.0)) + cast


def _cast_weights(op: Operator, device: DeviceSpec, dtype: str) -> float:
    """Return how many weights of a product are cast to 16 bits for it."""
    casts = device.autocast and op.kind == "gemm" and dtype != "fp32"
    return op.batch * op.n * op.k if casts else 0.0


def _is_dropped(op: Operator, device: DeviceSpec) -> bool:
    """Return whether selective recomputation computes an operator's stored inputs again."""
    drops = device.selective_drops.split()
    return (op.scores and "scores" in drops) or op.after in drops


def _every_second_product(
    input_bytes: float, shape: LayerShape, operators: tuple[Operator, ...]
) -> float:
    """Return the bytes of a layer's input, half of its products' outputs and attention's output."""
    outputs = sum(op.batch * op.m * op.n for op in operators if op.kind == "gemm")
    attention = sum(op.m * op.k for op in operators if op.kind == "attention")
    kept = shape.element_bytes * (outputs / 2 + attention)
    return input_bytes / shape.sequence_split + kept


def mean_layer_cost(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey
) -> LayerCost:
    """Return the cost of a layer, averaged over the kinds of layers."""
    costs = [
        (share, layer_cost(model, device, fabric, key=key, kind=kind))
        for share, kind in model.layer_kinds
    ]
    return LayerCost(
        **{
            name: sum(share * getattr(cost, name) for share, cost in costs)
            for name in LayerCost.__dataclass_fields__
        }
    )


@functools.lru_cache(maxsize=100_000)
def head_cost(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey
) -> LayerCost:
    """Return the cost of the last norm, the head and the loss; they are never recomputed."""
    if model.stages:
        return LayerCost()
    operators = tuple(_loss_of(op, device) for op in trained_head(model, key.shape(device)))
    # Recipes of narrow types leave the head in 16 bits.
    dtype = "bf16" if key.dtype in NARROW else key.dtype
    plain = dataclasses.replace(key, recompute="none", dtype=dtype)
    cost = _timed(device, fabric, key=plain, operators=operators, causal=model.causal)
    stored = sum(_stored_bytes(op, device, dtype) for op in operators)
    return dataclasses.replace(cost, stored_bytes=stored)


def _loss_of(op: Operator, device: DeviceSpec) -> Operator:
    """Return the loss as the stack computes it; operators count 32-bit logits, kernel by kernel.

    One fused kernel reads narrow logits twice and writes their gradient over them once.
    """
    if op.name != "loss":
        return op
    width = device.loss_bytes / _LOGIT_BYTES
    stored = op.stored_bytes * width / device.loss_chunks
    if device.loss_bytes >= _LOGIT_BYTES:
        return dataclasses.replace(op, stored_bytes=stored)
    logits = op.stored_bytes * width
    return dataclasses.replace(
        op, stored_bytes=stored, moved_bytes=3 * logits, backward_moved_bytes=2 * logits, kernels=2
    )


@dataclass(kw_only=True)
class _Work:
    """Sums over the operators of a layer, their messages apart."""

    total: _Times = _Times()
    products: _Times = _Times()
    shared: _Times = _Times()  # shared experts
    again_s: float = 0.0  # attention and scores, which selective recomputation repeats
    remade_s: float = 0.0  # stored inputs that it drops


def _work_of(
    device: DeviceSpec, *, key: LayerKey, operators: tuple[Operator, ...], causal: bool
) -> _Work:
    work = _Work()
    earlier_s = 0.0  # forward of the operator before
    for op in operators:
        times = _operator_times(device, op, dtype=key.dtype, causal=causal)
        work.total = work.total.plus(times)
        if op.name.startswith("shared expert"):
            work.shared = work.shared.plus(times)
        if op.kind == "gemm":
            work.products = work.products.plus(times)
        if op.scores or op.kind == "attention":
            work.again_s += times.forward_s
        elif op.after and _is_dropped(op, device):
            work.remade_s += earlier_s  # what a norm or an activation made
        if op.after == "expands" and "latent" in device.selective_drops:
            work.remade_s += times.forward_s
        earlier_s = times.forward_s
    return work


def _timed(
    device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey, operators: tuple[Operator, ...],
    causal: bool,
) -> LayerCost:  # fmt: skip
    work = _work_of(device, key=key, operators=operators, causal=causal)
    total, products, shared = work.total, work.products, work.shared
    tensor = _tensor_times(device, fabric, key=key, operators=operators, products=products)
    context = _context_times(device, fabric, key=key, operators=operators, causal=causal)
    exchange = _exchange_times(device, fabric, key=key, operators=operators)
    if key.shared_overlap:
        beside = functools.partial(_exposed_s, slowdown=device.overlap_slowdown)
        exchange = _Times(
            forward_s=beside(exchange.forward_s, shared.forward_s),
            input_s=beside(exchange.input_s, shared.input_s + shared.weight_s),
        )
    before_s, before_floor_s = _before_experts(device, key=key, operators=operators, causal=causal)
    floor_s, backward_floor_s = (
        _host_s(device, operators, dtype=key.dtype, products=products) for products in (1, 2)
    )
    sent = tensor.plus(context).plus(exchange)
    # The host issues experts when it has read how many tokens each has: the GPU has nothing to do.
    after_s = total.forward_s + sent.forward_s - before_s
    forward_s = max(before_s, before_floor_s) + max(after_s, floor_s - before_floor_s)
    skipped_s = 0.0
    if device.recompute_stops_early:
        skipped_s = _skipped_s(device, key=key, operators=operators, causal=causal, tensor=tensor)
    whole_s = max(forward_s - skipped_s, floor_s * (key.recompute == "full"))
    recompute_s = {"none": 0.0, "selective": work.again_s, "full": whole_s}[key.recompute]
    if key.recompute == "selective":
        fp8 = key.dtype in NARROW
        share = device.selective_products_fp8 if fp8 else device.selective_products
        # Nothing of fused attention's scores is stored, so nothing of them is computed again.
        scores_s = work.again_s * (not device.fused_attention)
        recompute_s = scores_s + share * products.forward_s + work.remade_s
    repeated = 2.0 if key.recompute == "full" else 1.0
    sent_again_s = (repeated - 1.0) * sent.forward_s
    input_s, weight_s = total.input_s + sent.input_s, total.weight_s + sent.weight_s
    waiting_s = max(backward_floor_s - input_s - weight_s, 0.0)
    # What the host issues late is half of either kind of backward, as far as there is room.
    late_s = min(max(backward_floor_s / 2 - weight_s, 0.0), waiting_s)
    return LayerCost(
        forward_s=forward_s,
        input_s=input_s + recompute_s + waiting_s - late_s,
        weight_s=weight_s + late_s,
        tensor_s=repeated * tensor.forward_s + tensor.input_s + tensor.weight_s,
        context_s=repeated * context.forward_s + context.input_s,
        expert_s=repeated * exchange.forward_s + exchange.input_s,
        recompute_s=max(recompute_s - sent_again_s, 0.0),
        host_s=repeated * floor_s + backward_floor_s,
    )


def _before_experts(
    device: DeviceSpec, *, key: LayerKey, operators: tuple[Operator, ...], causal: bool
) -> tuple[float, float]:
    """Return forward and its host's time up to the router, where the host waits for its counts."""
    names = [op.name for op in operators]
    if not device.dropless or "router" not in names:
        return 0.0, 0.0
    opening = operators[: names.index("router") + 1]
    times = [_operator_times(device, op, dtype=key.dtype, causal=causal) for op in opening]
    return sum(one.forward_s for one in times), _host_s(device, opening, dtype=key.dtype)


def _host_s(
    device: DeviceSpec, operators: tuple[Operator, ...], *, dtype: str, products: int = 1
) -> float:
    """Return the host's time for a pass of one or two products for each forward one.

    Products of several experts are issued one by one, with casts of their own: of tensors whose
    scale comes from themselves, and of blocks whose scales are laid out in tiles, three kernels.
    """
    casts = {"fp8": 1 + 2 * device.current_scaling, "mxfp8": 3, "nvfp4": 3}.get(dtype, 0)
    return sum(
        device.expert_kernel_s * op.batch * (products + casts)
        if op.grouped
        else device.host_kernel_s * op.kernels
        for op in operators
    )


def _skipped_s(
    device: DeviceSpec, *, key: LayerKey, operators: tuple[Operator, ...], causal: bool,
    tensor: _Times,
) -> float:  # fmt: skip
    """Return the forward time that is spared where recomputation stops at the last input kept.

    Nothing of the last product's output is needed. Experts repeat all: routing is weighted by what
    they give.
    """
    if any(op.name == "router" for op in operators):
        return 0.0
    last = max((i for i, op in enumerate(operators) if op.stored_bytes > 0), default=0)
    computed_s = sum(
        _operator_times(device, op, dtype=key.dtype, causal=causal).forward_s
        for op in operators[last:]
    )
    sizes = [op.message_bytes if op.message == "tensor" else 0.0 for op in operators]
    share = sum(sizes[last:]) / sum(sizes) if any(sizes) else 0.0
    # Of the gather before and the scatter after two products, only the last scatter.
    return computed_s + share * tensor.forward_s * (0.5 if key.sequence_parallel else 1.0)


def _operator_times(device: DeviceSpec, op: Operator, *, dtype: str, causal: bool) -> _Times:
    if op.kind == "gemm":
        wide = op.plain and dtype in NARROW
        return _product_times(device, op, dtype="bf16" if wide else dtype)
    if op.kind == "scan":
        return _scan_times(device, op)
    if op.kind == "attention":
        return _attention_times(device, op, causal=causal)
    if op.kind == "memory":
        gap_s = device.kernel_gap_s * op.kernels
        return _Times(
            forward_s=memory_time_s(device, op.moved_bytes) + gap_s,
            input_s=memory_time_s(device, op.backward_moved_bytes) + gap_s,
        )
    return _Times()


def _product_times(device: DeviceSpec, op: Operator, *, dtype: str) -> _Times:
    timed = functools.partial(
        gemm_time_s, device, m=op.m, batch=op.batch, dtype=dtype, output_bytes=element_bytes(dtype)
    )
    forward_s, input_s = timed(n=op.n, k=op.k), timed(n=op.k, k=op.n)
    weights = _cast_weights(op, device, dtype)
    if weights:  # their gradients come in 32 bits, as counted below
        cast_s = memory_time_s(device, (_WIDE_BYTES + ELEMENT_BYTES) * weights)
        forward_s += cast_s + device.kernel_gap_s
    weight_s, copies = 0.0, 1
    if not op.frozen:
        # Weight gradients add up over micro-batches: read and written at their own width.
        weight_s, copies = gemm_time_s(
            device, m=op.k, n=op.n, k=op.m, batch=op.batch, dtype=dtype,
            output_bytes=2.0 * device.gradient_bytes,
        ), 2  # fmt: skip
    if dtype in NARROW:
        # Inputs and their gradients are read at 16 bits and written twice, once transposed for
        # the weights' gradients.
        reads = 1 + (dtype == "nvfp4" or (dtype == "fp8" and device.current_scaling))
        reads += dtype == "nvfp4"  # and once for the Hadamard transform of weight gradients
        cast = reads * ELEMENT_BYTES + copies * MATRIX_BYTES[dtype]
        forward_s += memory_time_s(device, cast * op.batch * op.m * op.k)
        input_s += memory_time_s(device, cast * op.batch * op.m * op.n)
    return _Times(forward_s=forward_s, input_s=input_s, weight_s=weight_s)


def _scan_times(device: DeviceSpec, op: Operator) -> _Times:
    """Price products of chunks at the rate of fused attention, or token by token on vector units.

    Backward is twice forward and what of it is repeated.
    """
    rate = device.peak_flops * (_VECTOR_SHARE if op.vector else device.attention_efficiency)
    gap_s = device.kernel_gap_s * op.kernels
    forward_s = max(op.flops / rate, memory_time_s(device, op.moved_bytes))
    backward_flops = 2.0 * op.flops + op.flops_again
    backward_s = max(backward_flops / rate, memory_time_s(device, op.backward_moved_bytes))
    return _Times(forward_s=forward_s + gap_s, input_s=backward_s + 2 * gap_s)


def _attention_times(device: DeviceSpec, op: Operator, *, causal: bool) -> _Times:
    if device.fused_attention:
        seen = 0.5 if causal and device.causal_skips else 1.0
        rate = device.peak_flops * device.attention_efficiency
        compute_s = seen * op.flops / rate
        forward_s = max(compute_s, memory_time_s(device, op.moved_bytes))
        # Backward computes the scores again: five products instead of two, at a lower rate.
        return _Times(
            forward_s=forward_s + device.kernel_gap_s,
            input_s=max(2.5 * compute_s / 0.85, memory_time_s(device, op.backward_moved_bytes))
            + device.kernel_gap_s,
        )
    scores_s = gemm_time_s(device, m=op.m, n=op.n, k=op.k, batch=op.batch)
    values_s = gemm_time_s(device, m=op.m, n=op.k, k=op.n, batch=op.batch)
    if device.unaligned_efficiency and op.k % _ALIGNED:
        least_s = op.flops / 2 / (device.peak_flops * device.unaligned_efficiency)
        scores_s, values_s = max(scores_s, least_s), max(values_s, least_s)
    return _Times(forward_s=scores_s + values_s, input_s=2 * (scores_s + values_s))


def _tensor_times(
    device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey, operators: tuple[Operator, ...],
    products: _Times,
) -> _Times:  # fmt: skip
    """Return the exposed communication of the tensor group."""
    sizes = [op.message_bytes for op in operators if op.message == "tensor"]
    if not sizes:
        return _Times()
    group = Group(size=key.tensor, ranks=key.ranks)
    kind = "all_gather" if key.sequence_parallel else "all_reduce"
    sent_s = sum(collective_time_s(fabric, kind, size_bytes=size, group=group) for size in sizes)
    once_s = 2 * sent_s if key.sequence_parallel else sent_s
    # The gather for the weights runs beside the product for the inputs, which hides nothing else.
    room_s = products.input_s * (1 - device.overlap_slowdown)
    hidden_s = min(sent_s, room_s) if key.sequence_parallel and key.regather else 0.0
    backward_s = once_s + (sent_s - hidden_s if key.sequence_parallel and key.regather else 0.0)
    # Products and messages are interleaved by writes into one another's memory: NVLink's reach.
    if key.tensor_overlap == "none" or not fabric.holds_in_node(key.tensor, key.ranks):
        return _Times(forward_s=once_s, input_s=backward_s)
    slices = device.slices if key.tensor_overlap == "pipe" else max(key.tensor, 2)
    beside = functools.partial(_exposed_s, pieces=slices, slowdown=device.overlap_slowdown)
    free_s = products.input_s * (1.0 - hidden_s / room_s if room_s > 0 else 1.0)
    input_s = beside(backward_s, free_s)
    # What the product for the weights hides is hidden there: it cannot fill a bubble as well.
    weight_s = beside(backward_s, free_s + products.weight_s) - input_s
    return _Times(forward_s=beside(once_s, products.forward_s), input_s=input_s, weight_s=weight_s)


def _exposed_s(sent_s: float, beside_s: float, **how: float) -> float:
    return float(exposed_s(sent_s, beside_s, **how))


def _context_times(
    device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey, operators: tuple[Operator, ...],
    causal: bool,
) -> _Times:  # fmt: skip
    """Time keys and values going round beside attention; the own share needs no message."""
    sizes = [op.message_bytes for op in operators if op.message == "context"]
    if not sizes:
        return _Times()
    group = Group(size=key.context, stride=key.data_stride, ranks=key.ranks)
    sent_s = collective_time_s(fabric, "all_gather", size_bytes=sum(sizes), group=group)
    attention = _Times()
    for op in operators:
        if op.kind == "attention":
            attention = attention.plus(_attention_times(device, op, causal=causal))
    share = (key.context - 1) / key.context
    beside = functools.partial(_exposed_s, pieces=key.context, slowdown=device.overlap_slowdown)
    return _Times(
        forward_s=beside(sent_s, share * attention.forward_s),
        input_s=beside(2 * sent_s, share * attention.input_s),
    )


def _exchange_times(
    device: DeviceSpec, fabric: FabricSpec, *, key: LayerKey, operators: tuple[Operator, ...]
) -> _Times:
    """Dispatch and combine, a copy for each expert or, across nodes, for each node."""
    messages = [op for op in operators if op.message == "expert"]
    if not messages:
        return _Times()
    stride = key.data_stride if key.expert_tensor is None else 1
    group = Group(size=key.expert, stride=stride, ranks=key.ranks)
    inside = max(min(fabric.gpus_per_node // stride, key.expert), 1)
    sent_s = 0.0
    for op in messages:
        if not device.dispatches_by_node or inside == key.expert:
            sent_s += collective_time_s(
                fabric, "all_to_all", size_bytes=op.message_bytes, group=group
            )
            continue
        once = op.copies_by_node(key.expert / inside)
        across_s = collective_time_s(
            fabric, "all_to_all", size_bytes=once * op.message_bytes, group=group
        )
        near = Group(size=inside, stride=stride, ranks=key.ranks)
        spread_s = collective_time_s(fabric, "all_to_all", size_bytes=op.message_bytes, group=near)
        sent_s += max(across_s, spread_s)
    return _Times(forward_s=sent_s, input_s=sent_s)
