"""A table of plans with what several formulas need: groups, strides, layers of a stage, parameters.

Layers are looked up: the few hundred that differ are computed by ``_layer``.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec, collective_time_s
from fivefold.collectives.pricing.fabric import Groups
from fivefold.strategy._layer import LayerCost, LayerKey, head_cost, mean_layer_cost
from fivefold.strategy._operators import ELEMENT_BYTES
from fivefold.strategy.cluster import DeviceSpec
from fivefold.strategy.model import BLOCKS, ModelSpec
from fivefold.strategy.parts import BASE_BYTES
from fivefold.strategy.pipeline import stage_layers
from fivefold.strategy.plan import PlanTable, decode

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MASTER_BYTES = 4.0
"""Width of the copy of the parameters that an optimizer of 16-bit parameters updates."""
_COSTS = tuple(field.name for field in fields(LayerCost))
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
        # Multi-token prediction is a further layer, and the head once more, for each token.
        self.losses = 1 + self.model.predicted_tokens
        if self.model.predicted_tokens:
            layers = self.model.num_layers + self.model.predicted_tokens
            self.model = dataclasses.replace(self.model, num_layers=layers, predicted_tokens=0)
        self.num_gpus: Ints = t.data * t.tensor * t.pipeline * t.context
        self.replicas: Ints = t.data * t.context
        self.shards: Ints = np.where(t.shard == 0, self.replicas, t.shard)
        tcdp = t.is_word("order", "tcdp")
        self.data_stride: Ints = np.where(tcdp, t.tensor, t.tensor * t.pipeline)
        # Where nothing but the tensor group talks inside a layer, its place does not matter.
        self.layer_stride: Ints = np.where(t.context * t.expert > 1, self.data_stride, 0)
        self.pipe_stride: Ints = np.where(tcdp, t.tensor * self.replicas, t.tensor)
        self.wide: npt.NDArray[np.bool_] = t.is_word("dtype", "fp32") | self.device.autocast
        self.element_bytes: Floats = np.where(self.wide, 4.0, ELEMENT_BYTES)
        # In 32 bits the optimizer has no copy of the parameters beside them.
        states = self.device.optimizer_state_bytes
        self.state_bytes: Floats = np.where(self.wide, max(states - MASTER_BYTES, 0.0), states)
        wire = self.device.parameter_wire_bytes
        self.parameter_wire_bytes: Floats = np.where(self.wide, 4.0, wire)
        self.micro_batches: Ints = t.global_batch // (t.data * t.micro_batch)
        # Experts that tensor ranks do not split lie on neighbours, tensor ranks included.
        self.own_experts = t.expert_tensor == 1
        widened = np.where(self.own_experts, t.tensor, 1)
        self.expert_split: Ints = np.where(self.own_experts, 1, t.tensor)
        self.expert_stride: Ints = np.where(self.own_experts, 1, self.data_stride)
        self.expert_replicas: Ints = np.maximum(self.replicas * widened // t.expert, 1)
        self.expert_shards: Ints = np.maximum(self.shards * widened // t.expert, 1)
        self._parameters: dict[int, tuple[Floats, Floats]] = {}
        self.counts = stage_layers(
            self.model.num_layers, t.pipeline, embedding_layers=t.embedding_layers == 1,
            losses=self.losses,
        )  # fmt: skip

    def group(self, size: Ints, stride: Ints) -> Groups:
        """Return the groups of an axis of every plan's mesh."""
        return Groups(size=size, stride=stride, ranks=self.num_gpus)

    def time_s(self, kind: str, size_bytes: Floats, group: Groups) -> Floats:
        """Return seconds of a collective of each plan."""
        return collective_time_s(self.fabric, kind, size_bytes=size_bytes, group=group)

    @functools.cached_property
    def layer(self) -> dict[str, Floats]:
        """Return the costs of the mean layer, as ``LayerCost`` names them."""
        layer = self._costs[0]
        share = self.share_of_layers("recompute_layers")
        if (share == 1.0).all() or not self.table.columns["recompute"].any():
            return layer
        # Some layers of a stage store what the others compute again.
        storing = dict(self.table.columns)
        storing["recompute"] = np.zeros_like(storing["recompute"])
        stored = Columns(self.model, self.device, self.fabric, PlanTable(storing)).layer
        blend = {name: share * layer[name] + (1 - share) * stored[name] for name in _COSTS}
        return {**blend, "working_bytes": layer["working_bytes"]}

    def share_of_layers(self, name: str) -> Floats:
        """Return which share of a stage's layers a number of layers is; 0 stands for all."""
        chosen = self.table.columns[name]
        each = np.maximum(self.model.num_layers / self.table.pipeline, 1.0)
        return np.where(chosen == 0, 1.0, np.minimum(chosen / each, 1.0))

    @functools.cached_property
    def head(self) -> dict[str, Floats]:
        """Return the costs of the head, for every token that is predicted."""
        return {name: self.losses * cost for name, cost in self._costs[1].items()}

    @functools.cached_property
    def _costs(self) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Look up layers and heads by what they depend on."""
        t = self.table
        place = ((t.tensor * 4096 + t.context) * 4096 + t.expert) * 2**28 + self.layer_stride
        _, place_id = np.unique(place, return_inverse=True)
        ranks, ranks_id = np.unique(self.num_gpus, return_inverse=True)
        key = place_id.astype(np.int64) * len(ranks) + ranks_id
        for name, size in zip(_KEYED, (2**14, 2, 2, 4, 4, 8, 2, 2), strict=True):
            key = key * size + t.columns[name]
        _, first, index = np.unique(key, return_index=True, return_inverse=True)
        costs, heads = [], []
        for row in first:
            plan = _key_plan(
                t, int(row), stride=int(self.layer_stride[row]), ranks=int(self.num_gpus[row])
            )
            costs.append(mean_layer_cost(self.model, self.device, self.fabric, key=plan))
            heads.append(head_cost(self.model, self.device, self.fabric, key=plan))
        return _gather(costs, index), _gather(heads, index)

    def parameters(self, stage: int) -> tuple[Floats, Floats]:
        """Return the trained parameters on one GPU of a stage, from 0 to 2: kept and routed."""
        if stage not in self._parameters:
            self._parameters[stage] = self._count_parameters(stage)
        return self._parameters[stage]

    def _count_parameters(self, stage: int) -> tuple[Floats, Floats]:
        model, t = self.model, self.table
        if model.stages:
            return model.num_parameters / t.pipeline, np.zeros(len(t))
        if model.adapters is not None:
            return self._of_adapters(stage)
        split, norms, routed = self._of_layers(stage)
        return split + norms + self._outside(stage), routed

    def _of_adapters(self, stage: int) -> tuple[Floats, Floats]:
        """Return the parameters of a stage's adapters, split as their matrices are."""
        model, t = self.model, self.table
        kept = sum(
            model.share_of(letter)
            * model.adapter_parameters(*(part for part in parts if part != "experts"))
            for letter, parts in BLOCKS.items()
        )
        routed = model.share_of("E") * model.adapter_parameters("experts")
        count = self.counts[stage]
        return count * kept / t.tensor, count * routed / (self.expert_split * t.expert)

    def matrix_parameters(self, stage: int) -> tuple[Floats, Floats]:
        """Return the trained matrices of a stage's layers on one GPU, kept and routed."""
        model, t, count = self.model, self.table, self.counts[stage]
        if model.adapters is not None:
            return self._of_adapters(stage)
        kept = sum(
            model.share_of(letter) * matrix.size
            for letter, parts in BLOCKS.items()
            for part in parts if part != "experts"
            for matrix in model.matrices(part)
        )  # fmt: skip
        routed = count * model.share_of("E") * model.routed_parameters
        return count * kept / t.tensor, routed / (self.expert_split * t.expert)

    def frozen_bytes(self, stage: int, *, width: Floats) -> tuple[Floats, Floats]:
        """Return the bytes of frozen parameters, kept and routed, each of ``width`` at most."""
        none = np.zeros(len(self.table))
        if self.model.adapters is None:
            return none, none
        base = np.minimum(width, BASE_BYTES[self.model.adapters.base])
        split, norms, routed = self._of_layers(stage)
        return base * split + width * (norms + self._outside(stage)), base * routed

    def _of_layers(self, stage: int) -> tuple[Floats, Floats, Floats]:
        """Return the parameters of a stage's layers: split by the tensor group, norms, routed."""
        model, t = self.model, self.table
        split = (
            model.share_of("*") * model.attention_parameters
            + model.share_of("-") * model.dense_parameters
            + model.share_of("E") * model.unrouted_parameters
            + model.share_of("M") * model.mamba_parameters
        )
        norms = model.norms_per_layer * model.norm_parameters
        count = self.counts[stage]
        routed = count * model.share_of("E") * model.routed_parameters
        return count * split / t.tensor, count * norms, routed / (self.expert_split * t.expert)

    def _outside(self, stage: int) -> Floats:
        """Return the parameters of embedding and head on a stage."""
        model, t = self.model, self.table
        copy = np.where((t.pipeline > 1) & model.tied, model.vocab * model.hidden, 0)
        head = (model.head_parameters + copy) / t.tensor
        embedding = model.embedding_parameters / t.tensor
        one = t.pipeline == 1
        kept = np.where(one | (stage == 0), embedding, 0.0)
        return kept + np.where(one | (stage == 2), head, 0.0)

    def outer_parameters(self) -> tuple[Floats, Floats]:
        """Return the parameters of the first or the last stage, whichever keeps more."""
        first, last = self.parameters(0), self.parameters(2)
        more = (first[0] > last[0]) | ((first[0] == last[0]) & (first[1] >= last[1]))
        return np.where(more, first[0], last[0]), np.where(more, first[1], last[1])


def _key_plan(table: PlanTable, row: int, *, stride: int, ranks: int) -> LayerKey:
    words: dict[str, Any] = {name: decode(name, int(table.columns[name][row])) for name in _KEYED}
    degrees: dict[str, Any] = {
        name: int(table.columns[name][row]) for name in ("tensor", "context", "expert")
    }
    return LayerKey(**words, **degrees, data_stride=stride, ranks=ranks)


def _gather(costs: list[LayerCost], index: Ints) -> dict[str, Floats]:
    return {
        name: np.array([getattr(cost, name) for cost in costs])[index.reshape(-1)]
        for name in _COSTS
    }
