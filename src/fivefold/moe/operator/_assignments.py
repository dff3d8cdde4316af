"""Assignments of tokens to experts in the order of the experts, and sums back by token.

The rows of an expert stand together, so that each of its products is one dense call. The outputs
go back by [T, K] places and are added in the order of k in float32 at least, so the result does not
depend on how the rows were sorted or split.

Shapes: T tokens, K experts per token, R assignments that were not dropped, H width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignments:
    """Assignments in the order of their experts; within an expert by token, then slot.

    Attributes:
        slots: Flat place t K + k of each, int64 [R]; dropped ones are left out.
        tokens: Its token, int64 [R].
        places: Where each slot stands in this order, int64 [T, K]; R for what was dropped.
        ends: Where the rows of each expert end, int32 [E].
        stops: The same as numbers.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    stops: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.stops[-1]

    @property
    def drops(self) -> bool:
        """Return whether some slot has no row."""
        return self.num_rows < self.places.numel()

    @property
    def busy_experts(self) -> int:
        """Experts with rows."""
        return len({0, *self.stops}) - 1


def sort_assignments(ids: torch.Tensor, num_experts: int) -> Assignments:
    """Bring assignments of one expert together.

    Args:
        ids: [T, K]; -1 for none.
        num_experts: E.

    Returns:
        The order.

    Raises:
        ConfigurationError: There is no such expert.
    """
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
    return Assignments(
        slots=slots,
        tokens=torch.div(slots, max(ids.shape[1], 1), rounding_mode="floor"),
        places=_places(slots, ids.numel()).view(ids.shape),
        ends=ends,
        stops=tuple(stops),
    )


def _places(slots: torch.Tensor, count: int) -> torch.Tensor:
    """Where each of ``count`` slots stands among these; beyond the last where it does not."""
    if len(slots) == count:
        return slots.argsort()
    places = slots.new_full((count,), len(slots))
    return places.scatter_(0, slots, torch.arange(len(slots), device=slots.device))


def added(
    rows: torch.Tensor, order: Assignments, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over k, in order, of the rows of each token.

    Args:
        rows: [R, H], or [R + 1, H] with zeros in the last.
        order: Where they belong.
        weights: [T, K], to multiply with; None for ones.

    Returns:
        [T, H], in float32 at least.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(wide)
    if order.places.numel() == 0:
        return rows.new_zeros((len(order.places), rows.shape[1]))
    if order.drops and len(rows) == order.num_rows:
        rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
    factors = None if weights is None else weights.to(wide)
    if rows.device.type == "cpu":
        # Gathers, weighs and adds in one pass, in the order of k.
        flat = None if factors is None else factors.reshape(-1)
        places = order.places.view(-1)
        firsts = torch.arange(0, len(places), order.places.shape[1])
        return torch.embedding_bag(rows, places, firsts, per_sample_weights=flat)[0]
    return _added_one_by_one(rows, order.places, factors)


def _added_one_by_one(
    rows: torch.Tensor, places: torch.Tensor, factors: torch.Tensor | None
) -> torch.Tensor:
    total = rows.new_zeros((len(places), rows.shape[1]))
    for slot, column in enumerate(places.t().contiguous().unbind(0)):
        term = rows.index_select(0, column)
        if factors is None:
            total += term
        else:
            total.addcmul_(term, factors[:, slot, None])
    return total
