"""The operators of one layer as one GPU of a plan runs them: products, attention, bytes, messages.

Every cost and every stored byte of a layer is a sum over these operators, so that the model of
time and that of memory cannot disagree about what is computed. Sizes follow Megatron-LM's tensor
and sequence parallelism (Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.strategy.cluster import DeviceSpec, element_bytes
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import Block, MambaMixer, MixtureOfExperts, Scores, WeightMatrix

ELEMENT_BYTES = 2.0
"""Width of activations and parameters in a step of 16 bits or fewer; of 32 bits it is 4."""
WIDE_BYTES = 4.0
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Types of products whose inputs are cast from 16 bits."""
_MASK_BYTES = 1.0
# A clamped gate is ten kernels, most in 32 bits, as PyTorch runs the activation of GPT-OSS.
_CLAMPED_PASSES = (40, 80)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The share of a layer that one GPU works on: all that its cost depends on, but the model."""

    device: DeviceSpec
    micro_batch: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = False
    regather: bool = True
    recompute: str = "none"
    tensor_overlap: str = "none"
    dtype: str = "bf16"
    shared_overlap: bool = False
    data_stride: int = 0
    ranks: int = 1

    @functools.cached_property
    def element_bytes(self) -> float:
        """Return the width of activations and messages."""
        return element_bytes(self.dtype)

    @functools.cached_property
    def stream_bytes(self) -> float:
        """Return the width of the stream between blocks."""
        return WIDE_BYTES if self.device.autocast else self.element_bytes

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

    ``part`` and ``module`` say which matrix a product of a block of its own computes with;
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
    part: str = ""
    module: str = ""

    def copies(self, places: float) -> float:
        """Return a token's copies when each node or rank gets one, over its experts."""
        assert self.experts is not None, "only messages between experts are asked"
        return min(self.experts.places_of_token(places) / self.experts.top_k, 1.0)


def layer_operators(model: ModelSpec, shape: LayerShape, kind: str = "*-") -> tuple[Operator, ...]:
    """Return the forward operators of one layer of a kind, such as ``"*-"``, on one GPU."""
    return _Share(model, shape).layer(kind)


