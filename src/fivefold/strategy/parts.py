"""Parts of a model: experts, latent attention, state space layers, other blocks, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fivefold.errors import ConfigurationError, require_one_of, require_whole

_LARGEST = 10**8  # of any size: products of two still are numbers of 64 bits


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """The expert part of a model.

    Args:
        num_experts: Routed experts in a layer.
        top_k: Experts that each token visits.
        expert_ffn: Inner width of one routed expert.
        shared_ffn: Inner width of the experts that every token visits, in sum; 0 for none.
        dense_layers: Leading layers that keep a dense feed-forward part.
        groups: Groups into which experts are divided for routing.
        top_groups: Groups that the experts of one token come from; None: any.
        every: One layer in ``every`` has experts, of those that are not leading.
        latent: Width at which the routed experts work: a token is projected to it before they are
            visited, and back behind them; 0: the width of the residual stream.
        biases: Routed experts' products have biases.

    Raises:
        ConfigurationError: A count is not positive, or ``top_k`` is more than the experts.
    """

    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    groups: int = 1
    top_groups: int | None = None
    latent: int = 0
    biases: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "top_k", "expert_ffn", "every", "groups")
        if self.top_groups is not None:
            check_positive(self, "top_groups")
        check_not_negative(self, "shared_ffn", "dense_layers", "latent")
        if self.top_k > self.num_experts:
            message = f"top_k={self.top_k} is more than num_experts={self.num_experts}"
            raise ConfigurationError(message, hint="each token visits at most every expert once")

    def places_of_token(self, places: float) -> float:
        """Return on how many nodes, or ranks, the experts of one token lie, spread evenly.

        N (1 - (1 - 1/N)^k) for k experts on N nodes, and no more than the routing's groups reach.
        """
        reached = places * (1.0 - (1.0 - 1.0 / places) ** self.top_k)
        if self.top_groups is not None:
            reached = min(reached, max(places * self.top_groups / self.groups, 1.0))
        return reached


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values from one compressed vector per token.

    Args:
        q_rank: Width of the compressed query; 0 where queries are not compressed.
        kv_rank: Width of the compressed keys and values.
        rope_dim: Width of the rotary part of a head's key, shared by all heads.
        value_dim: Width of a head's value; the query's non-rotary part is the model's head_dim.

    References:
        DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        check_positive(self, "kv_rank", "rope_dim", "value_dim")
        check_not_negative(self, "q_rank")


@dataclass(frozen=True, kw_only=True)
class MambaMixer:
    """A state space layer in the place of attention.

    Args:
        state: Width of a head's state (N).
        heads: Heads; in the first Mamba every channel is one.
        head_dim: Width of a head (P); 1 in the first Mamba.
        groups: Groups of heads that share the state's input and output matrices B and C.
        kernel: Taps of the convolution before the scan.
        chunk: Tokens of a chunk (Q), inside which the scan is products of matrices.
        step_rank: Rank of the step size's projection in the first Mamba, whose scan goes token by
            token; 0 is Mamba-2.
        biases: The convolution has a bias.

    Raises:
        ConfigurationError: A size is not positive, or heads do not divide into groups.

    References:
        Gu and Dao, arXiv 2312.00752 (Mamba); Dao and Gu, arXiv 2405.21060 (Mamba-2), section 6.
    """

    state: int
    heads: int
    head_dim: int = 1
    groups: int = 1
    kernel: int = 4
    chunk: int = 256
    step_rank: int = 0
    biases: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "state", "heads", "head_dim", "groups", "kernel", "chunk")
        check_not_negative(self, "step_rank")
        if self.heads % self.groups:
            message = f"groups={self.groups} does not divide heads={self.heads} of the Mamba layers"
            raise ConfigurationError(message, hint="every group serves as many heads")

    @property
    def inner(self) -> int:
        """Return the channels of the scan."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Return the channels of the convolution: the scan's, and in Mamba-2 those of B and C."""
        return self.inner + (0 if self.step_rank else 2 * self.groups * self.state)

    @property
    def projected(self) -> int:
        """Return the columns of the projection into the layer."""
        return self.inner + self.convolved + (0 if self.step_rank else self.heads)

    @property
    def vector_parameters(self) -> int:
        """Return the parameters that no product has: convolution, decay, skip, step and norms."""
        convolution = self.convolved * (self.kernel + self.biases)
        if self.step_rank:
            return convolution + self.inner * (self.state + 1)
        return convolution + 3 * self.heads + self.inner

    @property
    def scan_flops(self) -> float:
        """Return the FLOPs of the scan's forward for a token.

        Mamba-2 in chunks of Q tokens: 2 Q N for every group (C with B) and, for every channel, 2 Q
        inside the chunk, 2 N into its state and 2 N out of it. Mamba: 9 N for every channel.
        """
        if self.step_rank:
            return 9.0 * self.state * self.inner
        inside = 2.0 * self.chunk * (self.groups * self.state + self.inner)
        return inside + 4.0 * self.state * self.inner


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of queries with keys, and their weighted values.

    Args:
        heads: Heads of the queries.
        kv_heads: Heads of keys and values.
        width: Width of a head's query and key.
        value_width: Width of a head's value.
        window: Tokens that a token looks back to; 0: all.
        chosen: Tokens that a token's indexer chooses; 0: all.
        every: Tokens that one key stands for.
        index_columns: Columns of the indexer's queries, all heads: their scores with its one key of
            every token come first.
    """

    heads: int
    kv_heads: int
    width: int
    value_width: int
    window: int = 0
    chosen: int = 0
    every: int = 1
    index_columns: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "heads", "kv_heads", "width", "value_width", "every")
        check_not_negative(self, "window", "chosen", "index_columns")

    def share(self, seq_len: int, *, causal: bool) -> float:
        """Return the share of a sequence's scores that is computed, causal mask apart."""
        share = 1.0 / self.every
        for tokens in (self.window, self.chosen):
            if tokens:
                share = min(share, tokens / seq_len * (2 if causal else 1))
        return share

    def flops(self, seq_len: int, *, causal: bool) -> float:
        """Return the FLOPs of a token, scores of the indexer included."""
        of_heads = self.heads * (self.width + self.value_width)
        indexed = 2.0 * self.index_columns / self.every
        return seq_len * (2.0 * of_heads * self.share(seq_len, causal=causal) + indexed)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a layer that is none of the four usual ones: its products and what lies between.

    Args:
        letter: What stands for it in ``pattern``: one small letter.
        name: For people, such as "gated delta net".
        matrices: Products, those that read the residual stream first and those that write it last.
        scores: Attention between them, one for each kind.
        scan_flops: FLOPs of a token in a recurrence between them.

    References:
        Yang et al., arXiv 2412.06464 (gated delta net).
    """

    letter: str
    name: str
    matrices: tuple[WeightMatrix, ...]
    scores: tuple[Scores, ...] = ()
    scan_flops: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrices", tuple(self.matrices))
        object.__setattr__(self, "scores", tuple(self.scores))
        if len(self.letter) != 1 or not self.letter.islower():
            message = f"letter={self.letter!r} of block {self.name!r} is no small letter"
            raise ConfigurationError(message, hint="letters a to z are free; M, E, * and - are not")
        if not self.matrices:
            raise ConfigurationError(f"block {self.name!r} has no products", hint="give matrices")

    def flops(self, seq_len: int, *, causal: bool) -> float:
        """Return the FLOPs of a token between the products."""
        scores = (one.flops(seq_len, causal=causal) for one in self.scores)
        return self.scan_flops + sum(scores)


MODULES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj",
    "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj", "out_proj", "x_proj", "dt_proj",
)  # fmt: skip
"""Names of the matrices of a layer, as Hugging Face's models and PEFT have them."""

