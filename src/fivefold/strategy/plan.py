"""One way to train a model on a number of GPUs: every degree and every switch.

Ranks are laid out as in Megatron-LM: tensor innermost, then context, then data, pipeline
outermost; ``order`` changes that. Expert parallelism splits the data and context axes. This
module checks what one plan can say by itself, and says it in a few words for tables; whether it
fits a model, memory or a cluster is asked elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fivefold.collectives.pricing import Group
from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.strategy.model import ModelSpec

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved", "zb_1p", "zb_2p", "zb_v", "v_half", "v_min", "dualpipe",
    "dualpipe_v",
]  # fmt: skip
Recompute = Literal["none", "selective", "full"]
Overlap = Literal["none", "ring", "pipe"]
Order = Literal["tcdp", "tcpd"]
Optimizer = Literal["adamw", "muon"]
DTYPES = ("bf16", "fp8", "fp32", "mxfp8", "nvfp4")
WAITING_SCHEDULES = ("gpipe", "1f1b")
"""Schedules whose stages wait for their messages, whatever ``pipeline_overlap`` says."""
_WORDS: Mapping[str, tuple[Any, ...]] = {
    "schedule": get_args(PipelineSchedule),
    "recompute": get_args(Recompute),
    "tensor_overlap": get_args(Overlap),
    "order": get_args(Order),
    "optimizer": get_args(Optimizer),
    "dtype": DTYPES,
}
Column = npt.NDArray[np.int64]
TWO_CHUNKS = {"zb_v", "v_half", "v_min", "dualpipe_v"}


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Split of a job over its GPUs.

    Args:
        global_batch: Samples of one iteration over all GPUs.
        micro_batch: Samples of one micro-batch.
        data: Data-parallel replicas.
        tensor: GPUs that split every layer.
        pipeline: Stages.
        context: GPUs that split the sequence.
        expert: GPUs that split the experts, out of data x context.
        expert_tensor: GPUs that split each expert: None for the tensor group, or 1, where the
            expert group takes GPUs of the tensor group too (``expert`` then divides data x context
            x tensor).
        shared_overlap: Experts that every token visits compute beside dispatch and combine.
        expert_overlap: Dispatch and combine of one micro-batch travel beside compute of another.
        virtual: Model chunks of each stage (interleaved schedules).
        schedule: Schedule of the pipeline.
        zero: What data-parallel ranks share instead of copy: 1 optimizer states, 2 gradients
            too, 3 parameters too.
        shard: Ranks that share; None: all data-parallel ones. Fewer is hybrid sharding.
        recompute: What backward computes again instead of reading it.
        recompute_layers: Layers of a stage that do so, where ``recompute`` is not none; None: all.
        sequence_parallel: Norms and dropouts split over the tensor group.
        regather: Sequence parallelism gathers inputs again in backward instead of storing them.
        tensor_overlap: Tensor communication beside products: in rings, or in pipelined slices.
        data_overlap: Gradients and parameters travel beside compute.
        pipeline_overlap: Stages send beside compute; GPipe and 1F1B wait for their messages anyway.
        offload_weights: Weights live in host memory.
        offload_activations: Stored activations live in host memory.
        offload_layers: Layers of a stage whose activations do; None: all.
        offload_optimizer: Optimizer states live in host memory.
        tau: Iterations between synchronisations (CO2); 1 is plain data parallelism. More than 1
            changes convergence, so no search turns it on by itself. With ZeRO-3 the ranks that
            share states are one worker, and workers synchronise.
        optimizer: "adamw", or "muon" for matrices of layers with AdamW for the rest, which changes
            convergence, so no search turns it on by itself.
        embedding_layers: Embedding and head count as a layer each when layers are dealt out.
        order: Axes from the innermost rank outward.
        dtype: Of matrix products.

    Raises:
        ConfigurationError: A degree is not positive, or two settings contradict.

    Examples:
        >>> plan = ParallelPlan(global_batch=64, micro_batch=1, tensor=8, pipeline=8)
        >>> plan.num_gpus, plan.num_micro_batches
        (64, 64)
    """

    global_batch: int
    micro_batch: int = 1
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    shared_overlap: bool = False
    expert_overlap: bool = False
    virtual: int = 1
    schedule: PipelineSchedule = "1f1b"
    zero: int = 0
    shard: int | None = None
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    sequence_parallel: bool = False
    regather: bool = True
    tensor_overlap: Overlap = "none"
    data_overlap: bool = False
    pipeline_overlap: bool = False
    offload_weights: bool = False
    offload_activations: bool = False
    offload_layers: int | None = None
    offload_optimizer: bool = False
    tau: int = 1
    optimizer: Optimizer = "adamw"
    embedding_layers: bool = False
    order: Order = "tcdp"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "data", "tensor", "pipeline", "context",
                     "expert", "virtual", "tau"):  # fmt: skip
            require_whole(name, getattr(self, name))
        require_whole("zero", self.zero, least=0)  # True is none of the stages
        if self.shard is not None:
            require_whole("shard", self.shard, hint="leave it out for all data-parallel ranks")
        for name, allowed in {**_WORDS, "zero": (0, 1, 2, 3)}.items():
            value = getattr(self, name)
            require_one_of(value, allowed, f"{name}={value!r} is unknown")
        for name in ("recompute_layers", "offload_layers"):
            layers = getattr(self, name)
            if layers is not None and (type(layers) is not int or layers < 1):
                message = f"{name} must be a positive integer or None; got {layers!r}"
                raise ConfigurationError(message, hint="layers of a stage; None: all of them")
        problem = _contradiction(self)
        if problem is not None:
            raise ConfigurationError(problem[0], hint=problem[1])

    @property
    def num_gpus(self) -> int:
        """Return the GPUs that the plan needs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches that each data-parallel rank runs in an iteration."""
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def shards(self) -> int:
        """Return the ranks that share states under ZeRO."""
        return self.data * self.context if self.shard is None else self.shard

    @functools.cached_property
    def _axes(self) -> dict[str, tuple[Column, Column]]:
        return PlanTable.of([self]).axes

    def group(self, axis: str) -> Group:
        """Return the ranks of one axis: their number and how far they lie apart.

        Args:
            axis: ``"tensor"``, ``"context"``, ``"data"`` (with context), ``"expert"``,
                ``"expert_data"``, ``"expert_shard"``, ``"expert_replica"``, ``"pipeline"``,
                ``"shard"`` or ``"replica"``.

        Raises:
            ConfigurationError: There is no such axis.
        """
        require_one_of(axis, self._axes, f"axis {axis!r} is unknown")
        size, stride = self._axes[axis]
        return Group(size=int(size[0]), stride=int(stride[0]), ranks=self.num_gpus)


