"""The operators of one layer as one GPU of a plan runs them: products, attention, bytes, messages.

Every cost and every stored byte of a layer is a sum over these operators, so that the model of
time and that of memory cannot disagree about what is computed. Sizes follow Megatron-LM's tensor
and sequence parallelism (Korthikanti et al., arXiv 2205.05198). The module knows no device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import MambaMixer, MixtureOfExperts

ELEMENT_BYTES = 2.0
"""Width of activations and parameters in a step of 16 bits or fewer; of 32 bits it is 4."""
_MASK_BYTES = 1.0
# A clamped gate is ten kernels, most in 32 bits, as PyTorch runs the activation of GPT-OSS.
_CLAMPED_PASSES = (40, 80)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The share of a layer that one GPU works on."""

    micro_batch: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = False
    fused_attention: bool = False
    imbalance: float = 1.0
    expert_passes: float = 1.0
    element_bytes: float = ELEMENT_BYTES
    stream_bytes: float = ELEMENT_BYTES
    fused_elementwise: bool = True
    pads_experts: bool = False

    @property
    def cast_bytes(self) -> float:
        """Return what a cast between stream and products moves for an element; 0 where none is."""
        wide = self.stream_bytes > self.element_bytes
        return self.stream_bytes + self.element_bytes if wide else 0.0

    @property
    def sequence_split(self) -> int:
        """Return by how much norms and dropouts are split."""
        return self.tensor if self.sequence_parallel else 1


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One forward operator of a layer on one GPU, and what its backward does.

    ``after`` names what its stored input is computed from, where recomputing that alone is known;
    ``grouped`` products are those of several experts, one after the other; ``frozen`` ones have no
    backward for their weights; ``plain`` ones are in 16 bits where others are narrower. Backward of
    a ``scan`` repeats ``flops_again`` of its forward; a ``vector`` one has no products of matrices.
    """

    name: str
    kind: Literal["gemm", "attention", "scan", "memory", "message"]
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    batch: float = 1.0
    flops: float = 0.0
    flops_again: float = 0.0
    vector: bool = False
    moved_bytes: float = 0.0
    backward_moved_bytes: float = 0.0
    stored_bytes: float = 0.0
    scores: bool = False
    after: str = ""
    grouped: bool = False
    frozen: bool = False
    plain: bool = False
    message: str = ""
    message_bytes: float = 0.0
    kernels: int = 1
    experts: MixtureOfExperts | None = None

    def copies_by_node(self, nodes: float) -> float:
        """Return a token's copies that cross nodes when each gets one, over its experts."""
        assert self.experts is not None, "only messages between experts are asked"
        return min(self.experts.nodes_of_token(nodes) / self.experts.top_k, 1.0)


def layer_operators(model: ModelSpec, shape: LayerShape, kind: str = "*-") -> tuple[Operator, ...]:
    """Return the forward operators of one layer of a kind, such as ``"*-"``, on one GPU."""
    if model.stages:
        return _convolution_operators(model, shape)
    attention = _latent_operators if model.latent is not None else _attention_operators
    blocks = {
        "*": ("attention", attention), "M": ("mamba", _mamba_operators),
        "-": ("feed-forward", _dense_operators), "E": ("feed-forward", _expert_operators),
    }  # fmt: skip
    return tuple(
        op
        for name, operators_of in map(blocks.__getitem__, kind)
        for op in (
            *_norm_operators(model, shape, name),
            *operators_of(model, shape),
            *_residual_operators(model, shape, name),
        )
    )


def tokens_of(model: ModelSpec, shape: LayerShape) -> float:
    """Return the tokens of a micro-batch that one GPU of a context group holds."""
    return shape.micro_batch * model.seq_len / shape.context


def _norm_operators(model: ModelSpec, shape: LayerShape, name: str) -> tuple[Operator, ...]:
    elements = tokens_of(model, shape) * model.hidden / shape.sequence_split
    size, cast = shape.stream_bytes * elements, shape.cast_bytes * elements
    # A second kernel reads input and gradient again for the weight's gradient.
    passes = 3 if shape.fused_elementwise else 5
    return (
        Operator(
            name=f"{name} norm", kind="memory", moved_bytes=2 * size + cast,
            backward_moved_bytes=passes * size + cast, stored_bytes=size,
            kernels=2 if cast else 1,
        ),
    )  # fmt: skip


