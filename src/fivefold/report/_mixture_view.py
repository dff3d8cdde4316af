"""What the report shows of mixtures of experts: a table, a map of loads, a curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.report._format import format_bytes_or_dash, format_percent
from fivefold.report._mixture_summary import imbalance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fivefold.report._mixture_summary import MixtureSummary
    from fivefold.report._records import Run

_MOST_EXPERTS = 64  # more columns do not fit a page
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")

MIXTURE_COLUMNS: tuple[tuple[str, str, Callable[[MixtureSummary], str]], ...] = (
    ("mixtures", "Blocks with a mixture of experts.", lambda run: str(len(run.blocks))),
    ("experts", "Experts of each mixture.", lambda run: str(run.experts)),
    ("ranks", "Ranks that share the experts out.", lambda run: str(run.ranks)),
    (
        "worst load",
        "Most loaded expert over the even load, worst block, in the last interval: 1 is even.",
        lambda run: _times(max(run.imbalance_last, default=1.0)),
    ),
    (
        "mean load",
        "The same, mean over the blocks.",
        lambda run: _times(sum(run.imbalance_last) / max(len(run.imbalance_last), 1)),
    ),
    (
        "idle experts",
        "Experts without a token in the last interval, over all blocks.",
        lambda run: str(run.idle),
    ),
    (
        "dropped",
        "Share of the assignments beyond an expert's capacity, over the run.",
        lambda run: format_percent(run.dropped),
    ),
    (
        "token bytes per step",
        "Token rows that rank 0 sent to other ranks' experts and back, forward and backward.",
        lambda run: format_bytes_or_dash(run.payload_bytes_per_step if run.ranks > 1 else None),
    ),
    (
        "sent per step",
        "The same with expert numbers, weights and counts.",
        lambda run: format_bytes_or_dash(run.sent_bytes_per_step if run.ranks > 1 else None),
    ),
)


def _times(value: float) -> str:
    return f"{value:.2f}x"


def mixture_view(summaries: Sequence[MixtureSummary]) -> dict[str, Any] | None:
    """Plain values for the template; None where there is nothing to show."""
    if not summaries:
        return None
    return {
        "columns": [(name, meaning) for name, meaning, _ in MIXTURE_COLUMNS],
        "rows": [(run.label, [write(run) for _, _, write in MIXTURE_COLUMNS]) for run in summaries],
        "maps": [_map(run) for run in summaries],
    }


def _map(run: MixtureSummary) -> dict[str, Any]:
    """Loads over the run in units of the even one; the shade is full at twice the even load."""
    shown = min(run.experts, _MOST_EXPERTS)
    rows = [
        (
            block,
            [
                (f"{share * run.experts:.2f}", round(min(share * run.experts / 2, 1.0), 3))
                for share in shares[:shown]
            ],
        )
        for block, shares in zip(run.blocks, run.load, strict=True)
    ]
    return {"label": run.label, "experts": range(shown), "rest": run.experts - shown, "rows": rows}


def mixture_curve(runs: Sequence[Run], colours: Sequence[str]) -> dict[str, Any]:
    """Imbalance against step, mean over the blocks, one curve per run; for plotly's script.

    Args:
        runs: The runs of the report.
        colours: One per run.

    Returns:
        The figure by its name; empty where no run has mixtures.
    """
    curves = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": run.label,
            "x": [point.step for point in run.metrics.mixtures],
            "y": [_mean(list(map(imbalance, point.load))) for point in run.metrics.mixtures],
            "line": {"color": colour, "width": 2},
            "marker": {"symbol": _SYMBOLS[index % len(_SYMBOLS)], "size": 6},
        }
        for index, (run, colour) in enumerate(zip(runs, colours, strict=True))
        if run.metrics.mixtures
    ]
    if not curves:
        return {}
    layout = {
        "margin": {"l": 52, "r": 14, "t": 12, "b": 48},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "xaxis": {"title": {"text": "optimizer step"}, "rangemode": "tozero", "zeroline": False},
        "yaxis": {"title": {"text": "largest load over the mean"}, "zeroline": False},
    }
    return {"mixture-imbalance": {"data": curves, "layout": layout}}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
