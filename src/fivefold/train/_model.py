"""A decoder-only transformer, small and fast on one CPU thread.

RMSNorm before each sub-layer, rotary positions, SwiGLU, tied input and output embeddings, no
biases, causal attention by ``scaled_dot_product_attention``. Products that read the same input
are one product. This module knows nothing of data, optimizers or communication.

References:
    RMSNorm: arXiv 1910.07467. Rotary embeddings: arXiv 2104.09864. SwiGLU: arXiv 2002.05202.
    Tied embeddings: arXiv 1608.05859.

Shape legend: B sequences, T positions, D width, C = 3D columns of the fused queries, keys and
values, F width of the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch import nn
from torch.autograd import Function

from fivefold.errors import ConfigurationError, require_whole
from fivefold.moe import AllToAllGroup, MoE, OneSidedGroup
from fivefold.train._mixture import Mixtures, draw_experts, make_mixture, mixture_blocks
from fivefold.train.config import ModelConfig

# ruff: noqa: N803, N806, N815 - tensor names end in their shape


_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0


class Transformer(nn.Module):
    """Language model: tokens in, logits of the next token out.

    Matrices start as normal numbers of standard deviation ``sqrt(2 / (5 D))``; the products that
    write to the residual stream are divided by ``sqrt(2 * layers)``, so that its size does not
    grow with depth. They depend on the seed alone, not on torch's global generator.

    With ``[model.moe]`` some blocks have a mixture of experts as their feed-forward layer. The
    value of ``loss`` is the cross entropy alone, so that curves compare; its gradient in training
    is also that of the mixtures' auxiliary losses.

    Args:
        config: Layers, width, heads and experts.
        vocab_size: Number of tokens, V.
        sequence_length: Longest sequence that ``forward`` takes, T.
        seed: Seed of the parameters; equal seeds give equal parameters on every rank.
        group: Ranks that share the experts out; None: this rank has all of them.

    Attributes:
        mixtures: The mixtures of experts together; None in a dense model.

    References:
        Standard deviation (SmallInit): arXiv 1910.05895. Scaled residual products: the GPT-2
        report, section 2.3.

    Examples:
        >>> from fivefold.train.config import ModelConfig
        >>> model = Transformer(ModelConfig(layers=1, width=8, heads=2), vocab_size=5,
        ...                     sequence_length=4)
        >>> model(torch.tensor([[0, 1, 2]])).shape
        torch.Size([1, 3, 5])
    """

    cos_TJ: torch.Tensor
    sin_TJ: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        sequence_length: int,
        seed: int = 0,
        group: AllToAllGroup | OneSidedGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = require_whole("vocab_size", vocab_size)
        self.sequence_length = require_whole("sequence_length", sequence_length)
        seed = require_whole("seed", seed, least=0)
        self.embedding_VD = nn.Parameter(torch.empty(vocab_size, config.width))
        mixed = mixture_blocks(config)
        self.blocks = nn.ModuleList(
            _Block(config, _mixture(config, group) if number in mixed else None)
            for number in range(config.layers)
        )
        layers = {n: cast("_Block", self.blocks[n]).mixture for n in sorted(mixed)}
        self.mixtures = None if config.moe is None else Mixtures(config.moe, layers)
        self.norm_D = nn.Parameter(torch.ones(config.width))
        # Not persistent: they follow from the configuration, and no wrapper has to sync them.
        cos_TJ, sin_TJ = rotary_tables(sequence_length, config.width // config.heads)
        self.register_buffer("cos_TJ", cos_TJ, persistent=False)
        self.register_buffer("sin_TJ", sin_TJ, persistent=False)
        self._initialise(seed)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position.

        Args:
            tokens_BT: int64 tokens; T is at most ``sequence_length``.

        Returns:
            Tensor of shape [B, T, V].

        Raises:
            ConfigurationError: The sequences are too long.
        """
        length = tokens_BT.shape[1]
        if length > self.sequence_length:
            raise ConfigurationError(
                f"the model takes at most {self.sequence_length} tokens; got {length}",
                hint="raise sequence_length or cut the sequences",
            )
        cos_TJ, sin_TJ = self.cos_TJ[:length], self.sin_TJ[:length]
        x_BTD = F.embedding(tokens_BT, self.embedding_VD)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TJ, sin_TJ)
        x_BTD = rms_norm(x_BTD, self.norm_D, epsilon=_EPSILON)
        return F.linear(x_BTD, self.embedding_VD)

    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the targets, in nats per token.

        Goes through ``forward`` of this module and not of a wrapper around it: under a wrapper
        that hooks its own forward (DDP), call the wrapper and ``token_loss``.

        Args:
            inputs_BT: int64 tokens.
            targets_BT: int64 tokens that follow them.

        Returns:
            Scalar in float32 or wider.
        """
        loss = token_loss(self(inputs_BT), targets_BT)
        if self.mixtures is None or not self.training:
            return loss
        self.mixtures.observe()
        extra = self.mixtures.auxiliary_loss()
        return loss + (extra - extra.detach())

    @property
    def num_parameters(self) -> int:
        """Return the parameters over all ranks that share experts, the tied embedding counted once.

        Dense: ``V * D + layers * (4 D^2 + 3 D F + 2 D) + D`` with F the configuration's
        ``dense_width``.
        """
        shared_out = set(self.sharded_parameters)
        ranks = 1 if self.mixtures is None else self.mixtures.ranks
        return sum(
            parameter.numel() * (ranks if name in shared_out else 1)
            for name, parameter in self.named_parameters()
        )

    @property
    def sharded_parameters(self) -> list[str]:
        """Return the names of the parameters of which this rank has a share only."""
        layers = {} if self.mixtures is None else self.mixtures.layers
        return [
            f"blocks.{number}.mixture.{name}"
            for number, layer in layers.items()
            if layer.group is not None
            for name in layer.expert_parameters
        ]

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        inner_std = math.sqrt(2 / (5 * self.config.width))
        residual_std = inner_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and ".mixture." not in name:
                std = residual_std if name.endswith(("out_DD", "down_DF")) else inner_std
                nn.init.normal_(parameter, std=std, generator=generator)
        for layer in () if self.mixtures is None else self.mixtures.layers.values():
            draw_experts(layer, std=inner_std, residual_std=residual_std, generator=generator)


class _Block(nn.Module):
    mixture: MoE

    def __init__(self, config: ModelConfig, mixture: MoE | None) -> None:
        super().__init__()
        width, hidden = config.width, config.dense_width
        self.heads = config.heads
        self.norm_attention_D = nn.Parameter(torch.ones(width))
        self.query_key_value_CD = nn.Parameter(torch.empty(3 * width, width))
        self.out_DD = nn.Parameter(torch.empty(width, width))
        self.norm_feed_forward_D = nn.Parameter(torch.ones(width))
        self.is_dense = mixture is None
        if mixture is not None:
            self.mixture = mixture
        else:
            self.gate_up_2FD = nn.Parameter(torch.empty(2 * hidden, width))
            self.down_DF = nn.Parameter(torch.empty(width, hidden))

    def forward(
        self, x_BTD: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor
    ) -> torch.Tensor:
        """Return the stream after attention and the feed-forward part."""
        normed_BTD = rms_norm(x_BTD, self.norm_attention_D, epsilon=_EPSILON)
        qkv_BTC = F.linear(normed_BTD, self.query_key_value_CD)
        q, k, v = split_rotated_heads(qkv_BTC, cos_TJ, sin_TJ, heads=self.heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + F.linear(mixed.transpose(1, 2).flatten(2), self.out_DD)
        normed_BTD = rms_norm(x_BTD, self.norm_feed_forward_D, epsilon=_EPSILON)
        if not self.is_dense:
            mixed_BTD: torch.Tensor = self.mixture(normed_BTD)
            return x_BTD + mixed_BTD
        gate_BTF, up_BTF = F.linear(normed_BTD, self.gate_up_2FD).chunk(2, dim=-1)
        return x_BTD + F.linear(F.silu(gate_BTF) * up_BTF, self.down_DF)


def token_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per token."""
    logits = logits_BTV.flatten(0, 1)
    if logits.dtype in {torch.bfloat16, torch.float16}:
        logits = logits.float()
    return F.cross_entropy(logits, targets_BT.flatten())


