"""The costs of ``_fabric`` on columns: one entry per plan. Tested equal to the scalar ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fivefold.strategy._fabric import FabricSpec, Tier

__all__ = ["all_reduce_column_s", "gather_column_s", "point_to_point_column_s"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class _Ring:
    """What a ring over groups of given sizes and strides meets, tier by tier."""

    def __init__(self, fabric: FabricSpec, size: Ints, stride: Ints) -> None:
        self.size = size
        self.rate = np.full(size.shape, np.inf)
        self.base_s = np.zeros(size.shape)
        self.fill_s = np.zeros(size.shape)
        self.gain = np.ones(size.shape)
        self.num_crossed = np.zeros(size.shape, dtype=np.int64)
        self.crossed: list[tuple[Tier, npt.NDArray[np.bool_], Ints]] = []
        below = np.minimum(size, 1)
        for tier in fabric.tiers:
            inside = np.maximum(1, np.minimum(size, tier.gpus // stride))
            self._cross(tier, inside > below, below)
            below = np.maximum(below, inside)
        self._cross(fabric.tiers[-1], below < size, below)

    def _cross(self, tier: Tier, mask: npt.NDArray[np.bool_], members: Ints) -> None:
        self.rate = np.where(
            mask, np.minimum(self.rate, tier.rate_bytes_per_s * members), self.rate
        )
        self.base_s = np.where(mask, np.maximum(self.base_s, tier.base_s), self.base_s)
        self.fill_s = np.where(mask, np.maximum(self.fill_s, tier.fill_s), self.fill_s)
        self.gain = np.where(mask & (self.num_crossed == 0), tier.all_reduce_gain, self.gain)
        self.num_crossed += mask
        self.crossed.append((tier, mask, members))

    def latency_s(self, *, tree: bool) -> Floats:
        """As NCCL counts it: every member of a ring, the logarithm of a tree's nodes."""
        outside = self.size.copy()
        total = np.zeros(self.size.shape)
        left = self.num_crossed.copy()
        for tier, mask, members in reversed(self.crossed):
            units = np.maximum(outside // members, 1)
            innermost = (members == 1) & (self.num_crossed > 1) & (left == 1)
            steps = np.where(
                innermost | (not tree), units - 1, np.ceil(np.log2(units.astype(np.float64)))
            )
            rings = np.ones_like(units) if tree else self.size // outside
            total += np.where(mask, rings * steps * tier.hop_s, 0.0)
            outside = np.where(mask, members, outside)
            left -= mask
        return self.base_s + total

    def tree_s(self, size_bytes: Floats) -> Floats:
        """Two trees of half the data each, at the slowest tier."""
        outside, slowest = self.size.copy(), np.zeros(self.size.shape)
        for tier, mask, members in reversed(self.crossed):
            units = outside / members
            sent_s = 2.0 * (units - 1) / units * size_bytes / (tier.rate_bytes_per_s * members)
            slowest = np.where(mask, np.maximum(slowest, sent_s), slowest)
            outside = np.where(mask, members, outside)
        return slowest / 0.92

    def filling_s(self, size_bytes: Floats) -> Floats:
        """What a pipelined collective needs to fill."""
        filling: Floats = 2.0 * np.sqrt(self.fill_s * size_bytes / self.rate)
        return filling


def gather_column_s(fabric: FabricSpec, *, size_bytes: Floats, size: Ints, stride: Ints) -> Floats:
    """All-gathers or reduce-scatters of one group each."""
    ring = _Ring(fabric, size, stride)
    moved = size_bytes * (size - 1) / size
    time_s = ring.latency_s(tree=False) + moved / ring.rate + ring.filling_s(size_bytes)
    return np.where((size > 1) & (size_bytes > 0), time_s, 0.0)


def all_reduce_column_s(
    fabric: FabricSpec, *, size_bytes: Floats, size: Ints, stride: Ints
) -> Floats:
    """All-reduces of one group each, by ring or by tree."""
    ring = _Ring(fabric, size, stride)
    gain = np.where(ring.num_crossed == 1, ring.gain, 1.0)
    moved = 2.0 * size_bytes * (size - 1) / size
    ring_s = 2.0 * ring.latency_s(tree=False) + moved / (ring.rate * gain)
    tree_s = 2.0 * ring.latency_s(tree=True) + ring.tree_s(size_bytes) / gain
    time_s = np.minimum(ring_s, tree_s) - ring.base_s + ring.filling_s(size_bytes)
    return np.where((size > 1) & (size_bytes > 0), time_s, 0.0)


def point_to_point_column_s(
    fabric: FabricSpec, *, size_bytes: Floats, size: Ints, stride: Ints
) -> Floats:
    """Messages between neighbours of groups of the given strides."""
    time_s = np.full(size.shape, np.nan)
    for tier in reversed(fabric.tiers):
        here = tier.base_s + tier.hop_s + size_bytes / tier.exchange_rate_bytes_per_s
        outermost = tier is fabric.tiers[-1]
        time_s = here if outermost else np.where(stride < tier.gpus, here, time_s)
    return np.where((size > 1) & (size_bytes > 0), time_s, 0.0)