def _residual_operators(model: ModelSpec, shape: LayerShape, name: str) -> tuple[Operator, ...]:
    elements = tokens_of(model, shape) * model.hidden / shape.sequence_split
    mask = _MASK_BYTES * elements if model.dropout else 0.0
    width, stream = shape.element_bytes, shape.stream_bytes
    # The gradients of both branches are added: beside the norm's backward, or in a kernel.
    added = stream if shape.fused_elementwise else 3 * stream
    return (
        Operator(
            name=f"{name} residual", kind="memory", stored_bytes=mask,
            moved_bytes=(2 * stream + width) * elements + mask,
            backward_moved_bytes=(added + model.dropout * width + shape.cast_bytes) * elements
            + mask,
        ),
    )  # fmt: skip


def _tensor_message(model: ModelSpec, shape: LayerShape, name: str) -> tuple[Operator, ...]:
    if shape.tensor == 1:
        return ()
    size = shape.element_bytes * tokens_of(model, shape) * model.hidden
    return (tensor_message(name, size),)


def tensor_message(name: str, size_bytes: float) -> Operator:
    """Return a message of the tensor group, of whole tokens."""
    return Operator(name=name, kind="message", message="tensor", message_bytes=size_bytes)


def _input_bytes(model: ModelSpec, shape: LayerShape) -> float:
    """Return a column-parallel product's input, stored as the norm's output is split."""
    return shape.element_bytes * tokens_of(model, shape) * model.hidden / shape.sequence_split


def _attention_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    tokens, h, t = tokens_of(model, shape), model.hidden, shape.tensor
    width = model.head_width
    queries = model.num_heads * width / t
    # A key head that fewer ranks share than there are tensor ranks is held by several.
    keys = max(model.kv_heads / t, 1.0) * width
    rotated = not model.learned_positions and model.embeds_tokens
    return (
        Operator(
            name="query, key, value", kind="gemm", m=tokens, n=queries + 2 * keys, k=h,
            after="norm",
            stored_bytes=_input_bytes(model, shape),
        ),
        *(_rotary_operators(tokens, shape, queries=queries, keys=keys) if rotated else ()),
        *_core_operators(model, shape, queries=queries, keys=keys, values=queries),
        Operator(
            name="attention projection", kind="gemm", m=tokens, n=h, k=queries,
            stored_bytes=shape.element_bytes * tokens * queries,
        ),
        *_tensor_message(model, shape, "attention"),
    )  # fmt: skip


def _rotary_operators(
    tokens: float, shape: LayerShape, *, queries: float, keys: float
) -> tuple[Operator, ...]:
    size = shape.element_bytes * tokens * (queries + keys)
    if shape.fused_elementwise:
        return (
            Operator(name="rotary", kind="memory", moved_bytes=2 * size,
                     backward_moved_bytes=2 * size),
        )  # fmt: skip
    # x cos + cat(-x2, x1) sin: 2 passes, 1 for half of it, 2, 2, 3; backward as many. What comes
    # of it is kept beside the product's result, which the values still are part of. Then gradients
    # of the three are joined, and copied into the product's order.
    joined = 4 * shape.element_bytes * tokens * (queries + 2 * keys)
    return (
        Operator(name="rotary", kind="memory", moved_bytes=10 * size, stored_bytes=size,
                 backward_moved_bytes=10 * size + joined, kernels=10),
    )  # fmt: skip


