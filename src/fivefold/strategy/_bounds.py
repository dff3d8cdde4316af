"""What no switch can change of an outer choice: least time, least memory.

Time: every micro-batch on a stage of mean speed at the fastest layer that any switch gives, and
the schedule's idle time at that speed. The slowest stage is no faster than the mean, messages and
the optimizer only add. Memory: states shared and offloaded as far as the space allows, the least
stored activations of any switch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec
from fivefold.strategy._columns import Columns
from fivefold.strategy._device import DeviceSpec
from fivefold.strategy._memory import OPTIMIZER_BYTES, WEIGHT_BYTES
from fivefold.strategy._model import ModelSpec
from fivefold.strategy._plan import ParallelPlan
from fivefold.strategy._space import Pattern, SearchSpace, block_table, layer_table
from fivefold.strategy._table_cost import exchanging_layer, least_time_column
from fivefold.strategy._table_memory import stored_column

Floats = npt.NDArray[np.float64]
_ROUNDING = 1e-9


def lower_bounds(
    model: ModelSpec, device: DeviceSpec, fabric: FabricSpec, *, space: SearchSpace,
    plans: list[ParallelPlan], patterns: list[Pattern],
) -> tuple[Floats, Floats]:  # fmt: skip
    """Least seconds and least bytes of every outer choice, over all its switches."""
    time_s, memory_bytes = np.zeros(len(plans)), np.zeros(len(plans))
    for pattern in set(patterns):
        rows = np.array([i for i, p in enumerate(patterns) if p == pattern])
        inner = layer_table(space, pattern)
        table = block_table([plans[i] for i in rows], inner)
        columns = Columns(model, device, fabric, table)
        layer, head = columns.layer()
        shape = (len(rows), len(inner["recompute"]))
        faster = exchanging_layer(columns, layer)
        times = least_time_column(columns, faster, head).reshape(shape)
        time_s[rows] = times.min(axis=1)
        stored = stored_column(columns, layer, head, stage=0)
        if True in space.offload:
            stored = np.minimum(stored, 2.0 * layer["stored_bytes"])
        least = (stored + layer["working_bytes"]).reshape(shape).min(axis=1)
        states = _least_states(columns, space, pattern).reshape(shape)[:, 0]
        memory_bytes[rows] = least + states + device.reserved_bytes
    return time_s * (1 - _ROUNDING), memory_bytes * (1 - _ROUNDING)


def _least_states(columns: Columns, space: SearchSpace, pattern: Pattern) -> Floats:
    """States of the first stage, whose activations the bound takes too."""
    kept, routed = columns.parameters(0)
    whole = kept + routed
    levels = space.zero if pattern.copies else (0,)
    most = max(levels)
    shards = columns.replicas
    shared = kept / shards + routed / np.maximum(shards / columns.table.expert, 1.0)
    weights = WEIGHT_BYTES * (shared if most >= 3 else whole)
    gradients = columns.device.gradient_bytes * (shared if most >= 2 else whole)
    optimizer = OPTIMIZER_BYTES * (shared if most >= 1 else whole)
    if True in space.offload:
        layers = np.maximum(columns.model.num_layers / columns.table.pipeline, 1.0)
        return weights * np.minimum(2.0 / layers, 1.0) + gradients
    return weights + gradients + optimizer
