"""Rows of the results file, and the table for people.

A row is one figure of one of our cases at one rate, with the same figure of every peer beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.optim._peers._case import Case
from benchmarks.optim._peers._figures import Curve, Timing, seconds_to_target
from benchmarks.results_file import BenchmarkRow, median_and_spread

__all__ = ["Measured", "print_table", "rows_of"]

HIDDEN = 0.95  # what the issue asks for where a round's communication fits behind its steps

Figure = Callable[["Measured", Case, str], list[float] | None]


@dataclass(kw_only=True)
class Measured:
    """Everything that was measured.

    Attributes:
        cases: The cases, the one without communication first.
        rates: The links' rates.
        tokens_per_step: Tokens of all ranks in a step.
        payload_bytes: The model in fp32.
        timings: Windows by rate and case.
        added_bytes: Memory beside plain training, in bytes per parameter, by case.
        equal: Runs with equal tokens, by case.
        longer: Runs with more tokens, by case.
        failures: Error by measurement and case.
        chosen: By rate and case that adapts, the name of the case with the round it chose.
    """

    cases: Sequence[Case]
    rates: Sequence[str]
    tokens_per_step: int
    payload_bytes: int
    timings: dict[tuple[str, str], list[Timing]] = field(default_factory=dict)
    added_bytes: dict[str, float] = field(default_factory=dict)
    equal: dict[str, list[Curve]] = field(default_factory=dict)
    longer: dict[str, list[Curve]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    chosen: dict[tuple[str, str], str] = field(default_factory=dict)

    def step_s(self, rate: str, name: str) -> float | None:
        """Median seconds of a step."""
        found = self.timings.get((rate, name))
        return statistics.median(timing.step_s for timing in found) if found else None

    def curves(self, rate: str, name: str) -> list[Curve]:
        """All runs of a case, with the tau that it chose at this rate."""
        learned = self.chosen.get((rate, name), name)
        return [*self.equal.get(learned, []), *self.longer.get(learned, [])]

    @property
    def alone(self) -> str:
        """Name of the case without communication."""
        return self.cases[0].name

    @property
    def targets(self) -> dict[int, float]:
        """DDP's final loss by seed."""
        return {curve.seed: curve.final for curve in self.equal.get("DDP", [])}


def rows_of(measured: Measured) -> list[BenchmarkRow]:
    """All rows, in the order of a reader: link, speed, loss, time to target, memory, failures.

    Args:
        measured: What was measured.
    """
    rows = []
    for rate in measured.rates:
        rows += _link_rows(measured, rate)
        for metric, unit, figure in _BY_RATE:
            rows += _compare(measured, rate, metric, unit, figure)
        rows += _best_row(measured, rate)
    for metric, unit, figure in _ONCE:
        rows += _compare(measured, "", metric, unit, figure)
    rows += [
        BenchmarkRow(case=f"{name} ({what})", metric="failed", unit="runs", ours=1.0)
        for what, name in measured.failures
    ]
    return rows


def print_table(measured: Measured) -> None:
    """The same for people, one line per case and rate.

    Args:
        measured: What was measured.
    """
    columns = (*_BY_RATE, *_ONCE)
    for number, (metric, unit, _) in enumerate(columns, 1):
        print(f"  [{number}] {metric}, {'MB' if unit == 'B' else unit}")
    for rate in measured.rates:
        numbers = (f"[{number}]" for number in range(1, len(columns) + 1))
        print(f"{rate:36}" + "".join(f"{number:>8}" for number in numbers))
        for case in measured.cases:
            cells = (_cell(figure(measured, case, rate), unit) for _, unit, figure in columns)
            mark = "*" if case.kind == "ours" else " "
            print(f"{mark} {case.name:34}" + "".join(f"{cell:>8}" for cell in cells))
    for (what, name), error in measured.failures.items():
        print(f"FAILED {what}, {name}: {error}")


def _cell(values: list[float] | None, unit: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values) / (1e6 if unit == 'B' else 1):.4g}"


# -- figures by case and rate; None where there is none ----------------------------------------


