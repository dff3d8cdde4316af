"""Rows in the order of their experts, the products of experts with them, and sums back by token.

Rows of an expert stand together and are cut into blocks of neighbouring experts, so that many
small experts cost few calls and what a block makes is still in the cache when it is read. A block
of one expert is one dense product. Those of several go through torch's own grouped product, one
call for all of them, where it takes the data type and sizes; else one call an expert. What is taken
depends on shapes, loads and the processor's maker alone. Outputs go back by [T, K] places and are
added in the order of k in float32 at least, so the result does not depend on sorting and blocks.

Shapes: T tokens, K experts per token, R assignments that were not dropped (of a block: its rows), H
width, E experts, N and K the sizes of an expert's weight.
"""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fivefold.errors import ConfigurationError

LARGE_BYTES = 32 * 2**20  # the C library's own limit, mallopt(3): M_MMAP_THRESHOLD
# Rows of a block, at least: of experts with many rows, what is in the cache when it is read; of
# those with few, so that a call from Python costs less than the products that it starts.
_BLOCK_ROWS = 1024
_SMALL_BLOCK_ROWS = 4096
# Rows of an expert on average from which on they are many; those of 16 bits take less time.
_MANY_ROWS = {torch.float32: 64, torch.float64: 64}
_MANY_ROWS_16_BITS = 256
_ALIGNMENT_BYTES = 16
_COPIED_BYTES = 2**17
_GROUPED_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# With a few rows an expert and weights beyond the nearest caches, MKL is up to twice as fast on
# AMD's processors when the rows are the columns of the product. With the kernels that it has for
# Intel's it takes up to three times as long that way: 64 products of [2, 256] and
# [256, 256] take 2.6 ms, turned 1.5, on an EPYC, and with Intel's kernels there 0.5, turned 1.5.
# A single row is another kernel's: turned, it takes 1.2 times as long there too. Large weights gain
# more by two rows than they lose by one.
_FEW_ROWS = 5  # of an expert on average: below
_LEAST_TURNED_ROWS, _LEAST_TURNED_ROWS_OF_LARGE = 4 / 3, 9 / 8
_LARGE_WEIGHT = 2**18
_TURNED_SIZES = range(2**15, 2**22)
_TURNED_WIDTHS = range(1, 1025)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignments:
    """Assignments in the order of their experts; within an expert by token, then slot."""

    slots: torch.Tensor  # flat place t K + k of each, int64 [R]; dropped ones are left out
    tokens: torch.Tensor  # int64 [R]
    places: torch.Tensor  # where each slot stands in this order, int64 [T, K]; R: dropped
    ends: torch.Tensor  # where the rows of each expert end, int32 [E]
    stops: tuple[int, ...]  # the same as numbers

    @property
    def num_rows(self) -> int:
        """Return R."""
        return self.stops[-1]

    @property
    def drops(self) -> bool:
        """Return whether some slot has no row."""
        return self.num_rows < self.places.numel()

    @property
    def busy_experts(self) -> int:
        """Return how many experts have rows."""
        return len({0, *self.stops}) - 1


