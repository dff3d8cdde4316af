"""What is trained: the shape of a model, from which every operator's cost follows.

One class for all transformers (GPT, Llama, mixtures of experts, multi-head latent attention,
vision transformers) and one for residual convolution networks. This module counts parameters and
FLOPs of the whole model; operators of one shard are in ``_operators``. It knows no device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fivefold.errors import ConfigurationError

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

    def __post_init__(self) -> None:
        _positive(self, "num_experts", "top_k", "expert_ffn", "every", "groups")
        if self.top_groups is not None:
            _positive(self, "top_groups")
        _not_negative(self, "shared_ffn", "dense_layers")
        if self.top_k > self.num_experts:
            message = f"top_k={self.top_k} is more than num_experts={self.num_experts}"
            raise ConfigurationError(message, hint="each token visits at most every expert once")

    def nodes_of_token(self, nodes: float) -> float:
        """Mean number of ``nodes`` that the experts of one token lie on, spread evenly.

        N (1 - (1 - 1/N)^k) for k experts on N nodes, and no more than the routing's groups reach.
        """
        reached = nodes * (1.0 - (1.0 - 1.0 / nodes) ** self.top_k)
        if self.top_groups is not None:
            reached = min(reached, max(nodes * self.top_groups / self.groups, 1.0))
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
        _positive(self, "kv_rank", "rope_dim", "value_dim")
        _not_negative(self, "q_rank")


@dataclass(frozen=True, kw_only=True)
class ConvolutionStage:
    """Equal bottleneck blocks of a residual network (1x1, 3x3, 1x1 convolutions)."""

    blocks: int
    width: int
    outputs: int
    inputs: int
    size: int

    def __post_init__(self) -> None:
        _positive(self, "blocks", "width", "outputs", "inputs", "size")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a model.

    Args:
        name: For people.
        num_layers: Transformer layers, or residual blocks.
        hidden: Width of the residual stream.
        num_heads: Attention heads.
        seq_len: Tokens (patches, pixels) of one sample.
        vocab: Rows of the embedding and columns of the head; classes for a vision model.
        ffn: Inner width of the feed-forward part; None: 4 x hidden.
        num_kv_heads: Heads of keys and values; None: as ``num_heads``.
        head_dim: Width of a head; None: hidden / num_heads.
        clamped: The gate is clamped (GPT-OSS), which no kernel fuses.
        gated: The feed-forward part has a gate (SwiGLU), so three matrices instead of two.
        tied: Head and embedding are one matrix.
        learned_positions: Positions have their own embedding (GPT); otherwise rotary.
        dropout: Training uses dropout, which stores masks.
        biases: Linear layers have biases, norms have shifts.
        causal: Attention looks back only.
        window: Tokens that windowed layers look back to; 0 where there are none.
        windowed_layers: Layers with a sliding window; None: all, where there is a window.
        predicted_tokens: Further tokens that multi-token prediction learns at each position, with a
            layer and a loss each.
        embeds_tokens: False for vision models, whose patches come from a projection.
        experts: The expert part, or None.
        latent: Latent attention, or None.
        stages: Convolution stages; then the transformer's sizes are ignored.

    Raises:
        ConfigurationError: A size is not positive, or heads do not divide.

    Examples:
        >>> model = ModelSpec(name="tiny", num_layers=2, hidden=64, num_heads=4, seq_len=128,
        ...                   vocab=1000)
        >>> model.num_parameters
        172288
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    seq_len: int
    vocab: int
    ffn: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = False
    clamped: bool = False
    tied: bool = True
    learned_positions: bool = True
    dropout: bool = True
    biases: bool = True
    causal: bool = True
    embeds_tokens: bool = True
    window: int = 0
    windowed_layers: int | None = None
    predicted_tokens: int = 0
    experts: MixtureOfExperts | None = None
    latent: LatentAttention | None = None
    stages: tuple[ConvolutionStage, ...] = field(default=())

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "hidden", "num_heads", "seq_len", "vocab")
        _not_negative(self, "window", "predicted_tokens")
        if self.windowed_layers is not None:
            _not_negative(self, "windowed_layers")
        for name in ("ffn", "num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                _positive(self, name)
        if self.head_dim is None and self.hidden % self.num_heads:
            message = f"hidden={self.hidden} is not a multiple of num_heads={self.num_heads}"
            raise ConfigurationError(message, hint="give head_dim, or sizes that divide")
        if self.num_heads % self.kv_heads:
            message = f"num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}"
            raise ConfigurationError(message, hint="every key head serves as many query heads")
        if self.stages and self.num_layers != sum(stage.blocks for stage in self.stages):
            message = f"num_layers={self.num_layers} is not the number of blocks in stages"
            raise ConfigurationError(message, hint="num_layers counts residual blocks")

    @property
    def ffn_width(self) -> int:
        """Inner width of a dense feed-forward part."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention_share(self) -> float:
        """Share of a whole sequence's scores that a mean layer computes, causal mask apart."""
        if not self.window:
            return 1.0
        layers = self.num_layers if self.windowed_layers is None else self.windowed_layers
        seen = min(self.window / self.seq_len * (2 if self.causal else 1), 1.0)
        return 1.0 - min(layers / self.num_layers, 1.0) * (1.0 - seen)

    @property
    def num_expert_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        if self.experts is None:
            return 0
        return max(0, self.num_layers - self.experts.dense_layers) // self.experts.every

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense feed-forward part."""
        return self.num_layers - self.num_expert_layers

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, without norms."""
        a, h, width = self.num_heads, self.hidden, self.head_width
        if self.latent is not None:
            lat = self.latent
            query_in = a * (width + lat.rope_dim)
            query = h * lat.q_rank + lat.q_rank * query_in if lat.q_rank else h * query_in
            keys = h * (lat.kv_rank + lat.rope_dim) + lat.kv_rank * a * (width + lat.value_dim)
            return query + keys + a * lat.value_dim * h
        columns = (a + 2 * self.kv_heads) * width
        biases = columns + h if self.biases else 0
        return h * columns + a * width * h + biases

    @property
    def dense_parameters(self) -> int:
        """Parameters of one dense feed-forward part."""
        inner = self.ffn_width
        return (3 if self.gated else 2) * self.hidden * inner + (
            (inner + self.hidden) if self.biases else 0
        )

    @property
    def routed_parameters(self) -> int:
        """Parameters of one layer's routed experts: what expert parallelism splits."""
        if self.experts is None:
            return 0
        each = (3 if self.gated else 2) * self.hidden * self.experts.expert_ffn
        return self.experts.num_experts * each

    @property
    def unrouted_parameters(self) -> int:
        """Parameters of one expert layer's router and shared experts."""
        if self.experts is None:
            return 0
        matrices = 3 if self.gated else 2
        shared = matrices * self.hidden * self.experts.shared_ffn
        return self.hidden * self.experts.num_experts + shared

    @property
    def norm_parameters(self) -> int:
        """Parameters of one layer's two norms."""
        return 2 * self.hidden * (2 if self.biases else 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, with learned positions."""
        if not self.embeds_tokens:
            return 3 * 16 * 16 * self.hidden + self.seq_len * self.hidden
        return (self.vocab + (self.seq_len if self.learned_positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not the embedding's, with the last norm."""
        own = 0 if self.tied else self.vocab * self.hidden
        return own + self.norm_parameters // 2

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, layers of multi-token prediction included."""
        if self.predicted_tokens:
            layers = self.num_layers + self.predicted_tokens
            longer = dataclasses.replace(self, num_layers=layers, predicted_tokens=0)
            return longer.num_parameters
        if self.stages:
            return sum(_stage_parameters(stage) for stage in self.stages) + (
                3 * 49 * 64 + self.stages[-1].outputs * self.vocab
            )
        layer = self.attention_parameters + self.norm_parameters
        dense = self.num_dense_layers * self.dense_parameters
        routed = self.num_expert_layers * (self.routed_parameters + self.unrouted_parameters)
        outside = self.embedding_parameters + self.head_parameters
        return self.num_layers * layer + dense + routed + outside

    def flops_per_sequence(self, *, recompute: bool = False, causal_half: bool = False) -> float:
        """FLOPs of forward and backward of one sample, as papers count them.

        Args:
            recompute: Count the forward of every layer twice (HFU, the 96-form of GPT).
            causal_half: Count only the half of attention that a causal mask keeps.

        Examples:
            >>> gpt = ModelSpec(name="175B", num_layers=96, hidden=12288, num_heads=96,
            ...                 seq_len=2048, vocab=51200)
            >>> f"{gpt.flops_per_sequence(recompute=True):.4g}"
            '2.937e+15'
        """
        if self.stages:
            return 3.0 * sum(_stage_flops(stage) for stage in self.stages)
        width = self.head_width if self.latent is None else self._latent_width()
        scores = 4.0 * self.seq_len * self.num_heads * width * (0.5 if causal_half else 1.0)
        scores *= self.attention_share
        layers = self.num_layers * (2.0 * self._matrix_parameters(attention=True) + scores)
        layers += self.num_dense_layers * 2.0 * self._matrix_parameters(attention=False)
        if self.experts is not None:
            active = self.experts.top_k * self.experts.expert_ffn + self.experts.shared_ffn
            inner = (3 if self.gated else 2) * self.hidden * active
            router = self.hidden * self.experts.num_experts
            layers += self.num_expert_layers * 2.0 * (inner + router)
        head = 2.0 * self.hidden * self.vocab
        if not self.embeds_tokens:
            head /= self.seq_len
        return self.seq_len * (layers * (4.0 if recompute else 3.0) + 3.0 * head)

    def _matrix_parameters(self, *, attention: bool) -> float:
        plain = dataclasses.replace(self, biases=False)
        return plain.attention_parameters if attention else plain.dense_parameters

    def _latent_width(self) -> float:
        lat = self.latent
        assert lat is not None, "only called with latent attention"
        return (self.head_width + lat.rope_dim + lat.value_dim) / 2


def _stage_parameters(stage: ConvolutionStage) -> int:
    block = stage.outputs * stage.width * 2 + 9 * stage.width**2
    first = stage.inputs * stage.width + 9 * stage.width**2 + stage.width * stage.outputs
    return (stage.blocks - 1) * block + first + stage.inputs * stage.outputs


def _stage_flops(stage: ConvolutionStage) -> float:
    return 2.0 * stage.size**2 * _stage_parameters(stage)


def _positive(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            message = f"{name} must be a positive integer; got {name}={value!r}"
            raise ConfigurationError(message, hint=f"a count of at least 1, at most {_LARGEST:,}")


def _not_negative(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            message = f"{name} must not be negative; got {name}={value!r}"
            raise ConfigurationError(message, hint="an integer of at least 0")