BASE_BYTES = {"bf16": 2.0, "int8": 1.0, "nf4": 0.5 + 0.127 / 8}
"""Bytes of a frozen weight; NF4's scales of 64 weights are 8 bits, and 32 for 256 of those."""


@dataclass(frozen=True, kw_only=True)
class LowRankAdapters:
    """Adapters that are trained beside frozen weights (LoRA, QLoRA).

    An adapted matrix W of n x m keeps W and learns A of r x m and B of n x r: y = W x + B A x.

    Args:
        rank: Columns of B and rows of A (r).
        modules: Names out of ``MODULES`` of the matrices that are adapted; the experts' are each
            expert's own. Empty: all that the model's layers have.
        base: How the matrices of the layers are kept: "bf16", or "int8" or "nf4", which are widened
            for every product. Embedding, head and norms stay in 16 bits.

    Raises:
        ConfigurationError: A value is not allowed.

    References:
        Hu et al., arXiv 2106.09685; Dettmers et al., arXiv 2305.14314 (QLoRA).
    """

    rank: int
    modules: tuple[str, ...] = ()
    base: Literal["bf16", "int8", "nf4"] = "bf16"

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        object.__setattr__(self, "modules", tuple(self.modules))
        for name in self.modules:
            require_one_of(name, MODULES, f"modules of the adapters has {name!r}")
        require_one_of(self.base, BASE_BYTES, f"base={self.base!r} of the adapters is unknown")


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix of a layer: what it is of, its size, and how a tensor group splits it."""

    module: str
    inputs: int
    outputs: int
    split: Literal["columns", "rows", "none"]
    count: int = 1

    @property
    def size(self) -> int:
        """Return the parameters of all copies."""
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class ConvolutionStage:
    """Equal bottleneck blocks of a residual network (1x1, 3x3, 1x1 convolutions)."""

    blocks: int
    width: int
    outputs: int
    inputs: int
    size: int

    def __post_init__(self) -> None:
        check_positive(self, "blocks", "width", "outputs", "inputs", "size")


def check_positive(spec: object, *names: str) -> None:
    """Refuse counts below 1."""
    for name in names:
        require_whole(name, getattr(spec, name), most=_LARGEST)


def check_not_negative(spec: object, *names: str) -> None:
    """Refuse counts below 0."""
    for name in names:
        require_whole(name, getattr(spec, name), least=0)