def _core_operators(
    model: ModelSpec, shape: LayerShape, *, queries: float, keys: float, values: float
) -> tuple[Operator, ...]:
    """Return scores, softmax, dropout and weighted values, in one kernel or in several."""
    tokens, heads = tokens_of(model, shape), model.num_heads / shape.tensor
    inputs = shape.element_bytes * tokens * (queries + 2 * keys)
    flops = 2.0 * tokens * model.seq_len * (queries + values) * model.attention_share
    ring = shape.element_bytes * 2 * keys * tokens * shape.context
    context = (
        Operator(name="keys, values", kind="message", message="context", message_bytes=ring),
    ) * (shape.context > 1)
    if shape.fused_attention:
        moved = inputs + shape.element_bytes * tokens * values
        statistics = 4.0 * tokens * heads
        core = Operator(
            name="attention", kind="attention", flops=flops, moved_bytes=moved,
            backward_moved_bytes=2 * moved, stored_bytes=inputs + statistics,
            m=tokens, n=model.seq_len, k=(queries + values) / 2,
            after="latent" if model.latent is not None else "",
        )  # fmt: skip
        return (*context, core)
    scores = heads * tokens * model.seq_len
    width, drop = shape.element_bytes, 1 if model.dropout else 0
    dropped = drop * (2 * width + _MASK_BYTES)
    return (
        *context,
        Operator(
            name="attention", kind="attention", flops=flops, stored_bytes=inputs,
            m=tokens / shape.micro_batch, n=model.seq_len, k=queries / heads,
            batch=heads * shape.micro_batch, kernels=4,
        ),
        # Softmax reads and writes, dropout reads, writes and marks; twice of each is stored.
        Operator(
            name="scores", kind="memory", scores=True, kernels=2 + drop,
            moved_bytes=scores * (2 * width + dropped),
            backward_moved_bytes=scores * (3 * width + dropped),
            stored_bytes=scores * (width + drop * (width + _MASK_BYTES)),
        ),
    )  # fmt: skip


def _latent_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    lat = model.latent
    assert lat is not None, "only called with latent attention"
    tokens, t, h = tokens_of(model, shape), shape.tensor, model.hidden
    heads = model.num_heads / t
    query = heads * (model.head_width + lat.rope_dim)
    down = lat.q_rank + lat.kv_rank + lat.rope_dim
    value = heads * lat.value_dim
    query_in = lat.q_rank or h
    return (
        Operator(
            name="compression", kind="gemm", m=tokens, n=down, k=h, after="norm",
            stored_bytes=_input_bytes(model, shape),
        ),
        Operator(
            name="queries", kind="gemm", m=tokens, n=query, k=query_in, after="expands",
            stored_bytes=shape.element_bytes * tokens * query_in,
        ),
        Operator(
            name="keys, values", kind="gemm", m=tokens, n=heads * model.head_width + value,
            k=lat.kv_rank, after="expands", stored_bytes=shape.element_bytes * tokens * lat.kv_rank,
        ),
        *_core_operators(model, shape, queries=query, keys=(query + value) / 2, values=value),
        Operator(
            name="attention projection", kind="gemm", m=tokens, n=h, k=value,
            stored_bytes=shape.element_bytes * tokens * value,
        ),
        *_tensor_message(model, shape, "attention"),
    )  # fmt: skip


def _mamba_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    """Return projection in, convolution, scan, gate and projection out.

    The fused kernel keeps what comes out of the first projection and the scan's result, and
    computes the convolution again; a tensor group splits heads and groups.
    """
    ssm = model.mamba
    assert ssm is not None, "only called for Mamba layers"
    tokens, t, h = tokens_of(model, shape), shape.tensor, model.hidden
    inner, convolved = ssm.inner / t, ssm.convolved / t
    size = shape.element_bytes * tokens * inner
    steps: tuple[Operator, ...] = ()
    kept = shape.element_bytes * tokens * ssm.projected / t + size
    if ssm.step_rank:
        rank = ssm.step_rank
        steps = (
            Operator(name="mamba step, B, C", kind="gemm", m=tokens, n=rank + 2 * ssm.state,
                     k=inner),
            *((tensor_message("mamba", shape.element_bytes * tokens * (rank + 2 * ssm.state)),)
              if t > 1 else ()),
            Operator(name="mamba step", kind="gemm", m=tokens, n=inner, k=rank,
                     stored_bytes=shape.element_bytes * tokens * (rank + 2 * ssm.state)),
        )  # fmt: skip
        kept += size  # the step sizes
    moved, again = _scan_bytes(ssm, shape.element_bytes)
    return (
        Operator(
            name="mamba in", kind="gemm", m=tokens, n=ssm.projected / t, k=h, after="norm",
            stored_bytes=_input_bytes(model, shape),
        ),
        Operator(
            name="convolution", kind="memory",
            moved_bytes=2 * shape.element_bytes * tokens * convolved,
            backward_moved_bytes=5 * shape.element_bytes * tokens * convolved,
        ),
        *steps,
        Operator(
            name="scan", kind="scan", flops=tokens * ssm.scan_flops / t, vector=ssm.step_rank > 0,
            flops_again=tokens * again / t, moved_bytes=tokens * moved / t,
            backward_moved_bytes=3 * tokens * moved / t, stored_bytes=kept,
            kernels=1 if ssm.step_rank else 5,
        ),
        Operator(name="gate", kind="memory", moved_bytes=3 * size, backward_moved_bytes=6 * size),
        Operator(name="mamba out", kind="gemm", m=tokens, n=h, k=inner, stored_bytes=size),
        *_tensor_message(model, shape, "mamba"),
    )  # fmt: skip


