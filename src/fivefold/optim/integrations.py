"""``OuterSync`` inside other people's training loops: Hugging Face's, Accelerate, Lightning.

All wrap the model in DistributedDataParallel on their own. Beside ``OuterSync`` gradients would
then be averaged twice, at every step over the slow network too, and nothing would say so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import CheckpointError, ConfigurationError, UnsupportedError, optional_module
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._sync import OuterSync

__all__ = ["disable_ddp", "lightning_strategy", "torchtitan_outer_sync", "use_outer_sync"]

_CHECKPOINT = "checkpoint"  # Trainer's folders are checkpoint-STEP


def disable_ddp(accelerator: Any) -> None:
    """Make an Accelerator prepare models without DistributedDataParallel.

    Device placement, mixed precision and ``torch.compile`` stay as they are. Call it before
    ``accelerator.prepare``; then make an ``OuterSync`` of the model and call its ``step()`` where
    ``accelerator.sync_gradients`` is true.

    Args:
        accelerator: An ``accelerate.Accelerator`` of several processes, or of one.

    Raises:
        ConfigurationError: The Accelerator shards the model (FSDP, DeepSpeed, Megatron-LM).

    Examples:
        >>> disable_ddp(accelerator)  # doctest: +SKIP
        >>> model, optimizer, data = accelerator.prepare(model, optimizer, data)  # doctest: +SKIP
        >>> sync = OuterSync(model, optimizer, rule=CO2(tau=8))  # doctest: +SKIP
    """
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind in {"FSDP", "DEEPSPEED", "MEGATRON_LM"}:
        message = f"this Accelerator shards the model ({kind}); replicas are needed"
        hint = "for sharded workers use fully_shard and OuterSync(process_group=mesh['replicate'])"
        raise ConfigurationError(message, hint=hint)
    prepare = accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_model(model: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        # In this mode all is done but the wrapping; it is the last of three arguments.
        return prepare(model, *arguments[:1], **options | {"evaluation_mode": True})

    accelerator.prepare_model = prepare_model


def use_outer_sync(trainer: Any, rule: OuterRule, **options: Any) -> None:
    """Let a ``transformers.Trainer`` train with local updates instead of DDP.

    Every process trains its own replica and ``rule`` brings them together. Evaluation and saved
    models are of the anchor, which is equal on all ranks; after ``train()`` the model is. Each rank
    adds a file of its own to every checkpoint, and ``resume_from_checkpoint`` goes on exactly.

    Args:
        trainer: Made with a bare model; ``train()`` has not been called.
        rule: When and how workers are brought together.
        options: Passed on to ``OuterSync``, for example ``codec="int8"``.

    Raises:
        ConfigurationError: The trainer shards or replicates the model in a way of its own, or
            loads its best model at the end.
        UnsupportedError: transformers is not installed.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=data)  # doctest: +SKIP
        >>> use_outer_sync(trainer, CO2(tau=8))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    arguments = trainer.args
    if arguments.n_gpu > 1:
        message = f"this trainer spreads each batch over {arguments.n_gpu} GPUs (DataParallel)"
        raise ConfigurationError(message, hint="start one process per GPU with torchrun")
    if arguments.load_best_model_at_end:
        message = "load_best_model_at_end=True would undo the last merge of the replicas"
        hint = "set it to False, and load the best checkpoint after train()"
        raise ConfigurationError(message, hint=hint)
    disable_ddp(trainer.accelerator)
    # Counting the tokens of all ranks is a collective of its own at every step.
    arguments.average_tokens_across_devices = False
    transformers = optional_module("transformers", extra="hf", use="a Trainer")
    # Trainer's own class has the events that nothing is done at.
    kind = type("OuterSyncCallback", (_Synchroniser, transformers.TrainerCallback), {})
    synchroniser: _Synchroniser = kind(trainer, rule, options)
    # Before all others: theirs may put an average of weights into the model at the end.
    trainer.callback_handler.callbacks.insert(0, synchroniser)
    for name in ("evaluate", "predict", "save_model"):
        setattr(trainer, name, synchroniser.at_the_anchor(getattr(trainer, name)))
    trainer.train = synchroniser.noting_resume(trainer.train)


