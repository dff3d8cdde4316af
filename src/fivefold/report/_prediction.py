"""A plan's prediction beside what its run measured, part by part, and which constant was off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.errors import DataError
from fivefold.report._records import Run
from fivefold.report.format import UNKNOWN, format_bytes_or_dash, format_seconds
from fivefold.report.page import DataTable, PageSection, TextBlock
from fivefold.report.summary import RunSummary
from fivefold.units import format_bytes, format_bytes_per_s, format_duration_s

_OFF = 0.1  # of a step: a part that is off by more is named
_BUSY = 0.05  # share of the time without a processor
_NUMBERS = ("compute_s", "exposed_communication_s", "bubble_s", "other_s", "all_reduce_s",
            "memory_bytes")  # fmt: skip


@dataclass(frozen=True)
class PredictedPart:
    """One part of a step, in seconds (bytes for memory); None where the run does not say."""

    name: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Return predicted over measured, less one; None where there is nothing to compare."""
        if self.measured is None or self.measured <= 0:
            return None
        return self.predicted / self.measured - 1

    @property
    def both(self) -> str:
        """Return the two values in words."""
        write = format_bytes if self.name == "memory" else format_duration_s
        return f"{write(self.predicted)} predicted, {write(self.measured or 0.0)} measured"


@dataclass(frozen=True)
class PredictedRun:
    """A run that was planned: the step, its parts, the all-reduce, the memory; what was off."""

    label: str
    cluster: str
    parts: tuple[PredictedPart, ...]
    findings: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return the figures, for programs."""
        parts = {
            part.name: {"predicted": part.predicted, "measured": part.measured}
            for part in self.parts
        }
        findings = list(self.findings)
        return {
            "label": self.label, "cluster": self.cluster, "parts": parts, "findings": findings,
        }  # fmt: skip


def predicted_runs(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> list[PredictedRun]:
    """Return the runs that came from a plan, compared with it."""
    return [
        _compared(run, summary, _said(run, table))
        for run, summary in zip(runs, summaries, strict=True)
        if isinstance(table := run.config.get("prediction"), dict)
    ]


def _said(run: Run, table: dict[str, Any]) -> dict[str, Any]:
    """Return what the table of a run's configuration says, checked."""
    try:
        said: dict[str, Any] = {key: float(table[key]) for key in _NUMBERS}
        constants = {key: float(value) for key, value in dict(table.get("constants", {})).items()}
        return said | {
            "cluster": str(table["cluster"]), "ranks": table["ranks"], "constants": constants
        }  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"[prediction] in {run.path / 'config.toml'} is not what a plan writes: {error!r}",
            hint="the file is damaged: copy the run again, or remove the table",
        ) from error


def _compared(run: Run, summary: RunSummary, said: dict[str, Any]) -> PredictedRun:
    each = summary.step_seconds

    def part(name: str, key: str, *categories: str) -> PredictedPart:
        measured = None if each is None else sum((each[one] for one in categories), 0.0)
        return PredictedPart(name, said[key], measured)

    parts = [
        part("compute", "compute_s", "compute", "boundary"),
        part("exposed communication", "exposed_communication_s", "exposed_communication"),
        part("bubble", "bubble_s"),
        part("data and other", "other_s", "data", "other"),
    ]
    measured = None if each is None else sum(part.measured or 0.0 for part in parts)
    step = PredictedPart("step", sum(part.predicted for part in parts), measured)
    exchange_s = _exchange_s(run, summary)
    exchange = PredictedPart("one exchange in flight", said["all_reduce_s"], exchange_s)
    process = (run.result.process if run.result is not None else None) or {}
    memory = PredictedPart("memory", said["memory_bytes"], process.get("memory_bytes"))
    found = (step, *parts, exchange, memory)
    findings = _findings(run, said, {part.name: part for part in found}, process)
    if step.measured is not None and summary.after_last_step_s > _OFF * step.measured:
        wait = format_duration_s(summary.after_last_step_s)
        findings.append(f"After the last step, all replicas became equal in {wait}: in no step.")
    return PredictedRun(run.label, said["cluster"], found, tuple(findings))


def _exchange_s(run: Run, summary: RunSummary) -> float | None:
    """Return the time in flight of one exchange of the whole payload on rank 0."""
    if summary.in_flight_s is None or not summary.steps:
        return None
    if run.manifest.method == "ddp":
        return summary.in_flight_s / summary.steps
    sync = run.result.sync if run.result is not None else None
    return summary.in_flight_s / sync.rounds * sync.fragments if sync and sync.rounds else None


