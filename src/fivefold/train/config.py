"""The configuration of a training run: five TOML tables, checked before anything starts.

Tables ``[sync]``, ``[tasks]`` and ``[model.moe]`` have files of their own.

Each table is a frozen model with a default for every key, so an empty file is a valid
configuration. Values are taken as they are: a string is not read as a number, except that keys
in seconds accept a unit (``"10 s"``). The order of precedence is override, then file, then
default. How errors read and how TOML is parsed and written is in ``fivefold.runs``. This module
knows nothing of torch, processes or data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fivefold.errors import ConfigurationError, require_one_of
from fivefold.files import read_toml
from fivefold.runs import Section, apply_overrides, check_tables, format_toml
from fivefold.runs.config import (
    Bytes,
    Count,
    FilePath,
    Fraction,
    Momentum,
    Positive,
    Rate,
    Seconds,
    Text,
)
from fivefold.runs.loggers import LoggingConfig
from fivefold.train._sync_config import AutoTauConfig, SyncConfig, keys_of_method

__all__ = [
    "AutoTauConfig",
    "DataConfig",
    "MixtureConfig",
    "ModelConfig",
    "OptimConfig",
    "PredictionConfig",
    "RunConfig",
    "SyncConfig",
    "TasksConfig",
    "TrainConfig",
    "config_to_toml",
    "load_config",
    "settings_fingerprint",
]

_LOG = logging.getLogger(__name__)


_MULTIPLE = 16  # of inner widths: the vector width in float32, so products have no ragged edge
_BALANCE_LOSS = 0.01
_MONTH_S = 30 * 24 * 3600.0  # sockets count a wait in milliseconds of 32 bits


_Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


MUON_KEYS: dict[str, Any] = {"momentum": 0.95, "nesterov": True}
"""Keys of ``[optim]`` that are Muon's alone, with their defaults."""


class RunConfig(Section):
    """Table ``[run]``: where, how long and how often."""

    output: FilePath = Path("runs/train")
    """folder of the run, relative to the current folder"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of the parameters and of the order of the data"""
    steps: Positive = 200
    """optimizer steps per rank"""
    log_every_steps: Positive = 10
    """steps between two lines of metrics"""
    validate_every_steps: Count = 50
    """steps between two validations; 0 for one at the end"""
    checkpoint_every_steps: Count = 0
    """steps between two checkpoints; 0 for one at the end"""
    keep_checkpoints: Positive = 2
    """newest checkpoints that are kept"""
    resume: Text = "auto"
    """"auto", "never" or the path of a checkpoint"""
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    """torch CPU threads per rank"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model is trained"""
    timeout_s: Annotated[Seconds, Field(le=_MONTH_S)] = 120.0
    """longest wait on another rank, in seconds; at most 30 days"""
    line_every_s: Seconds = 10.0
    """seconds between two progress lines where there is no terminal"""


class DataConfig(Section):
    """Table ``[data]``: the text, how it becomes tokens and how it is split."""

    path: Text = "stdlib"
    """"stdlib", a folder of text, or one file"""
    tokenizer: Text = "bytes"
    """"bytes" or the path of a Hugging Face tokenizer.json"""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """share of the files held out for validation, between 0 and 1"""
    cache: Text = "auto"
    """folder of the tokens; "auto" for the user's cache folder"""
    sequence_length: Annotated[int, Field(ge=1, le=2**20)] = 128
    """tokens per sequence"""


