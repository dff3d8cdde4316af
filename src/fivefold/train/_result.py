"""What a run reached, as a frozen record and as result.json."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.runs import run_facts
from fivefold.train._config import TrainConfig
from fivefold.train._evaluate import Validation
from fivefold.train._methods import Method, method_label
from fivefold.train._mixture import Mixtures

# Not training: a rate that counts them would depend on how often one looks.
_ASIDE = ("checkpoint", "validation")
_LAB_VARIABLE = "FIVEFOLD_LAB"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one run reached, seen from this rank.

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

    Examples:
        >>> RunResult.__dataclass_params__.frozen
        True
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
    config: TrainConfig, *, world_size: int, num_parameters: int, precision: str
) -> dict[str, Any]:
    """Return the content of a run's manifest.json."""
    lab = json.loads(os.environ.get(_LAB_VARIABLE, "null"))
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
        "lab": lab,
    }


def make_result(  # noqa: PLR0913 - one argument per part of the record, one call site
    config: TrainConfig,
    *,
    method: Method,
    steps: int,
    tokens: int,
    wall_s: float,
    seconds: dict[str, float],
    waits: dict[str, float],
    validation: Validation | None,
    link_bytes: dict[str, Any] | None,
    reason: str,
    digest: str,
    mixtures: Mixtures | None,
) -> RunResult:
    """Put the record together."""
    statistics = method.statistics()
    training_s = wall_s - sum(seconds[name] for name in _ASIDE)
    return RunResult(
        output=config.run.output,
        method=config.sync.method,
        label=method_label(config.sync, config.tasks),
        reason=reason,
        steps=steps,
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / max(training_s, 1e-9),
        bits_per_byte=None if validation is None else validation.bits_per_byte,
        seconds=seconds,
        waits=waits,
        communication=method.totals.record(),
        link_bytes=link_bytes,
        sync=None if statistics is None else dataclasses.asdict(statistics),
        parameters_sha256=digest,
        moe=None if mixtures is None else mixtures.record(),
    )
