"""Which plans a search looks at: degrees times switches, as blocks of columns.

A space is a product of outer choices (degrees, micro-batch, schedule), each checked by itself
with a reason where it is ruled out, and inner switches (recomputation, ZeRO, overlap, offload),
of which only those that mean something for the outer choice are listed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import FabricSpec
from fivefold.errors import ConfigurationError, require_whole
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import (
    DTYPES,
    TWO_CHUNKS,
    WAITING_SCHEDULES,
    Optimizer,
    Order,
    Overlap,
    ParallelPlan,
    PipelineSchedule,
    PlanTable,
    Recompute,
    encode,
    plan_problem,
)

_BOTH = (False, True)
_FEWEST_TOKENS = 4096  # of a sequence that a rank of a context group keeps
_DEGREES = ("tensor", "pipeline", "context", "expert", "micro_batch", "virtual")
_SWITCHES = ("embedding_layers", "sequence_parallel", "regather", "data_overlap",
             "pipeline_overlap", "offload", "shared_overlap", "expert_overlap")  # fmt: skip
_KNOWN: dict[str, tuple[Any, ...]] = {
    "schedules": get_args(PipelineSchedule), "recompute": get_args(Recompute),
    "tensor_overlap": get_args(Overlap), "orders": get_args(Order), "dtypes": DTYPES,
    "optimizers": get_args(Optimizer),
    "zero": (0, 1, 2, 3), **dict.fromkeys(_SWITCHES, _BOTH),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Choices of a search; None means every value that divides, of ``tensor`` inside a node.

    Args:
        num_gpus: GPUs to use, all of them.
        global_batch: Samples of an iteration.
        tensor: Degrees of tensor parallelism; None: those whose groups lie inside nodes.
        pipeline: Numbers of stages.
        context: Degrees of context parallelism; None: those that leave a rank 4,096 tokens.
        expert: Degrees of expert parallelism.
        micro_batch: Sizes of a micro-batch.
        virtual: Chunks of a stage for interleaved schedules.
        schedules: Schedule of the pipeline.
        embedding_layers: Whether embedding and head may count as layers, which is looked at where
            only that deals layers out evenly (126 layers over 8 stages).
        zero: Stages of ZeRO.
        shards: Ranks that share states; None in it: all of them. None: all of them, or those of a
            node; or of a part of it, as one worker, where ``tau`` may be more than 1.
        recompute: Kinds of recomputation.
        sequence_parallel: Whether norms may be split over the tensor group.
        regather: Whether its inputs are gathered again.
        tensor_overlap: Kinds of tensor overlap.
        shared_overlap: Whether shared experts may compute beside dispatch and combine.
        expert_overlap: Whether dispatch and combine of one micro-batch may travel beside compute
            of another.
        data_overlap: Whether gradients may travel beside compute.
        pipeline_overlap: Whether stages may send beside compute, where the schedule can.
        offload: Whether weights, activations and optimizer states may go to the host.
        orders: Of the axes.
        tau: Iterations between synchronisations; more than 1 changes convergence. Where a shorter
            round hides its outer updates, longer ones are not looked at.
        optimizers: Optimizers; "muon" changes convergence.
        dtypes: Of products.
    """

    num_gpus: int
    global_batch: int
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    embedding_layers: tuple[bool, ...] = _BOTH
    zero: tuple[int, ...] = (0, 1, 2, 3)
    shards: tuple[int | None, ...] | None = None
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = _BOTH
    regather: tuple[bool, ...] = (True,)
    tensor_overlap: tuple[str, ...] = ("none", "pipe")
    shared_overlap: tuple[bool, ...] = (False,)
    expert_overlap: tuple[bool, ...] = _BOTH
    data_overlap: tuple[bool, ...] = (True,)
    pipeline_overlap: tuple[bool, ...] = (True,)
    offload: tuple[bool, ...] = (False,)
    orders: tuple[str, ...] = ("tcdp",)
    tau: tuple[int, ...] = (1,)
    optimizers: tuple[str, ...] = ("adamw",)
    dtypes: tuple[str, ...] = ("bf16",)

    def __post_init__(self) -> None:
        for name in ("num_gpus", "global_batch"):
            require_whole(name, getattr(self, name))
        for name, values in vars(self).items():
            if values == ():
                message = f"{name} of the search space is empty"
                raise ConfigurationError(message, hint="give at least one value, or leave it out")
        for name in (*_DEGREES, "tau", "shards"):
            for value in getattr(self, name) or ():
                if name != "shards" or value is not None:
                    require_whole(f"each {name} of the search space", value)
        for name, known in _KNOWN.items():
            for value in getattr(self, name):
                if not any(value is one or value == one for one in known):
                    message = f"{name} of the search space has {value!r}"
                    allowed = ", ".join(map(str, known))
                    raise ConfigurationError(message, hint=f"use some of {allowed}")


