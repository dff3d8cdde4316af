"""The trainer: one call trains a model on a graph as a configuration says, or resumes it.

Whatever decides the parameters is a pure function of the step or is in the checkpoint. That is why
a run that was killed and resumed reaches the parameters of the run that was not, bit for bit.
What is particular to a mode is in its loader. Knows nothing of command lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import DataError
from fivefold.gnn.data import Dataset
from fivefold.gnn.loading import HeteroMiniBatch, MiniBatch
from fivefold.gnn.loading.shared_rows import rows_in_memory
from fivefold.gnn.training._graph import Graph, model_for, open_graph, require_labels, scores_of
from fivefold.gnn.training._result import (
    Clock,
    EpochTally,
    GnnResult,
    check_before_work,
    describe_run,
    require_same_plan,
    run_label,
    run_manifest,
)
from fivefold.gnn.training._source import (
    Evaluator,
    Loader,
    Rounds,
    add_counts,
    make_loader,
)
from fivefold.gnn.training.config import GnnConfig
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
    newest_checkpoint,
    parameters_sha256,
    read_checkpoint,
    read_own_state,
    restore_rng,
    rng_state,
    write_checkpoint,
)
from fivefold.runs.loggers import Loggers, require_loggers
from fivefold.runs.ranks import Ranks, StopAgreement, close_ranks, open_ranks, read_place

_LOG = logging.getLogger(__name__)


def train_graph(config: GnnConfig, *, show: Callable[[str], None] | None = None) -> GnnResult:
    r"""Train as configured: on this process alone, or as one rank of several.

    In mode "disk" what is missing is made first: samples, plan, packed rows; each goes on where a
    killed run stopped. SIGTERM or Ctrl-C makes all ranks write a checkpoint and return.

    Args:
        config: The whole configuration.
        show: Called with the plan's explanation before anything is packed; None logs it.

    Returns:
        What was reached, and where the time went.

    Raises:
        ConfigurationError: A setting does not fit this data set or machine, or another process
            trains in the run's folder.
        DataError: The data set is missing, damaged or has no labels.
        CheckpointError: A checkpoint could not be written, or none can be resumed from.
        CommunicationError: A peer died or did not answer in time.
        InfeasibleError: A budget is too small.
        StorageError: The disk is full or refuses; the same call goes on afterwards.

    Examples:
        >>> import pathlib, tempfile
        >>> from fivefold.gnn.data import generate_graph
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> generate_graph(folder / "graph", nodes=300, dim=8, seed=0).close()
        >>> config = GnnConfig(
        ...     run={"output": folder / "run", "epochs": 1, "mode": "memory", "device": "cpu"},
        ...     data={"path": folder / "graph"},
        ...     sampling={"fanouts": (3, 3), "batch_size": 64},
        ... )
        >>> train_graph(config).epochs
        1
    """
    stop = StopRequest()
    require_loggers(config.logging)
    with stop.handling_signals(), contextlib.ExitStack() as opened:
        torch.set_num_threads(config.run.threads)
        dataset = open_graph(config)
        opened.callback(dataset.close)
        require_labels(dataset)
        place = read_place()
        is_main = place.rank == 0
        if is_main:
            opened.enter_context(FolderLock(config.run.output, "run.output"))
        progress = opened.enter_context(
            ProgressBar(line_every_s=config.run.line_every_s, shown=is_main)
        )
        told = stop.breaking(progress)
        accept = None
        if config.run.mode == "disk":
            accept = check_before_work(
                config, data=dataset.fingerprint, world_size=place.world_size
            )
        topology = dataset.topology(mapped=config.data.mapped, progress=told)
        rounds = None
        if config.run.mode == "disk":
            # Before the group forms: packing may take longer than a peer may be waited for.
            rounds = Rounds(config, dataset, topology=topology, is_main=is_main)
            opened.callback(rounds.close)
            rounds.open(_first_epoch(config), progress=told, show=show, accept=accept)
        ranks = open_ranks(place, device=config.run.device, timeout_s=config.run.timeout_s)
        if config.budgets.device and ranks.device.type == "cpu" and rounds is not None:
            _LOG.warning("there is no device: rows of budgets.device take host memory, beside host")
        rows = None
        if config.run.mode == "memory" and isinstance(dataset, Dataset):
            rows = rows_in_memory(dataset.features, "x", shared=ranks.world_size > 1)[0]
        parts: dict[str, Any] = {"topology": topology, "ranks": ranks, "features": rows}
        judge = Evaluator(config, dataset, **parts)
        opened.callback(judge.close)
        make = functools.partial(make_loader, config, dataset, **parts)
        run = _Run(config, dataset, ranks, make=make, judge=judge, rounds=rounds)
        opened.callback(run.close)
        result = run.execute(stop, progress)
        close_ranks(ranks)
    return result


def _first_epoch(config: GnnConfig) -> int:
    """Return the epoch that training begins in, which decides the round of samples."""
    if not config.sampling.refresh_every_epochs or config.run.resume == "never":
        return 0
    found = newest_checkpoint(config.run.output)
    if found is None:
        return 0
    return min(int(read_checkpoint(found[0], rank=0)["epoch"]), config.run.epochs - 1)


def _finite(loss: torch.Tensor, step: int) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise DataError(
            f"the loss of step {step + 1} is {value}: from here on nothing would be learned",
            hint="look for features that are not finite; else lower optim.lr, or set "
            "optim.grad_clip, and begin in another run.output",
        )
    return value


class _Run:
    """One rank's part of a run: its parts, its counters, and the order in which they act."""

    def __init__(
        self,
        config: GnnConfig,
        dataset: Graph,
        ranks: Ranks,
        *,
        make: Callable[..., Loader],
        judge: Evaluator,
        rounds: Rounds | None,
    ) -> None:
        self.config, self.dataset, self.ranks = config, dataset, ranks
        self.judge, self.rounds, self.make = judge, rounds, make
        self.prepared = None if rounds is None else rounds.prepared
        self.loader = make(prepared=self.prepared)
        self.num_batches = len(self.loader)
        self.folder: Path = config.run.output
        torch.manual_seed(config.run.seed)
        self.model = model_for(dataset, config).to(ranks.device)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay
        )
        self.step = self.epoch = self.position = 0
        self.best: dict[str, Any] = {}
        self.tally = EpochTally()
        self.data: dict[str, Any] | None = None
        self.saved_step: int | None = None
        self.clock = Clock()
        self.metrics: MetricsWriter | None = None
        self._counted = self.loader.statistics()
        self._begin()

    # -- beginning and end ----------------------------------------------------------------------

    def _begin(self) -> None:
        made, changes = self.prepared, self.config.sampling.refresh_every_epochs > 0
        plan = None if made is None or changes else made.order_fingerprint
        description = describe_run(self.config, data=self.dataset.fingerprint)
        self.description = description | {"plan": {"order": plan}}
        chosen = choose_checkpoint(
            self.folder, self.config.run.resume, description=description, ranks=self.ranks
        )
        # After everything that draws numbers; every rank drops other values.
        torch.manual_seed(self.config.run.seed * self.ranks.world_size + self.ranks.rank)
        if chosen is not None:
            require_same_plan(*chosen, plan=plan)
            self._restore(chosen[0])
        self.trained: torch.nn.Module = self.model
        if self.ranks.world_size > 1:
            with self.ranks.guard("handing out the parameters"):
                self.trained = DistributedDataParallel(self.model)
        if self.ranks.is_main:
            self._open_files(None if chosen is None else chosen[0])

    def _restore(self, path: Path) -> None:
        own = read_own_state(path, ranks=self.ranks)
        state = own if self.ranks.is_main else read_checkpoint(path, rank=0)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = self.saved_step = state["step"]
        self.epoch, self.position = state["epoch"], state["position"]
        self.best, self.data = state["best"], state["data"]
        self.tally = EpochTally(**own["tally"])
        if self.position:  # at 0 the loader may be of the round before
            self.loader.load_state_dict(own["loader"])
        self.clock = Clock(state["seconds"])
        restore_rng(own["rng"])

    def _open_files(self, resumed_from: Path | None) -> None:
        manifest = run_manifest(
            self.config, self.dataset, self.model, world_size=self.ranks.world_size
        )
        settings = self.config.model_dump()
        write_text(self.folder / "config.toml", format_toml(settings))
        write_json(self.folder / "manifest.json", manifest)
        step = None if resumed_from is None else self.step
        loggers = Loggers(self.config.logging, self.folder, settings=settings, resumed_step=step)
        path = self.folder / "metrics.jsonl"
        self.metrics = MetricsWriter(path, resumed_step=step, loggers=loggers)
        self._note_plan()
        if resumed_from is not None:
            self._write("resume", checkpoint=resumed_from.name)

    def _note_plan(self) -> None:
        if self.prepared is not None and self.ranks.is_main:
            made = self.prepared
            write_text(self.folder / "plan.txt", made.explain() + "\n")
            self._write("prepare", seconds=made.seconds, plan=made.predicted())

    def execute(self, stop: StopRequest, progress: ProgressBar) -> GnnResult:
        """Train to the last epoch, or to the step at which all ranks agree to stop."""
        stopped = False
        agreement = StopAgreement(self.ranks, stop)
        agreement.start(self.step)
        self.model.train()
        while self.epoch < self.config.run.epochs and not stopped:
            for batch in self._batches():
                self._train_on(batch)
                self._log(progress)
                if self.position < self.num_batches:
                    stopped = self._pause(agreement)
                    if stopped:
                        break
            else:
                self._end_epoch()
                stopped = self._pause(agreement, at_end=True)
        agreement.drain()
        finished = self.epoch >= self.config.run.epochs
        if self.saved_step != self.step:
            self._checkpoint()
        return self._conclude("finished" if finished else "stopped")

    def _conclude(self, reason: str) -> GnnResult:
        result = GnnResult(
            output=self.folder,
            label=run_label(self.config),
            reason=reason,
            steps=self.step,
            epochs=self.epoch,
            wall_s=self.clock.wall_s(),
            seconds=self.clock.record(),
            prepare_s={} if self.prepared is None else self.prepared.seconds,
            valid_accuracy=self.best.get("accuracy"),
            test_accuracy=self.best.get("test_accuracy"),
            best_epoch=self.best.get("epoch"),
            data=self.data or {},
            parameters_sha256=parameters_sha256(self.model),
        )
        if self.ranks.is_main:
            self._write("end", epoch=self.epoch, reason=reason)
            if reason == "finished":
                write_json(self.folder / "result.json", result.record())
            _LOG.info("%s", result.summary())
        return result

    def close(self) -> None:
        """Close the loader and the metrics; also after an error."""
        self._close_loader()
        if self.metrics is not None:
            self.metrics.close()

    def _close_loader(self) -> None:
        self.loader.close()
        if self.prepared is not None:
            self.prepared.close()

    # -- one step -------------------------------------------------------------------------------

    def _batches(self) -> Iterator[MiniBatch | HeteroMiniBatch]:
        """Yield the rest of the epoch; waiting for a batch counts as "data"."""
        if self.position == 0:
            self._change_round()
            self.loader.set_epoch(self.epoch)
        batches = iter(self.loader)
        while True:
            with self.clock.measure("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _change_round(self) -> None:
        """Take the next round's samples where this epoch begins one."""
        rounds = self.rounds
        if rounds is None or rounds.number_of(self.epoch) == rounds.number:
            return
        with self.clock.measure("data"):
            self._close_loader()
            self.prepared = rounds.open(self.epoch)
            self.loader = self.make(prepared=self.prepared)
        self._counted = self.loader.statistics()
        self._note_plan()

    def _train_on(self, batch: MiniBatch | HeteroMiniBatch) -> None:
        self.ranks.where = f"step {self.step + 1}"
        with self.clock.measure("compute"):
            assert batch.y is not None, "the loader was given labels"
            scores = scores_of(self.trained, batch)
            known = max(1, int((batch.y >= 0).sum()))
            losses = functional.cross_entropy(scores, batch.y, ignore_index=-1, reduction="sum")
            with self.ranks.guard("averaging gradients"):
                (losses / known).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            right = int((scores.detach().argmax(dim=1) == batch.y).sum())
            self.tally.add(loss=_finite(losses, self.step), right=right, nodes=known)
        self.step += 1
        self.position += 1

    def _log(self, progress: ProgressBar) -> None:
        run, last = self.config.run, self.position == self.num_batches
        text = f"loss {self.tally.loss:.4f}  accuracy {self.tally.accuracy:.4f}"
        total = run.epochs * self.num_batches
        progress(run_label(self.config), self.step, total, f"epoch {self.epoch + 1}  {text}")
        if self.metrics is not None and (self.step % run.log_every_steps == 0 or last):
            recent = self.tally.take_recent()
            self._write("train", epoch=self.epoch, **recent)

    # -- between steps --------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        self._count()
        values = {"loss": self.tally.loss, "accuracy": self.tally.accuracy}
        self.epoch, self.position = self.epoch + 1, 0
        self._write("epoch", epoch=self.epoch, **values, data=self.data)
        self.tally = EpochTally()
        every, last = self.config.run.validate_every_epochs, self.config.run.epochs
        if self.epoch == last or (every and self.epoch % every == 0):
            self._validate()

    def _count(self) -> None:
        """Add what the data path did since the last time."""
        now = self.loader.statistics()
        self.data = add_counts(self.data, now - self._counted)
        self._counted = now

    def _validate(self) -> None:
        with self.clock.measure("validation"):
            found = self.judge.score(self.model, "valid")
            values = {"accuracy": found.accuracy, "loss": found.loss, "nodes": found.nodes}
            if found.nodes and found.accuracy > self.best.get("accuracy", -1.0):
                test = self.judge.score(self.model, "test")
                values["test_accuracy"] = test.accuracy
                self.best = {"epoch": self.epoch, "accuracy": found.accuracy}
                self.best["test_accuracy"] = test.accuracy if test.nodes else None
        self._write("validation", epoch=self.epoch, **values)

    def _pause(self, agreement: StopAgreement, *, at_end: bool = False) -> bool:
        """Write a checkpoint where one is due; whether all ranks stop here."""
        every = self.config.run.checkpoint_every_steps
        stops = agreement.poll(self.step)
        if stops or (self.step % every == 0 if every else at_end):
            self._checkpoint()
        return stops

    def _checkpoint(self) -> None:
        with self.clock.measure("checkpoint"):
            self._count()
            write_checkpoint(
                self.folder,
                self._state(),
                step=self.step,
                description=self.description,
                ranks=self.ranks,
                keep=self.config.run.keep_checkpoints,
            )
        self.saved_step = self.step
        self._write("checkpoint")

    def _state(self) -> dict[str, Any]:
        tally = dataclasses.asdict(self.tally)
        own = {"loader": self.loader.state_dict(), "rng": rng_state(), "tally": tally}
        if not self.ranks.is_main:
            return own
        return own | {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "data": self.data,
            "seconds": self.clock.record(),
        }

    def _write(self, event: str, **values: Any) -> None:
        if self.metrics is not None:
            wall_s, seconds = self.clock.wall_s(), self.clock.record()
            self.metrics.write(event, step=self.step, wall_s=wall_s, stages=seconds, **values)
