"""The configuration of a training run on a graph: ten TOML tables, checked before anything starts.

Each table is a frozen model; only ``data.path`` has no default. The order of precedence is
override, then file, then default. This module knows nothing of torch or of files of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fivefold.errors import ConfigurationError
from fivefold.files import read_toml
from fivefold.runs import Section, apply_overrides, check_tables
from fivefold.runs.config import Bytes, Count, FilePath, Positive, Rate, Seconds, Seed, Text
from fivefold.runs.loggers import LoggingConfig


def _fanouts(value: Any) -> Any:
    value = tuple(value) if isinstance(value, list) else value
    if isinstance(value, tuple) and not value:
        message = "fanouts must not be empty"
        raise ConfigurationError(message, hint="write one number per layer, such as [10, 10]")
    for fanout in value if isinstance(value, tuple) else ():
        if isinstance(fanout, int) and fanout < 1 and fanout != -1:
            message = f"a fan-out must be positive, or -1 for all neighbours; got {fanout}"
            raise ConfigurationError(message, hint="write one per layer, such as [10, 10]")
    return value


Backend = Literal["auto", "threads", "io_uring"]
Fanouts = Annotated[tuple[int, ...], BeforeValidator(_fanouts)]


class RunConfig(Section):
    """Table ``[run]``: where, how long and how often."""

    output: FilePath = Path("runs/gnn")
    """folder of the run, relative to the current folder"""
    mode: Literal["disk", "memory", "online"] = "disk"
    """origin of the batches: packed on disk, or sampled anew with features in memory or online"""
    seed: Seed = 0
    """seed of the parameters, of dropout and of the order of the batches"""
    epochs: Positive = 10
    """passes over the training nodes"""
    log_every_steps: Positive = 10
    """steps between two lines of metrics"""
    validate_every_epochs: Count = 1
    """epochs between two validations; 0 for one at the end"""
    checkpoint_every_steps: Count = 0
    """steps between two checkpoints; 0 for one after every epoch"""
    keep_checkpoints: Positive = 2
    """newest checkpoints that are kept"""
    resume: Literal["auto", "never"] = "auto"
    """"auto" goes on from the newest whole checkpoint, "never" refuses a folder that has a run"""
    threads: Positive = 1
    """torch CPU threads per rank"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model is trained"""
    timeout_s: Seconds = 120.0
    """longest wait on another rank, in seconds"""
    line_every_s: Seconds = 10.0
    """seconds between two progress lines where there is no terminal"""


class DataConfig(Section):
    """Table ``[data]``: the graph, and where what is made from it is kept."""

    path: FilePath
    """folder of the data set, as fivefold gnn ingest writes it"""
    store: Text = "auto"
    """folder of samples and packed rows; "auto" for one inside the data set's folder"""
    mapped: bool = False
    """whether the topology stays on disk and is memory-mapped"""
    node_type: Text | None = None
    """of a graph of several types the one that is classified; left out, the only one with labels"""


class SamplingConfig(Section):
    """Table ``[sampling]``: the mini-batches."""

    fanouts: Fanouts = (10, 10, 10)
    """neighbours per hop, one number per layer of the model; -1 for all"""
    batch_size: Positive = 1024
    """training nodes per batch"""
    epochs: Positive = 1
    """different epochs that are sampled offline; training repeats them"""
    refresh_every_epochs: Count = 0
    """epochs after which new samples are drawn and packed, in the background; 0 for never"""
    seed: Seed = 0
    """seed of the samples of mode "disk"; the other modes draw theirs from run.seed"""
    threads: Count = 0
    """threads of the sampler; 0 for all cores"""


class BudgetsConfig(Section):
    """Table ``[budgets]``: what the data path may take."""

    device: Bytes = 0
    """device memory for the hottest rows, such as "4 GB\""""
    host: Bytes = 1_000_000_000
    """host memory for cached rows, read buffers and packing, such as "8 GB\""""
    disk: Bytes | None = None
    """disk space for samples and packed rows; left out, four fifths of what is free"""


class PlanConfig(Section):
    """Table ``[plan]``: what goes where."""

    policy: Literal["static", "belady"] = "static"
    """what the host cache holds: the rows used most, or those used next"""
    segment_batches: Count = 0
    """batches that share rows on disk; 0 for the number that costs least"""