def _scan_bytes(ssm: MambaMixer, width: float) -> tuple[float, float]:
    """Return the bytes that a token's scan moves forward, and FLOPs that its backward repeats.

    Mamba-2 is five kernels: step sizes, states of chunks (32 bits: written, passed on in a read and
    a write, read), C with B of chunks (32 bits), and the result. The first two are repeated.
    """
    if ssm.step_rank:  # x, step, gate, result; B and C
        return width * (4 * ssm.inner + 2 * ssm.state), ssm.scan_flops
    channels, shared = width * ssm.inner, width * ssm.groups * ssm.state
    states = 4 * 4.0 * ssm.state * ssm.inner / ssm.chunk
    moved = 3 * channels + 4 * shared + states + 2 * 4.0 * ssm.groups * ssm.chunk
    return moved, 2.0 * ssm.chunk * ssm.groups * ssm.state + 2.0 * ssm.state * ssm.inner


def _feed_forward(
    model: ModelSpec, shape: LayerShape, *, rows: float, inner: float, name: str, batch: float = 1.0
) -> tuple[Operator, ...]:
    """Return two products and the activation between; the first one's input is not counted."""
    elements = rows * inner * batch
    gates = 2 if model.gated else 1
    passes, backward_passes = _CLAMPED_PASSES if model.clamped else (gates + 1, 2 * gates + 1)
    kept, kernels = gates, 1
    if model.gated and not shape.fused_elementwise:
        # silu (2), product (3); backward: of the product (6) and of silu (3), both joined (4).
        passes, backward_passes = max(passes, 5), max(backward_passes, 13)
        kept, kernels = 3, 2
    return (
        Operator(name=f"{name} up", kind="gemm", m=rows, n=gates * inner, k=model.hidden,
                 batch=batch),
        Operator(
            name=f"{name} activation", kind="memory",
            moved_bytes=passes * shape.element_bytes * elements,
            backward_moved_bytes=backward_passes * shape.element_bytes * elements,
            stored_bytes=kept * shape.element_bytes * elements, kernels=kernels,
        ),
        Operator(
            name=f"{name} down", kind="gemm", m=rows, n=model.hidden, k=inner, batch=batch,
            stored_bytes=shape.element_bytes * elements, after="activation",
        ),
    )  # fmt: skip


def _dense_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    inner = model.ffn_width / shape.tensor
    tokens = tokens_of(model, shape)
    up, *rest = _feed_forward(model, shape, rows=tokens, inner=inner, name="feed-forward")
    return (
        dataclasses.replace(up, stored_bytes=_input_bytes(model, shape), after="norm"),
        *rest,
        *_tensor_message(model, shape, "feed-forward"),
    )


def _storing(operator: Operator, stored_bytes: float, **changed: float) -> Operator:
    return dataclasses.replace(operator, stored_bytes=stored_bytes, **changed)  # type: ignore[arg-type]


