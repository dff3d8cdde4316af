"""What is trained: the shape of a model, from which every operator's cost follows.

One class for all transformers (GPT, Llama, mixtures of experts, multi-head latent attention, layers
of Mamba, vision transformers) and for residual convolution networks. This module counts parameters
and FLOPs of the whole model; operators of one shard are in ``_operators``. It knows no device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass, field

from fivefold.errors import ConfigurationError
from fivefold.strategy.parts import (
    MODULES,
    Block,
    ConvolutionStage,
    LatentAttention,
    LowRankAdapters,
    MambaMixer,
    MixtureOfExperts,
    WeightMatrix,
    check_not_negative,
    check_positive,
)


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
        patch: Pixels along a side of such a patch.
        experts: The expert part, or None.
        latent: Latent attention, or None.
        mamba: The layers' state space part, or None.
        pattern: What each layer is made of, where layers differ: blocks of ``M`` (Mamba), ``*``
            (attention), ``-`` (dense feed-forward part) and ``E`` (experts), each with a norm and
            a residual. Either one letter a layer (``M-M*-``), or a word a layer (``M- ME *-``);
            a pattern of fewer layers than ``num_layers`` repeats. Empty: attention and a
            feed-forward part in every layer.
        blocks: What further small letters of ``pattern`` stand for.
        vectors: Parameters that no product has (norms, biases), by letter of a block, of
            "embedding" and of "head", where they are not those that ``biases`` says: one norm a
            block, and a bias for every column.
        adapters: What is trained beside frozen weights; None: everything is trained.
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
    patch: int = 16
    window: int = 0
    windowed_layers: int | None = None
    predicted_tokens: int = 0
    experts: MixtureOfExperts | None = None
    latent: LatentAttention | None = None
    mamba: MambaMixer | None = None
    pattern: str = ""
    blocks: tuple[Block, ...] = ()
    vectors: tuple[tuple[str, int], ...] = ()
    adapters: LowRankAdapters | None = None
    stages: tuple[ConvolutionStage, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        object.__setattr__(self, "vectors", tuple(tuple(pair) for pair in self.vectors))
        check_positive(self, "num_layers", "hidden", "num_heads", "seq_len", "vocab", "patch")
        check_not_negative(self, "window", "predicted_tokens")
        if self.windowed_layers is not None:
            check_not_negative(self, "windowed_layers")
        for name in ("ffn", "num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if self.head_dim is None and self.hidden % self.num_heads:
            message = f"hidden={self.hidden} is not a multiple of num_heads={self.num_heads}"
            raise ConfigurationError(message, hint="give head_dim, or sizes that divide")
        if self.num_heads % self.kv_heads:
            message = f"num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}"
            raise ConfigurationError(message, hint="every key head serves as many query heads")
        if self.stages and self.num_layers != sum(stage.blocks for stage in self.stages):
            message = f"num_layers={self.num_layers} is not the number of blocks in stages"
            raise ConfigurationError(message, hint="num_layers counts residual blocks")
        problem = _pattern_problem(self) or _adapters_problem(self)
        if problem is not None:
            raise ConfigurationError(problem[0], hint=problem[1])

    @functools.cached_property
    def layer_kinds(self) -> tuple[tuple[float, str], ...]:
        """Return the blocks of each kind of layer, in the letters of ``pattern``, and its share."""
        if self.pattern:
            layers = _layers_of(self.pattern, self.num_layers)
            return tuple((n / len(layers), kind) for kind, n in sorted(Counter(layers).items()))
        experts = 0
        if self.experts is not None:
            experts = max(0, self.num_layers - self.experts.dense_layers) // self.experts.every
        share = experts / self.num_layers
        return tuple((s, kind) for s, kind in ((1 - share, "*-"), (share, "*E")) if s)

    def share_of(self, block: str) -> float:
        """Return the blocks of a letter, over the number of layers."""
        return sum(share * kind.count(block) for share, kind in self.layer_kinds)

    @functools.cached_property
    def parts_of(self) -> dict[str, tuple[str, ...]]:
        """Return the letters of the model's blocks, and the parts whose matrices each has."""
        own: dict[str, tuple[str, ...]] = {block.letter: (block.letter,) for block in self.blocks}
        return BLOCKS | own

    @functools.cached_property
    def other(self) -> dict[str, Block]:
        """Return the blocks that small letters stand for."""
        return {block.letter: block for block in self.blocks}

    def vectors_of(self, name: str) -> int | None:
        """Return what ``vectors`` says of a letter, of "embedding" or of "head"."""
        return next((count for key, count in self.vectors if key == name), None)

    def norms_of(self, letter: str) -> int:
        """Return the parameters of a block that no tensor group splits: norms, known biases."""
        found = self.vectors_of(letter)
        return self.norm_parameters if found is None else found

    @property
    def norms_per_layer(self) -> float:
        """Return the parameters of norms of a mean layer."""
        return sum(self.share_of(letter) * self.norms_of(letter) for letter in self.parts_of)

    @property
    def ffn_width(self) -> int:
        """Return the inner width of a dense feed-forward part."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_heads(self) -> int:
        """Return the heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Return the width of a head."""
        return self.hidden // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def attention_share(self) -> float:
        """Return the share of a sequence's scores that a mean layer computes, causal mask apart."""
        if not self.window:
            return 1.0
        attending = self._blocks("*")
        layers = attending if self.windowed_layers is None else self.windowed_layers
        seen = min(self.window / self.seq_len * (2 if self.causal else 1), 1.0)
        return 1.0 - min(layers / max(attending, 1), 1.0) * (1.0 - seen)

    def _blocks(self, letter: str) -> int:
        return round(self.num_layers * self.share_of(letter))

    def matrices(self, part: str) -> tuple[WeightMatrix, ...]:
        """Return the matrices of a block.

        Args:
            part: "attention", "mamba", "dense", "experts", "latents" (products to the experts'
                width and back), "router", "shared" (the experts that every token visits), or the
                letter of another block.
        """
        if part == "attention":
            return self._latent_matrices() if self.latent else self._attention_matrices()
        if part == "mamba":
            return self._mamba_matrices()
        if part == "dense":
            return self._feed_forward_matrices(self.ffn_width)
        if part in self.other:
            return self.other[part].matrices
        return self._expert_matrices(part)

    def _expert_matrices(self, part: str) -> tuple[WeightMatrix, ...]:
        moe = self.experts
        if moe is None or (part == "shared" and not moe.shared_ffn):
            return ()
        if part == "router":
            return (WeightMatrix("router", self.hidden, moe.num_experts, "none"),)
        if part == "shared":
            return self._feed_forward_matrices(moe.shared_ffn)
        if part == "latents":
            if not moe.latent:
                return ()
            return (
                WeightMatrix("latent_in", self.hidden, moe.latent, "none"),
                WeightMatrix("latent_out", moe.latent, self.hidden, "none"),
            )
        return self._feed_forward_matrices(
            moe.expert_ffn, count=moe.num_experts, width=moe.latent or self.hidden
        )

    def _attention_matrices(self) -> tuple[WeightMatrix, ...]:
        h, queries, keys = self.hidden, self.num_heads * self.head_width, self.kv_heads
        keys *= self.head_width
        return (
            WeightMatrix("q_proj", h, queries, "columns"),
            WeightMatrix("k_proj", h, keys, "columns"),
            WeightMatrix("v_proj", h, keys, "columns"),
            WeightMatrix("o_proj", queries, h, "rows"),
        )

    def _latent_matrices(self) -> tuple[WeightMatrix, ...]:
        lat, h, a = self.latent, self.hidden, self.num_heads
        assert lat is not None, "only called with latent attention"
        query = a * (self.head_width + lat.rope_dim)
        queries: tuple[WeightMatrix, ...] = (WeightMatrix("q_proj", h, query, "columns"),)
        if lat.q_rank:
            queries = (
                WeightMatrix("q_a_proj", h, lat.q_rank, "none"),
                WeightMatrix("q_b_proj", lat.q_rank, query, "columns"),
            )
        keys = a * (self.head_width + lat.value_dim)
        return (
            *queries,
            WeightMatrix("kv_a_proj_with_mqa", h, lat.kv_rank + lat.rope_dim, "none"),
            WeightMatrix("kv_b_proj", lat.kv_rank, keys, "columns"),
            WeightMatrix("o_proj", a * lat.value_dim, h, "rows"),
        )

    def _mamba_matrices(self) -> tuple[WeightMatrix, ...]:
        ssm, h = self.mamba, self.hidden
        if ssm is None:
            return ()
        steps: tuple[WeightMatrix, ...] = ()
        if ssm.step_rank:
            steps = (
                WeightMatrix("x_proj", ssm.inner, ssm.step_rank + 2 * ssm.state, "rows"),
                WeightMatrix("dt_proj", ssm.step_rank, ssm.inner, "columns"),
            )
        return (
            WeightMatrix("in_proj", h, ssm.projected, "columns"),
            *steps,
            WeightMatrix("out_proj", ssm.inner, h, "rows"),
        )

    def _feed_forward_matrices(
        self, inner: int, *, count: int = 1, width: int = 0
    ) -> tuple[WeightMatrix, ...]:
        ups, width = ("gate_proj", "up_proj") if self.gated else ("up_proj",), width or self.hidden
        return (
            *(WeightMatrix(name, width, inner, "columns", count) for name in ups),
            WeightMatrix("down_proj", inner, width, "rows", count),
        )

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention, without norms."""
        columns = (self.num_heads + 2 * self.kv_heads) * self.head_width
        plain = self.biases and self.latent is None and self.vectors_of("*") is None
        biases = columns + self.hidden if plain else 0
        return _size_of(self.matrices("attention")) + biases

    @property
    def mamba_parameters(self) -> int:
        """Return the parameters of one Mamba block, without its norm."""
        if self.mamba is None:
            return 0
        if self.vectors_of("M") is not None:
            return _size_of(self.matrices("mamba"))
        step_bias = self.mamba.inner if self.mamba.step_rank else 0
        return _size_of(self.matrices("mamba")) + self.mamba.vector_parameters + step_bias

    @property
    def dense_parameters(self) -> int:
        """Return the parameters of one dense feed-forward part."""
        plain = self.biases and self.vectors_of("-") is None
        biases = self.ffn_width + self.hidden if plain else 0
        return _size_of(self.matrices("dense")) + biases

    @property
    def routed_parameters(self) -> int:
        """Return the parameters of one layer's routed experts: what expert parallelism splits."""
        moe, matrices = self.experts, self.matrices("experts")
        biased = moe is not None and moe.biases
        return _size_of(matrices) + biased * sum(one.count * one.outputs for one in matrices)

    @property
    def unrouted_parameters(self) -> int:
        """Return the parameters of one expert layer's router, latents and shared experts."""
        return sum(_size_of(self.matrices(part)) for part in ("router", "latents", "shared"))

    def is_adapted(self, matrix: WeightMatrix) -> bool:
        """Return whether a matrix has an adapter."""
        if self.adapters is None or matrix.module not in MODULES:
            return False
        return not self.adapters.modules or matrix.module in self.adapters.modules

    def adapter_parameters(self, *parts: str) -> int:
        """Return the parameters of the adapters of a block's parts."""
        if self.adapters is None:
            return 0
        matrices = (matrix for part in parts for matrix in self.matrices(part))
        return self.adapters.rank * sum(
            m.count * (m.inputs + m.outputs) for m in matrices if self.is_adapted(m)
        )

    @property
    def norm_parameters(self) -> int:
        """Return the parameters of one norm."""
        return self.hidden * (2 if self.biases else 1)

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the embedding, with learned positions."""
        if not self.embeds_tokens:
            return (3 * self.patch**2 + self.seq_len) * self.hidden
        known = self.vectors_of("embedding")
        if known is not None:
            return self.vocab * self.hidden + known
        return (self.vocab + (self.seq_len if self.learned_positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the head that are not the embedding's, with the last norm."""
        own = 0 if self.tied else self.vocab * self.hidden
        return own + self.norms_of("head")

    @property
    def num_parameters(self) -> int:
        """Return the parameters of the whole model, layers of multi-token prediction included."""
        if self.predicted_tokens:
            layers = self.num_layers + self.predicted_tokens
            longer = dataclasses.replace(self, num_layers=layers, predicted_tokens=0)
            return longer.num_parameters
        if self.stages:
            return sum(_stage_parameters(stage) for stage in self.stages) + (
                3 * 49 * 64 + self.stages[-1].outputs * self.vocab
            )
        blocks = sum(
            self._blocks(letter)
            * (self.unrouted_of(letter) + self.norms_of(letter) + self.adapter_parameters(*parts))
            for letter, parts in self.parts_of.items()
        )
        blocks += self._blocks("E") * self.routed_parameters
        return blocks + self.embedding_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Return the parameters that a token meets: of routed experts only those it visits."""
        moe = self.experts
        if moe is None:
            return self.num_parameters
        idle = self.routed_parameters * (moe.num_experts - moe.top_k) // moe.num_experts
        return self.num_parameters - self._blocks("E") * idle

    @property
    def trained_parameters(self) -> int:
        """Return the parameters that have gradients: all of them, or the adapters'."""
        if self.adapters is None:
            return self.num_parameters
        return sum(
            self._blocks(letter) * self.adapter_parameters(*parts)
            for letter, parts in self.parts_of.items()
        )

    def unrouted_of(self, letter: str) -> int:
        """Return the parameters of a block, without norms and routed experts."""
        if letter in self.other:
            return _size_of(self.other[letter].matrices)
        return {
            "*": self.attention_parameters, "M": self.mamba_parameters, "-": self.dense_parameters,
            "E": self.unrouted_parameters,
        }[letter]  # fmt: skip

    def flops_per_sequence(self, *, recompute: bool = False) -> float:
        """Return the FLOPs of forward and backward of one sample, as papers count them.

        Args:
            recompute: Count the forward of every layer twice (HFU, the 96-form of GPT).

        Examples:
            >>> gpt = ModelSpec(name="175B", num_layers=96, hidden=12288, num_heads=96,
            ...                 seq_len=2048, vocab=51200)
            >>> f"{gpt.flops_per_sequence(recompute=True):.4g}"
            '2.937e+15'
        """
        if self.stages:
            return 3.0 * sum(2.0 * one.size**2 * _stage_parameters(one) for one in self.stages)
        # Frozen weights have no gradient of their own: two products of theirs instead of three.
        passes = 3.0 if self.adapters is None else 2.0
        again = 1.0 if recompute else 0.0
        layers = 0.0
        for letter, parts in self.parts_of.items():
            number = self.num_layers * self.share_of(letter)
            layers += number * (passes + again) * 2.0 * self._active(parts)
            layers += number * (3.0 + again) * 2.0 * self._active(parts, adapters=True)
        scores = self._score_flops()
        scans = 0.0 if self.mamba is None else self.mamba.scan_flops
        mixers = self.share_of("*") * scores + self.share_of("M") * scans
        mixers += sum(
            self.share_of(letter) * block.flops(self.seq_len, causal=self.causal)
            for letter, block in self.other.items()
        )
        layers += self.num_layers * (3.0 + again) * mixers
        head = 2.0 * self.hidden * self.vocab
        if not self.embeds_tokens:
            head /= self.seq_len
        return self.seq_len * (layers + passes * head)

    def _active(self, parts: tuple[str, ...], *, adapters: bool = False) -> float:
        """Return the parameters of products, or of adapters, that a token meets in a block."""
        active = 0.0
        for part in parts:
            for matrix in self.matrices(part):
                visits = matrix.count
                if part == "experts":
                    assert self.experts is not None, "only experts are routed"
                    visits = self.experts.top_k
                size = matrix.inputs * matrix.outputs
                if adapters:
                    rank = self.adapters.rank if self.adapters and self.is_adapted(matrix) else 0
                    size = rank * (matrix.inputs + matrix.outputs)
                active += visits * size
        return active

    def _score_flops(self) -> float:
        """Return the FLOPs of a token's scores and weighted values in a mean block of attention."""
        width = float(self.head_width)
        if self.latent is not None:
            width = (self.head_width + self.latent.rope_dim + self.latent.value_dim) / 2
        return 4.0 * self.seq_len * self.num_heads * width * self.attention_share


