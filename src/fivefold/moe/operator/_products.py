"""The products of experts with their rows, each by the way that torch has for it.

Rows stand in the order of their experts and are cut into blocks of neighbouring experts, so that
many small experts cost few calls and what a block makes is still in the cache when it is read. A
block of one expert is one dense product. Those of several go through torch's own grouped product,
one call for all of them, where it takes the data type and sizes; else one call an expert. What is
taken depends on shapes, loads and the processor's maker alone.

Shapes: R rows of a block, E experts, N and K the sizes of an expert's weight.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fivefold.moe.operator._assignments import Assignments
from fivefold.moe.operator._large_memory import LARGE_BYTES, large_empty

# Rows of a block, at least: of experts with many rows, what is in the cache when it is read; of
# those with few, so that a call from Python costs less than the products that it starts.
_BLOCK_ROWS = 1024
_SMALL_BLOCK_ROWS = 4096
# Rows of an expert on average from which on they are many; those of 16 bits take less time.
_MANY_ROWS = {torch.float32: 64, torch.float64: 64}
_MANY_ROWS_16_BITS = 256
_ALIGNMENT_BYTES = 16
_GROUPED_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# With a few rows an expert and weights beyond the nearest caches, MKL is up to twice as fast on
# AMD's processors when the rows are the columns of the product. With the kernels that it has for
# Intel's it takes up to three times as long that way: 64 products of [2, 256] and
# [256, 256] take 2.6 ms, turned 1.5, on an EPYC, and with Intel's kernels there 0.5, turned 1.5.
_FEW_ROWS = 5
_TURNED_SIZES = range(2**15, 2**22)
_TURNED_WIDTHS = range(1, 1025)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Experts next to each other, and their rows.

    Attributes:
        experts: Their numbers, first and stop.
        rows: Places of their rows, first and stop.
        sizes: Rows of each.
    """

    experts: slice
    rows: slice
    sizes: tuple[int, ...]

    @property
    def has_few_rows(self) -> bool:
        """Return whether its experts have few rows on average, those without any left out."""
        busy = len(self.sizes) - self.sizes.count(0)
        return sum(self.sizes) < _FEW_ROWS * busy

    def parts(self, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """The number within the block of each expert with rows, and its rows of tensors."""
        # Cut all at once: with small experts a slice costs as much as a product.
        sizes = list(self.sizes)
        pieces = zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)
        for number, (size, parts) in enumerate(zip(self.sizes, pieces, strict=True)):
            if size:
                yield (number, *parts)


def cut(order: Assignments, dtype: torch.dtype) -> tuple[Block, ...]:
    """Cut rows between experts: a block is of one expert, or has enough rows, or is the last.

    Args:
        order: The rows.
        dtype: Their data type.

    Returns:
        Blocks in order; none where there are no rows.
    """
    stops, busy = order.stops, order.busy_experts
    enough = _BLOCK_ROWS
    if order.num_rows < _MANY_ROWS.get(dtype, _MANY_ROWS_16_BITS) * busy:
        enough = _SMALL_BLOCK_ROWS
    if busy > 1 and order.num_rows <= enough:
        return (_block(order, 0, len(stops)),)
    found: list[Block] = []
    start = last = rows = 0  # rows: of the experts from start to last
    for expert, (before, stop) in enumerate(zip((0, *stops), stops, strict=False)):
        size = stop - before
        if size == 0:
            continue
        if rows and (rows >= enough or size >= enough):
            found.append(_block(order, start, last + 1))
            rows = 0
        start = expert if rows == 0 else start
        last = expert
        rows += size
    if rows:
        found.append(_block(order, start, last + 1))
    return tuple(found)


def _block(order: Assignments, first: int, stop: int) -> Block:
    row = order.stops[first - 1] if first else 0
    stops = order.stops[first:stop]
    return Block(
        experts=slice(first, stop),
        rows=slice(row, stops[-1]),
        sizes=tuple(map(operator.sub, stops, (row, *stops))),
    )


def by_row(bias: torch.Tensor, block: Block) -> torch.Tensor:
    """Repeat the biases [E, N] of a block's experts for their rows, [R, N]."""
    repeats = torch.tensor(block.sizes, device=bias.device)
    return bias[block.experts].repeat_interleave(repeats, dim=0)


