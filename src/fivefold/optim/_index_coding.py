"""Sets of indices as bits, near the fewest that can tell them apart (Elias-Fano coding).

Of k ascending indices below n, the l = log2(n / k) lowest bits stand as they are; the rest grows
slowly, and is written as a bitmap in which the i-th index sets bit (index >> l) + i. The size
depends on n and k alone, so that all ranks know it, and both ways are a few operations on whole
tensors. An index may stand there several times.

Shapes: indices int64 [rows, k], each row ascending; bits uint8 [rows, index_bits(n, k)], 0 or 1.

References:
    Elias, J. ACM 21 (1974); Fano, MIT Project MAC memorandum 61 (1971).
"""

from __future__ import annotations

import torch


def index_bits(width: int, count: int) -> int:
    """Return the bits of ``count`` indices below ``width``."""
    low = _low_bits(width, count)
    return count * low + count + ((width - 1) >> low)


def write_indices(indices: torch.Tensor, width: int) -> torch.Tensor:
    """Return the bits of every row's indices."""
    rows, count = indices.shape
    low = _low_bits(width, count)
    shifts = torch.arange(low, device=indices.device)
    lowest = ((indices.unsqueeze(2) >> shifts) & 1).to(torch.uint8).view(rows, count * low)
    size = count + ((width - 1) >> low)
    bitmap = torch.zeros((rows, size), dtype=torch.uint8, device=indices.device)
    places = (indices >> low) + torch.arange(count, device=indices.device)
    return torch.cat([lowest, bitmap.scatter_(1, places, 1)], dim=1)


def read_indices(bits: torch.Tensor, *, width: int, count: int) -> torch.Tensor:
    """Return every row's indices."""
    rows = bits.shape[0]
    low = _low_bits(width, count)
    weights = 1 << torch.arange(low, device=bits.device)
    lowest = (bits[:, : count * low].view(rows, count, low) * weights).sum(dim=2)
    bitmap = bits[:, count * low :]
    # A stable sort puts the set bits first, in their order: the places, without asking a GPU.
    places = torch.sort(bitmap, dim=1, descending=True, stable=True).indices[:, :count]
    highest = places - torch.arange(count, device=bits.device)
    return (highest << low) + lowest


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return uint8 [rows, ceil(n / 8)] of the bits [rows, n], the first one lowest."""
    rows, size = bits.shape
    whole = torch.nn.functional.pad(bits, (0, -size % 8)).view(rows, -1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (whole << shifts).sum(dim=2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bits [rows, size] that ``pack_bits`` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(2) >> shifts) & 1
    return bits.view(packed.shape[0], -1)[:, :size]


def _low_bits(width: int, count: int) -> int:
    return (width // count).bit_length() - 1
