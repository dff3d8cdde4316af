"""What Muon costs: products that make each matrix's momentum orthogonal, on whole matrices.

Matrices of layers have one moment instead of two; embedding, head, norms and vectors stay with
AdamW. Ranks that share states deal out whole matrices; where parameters are shared too (ZeRO-3),
momenta are sent to the rank that takes a matrix, and back. A tensor group's ranks each take their
own slice for a matrix.

References:
    Jordan et al., Muon, 2024; Liu et al., arXiv 2502.16982 (sharing whole matrices).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.strategy._columns import MASTER_BYTES, Columns
from fivefold.strategy._layer import Floats
from fivefold.strategy.cluster import DeviceSpec, gemm_time_s
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import WeightMatrix

_STEPS = 5
_MOMENTUM_BYTES = 2.0


def moment_bytes(device: DeviceSpec) -> float:
    """Return the width of one of AdamW's moments: half of what stands beside the master copy."""
    return min(max(device.optimizer_state_bytes - MASTER_BYTES, 0.0) / 2, 4.0)


def spared_bytes(columns: Columns, stage: int) -> Floats | float:
    """Return the optimizer states that Muon does without on a GPU of a stage."""
    muon = columns.table.is_word("optimizer", "muon")
    if not muon.any():
        return 0.0
    count = columns.held(columns.matrix_parameters(stage))
    return np.where(muon, moment_bytes(columns.device) * count, 0.0)


def muon_s(columns: Columns) -> Floats | float:
    """Return what Muon adds to AdamW's step, in seconds: products and messages, less a moment."""
    t, device = columns.table, columns.device
    muon = t.is_word("optimizer", "muon")
    if not muon.any():
        return 0.0
    stage = 1  # as many layers as any
    shards = np.where(t.zero >= 1, columns.shards, 1)
    each = _layers_s(columns)
    products_s = columns.counts[stage] * (each[:, 0] / shards[0] + each[:, 1] / shards[1])
    products_s = np.maximum(products_s, each[:, 2])
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    read = 2 * moment_bytes(device) * columns.held(columns.matrix_parameters(stage))
    sent_s = columns.both_s("all_to_all", whole_bytes(columns), "shard")
    added_s = products_s - read / rate + np.where(t.zero == 3, sent_s, 0.0)
    return np.where(muon, added_s, 0.0)


def whole_bytes(columns: Columns) -> Floats:
    """Return the bytes of momenta that are sent to make matrices whole, and back."""
    return 2 * _MOMENTUM_BYTES * columns.matrix_parameters(1) / columns.shards


def _layers_s(columns: Columns) -> Floats:
    """Return the seconds by plan of a mean layer's matrices, kept, routed, and of the largest."""
    t = columns.table
    degrees = np.stack([t.tensor, t.expert, columns.expert_split], axis=1)
    different, index = np.unique(degrees, axis=0, return_inverse=True)
    found = np.array([_seconds(columns, *map(int, row)) for row in different])
    seconds: Floats = found[index.reshape(-1)]
    return seconds


def _seconds(columns: Columns, tensor: int, expert: int, split: int) -> tuple[float, float, float]:
    model, device = columns.model, columns.device
    kept = routed = largest = 0.0
    for letter, parts in model.parts_of.items():
        share = model.share_of(letter)
        for part in parts if share else ():
            own = split if part == "experts" else tensor
            for matrix in model.matrices(part):
                each = sum(_matrix_s(device, *shape) for shape in _shapes(model, matrix, split=own))
                largest = max(largest, each)
                if part == "experts":
                    routed += share * each * matrix.count / expert
                else:
                    kept += share * each
    return kept, routed, largest


def _shapes(model: ModelSpec, matrix: WeightMatrix, *, split: int) -> list[tuple[float, float]]:
    """Return the sizes of what is trained of a matrix on one GPU: itself, or its adapter."""
    inputs = matrix.inputs / (split if matrix.split == "rows" else 1)
    outputs = matrix.outputs / (split if matrix.split == "columns" else 1)
    if model.adapters is None:
        return [(inputs, outputs)]
    if not model.is_adapted(matrix):
        return []
    rank = model.adapters.rank
    return [(inputs, rank / (split if matrix.split == "columns" else 1)), (rank, outputs)]


def _matrix_s(device: DeviceSpec, rows: float, columns: float) -> float:
    """Time five Newton-Schulz steps of a x b, a <= b: X X', its square, and that times X.

    FLOPs of a step: 4 a a b + 2 a a a, in 16 bits.
    """
    a, b = min(rows, columns), max(rows, columns)
    sizes: tuple[dict[str, Any], ...] = (
        {"m": a, "n": a, "k": b}, {"m": a, "n": a, "k": a}, {"m": a, "n": b, "k": a},
    )  # fmt: skip
    return _STEPS * sum(gemm_time_s(device, **size) for size in sizes)
