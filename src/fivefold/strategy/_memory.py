"""Bytes on the fullest GPU: weights, gradients, optimizer states, activations, buffers.

Weights are 2 bytes; gradients, optimizer states, reserve and fragments are the stack's. Three
stages can be the fullest: the first (embedding, most micro-batches in flight), the one after it
(most layers) and the last (head and logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.strategy._columns import Columns
from fivefold.strategy._layer import Floats
from fivefold.strategy._muon import spared_bytes
from fivefold.strategy.pipeline import stored_at

_LAYERS_AT_WORK = 2.0


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes on the fullest GPU.

    Args:
        weights_bytes: Parameters in working precision.
        gradients_bytes: Gradients.
        optimizer_bytes: Master copy and moments.
        activations_bytes: Stored between forward and backward.
        working_bytes: Buffers: a recomputed layer, gathered layers, local updates' outer state.
        reserved_bytes: The stack's own, and fragments of all the rest.
        host_bytes: What was moved to host memory, per GPU.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float
    reserved_bytes: float
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Return all that is on the device."""
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
            + self.activations_bytes + self.working_bytes + self.reserved_bytes
        )  # fmt: skip

    @property
    def states_bytes(self) -> float:
        """Return weights, gradients and optimizer states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def memory_use(columns: Columns) -> MemoryUse:
    """Return the bytes of the fullest stage of a table of one plan."""
    stages = (0, 2) if int(columns.table.pipeline[0]) < 3 else (0, 2, 1)
    uses = [
        MemoryUse(**{name: float(column[0]) for name, column in stage_bytes(columns, i).items()})
        for i in stages
    ]
    return max(uses, key=lambda use: use.total_bytes)


def fullest_bytes(columns: Columns) -> Floats:
    """Return bytes on the fullest GPU of every plan."""
    first, middle, last = (_total_bytes(stage_bytes(columns, stage)) for stage in range(3))
    return np.maximum(np.maximum(first, np.where(columns.table.pipeline > 2, middle, 0.0)), last)


def _total_bytes(parts: dict[str, Floats]) -> Floats:
    names = [name for name in parts if name != "host_bytes"]
    return sum((parts[name] for name in names[1:]), parts[names[0]])


def stage_bytes(columns: Columns, stage: int) -> dict[str, Floats]:
    """Return the fields of ``MemoryUse`` of the first (0), middle (1) or last (2) stage."""
    t, device = columns.table, columns.device
    states, held = columns.parameters(stage), columns.held
    copies = np.where(t.is_word("schedule", "dualpipe") & (t.pipeline > 1), 2.0, 1.0)
    width = columns.element_bytes
    frozen = columns.frozen_bytes(stage, width=width)
    weights = copies * (width * held(states, zero=3) + held(frozen, zero=3))
    gradients = copies * device.gradient_bytes * held(states, zero=2)
    optimizer = columns.state_bytes * held(states) - spared_bytes(columns, stage)
    stored = stored_bytes(columns, stage)
    layers = columns.each
    gathered = (width + device.gradient_bytes) * states.sum(0) + frozen.sum(0)
    gathered = device.gathered_layers * gathered / layers
    again = np.where(columns.counts[stage] > 0, columns.layer["working_bytes"], 0.0)
    working = again + np.where(t.zero == 3, gathered, 0.0)
    workers = np.where(t.zero >= 3, columns.replicas / columns.shards[0], columns.replicas)
    # Ranks that share states are one worker.
    outer = device.outer_state_bytes + device.outer_owned_bytes / workers
    outer = outer * held(states, zero=3)
    working = working + np.where(t.tau > 1, outer, 0.0)
    host = np.zeros(len(t))
    if t.offload_weights.any() or t.offload_optimizer.any() or t.offload_activations.any():
        host = np.where(t.offload_weights == 1, weights, 0.0)
        at_work = weights * np.minimum(_LAYERS_AT_WORK / layers, 1.0)
        weights = np.where(t.offload_weights == 1, at_work, weights)
        host = host + np.where(t.offload_optimizer == 1, optimizer, 0.0)
        optimizer = np.where(t.offload_optimizer == 1, 0.0, optimizer)
        heads = _head_bytes(columns, stage)  # the loss reads them at once
        moved = (stored - heads) * columns.share_of_layers("offload_layers")
        at_work = stored - np.maximum(moved - _LAYERS_AT_WORK * columns.layer["stored_bytes"], 0.0)
        host = host + np.where(t.offload_activations == 1, stored - at_work, 0.0)
        stored = np.where(t.offload_activations == 1, at_work, stored)
    if device.frees_gradients:
        gradients, stored, spared = _fullest_moment(columns, stage, gradients, stored, again)
        working = working - spared
    used = weights + gradients + optimizer + stored + working
    return {
        "weights_bytes": weights, "gradients_bytes": gradients, "optimizer_bytes": optimizer,
        "activations_bytes": stored, "working_bytes": working,
        "reserved_bytes": device.reserved_bytes + device.fragments * used, "host_bytes": host,
    }  # fmt: skip


def _fullest_moment(
    columns: Columns, stage: int, gradients: Floats, stored: Floats, again: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return gradients and activations at the fullest moment, and buffers not there then.

    That is the loss, the first layer of backward, the last (whose own gradients and the embedding's
    are still to come), or the end. Both gradients of a tied matrix stay until their sum is there.
    """
    t, model, whole = columns.table, columns.model, columns.parameters(stage).sum(0)
    one, none = t.pipeline == 1, np.zeros(len(t))
    embedding = head = none
    if model.adapters is None and not model.stages:
        embedding = np.where(one | (stage == 0), model.embedding_parameters / t.tensor, 0.0)
        head = np.where(one | (stage == 2), model.vocab * model.hidden / t.tensor, 0.0)
    twice = head * (one & model.tied)
    layers = whole + twice - embedding - head
    late = layers / np.maximum(columns.counts[stage], 1) + embedding - twice
    there = np.where(
        columns.micro_batches == 1,
        (none, head, whole - late, whole + 2 * twice),
        (whole, whole + twice, whole + twice, whole + 3 * twice),
    )
    heads, storing = _head_bytes(columns, stage), 1 - columns.share_of_layers("recompute_layers")
    layer = np.minimum(columns.layer["stored_bytes"] - storing * again, stored - heads)
    kept = np.stack((stored, stored - heads, layer, none))
    spared = np.stack((again, none, none, again))
    held = gradients / np.maximum(whole, 1.0) * there
    at = (np.argmax(held + kept - spared, axis=0), np.arange(len(t)))
    return held[at], kept[at], spared[at]


