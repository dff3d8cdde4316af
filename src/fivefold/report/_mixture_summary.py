"""Figures of the mixtures of experts of a run: who got the tokens, who was dropped, what travelled.

They come from the lines ``moe`` of metrics.jsonl alone, so that an unfinished run has them too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fivefold.report._records import MixturePoint, Run


@dataclass(frozen=True, slots=True)
class MixtureSummary:
    """The figures of one run.

    Attributes:
        label: Name of the run for people.
        blocks: Numbers of the blocks that have a mixture.
        experts: Experts of each.
        ranks: Ranks whose tokens are counted, which share the experts out.
        load: Share of a block's assignments that went to each expert, by block.
        imbalance: Largest load over the mean one by block, over the whole run.
        imbalance_last: The same in the last interval that was logged.
        idle: Experts that got nothing in the last interval, over all blocks.
        dropped: Share of the assignments that were dropped beyond the capacity.
        payload_bytes_per_step: Bytes of token rows that rank 0 sent to other ranks' experts, and
            back from its own, forward and backward.
        sent_bytes_per_step: The same with expert numbers, weights and counts.
    """

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
        """Plain values, for JSON."""
        return asdict(self)


def summarise_mixtures(runs: Iterable[Run]) -> list[MixtureSummary]:
    """Figures of the runs that have mixtures, in their order."""
    return [_summary(run.label, run.metrics.mixtures) for run in runs if run.metrics.mixtures]


def imbalance(load: Sequence[int]) -> float:
    """Largest load over the mean one: 1 where even; 1 also where there is none.

    Examples:
        >>> imbalance([3, 1])
        1.5
    """
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
