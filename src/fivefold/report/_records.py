"""What runs leave behind, as frozen records: manifests, metrics, spans, results.

The fields are those of the files in a run's folder, of language models and then of graph training.
A field that the files do not name yet is ignored, so that a report can read what a newer trainer of
the same schema wrote; a field that is missing or of the wrong type is an error of the reader. This
module does not know where the files are or how they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

SCHEMA_VERSION = 1
_Seconds = Annotated[float, Field(ge=-1e12, le=1e12)]  # sums of these stay numbers

Status = Literal["finished", "stopped", "unfinished"]


class Record(BaseModel):
    """A frozen record; fields that are not named in it are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Machine(Record):
    """The machine that a run was made on."""

    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    kernel: str | None = None


class Lab(Record):
    """The emulated cluster of a run; ``shaped`` says whether its links were really slowed."""

    hosts: PositiveInt
    rate_bytes_per_s: NonNegativeFloat | None = None
    delay_s: NonNegativeFloat | None = None
    jitter_s: NonNegativeFloat | None = None
    loss: NonNegativeFloat | None = None
    shaped: bool
    means: str | None = None
    reason: str | None = None


class StartedRun(Record):
    """Common part of all manifests: label, ranks, versions, command and machine."""

    schema_version: int = Field(alias="schema")
    fivefold: str
    torch: str | None = None
    python: str | None = None
    label: str
    world_size: PositiveInt
    seed: int | None = None
    num_parameters: NonNegativeInt | None = None
    command: tuple[str, ...] = ()
    started_at: str | None = None
    machine: Machine = Machine()


class DataAccount(Record):
    """What became of the bytes of a run's data; ``said`` names what was left out and why."""

    read_bytes: NonNegativeInt
    disk_bytes: NonNegativeInt
    lost_in_tokens_bytes: NonNegativeInt = 0
    said: str = ""

    @property
    def missed_share(self) -> float:
        """Return the share of the bytes on disk that is in no token, 0 to 1."""
        return 1 - (self.read_bytes - self.lost_in_tokens_bytes) / max(self.disk_bytes, 1)


class Manifest(StartedRun):
    """Manifest of a training run: method, hosts and lab beside the common part."""

    method: str
    hosts: PositiveInt | None = None
    lab: Lab | None = None
    planned_settings_kept: bool | None = None
    data: DataAccount | None = None


class LoggedPoint(Record):
    """Common part of all lines of a log: step and time."""

    step: NonNegativeInt
    wall_s: _Seconds


class _TokensPoint(LoggedPoint):
    tokens: NonNegativeInt


class TrainPoint(_TokensPoint):
    """One line of the training curve: rank 0's own batch, tokens of all ranks."""

    loss: float
    bits_per_byte: float
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None


class ValidationPoint(_TokensPoint):
    """One validation of the global parameters."""

    bits_per_byte: float
    loss: float | None = None


class EndPoint(_TokensPoint):
    """The run ended in order: it finished, or it was asked to stop."""

    reason: str


class SyncPoint(LoggedPoint):
    """The outer engine's totals on rank 0 at one step."""

    tau: NonNegativeInt | None = None
    rounds: NonNegativeInt | None = None
    sent_bytes: NonNegativeInt | None = None
    last_staleness_gap: float | None = None


class TauPoint(LoggedPoint):
    """One decision of ``tau="auto"``."""

    round: NonNegativeInt
    previous: PositiveInt
    tau: PositiveInt
    step_s: _Seconds
    all_reduce_s: _Seconds = Field(  # the second name is that of older runs
        validation_alias=AliasChoices("all_reduce_s", "flight_s")
    )
    reason: str


class MixturePoint(LoggedPoint):
    """Tokens by expert since the line before; lists are by block."""

    blocks: tuple[NonNegativeInt, ...]
    ranks: PositiveInt = 1
    load: tuple[tuple[NonNegativeInt, ...], ...]
    dropped: tuple[NonNegativeInt, ...] = ()
    payload_bytes: NonNegativeInt = 0
    sent_bytes: NonNegativeInt = 0

    @model_validator(mode="after")
    def _a_load_for_each_block(self) -> MixturePoint:
        if len(self.load) != len(self.blocks) or len(set(map(len, self.load))) > 1:
            message = "the loads do not fit the blocks"
            raise ValueError(message)
        return self


class LinkBytes(Record):
    """Bytes that a network interface sent and received during the run."""

    sent: NonNegativeInt
    received: NonNegativeInt


class Communication(Record):
    """Rank 0's collectives, summed over the run."""

    in_flight_s: _Seconds = 0.0
    exposed_wait_s: _Seconds = 0.0
    overlap_fraction: float | None = None
    payload_bytes: NonNegativeInt = 0
    sent_bytes: NonNegativeInt | None = None
    collectives: NonNegativeInt = 0


class Rounds(Record):
    """How often replicas synchronized: of each fragment of the model, one after another."""

    rounds: NonNegativeInt = 0
    fragments: PositiveInt = 1


