"""The reference trainer: one call trains a model as a configuration says, or resumes it.

The order within a step is fixed, and whatever decides the parameters is a pure function of the
step or is in the checkpoint; that is why a run that was killed and resumed reaches the
parameters of the run that was not, bit for bit. What is particular to a method is behind
``Method``; what is particular to a file behind its writer. Knows nothing of command lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from fivefold.errors import ConfigurationError, DataError
from fivefold.optim import MuonAdamW
from fivefold.runs import (
    FolderLock,
    MetricsWriter,
    ProgressBar,
    StopRequest,
    format_toml,
    write_json,
    write_text,
)
from fivefold.runs.checkpoints import (
    choose_checkpoint,
    parameters_sha256,
    read_own_state,
    require_resumable,
    restore_rng,
    rng_state,
    write_checkpoint,
)
from fivefold.runs.launch import launch_ranks
from fivefold.runs.loggers import Loggers, require_loggers
from fivefold.runs.machine import LinkMeter, ProcessMeter
from fivefold.runs.ranks import Ranks, StopAgreement, close_ranks, open_ranks, read_place
from fivefold.train._corpus import Corpus, Tokenizer, load_corpus, load_tokenizer
from fivefold.train._ddp import DataParallelMethod, ScheduledDataParallelMethod
from fivefold.train._expert_ranks import ExpertRanks, share_experts
from fivefold.train._methods import Method, RunResult, method_label, run_manifest
from fivefold.train._model import Transformer
from fivefold.train._outer import (
    OuterMethod,
    load_own_shards,
    own_shards,
    share_states,
)
from fivefold.train._spans import Span, SpanRecorder, subtract
from fivefold.train._step import (
    StepRunner,
    TrainedParts,
    Validation,
    autocast_context,
    bits_per_byte,
    choose_precision,
    evaluate,
)
from fivefold.train._text_files import reading_of, resolve_source, warning_of
from fivefold.train.config import (
    MUON_KEYS,
    DataConfig,
    SyncConfig,
    TasksConfig,
    TrainConfig,
    load_config,
    require_ranks,
)


def require_settings(config: TrainConfig, *, world_size: int) -> None:
    """Check what is the same on every host: the method, its rule, the number of ranks."""
    require_ranks(config, world_size=world_size)
    if config.sync.rule_class is not None:
        config.sync.rule(total_steps=config.run.steps)


def require_host(config: TrainConfig, *, nproc: int) -> None:
    """Check what this host must have for the ranks that are about to start on it."""
    resolve_source(config.data.path)
    load_tokenizer(config.data.tokenizer)
    require_loggers(config.logging)
    found = torch.cuda.device_count()
    if nproc > found and (config.run.device == "cuda" or (config.run.device == "auto" and found)):
        message = f"{nproc} ranks need as many CUDA devices; this host has {found}"
        raise ConfigurationError(message, hint='use a smaller --nproc, or run.device = "cpu"')
    require_resumable(config.run.output, config.run.resume)
    with FolderLock(config.run.output, "run.output"):
        pass  # rank 0 will hold it


def load_equal_data(config: DataConfig, ranks: Ranks) -> tuple[Tokenizer, Corpus]:
    """Load the text, and refuse to train where it differs between hosts; a collective call."""
    loaded: list[tuple[Tokenizer, Corpus]] = []

    def load() -> str:
        tokenizer = load_tokenizer(config.tokenizer)
        loaded.append((tokenizer, load_corpus(config, tokenizer)))
        return loaded[0][1].fingerprint

    found = ranks.together(load, what="the data's fingerprint")
    odd = [rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if odd:
        message = f"rank {odd[0]} reads other data than rank 0"
        hint = "give all hosts the same folder of text and the same tokenizer"
        raise DataError(message, hint=hint)
    return loaded[0]


def _tell_of_data(corpus: Corpus) -> None:
    """Say at the start what of the folder is read, and warn where a part of it is not."""
    if (warning := warning_of(corpus.account)) is not None:
        _LOG.warning("%s", warning)
    else:
        reading_of(corpus.account).log()


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Make the configured optimizer.

    Weight decay acts on matrices only: a norm's scale has no reason to shrink. Muon has the
    matrices but the embedding, which is also the output; AdamW has the embedding, experts (three
    dimensions) and scales.
    """
    optim = config.optim
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    if optim.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas)
    embedding = cast("Transformer", model).embedding_VD
    hidden = [p for p in matrices if p.dim() == 2 and p is not embedding]
    other = [p for p in matrices if p.dim() != 2 or p is embedding]
    decayed = [("muon", hidden), ("adamw", other)]
    groups = [groups[0] | {"params": found, "algorithm": name} for name, found in decayed]
    groups.append({"params": scales, "weight_decay": 0.0, "algorithm": "adamw"})
    momentum, nesterov = optim.momentum, optim.nesterov
    assert momentum is not None, "the configuration fills it in"
    assert nesterov is not None, "the configuration fills it in"
    return MuonAdamW(groups, lr=optim.lr, betas=optim.betas, momentum=momentum, nesterov=nesterov)