def _mixture(config: ModelConfig, group: AllToAllGroup | OneSidedGroup | None) -> MoE:
    assert config.moe is not None, "blocks have a mixture only where there is a table for it"
    return make_mixture(config, group=group)


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """Scale each row to a root mean square of one, then by a weight.

    ``y = x / sqrt(mean(x^2) + epsilon) * weight``.
    """
    if x.is_cuda:  # one kernel there
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)
    y: torch.Tensor = _RMSNorm.apply(x, weight_D, epsilon)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return y


def rotary_tables(length: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the rotation of each pair at each position.

    Pair j at position t turns by ``t * 10000^(-2j / K)``.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    angles = torch.outer(torch.arange(length, dtype=torch.float64), _ROTARY_BASE**-exponents)
    return angles.cos().float(), angles.sin().float()


def split_rotated_heads(
    qkv_BTC: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, keys and values of a fused projection, the first two rotated by position.

    Column j of a head is paired with column j + J.
    """
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    parts = _SplitRotatedHeads.apply(qkv_BTC, cos_TJ, sin_TJ, heads)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return parts


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return x over its root mean square, times the weight."""
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        y: torch.Tensor = (x * scale).mul_(weight_D)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of x and of the weight."""
        x, weight_D, scale = ctx.saved_tensors
        (dy,) = grads
        product = (dy * x).flatten(0, -2)
        dweight_D = product.t().mv(scale.flatten())
        # d/dx of scale = -scale^3 * x / D, times the row's sum of dy * weight * x.
        pull = product.mv(weight_D).view(scale.shape).mul_(scale).mul_(scale).div_(-x.shape[-1])
        dx = (dy * weight_D).addcmul_(x, pull).mul_(scale)
        return dx, dweight_D, None


class _SplitRotatedHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BTC: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values by head, the first two rotated."""
        ctx.save_for_backward(cos_TJ, sin_TJ)
        batch, length, columns = qkv_BTC.shape
        qkv = qkv_BTC.view(batch, length, 3, heads, columns // (3 * heads))
        rotated = torch.empty_like(qkv[:, :, :2], memory_format=torch.contiguous_format)
        _rotate(qkv[:, :, :2], cos_TJ[:, None, None], sin_TJ[:, None, None], out=rotated)
        q, k = rotated.transpose(1, 3).unbind(2)
        return q, k, qkv[:, :, 2].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of the three, in one tensor."""
        cos_TJ, sin_TJ = ctx.saved_tensors
        batch, heads, length, width = grads[0].shape
        result = grads[0].new_empty(batch, length, 3, heads, width)
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        # The inverse of a rotation is its transpose: the same with the sine's sign turned.
        _rotate(dq, cos_TJ[:, None], -sin_TJ[:, None], out=result[:, :, 0])
        _rotate(dk, cos_TJ[:, None], -sin_TJ[:, None], out=result[:, :, 1])
        result[:, :, 2] = dv
        return result.view(batch, length, -1), None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, out: torch.Tensor) -> None:
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