class _Synchroniser:
    """One trainer's callback."""

    def __init__(self, trainer: Any, rule: OuterRule, options: dict[str, Any]) -> None:
        self._trainer, self._rule, self._options = trainer, rule, options
        self._sync: OuterSync | None = None  # while there are steps to come
        self._finished: OuterSync | None = None  # after the last one
        self._optimizer: Any = None
        self._model: Any = None
        self._resume: Path | None = None

    def noting_resume(self, train: Any) -> Any:
        """Return ``train``, which remembers where it resumes from."""

        @functools.wraps(train)
        def wrapped(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resume = None
            if resume_from_checkpoint is True:
                utilities = importlib.import_module("transformers.trainer_utils")
                resume_from_checkpoint = utilities.get_last_checkpoint(
                    self._trainer.args.output_dir
                )
                if resume_from_checkpoint is None:
                    message = f"no checkpoint in {self._trainer.args.output_dir}"
                    raise CheckpointError(message, hint="leave resume_from_checkpoint out")
            if resume_from_checkpoint:
                self._resume = Path(resume_from_checkpoint)
                _OwnFile(self._resume / _own_name()).require()
            result = train(resume_from_checkpoint, *args, **kwargs)
            self._end()
            return result

        return wrapped

    def at_the_anchor(self, method: Any) -> Any:
        """Return a method of the trainer that sees the parameters all ranks agree on."""

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._sync is None:
                return method(*args, **kwargs)
            with self._sync.global_parameters():
                return method(*args, **kwargs)

        return wrapped

    def on_train_begin(self, *_: Any, model: torch.nn.Module, optimizer: Any, **__: Any) -> None:
        """Make the ``OuterSync``, and go on from this rank's own file after a resume."""
        self._model = self._trainer.accelerator.unwrap_model(model)
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._sync = OuterSync(self._model, self._optimizer, rule=self._rule, **self._options)
        if self._resume is not None:
            own = _OwnFile(self._resume / _own_name())
            own.load(self._model, [self._optimizer], self._sync)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Count a local step."""
        assert self._sync is not None, "on_train_begin comes first"
        self._sync.step()

    def on_save(self, _: Any, trained: Any, *__: Any, **___: Any) -> None:
        """Write this rank's own state beside the checkpoint."""
        assert self._sync is not None, "on_train_begin comes first"
        folder = Path(self._trainer.args.output_dir) / f"{_CHECKPOINT}-{trained.global_step}"
        _OwnFile(folder / _own_name()).write(self._model, [self._optimizer], self._sync)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Apply all work under way and leave all replicas equal."""
        assert self._sync is not None, "on_train_begin comes first"
        self._sync.finalize()
        self._finished, self._sync = self._sync, None

    def _end(self) -> None:
        """Take in what later callbacks have put into the model, and let the engine go."""
        if self._finished is not None:
            self._finished.take_weights()
            self._finished.close()
            self._finished = None


def lightning_strategy(
    rule: OuterRule, *, strategy: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Return a Lightning strategy that trains with local updates instead of DDP.

    It starts processes, shares out batches and reduces metrics as "ddp" does, and does not wrap the
    model: every process trains its own replica and ``rule`` brings them together. Validation, tests
    and checkpoints are of the anchor, which is equal on all ranks; after ``fit()`` the model is.
    Each rank adds a file of its own beside every checkpoint, from which ``fit(ckpt_path=...)`` goes
    on exactly. With several optimizers a step ends with the last one's.

    Args:
        rule: When and how workers are brought together.
        strategy: Arguments of Lightning's ``DDPStrategy``, for example
            ``{"process_group_backend": "gloo"}``.
        options: Passed on to ``OuterSync``, for example ``codec="int8"``.

    Returns:
        A strategy for ``Trainer(strategy=...)``.

    Raises:
        UnsupportedError: Neither lightning nor pytorch-lightning is installed.

    Examples:
        >>> strategy = lightning_strategy(CO2(tau=8))  # doctest: +SKIP
        >>> trainer = Trainer(strategy=strategy, devices=2, max_epochs=1)  # doctest: +SKIP
        >>> trainer.fit(model, data)  # doctest: +SKIP
    """
    strategies = importlib.import_module(f"{_lightning().__name__}.strategies")

    class OuterSyncStrategy(_OuterSyncHooks, strategies.DDPStrategy):  # type: ignore[name-defined]
        """DDP's processes without DDP's wrapper."""

    made = OuterSyncStrategy(**(strategy or {}))
    made.rule, made.options = rule, options
    callbacks = importlib.import_module(f"{_lightning().__name__}.callbacks")
    kind = type("BeforeOtherCallbacks", (_BeforeOthers, callbacks.Callback), {})
    made.first_callback = kind(made)
    return made


class _BeforeOthers:
    """A callback before all others: theirs may put an average of weights into the model."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Bring all work together before an epoch in which weights are only looked at."""
        # StochasticWeightAveraging has its average run through the data once more after the end.
        last = [getattr(other, "swa_end", None) for other in trainer.callbacks]
        if trainer.current_epoch - 1 in last:
            self._strategy.finish()

    def on_train_end(self, *_: Any) -> None:
        """Bring all work together after the last step."""
        self._strategy.finish()


def _lightning() -> ModuleType:
    """Return the Lightning that the program uses: both packages have classes of their own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    message = "lightning_strategy needs Lightning, which is not installed"
    raise UnsupportedError(message, hint="pip install 'fivefold[lightning]'")


class _OwnFile:
    """A rank's own state beside a checkpoint: its model, its optimizers and the engine's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, model: torch.nn.Module, optimizers: Sequence[Any], sync: OuterSync) -> None:
        """Write it, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have come to it yet
        partial = self.path.with_suffix(".partial")
        optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
        state = {"model": model.state_dict(), "optimizers": optimizer_states}
        torch.save(state | {"sync": sync.state_dict()}, partial)
        partial.replace(self.path)

    def require(self) -> None:
        """Refuse to resume where it is not there."""
        if not self.path.exists():
            pattern = f"{self.path.name.rpartition('outer_sync_rank')[0]}outer_sync_rank*"
            found = sorted(other.name for other in self.path.parent.glob(pattern))
            rank = dist.get_rank() if dist.is_initialized() else 0
            message = f"{self.path.parent} has no {self.path.name}, which rank {rank} resumes from"
            hint = "resume on as many ranks as saved it, or load its model alone"
            raise CheckpointError(f"{message}; found {found}", hint=hint)

    def load(self, model: torch.nn.Module, optimizers: Sequence[Any], sync: OuterSync) -> None:
        """Go on from it."""
        self.require()
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        if "optimizers" not in state:  # before anything is overwritten
            message = f"{self.path} was written by an earlier version of fivefold"
            raise CheckpointError(message, hint="resume with that version, or load its model alone")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        sync.load_state_dict(state["sync"])


def _own_name() -> str:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return f"outer_sync_rank{rank}_of_{size}.pt"


class _OuterSyncHooks:
    """Overrides of Lightning's ``DDPStrategy``, whose own methods come after these."""

    rule: OuterRule
    options: dict[str, Any]
    first_callback: Any
    # Lightning's:
    lightning_module: Any
    optimizers: list[Any]
    _sync: OuterSync | None = None  # while there are steps to come
    _finished: OuterSync | None = None  # after the last one
    _anchor: contextlib.ExitStack | None = None
    _resume: Path | None = None

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Any) -> None:
        """Make the ``OuterSync`` once model and optimizers are set up; only to fit."""
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == "fit":
            if self.first_callback not in trainer.callbacks:
                trainer.callbacks.insert(0, self.first_callback)
            self._sync = OuterSync(
                self.lightning_module, self.optimizers, rule=self.rule, **self.options
            )

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *arguments: Any, **options: Any
    ) -> Any:
        """Step the optimizer, and the outer rule after the last one."""
        result = super().optimizer_step(optimizer, closure, *arguments, **options)  # type: ignore[misc]
        if (
            self._sync is not None
            and getattr(optimizer, "_optimizer", optimizer) is self.optimizers[-1]
        ):
            self._sync.step()
        return result

    def on_validation_start(self) -> None:
        """Judge the parameters that all ranks agree on."""
        super().on_validation_start()  # type: ignore[misc]
        self._enter_anchor()

    def on_validation_end(self) -> None:
        """Put the rank's own parameters back."""
        self._leave_anchor()
        super().on_validation_end()  # type: ignore[misc]

    def finish(self) -> None:
        """Apply all work under way and leave all replicas equal; a second call does nothing."""
        if self._sync is not None:
            self._leave_anchor()
            self._sync.finalize()
            self._finished, self._sync = self._sync, None

    def on_train_end(self) -> None:
        """Leave all replicas equal, also where a callback has put other weights in."""
        self.finish()
        if self._finished is not None:
            self._finished.take_weights()
            self._finished.close()
            self._finished = None
        super().on_train_end()  # type: ignore[misc]

    def on_exception(self, *arguments: Any) -> None:
        """Put the rank's own parameters back before Lightning tidies up."""
        self._leave_anchor()
        super().on_exception(*arguments)  # type: ignore[misc]

    # -- checkpoints ------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the anchor's state."""
        if self._sync is None:
            state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
            return state
        with self._sync.global_parameters():
            live = super().lightning_module_state_dict()  # type: ignore[misc]
            return {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in live.items()
            }

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write Lightning's checkpoint, and beside it a file of each rank's own state."""
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        sync = self._sync or self._finished
        if sync is None or "optimizer_states" not in checkpoint:  # weights only
            return
        with self._local_parameters():
            own = self._own_file(Path(filepath))
            own.write(self.lightning_module, self.optimizers, sync)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint with this rank's own file."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        self._own_file(Path(filepath)).path.unlink(missing_ok=True)

    def load_checkpoint(self, checkpoint_path: str | Path, *arguments: Any, **options: Any) -> Any:
        """Read a checkpoint, and note where this rank's own file lies."""
        self._resume = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *arguments, **options)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from this rank's own file, which has its parameters and optimizers too."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self._sync is None or self._resume is None:
            return
        own = self._own_file(self._resume)
        own.load(self.lightning_module, self.optimizers, self._sync)

    def _own_file(self, checkpoint: Path) -> _OwnFile:
        return _OwnFile(checkpoint.with_name(f"{checkpoint.name}.{_own_name()}"))

    # -- the anchor -------------------------------------------------------------------------------

    def _enter_anchor(self) -> None:
        if self._sync is not None:
            self._anchor = contextlib.ExitStack()
            self._anchor.enter_context(self._sync.global_parameters())

    def _leave_anchor(self) -> None:
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None

    @contextlib.contextmanager
    def _local_parameters(self) -> Iterator[None]:
        """Put this rank's own parameters back while the anchor is validated."""
        inside = self._anchor is not None
        self._leave_anchor()
        yield
        if inside:
            self._enter_anchor()


