"""A decoder-only transformer, small and fast on one CPU thread.

RMSNorm before each sub-layer, rotary positions, SwiGLU, tied input and output embeddings, no
biases, causal attention by ``scaled_dot_product_attention``. This module knows nothing of data,
optimizers or communication.

References:
    RMSNorm: arXiv 1910.07467. Rotary embeddings: arXiv 2104.09864. SwiGLU: arXiv 2002.05202.
    Tied embeddings: arXiv 1608.05859.

Shape legend: B sequences, T positions, D width, H heads, K width of a head, F width of the
feed-forward layer, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch import nn

if TYPE_CHECKING:
    from fivefold.train._config import ModelConfig

__all__ = ["Transformer"]

_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02
_EPSILON = 1e-6


class Transformer(nn.Module):
    """The language model.

    Args:
        config: Layers, width and heads.
        vocab_size: Number of tokens.
        sequence_length: Longest sequence.
        seed: Seed of the parameters; equal seeds give equal parameters on every rank.
    """

    def __init__(
        self, config: ModelConfig, *, vocab_size: int, sequence_length: int, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        width = config.width
        self.embedding_VD = nn.Parameter(torch.empty(vocab_size, width))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm_D = nn.Parameter(torch.ones(width))
        cos, sin = _rotary_tables(sequence_length, width // config.heads)
        self.register_buffer("cos_TK", cos, persistent=False)
        self.register_buffer("sin_TK", sin, persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        residual_std = _INIT_STD / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = residual_std if name.endswith(("out_DD", "down_DF")) else _INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, the tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per token."""
        attention = 12 * self.config.layers * self.config.width * self.sequence_length / 2
        return 6 * self.num_parameters + attention

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position, [B, T, V]."""
        length = tokens_BT.shape[1]
        cos, sin = self.cos_TK[:length], self.sin_TK[:length]
        x_BTD = F.embedding(tokens_BT, self.embedding_VD)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        x_BTD = F.rms_norm(x_BTD, self.norm_D.shape, self.norm_D, _EPSILON)
        return F.linear(x_BTD, self.embedding_VD)

    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats per token."""
        logits_BTV = self(inputs_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        hidden = hidden_width(width)
        self.norm_attention_D = nn.Parameter(torch.ones(width))
        self.qkv_3DD = nn.Parameter(torch.empty(3 * width, width))
        self.out_DD = nn.Parameter(torch.empty(width, width))
        self.norm_feed_forward_D = nn.Parameter(torch.ones(width))
        self.gate_up_2FD = nn.Parameter(torch.empty(2 * hidden, width))
        self.down_DF = nn.Parameter(torch.empty(width, hidden))

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTD.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        normed = F.rms_norm(x_BTD, self.norm_attention_D.shape, self.norm_attention_D, _EPSILON)
        q, k, v = F.linear(normed, self.qkv_3DD).view(shape).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + F.linear(mixed.transpose(1, 2).reshape(x_BTD.shape), self.out_DD)
        normed = F.rms_norm(
            x_BTD, self.norm_feed_forward_D.shape, self.norm_feed_forward_D, _EPSILON
        )
        gate, up = F.linear(normed, self.gate_up_2FD).chunk(2, dim=-1)
        return x_BTD + F.linear(F.silu(gate) * up, self.down_DF)


def hidden_width(width: int) -> int:
    """F: 8/3 of the width, rounded up to a multiple of 16."""
    return -(-8 * width // 3 // 16) * 16


def _rotary_tables(length: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.arange(0, head_width, 2, dtype=torch.float64)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), _ROTARY_BASE ** (-pair / head_width))
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