BLOCKS = {
    "*": ("attention",), "M": ("mamba",), "-": ("dense",),
    "E": ("experts", "router", "latents", "shared"),
}  # fmt: skip
"""The usual letters of a pattern, and the parts whose matrices such a block has."""


def _layers_of(pattern: str, num_layers: int) -> list[str]:
    """Return the blocks of each layer: a word each, or a letter each where there is one word."""
    words = pattern.split()
    return words if len(words) > 1 or num_layers == 1 else list(pattern.strip())


def _pattern_problem(model: ModelSpec) -> tuple[str, str] | None:
    layers = _layers_of(model.pattern, model.num_layers)
    unknown = sorted(set("".join(layers)) - set(model.parts_of))
    used = set("".join(layers))
    moe = model.experts
    rules = (
        (bool(unknown), f"pattern has {''.join(unknown)!r}", f"use {' '.join(model.parts_of)}"),
        (bool(model.blocks) and not set(model.other) <= used,
         f"pattern has no {' '.join(sorted(set(model.other) - used))}, which blocks describe",
         "leave the block out, or say which layers have it"),
        (bool(layers) and model.num_layers % max(len(layers), 1) > 0,
         f"a pattern of {len(layers)} layers does not repeat to num_layers={model.num_layers}",
         "a letter a layer, or a word a layer"),
        ("M" in used and model.mamba is None, "pattern has Mamba blocks, and mamba is not given",
         "give mamba = { state = 128, heads = 128, head_dim = 64 }"),
        (model.mamba is not None and "M" not in used, "mamba is given, and pattern has no M",
         "say which layers are of Mamba, such as pattern = 'M-M*-'"),
        ("E" in used and moe is None, "pattern has experts, and experts is not given",
         "give experts = { num_experts = 8, top_k = 2, expert_ffn = 1024 }"),
        (bool(layers) and moe is not None and ("E" not in used or moe.dense_layers > 0
                                               or moe.every > 1),
         "pattern and experts differ on which layers have experts",
         "leave dense_layers and every out; pattern says where experts are"),
        (bool(layers) and bool(model.stages or model.predicted_tokens),
         "pattern cannot be said beside stages or predicted_tokens", "leave one of them out"),
    )  # fmt: skip
    return next(((message, hint) for broken, message, hint in rules if broken), None)


def _adapters_problem(model: ModelSpec) -> tuple[str, str] | None:
    if model.adapters is None:
        return None
    if model.stages or model.predicted_tokens:
        return "adapters cannot be said beside stages or predicted_tokens", "leave one of them out"
    used = [letter for letter in model.parts_of if model.share_of(letter)]
    parts = [part for letter in used for part in model.parts_of[letter]]
    has = {m.module for part in parts for m in model.matrices(part)} & set(MODULES)
    lacks = [name for name in model.adapters.modules if name not in has]
    if lacks:
        known = ", ".join(name for name in MODULES if name in has)
        return f"the model has no {', '.join(lacks)} to adapt", f"it has {known}"
    return None


def _size_of(matrices: tuple[WeightMatrix, ...]) -> int:
    return sum(matrix.size for matrix in matrices)


def _stage_parameters(stage: ConvolutionStage) -> int:
    block = stage.outputs * stage.width * 2 + 9 * stage.width**2
    first = stage.inputs * stage.width + 9 * stage.width**2 + stage.width * stage.outputs
    return (stage.blocks - 1) * block + first + stage.inputs * stage.outputs