def _contradiction(plan: ParallelPlan) -> tuple[str, str] | None:
    """Return the first rule that the plan breaks, and the remedy."""
    unit = plan.data * plan.micro_batch
    replicas = plan.data * plan.context
    expert_ranks = replicas * (plan.tensor if plan.expert_tensor == 1 else 1)
    rules = (
        (plan.global_batch % unit > 0,
         f"global_batch={plan.global_batch} is not a multiple of data x micro_batch = {unit}",
         "every rank runs equally many whole micro-batches"),
        (plan.virtual > 1 and plan.schedule not in {"interleaved", *TWO_CHUNKS},
         f"schedule {plan.schedule!r} has no virtual stages", "use 'interleaved'"),
        (plan.schedule == "interleaved" and plan.virtual == 1,
         "schedule 'interleaved' needs virtual > 1", "use '1f1b' or give virtual stages"),
        (plan.schedule in TWO_CHUNKS and plan.virtual != 2,
         f"schedule {plan.schedule!r} has two chunks per stage", "set virtual=2"),
        (plan.sequence_parallel and plan.tensor == 1,
         "sequence_parallel needs tensor > 1", "it splits over the tensor group"),
        (plan.expert_tensor not in {None, 1},
         f"expert_tensor={plan.expert_tensor!r} is unknown",
         "None splits experts by the tensor group, 1 does not split them"),
        (expert_ranks % plan.expert > 0,
         f"expert={plan.expert} does not divide data x context"
            + (f" x tensor = {expert_ranks}" if plan.expert_tensor else f" = {replicas}"),
         "experts are split over those ranks; expert_tensor = 1 takes tensor ranks too"),
        (plan.shared_overlap and plan.expert == 1, "shared_overlap needs expert > 1",
         "without expert parallelism nothing is sent"),
        ((plan.shared_overlap or plan.expert_overlap)
         and plan.schedule in {"dualpipe", "dualpipe_v"},
         f"schedule {plan.schedule!r} hides dispatch and combine by itself",
         "leave shared_overlap and expert_overlap out"),
        (plan.expert_overlap and plan.expert == 1, "expert_overlap needs expert > 1",
         "without expert parallelism nothing is sent"),
        (plan.expert_overlap and plan.pipeline > 1 and plan.schedule != "interleaved",
         f"schedule {plan.schedule!r} has no forward beside a backward of one stage",
         "expert_overlap needs the schedule 'interleaved', or one stage"),
        (plan.expert_overlap and plan.shared_overlap,
         "expert_overlap and shared_overlap hide the same messages", "leave one of them out"),
        (plan.expert_overlap and plan.recompute == "full",
         "expert_overlap needs what full recomputation drops",
         "set recompute to 'selective' or 'none'"),
        (plan.expert_tensor == 1 and plan.tensor > 1 and not plan.sequence_parallel,
         "expert_tensor = 1 needs sequence_parallel", "tensor ranks hold different tokens then"),
        (plan.expert_tensor == 1 and plan.tensor > 1 and plan.order != "tcdp",
         "expert_tensor = 1 needs order 'tcdp'", "expert groups are neighbours then"),
        (plan.shards < 1 or replicas % plan.shards > 0,
         f"shard={plan.shard} does not divide data x context = {replicas}", "give a divisor"),
        (plan.recompute_layers is not None and plan.recompute == "none",
         "recompute_layers needs recompute other than 'none'",
         "set recompute to 'full' or 'selective'"),
        (plan.offload_layers is not None and not plan.offload_activations,
         "offload_layers needs offload_activations", "set offload_activations"),
        (plan.optimizer == "muon" and plan.offload_optimizer,
         "optimizer 'muon' cannot have its states in host memory",
         "its products need them on the device: leave offload_optimizer out"),
        (plan.tau > 1 and plan.zero > 0 and not (plan.zero == 3 and plan.shards < replicas),
         "tau > 1 needs whole states, or states shared inside a worker",
         "use zero=0, or zero=3 with a shard of fewer ranks than replicas"),
    )  # fmt: skip
    return next(((message, hint) for broken, message, hint in rules if broken), None)