class RunResult(Record):
    """``result.json``: the sums that rank 0 writes at a run's end."""

    schema_version: int = Field(alias="schema")
    steps: NonNegativeInt
    tokens: NonNegativeInt
    wall_s: _Seconds
    tokens_per_s: float | None = None
    bits_per_byte: float | None = None
    seconds: dict[str, _Seconds] = Field(default_factory=dict)
    waits: dict[str, _Seconds] = Field(default_factory=dict)
    communication: Communication | None = None
    link_bytes: LinkBytes | None = None
    sync: Rounds | None = None
    process: dict[str, _Seconds | None] | None = None  # and its most memory, in bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one lane of one rank, in Unix seconds.

    A message may also have the round, the fragment of the model and the bytes that were sent.
    """

    lane: str
    name: str
    start_s: _Seconds
    end_s: _Seconds
    round: int | None = None
    fragment: int | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Everything one rank logged: its spans in the order of the file, its link counters."""

    rank: int
    spans: tuple[Span, ...] = ()
    link_bytes: LinkBytes | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """``metrics.jsonl``, sorted by kind."""

    train: tuple[TrainPoint, ...] = ()
    validation: tuple[ValidationPoint, ...] = ()
    sync: tuple[SyncPoint, ...] = ()
    tau: tuple[TauPoint, ...] = ()
    mixtures: tuple[MixturePoint, ...] = ()
    end: EndPoint | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run as its folder tells it."""

    path: Path
    name: str
    label: str
    manifest: Manifest
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    metrics: Metrics = Metrics()
    ranks: tuple[RankTrace, ...] = ()
    result: RunResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_plain_ddp(self) -> bool:
        """Return whether this is DDP with its own order of gradients: the baseline to beat."""
        return self.manifest.method == "ddp" and "tasks" not in self.config

    @property
    def status(self) -> Status:
        """Return how the run ended: in order, on request, or not (yet)."""
        if self.metrics.end is not None:
            return "stopped" if self.metrics.end.reason == "stopped" else "finished"
        return "unfinished" if self.result is None else "finished"


class GraphFacts(Record):
    """The data set of a run."""

    name: str
    nodes: NonNegativeInt
    edges: NonNegativeInt
    dim: NonNegativeInt
    dtype: str
    row_bytes: NonNegativeInt
    train: NonNegativeInt
    feature_bytes: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """by node type, of a graph of several"""


class GraphManifest(StartedRun):
    """Manifest of a run of a graph neural network."""

    mode: str
    dataset: GraphFacts


class DataCounts(Record):
    """Counts of rank 0's data path so far."""

    rows: dict[str, int] = Field(default_factory=dict)
    row_bytes: NonNegativeInt = 0
    requests: NonNegativeInt = 0
    bytes_read: NonNegativeInt = 0
    cold_bytes: NonNegativeInt = 0
    record_bytes: NonNegativeInt = 0
    fill_bytes: NonNegativeInt = 0
    stage_s: dict[str, float] = Field(default_factory=dict)
    wait_s: float = 0.0

    @property
    def hit_rates(self) -> dict[str, float]:
        """Return which share of the rows each level served."""
        total = sum(self.rows.values())
        return {level: rows / total for level, rows in self.rows.items()} if total else {}

    @property
    def amplification(self) -> float | None:
        """Return bytes read per byte of cold rows; None where nothing was cold."""
        return self.bytes_read / self.cold_bytes if self.cold_bytes else None


class _EpochPoint(LoggedPoint):
    epoch: NonNegativeInt


class GraphTrainPoint(_EpochPoint):
    """One line of the training curve: rank 0's own seeds."""

    loss: float


class EpochPoint(_EpochPoint):
    """One whole epoch; data counts from the run's beginning."""

    data: DataCounts = DataCounts()
    stages: dict[str, float] = Field(default_factory=dict)


class GraphValidationPoint(_EpochPoint):
    """One validation."""

    accuracy: float | None = None
    test_accuracy: float | None = None


class PreparePoint(Record):
    """Sampling, planning and packing; what the plan predicts for an epoch of all ranks."""

    seconds: dict[str, float] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)


class GraphEnd(_EpochPoint):
    """The run ended in order."""

    reason: str
    stages: dict[str, float] = Field(default_factory=dict)


class GraphResult(Record):
    """``result.json``."""

    schema_version: int = Field(alias="schema")
    steps: NonNegativeInt
    data: DataCounts = DataCounts()


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One run as its folder tells it."""

    path: Path
    name: str
    label: str
    manifest: GraphManifest
    config_text: str = ""
    plan_text: str = ""
    train: tuple[GraphTrainPoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()
    validation: tuple[GraphValidationPoint, ...] = ()
    prepare: PreparePoint = field(default_factory=PreparePoint)
    end: GraphEnd | None = None
    result: GraphResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """Return how the run ended: in order, on request, or not (yet)."""
        if self.end is not None:
            return "stopped" if self.end.reason == "stopped" else "finished"
        return "unfinished"
