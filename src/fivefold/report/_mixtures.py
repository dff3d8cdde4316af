"""Mixtures of experts in a report: who got the tokens, who was dropped, what travelled.

The figures come from the lines ``moe`` of metrics.jsonl alone, so that an unfinished run has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.report._records import MixturePoint, Run
from fivefold.report.columns import Column
from fivefold.report.format import (
    MARKERS,
    figure_table,
    format_bytes_or_dash,
    format_percent,
    run_colours,
)
from fivefold.report.page import Curve, CurveChart, DataTable, PagePart, PageSection

_MOST_EXPERTS = 64  # more columns do not fit a page


@dataclass(frozen=True, slots=True)
class MixtureSummary:
    """The figures of one run."""

    label: str
    blocks: tuple[int, ...]
    experts: int
    ranks: int
    load: tuple[tuple[float, ...], ...]
    imbalance: tuple[float, ...]
    imbalance_last: tuple[float, ...]
    idle: int
    dropped: float
    payload_bytes_per_step: float
    sent_bytes_per_step: float

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def summarise_mixtures(runs: Iterable[Run]) -> list[MixtureSummary]:
    """Return the figures of the runs that have mixtures, in their order."""
    return [_summary(run.label, run.metrics.mixtures) for run in runs if run.metrics.mixtures]


def imbalance(load: Sequence[int]) -> float:
    """Return the largest load over the mean one: 1 where even; 1 also where there is none."""
    total = sum(load)
    return max(load) * len(load) / total if total else 1.0


def _summary(label: str, points: Sequence[MixturePoint]) -> MixtureSummary:
    last = points[-1]
    shape = [len(row) for row in last.load]
    points = [point for point in points if [len(row) for row in point.load] == shape]
    totals = [
        [sum(column) for column in zip(*rows, strict=True)]
        for rows in zip(*(point.load for point in points), strict=True)
    ]
    assignments = sum(map(sum, totals))
    dropped = sum(sum(point.dropped) for point in points)
    return MixtureSummary(
        label=label,
        blocks=last.blocks,
        experts=len(totals[0]) if totals else 0,
        ranks=last.ranks,
        load=tuple(tuple(n / max(sum(row), 1) for n in row) for row in totals),
        imbalance=tuple(imbalance(row) for row in totals),
        imbalance_last=tuple(imbalance(row) for row in last.load),
        idle=sum(row.count(0) for row in last.load),
        dropped=dropped / max(assignments, 1),
        payload_bytes_per_step=sum(p.payload_bytes for p in points) / max(last.step, 1),
        sent_bytes_per_step=sum(p.sent_bytes for p in points) / max(last.step, 1),
    )


_COLUMNS = (
    Column("blocks", "mixtures", lambda blocks: str(len(blocks)),
           help="Blocks with a mixture of experts."),
    Column("experts", "experts", help="Experts of each mixture."),
    Column("ranks", "ranks", help="Ranks that share the experts out."),
    Column("worst_load", "worst load", "{:.2f}x".format,
           lambda run: max(run.imbalance_last, default=1.0),
           "Most loaded expert over the even load, worst block, in the last interval: 1 is even."),
    Column("mean_load", "mean load", "{:.2f}x".format, lambda run: _mean(run.imbalance_last),
           "The same, mean over the blocks."),
    Column("idle", "idle experts",
           help="Experts without a token in the last interval, over all blocks."),
    Column("dropped", "dropped", format_percent,
           help="Share of the assignments beyond an expert's capacity, over the run."),
    Column("payload_bytes_per_step", "token bytes per step", format_bytes_or_dash,
           lambda run: run.payload_bytes_per_step or None,
           "Token rows that rank 0 sent to other ranks' experts and back, forward and backward."),
    Column("sent_bytes_per_step", "sent per step", format_bytes_or_dash,
           lambda run: run.sent_bytes_per_step or None,
           "The same with expert numbers, weights and counts."),
)  # fmt: skip


def mixture_table(summaries: Sequence[MixtureSummary]) -> DataTable:
    """Return a row of figures per run."""
    return figure_table(summaries, _COLUMNS)


def mixture_section(runs: Sequence[Run]) -> PageSection | None:
    """Return the runs' mixtures: a table, the imbalance over the run, maps of loads."""
    summaries = summarise_mixtures(runs)
    if not summaries:
        return None
    parts: list[PagePart] = [mixture_table(summaries), _curve(runs)]
    return PageSection(
        key="mixtures",
        heading="Mixtures of experts",
        how="Where the routers sent the tokens. A mixture is as fast as its most loaded expert "
        "where experts work side by side; an expert that gets no tokens learns nothing.",
        parts=(*parts, *map(_map, summaries)),
    )


def _map(run: MixtureSummary) -> DataTable:
    """Return the loads over the run in units of the even one; the shade is full at twice that."""
    shown = min(run.experts, _MOST_EXPERTS)
    loads = [[share * run.experts for share in shares[:shown]] for shares in run.load]
    rest = run.experts - shown
    more = f"; {rest} more experts are not shown" if rest else ""
    return DataTable.of(
        ("block", *map(str, range(shown))),
        [
            (str(block), *(f"{load:.2f}" for load in row))
            for block, row in zip(run.blocks, loads, strict=True)
        ],
        shades=tuple(tuple(round(min(load / 2, 1.0), 3) for load in row) for row in loads),
        caption=f"{run.label}: load of each expert over the run, in units of the even load{more}",
    )


def _curve(runs: Sequence[Run]) -> CurveChart:
    curves = [
        Curve.through(
            run.label,
            [(p.step, _mean(list(map(imbalance, p.load)))) for p in run.metrics.mixtures],
            colour=colour,
            marker=MARKERS[index % len(MARKERS)],
        )
        for index, (run, colour) in enumerate(zip(runs, run_colours(runs), strict=True))
        if run.metrics.mixtures
    ]
    return CurveChart(
        key="mixture-imbalance",
        x_name="optimizer step",
        y_name="largest load over the mean",
        curves=tuple(curves),
        x_from_zero=True,
        caption="Imbalance against step. Largest load of a mixture over its mean load, mean over "
        "the mixtures; 1 is even.",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
