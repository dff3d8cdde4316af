"""One report: the runs that were read, their figures, the finding and its limits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.report._graphs import GraphSummary, graph_headline, summarise_graph_runs
from fivefold.report._mixtures import summarise_mixtures
from fivefold.report._prediction import predicted_runs
from fivefold.report._reader import find_runs, is_graph_run, read_graph_runs, read_runs
from fivefold.report._records import GraphRun, Run
from fivefold.report.summary import RunSummary, caveats, headline, summarise


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a report in all its forms (text, HTML, JSON).

    Attributes:
        runs: The runs, baselines first.
        summaries: Their figures, in the same order.
        headline: The finding, in a sentence or two.
        caveats: What a reader must know before believing it.
        graph_runs: The runs of graph neural networks, which have files and figures of their own.
        graph_summaries: Their figures, in the same order.
    """

    runs: tuple[Run, ...]
    summaries: tuple[RunSummary, ...]
    headline: str
    caveats: tuple[str, ...]
    graph_runs: tuple[GraphRun, ...] = ()
    graph_summaries: tuple[GraphSummary, ...] = ()

    def to_json(self) -> str:
        """Return the figures as JSON, for programs."""
        values = {
            "headline": self.headline,
            "caveats": list(self.caveats),
            # pydantic writes what JSON has no word for (nan) as null
            "runs": [json.loads(summary.model_dump_json()) for summary in self.summaries],
        }
        mixtures = [summary.record() for summary in summarise_mixtures(self.runs)]
        if mixtures:
            values["mixtures"] = mixtures
        predicted = [one.record() for one in predicted_runs(self.runs, self.summaries)]
        if predicted:
            values["predicted"] = predicted
        if self.graph_runs:
            values["graph_runs"] = [summary.record() for summary in self.graph_summaries]
        return json.dumps(values, indent=2)


def build_report(paths: Iterable[Path | str]) -> Report:
    """Read runs and compute everything that a report shows.

    Args:
        paths: Run folders, or folders that hold runs at any depth.

    Raises:
        DataError: There is no run, or a file of one is damaged or of an unknown schema.
    """
    folders = find_runs(paths)
    graphs = [folder for folder in folders if is_graph_run(folder)]
    texts = [folder for folder in folders if folder not in graphs]
    runs = read_runs(texts) if texts else []
    summaries = summarise(runs)
    graph_runs = read_graph_runs(graphs)
    graph_summaries = summarise_graph_runs(graph_runs)
    findings = [headline(summaries)] if runs or not graphs else []
    findings += [graph_headline(graph_summaries)] if graphs else []
    return Report(
        runs=tuple(runs),
        summaries=tuple(summaries),
        headline=" ".join(findings),
        caveats=tuple(caveats(runs, summaries)),
        graph_runs=tuple(graph_runs),
        graph_summaries=tuple(graph_summaries),
    )


def configuration_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List the configuration keys in which runs differ, with each run's value."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = sorted({key for config in flat for key in config})
    rows = [(key, [config.get(key, "") for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            rows += _flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows
