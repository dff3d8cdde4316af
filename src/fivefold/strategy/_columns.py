"""A table of plans with what several formulas need: groups, layers of a stage, parameters.

Layers are looked up: the few hundred that differ are computed by ``_layer``. Parameters and their
bytes are arrays of two rows: those of a data-parallel group, and routed experts'.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec, collective_time_s
from fivefold.collectives.pricing.fabric import Groups
from fivefold.strategy._layer import Floats, LayerCost, head_cost, mean_layer_cost
from fivefold.strategy._operators import ELEMENT_BYTES, WIDE_BYTES, LayerShape
from fivefold.strategy.cluster import DeviceSpec
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import BASE_BYTES
from fivefold.strategy.pipeline import stage_layers
from fivefold.strategy.plan import PlanTable, decode

Ints = npt.NDArray[np.int64]
MASTER_BYTES = 4.0
"""Width of the copy of the parameters that an optimizer of 16-bit parameters updates."""
_COSTS = tuple(field.name for field in fields(LayerCost))
# What of a plan a layer's cost depends on, degrees and places apart.
_KEYED = ("micro_batch", "sequence_parallel", "regather", "recompute", "tensor_overlap", "dtype",
          "expert_tensor", "shared_overlap")  # fmt: skip


@dataclass
class Columns:
    """A table with what several formulas need, computed once."""

    model: ModelSpec
    device: DeviceSpec
    fabric: FabricSpec
    table: PlanTable

    def __post_init__(self) -> None:
        t = self.table
        if len(t):
            self.fabric = self.fabric.packed(int(t.num_gpus[0]))
        # Multi-token prediction is a further layer, and the head once more, for each token.
        self.losses = 1 + self.model.predicted_tokens
        if self.model.predicted_tokens:
            layers = self.model.num_layers + self.model.predicted_tokens
            self.model = dataclasses.replace(self.model, num_layers=layers, predicted_tokens=0)
        self.replicas: Ints = t.axes["data"][0]
        self.shards: Ints = np.stack([t.axes[axis][0] for axis in ("shard", "expert_shard")])
        # Where nothing but the tensor group talks inside a layer, its place does not matter.
        self.layer_stride: Ints = np.where(t.context * t.expert > 1, t.axes["data"][1], 0)
        self.wide: npt.NDArray[np.bool_] = t.is_word("dtype", "fp32") | self.device.autocast
        self.element_bytes: Floats = np.where(self.wide, WIDE_BYTES, ELEMENT_BYTES)
        # In 32 bits the optimizer has no copy of the parameters beside them.
        states = self.device.optimizer_state_bytes
        self.state_bytes: Floats = np.where(self.wide, max(states - MASTER_BYTES, 0.0), states)
        wire = self.device.parameter_wire_bytes
        self.parameter_wire_bytes: Floats = np.where(self.wide, WIDE_BYTES, wire)
        self.micro_batches: Ints = t.global_batch // (t.data * t.micro_batch)
        self.expert_split: Ints = np.where(t.expert_tensor == 1, 1, t.tensor)
        self.each: Floats = np.maximum(self.model.num_layers / t.pipeline, 1.0)
        self._parameters: dict[int, Floats] = {}
        self.counts = stage_layers(
            self.model.num_layers, t.pipeline, embedding_layers=t.embedding_layers == 1,
            losses=self.losses,
        )  # fmt: skip

    def group(self, axis: str) -> Groups:
        """Return the groups of an axis of every plan's mesh."""
        size, stride = self.table.axes[axis]
        return Groups(size=size, stride=stride, ranks=self.table.num_gpus)

    def time_s(self, kind: str, size_bytes: Floats, axis: str) -> Floats:
        """Return seconds of a collective of each plan."""
        return collective_time_s(self.fabric, kind, size_bytes=size_bytes, group=self.group(axis))

    def both_s(self, kind: str, size_bytes: Floats, axis: str) -> Floats:
        """Return seconds of a collective of parameters, and of the one of routed experts."""
        kept_s = self.time_s(kind, size_bytes[0], axis)
        return kept_s + self.time_s(kind, size_bytes[1], f"expert_{axis}")

    def held(self, states: Floats, *, zero: int = 1) -> Floats:
        """Return what a rank holds of states that are shared from a stage of ZeRO on."""
        shared = self.table.zero >= zero
        held: Floats = np.where(shared, (states / self.shards).sum(0), states.sum(0))
        return held

    @functools.cached_property
    def layer(self) -> dict[str, Floats]:
        """Return the costs of the mean layer, as ``LayerCost`` names them."""
        layer = self._costs[0]
        share = self.share_of_layers("recompute_layers")
        if (share == 1.0).all() or not self.table.recompute.any():
            return layer
        # Some layers of a stage store what the others compute again.
        storing = {**self.table.columns, "recompute": np.zeros_like(self.table.recompute)}
        stored = Columns(self.model, self.device, self.fabric, PlanTable(storing)).layer
        blend = {name: share * layer[name] + (1 - share) * stored[name] for name in _COSTS}
        return {**blend, "working_bytes": layer["working_bytes"]}

    def share_of_layers(self, name: str) -> Floats:
        """Return which share of a stage's layers a number of layers is; 0 stands for all."""
        chosen = self.table.columns[name]
        return np.where(chosen == 0, 1.0, np.minimum(chosen / self.each, 1.0))

    @functools.cached_property
    def head(self) -> dict[str, Floats]:
        """Return the costs of the head, for every token that is predicted."""
        return {name: self.losses * cost for name, cost in self._costs[1].items()}

    @functools.cached_property
    def _costs(self) -> tuple[dict[str, Floats], ...]:
        """Look up layers and heads by what they depend on."""
        t = self.table
        place = ((t.tensor * 4096 + t.context) * 4096 + t.expert) * 2**28 + self.layer_stride
        _, place_id = np.unique(place, return_inverse=True)
        ranks, ranks_id = np.unique(t.num_gpus, return_inverse=True)
        key = place_id.astype(np.int64) * len(ranks) + ranks_id
        for name in _KEYED:
            key = key * (int(t.columns[name].max(initial=0)) + 1) + t.columns[name]
        _, first, index = np.unique(key, return_index=True, return_inverse=True)
        shapes = [self.shape(int(row)) for row in first]
        costs = (
            [of(self.model, self.fabric, shape) for shape in shapes]
            for of in (mean_layer_cost, head_cost)
        )
        return tuple(
            {name: np.array([getattr(c, name) for c in own])[index.reshape(-1)] for name in _COSTS}
            for own in costs
        )

    def shape(self, row: int) -> LayerShape:
        """Return the share of a layer of one GPU of a plan."""
        t, names = self.table, (*_KEYED, "tensor", "context", "expert")
        return LayerShape(
            **{name: decode(name, int(t.columns[name][row])) for name in names},
            device=self.device, data_stride=int(self.layer_stride[row]),
            ranks=int(t.num_gpus[row]),
        )  # fmt: skip

    def parameters(self, stage: int) -> Floats:
        """Return the trained parameters on one GPU of a stage, from 0 to 2."""
        if stage not in self._parameters:
            self._parameters[stage] = self._count_parameters(stage)
        return self._parameters[stage]

    def _count_parameters(self, stage: int) -> Floats:
        model, t = self.model, self.table
        if model.stages:
            return np.stack([model.num_parameters / t.pipeline, np.zeros(len(t))])
        if model.adapters is not None:
            return self.matrix_parameters(stage)
        return self._of_layers(stage) + self._outside(stage)

    def matrix_parameters(self, stage: int) -> Floats:
        """Return the trained matrices of a stage's layers on one GPU: all, or adapters."""
        model = self.model
        if model.adapters is not None:
            kept = sum(
                model.share_of(letter)
                * model.adapter_parameters(*(part for part in parts if part != "experts"))
                for letter, parts in model.parts_of.items()
            )
            return self._split(stage, kept, model.adapter_parameters("experts"))
        kept = sum(
            model.share_of(letter) * matrix.size
            for letter, parts in model.parts_of.items()
            for part in parts if part != "experts"
            for matrix in model.matrices(part)
        )  # fmt: skip
        return self._split(stage, kept, model.routed_parameters)

    def _split(self, stage: int, kept: float, routed: float) -> Floats:
        """Return what is on one GPU of a mean layer's parameters, and of an expert layer's."""
        t, count, share = self.table, self.counts[stage], self.model.share_of("E")
        return np.stack([count * kept / t.tensor,
                         count * share * routed / (self.expert_split * t.expert)])  # fmt: skip

    def frozen_bytes(self, stage: int, *, width: Floats) -> Floats:
        """Return the bytes of frozen parameters, each of ``width`` at most."""
        if self.model.adapters is None:
            return np.zeros((2, len(self.table)))
        base = np.minimum(width, BASE_BYTES[self.model.adapters.base])
        return base * self._of_layers(stage) + width * self._outside(stage)

    def _of_layers(self, stage: int) -> Floats:
        """Return the parameters of a stage's layers, norms apart."""
        model = self.model
        kept = sum(model.share_of(letter) * model.unrouted_of(letter) for letter in model.parts_of)
        return self._split(stage, kept, model.routed_parameters)

    def _outside(self, stage: int) -> Floats:
        """Return the parameters of norms, and of embedding and head on a stage."""
        model, t = self.model, self.table
        copy = np.where((t.pipeline > 1) & model.tied, model.vocab * model.hidden, 0)
        head = (model.head_parameters + copy) / t.tensor
        one = t.pipeline == 1
        kept = self.counts[stage] * model.norms_per_layer
        kept = kept + np.where(one | (stage == 0), model.embedding_parameters / t.tensor, 0.0)
        return np.stack([kept + np.where(one | (stage == 2), head, 0.0), np.zeros(len(t))])

    def outer_parameters(self) -> Floats:
        """Return the parameters of the first or the last stage, whichever keeps more."""
        first, last = self.parameters(0), self.parameters(2)
        more = (first[0] > last[0]) | ((first[0] == last[0]) & (first[1] >= last[1]))
        return np.where(more, first, last)