def _timed(read: Callable[[Timing], float | None]) -> Figure:
    def figure(measured: Measured, case: Case, rate: str) -> list[float] | None:
        found = [read(timing) for timing in measured.timings.get((rate, case.name), [])]
        return [value for value in found if value is not None] or None

    return figure


def _tokens_per_s(measured: Measured, case: Case, rate: str) -> list[float] | None:
    found = measured.timings.get((rate, case.name), [])
    return [measured.tokens_per_step / timing.step_s for timing in found] or None


def _against_alone(measured: Measured, case: Case, rate: str) -> Iterable[tuple[float, float]]:
    """Seconds per step without communication and with, paired within each turn."""
    alone = measured.timings.get((rate, measured.alone), [])
    own = measured.timings.get((rate, case.name), [])
    return [(a.step_s, b.step_s) for a, b in zip(alone, own, strict=False)]


def _fraction(measured: Measured, case: Case, rate: str) -> list[float] | None:
    return [a / b for a, b in _against_alone(measured, case, rate)] or None


def _exposed_s(measured: Measured, case: Case, rate: str) -> list[float] | None:
    if case.kind == "alone":
        return None
    return [max(0.0, b - a) for a, b in _against_alone(measured, case, rate)] or None


def _final(measured: Measured, case: Case, _rate: str) -> list[float] | None:
    return [curve.final for curve in measured.equal.get(case.name, [])] or None


def _final_longer(measured: Measured, case: Case, _rate: str) -> list[float] | None:
    return [curve.final for curve in measured.longer.get(case.name, [])] or None


def _memory(measured: Measured, case: Case, _rate: str) -> list[float] | None:
    found = measured.added_bytes.get(case.name)
    return None if found is None else [found]


def _reaching_s(measured: Measured, case: Case, rate: str) -> list[float]:
    """Seconds to the target of each seed that reaches it, the better of both lengths."""
    timings = measured.timings.get((rate, case.name))
    step_s, ddp_step_s = measured.step_s(rate, case.name), measured.step_s(rate, "DDP")
    if not timings or step_s is None or ddp_step_s is None:
        return []
    drain_s = statistics.median(timing.drain_s for timing in timings)
    by_seed: dict[int, list[float]] = {}
    for curve in measured.curves(rate, case.name):
        found_s = seconds_to_target(
            curve,
            measured.targets[curve.seed],
            case=case,
            step_s=step_s,
            ddp_step_s=ddp_step_s,
            drain_s=drain_s,
        )
        if found_s is not None:
            by_seed.setdefault(curve.seed, []).append(found_s)
    return [min(times_s) for times_s in by_seed.values()]


def _to_target_s(measured: Measured, case: Case, rate: str) -> list[float] | None:
    found = _reaching_s(measured, case, rate)
    all_reach = bool(found) and len(found) == len(measured.targets)
    return found if all_reach else None


def _reach(measured: Measured, case: Case, rate: str) -> list[float] | None:
    if not measured.curves(rate, case.name) or not measured.targets:
        return None
    return [len(_reaching_s(measured, case, rate)) / len(measured.targets)]


FRACTION = "fraction of the compute-only rate"
TO_TARGET = "time to DDP's final loss"
_BY_RATE: tuple[tuple[str, str, Figure], ...] = (
    ("tokens per second, simulated compute", "tokens/s", _tokens_per_s),
    (FRACTION, "ratio", _fraction),
    ("sent per step at the link", "B", _timed(lambda timing: timing.sent_bytes)),
    ("sent or received by the busiest host per step", "B", _timed(lambda t: t.busiest_bytes)),
    ("sent per step by formula", "B", _timed(lambda timing: timing.formula_bytes)),
    ("step time over the compute-only one", "s", _exposed_s),
    ("exposed wait per step by the engine", "s", _timed(lambda timing: timing.wait_s)),
    ("hidden share of the communication", "ratio", _timed(lambda timing: timing.hidden)),
    ("tau", "steps", _timed(lambda t: float(t.chosen["tau"]) if t.chosen else None)),
    ("steps with an overrun", "ratio", _timed(lambda timing: timing.overruns)),
    ("peak memory since before the model", "B", _timed(lambda timing: timing.peak_bytes)),
    (TO_TARGET, "s", _to_target_s),
    ("runs that reach DDP's final loss", "ratio", _reach),
)
_ONCE: tuple[tuple[str, str, Figure], ...] = (
    ("validation at equal tokens", "bit per byte", _final),
    ("validation after more tokens", "bit per byte", _final_longer),
    ("memory beside plain training, 13 M parameters", "B per parameter", _memory),
)


