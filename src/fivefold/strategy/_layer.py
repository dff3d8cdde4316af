"""Time and stored bytes of one layer for one micro-batch on one GPU, summed over its operators.

The few hundred layers that a search space holds differ only in a handful of settings, so their
costs are computed once each, here, and looked up by ``_columns``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec, Group, collective_time_s
from fivefold.strategy._adapters import trained_head, trained_operators, widened_bytes
from fivefold.strategy._operators import (
    ELEMENT_BYTES,
    NARROW,
    WIDE_BYTES,
    LayerShape,
    Operator,
    tokens_of,
)
from fivefold.strategy.cluster import MATRIX_BYTES, element_bytes, gemm_time_s, memory_time_s
from fivefold.strategy.model import ModelSpec
from fivefold.tasks.schedule import exposed_s

Floats = npt.NDArray[np.float64]
_ALIGNED = 8
_LOGIT_BYTES = 4.0
# 32-bit vector units against 16-bit products: A100 19.5 of 312 TFLOP/s, H100 67 of 989.
_VECTOR_SHARE = 1 / 16


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
        alone_s: The three together where tokens are exchanged in no time.
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
    alone_s: float = 0.0
    stored_bytes: float = 0.0
    working_bytes: float = 0.0


def mean_layer_cost(model: ModelSpec, fabric: FabricSpec, shape: LayerShape) -> LayerCost:
    """Return the cost of a layer, averaged over the kinds of layers."""
    costs = [(share, _layer_cost(model, fabric, shape, kind)) for share, kind in model.layer_kinds]
    return LayerCost(
        **{
            name: sum(share * getattr(cost, name) for share, cost in costs)
            for name in LayerCost.__dataclass_fields__
        }
    )


@functools.lru_cache(maxsize=100_000)
def _layer_cost(model: ModelSpec, fabric: FabricSpec, shape: LayerShape, kind: str) -> LayerCost:
    layer = _Layer(model, fabric, shape, trained_operators(model, shape, kind))
    device, stored, dropped = shape.device, sum(layer.stored), 0.0
    inputs = shape.element_bytes * tokens_of(model, shape) * model.hidden
    if shape.recompute == "selective":
        dropped = sum(
            size for op, size in zip(layer.operators, layer.stored, strict=True)
            if layer.is_dropped(op)
        )  # fmt: skip
    kept = stored - dropped
    if shape.sequence_parallel and not shape.regather:
        # Two inputs of column-parallel products are kept whole instead of gathered again.
        kept += 2 * inputs * (1 - 1 / shape.tensor)
    if shape.recompute == "selective" and device.selective_products:
        kept = min(kept, layer.every_second_product(inputs))
        dropped = stored - kept
    if shape.recompute == "full":
        kept = inputs * shape.stream_bytes / shape.element_bytes
        split = shape.sequence_parallel or device.splits_checkpoints
        kept = min(kept / (shape.tensor if split else 1), stored)
        dropped = stored - kept
    working = dropped + widened_bytes(model, shape, layer.operators)
    return dataclasses.replace(layer.cost(), stored_bytes=kept, working_bytes=working)


@functools.lru_cache(maxsize=100_000)
def head_cost(model: ModelSpec, fabric: FabricSpec, shape: LayerShape) -> LayerCost:
    """Return the cost of the last norm, the head and the loss; they are never recomputed."""
    if model.stages:
        return LayerCost()
    # Recipes of narrow types leave the head in 16 bits.
    dtype = "bf16" if shape.dtype in NARROW else shape.dtype
    shape = dataclasses.replace(shape, recompute="none", dtype=dtype)
    operators = tuple(_loss_of(op, shape) for op in trained_head(model, shape))
    layer = _Layer(model, fabric, shape, operators)
    return dataclasses.replace(layer.cost(), stored_bytes=sum(layer.stored))


def _loss_of(op: Operator, shape: LayerShape) -> Operator:
    """Return the loss as the stack computes it; operators count 32-bit logits, kernel by kernel.

    One fused kernel reads narrow logits twice and writes their gradient over them once.
    """
    if op.name != "loss":
        return op
    width = shape.device.loss_bytes / _LOGIT_BYTES
    stored = op.stored_bytes * width / shape.device.loss_chunks
    if shape.device.loss_bytes >= _LOGIT_BYTES:
        return dataclasses.replace(op, stored_bytes=stored)
    logits = op.stored_bytes * width
    return dataclasses.replace(
        op, stored_bytes=stored, moved_bytes=3 * logits, backward_moved_bytes=2 * logits, kernels=2
    )


class _Layer:
    """Operators of one layer on one GPU, priced.

    Times are arrays of three: forward, backward for inputs, backward for weights.
    """

    def __init__(
        self, model: ModelSpec, fabric: FabricSpec, shape: LayerShape,
        operators: tuple[Operator, ...],
    ) -> None:  # fmt: skip
        self.causal, self.fabric, self.shape, self.operators = (
            model.causal,
            fabric,
            shape,
            operators,
        )
        self.device = shape.device
        self.graphed = shape.dtype in self.device.graphed.split()
        self.times = [self._times(op) for op in operators]
        self.stored = [self._stored_bytes(op) for op in operators]

    def cost(self) -> LayerCost:
        """Return the times."""
        exchange = self._exchange()
        cost = self._cost(exchange)
        alone = self._cost(np.zeros(3)) if exchange.any() else cost
        return dataclasses.replace(cost, alone_s=alone.forward_s + alone.input_s + alone.weight_s)

    def _cost(self, exchange: Floats) -> LayerCost:
        device, shape = self.device, self.shape
        total, products = self._sum(lambda _: True), self._sum(lambda op: op.kind == "gemm")
        tensor, context = self._tensor(products), self._context()
        before_s, before_floor_s = self._before_experts()
        floor_s, backward_floor_s = (self._host_s(self.operators, each) for each in (1, 2))
        sent = tensor + context + exchange
        # The host issues experts when it has read how many tokens each has: the GPU waits.
        after_s = total[0] + sent[0] - before_s
        forward_s = max(before_s, before_floor_s) + max(after_s, floor_s - before_floor_s)
        repeated = 2.0 if shape.recompute == "full" else 1.0
        recompute_s = 0.0
        if shape.recompute == "selective":
            recompute_s = self._selective_s(products)
        elif shape.recompute == "full":
            skipped_s = self._skipped_s(tensor) if device.recompute_stops_early else 0.0
            recompute_s = max(forward_s - skipped_s, floor_s)
        input_s, weight_s = total[1:] + sent[1:]
        waiting_s = max(backward_floor_s - input_s - weight_s, 0.0)
        # What the host issues late is half of either kind of backward, as far as there is room.
        late_s = min(max(backward_floor_s / 2 - weight_s, 0.0), waiting_s)
        return LayerCost(
            forward_s=forward_s,
            input_s=input_s + recompute_s + waiting_s - late_s,
            weight_s=weight_s + late_s,
            tensor_s=repeated * tensor[0] + tensor[1] + tensor[2],
            context_s=repeated * context[0] + context[1],
            expert_s=repeated * exchange[0] + exchange[1],
            recompute_s=max(recompute_s - (repeated - 1.0) * sent[0], 0.0),
        )

    def is_dropped(self, op: Operator) -> bool:
        """Return whether selective recomputation computes an operator's stored inputs again."""
        drops = self.device.selective_drops.split()
        return (op.scores and "scores" in drops) or op.after in drops

    def every_second_product(self, input_bytes: float) -> float:
        """Return the bytes of the input, half of the products' outputs and attention's output."""
        outputs = sum(op.batch * op.m * op.n for op in self.operators if op.kind == "gemm")
        attention = sum(op.m * op.k for op in self.operators if op.kind == "attention")
        kept = self.shape.element_bytes * (outputs / 2 + attention)
        return input_bytes / self.shape.sequence_split + kept

    def _stored_bytes(self, op: Operator) -> float:
        """Return what an operator keeps for backward: inputs of narrow products are kept narrow.

        Of a frozen product it is its adapter that keeps them, in 16 bits. Attention keeps its own
        result in 16 bits, beside the narrow copy that its projection keeps.
        """
        dtype, cast = self.shape.dtype, ELEMENT_BYTES * self._cast_weights(op)
        if op.kind != "gemm" or op.name == "router" or op.plain or op.frozen or dtype not in NARROW:
            return op.stored_bytes + cast
        share = self.device.input_bytes_fp8 * MATRIX_BYTES[dtype] / ELEMENT_BYTES
        share += op.name == "attention projection"
        return op.stored_bytes * share + cast

    def _cast_weights(self, op: Operator) -> float:
        """Return how many weights of a product are cast to 16 bits for it."""
        casts = self.device.autocast and op.kind == "gemm" and self.shape.dtype != "fp32"
        return op.batch * op.n * op.k if casts else 0.0

    def _sum(self, chosen: Callable[[Operator], bool]) -> Floats:
        own = [times for op, times in zip(self.operators, self.times, strict=True) if chosen(op)]
        return sum(own, np.zeros(3))

    def _selective_s(self, products: Floats) -> float:
        """Return what selective recomputation repeats: scores, products, what norms made."""
        device = self.device
        remade_s = earlier_s = 0.0
        for op, times in zip(self.operators, self.times, strict=True):
            if op.after and op.kind != "attention" and self.is_dropped(op):
                remade_s += earlier_s  # what a norm or an activation made
            if op.after == "expands" and "latent" in device.selective_drops:
                remade_s += times[0]
            earlier_s = times[0]
        fp8 = self.shape.dtype in NARROW
        share = device.selective_products_fp8 if fp8 else device.selective_products
        # Nothing of fused attention's scores is stored, so nothing of them is computed again.
        scores = self._sum(lambda op: op.scores or op.kind == "attention")
        scores_s = 0.0 if device.fused_attention else scores[0]
        return float(scores_s + share * products[0] + remade_s)

    def _before_experts(self) -> tuple[float, float]:
        """Return forward and its host's time up to the router, whose counts the host waits for."""
        names = [op.name for op in self.operators]
        if self.graphed or not self.device.dropless or "router" not in names:
            return 0.0, 0.0
        end = names.index("router") + 1
        return sum(one[0] for one in self.times[:end]), self._host_s(self.operators[:end])

    def _host_s(self, operators: tuple[Operator, ...], products: int = 1) -> float:
        """Return the host's time for a pass of one or two products for each forward one.

        Products of several experts are issued one by one, with casts of their own: of tensors whose
        scale comes from themselves, and of blocks with scales laid out in tiles, three kernels.
        """
        device = self.device
        if self.graphed:
            return 0.0
        casts = {"fp8": 1 + 2 * device.current_scaling, "mxfp8": 3, "nvfp4": 3}
        each = products + casts.get(self.shape.dtype, 0)
        return sum(
            device.expert_kernel_s * op.batch * each
            if op.grouped
            else device.host_kernel_s * op.kernels
            for op in operators
        )

    def _skipped_s(self, tensor: Floats) -> float:
        """Return the forward time that is spared where recomputation stops at the last input kept.

        Nothing of the last product's output is needed. Experts repeat all: routing is weighted by
        what they give.
        """
        if any(op.name == "router" for op in self.operators):
            return 0.0
        last = max((i for i, op in enumerate(self.operators) if op.stored_bytes > 0), default=0)
        computed_s = sum(times[0] for times in self.times[last:])
        sizes = [op.message_bytes * (op.message == "tensor") for op in self.operators]
        share = sum(sizes[last:]) / sum(sizes) if any(sizes) else 0.0
        # Of the gather before and the scatter after two products, only the last scatter.
        last_s = share * tensor[0] * (0.5 if self.shape.sequence_parallel else 1.0)
        return float(computed_s + last_s)

    def _times(self, op: Operator) -> Floats:
        if op.kind == "message":
            return np.zeros(3)
        times = {"gemm": self._product, "scan": self._scan, "attention": self._attention}
        if op.kind in times:
            return np.array(times[op.kind](op))
        gap_s = self.device.kernel_gap_s * op.kernels
        return np.array([self._moved_s(op.moved_bytes) + gap_s,
                         self._moved_s(op.backward_moved_bytes) + gap_s, 0.0])  # fmt: skip

    def _moved_s(self, size_bytes: float) -> float:
        return memory_time_s(self.device, size_bytes)

    def _product(self, op: Operator) -> tuple[float, float, float]:
        device, dtype = self.device, self.shape.dtype
        if op.plain and dtype in NARROW:
            dtype = "bf16"
        timed = functools.partial(gemm_time_s, device, batch=op.batch, dtype=dtype)
        narrow = element_bytes(dtype)
        forward_s = timed(m=op.m, n=op.n, k=op.k, output_bytes=narrow)
        input_s = timed(m=op.m, n=op.k, k=op.n, output_bytes=narrow)
        if weights := self._cast_weights(op):  # their gradients come in 32 bits, as counted below
            cast_s = self._moved_s((WIDE_BYTES + ELEMENT_BYTES) * weights)
            forward_s += cast_s + device.kernel_gap_s
        weight_s, copies = 0.0, 1
        if not op.frozen:
            # Weight gradients add up over micro-batches: read and written at their own width.
            written = 2.0 * device.gradient_bytes
            weight_s, copies = timed(m=op.k, n=op.n, k=op.m, output_bytes=written), 2
        if dtype in NARROW and not (op.grouped and dtype in device.fused_experts.split()):
            # Inputs and their gradients are read at 16 bits and written twice, once transposed for
            # the weights' gradients.
            reads = 1 + (dtype == "fp8" and device.current_scaling)
            reads = 3 if dtype == "nvfp4" else reads  # and for the weights' Hadamard transform
            cast = reads * ELEMENT_BYTES + copies * MATRIX_BYTES[dtype]
            forward_s += self._moved_s(cast * op.batch * op.m * op.k)
            input_s += self._moved_s(cast * op.batch * op.m * op.n)
        return forward_s, input_s, weight_s

    def _scan(self, op: Operator) -> tuple[float, float, float]:
        """Price products of chunks at the rate of fused attention, or tokens on vector units.

        Backward is twice forward and what of it is repeated.
        """
        device = self.device
        rate = device.peak_flops * (_VECTOR_SHARE if op.vector else device.attention_efficiency)
        gap_s = device.kernel_gap_s * op.kernels
        forward_s = max(op.flops / rate, self._moved_s(op.moved_bytes))
        flops = 2.0 * op.flops + op.flops_again
        backward_s = max(flops / rate, self._moved_s(op.backward_moved_bytes))
        slower = device.scan_slowdown
        return slower * forward_s + gap_s, slower * backward_s + 2 * gap_s, 0.0

    def _attention(self, op: Operator) -> tuple[float, float, float]:
        device = self.device
        if device.fused_attention:
            seen = 0.5 if self.causal and device.causal_skips else 1.0
            rate = min(device.peak_flops * device.attention_efficiency, device.attention_flops)
            compute_s = seen * op.flops / rate
            forward_s = max(compute_s, self._moved_s(op.moved_bytes))
            # Backward computes the scores again: five products instead of two, at a lower rate.
            backward_s = max(2.5 * compute_s / 0.85, self._moved_s(op.backward_moved_bytes))
            return forward_s + device.kernel_gap_s, backward_s + device.kernel_gap_s, 0.0
        both = [gemm_time_s(device, m=op.m, n=n, k=k, batch=op.batch)
                for n, k in ((op.n, op.k), (op.k, op.n))]  # fmt: skip
        if device.unaligned_efficiency and op.k % _ALIGNED:
            least_s = op.flops / 2 / (device.peak_flops * device.unaligned_efficiency)
            both = [max(one_s, least_s) for one_s in both]
        return sum(both), 2 * sum(both), 0.0

    def _beside(self, sent_s: float, compute_s: float, pieces: int | None = None) -> float:
        slowdown = self.device.overlap_slowdown
        return float(exposed_s(sent_s, compute_s, pieces=pieces, slowdown=slowdown))

    def _tensor(self, products: Floats) -> Floats:
        """Return the exposed communication of the tensor group."""
        shape, device = self.shape, self.device
        sizes = [op.message_bytes for op in self.operators if op.message == "tensor"]
        if not sizes:
            return np.zeros(3)
        group = Group(size=shape.tensor, ranks=shape.ranks)
        kind = "all_gather" if shape.sequence_parallel else "all_reduce"
        sent_s = sum(
            collective_time_s(self.fabric, kind, size_bytes=size, group=group) for size in sizes
        )
        once_s = 2 * sent_s if shape.sequence_parallel else sent_s
        # The gather for the weights runs beside the product for the inputs, which hides only it.
        room_s = products[1] * (1 - device.overlap_slowdown)
        gathers = shape.sequence_parallel and shape.regather
        hidden_s = min(sent_s, room_s) if gathers else 0.0
        backward_s = once_s + (sent_s - hidden_s if gathers else 0.0)
        # Products and messages are interleaved by writes into one another's memory: NVLink's reach.
        inside = self.fabric.holds_in_node(shape.tensor, shape.ranks)
        if shape.tensor_overlap == "none" or not inside:
            return np.array([once_s, backward_s, 0.0])
        slices = device.slices if shape.tensor_overlap == "pipe" else max(shape.tensor, 2)
        free_s = products[1] * (1.0 - hidden_s / room_s if room_s > 0 else 1.0)
        input_s = self._beside(backward_s, free_s, slices)
        # What the product for the weights hides is hidden there: it cannot fill a bubble as well.
        weight_s = self._beside(backward_s, free_s + products[2], slices) - input_s
        return np.array([self._beside(once_s, products[0], slices), input_s, weight_s])

    def _context(self) -> Floats:
        """Time keys and values going round beside attention; the own share needs no message."""
        shape = self.shape
        sizes = [op.message_bytes for op in self.operators if op.message == "context"]
        if not sizes:
            return np.zeros(3)
        group = Group(size=shape.context, stride=shape.data_stride, ranks=shape.ranks)
        sent_s = collective_time_s(self.fabric, "all_gather", size_bytes=sum(sizes), group=group)
        share = (shape.context - 1) / shape.context
        attention = share * self._sum(lambda op: op.kind == "attention")
        return np.array([self._beside(sent_s, attention[0], shape.context),
                         self._beside(2 * sent_s, attention[1], shape.context), 0.0])  # fmt: skip

    def _exchange(self) -> Floats:
        """Dispatch and combine: a copy for each expert, or once for each node and for each rank."""
        shape, fabric = self.shape, self.fabric
        stride = shape.data_stride if shape.expert_tensor is None else 1
        inside = max(min(fabric.gpus_per_node // max(stride, 1), shape.expert), 1)

        def sent_s(size_bytes: float, ranks: int) -> float:
            group = Group(size=ranks, stride=stride, ranks=shape.ranks)
            return collective_time_s(fabric, "all_to_all", size_bytes=size_bytes, group=group)

        whole_s = 0.0
        for op in self.operators:
            if op.message != "expert":
                continue
            if not self.device.dispatches_once:
                whole_s += sent_s(op.message_bytes, shape.expert)
                continue
            # Ranks of a node pass on what came to it, while more comes.
            within_s = sent_s(op.copies(shape.expert) * op.message_bytes, inside)
            across_s = 0.0
            if inside < shape.expert:
                once = op.copies(shape.expert / inside)
                across_s = sent_s(once * op.message_bytes, shape.expert)
            whole_s += max(within_s, across_s)
        both = np.array([whole_s, whole_s, 0.0])
        if shape.shared_overlap and whole_s:
            shared = self._sum(lambda op: op.name.startswith("shared expert"))
            both[0] = self._beside(whole_s, shared[0])
            both[1] = self._beside(whole_s, shared[1] + shared[2])
        return both
