"""Normalisation and rotary positions, with their gradients written out.

On a CPU, autograd's own composition of these two makes about twice as many passes over memory as
are needed. Here each is one autograd node that saves the least and writes gradients straight into
the buffer that the matrix product before it reads. They are plain tensor operations, so they run
on every device and in every precision. This module knows nothing of parameters or of a model.

References:
    RMSNorm: arXiv 1910.07467. Rotary embeddings: arXiv 2104.09864.

Shape legend: B sequences, T positions, D width, H heads, K width of a head, J half of K, C columns
of the fused projection.
"""

# ruff: noqa: N803, N806 - tensor names end in their shape

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from torch.autograd import Function

_ROTARY_BASE = 10_000.0


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """Scale each row to a root mean square of one, then by a weight.

    ``y = x / sqrt(mean(x^2) + epsilon) * weight``.

    Args:
        x: Tensor of shape [..., D].
        weight_D: Scale of each column.
        epsilon: Keeps rows of zeros finite.

    Returns:
        Tensor of the shape of x.

    Examples:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), epsilon=0.0).square().mean().item()
        1.0
    """
    if x.is_cuda:  # one kernel there
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)
    y: torch.Tensor = _RMSNorm.apply(x, weight_D, epsilon)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return y


def rotary_tables(length: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotation of each pair at each position.

    Pair j at position t turns by ``t * 10000^(-2j / K)``.

    Args:
        length: Positions, T.
        head_width: K, even.

    Returns:
        cos_TJ and sin_TJ in float32, computed in float64.

    Examples:
        >>> cos_TJ, sin_TJ = rotary_tables(4, 6)
        >>> cos_TJ.shape, sin_TJ[0].tolist()
        (torch.Size([4, 3]), [0.0, 0.0, 0.0])
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    angles = torch.outer(torch.arange(length, dtype=torch.float64), _ROTARY_BASE**-exponents)
    return angles.cos().float(), angles.sin().float()


def split_rotated_heads(
    qkv_BTC: torch.Tensor, cos_TJ: torch.Tensor, sin_TJ: torch.Tensor, *, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a fused projection, the first two rotated by position.

    Column j of a head is paired with column j + J.

    Args:
        qkv_BTC: Fused projection, C = 3 * H * K: all queries, then all keys, then all values.
        cos_TJ: Cosines, from ``rotary_tables``.
        sin_TJ: Sines.
        heads: H.

    Returns:
        Three tensors of shape [B, H, T, K].

    Examples:
        >>> q, k, v = split_rotated_heads(torch.ones(1, 4, 12), *rotary_tables(4, 2), heads=2)
        >>> q.shape
        torch.Size([1, 2, 4, 2])
    """
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    parts = _SplitRotatedHeads.apply(qkv_BTC, cos_TJ, sin_TJ, heads)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return parts


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        y: torch.Tensor = (x * scale).mul_(weight_D)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
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
        ctx.save_for_backward(cos_TJ, sin_TJ)
        batch, length, columns = qkv_BTC.shape
        qkv = qkv_BTC.view(batch, length, 3, heads, columns // (3 * heads))
        rotated = torch.empty_like(qkv[:, :, :2], memory_format=torch.contiguous_format)
        _rotate(qkv[:, :, :2], cos_TJ[:, None, None], sin_TJ[:, None, None], out=rotated)
        q, k = rotated.transpose(1, 3).unbind(2)
        return q, k, qkv[:, :, 2].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
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