def sort_assignments(ids: torch.Tensor, num_experts: int) -> Assignments:
    """Bring assignments of one expert together."""
    experts, slots = torch.sort(ids.reshape(-1).long(), stable=True)
    numbers = torch.arange(-1, num_experts, device=ids.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    dropped, *stops = ends.tolist()
    if stops[-1] < len(experts) or (dropped and int(experts[0]) < -1):
        wrong = int(experts[-1]) if stops[-1] < len(experts) else int(experts[0])
        raise ConfigurationError(
            f"topk_ids holds {wrong}, there are {num_experts} experts",
            hint="use 0 to experts - 1, and -1 for a dropped assignment",
        )
    ends = ends[1:]
    if dropped:
        slots, ends = slots[dropped:], ends - dropped
        stops = [stop - dropped for stop in stops]
        places = slots.new_full((ids.numel(),), len(slots))
        places.scatter_(0, slots, torch.arange(len(slots), device=slots.device))
    else:
        places = slots.argsort()
    return Assignments(
        slots=slots,
        tokens=torch.div(slots, max(ids.shape[1], 1), rounding_mode="floor"),
        places=places.view(ids.shape),
        ends=ends,
        stops=tuple(stops),
    )


def added(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum each token's rows at ``places`` [T, K] over k, in order."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(wide)
    if places.numel() == 0:
        return rows.new_zeros((len(places), rows.shape[1]))
    factors = None if weights is None else weights.to(wide)
    if rows.device.type == "cpu":
        # Gathers, weighs and adds in one pass, in the order of k.
        flat = None if factors is None else factors.reshape(-1)
        firsts = torch.arange(0, places.numel(), places.shape[1])
        return torch.embedding_bag(rows, places.view(-1), firsts, per_sample_weights=flat)[0]
    total = rows.new_zeros((len(places), rows.shape[1]))
    for slot, column in enumerate(places.t().contiguous().unbind(0)):
        term = rows.index_select(0, column)
        if factors is None:
            total += term
        else:
            total.addcmul_(term, factors[:, slot, None])
    return total


def large_empty(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a contiguous tensor of any values, in huge pages where it is large and on the CPU.

    The C library asks the system for blocks from 32 MiB on each time, which fills them with zeros
    page by page, at the first touch: for the gradients of many experts' weights that costs as much
    as a product. In huge pages (madvise(2), MADV_HUGEPAGE) it takes one fault for 2 MiB.
    """
    num_bytes = math.prod(sizes) * like.element_size()
    if like.device.type != "cpu" or num_bytes < LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(sizes)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or no memory, which torch then says
        return like.new_empty(sizes)
    return torch.frombuffer(memory, dtype=like.dtype).view(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Experts next to each other, and their rows."""

    experts: slice
    rows: slice
    sizes: tuple[int, ...]  # rows of each expert

    @property
    def average_rows(self) -> float:
        """Return the rows of an expert on average, those without any left out."""
        return sum(self.sizes) / (len(self.sizes) - self.sizes.count(0))

    def parts(self, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield the number within the block of each expert with rows, and its rows of tensors."""
        # Cut all at once: with small experts a slice costs as much as a product.
        busy = [number for number, size in enumerate(self.sizes) if size]
        sizes = [self.sizes[number] for number in busy]
        return zip(busy, *(torch.split(tensor, sizes) for tensor in tensors), strict=True)


def cut(order: Assignments, dtype: torch.dtype) -> tuple[Block, ...]:
    """Cut rows between experts: a block is of one expert, or has enough rows, or is the last."""
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
    """The weights of all experts, [E, N, K], and biases [E, N]."""

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
        is_large = sizes.numel() >= _LARGE_WEIGHT
        self._least_rows = _LEAST_TURNED_ROWS_OF_LARGE if is_large else _LEAST_TURNED_ROWS

    def applied(
        self, rows: torch.Tensor, block: Block, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows W^T + b of each expert of a block: [R, K] to [R, N], in ``out`` if given."""
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
        if self._is_turned and self._least_rows <= block.average_rows < _FEW_ROWS:
            return _grouped_mm(weight, rows.t(), self.ends(block)).t().contiguous()
        return _grouped_mm(rows, weight.mT, self.ends(block))

    def ends(self, block: Block) -> torch.Tensor:
        """Return where the rows of each expert end within a block, int32."""
        ends = self.order.ends[block.experts]
        return ends - block.rows.start if block.rows.start else ends

    def pulled(
        self, rows: torch.Tensor, block: Block, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows W of each expert of a block: [R, N] to [R, K], in ``out`` where given."""
        if len(block.sizes) == 1:
            return torch.mm(rows, self.weight[block.experts.start], out=out)
        if self.is_grouped:
            found = _grouped_mm(rows, self.weight[block.experts], self.ends(block))
            return found if out is None else out.copy_(found)
        return _one_by_one(rows, self.weight, None, block, out)


class ExpertGradient:
    """The gradient of ``ExpertWeights``, block by block; as the weights lie in memory."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self._found: torch.Tensor | None = None

    def add(self, left: torch.Tensor, right: torch.Tensor, block: Block) -> None:
        """Add left^T right of each expert of a block: [R, N] and [R, K] to [N, K]."""
        weight = self._weights.weight
        whole = len(block.sizes) == len(weight) > 1 and weight.nbytes < LARGE_BYTES
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
        """Return the gradient over all blocks."""
        return self._blank() if self._found is None else self._found

    def _blank(self) -> torch.Tensor:
        """Return zeros for the experts without rows, anything for the others."""
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
    maker = torch.cpu.get_capabilities().get("cpu_name", "")
    library: Any = torch.backends.mkl
    return bool(library.is_available()) and "AMD" in maker


def _is_grouped(weight: torch.Tensor) -> bool:
    """Return whether torch's grouped product takes these weights."""
    item = weight.element_size()
    return (
        weight.device.type == "cpu"
        and weight.dtype in _GROUPED_TYPES
        and all(size * item % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
        and (weight.is_contiguous() or weight.mT.is_contiguous())
        and weight.data_ptr() % _ALIGNMENT_BYTES == 0
    )


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.grouped_mm(left, right, offs=ends)


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


def one_row_each(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor
) -> torch.Tensor:
    """Return W x + b for each of a few rows x [R, K] and its expert [R], [R, N]."""
    found = rows.new_empty((len(rows), weight.shape[1]))
    beta = 0 if bias is None else 1  # with 0, what is added is not looked at
    # MKL has a kernel for a matrix and a vector; oneDNN's, for 16 bits, is the slower one, and a
    # call costs as much as to copy a small weight.
    is_wide = rows.dtype in {torch.float32, torch.float64}
    if not is_wide and weight[0].nbytes <= _COPIED_BYTES:
        start = (found if bias is None else bias.index_select(0, experts)).unsqueeze(2)
        copied = weight.index_select(0, experts)
        return torch.baddbmm(start, copied, rows.unsqueeze(2), beta=beta).squeeze(2)
    for expert, row, result in zip(experts.tolist(), rows.unbind(0), found.unbind(0), strict=True):
        start = result if bias is None else bias[expert]
        if is_wide:
            torch.addmv(start, weight[expert], row, beta=beta, out=result)
        else:
            turned, out = weight[expert].t(), result.unsqueeze(0)
            torch.addmm(start, row.unsqueeze(0), turned, beta=beta, out=out)
    return found