def describe_run(config: TrainConfig, *, data_fingerprint: str) -> dict[str, Any]:
    """Describe what decides the parameters and must be equal for a run to be resumed.

    Paths, intervals, devices and timeouts may change; whatever decides the parameters may not.
    """
    sections = config.model_dump(mode="json", include={"model", "optim", "sync", "tasks"})
    sections["tasks"] = sections["tasks"] or {}
    del sections["optim"]["validation_batches"]
    if sections["optim"]["optimizer"] == "adamw":  # as in checkpoints from before there was Muon
        for key in ("optimizer", *MUON_KEYS):
            del sections["optim"][key]
    moe = sections["model"]["moe"]
    if config.model.moe is not None:
        moe["balance_loss"] = config.model.moe.balance_coefficient
        if moe["group_score"] == "max":
            del moe["group_score"]  # as in checkpoints from before there was a choice
    sections["run"] = {"seed": config.run.seed, "steps": config.run.steps}
    sections["data"] = {
        "tokenizer": config.data.tokenizer,
        "sequence_length": config.data.sequence_length,
        "fingerprint": data_fingerprint,
    }
    # As it will be read back: tuples become lists.
    normal: dict[str, Any] = json.loads(json.dumps(sections))
    return normal


def make_method(  # noqa: PLR0913 - independent parts, one call site
    config: SyncConfig,
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    experts: ExpertRanks | None = None,
    tasks: TasksConfig | None = None,
    max_norm: float = math.inf,
    total_steps: int | None = None,
    workers: DeviceMesh | None = None,
) -> Method:
    """Set up the configured method; a collective call for all but "none"."""
    if config.method == "none":
        return Method(model)
    if config.method == "ddp" and tasks is not None:
        return ScheduledDataParallelMethod(model, ranks=ranks, tasks=tasks, optimizer=optimizer)
    if config.method == "ddp":
        return DataParallelMethod(model, ranks=ranks, codec=config.codec or "fp32", experts=experts)
    return OuterMethod(
        config, model, optimizer=optimizer, ranks=ranks, max_norm=max_norm,
        total_steps=total_steps, workers=workers,
    )  # fmt: skip


_LOG = logging.getLogger(__name__)
# Not training: a rate that counts them would depend on how often one looks.
_ASIDE = ("checkpoint", "validation")


