"""Which layer limits a run that was measured, and what each change would bring it.

The measured parts of a step (compute, messages in flight, waits) are put through layer 2's own law
of what stays exposed (``fivefold.tasks``), with one part changed. Nothing is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.codesign.explain import LEAST_SHARE, Change, Explanation, Kind
from fivefold.errors import DataError
from fivefold.report import build_report
from fivefold.tasks.schedule import exposed_s

_MARGIN = 1.1  # of a round over its messages, as tau="auto" has it
_HOW = (
    "steps are means of rank 0 without validation and checkpoints; each line puts the measured "
    "parts through the law of overlap with that one change"
)
_TRAINING = ("compute", "exposed_communication", "boundary", "data", "other")
_PARTS = {
    "compute": "compute_s", "exposed_communication": "data_s", "boundary": "optimizer_s",
    "data": "loading_s", "other": "overhead_s",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Mean parts of a run's steps.

    Args:
        rest_s: All but waits for messages and for data.
        loading_s: Waits for data.
        waits_s: Waits for messages.
        sent_s: Messages in flight, waited for or not.
        least_sent_s: What the link's rate allows for their bytes; None where it is not known.
        tau: Steps between synchronisations; 1 for DDP.
    """

    rest_s: float
    loading_s: float
    waits_s: float
    sent_s: float
    least_sent_s: float | None
    tau: int = 1

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.rest_s + self.loading_s + self.waits_s

    def with_messages(self, sent_s: float, *, beside_s: float | None = None) -> float:
        """Return seconds of a step whose messages take ``sent_s``.

        Args:
            sent_s: Seconds that its messages take.
            beside_s: Compute that they can hide behind; None for as much as they did.
        """
        hidden_s = max(self.sent_s - self.waits_s, 0.0) if beside_s is None else beside_s
        left_s = self.waits_s - max(self.sent_s - hidden_s, 0.0)  # waits for no message of ours
        waits_s = float(exposed_s(sent_s, hidden_s)) + (left_s if beside_s is None else 0.0)
        return self.rest_s + self.loading_s + max(waits_s, 0.0)


def explain_run(folder: Path | str) -> Explanation:
    """Say which layer limits a training run, from what its folder holds.

    Args:
        folder: A run of ``fivefold train``.

    Returns:
        The explanation, of a step.

    Raises:
        DataError: The folder holds no run, several, or none of whose time anything is recorded.
    """
    report = build_report([folder])
    if len(report.runs) != 1:
        raise DataError(
            f"{folder} holds {len(report.runs)} runs of a language model, and one is explained",
            hint="name the folder of one run; fivefold report compares several",
        )
    summary = report.summaries[0]
    if not summary.steps or summary.seconds is None:
        raise DataError(
            f"{folder} does not say where its time went: {summary.steps} steps are recorded",
            hint="let the run take a few steps first",
        )
    parts = {name: summary.seconds[name] / summary.steps for name in _TRAINING}
    lab = report.runs[0].manifest.lab
    rate = lab.rate_bytes_per_s if lab is not None and lab.shaped else None
    least_bytes = summary.least_link_bytes_per_step
    step = MeasuredStep(
        rest_s=parts["compute"] + parts["boundary"] + parts["other"],
        loading_s=parts["data"],
        waits_s=parts["exposed_communication"],
        sent_s=max((summary.in_flight_s or 0.0) / summary.steps, parts["exposed_communication"]),
        least_sent_s=least_bytes / rate if least_bytes and rate else None,
        tau=_tau_of(report.runs[0].config),
    )
    changes = [
        one
        for one in _changes(step, summary.method)
        if abs(one.saves_s) > LEAST_SHARE * step.seconds
    ]
    return Explanation(
        subject=f"{summary.label}, {report.runs[0].manifest.world_size} ranks, "
        f"{summary.steps} steps, measured",
        what="step",
        seconds=step.seconds,
        parts_s={_PARTS[name]: value for name, value in parts.items() if value > 0},
        changes=tuple(sorted(changes, key=lambda one: -one.saves_s)),
        notes=(_HOW, *report.caveats),
    )


def _tau_of(config: dict[str, Any]) -> int:
    tau = config.get("sync", {}).get("tau", 1)
    return tau if isinstance(tau, int) else 1


def _changes(step: MeasuredStep, method: str) -> Iterator[Change]:
    def change(layer: str, action: str, seconds: float, kind: Kind = "setting") -> Change:
        saves_s = step.seconds - seconds
        return Change(layer=layer, action=action, seconds=seconds, saves_s=saves_s, kind=kind)

    if step.sent_s > 0:
        least_s = step.with_messages(step.sent_s, beside_s=step.rest_s)
        if least_s < step.seconds:
            yield change("tasks", "all communication beside compute", least_s, "bound")
        if method == "ddp":
            tau = max(2, math.ceil(_MARGIN * step.sent_s / step.rest_s))
            seconds = step.with_messages(step.sent_s / tau, beside_s=step.rest_s)
            action = f'local updates: method = "delay_corrected", tau = {tau}'
            yield change("strategy", action, seconds, "convergence")
        elif step.waits_s > 0 and method != "none":
            tau = max(step.tau + 1, math.ceil(_MARGIN * step.tau * step.sent_s / step.rest_s))
            seconds = step.with_messages(step.sent_s * step.tau / tau)
            yield change("strategy", f"tau = {tau} instead of {step.tau}", seconds, "convergence")
        if step.least_sent_s is not None and step.least_sent_s < step.sent_s:
            yield change(
                "collectives", "all-reduces at the link's full rate",
                step.with_messages(step.least_sent_s), "bound",
            )  # fmt: skip
        half_s = step.with_messages(step.sent_s / 2)
        yield change("collectives", "half as many bytes (16 bits for 32)", half_s, "convergence")
        yield change("network", "links twice as fast", half_s, "purchase")
        crowded_s = step.with_messages(2 * step.sent_s)
        yield change("flows", "a neighbour takes half of the links", crowded_s, "risk")
    if step.loading_s > 0:
        ready_s = replace(step, loading_s=0.0).seconds
        yield change("compute", "data that is there in time", ready_s, "bound")
    yield change("compute", "a processor twice as fast", step.seconds - step.rest_s / 2, "purchase")
