"""``OuterSync`` inside other people's training loops: Hugging Face's, Accelerate, Lightning.

All wrap the model in DistributedDataParallel on their own. Beside ``OuterSync`` gradients would
then be averaged twice, at every step over the slow network too, and nothing would say so.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import CheckpointError, ConfigurationError, optional_module
from fivefold.optim._lightning import lightning_strategy, require_own, write_own
from fivefold.optim._rules import OuterRule
from fivefold.optim._sync import OuterSync

__all__ = ["disable_ddp", "lightning_strategy", "use_outer_sync"]

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
    trainer.add_callback(synchroniser)
    for name in ("evaluate", "predict", "save_model"):
        setattr(trainer, name, synchroniser.at_the_anchor(getattr(trainer, name)))
    trainer.train = synchroniser.noting_resume(trainer.train)


class _Synchroniser:
    """One trainer's callback."""

    def __init__(self, trainer: Any, rule: OuterRule, options: dict[str, Any]) -> None:
        self._trainer, self._rule, self._options = trainer, rule, options
        self._sync: OuterSync | None = None
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
                self._require_own(self._resume)
            return train(resume_from_checkpoint, *args, **kwargs)

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
            path = self._require_own(self._resume)
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._sync.load_state_dict(state["sync"])

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Count a local step."""
        assert self._sync is not None, "on_train_begin comes first"
        self._sync.step()

    def on_save(self, _: Any, trained: Any, *__: Any, **___: Any) -> None:
        """Write this rank's own state beside the checkpoint."""
        assert self._sync is not None, "on_train_begin comes first"
        folder = Path(self._trainer.args.output_dir) / f"{_CHECKPOINT}-{trained.global_step}"
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "sync": self._sync.state_dict(),
        }
        write_own(_own_file(folder), state)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Apply all work under way and leave all replicas equal."""
        assert self._sync is not None, "on_train_begin comes first"
        self._sync.finalize()
        self._sync = None

    def _require_own(self, folder: Path) -> Path:
        return require_own(_own_file(folder), rank=_place()[0])


def _own_file(folder: Path) -> Path:
    rank, size = _place()
    return folder / f"outer_sync_rank{rank}_of_{size}.pt"


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