def head_operators(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    """Return last norm, head and loss, with the vocabulary split over the tensor group."""
    return _Share(model, shape).head()


def tokens_of(model: ModelSpec, shape: LayerShape) -> float:
    """Return the tokens of a micro-batch that one GPU of a context group holds."""
    return shape.micro_batch * model.seq_len / shape.context


def tensor_message(name: str, size_bytes: float) -> Operator:
    """Return a message of the tensor group, of whole tokens."""
    return Operator(name=name, kind="message", message="tensor", message_bytes=size_bytes)


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


def _split(matrix: WeightMatrix, tensor: int) -> int:
    return 1 if matrix.split == "none" else tensor


def _gemm(
    name: str, m: float, n: float, k: float, stored_bytes: float = 0.0, **more: Any
) -> Operator:
    return Operator(name=name, kind="gemm", m=m, n=n, k=k, stored_bytes=stored_bytes, **more)


def _moving(name: str, moved: float, backward: float, **more: Any) -> Operator:
    return Operator(
        name=name, kind="memory", moved_bytes=moved, backward_moved_bytes=backward, **more
    )


@dataclass(frozen=True)
class _Core:
    """One GPU's heads, the columns of their queries, keys and values, and the scores computed."""

    heads: float
    queries: float
    keys: float
    values: float
    share: float
    latent: bool = False


class _Share:
    """One GPU's share of a model; ``width`` is of an element, ``stream`` between blocks."""

    def __init__(self, model: ModelSpec, shape: LayerShape) -> None:
        self.model, self.shape, self.device = model, shape, shape.device
        self.width, self.stream = shape.element_bytes, shape.stream_bytes
        self.tokens = tokens_of(model, shape)
        self.normed = self.tokens * model.hidden / shape.sequence_split
        # A column-parallel product's input is stored as the norm's output is split.
        self.input_bytes = self.width * self.normed

    def layer(self, kind: str) -> tuple[Operator, ...]:
        """Return the operators of one layer."""
        if self.model.stages:
            return tuple(self._convolutions())
        attention = self._latent if self.model.latent is not None else self._attention
        blocks = {
            "*": ("attention", attention), "M": ("mamba", self._mamba),
            "-": ("feed-forward", self._dense), "E": ("feed-forward", self._experts),
        }  # fmt: skip
        for letter, block in self.model.other.items():
            blocks[letter] = block.name, functools.partial(self._block, block)
        return tuple(
            op
            for name, operators in map(blocks.__getitem__, kind)
            for op in (self._norm(name), *operators(), self._residual(name))
        )

    def head(self) -> tuple[Operator, ...]:
        """Return last norm, head and loss, with the vocabulary split over the tensor group."""
        model, shape = self.model, self.shape
        tokens = self.tokens if model.embeds_tokens else float(shape.micro_batch)
        columns = model.vocab / shape.tensor
        logits = 4.0 * tokens * columns
        return (
            self._norm("last"),
            _gemm("head", tokens, columns, model.hidden, self.input_bytes),
            # Logits widened to 32 bits (6 bytes), largest (4), difference (8), exponentials (8),
            # sum (4); backward: the softmax's gradient (8), its scaling (8), narrowed again (6).
            _moving("loss", 7.5 * logits, 5.5 * logits, stored_bytes=logits, kernels=6),
            *self._tensor_message("head"),
        )

    def _tensor_message(self, name: str, visits: float = 1.0) -> tuple[Operator, ...]:
        """Return the message of whole tokens, each as often as it visits something."""
        if self.shape.tensor == 1:
            return ()
        return (tensor_message(name, self.width * self.tokens * self.model.hidden * visits),)

    def _norm(self, name: str) -> Operator:
        size, cast = self.stream * self.normed, self.shape.cast_bytes * self.normed
        # A second kernel reads input and gradient again for the weight's gradient.
        passes = 3 if self.device.fused_elementwise else 5
        return _moving(
            f"{name} norm", 2 * size + cast, passes * size + cast, stored_bytes=size,
            kernels=2 if cast else 1,
        )  # fmt: skip

    def _residual(self, name: str) -> Operator:
        drop, stream = self.model.dropout, self.stream
        mask = _MASK_BYTES * self.normed if drop else 0.0
        # The gradients of both branches are added: beside the norm's backward, or in a kernel.
        added = stream if self.device.fused_elementwise else 3 * stream
        backward = (added + drop * self.width + self.shape.cast_bytes) * self.normed + mask
        moved = (2 * stream + self.width) * self.normed + mask
        return _moving(f"{name} residual", moved, backward, stored_bytes=mask)

    def _attention(self) -> tuple[Operator, ...]:
        model, tokens, h, t = self.model, self.tokens, self.model.hidden, self.shape.tensor
        queries = model.num_heads * model.head_width / t
        # A key head that fewer ranks share than there are tensor ranks is held by several.
        keys = max(model.kv_heads / t, 1.0) * model.head_width
        rotated = not model.learned_positions and model.embeds_tokens
        return (
            _gemm("query, key, value", tokens, queries + 2 * keys, h, self.input_bytes,
                  after="norm"),
            *((self._rotary(queries, keys),) if rotated else ()),
            *self._core(self._scores(queries=queries, keys=keys, values=queries)),
            _gemm("attention projection", tokens, h, queries, self.width * tokens * queries),
            *self._tensor_message("attention"),
        )  # fmt: skip

    def _rotary(self, queries: float, keys: float) -> Operator:
        size = self.width * self.tokens * (queries + keys)
        if self.device.fused_elementwise:
            return _moving("rotary", 2 * size, 2 * size)
        # x cos + cat(-x2, x1) sin: 2 passes, 1 for half of it, 2, 2, 3; backward as many. What
        # comes of it is kept beside the product's result, which the values still are part of. Then
        # gradients of the three are joined, and copied into the product's order.
        joined = 4 * self.width * self.tokens * (queries + 2 * keys)
        return _moving("rotary", 10 * size, 10 * size + joined, stored_bytes=size, kernels=10)

    def _scores(self, *, queries: float, keys: float, values: float) -> _Core:
        heads = self.model.num_heads / self.shape.tensor
        return _Core(heads, queries, keys, values, self.model.attention_share)

    def _core(self, one: _Core) -> tuple[Operator, ...]:
        """Return scores, softmax, dropout and weighted values, in one kernel or in several."""
        model, shape, tokens, width = self.model, self.shape, self.tokens, self.width
        queries, keys, values, heads = one.queries, one.keys, one.values, one.heads
        length = model.seq_len
        inputs = width * tokens * (queries + 2 * keys)
        flops = 2.0 * tokens * length * (queries + values) * one.share
        ring = width * 2 * keys * tokens * shape.context
        context = (
            Operator(name="keys, values", kind="message", message="context", message_bytes=ring),
        ) * (shape.context > 1)
        if self.device.fused_attention:
            moved = inputs + width * tokens * values
            core = Operator(
                name="attention", kind="attention", flops=flops, moved_bytes=moved,
                backward_moved_bytes=2 * moved, stored_bytes=inputs + 4.0 * tokens * heads,
                m=tokens, n=length, k=(queries + values) / 2,
                after="latent" if one.latent else "",
            )  # fmt: skip
            return (*context, core)
        scores, drop = heads * tokens * length, 1 if model.dropout else 0
        dropped = drop * (2 * width + _MASK_BYTES)
        return (
            *context,
            Operator(
                name="attention", kind="attention", flops=flops, stored_bytes=inputs,
                m=tokens / shape.micro_batch, n=length, k=queries / heads,
                batch=heads * shape.micro_batch, kernels=4,
            ),
            # Softmax reads and writes, dropout reads, writes and marks; twice of each is stored.
            _moving(
                "scores", scores * (2 * width + dropped), scores * (3 * width + dropped),
                scores=True, kernels=2 + drop,
                stored_bytes=scores * (width + drop * (width + _MASK_BYTES)),
            ),
        )  # fmt: skip

    def _latent(self) -> tuple[Operator, ...]:
        lat, model, tokens, h = self.model.latent, self.model, self.tokens, self.model.hidden
        assert lat is not None, "only called with latent attention"
        heads = model.num_heads / self.shape.tensor
        query = heads * (model.head_width + lat.rope_dim)
        value = heads * lat.value_dim
        query_in, size = lat.q_rank or h, self.width * tokens
        return (
            _gemm("compression", tokens, lat.q_rank + lat.kv_rank + lat.rope_dim, h,
                  self.input_bytes, after="norm"),
            _gemm("queries", tokens, query, query_in, size * query_in, after="expands"),
            _gemm("keys, values", tokens, heads * model.head_width + value, lat.kv_rank,
                  size * lat.kv_rank, after="expands"),
            *self._core(
                dataclasses.replace(
                    self._scores(queries=query, keys=(query + value) / 2, values=value),
                    latent=True,
                )
            ),
            _gemm("attention projection", tokens, h, value, size * value),
            *self._tensor_message("attention"),
        )  # fmt: skip

    def _mamba(self) -> tuple[Operator, ...]:
        """Return projection in, convolution, scan, gate and projection out.

        The fused kernel keeps what comes out of the first projection and the scan's result, and
        computes the convolution again; a tensor group splits heads and groups.
        """
        ssm, tokens, t, h = self.model.mamba, self.tokens, self.shape.tensor, self.model.hidden
        assert ssm is not None, "only called for Mamba layers"
        inner, convolved = ssm.inner / t, self.width * tokens * ssm.convolved / t
        size = self.width * tokens * inner
        steps: tuple[Operator, ...] = ()
        kept = self.width * tokens * ssm.projected / t + size
        if rank := ssm.step_rank:
            steps_bytes = self.width * tokens * (rank + 2 * ssm.state)
            steps = (
                _gemm("mamba step, B, C", tokens, rank + 2 * ssm.state, inner),
                *((tensor_message("mamba", steps_bytes),) if t > 1 else ()),
                _gemm("mamba step", tokens, inner, rank, steps_bytes),
            )
            kept += size  # the step sizes
        moved, again = _scan_bytes(ssm, self.width)
        return (
            _gemm("mamba in", tokens, ssm.projected / t, h, self.input_bytes, after="norm"),
            _moving("convolution", 2 * convolved, 5 * convolved),
            *steps,
            Operator(
                name="scan", kind="scan", flops=tokens * ssm.scan_flops / t,
                vector=ssm.step_rank > 0, flops_again=tokens * again / t,
                moved_bytes=tokens * moved / t, backward_moved_bytes=3 * tokens * moved / t,
                stored_bytes=kept, kernels=1 if ssm.step_rank else 5,
            ),
            _moving("gate", 3 * size, 6 * size),
            _gemm("mamba out", tokens, h, inner, size),
            *self._tensor_message("mamba"),
        )  # fmt: skip

    def _block(self, block: Block) -> tuple[Operator, ...]:
        """Return the products of a block, and between them scores, a recurrence, an activation."""
        tokens, t = self.tokens, self.shape.tensor
        first = [m for m in block.matrices if m.split != "rows"]
        last = [m for m in block.matrices if m.split == "rows"]
        made = self.width * tokens * sum(m.count * m.outputs / _split(m, t) for m in first)
        between: list[Operator] = []
        for scores in block.scores:
            between += self._of_scores(scores)
        if block.scan_flops:
            # Chunks as in Mamba-2: what comes out of the products is kept, and read twice.
            flops = tokens * block.scan_flops / t
            between.append(
                Operator(
                    name=f"{block.name} scan",
                    kind="scan",
                    flops=flops,
                    flops_again=flops,
                    moved_bytes=2 * made,
                    backward_moved_bytes=6 * made,
                    stored_bytes=made,
                    kernels=5,
                )
            )
        if not between:
            between = [_moving(f"{block.name} activation", 1.5 * made, 2.5 * made,
                               stored_bytes=made)]  # fmt: skip
        message = self._tensor_message(block.name) if last else ()
        ins = [self._matrix(block, m, kept=place == 0) for place, m in enumerate(first)]
        return (*ins, *between, *(self._matrix(block, m) for m in last), *message)

    def _matrix(self, block: Block, matrix: WeightMatrix, *, kept: bool = True) -> Operator:
        """Return a product of a block; products of the residual stream share what they keep."""
        split, rows = _split(matrix, self.shape.tensor), matrix.split == "rows"
        inputs = matrix.inputs / (split if rows else 1)
        outputs = matrix.outputs / (1 if rows else split)
        stored = self.width * self.tokens * inputs * matrix.count
        if not rows and matrix.inputs == self.model.hidden:
            stored = self.input_bytes if kept else 0.0
        return _gemm(
            f"{block.name} {matrix.module}", self.tokens, outputs, inputs, stored,
            batch=matrix.count, part=block.letter, module=matrix.module,
        )  # fmt: skip

    def _of_scores(self, scores: Scores) -> tuple[Operator, ...]:
        model, t = self.model, self.shape.tensor
        queries, values = scores.heads * scores.width / t, scores.heads * scores.value_width / t
        each = max(scores.kv_heads / t, 1.0) / scores.every
        keys = each * (scores.width + scores.value_width) / 2
        share = scores.share(model.seq_len, causal=model.causal)
        core = self._core(_Core(scores.heads / t, queries, keys, values, share))
        if not scores.index_columns:
            return core
        # Every rank of a tensor group chooses for its heads, by all of the indexer's.
        columns = float(scores.index_columns)
        flops = 2.0 * self.tokens * model.seq_len * columns / scores.every
        size = self.width * self.tokens * columns
        indexer = Operator(
            name="indexer", kind="attention", flops=flops, moved_bytes=size, stored_bytes=size,
            backward_moved_bytes=2 * size, m=self.tokens, n=model.seq_len, k=columns,
        )  # fmt: skip
        return (indexer, *core)

    def _feed_forward(
        self, name: str, *, rows: float, inner: float, stored: float = 0.0, batch: float = 1.0,
        width: int = 0, fused: bool = False, **more: Any,
    ) -> tuple[Operator, ...]:  # fmt: skip
        """Return two products and the activation between; ``stored`` of the first one's input.

        A ``fused`` activation reads and writes nothing that the products do not.
        """
        model, size = self.model, self.width * rows * inner * batch
        gates = kept = 2 if model.gated else 1
        passes, back = _CLAMPED_PASSES if model.clamped else (gates + 1, 2 * gates + 1)
        kernels = 1
        if model.gated and not self.device.fused_elementwise:
            # silu (2), product (3); backward: of the product (6) and of silu (3), both joined (4).
            passes, back = max(passes, 5), max(back, 13)
            kept, kernels = 3, 2
        if fused:
            passes, back, kernels = 0, 0, 0
        after = more.pop("after", "")
        return (
            _gemm(f"{name} up", rows, gates * inner, width or model.hidden, stored, batch=batch,
                  after=after, **more),
            _moving(f"{name} activation", passes * size, back * size, stored_bytes=kept * size,
                    kernels=kernels),
            _gemm(f"{name} down", rows, width or model.hidden, inner, size, batch=batch,
                  after="activation", **more),
        )  # fmt: skip

    def _dense(self) -> tuple[Operator, ...]:
        inner, stored = self.model.ffn_width / self.shape.tensor, self.input_bytes
        return (
            *self._feed_forward(
                "feed-forward", rows=self.tokens, inner=inner, stored=stored, after="norm"
            ),
            *self._tensor_message("feed-forward"),
        )

    def _experts(self) -> tuple[Operator, ...]:
        """Return router, exchange of tokens, experts on even loads, exchange back."""
        moe, shape, device = self.model.experts, self.shape, self.device
        assert moe is not None, "only called for expert layers"
        tokens, t, h = self.tokens, shape.tensor, self.model.hidden
        # The group waits for its fullest rank.
        visits = (device.expert_imbalance if shape.expert > 1 else 1.0) * tokens * moe.top_k
        each = moe.latent or h
        sent = self.width * visits / shape.sequence_split * each
        local = moe.num_experts / shape.expert
        # The whole expert group's tokens meet this rank's experts. Either t ranks split each expert
        # and have all tokens, or each has its own experts and its share of the tokens.
        split = t if shape.expert_tensor is None else shape.expert_tensor
        rows = visits * shape.expert / moe.num_experts / (t / split)
        exchange = (
            Operator(name="exchange", kind="message", message="expert", message_bytes=sent,
                     experts=moe),
        ) * (shape.expert > 1)  # fmt: skip
        # Tokens are sorted by rank before the exchange, and where there are several experts by
        # expert after it.
        sorts = 2 if shape.expert > 1 and local > 1 else 1
        sorted_bytes = 2 * sorts * device.expert_passes * sent
        moves = _moving("permutation", sorted_bytes, sorted_bytes, kernels=3 * sorts)
        shared: tuple[Operator, ...] = ()
        if moe.shared_ffn:
            shared = self._feed_forward("shared expert", rows=tokens, inner=moe.shared_ffn / t)
            shared += self._tensor_message("shared expert") if split < t else ()
        gathered = self._tensor_message("experts", visits / tokens * each / h) if split == t else ()
        to, back = self._latent_products(each)
        # Narrow products want rows in multiples of their scales' blocks: each expert's are copied
        # into such a place, and back out of it.
        entered = self.width * rows * local * each
        fused = shape.dtype in device.fused_experts.split()
        pads = device.dropless and shape.dtype in NARROW and not fused
        padding = (_moving("padding", 2 * entered, 2 * entered),) * pads
        return (
            _gemm("router", tokens / shape.sequence_split, moe.num_experts, h, self.input_bytes,
                  kernels=6),
            *to, moves, *exchange, *gathered, *padding,
            *self._feed_forward("experts", rows=rows, inner=moe.expert_ffn / split, stored=entered,
                                batch=local, width=each, grouped=True, fused=fused),
            *padding, *exchange, moves, *back, *shared,
        )  # fmt: skip

    def _latent_products(self, width: int) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
        """Return the products to the experts' width and back, where theirs is another."""
        tokens, h = self.tokens / self.shape.sequence_split, self.model.hidden
        if not self.model.matrices("latents"):
            return (), ()
        to = _gemm("latent in", tokens, width, h)
        return (to,), (_gemm("latent out", tokens, h, width, self.width * tokens * width),)

    def _convolutions(self) -> Iterator[Operator]:
        """Yield a mean residual block: each stage's products, by its share of the blocks."""
        for stage in self.model.stages:
            share = stage.blocks / self.model.num_layers
            pixels = self.shape.micro_batch * stage.size**2
            for name, n, k, taps in (
                ("reduce", stage.width, stage.outputs, 1),
                ("convolution", stage.width, 9 * stage.width, 9),
                ("expand", stage.outputs, stage.width, 1),
            ):
                size = self.width * pixels * n * share
                read = self.width * pixels * k * share / taps
                yield _gemm(name, pixels, n, k, read, batch=share)
                yield _moving(f"{name} norm", 4 * size, 6 * size, stored_bytes=size)
