"""Bytes on the fullest GPU of many plans at once. ``_memory`` says what it has to equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fivefold.strategy._columns import Columns
from fivefold.strategy._memory import OPTIMIZER_BYTES, WEIGHT_BYTES

Floats = npt.NDArray[np.float64]


def memory_column(columns: Columns, layer: dict[str, Floats], head: dict[str, Floats]) -> Floats:
    """Bytes on the fullest GPU of every plan."""
    t = columns.table
    first = _stage_bytes(columns, layer, head, stage=0)
    middle = np.where(t.pipeline > 2, _stage_bytes(columns, layer, head, stage=1), 0.0)
    last = _stage_bytes(columns, layer, head, stage=2)
    return np.maximum(np.maximum(first, middle), last)


def _stage_bytes(
    columns: Columns, layer: dict[str, Floats], head: dict[str, Floats], *, stage: int
) -> Floats:
    t, device = columns.table, columns.device
    kept, routed = columns.parameters(stage)
    states, shared = kept + routed, kept / columns.shards + routed / columns.expert_shards
    copies = np.where(t.is_word("schedule", "dualpipe") & (t.pipeline > 1), 2.0, 1.0)
    weights = copies * WEIGHT_BYTES * np.where(t.zero >= 3, shared, states)
    gradients = copies * device.gradient_bytes * np.where(t.zero >= 2, shared, states)
    optimizer = OPTIMIZER_BYTES * np.where(t.zero >= 1, shared, states)
    stored = stored_column(columns, layer, head, stage=stage)
    layers = np.maximum(columns.model.num_layers / t.pipeline, 1.0)
    gathered = 2.0 * (WEIGHT_BYTES + device.gradient_bytes) * states / layers
    working = layer["working_bytes"] + np.where(t.zero == 3, gathered, 0.0)
    working = working + np.where(t.tau > 1, 2.0 * WEIGHT_BYTES * states, 0.0)
    weights = np.where(t.offload_weights == 1, weights * np.minimum(2.0 / layers, 1.0), weights)
    optimizer = np.where(t.offload_optimizer == 1, 0.0, optimizer)
    flying = np.minimum(stored, 2.0 * layer["stored_bytes"])
    stored = np.where(t.offload_activations == 1, flying, stored)
    return weights + gradients + optimizer + stored + working + device.reserved_bytes


def stored_column(
    columns: Columns, layer: dict[str, Floats], head: dict[str, Floats], *, stage: int
) -> Floats:
    """Activations that the first, second or last stage keeps."""
    t, model = columns.table, columns.model
    flying = _flying(columns, stage)
    stored = flying * columns.counts[stage] * layer["stored_bytes"]
    first = (t.pipeline >= 1) if stage == 0 else (t.pipeline < 0)
    if model.dropout and not model.stages:
        split = t.context * np.where(t.sequence_parallel == 1, t.tensor, 1)
        marks = flying * t.micro_batch * model.seq_len * model.hidden / split
        stored = stored + np.where(first | ((stage == 2) & (t.pipeline == 1)), marks, 0.0)
    heads = np.where(t.is_word("schedule", "gpipe"), flying, 1.0) * head["stored_bytes"]
    is_last = (t.pipeline == 1) | (stage == 2)
    return stored + np.where(is_last, heads, 0.0)


def _flying(columns: Columns, stage: int) -> Floats:
    """Micro-batches of a whole stage that are in flight on the first, second or last stage."""
    t, m = columns.table, columns.micro_batches
    p, v = t.pipeline, t.virtual
    last = p - 1 - (p - 1 if stage == 2 else stage)
    counts = {
        "gpipe": m, "1f1b": last + 1, "zb_1p": last + 1, "zb_2p": 2 * last + 1,
        "interleaved": p + (2 * last - (p - 1)) / v, "zb_v": p, "v_half": p / 2, "v_min": p / 3,
        "dualpipe": p + 1, "dualpipe_v": p + 0.5,
    }  # fmt: skip
    flying = np.ones(len(t))
    for word, column in counts.items():
        flying = np.where(t.is_word("schedule", word), np.minimum(column, m), flying)
    return np.where(p == 1, 1.0, flying)