def plan_problem(model: ModelSpec, plan: ParallelPlan) -> str | None:
    """Return why ``plan`` cannot run ``model``, whatever the memory; None where it can."""
    return next(chain(_axis_problems(model, plan), _layer_problems(model, plan)), None)


def _axis_problems(model: ModelSpec, plan: ParallelPlan) -> Iterator[str]:
    adapters, mamba, tensor = model.adapters, model.mamba, plan.tensor
    if model.stages and plan.optimizer == "muon":
        yield "optimizer 'muon' is priced for transformers only"
    if model.stages and (tensor > 1 or plan.context > 1):
        yield "a convolution network is not split by tensor or context"
    if model.num_heads % tensor:
        yield f"tensor={tensor} does not divide num_heads={model.num_heads}"
    if adapters is not None and adapters.rank % tensor:
        yield f"tensor={tensor} does not divide rank={adapters.rank} of the adapters"
    if model.seq_len % (plan.context * (tensor if plan.sequence_parallel else 1)):
        yield f"the sequence of {model.seq_len} is not split evenly"
    if mamba is not None and plan.context > 1:
        yield "layers of Mamba are not split by context: their scan crosses the sequence"
    yield from _block_problems(model, plan)
    groups = 0 if mamba is None else mamba.heads if mamba.step_rank else mamba.groups
    if groups % tensor:
        yield f"tensor={tensor} does not divide groups={groups} of the Mamba layers"