def stored_bytes(columns: Columns, stage: int) -> Floats:
    """Return the activations that the first, second or last stage keeps."""
    t, model = columns.table, columns.model
    in_flight = _in_flight(columns, stage)
    stored: Floats = in_flight * columns.counts[stage] * columns.layer["stored_bytes"]
    if model.dropout and not model.stages:
        split = t.context * np.where(t.sequence_parallel == 1, t.tensor, 1)
        # The embedding's dropout marks one byte per element.
        marks = in_flight * t.micro_batch * model.seq_len * model.hidden / split
        stored = stored + np.where((t.pipeline == 1) | (stage == 0), marks, 0.0)
    return stored + _head_bytes(columns, stage)


def _head_bytes(columns: Columns, stage: int) -> Floats:
    """Return what head and loss keep of them, which the last stage has."""
    t = columns.table
    count = np.where(t.is_word("schedule", "gpipe"), _in_flight(columns, stage), 1.0)
    heads = count * columns.head["stored_bytes"]
    return np.where((t.pipeline == 1) | (stage == 2), heads, 0.0)


def _in_flight(columns: Columns, stage: int) -> Floats:
    """Return the micro-batches whose activations a stage keeps at its worst moment."""
    t = columns.table
    after = t.pipeline - 1 - (t.pipeline - 1 if stage == 2 else stage)
    in_flight = np.ones(len(t))
    for schedule in t.words("schedule"):
        stored = stored_at(
            schedule, after=after, stages=t.pipeline, micro_batches=columns.micro_batches,
            virtual=t.virtual,
        )  # fmt: skip
        in_flight = np.where(t.is_word("schedule", schedule), stored, in_flight)
    return in_flight
