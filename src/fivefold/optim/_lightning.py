"""``OuterSync`` inside Lightning: a strategy in place of "ddp"."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fivefold.errors import CheckpointError, UnsupportedError
from fivefold.optim._rules import OuterRule
from fivefold.optim._sync import OuterSync


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
    return made


def _lightning() -> ModuleType:
    """Return the Lightning that the program uses: both packages have classes of their own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    message = "lightning_strategy needs Lightning, which is not installed"
    raise UnsupportedError(message, hint="pip install 'fivefold[lightning]'")


def write_own(path: Path, state: dict[str, Any]) -> None:
    """Write a rank's own file beside a checkpoint, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have come to it yet
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def require_own(path: Path, *, rank: int) -> Path:
    """Return the path of a rank's own file, which must be there."""
    if not path.exists():
        pattern = f"{path.name.rpartition('outer_sync_rank')[0]}outer_sync_rank*"
        found = sorted(other.name for other in path.parent.glob(pattern))
        message = f"{path.parent} has no {path.name}, which rank {rank} resumes from; found {found}"
        hint = "resume on as many ranks as saved it, or load its model alone"
        raise CheckpointError(message, hint=hint)
    return path


class _OuterSyncHooks:
    """Overrides of Lightning's ``DDPStrategy``, whose own methods come after these."""

    rule: OuterRule
    options: dict[str, Any]
    # Lightning's:
    lightning_module: Any
    optimizers: list[Any]
    global_rank: int
    world_size: int
    checkpoint_io: Any
    _sync: OuterSync | None = None
    _anchor: contextlib.ExitStack | None = None
    _resume: Path | None = None

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Any) -> None:
        """Make the ``OuterSync`` once model and optimizers are set up; only to fit."""
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == "fit":
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

    def on_train_end(self) -> None:
        """Apply all work under way and leave all replicas equal."""
        if self._sync is not None:
            self._sync.finalize()
            self._sync = None
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
        if self._sync is None or "optimizer_states" not in checkpoint:  # weights only
            return
        with self._local_parameters():
            state = {
                "model": self.lightning_module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "sync": self._sync.state_dict(),
            }
            write_own(self._own_file(Path(filepath)), state)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint with this rank's own file."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        self._own_file(Path(filepath)).unlink(missing_ok=True)

    def load_checkpoint(self, checkpoint_path: str | Path, *arguments: Any, **options: Any) -> Any:
        """Read a checkpoint, and note where this rank's own file lies."""
        self._resume = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *arguments, **options)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from this rank's own file, which has its parameters and optimizers too."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self._sync is None or self._resume is None:
            return
        path = require_own(self._own_file(self._resume), rank=self.global_rank)
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.lightning_module.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._sync.load_state_dict(state["sync"])

    def _own_file(self, checkpoint: Path) -> Path:
        name = f"{checkpoint.name}.outer_sync_rank{self.global_rank}_of_{self.world_size}.pt"
        return checkpoint.with_name(name)

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