def _block_problems(model: ModelSpec, plan: ParallelPlan) -> Iterator[str]:
    for block in model.blocks:
        if block.scan_flops and plan.context > 1:
            yield f"{block.name} is not split by context: its scan crosses the sequence"
        if any(scores.heads % plan.tensor for scores in block.scores):
            yield f"tensor={plan.tensor} does not divide the heads of {block.name}"
        for one in block.matrices:
            columns = {"columns": one.outputs, "rows": one.inputs, "none": 0}[one.split]
            if columns % plan.tensor:
                yield f"tensor={plan.tensor} does not divide {one.module} of {block.name}"


def _layer_problems(model: ModelSpec, plan: ParallelPlan) -> Iterator[str]:
    experts, chunks = model.experts, plan.pipeline * plan.virtual
    if chunks > model.num_layers + (2 if plan.embedding_layers else 0):
        yield f"{chunks} pipeline chunks are more than num_layers={model.num_layers}"
    if plan.virtual > 1 and plan.pipeline == 1:
        yield "virtual stages need pipeline > 1"
    if plan.schedule == "interleaved" and plan.num_micro_batches % plan.pipeline:
        yield (
            f"interleaving needs a multiple of pipeline={plan.pipeline} micro-batches; "
            f"got {plan.num_micro_batches}"
        )
    if plan.expert > 1 and experts is None:
        yield "expert > 1 needs a model with experts"
    if experts is not None and experts.num_experts % plan.expert:
        yield f"expert={plan.expert} does not divide num_experts={experts.num_experts}"
    if plan.shared_overlap and (experts is None or not experts.shared_ffn):
        yield "shared_overlap needs a model with shared experts"


_FIELDS = dataclasses.fields(ParallelPlan)
_FLAGS = {field.name for field in _FIELDS if field.type == "bool"}
_OPTIONAL = {field.name for field in _FIELDS if field.type == "int | None"}
_NAMES = tuple(field.name for field in _FIELDS)