def settled(space: SearchSpace, model: ModelSpec, fabric: FabricSpec) -> SearchSpace:
    """Return the space with the values that None stands for, which model and fabric decide."""
    changes: dict[str, Any] = {}
    if space.context is None:
        long = range(1, model.seq_len // _FEWEST_TOKENS + 1)
        split = tuple(degree for degree in divisors(space.num_gpus) if degree in long)
        changes["context"] = split or (1,)
    if space.shards is None:
        inside = divisors(fabric.gpus_per_node) if max(space.tau) > 1 else [fabric.gpus_per_node]
        changes["shards"] = (None, *(size for size in inside if size > 1))
    return dataclasses.replace(space, **changes)


def divisors(number: int) -> list[int]:
    """Return all divisors, in order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def outer_choices(
    model: ModelSpec, space: SearchSpace, *, fabric: FabricSpec
) -> tuple[list[ParallelPlan], Counter[str]]:
    """Return the degrees, micro-batches and schedules that can run the model; why others cannot.

    Tensor groups lie inside nodes, unless the space names their degrees.
    """
    found = list(_choices(model, space, fabric))
    plans = [one for one in found if isinstance(one, ParallelPlan)]
    return plans, Counter(one for one in found if isinstance(one, str))


def _choices(
    model: ModelSpec, space: SearchSpace, fabric: FabricSpec
) -> Iterator[ParallelPlan | str]:
    """Yield each outer choice, or what rules it out."""
    for tensor in _degrees(space.tensor, space.num_gpus):
        if model.num_heads % tensor or (model.stages and tensor > 1):
            yield f"tensor={tensor} does not divide the heads"
            continue
        if space.tensor is None and not fabric.holds_in_node(tensor, space.num_gpus):
            yield f"tensor={tensor} would lie across nodes: name it to allow it"
            continue
        for pipeline in _degrees(space.pipeline, space.num_gpus // tensor):
            if pipeline > model.num_layers:
                yield "more pipeline stages than layers"
                continue
            yield from _replicated(model, space, {"tensor": tensor, "pipeline": pipeline})


def _degrees(chosen: tuple[int, ...] | None, number: int) -> list[int]:
    return [d for d in divisors(number) if chosen is None or d in chosen]


def _replicated(
    model: ModelSpec, space: SearchSpace, split: dict[str, int]
) -> Iterator[ParallelPlan | str]:
    experts = model.experts.num_experts if model.experts is not None else 1
    rest = space.num_gpus // (split["tensor"] * split["pipeline"])
    for context in _degrees(space.context, rest):
        data = rest // context
        if space.global_batch % data:
            yield "the batch is not a multiple of the data-parallel replicas"
            continue
        for expert in _degrees(space.expert, rest):
            if experts % expert == 0:
                degrees = {**split, "context": context, "data": data, "expert": expert}
                yield from _scheduled(model, space, degrees)
            elif model.experts is not None:
                yield "experts are not split evenly"


def _scheduled(
    model: ModelSpec, space: SearchSpace, degrees: dict[str, Any]
) -> Iterator[ParallelPlan | str]:
    stages = degrees["pipeline"]
    for micro_batch in _degrees(space.micro_batch, space.global_batch // degrees["data"]):
        for schedule, virtual, ends in _schedules(model, space, stages):
            for order in space.orders if stages > 1 else space.orders[:1]:
                words: dict[str, Any] = {"schedule": schedule, "order": order}
                plan = ParallelPlan(
                    global_batch=space.global_batch, micro_batch=micro_batch, virtual=virtual,
                    embedding_layers=ends, **degrees, **words,
                )  # fmt: skip
                problem = plan_problem(model, plan)
                yield plan if problem is None else problem.split("; ")[0]


def _schedules(
    model: ModelSpec, space: SearchSpace, stages: int
) -> Iterator[tuple[str, int, bool]]:
    """Yield schedules, their chunks, and whether embedding and head count as layers."""
    if stages == 1:
        yield "1f1b", 1, False
        return
    uneven = model.num_layers % stages > 0 and not model.stages
    evened = uneven and (model.num_layers + 2) % stages == 0
    for ends in space.embedding_layers:
        if ends and False in space.embedding_layers and not evened:
            continue
        for schedule in space.schedules:
            if schedule != "interleaved":
                yield schedule, 2 if schedule in TWO_CHUNKS else 1, ends
                continue
            layers = model.num_layers + 2 * ends
            chunks = divisors(layers // stages) if space.virtual is None else space.virtual
            yield from ((schedule, v, ends) for v in chunks if v > 1)


class Pattern(NamedTuple):
    """Facts of an outer choice that decide which switches mean something."""

    split: bool
    copies: bool
    overlaps: bool
    sequences: bool
    shares: bool  # shared experts have an exchange to compute beside
    exchanges: bool  # a forward beside a backward can hide an exchange
    shards: tuple[int | None, ...]
    workers: tuple[int, ...]


def pattern_of(model: ModelSpec, space: SearchSpace, plan: ParallelPlan) -> Pattern:
    """Return the pattern of an outer choice."""
    replicas, shards = plan.data * plan.context, space.shards or (None,)
    shared = model.experts is not None and model.experts.shared_ffn > 0
    return Pattern(
        split=plan.tensor > 1,
        copies=replicas > 1,
        overlaps=plan.pipeline > 1 and plan.schedule not in WAITING_SCHEDULES,
        sequences=plan.tensor > 1 and model.seq_len % (plan.context * plan.tensor) == 0,
        shares=shared and plan.expert > 1 and not plan.schedule.startswith("dualpipe"),
        exchanges=plan.expert > 1 and (plan.pipeline == 1 or plan.schedule == "interleaved"),
        shards=tuple(s for s in shards if s is None or replicas % s == 0),
        workers=tuple(s for s in shards if s and replicas % s == 0 and s < replicas),
    )


Switches = dict[str, npt.NDArray[np.int64]]


def inner_table(space: SearchSpace, pattern: Pattern) -> Switches:
    """Return the switches that mean something for a pattern, as columns."""
    zeros = [
        (zero, shard)
        for zero in (space.zero if pattern.copies else (0,))
        for shard in (pattern.shards if zero else (None,))
    ]
    rows = [
        (*layer, zero, shard, data, *rest, tau, optimizer)
        for layer in _layer_switches(space, pattern)
        for (zero, shard), optimizer, data, tau, *rest in itertools.product(
            zeros,
            space.optimizers,
            space.data_overlap if pattern.copies else (False,),
            space.tau if pattern.copies else (1,),
            space.pipeline_overlap if pattern.overlaps else (False,),
            space.offload,
            space.offload,
            space.offload,
        )
        # Local steps need whole states, or workers that share theirs.
        if not (tau > 1 and zero > 0) or (zero == 3 and shard in pattern.workers)
        # The last of what may be in host memory are optimizer states.
        if not (optimizer == "muon" and rest[-1])
    ]
    names = ("zero", "shard", "data_overlap", "pipeline_overlap", "offload_weights",
             "offload_activations", "offload_optimizer", "tau", "optimizer")  # fmt: skip
    return _as_columns((*_LAYER_SWITCHES, *names), rows)


_LAYER_SWITCHES = (
    "recompute", "sequence_parallel", "regather", "tensor_overlap", "dtype", "shared_overlap",
    "expert_overlap",
)  # fmt: skip


def layer_table(space: SearchSpace, pattern: Pattern) -> Switches:
    """Return only the switches that change a layer's own time, as columns."""
    return _as_columns(_LAYER_SWITCHES, _layer_switches(space, pattern))


def _as_columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Switches:
    return {
        name: np.array([encode(name, row[i]) for row in rows], np.int64)
        for i, name in enumerate(names)
    }


def _layer_switches(space: SearchSpace, pattern: Pattern) -> list[tuple[Any, ...]]:
    return [
        (recompute, parallel, again, overlap, dtype, shared, beside)
        for recompute in space.recompute
        for parallel in (space.sequence_parallel if pattern.sequences else (False,))
        for again in (space.regather if parallel else (True,))
        for overlap in (space.tensor_overlap if pattern.split else ("none",))
        for dtype in space.dtypes
        for shared in (space.shared_overlap if pattern.shares else (False,))
        for beside in (space.expert_overlap if pattern.exchanges else (False,))
        if not (beside and (shared or recompute == "full"))
    ]


def block_table(plans: list[ParallelPlan], inner: Switches) -> PlanTable:
    """Return all combinations of some outer choices with one set of switches."""
    outer, count = PlanTable.of(plans).columns, len(inner["recompute"])
    columns = {name: np.repeat(column, count) for name, column in outer.items()}
    return PlanTable(columns | {name: np.tile(c, len(plans)) for name, c in inner.items()})