# -- rows -----------------------------------------------------------------------------------


def _link_rows(measured: Measured, rate: str) -> list[BenchmarkRow]:
    alone = measured.timings.get((rate, measured.alone), [])
    if not alone:
        return []
    step_s, step_spread = median_and_spread([timing.step_s for timing in alone])
    bare = [timing.allreduce_s for timing in alone if timing.allreduce_s is not None]
    allreduce_s, allreduce_spread = median_and_spread(bare)
    bandwidth_s = 1.5 * measured.payload_bytes * 8 / (float(rate.removesuffix("Mbit/s")) * 1e6)
    return [
        BenchmarkRow(
            case=rate,
            metric="T_step, compute only, simulated",
            unit="s",
            ours=step_s,
            spread=step_spread,
        ),
        BenchmarkRow(
            case=rate,
            metric="T_allreduce of the payload",
            unit="s",
            ours=allreduce_s,
            spread=allreduce_spread,
            limit=bandwidth_s,
        ),
    ]


def _compare(
    measured: Measured, rate: str, metric: str, unit: str, figure: Figure
) -> list[BenchmarkRow]:
    found = {case.name: figure(measured, case, rate) for case in measured.cases}
    peers = {
        case.name: statistics.median(values)
        for case in measured.cases
        if case.kind != "ours" and (values := found[case.name])
    }
    rows = []
    for case in measured.cases:
        values = found[case.name]
        if case.kind != "ours" or not values:
            continue
        ours, spread = median_and_spread(values)
        target = HIDDEN if metric == FRACTION and _should_hide(measured, case, rate) else None
        rows.append(
            BenchmarkRow(
                case=", ".join(part for part in (rate, case.name) if part),
                metric=metric,
                unit=unit,
                ours=ours,
                spread=spread,
                peers=peers,
                target=target,
                met=None if target is None else ours >= target,
            )
        )
    return rows


def _should_hide(measured: Measured, case: Case, rate: str) -> bool:
    """Whether a round's communication fits behind the round's steps: T_allreduce <= tau T_step."""
    alone = measured.timings.get((rate, measured.alone), [])
    own = measured.timings.get((rate, case.name), [])
    if not case.overlaps or not alone or not own:
        return False
    sent = [timing.formula_bytes for timing in own if timing.formula_bytes is not None]
    bare = [timing.allreduce_s for timing in alone if timing.allreduce_s is not None]
    ring_bytes = 1.5 * measured.payload_bytes
    needed_s = statistics.median(bare) * statistics.median(sent) / ring_bytes  # per step
    return needed_s <= statistics.median(timing.step_s for timing in alone)


def _best_row(measured: Measured, rate: str) -> list[BenchmarkRow]:
    """The best of ours against every peer, where a peer reaches the target at all."""
    found: Mapping[str, list[float] | None] = {
        case.name: _to_target_s(measured, case, rate) for case in measured.cases
    }
    kinds = {case.name: case.kind for case in measured.cases}
    medians = {name: statistics.median(values) for name, values in found.items() if values}
    ours = {name: value for name, value in medians.items() if kinds[name] == "ours"}
    peers = {name: value for name, value in medians.items() if kinds[name] == "peer"}
    if not ours or not peers:
        return []
    best, target = min(ours, key=lambda name: ours[name]), min(peers.values())
    values = found[best]
    assert values, "a median has values"
    return [
        BenchmarkRow(
            case=f"{rate}, best of ours: {best}",
            metric=f"{TO_TARGET}, best of the table",
            unit="s",
            ours=ours[best],
            spread=(min(values), max(values)),
            peers=peers,
            target=target,
            met=ours[best] <= target,
        )
    ]