def train(config: TrainConfig) -> RunResult:
    r"""Train as configured: on this process alone, or as one rank of several.

    The ranks come from the environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``,
    ``MASTER_PORT``), which ``torchrun``, a scheduler or ``fivefold train --nproc`` sets. SIGTERM
    or Ctrl-C on any rank makes all write a checkpoint and return at the same step.

    After an error the process group is left as it is, since ending it could wait for a dead
    peer: let the process end (the command does so without waiting).

    Args:
        config: The whole configuration.

    Returns:
        What was reached, and where the time went.

    Raises:
        ConfigurationError: A setting does not fit this number of ranks or this machine, or another
            run writes into the same folder.
        DataError: There is no usable text.
        CheckpointError: A checkpoint could not be written, or none can be resumed from.
        CommunicationError: A peer died or did not answer in time.
        ReplicaMismatchError: Replicas that must be equal are not.

    Examples:
        >>> import pathlib, tempfile
        >>> from fivefold.train import TrainConfig
        >>> from fivefold.train.config import DataConfig, ModelConfig, OptimConfig, RunConfig
        >>> from fivefold.train.config import SyncConfig
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for number in range(8):
        ...     _ = (folder / f"{number}.txt").write_text("to be or not to be\n" * 40)
        >>> config = TrainConfig(
        ...     run=RunConfig(output=folder / "run", steps=2, device="cpu"),
        ...     data=DataConfig(path=str(folder), cache=str(folder / "cache"), sequence_length=16),
        ...     model=ModelConfig(layers=1, width=16, heads=2),
        ...     optim=OptimConfig(batch_size=2, warmup_steps=0, validation_batches=1),
        ...     sync=SyncConfig(method="none"),
        ... )
        >>> train(config).steps
        2
    """
    place = read_place()
    require_settings(config, world_size=place.world_size)
    stop = StopRequest()
    with stop.handling_signals(), contextlib.ExitStack() as held:
        torch.set_num_threads(config.run.threads)
        ranks = open_ranks(place, device=config.run.device, timeout_s=config.run.timeout_s)

        def hold_folder() -> None:
            require_loggers(config.logging)
            held.enter_context(FolderLock(config.run.output, "run.output"))

        ranks.on_main(hold_folder, what="whether the run's folder is free")
        tokenizer, corpus = load_equal_data(config.data, ranks)
        if ranks.is_main:
            _tell_of_data(corpus)
        run = _Run(config, ranks, corpus=corpus, vocab_size=tokenizer.vocab_size, stop=stop)
        held.callback(run.close)
        result = run.execute()
    close_ranks(ranks)
    return result


