"""How ranks are kept together: the hooks of a method, and what a run reached with it.

The loop calls the same hooks at the same places whatever the method; what a method does there
is its own business. ``none`` does nothing (the compute-only rate), ``ddp`` averages gradients
in every backward pass, the outer-sync methods average parameters once per round. This module
knows nothing of data, files or schedules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from fivefold.optim import SyncStatistics
from fivefold.optim.auto_tau import TauDecision
from fivefold.runs.machine import run_facts
from fivefold.train._spans import Span
from fivefold.train.config import SyncConfig, TasksConfig, TrainConfig, settings_fingerprint

_LABELS = {"none": "no communication", "ddp": "DDP"}  # of the methods without an outer rule


class LanguageModel(Protocol):
    """Model as the trainer needs it, beside being a ``torch.nn.Module``."""

    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape suffixes
        """Return the mean loss in nats per token."""
        ...


class CommunicationTotals:
    """Sums over all collectives of a method, kept over resumes.

    ``payload_bytes`` is what was to be summed, in the model's own type; ``sent_bytes`` is what this
    rank sent for it.
    """

    def __init__(self) -> None:
        self.in_flight_s = 0.0
        self.exposed_wait_s = 0.0
        self.payload_bytes = 0
        self.sent_bytes = 0
        self.collectives = 0

    def add(
        self, *, in_flight_s: float, waited_s: float, payload_bytes: int, sent_bytes: int
    ) -> None:
        """Count one collective."""
        self.in_flight_s += in_flight_s
        self.exposed_wait_s += waited_s
        self.payload_bytes += payload_bytes
        self.sent_bytes += sent_bytes
        self.collectives += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, for a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        vars(self).update(state)

    def record(self) -> dict[str, Any]:
        """Return the ``communication`` entry of result.json."""
        overlap = None
        if self.in_flight_s > 0:
            overlap = max(0.0, 1.0 - self.exposed_wait_s / self.in_flight_s)
        return vars(self) | {"overlap_fraction": overlap}


class Method:
    """A way to keep ranks together: the loop's hooks, in the order in which it calls them.

    This class itself is the method "none": every rank trains alone, the same step with
    communication switched off.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._spans: list[Span] = []
        self.totals = CommunicationTotals()

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do once, before the first step, what would make the first step differ from others."""

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the forward pass of one micro-batch."""
        return cast("LanguageModel", self._model).loss(inputs, targets)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context of every micro-batch but the last of an optimizer step."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip before the optimizer's step; return the norm of the whole gradient."""
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Do the optimizer's step, with gradients back to nothing."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def after_step(self) -> None:
        """Do what follows the optimizer's step."""

    def finalize(self) -> None:
        """Apply all work in flight; afterwards the method's parameters are final."""

    def evaluation(self) -> AbstractContextManager[None]:
        """Return the context of a validation: the parameters to be judged."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, beside the model's and the optimizer's."""
        return {"totals": self.totals.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.totals.load_state_dict(state["totals"])

    def take_spans(self) -> list[Span]:
        """Return the spans since the last call: "in_flight", "wait" and "boundary"."""
        taken, self._spans = self._spans, []
        return taken

    def statistics(self) -> SyncStatistics | None:
        """Return the outer engine's own record; None for other methods."""
        return None

    def take_decisions(self) -> list[TauDecision]:
        """Return the changes of tau since the last call."""
        return []


def method_label(config: SyncConfig, tasks: TasksConfig | None = None) -> str:
    """Return the name of a method for people, with what sets it apart."""
    details = [] if config.tau is None else [f"tau {config.tau}"]
    if config.fragments not in {None, 1}:
        details.append(f"{config.fragments} fragments")
    if config.codec not in {None, "fp32"}:
        details.append(str(config.codec))
    if tasks is not None:
        details.append("overlaps forward" if tasks.overlap_forward else "in chunks")
        details.append(tasks.ordering)
    rule = config.rule_class
    label = _LABELS[config.method] if rule is None else rule.label(dict(config))
    return f"{label} ({', '.join(details)})" if details else label


_LAB_VARIABLE = "FIVEFOLD_LAB"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Outcome of one run, seen from this rank.

    Args:
        output: The run's folder.
        method: Name of the method, as in the configuration.
        label: Name of the method for people.
        reason: "finished", or "stopped" by a signal (then a checkpoint was written).
        steps: Optimizer steps done.
        tokens: Tokens read by all ranks.
        wall_s: Seconds of training, over resumes.
        tokens_per_s: Tokens of all ranks per second of training, checkpoints and validations
            not counted.
        bits_per_byte: Last validation; None where there was none.
        seconds: Seconds per category; they sum to ``wall_s``.
        waits: Seconds per cause of waiting; they sum to ``seconds["exposed_communication"]``.
        communication: Totals over the method's collectives.
        link_bytes: Interface, bytes sent and received; None where not known.
        sync: The outer engine's statistics; None for other methods.
        parameters_sha256: Digest of this rank's parameters.
        moe: Loads, drops and bytes of the mixtures of experts; None for a dense model.
        process: Processor seconds, the share of the time without a processor though ready, and
            the most memory held, as ``ProcessMeter`` counts them.
    """

    output: Path
    method: str
    label: str
    reason: str
    steps: int
    tokens: int
    wall_s: float
    tokens_per_s: float
    bits_per_byte: float | None
    seconds: dict[str, float]
    waits: dict[str, float]
    communication: dict[str, Any]
    link_bytes: dict[str, Any] | None
    sync: dict[str, Any] | None
    parameters_sha256: str
    moe: dict[str, Any] | None = None
    process: dict[str, Any] | None = None

    def summary(self) -> str:
        """Return one line for people."""
        waited_s = self.seconds["exposed_communication"]
        parts = [f"{self.steps} steps in {self.wall_s:.1f} s", f"{waited_s:.1f} s of waiting"]
        if self.bits_per_byte is not None:
            parts.append(f"{self.bits_per_byte:.3f} bits per byte")
        return f"{self.label}: {self.reason}, {', '.join(parts)}; {self.output}"

    def record(self) -> dict[str, Any]:
        """Return the content of result.json."""
        values = dataclasses.asdict(self)
        del values["output"]
        return {"schema": 1, **values}


def run_manifest(
    config: TrainConfig,
    *,
    world_size: int,
    num_parameters: int,
    precision: str,
    data: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of a run's manifest.json."""
    lab = json.loads(os.environ.get(_LAB_VARIABLE, "null"))
    kept = None
    if config.prediction is not None:
        kept = config.prediction.settings == settings_fingerprint(config, ranks=world_size)
    return {
        "schema": 1,
        **run_facts(),
        "method": config.sync.method,
        "label": method_label(config.sync, config.tasks),
        "world_size": world_size,
        "hosts": None if lab is None else lab.get("hosts"),
        "seed": config.run.seed,
        "num_parameters": num_parameters,
        "precision": precision,
        "data": data,
        "lab": lab,
        "planned_settings_kept": kept,
    }