def _findings(
    run: Run, said: dict[str, Any], parts: dict[str, PredictedPart], process: dict[str, Any]
) -> list[str]:
    if run.manifest.world_size != said["ranks"]:
        ran = f"{run.manifest.world_size} ran: the two columns cannot be compared."
        return [f"The plan was for {said['ranks']} ranks and {ran}"]
    step = parts["step"]
    if step.measured is None:
        return ["The run has not recorded its time yet."]
    found = []
    if run.manifest.planned_settings_kept is False:
        found.append(
            "Settings were changed after the plan (--set, or in the file): the prediction is of "
            "another step. Plan again: fivefold plan --for train."
        )
    waited = process.get("waited_for_cpu")
    if waited is not None and waited > _BUSY:
        found.append(
            f"The machine was busy: rank 0 was ready and without a processor for {waited:.0%} of "
            "the time (other programs, or more ranks than cores). Compute is slower for it, and no "
            "constant is to blame before a run on a quiet machine."
        )
    off = {
        name: part
        for name, part in parts.items()
        if name not in {"step", "memory", "one exchange in flight"}
        and abs(part.predicted - (part.measured or 0.0)) > _OFF * step.measured
    }
    if waited is not None and waited > _BUSY:
        off.pop("compute", None)
    if not off and not found:
        error = "as measured" if step.error is None else f"{_error(step)} off"
        found.append(f"Every part is within {_OFF:.0%} of the step; the step is predicted {error}.")
    found += [_blame(name, parts, said["constants"]) for name in off]
    memory = parts["memory"]
    if memory.error is not None and abs(memory.error) > _OFF:
        found.append(_of_memory(memory, said["constants"]))
    return found


def _blame(name: str, parts: dict[str, PredictedPart], constants: dict[str, float]) -> str:
    part = parts[name]
    shown = f"{name}: {part.both}"
    if name == "compute" and part.error is not None:
        for key in ("device.gemm_efficiency", "device.peak_flops"):
            if (key in constants and constants[key] * (1 + part.error) <= 1) or "peak" in key:
                value = constants.get(key, 0.0) * (1 + part.error)
                was = f"{key.partition('.')[2]} = {constants.get(key, 0.0):.4g}"
                gives = f"{value:.4g} gives what was measured"
                return f"{shown}. Off: [device] {was}; {gives} (fivefold profile --job finds it)."
    if name == "exposed communication":
        return f"{shown}. {_of_exchange(parts['one exchange in flight'], constants)}"
    if name == "data and other":
        value = constants.get("device.step_overhead_s", 0.0)
        return (
            f"{shown}. Off: [device] step_overhead = {format_duration_s(value)}; "
            f"{format_duration_s(part.measured or 0.0)} gives what was measured."
        )
    return f"{shown}."


def _of_exchange(part: PredictedPart, constants: dict[str, float]) -> str:
    key = next((key for key in constants if key.endswith(".efficiency") and "tier." in key), None)
    if part.error is None or key is None:
        return "The run does not say how long its exchanges took."
    times = (
        f"An exchange takes {format_duration_s(part.measured or 0.0)} in flight, predicted "
        f"{format_duration_s(part.predicted)}"
    )
    if abs(part.error) <= _OFF:
        return f"{times}: the link is as said. Off is what hides beside compute."
    tier = key.split(".")[1]
    rate = constants.get(f"tier.{tier}.bandwidth_bytes_per_s", 0.0)
    was = f"{constants[key]:.3g} of {format_bytes_per_s(rate)}"
    should = constants[key] * (1 + part.error)
    return f"{times}. Off: [[tier]] {tier!r} efficiency = {was}; {should:.3g} gives the measured."


def _of_memory(part: PredictedPart, constants: dict[str, float]) -> str:
    own = constants.get("device.reserved_bytes", 0.0)
    should = max(own + (part.measured or 0.0) - part.predicted, 0.0)
    return (
        f"memory: {part.both}. Off: [device] reserved = {format_bytes(own)}; "
        f"{format_bytes(should)} gives it."
    )


def prediction_section(found: Sequence[PredictedRun]) -> PageSection | None:
    """Return the section of the page; None where no run came from a plan."""
    if not found:
        return None
    parts: list[DataTable | TextBlock] = []
    for one in found:
        rows = tuple(
            (part.name, _value(part, part.predicted), _value(part, part.measured), _error(part))
            for part in one.parts
            if part.predicted or part.measured
        )
        error = "error", "Predicted over measured, less one."
        columns = ((f"{one.label}, a step", ""), ("predicted", ""), ("measured", ""), error)
        parts.append(DataTable(columns=columns, rows=rows))
        parts += [TextBlock(text) for text in one.findings]
    return PageSection(
        key="prediction",
        heading="Predicted and measured",
        how="What the plan expected of a step beside what rank 0 measured, without validation and "
        "checkpoints. Compute includes the optimizer and outer updates.",
        parts=tuple(parts),
    )


def _value(part: PredictedPart, value: float | None) -> str:
    return format_bytes_or_dash(value) if part.name == "memory" else format_seconds(value)


def _error(part: PredictedPart) -> str:
    return UNKNOWN if part.error is None else f"{100 * part.error:+.1f} %"