class _Run:
    """One rank's part of a run: its parts, its counters, and the order in which they act."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        *,
        corpus: Corpus,
        vocab_size: int,
        stop: StopRequest,
    ) -> None:
        self.config, self.ranks, self.corpus = config, ranks, corpus
        self.folder = config.run.output
        self.experts = experts = share_experts(config, ranks)
        self.model = Transformer(
            config.model,
            vocab_size=vocab_size,
            sequence_length=config.data.sequence_length,
            seed=config.run.seed,
            group=None if experts is None else experts.for_layers,
        )
        precision = choose_precision(config.optim.precision, ranks.device)
        self.workers = share_states(self.model, config, ranks, precision=precision)
        self.model.to(ranks.device)
        self.mixtures = self.model.mixtures
        self.optimizer = make_optimizer(self.model, config)
        self.method = make_method(
            config.sync,
            self.model,
            optimizer=self.optimizer,
            ranks=ranks,
            experts=experts,
            tasks=config.tasks,
            workers=self.workers,
            max_norm=config.optim.grad_clip,
            total_steps=config.run.steps,
        )
        self.agreement = StopAgreement(ranks, stop)
        parts = TrainedParts(
            model=self.model, optimizer=self.optimizer, method=self.method, mixtures=self.mixtures
        )
        self.stepper = StepRunner(config, ranks, parts=parts, tokens=corpus.train)
        self.step = 0
        self.saved_step: int | None = None
        self.validation: tuple[int, Validation] | None = None
        self._wall_before_s = 0.0
        self._last_log = (0, 0.0)
        self._loss_last = 0.0
        self._text = ""
        self._begin(self._load())

    # -- beginning and end ----------------------------------------------------------------------

    def _load(self) -> dict[str, Any] | None:
        fingerprint = self.corpus.fingerprint
        self.description = describe_run(self.config, data_fingerprint=fingerprint)
        found = choose_checkpoint(
            self.folder, self.config.run.resume, description=self.description, ranks=self.ranks
        )
        self.resumed_from: Path | None = None if found is None else found[0]
        if self.resumed_from is None:
            return None
        state = read_own_state(self.resumed_from, ranks=self.ranks)
        if self.workers is None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            load_own_shards(self.model, self.optimizer, state)
        self.method.load_state_dict(state["method"])
        if self.mixtures is not None:
            self.mixtures.load_state_dict(state["mixtures"])
        self.step = self.saved_step = state["step"]
        if state["validation"] is not None:
            at, values = state["validation"]
            self.validation = (at, Validation(**values))
        self._wall_before_s = state["wall_s"]
        return state

    def _begin(self, state: dict[str, Any] | None) -> None:
        """Open the files and start the clock."""
        before = state or {"seconds": None, "waits": None, "link": None}
        self.recorder = SpanRecorder(
            self.folder / "ranks" / f"rank{self.ranks.rank}.jsonl",
            seconds=before["seconds"],
            waits=before["waits"],
            resumed=state is not None,
        )
        self.metrics = self._open_shared_files() if self.ranks.is_main else None
        shape = (self.config.optim.batch_size, self.config.data.sequence_length)
        blank = torch.zeros(shape, dtype=torch.int64, device=self.ranks.device)
        with autocast_context(self.stepper.precision, self.ranks.device):
            self.method.warm_up(blank, blank)
        self.link = LinkMeter(before["link"])
        self.meter = ProcessMeter(before.get("process"))
        # After everything that draws numbers, so that the stream continues where it was.
        seed = self.config.run.seed * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(seed % 2**64)
        if state is not None:
            restore_rng(state["rng"])
        self._started_s = time.perf_counter()
        self._last_log = (self.step, self.wall_s())

    def _open_shared_files(self) -> MetricsWriter:
        manifest = run_manifest(
            self.config,
            world_size=self.ranks.world_size,
            num_parameters=self.model.num_parameters,
            precision=self.stepper.precision,
            data=self.corpus.account | {"said": reading_of(self.corpus.account).line()},
        )
        settings = self.config.model_dump()
        write_text(self.folder / "config.toml", format_toml(settings))
        write_json(self.folder / "manifest.json", manifest)
        resumed = None if self.resumed_from is None else self.step
        loggers = Loggers(self.config.logging, self.folder, settings=settings, resumed_step=resumed)
        writer = MetricsWriter(self.folder / "metrics.jsonl", resumed_step=resumed, loggers=loggers)
        account = self.corpus.account
        sizes = {name: account[name] for name in ("read_files", "read_bytes", "disk_bytes")}
        writer.write("data", step=self.step, wall_s=self._wall_before_s, **sizes)
        if self.resumed_from is not None:
            name = self.resumed_from.name
            writer.write("resume", step=self.step, wall_s=self._wall_before_s, checkpoint=name)
        return writer

    def execute(self) -> RunResult:
        """Train to the last step, or to the step at which all ranks agree to stop."""
        steps = self.config.run.steps
        stopped = False
        self.agreement.start(self.step)
        progress = ProgressBar(
            line_every_s=self.config.run.line_every_s, shown=self.ranks.is_main, unit="step"
        )
        with progress:
            while self.step < steps and not stopped:
                self.ranks.where = f"step {self.step + 1}"
                self.recorder.add(self.stepper.run(self.step))
                self.step += 1
                self._report_step(progress)
                stopped = self.agreement.poll(self.step) and self.step < steps
                self.recorder.add(self._agreement_spans())
                self._checkpoint_if_due(stopped=stopped)
        if not stopped:
            self._finish()
        return self._conclude("stopped" if stopped else "finished")

    def _agreement_spans(self) -> list[Span]:
        waits = self.agreement.take_waits()
        return [
            Span(lane="wait", name="agreement on stopping", start_s=a, end_s=b) for a, b in waits
        ]

    def _finish(self) -> None:
        """Drain, judge and save the final parameters."""
        self.ranks.where = "the end of training"
        complete = self.saved_step == self.config.run.steps  # a resume of such a run
        if not complete:
            self.method.finalize()
        self.agreement.drain()  # last: its message may have queued behind a round's payload
        if complete:
            return
        if self.metrics is not None:  # the drain's last arrival may have moved tau
            self._log_decisions(self.metrics, self.wall_s())
        self.recorder.add(self._agreement_spans() + self.method.take_spans())
        self._validate()
        self._checkpoint()

    def _conclude(self, reason: str) -> RunResult:
        wall_s = self.wall_s()
        tokens, seconds = self.tokens(self.step), self.recorder.categories(wall_s)
        statistics = self.method.statistics()
        training_s = wall_s - sum(seconds[name] for name in _ASIDE)
        result = RunResult(
            output=self.folder,
            method=self.config.sync.method,
            label=method_label(self.config.sync, self.config.tasks),
            reason=reason,
            steps=self.step,
            tokens=tokens,
            wall_s=wall_s,
            tokens_per_s=tokens / max(training_s, 1e-9),
            bits_per_byte=self.validation and self.validation[1].bits_per_byte,
            seconds=seconds,
            waits=self.recorder.waits,
            communication=self.method.totals.record(),
            link_bytes=self.link.record(),
            sync=None if statistics is None else dataclasses.asdict(statistics),
            parameters_sha256=parameters_sha256(self.model),
            moe=None if self.mixtures is None else self.mixtures.record(),
            process=self.meter.record(),
        )
        if self.metrics is not None:
            self.metrics.write("end", step=self.step, tokens=tokens, wall_s=wall_s, reason=reason)
            if reason == "finished":
                write_json(self.folder / "result.json", result.record())
            _LOG.info("%s", result.summary())
        self.recorder.close(loss_mean_last=self._loss_last, link_bytes=self.link.record())
        return result

    def close(self) -> None:
        """Hand everything written to the operating system; also after an error."""
        self.recorder.flush()
        if self.metrics is not None:
            self.metrics.close()
        if self.experts is not None:
            self.experts.close()

    # -- between steps --------------------------------------------------------------------------

    def wall_s(self) -> float:
        """Return the seconds of training so far, over resumes."""
        return self._wall_before_s + time.perf_counter() - self._started_s

    def tokens(self, step: int) -> int:
        """Return the tokens that all ranks read until a step."""
        optim = self.config.optim
        per_rank = optim.batch_size * optim.accumulation * self.config.data.sequence_length
        return step * per_rank * self.ranks.world_size

    def _report_step(self, progress: ProgressBar) -> None:
        run, at_end = self.config.run, self.step == self.config.run.steps
        if self.step % run.log_every_steps == 0 or at_end:
            self._log()
        if run.validate_every_steps and self.step % run.validate_every_steps == 0 and not at_end:
            self._validate()
        progress(
            method_label(self.config.sync, self.config.tasks), self.step, run.steps, self._text
        )

    def _log(self) -> None:
        self._loss_last = float(self.stepper.loss)
        wall_s, tokens = self.wall_s(), self.tokens(self.step)
        last_step, last_s = self._last_log
        rate = (tokens - self.tokens(last_step)) / max(wall_s - last_s, 1e-9)
        self._last_log = (self.step, wall_s)
        statistics = self.method.statistics() if self.config.sync.tau == "auto" else None
        self._text = f"loss {self._loss_last:.3f}  {rate:,.0f} tokens/s"
        if statistics is not None:
            self._text += f"  tau {statistics.tau}"
        self.recorder.flush()
        routing = None if self.mixtures is None else self.mixtures.take_interval()
        if self.metrics is not None:
            split = self.corpus.train
            size = {"num_tokens": len(split), "num_bytes": self.corpus.train_bytes}
            self.metrics.write(
                "train",
                step=self.step,
                tokens=tokens,
                wall_s=wall_s,
                loss=self._loss_last,
                bits_per_byte=bits_per_byte(self._loss_last, **size),
                lr=self.stepper.lr,
                grad_norm=float(self.stepper.grad_norm),
                tokens_per_s=rate,
            )
            if routing is not None:
                self.metrics.write("moe", step=self.step, wall_s=wall_s, **routing)
            self._log_sync(self.metrics, wall_s)

    def _log_sync(self, metrics: MetricsWriter, wall_s: float) -> None:
        statistics = self.method.statistics()
        if statistics is not None:
            totals = dataclasses.asdict(statistics)
            metrics.write("sync", step=self.step, wall_s=wall_s, **totals)
        self._log_decisions(metrics, wall_s)

    def _log_decisions(self, metrics: MetricsWriter, wall_s: float) -> None:
        for decision in self.method.take_decisions():
            metrics.write("tau", step=self.step, wall_s=wall_s, **dataclasses.asdict(decision))

    def _validate(self) -> None:
        with self.recorder.span("validation", f"step {self.step}"), self.method.evaluation():
            found = evaluate(
                self.model,
                self.corpus,
                config=self.config,
                ranks=self.ranks,
                autocast=autocast_context(self.stepper.precision, self.ranks.device),
            )
        self.validation = (self.step, found)
        if self.metrics is not None:
            self.metrics.write(
                "validation",
                step=self.step,
                tokens=self.tokens(self.step),
                wall_s=self.wall_s(),
                bits_per_byte=found.bits_per_byte,
                loss=found.loss,
            )

    def _checkpoint_if_due(self, *, stopped: bool) -> None:
        every = self.config.run.checkpoint_every_steps
        due = every and self.step % every == 0 and self.step < self.config.run.steps
        if due or stopped:
            self._checkpoint()

    def _checkpoint(self) -> None:
        start_s = time.perf_counter()
        method_state = self.method.state_dict()  # may wait for an all-reduce
        waits = self.method.take_spans()
        state = self._state(method_state)
        record = write_checkpoint(
            self.folder,
            state,
            step=self.step,
            description=self.description,
            ranks=self.ranks,
            keep=self.config.run.keep_checkpoints,
        )
        end_s = time.perf_counter()
        self.saved_step = self.step
        holes = [span for span in waits if span.lane == "wait"]
        name = f"step {self.step}"
        self.recorder.add(waits)
        self.recorder.add(
            Span(lane="checkpoint", name=name, start_s=a, end_s=b)
            for a, b in subtract(start_s, end_s, holes=holes)
        )
        if self.metrics is not None:
            seconds, size = end_s - start_s, record.num_bytes
            # The time that a resume continues from, so that wall_s never goes back in the file.
            wall_s = state["wall_s"]
            self.metrics.write(
                "checkpoint", step=self.step, wall_s=wall_s, seconds=seconds, bytes=size
            )

    def _state(self, method_state: dict[str, Any]) -> dict[str, Any]:
        validation = None
        if self.validation is not None:
            validation = (self.validation[0], vars(self.validation[1]))
        return {
            "step": self.step,
            "model": own_shards(self.model.state_dict()),
            "optimizer": own_shards(self.optimizer.state_dict()),
            "method": method_state,
            "mixtures": None if self.mixtures is None else self.mixtures.state_dict(),
            "rng": rng_state(),
            "wall_s": self.wall_s(),
            "seconds": self.recorder.seconds,
            "waits": self.recorder.waits,
            "validation": validation,
            "link": self.link.record(),
            "process": self.meter.record(),
        }


def launch(
    config_file: str | Path, overrides: Sequence[str] = (), *, nproc: int, max_restarts: int = 0
) -> int:
    """Train with several ranks on this host; returns when all have ended.

    Args:
        config_file: The TOML configuration.
        overrides: Assignments such as ``"run.steps=50"`` on top of it.
        nproc: Number of ranks.
        max_restarts: How often all ranks are started again after a failure; each time they
            resume from the newest whole checkpoint.

    Returns:
        Exit code: 0 when training finished, or stopped with a checkpoint after a signal; 128
        plus the signal's number when a signal ended the ranks before they could write one.

    Raises:
        ConfigurationError: The configuration is not allowed, or nproc is below 1.
        FivefoldError: What the first rank to fail met.
        CommunicationError: A rank was killed.
        RuntimeError: A rank met an internal error.
    """
    if nproc < 1 or max_restarts < 0:
        message = (
            f"nproc must be at least 1 and max_restarts at least 0; got {nproc}, {max_restarts}"
        )
        raise ConfigurationError(message, hint="use --nproc 2")
    config = load_config(config_file, overrides)
    require_settings(config, world_size=nproc)
    require_host(config, nproc=nproc)
    return launch_ranks(
        ["-m", "fivefold.train._worker", str(config_file), *overrides],
        nproc=nproc,
        max_restarts=max_restarts,
        timeout_s=config.run.timeout_s,
        threads=config.run.threads,
    )