class MixtureConfig(Section):
    """Table ``[model.moe]``: a mixture of experts in place of the feed-forward layers."""

    experts: Positive = 8
    """experts of a layer"""
    top_k: Positive = 2
    """experts that a token goes to"""
    shared: Count = 0
    """experts that every token goes to besides, unweighted"""
    expert_width: Positive | None = None
    """inner width of an expert; left out, a token's work is that of the dense layer"""
    every: Positive = 1
    """a mixture in every so many-th block, counted from the last"""
    activation: Literal["swiglu", "geglu", "geglu_tanh", "reglu"] = "swiglu"
    """function between an expert's two products"""
    score: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    """way in which router logits become weights"""
    normalize: bool = True
    """whether a token's weights sum to one"""
    scale: _Factor = 1.0
    """factor on all weights"""
    groups: Positive = 1
    """equal groups of experts"""
    top_groups: Positive = 1
    """groups that a token may use"""
    group_score: Literal["max", "top2_sum"] = "max"
    """what a group is chosen by: its largest score, or the sum of its two largest"""
    capacity_factor: _Factor | None = None
    """most tokens of an expert, in units of the even load; left out, nothing is dropped"""
    drop_policy: Literal["position", "weight"] = "position"
    """who is dropped beyond the capacity"""
    balance_loss: _Coefficient | None = None
    """coefficient of the load balancing loss; left out, 0.01, or 0 where bias_rate balances"""
    z_loss: _Coefficient = 0.001
    """coefficient of the router's z loss"""
    bias_rate: _Coefficient = 0.0
    """step of balancing by a selection bias, without a loss unless balance_loss is given; 0 for
    none"""
    expert_parallel: Positive = 1
    """ranks that share out a layer's experts"""
    exchange: Literal["auto", "all_to_all", "one_sided"] = "auto"
    """way of tokens between ranks that share experts: messages, or stores into a peer's memory;
    auto is one_sided on GPUs that can, else all_to_all"""
    exchange_room: _Factor | None = None
    """one_sided: rows that a rank has room for, in units of the even load; left out, the most that
    may come"""
    backend: Literal["auto", "reference", "fused", "split"] = "auto"
    """what computes the experts"""
    recompute: bool = True
    """whether the backward computes the experts' first product again; false keeps it in memory"""

    @model_validator(mode="after")
    def _fits(self) -> MixtureConfig:
        if self.experts % self.groups or self.top_groups > self.groups:
            raise ConfigurationError(
                "model.moe.groups must divide model.moe.experts, and top_groups be at most groups; "
                f"got experts {self.experts}, groups {self.groups}, top_groups {self.top_groups}",
                hint="choose a divisor of the number of experts",
            )
        if self.group_score == "top2_sum" and self.experts // self.groups < 2:
            raise ConfigurationError(
                'model.moe.group_score "top2_sum" needs two experts in each group; got '
                f"{self.experts} experts in {self.groups} groups",
                hint='use group_score = "max", or fewer groups',
            )
        reachable = self.experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise ConfigurationError(
                f"model.moe.top_k is {self.top_k}, but a token can reach {reachable} experts only",
                hint="lower top_k, or raise experts or top_groups",
            )
        if self.experts % self.expert_parallel:
            raise ConfigurationError(
                "model.moe.experts must be a multiple of model.moe.expert_parallel; got "
                f"{self.experts} experts over {self.expert_parallel} ranks",
                hint=f"use {-(-self.experts // self.expert_parallel) * self.expert_parallel} "
                "experts, or fewer ranks per layer",
            )
        self._check_router()
        self._check_exchange()
        return self

    @property
    def balance_coefficient(self) -> float:
        """Return the coefficient of the balancing loss: as given, or none beside a bias."""
        default = _BALANCE_LOSS if self.bias_rate == 0 else 0.0
        return default if self.balance_loss is None else self.balance_loss

    def _check_router(self) -> None:
        """Refuse a router that the loss of the task could not teach (``Router.why_constant``)."""
        one = self.top_k == 1 and (self.normalize or self.score == "topk_softmax")
        if one or (self.experts == 1 and self.score != "sigmoid"):
            raise ConfigurationError(
                "the router of [model.moe] would learn nothing from the task: a token's one weight "
                f"is always {self.scale:g}; got experts {self.experts}, top_k {self.top_k}, "
                f'score "{self.score}", normalize {str(self.normalize).lower()}',
                hint='with top_k = 1 set normalize = false and score = "softmax" or "sigmoid" '
                '(with one expert "sigmoid"), or raise top_k',
            )

    def _check_exchange(self) -> None:
        if self.exchange == "one_sided" and self.capacity_factor is not None:
            raise ConfigurationError(
                'model.moe.exchange "one_sided" does not go with model.moe.capacity_factor '
                f"{self.capacity_factor}: the ranks would not see one another's loads",
                hint='use exchange = "all_to_all", or leave out capacity_factor',
            )
        if self.exchange == "one_sided" and not self.recompute:
            message = 'model.moe.exchange "one_sided" keeps nothing for the backward'
            raise ConfigurationError(message, hint='set recompute = true, or use "all_to_all"')
        if self.exchange_room is not None and self.exchange_room < 1:
            raise ConfigurationError(
                f"model.moe.exchange_room is {self.exchange_room}, less than the even load",
                hint="use 1 or more, or leave it out for room for whatever may come",
            )


