"""A case of the comparison, and what an adapter gives to the loop that measures it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.optim._workload import ADAMW

__all__ = ["Attached", "Case", "Loss", "Place", "attach"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_KINDS = ("alone", "peer", "ours")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One method with its settings.

    Attributes:
        name: Its name in the table.
        kind: "alone" for no communication, "peer" or "ours".
        adapter: Module of this package that attaches it.
        settings: What the adapter reads.
        round_steps: Steps between two synchronisations, so that windows hold whole rounds; 1
            where every step communicates.
        lr: Peak of the inner learning rate in learning runs.
        optimizer: The inner optimizer, as ``Problem`` has it.
        clips: Whether the worker clips its gradient; False where the method clips the mean.
        overlaps: Whether its communication can run behind computation for a whole round.
        ddp_steps: First steps of a learning run in which it communicates as DDP does; they are
            timed at DDP's rate.
        longer: Whether a run with more tokens is made too, for the time to target.
    """

    name: str
    kind: Literal["alone", "peer", "ours"]
    adapter: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    round_steps: int = 1
    lr: float = 4e-3
    optimizer: str = ADAMW
    clips: bool = True
    overlaps: bool = False
    ddp_steps: int = 0
    longer: bool = False

    def __post_init__(self) -> None:
        assert self.kind in _KINDS, f"kind is one of {_KINDS}"
        assert self.round_steps >= 1, "a round has steps"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a case runs.

    Attributes:
        rank: This rank.
        world_size: Number of ranks; ``torch.distributed`` is initialised with them.
        address: This host's address.
        main_address: Host 0's address.
        port: First of ten ports that are free on every host.
        stationary: Whether the case is wanted as it is after its starting phase, for timing.
    """

    rank: int
    world_size: int
    address: str
    main_address: str
    port: int
    stationary: bool


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Attached:
    """A method that is ready to train.

    Attributes:
        loss: Loss of a batch, to be called in place of the bare model's.
        optimizer: What to step.
        after_step: Called after each optimizer step.
        finalize: Ends the method: waits for what is under way and merges it.
        figures: Running totals of the method's own, by name.
        chosen: The round that the method has now: tau, fragments, delay_steps and codec.
        close: Frees what the adapter started.
    """

    loss: Loss
    optimizer: torch.optim.Optimizer
    after_step: Callable[[], None] = _nothing
    finalize: Callable[[], None] = _nothing
    figures: Callable[[], dict[str, float]] = dict
    chosen: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = _nothing


def attach(
    case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: Place
) -> Attached:
    """Attach a case's method to a model and its optimizer; a collective call.

    Args:
        case: The case.
        model: The bare model; its ``loss`` takes inputs and targets.
        optimizer: The inner optimizer.
        place: Where this rank is.

    Raises:
        ImportError: The peer is not installed.
    """
    module = importlib.import_module(f"benchmarks.optim._peers.{case.adapter}")
    attached = module.attach(case.settings, model, optimizer, place)
    assert isinstance(attached, Attached), f"{case.adapter}.attach returns an Attached"
    return attached