@dataclass(frozen=True)
class PlanTable:
    """Many plans, as one integer column per setting.

    Words are stored as their number; a shard of None as 0.
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns.values()}
        if set(self.columns) != set(_NAMES) or len(lengths) > 1:
            message = f"a plan table has {sorted(self.columns)} of lengths {sorted(lengths)}"
            raise ConfigurationError(message, hint="give one column per field, of equal length")

    def __len__(self) -> int:
        return len(self.columns["global_batch"])

    def __getattr__(self, name: str) -> Column:
        if name.startswith("_") or name not in _NAMES:
            raise AttributeError(name)
        return self.columns[name]

    @functools.cached_property
    def num_gpus(self) -> Column:
        """Return the GPUs of each plan."""
        return self.data * self.tensor * self.pipeline * self.context

    @functools.cached_property
    def axes(self) -> dict[str, tuple[Column, Column]]:
        """Return the size of each axis's groups in every plan's mesh, and the stride in them."""
        inner, replicas, expert = self.tensor, self.data * self.context, self.expert
        tcdp = self.is_word("order", "tcdp")
        stride = np.where(tcdp, inner, inner * self.pipeline)
        shards = np.where(self.shard == 0, replicas, self.shard)
        # Experts that tensor ranks do not split lie on neighbours, tensor ranks included.
        own = self.expert_tensor == 1
        widened, expert_stride = np.where(own, inner, 1), np.where(own, 1, stride)
        holding = np.maximum(replicas * widened // expert, 1)
        sharing = np.maximum(shards * widened // expert, 1)
        across = expert_stride * expert
        return {
            "tensor": (inner, np.ones_like(inner)),
            "context": (self.context, stride),
            "data": (replicas, stride),
            "expert": (expert, expert_stride),
            "expert_data": (holding, across),
            "expert_shard": (sharing, across),
            "expert_replica": (np.maximum(holding // sharing, 1), across * sharing),
            "pipeline": (self.pipeline, np.where(tcdp, inner * replicas, inner)),
            "shard": (shards, stride),
            "replica": (np.maximum(replicas // shards, 1), stride * shards),
        }

    @classmethod
    def of(cls, plans: Iterable[ParallelPlan]) -> PlanTable:
        """Return a table of the given plans."""
        listed = list(plans)
        return cls(
            {
                name: np.array([encode(name, getattr(plan, name)) for plan in listed], np.int64)
                for name in _NAMES
            }
        )

    def take(self, chosen: npt.NDArray[Any]) -> PlanTable:
        """Return the plans of a mask or of row numbers."""
        return PlanTable({name: column[chosen] for name, column in self.columns.items()})

    def plan(self, row: int) -> ParallelPlan:
        """Return one plan."""
        return ParallelPlan(**{name: decode(name, int(self.columns[name][row])) for name in _NAMES})

    def is_word(self, name: str, *words: str) -> npt.NDArray[np.bool_]:
        """Return which rows have one of the words in a column."""
        column = self.columns[name]
        found = [column == encode(name, word) for word in words]
        rows: npt.NDArray[np.bool_] = found[0]
        if len(found) > 1:
            rows = np.logical_or.reduce(found)
        return rows

    def words(self, name: str) -> list[str]:
        """Return which words occur in a column."""
        return [_WORDS[name][number] for number in np.unique(self.columns[name])]


def encode(name: str, value: Any) -> int:
    """Return the number that stands for a setting."""
    if name in _WORDS:
        require_one_of(value, _WORDS[name], f"{name}={value!r} is unknown")
        return int(_WORDS[name].index(value))
    return 0 if value is None else int(value)


def decode(name: str, number: int) -> Any:
    """Return the setting that a number stands for."""
    if name in _WORDS:
        return _WORDS[name][number]
    if name in _FLAGS:
        return bool(number)
    if name in _OPTIONAL:
        return number or None
    return number


DEGREES = "d data, t tensor, p pipeline, c context, e expert, b micro-batch"
"""What the letters of ``degrees_of`` stand for."""


def degrees_of(plan: ParallelPlan) -> str:
    """Return the degrees over 1, and the micro-batch, such as ``d4 t8 b2``."""
    degrees = (("d", plan.data), ("t", plan.tensor), ("p", plan.pipeline), ("c", plan.context),
               ("e", plan.expert))  # fmt: skip
    words = [f"{letter}{degree}" for letter, degree in degrees if degree > 1]
    return " ".join([*words, f"b{plan.micro_batch}"])


def settings_of(plan: ParallelPlan) -> str:
    """Return schedule, sharding, recomputation, local updates and offloading of a plan."""
    words = []
    if plan.pipeline > 1:
        words.append(plan.schedule + (f" x{plan.virtual}" if plan.virtual > 1 else ""))
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}" + (f" over {plan.shard}" if plan.shard else ""))
    if plan.sequence_parallel:
        words.append("sequence parallel")
    if plan.recompute != "none":
        words.append(f"recompute {plan.recompute}")
    if plan.tau > 1:
        words.append(f"tau {plan.tau}")
    if plan.optimizer != "adamw":
        words.append(plan.optimizer.capitalize())
    words += [
        f"offload {name}"
        for name in ("weights", "activations", "optimizer")
        if getattr(plan, f"offload_{name}")
    ]
    return ", ".join(words) or "plain"


def overlap_of(plan: ParallelPlan) -> str:
    """Return which communication runs beside compute."""
    words = []
    if plan.tensor > 1 and plan.tensor_overlap != "none":
        words.append("tensor")
    if plan.data * plan.context > 1 and (plan.data_overlap or plan.tau > 1):
        words.append("gradients" if plan.tau == 1 else "outer updates")
    if plan.pipeline > 1 and plan.pipeline_overlap and plan.schedule not in WAITING_SCHEDULES:
        words.append("stages")
    if plan.shared_overlap:
        words.append("shared experts")
    dual = plan.schedule.startswith("dualpipe") and plan.pipeline > 1
    if plan.expert_overlap or (dual and plan.expert > 1):
        words.append("experts")
    return ", ".join(words) or "nothing"