class ModelConfig(Section):
    """Table ``[model]``: the size of the transformer.

    Raises:
        ConfigurationError: Through ``load_config``; the width is not a multiple of the heads, or
            a head is of odd width, which rotary embeddings cannot pair.
    """

    layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    """transformer blocks"""
    width: Annotated[int, Field(ge=1, le=2**20)] = 192
    """width of the residual stream, a multiple of 2 * heads"""
    heads: Annotated[int, Field(ge=1, le=2**20)] = 4
    """attention heads"""
    ffn_width: Positive | None = None
    """inner width of a dense feed-forward layer; left out, 8/3 of the width, rounded up to 16"""
    moe: MixtureConfig | None = None
    """table of the mixture of experts; left out, the model is dense"""

    @property
    def dense_width(self) -> int:
        """Return the inner width of a dense feed-forward layer."""
        return self.ffn_width or -(-8 * self.width // (3 * _MULTIPLE)) * _MULTIPLE

    @property
    def expert_width(self) -> int:
        """Return an expert's inner width: as configured, or for the work of the dense layer."""
        assert self.moe is not None, "only asked of models with experts"
        active = self.moe.top_k + self.moe.shared
        even = -(-self.dense_width // (active * _MULTIPLE)) * _MULTIPLE
        return self.moe.expert_width or even

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.width % (2 * self.heads):
            what = "a multiple of" if self.width % self.heads else "an even number of times"
            raise ConfigurationError(
                f"model.width must be {what} model.heads; "
                f"got width {self.width}, heads {self.heads}",
                hint=_width_hint(self.width, self.heads),
            )
        return self


class OptimConfig(Section):
    """Table ``[optim]``: the optimizer of the local steps, its schedule, and the batch."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """"adamw" for all parameters, or "muon" for matrices and AdamW for the rest"""
    lr: Annotated[Rate, Field(le=1)] = 3e-3
    """peak learning rate, at most 1: AdamW moves each parameter by about that much"""
    min_lr_fraction: Fraction = 0.1
    """last learning rate as a share of the peak, between 0 and 1"""
    warmup_steps: Count = 20
    """steps of linear warmup; at most run.steps"""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """decoupled weight decay of the matrices; lr * weight_decay is at most 1"""
    betas: Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)] = (0.9, 0.95)
    """AdamW's two decay rates, each in [0, 1)"""
    momentum: Momentum | None = None
    """Muon's momentum, in [0, 1)"""
    nesterov: bool | None = None
    """whether Muon looks one momentum step ahead"""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """largest norm of the gradient; inf for no clipping"""
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 8
    """sequences per rank and micro-batch"""
    accumulation: Annotated[int, Field(ge=1, le=2**20)] = 1
    """micro-batches per optimizer step"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """arithmetic of forward and backward"""
    validation_batches: Positive = 20
    """batches per validation, over all ranks"""

    @model_validator(mode="before")
    @classmethod
    def _keys_of_muon(cls, given: Any) -> Any:
        """Refuse Muon's keys for AdamW, and fill in their defaults for Muon."""
        if not isinstance(given, dict):
            return given
        if given.get("optimizer") == "muon":
            kept = {key: value for key, value in given.items() if value is not None}
            return MUON_KEYS | kept
        for key in MUON_KEYS:
            if given.get(key) is not None and given.get("optimizer", "adamw") == "adamw":
                message = f'optim.{key} is not a setting of optim.optimizer = "adamw"'
                hint = 'leave it out, or set optim.optimizer = "muon"; AdamW has optim.betas'
                raise ConfigurationError(message, hint=hint)
        return given

    @model_validator(mode="after")
    def _decay_shrinks(self) -> OptimConfig:
        if self.lr * self.weight_decay > 1:
            raise ConfigurationError(
                "optim.lr * optim.weight_decay must be at most 1, or a step turns all signs; "
                f"got {self.lr:g} * {self.weight_decay:g}",
                hint="lower optim.weight_decay; its default is 0.1",
            )
        return self


class TasksConfig(Section):
    """Table ``[tasks]``: the order in which gradients are sent, for ``sync.method = "ddp"``."""

    ordering: Literal["fifo", "priority"] = "priority"
    """"fifo" as gradients become ready, or "priority" for what the next forward pass needs first"""
    chunk: Bytes = 1_000_000
    """bytes of the pieces in which buckets are sent; 0 for whole buckets"""
    bucket: Bytes = 0
    """bytes of a bucket of gradients; 0 for DDP's own choice"""
    credit: Positive = 2
    """pieces in flight at once"""
    overlap_forward: bool = True
    """true where each layer's next forward pass waits for its own gradients only"""
    plan_after_steps: Positive = 3
    """measured steps after which the order is planned"""

    @model_validator(mode="after")
    def _order_can_matter(self) -> TasksConfig:
        if self.ordering == "priority" and not self.overlap_forward:
            message = 'tasks.ordering "priority" does nothing where forward waits for all gradients'
            raise ConfigurationError(
                message, hint='set tasks.ordering = "fifo", or tasks.overlap_forward = true'
            )
        return self


class PredictionConfig(Section):
    """Table ``[prediction]``: what a planner expects of a step; it changes nothing in the run.

    ``fivefold plan --for train`` writes it, ``fivefold report`` puts it beside what was measured.
    """

    cluster: Text
    """the cluster that was planned for"""
    ranks: Positive
    """ranks that were planned for"""
    settings: Text
    """fingerprint of the settings that the prediction is of"""
    compute_s: _Coefficient
    """forward, backward, recomputation and the optimizer's update, in one step"""
    exposed_communication_s: _Coefficient
    """what of the communication compute waits for, in one step"""
    bubble_s: _Coefficient
    """pipeline bubble of one step"""
    other_s: _Coefficient
    """data, clipping, the stack's fixed time, the lag of the slowest rank"""
    all_reduce_s: _Coefficient
    """one exchange of the whole payload between all ranks, alone"""
    memory_bytes: _Coefficient
    """on the fullest device"""
    constants: dict[str, float] = Field(default_factory=dict)
    """those of the cluster that the figures rest on"""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        return self.compute_s + self.exposed_communication_s + self.bubble_s + self.other_s


class TrainConfig(Section):
    """The whole configuration of a training run.

    Raises:
        ConfigurationError: Through ``load_config``; a value or a combination is not allowed.
    """

    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    tasks: TasksConfig | None = None
    """table of the order of DDP's gradients; left out, DDP's own"""
    prediction: PredictionConfig | None = None
    """table of what a planner expects; left out, nothing was planned"""

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainConfig:
        if self.optim.warmup_steps > self.run.steps:
            given = "warmup_steps" in self.optim.model_fields_set
            raise ConfigurationError(
                f"optim.warmup_steps must be at most run.steps; got {self.optim.warmup_steps} "
                f"{'' if given else '(the default) '}and {self.run.steps} steps",
                hint=f"lower optim.warmup_steps, for example to {self.run.steps // 10}",
            )
        return self

    @model_validator(mode="after")
    def _experts_fit_the_method(self) -> TrainConfig:
        moe, method = self.model.moe, self.sync.method
        if moe is not None and (self.sync.shard or 1) > 1:
            message = f"sync.shard {self.sync.shard} is for dense models; got [model.moe]"
            raise ConfigurationError(message, hint="leave out sync.shard, or [model.moe]")
        if moe is not None and moe.expert_parallel > 1 and method != "ddp":
            raise ConfigurationError(
                f'model.moe.expert_parallel {moe.expert_parallel} needs sync.method "ddp"; got '
                f'"{method}"',
                hint="ranks that share experts exchange tokens in every step: they cannot take "
                "local steps apart; set expert_parallel = 1 for the other methods",
            )
        if moe is not None and moe.bias_rate > 0 and method not in {"ddp", "none"}:
            raise ConfigurationError(
                f'model.moe.bias_rate needs sync.method "ddp" or "none"; got "{method}"',
                hint="a selection bias follows the load of every step, which ranks that step apart "
                "do not share; balance with model.moe.balance_loss",
            )
        return self

    @model_validator(mode="after")
    def _sync_fits_the_run(self) -> TrainConfig:
        start, end = self.sync.synchronous_start or 0, self.sync.synchronous_end or 0
        if end and start + end > self.run.steps:
            raise ConfigurationError(
                "sync.synchronous_start and synchronous_end must be at most run.steps together; "
                f"got {start} + {end} of {self.run.steps} steps",
                hint="lower one of them, or raise run.steps",
            )
        kept = ["exp_avg", "exp_avg_sq"] + ["momentum_buffer"] * bool(self.optim.momentum)
        for name in self.sync.average_states or {}:
            require_one_of(
                name, kept,
                f"sync.average_states has {name!r}, which optim.optimizer = "
                f'"{self.optim.optimizer}" does not keep',
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _tasks_fit_the_method(self) -> TrainConfig:
        tasks, sync = self.tasks, self.sync
        if tasks is None:
            return self
        if sync.method != "ddp" or sync.codec != "fp32":
            raise ConfigurationError(
                f'[tasks] needs sync.method "ddp" with sync.codec "fp32"; got "{sync.method}" '
                f"with {sync.codec}",
                hint="leave out [tasks]: it orders the gradients of every step",
            )
        if self.model.moe is not None and self.model.moe.expert_parallel > 1:
            raise ConfigurationError(
                f"[tasks] and model.moe.expert_parallel {self.model.moe.expert_parallel} do not go "
                "together: experts' gradients are summed by themselves",
                hint="set model.moe.expert_parallel = 1, or leave out [tasks]",
            )
        if tasks.overlap_forward and math.isfinite(self.optim.grad_clip):
            raise ConfigurationError(
                "tasks.overlap_forward updates parameters before all gradients are there, so that "
                f"their norm cannot be clipped; got optim.grad_clip {self.optim.grad_clip:g}",
                hint="set optim.grad_clip = inf, or tasks.overlap_forward = false with "
                'tasks.ordering = "fifo"',
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    r"""Read a configuration file and apply overrides on top of it.

    Args:
        path: TOML file with any of the tables run, data, model, optim, sync, tasks, prediction.
        overrides: Assignments such as ``"run.steps=50"``. The value is read as TOML; what is not
            TOML is taken as a string, so ``data.path=/texts`` needs no quotes. Where
            ``sync.method`` is among them, keys of the file's ``[sync]`` that the new method does
            not take are dropped, and the log says which: one file serves for comparisons.

    Returns:
        The configuration, with the default for every key that is not given.

    Raises:
        ConfigurationError: The file is missing or is not TOML, or a key or value is not allowed.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "train.toml"
        >>> _ = file.write_text("[run]\nsteps = 100\n")
        >>> load_config(file, ["sync.tau=4"]).sync.tau
        4
    """
    given = apply_overrides({}, overrides, schema=TrainConfig).get("sync", {})
    tables = read_toml(Path(path))
    if isinstance(tables.get("sync"), dict) and "method" in given:
        _drop_keys_of_other_methods(tables["sync"], str(given["method"]))
    if "tasks" in tables and given.get("method", "ddp") != "ddp":
        del tables["tasks"]
        _LOG.info("%s does not take [tasks] of the file", given["method"])
    tables = apply_overrides(tables, overrides, schema=TrainConfig)
    return check_tables(tables, TrainConfig, source=path)


def require_ranks(config: TrainConfig, *, world_size: int) -> None:
    """Refuse a number of ranks that the method, shards or shared experts cannot do with.

    Raises:
        ConfigurationError: More ranks, or another number of them, are needed.
    """
    sync, shard, moe = config.sync, config.sync.shard or 1, config.model.moe
    if world_size == 1 and sync.method != "none":
        message = f'sync.method "{sync.method}" needs at least two ranks; got world_size=1'
        hint = 'start more ranks with --nproc 2, or set sync.method = "none" to train alone'
        raise ConfigurationError(message, hint=hint)
    share = 1 if moe is None else moe.expert_parallel
    if world_size % share:
        message = f"model.moe.expert_parallel = {share} needs a multiple of {share} ranks"
        hint = f"start {-(-world_size // share) * share} ranks, or change expert_parallel"
        raise ConfigurationError(f"{message}; got world_size={world_size}", hint=hint)
    if shard > 1 and (world_size % shard or world_size // shard < 2):
        message = f"sync.shard {shard} does not divide {world_size} ranks into two workers or more"
        hint = "a worker is the ranks of a node: start twice as many ranks, or lower sync.shard"
        raise ConfigurationError(message, hint=hint)


def settings_fingerprint(config: TrainConfig, *, ranks: int) -> str:
    """Return what two runs share whose steps should take the same time on the same machines.

    Examples:
        >>> settings_fingerprint(TrainConfig(), ranks=2) == settings_fingerprint(
        ...     TrainConfig(run=RunConfig(steps=400)), ranks=2)
        True
    """
    tables = config.model_dump(include={"model", "sync", "tasks"})
    optim = config.optim.model_dump(include={"batch_size", "accumulation", "precision"})
    data = config.data.model_dump(include={"sequence_length", "tokenizer"})
    text = json.dumps([tables, optim, data, ranks], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_to_toml(config: TrainConfig) -> str:
    """Write a configuration with all keys that have a value; ``load_config`` reads it back equal.

    Args:
        config: The configuration to write.

    Returns:
        TOML text that ends in a newline.
    """
    return format_toml(config.model_dump())


def _drop_keys_of_other_methods(table: dict[str, Any], method: str) -> None:
    takes = keys_of_method(method)
    dropped = [key for key in table if key in SyncConfig.model_fields and key not in takes]
    for key in dropped:
        del table[key]
    if dropped:
        names = ", ".join(f"sync.{key}" for key in dropped)
        _LOG.info("%s does not take %s of the file", method, names)


def _width_hint(width: int, heads: int) -> str:
    step = 2 * heads
    below, above = width // step * step, -(-width // step) * step
    choices = f"{below} or {above}" if below else f"{above}"
    return f"each head needs an even width: use width {choices} with {heads} heads"