class LoaderConfig(Section):
    """Table ``[loader]``: how packed rows are read."""

    backend: Backend = "auto"
    """engine that reads the disk"""
    threads: Count = 0
    """threads that read; 0 for the engine's own choice"""
    prefetch: Positive = 2
    """batches prepared ahead of training; the budget holds them and the one in use"""
    form: Literal["edge_index", "blocks"] = "blocks"
    """one graph for all layers, or one block per layer, which computes less (of one type only)"""
    shuffle: bool = True
    """whether the batches come in a new order every epoch"""
    verify: bool = True
    """whether checksums are compared while reading"""


class ModelConfig(Section):
    """Table ``[model]``: one layer per hop of ``sampling.fanouts``."""

    name: Literal["sage", "gat", "gcn"] = "sage"
    """kind of convolution; of several types "sage\""""
    hidden_dim: Positive = 128
    """width of the hidden layers, over all heads"""
    heads: Positive = 4
    """attention heads of "gat\""""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """share of hidden values that are dropped in training"""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        width, heads = self.hidden_dim, self.heads
        if self.name == "gat" and width % heads:
            near = max(1, width // heads) * heads
            message = f"model.hidden_dim must be a multiple of model.heads; got {width} and {heads}"
            raise ConfigurationError(message, hint=f"use hidden_dim = {near}")
        return self


class OptimConfig(Section):
    """Table ``[optim]``: Adam with decoupled weight decay."""

    lr: Rate = 3e-3
    """learning rate"""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """decoupled weight decay"""
    grad_clip: Annotated[float, Field(gt=0)] = float("inf")
    """largest norm of the gradient; inf for no clipping"""


class ValidationConfig(Section):
    """Table ``[validation]``: judged by sampled batches of the validation and test nodes."""

    fanouts: Fanouts | None = None
    """neighbours per hop; left out, those of sampling"""
    batch_size: Positive = 1024
    """nodes per batch"""
    nodes: Positive = 100_000
    """most nodes per validation and per test"""


class GnnConfig(Section):
    """The whole configuration of a training run on a graph.

    Raises:
        ConfigurationError: Through ``load_gnn_config``; a value or a combination is not allowed.

    Examples:
        >>> GnnConfig(data={"path": "graphs/debian"}).model.name
        'sage'
    """

    data: DataConfig
    run: RunConfig = Field(default_factory=RunConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    budgets: BudgetsConfig = Field(default_factory=BudgetsConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    loader: LoaderConfig = Field(default_factory=LoaderConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @model_validator(mode="after")
    def _fits(self) -> GnnConfig:
        hops, own = len(self.sampling.fanouts), self.validation.fanouts
        if own is not None and len(own) != hops:
            message = f"validation.fanouts has {len(own)} hops, but sampling.fanouts {hops}"
            raise ConfigurationError(message, hint="write one number per layer in both")
        if self.plan.policy == "belady" and self.loader.shuffle and self.run.mode == "disk":
            message = 'plan.policy = "belady" needs the planned order, but loader.shuffle is true'
            raise ConfigurationError(message, hint='set loader.shuffle = false, or policy "static"')
        return self


def load_gnn_config(path: str | Path, overrides: Sequence[str] = ()) -> GnnConfig:
    r"""Read a configuration file and apply overrides on top of it.

    Args:
        path: TOML file; only ``data.path`` must be in it.
        overrides: Assignments such as ``"run.epochs=5"``. The value is read as TOML; what is not
            TOML is taken as a string, so ``data.path=/graphs/a`` needs no quotes.

    Returns:
        The configuration, with the default for every key that is not given.

    Raises:
        ConfigurationError: The file is missing or is not TOML, or a key or value is not allowed.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "gnn.toml"
        >>> _ = file.write_text('[data]\npath = "graphs/debian"\n')
        >>> load_gnn_config(file, ["run.epochs=4"]).run.epochs
        4
    """
    tables = apply_overrides(read_toml(Path(path)), overrides, schema=GnnConfig)
    return check_tables(tables, GnnConfig, source=path)