def torchtitan_outer_sync(config: Any, rule: OuterRule, **options: Any) -> Any:
    """Return a torchtitan configuration whose replicas train with local updates.

    ``data_parallel_replicate_degree`` is the number of replicas, which ``rule`` brings together in
    place of an all-reduce of every gradient; each has as many ranks in a row, in which torchtitan's
    own parallelisms but pipelines work as before. Losses and gradient norms that torchtitan shows
    are its first replica's, with numbers of ``OuterSync.statistics()`` beside them. Checkpoints and
    validation are of the anchor, which is equal on all ranks; every rank adds its own state to the
    checkpoints and resumes exactly. CUDA graphs are switched off.

    Args:
        config: A ``Trainer.Config`` that a function of a ``config_registry`` returns; flags on the
            command line still change it.
        rule: When and how the replicas are brought together.
        options: Passed on to ``OuterSync``, for example ``codec="int8"``.

    Raises:
        ConfigurationError: It is no such configuration, or the rule delays gradients.
        UnsupportedError: torchtitan is not installed.

    Examples:
        >>> def two_nodes():  # --module this_file --config two_nodes
        ...     config = llama3_8b()
        ...     config.parallelism.data_parallel_replicate_degree = 2
        ...     return torchtitan_outer_sync(config, DelayCorrected(tau=8))
    """
    adapter = importlib.import_module("fivefold.optim._torchtitan")
    return adapter.with_outer_sync(config, rule, options)