class ExpertWeights:
    """The weights of all experts, [E, N, K], and biases [E, N].

    Args:
        weight: The weights.
        bias: The biases; None for none.
        order: All rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, order: Assignments) -> None:
        self.weight, self.bias, self.order = weight, bias, order
        # A bias added to 16 bits that were rounded already would be rounded twice.
        self.is_grouped = _is_grouped(weight) and (bias is None or weight.dtype == torch.float32)
        sizes = weight.shape[1:]
        self._is_turned = (
            weight.dtype == torch.float32
            and _is_faster_turned()
            and sizes.numel() in _TURNED_SIZES
            and sizes[1] in _TURNED_WIDTHS
        )

    def applied(
        self, rows: torch.Tensor, block: Block, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows W^T + b of each expert of a block: [R, K] to [R, N], in ``out`` where given."""
        turned = self.weight.mT
        if len(block.sizes) == 1:
            weight = turned[block.experts.start]
            if self.bias is None:
                return torch.mm(rows, weight, out=out)
            return torch.addmm(self.bias[block.experts.start], rows, weight, out=out)
        if self.is_grouped:
            found = self._grouped(rows, block)
            if self.bias is not None:
                found += by_row(self.bias, block)
            return found if out is None else out.copy_(found)
        return _one_by_one(rows, turned, self.bias, block, out)

    def _grouped(self, rows: torch.Tensor, block: Block) -> torch.Tensor:
        weight = self.weight[block.experts]
        if self._is_turned and block.has_few_rows:
            return _grouped_mm(weight, rows.t(), self.ends(block)).t().contiguous()
        return _grouped_mm(rows, weight.mT, self.ends(block))

    def ends(self, block: Block) -> torch.Tensor:
        """Return where the rows of each expert end within a block, int32."""
        ends = self.order.ends[block.experts]
        return ends - block.rows.start if block.rows.start else ends

    def pulled(
        self, rows: torch.Tensor, block: Block, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows W of each expert of a block: [R, N] to [R, K], in ``out`` where given."""
        if len(block.sizes) == 1:
            return torch.mm(rows, self.weight[block.experts.start], out=out)
        if self.is_grouped:
            found = _grouped_mm(rows, self.weight[block.experts], self.ends(block))
            return found if out is None else out.copy_(found)
        return _one_by_one(rows, self.weight, None, block, out)


class ExpertGradient:
    """The gradient of ``ExpertWeights``, block by block; as the weights lie in memory.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self._found: torch.Tensor | None = None

    def add(self, left: torch.Tensor, right: torch.Tensor, block: Block) -> None:
        """Left^T right of each expert of a block: [R, N] and [R, K] to [N, K]."""
        weight = self._weights.weight
        num_bytes = weight.numel() * weight.element_size()
        whole = len(block.sizes) == len(weight) > 1 and num_bytes < LARGE_BYTES
        if whole and self._weights.is_grouped:
            ends = self._weights.ends(block)
            if weight.is_contiguous():
                self._found = _grouped_mm(left.t(), right, ends)
            else:
                self._found = _grouped_mm(right.t(), left, ends).mT
            return
        if self._found is None:
            self._found = self._blank()
        found = self._found[block.experts].unbind(0)
        for number, lefts, rights in block.parts(left, right):
            torch.mm(lefts.t(), rights, out=found[number])

    def result(self) -> torch.Tensor:
        """Of all blocks."""
        return self._blank() if self._found is None else self._found

    def _blank(self) -> torch.Tensor:
        """Zeros for the experts without rows, anything for the others."""
        weight = self._weights.weight
        if weight.mT.is_contiguous() and not weight.is_contiguous():
            made = large_empty(weight, *weight.mT.shape).mT
        else:
            made = large_empty(weight, *weight.shape)
        stops = self._weights.order.stops
        for expert, (before, stop) in enumerate(zip((0, *stops), stops, strict=False)):
            if before == stop:
                made[expert] = 0.0
        return made


@cache
def _is_faster_turned() -> bool:
    """Return whether the matrix library is the one, and the processor the other maker's."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.10 and newer
    library: Any = torch.backends.mkl
    return bool(library.is_available()) and "AMD" in capabilities().get("cpu_name", "")


def _is_grouped(weight: torch.Tensor) -> bool:
    """Return whether torch's grouped product takes these weights."""
    item = weight.element_size()
    return (
        weight.device.type == "cpu"
        and weight.dtype in _GROUPED_TYPES
        and all(size * item % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
        and (weight.is_contiguous() or weight.mT.is_contiguous())
        and weight.data_ptr() % _ALIGNMENT_BYTES == 0
        and hasattr(torch.nn.functional, "grouped_mm")  # torch 2.10 and newer
    )


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    product: Any = torch.nn.functional.grouped_mm
    found: torch.Tensor = product(left, right, offs=ends)
    return found


def _one_by_one(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block: Block,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = rows.new_empty((len(rows), weight.shape[2]))
    weights = weight[block.experts].unbind(0)
    biases = None if bias is None else bias[block.experts].unbind(0)
    for number, part, result in block.parts(rows, out):
        if biases is None:
            torch.mm(part, weights[number], out=result)
        else:
            torch.addmm(biases[number], part, weights[number], out=result)
    return out