def _expert_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    """Return router, exchange of tokens, experts on even loads, exchange back."""
    moe = model.experts
    assert moe is not None, "only called for expert layers"
    tokens, t = tokens_of(model, shape), shape.tensor
    busy = shape.imbalance if shape.expert > 1 else 1.0  # the group waits for its fullest rank
    visits = busy * tokens * moe.top_k / (t if shape.sequence_parallel else 1)
    visit_bytes = shape.element_bytes * visits * model.hidden
    local = moe.num_experts / shape.expert
    # The whole expert group's tokens meet this rank's experts. Either t ranks split each expert and
    # have all tokens, or each has its own experts and its share of the tokens.
    inner_split = t if shape.expert_tensor is None else shape.expert_tensor
    rows = busy * tokens * moe.top_k * shape.expert / moe.num_experts / (t / inner_split)
    exchange = (
        Operator(
            name="exchange",
            kind="message",
            message="expert",
            message_bytes=visit_bytes,
            experts=moe,
        ),
    ) * (shape.expert > 1)
    # Tokens are sorted by rank before the exchange, and by expert after it where there are several.
    sorts = 2 if shape.expert > 1 and local > 1 else 1
    moves = Operator(
        name="permutation", kind="memory", kernels=3 * sorts,
        moved_bytes=2 * sorts * shape.expert_passes * visit_bytes,
        backward_moved_bytes=2 * sorts * shape.expert_passes * visit_bytes,
    )  # fmt: skip
    up, *rest = _feed_forward(
        model, shape, rows=rows, inner=moe.expert_ffn / inner_split, name="experts", batch=local
    )
    up = dataclasses.replace(up, grouped=True)
    rest = [dataclasses.replace(op, grouped=op.kind == "gemm") for op in rest]
    shared: tuple[Operator, ...] = ()
    if moe.shared_ffn:
        inner = moe.shared_ffn / t
        shared = _feed_forward(model, shape, rows=tokens, inner=inner, name="shared expert")
        if inner_split < t:
            shared = (*shared, *_tensor_message(model, shape, "shared expert"))
    gathered = _visit_message(model, shape, busy * moe.top_k) if inner_split == t else ()
    # Narrow products want rows in multiples of their scales' blocks: each expert's are copied into
    # such a place, and back out of it.
    copied = 2 * shape.element_bytes * rows * local * model.hidden
    padding = (
        Operator(name="padding", kind="memory", moved_bytes=copied, backward_moved_bytes=copied),
    ) * shape.pads_experts
    return (
        Operator(
            name="router", kind="gemm", m=tokens / shape.sequence_split, n=moe.num_experts,
            k=model.hidden, stored_bytes=_input_bytes(model, shape), kernels=6,
        ),
        moves, *exchange, *gathered,
        *padding, _storing(up, shape.element_bytes * rows * local * model.hidden), *rest, *padding,
        *exchange, moves, *shared,
    )  # fmt: skip


def _visit_message(model: ModelSpec, shape: LayerShape, visits: float) -> tuple[Operator, ...]:
    """Return the gather of tokens by tensor ranks: each as often as it visits an expert."""
    return tuple(
        _storing(op, 0.0, message_bytes=op.message_bytes * visits)
        for op in _tensor_message(model, shape, "experts")
    )


def _convolution_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    """Return a mean residual block: each stage's products, weighted by its share of the blocks."""
    ops: list[Operator] = []
    for stage in model.stages:
        share = stage.blocks / model.num_layers
        pixels = shape.micro_batch * stage.size**2
        for name, n, k in (
            ("reduce", stage.width, stage.outputs),
            ("convolution", stage.width, 9 * stage.width),
            ("expand", stage.outputs, stage.width),
        ):
            size = shape.element_bytes * pixels * n * share
            ops.append(Operator(name=name, kind="gemm", m=pixels, n=n, k=k, batch=share,
                                stored_bytes=shape.element_bytes * pixels * k * share / (
                                    9 if name == "convolution" else 1)))  # fmt: skip
            ops.append(Operator(name=f"{name} norm", kind="memory", moved_bytes=4 * size,
                                backward_moved_bytes=6 * size, stored_bytes=size))  # fmt: skip
    return tuple(ops)


def head_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    """Return last norm, head and loss, with the vocabulary split over the tensor group."""
    tokens = tokens_of(model, shape) if model.embeds_tokens else float(shape.micro_batch)
    columns = model.vocab / shape.tensor
    logits = 4.0 * tokens * columns
    return (
        *_norm_operators(model, shape, "last"),
        Operator(
            name="head", kind="gemm", m=tokens, n=columns, k=model.hidden,
            stored_bytes=_input_bytes(model, shape),
        ),
        # Logits widened to 32 bits (6 bytes), largest (4), difference (8), exponentials (8), sum
        # (4); backward: the softmax's gradient (8), its scaling (8), narrowed again (6).
        Operator(
            name="loss", kind="memory", moved_bytes=7.5 * logits, backward_moved_bytes=5.5 * logits,
            stored_bytes=logits, kernels=6,
        ),
        *_tensor_message(model, shape, "head"),
    )  # fmt: skip
