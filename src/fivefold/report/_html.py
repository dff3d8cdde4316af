"""The report as one self-contained HTML file.

Everything is inlined: style, script, plotly.js (once), the drawings. A content security policy in
the page forbids any request, so that the file behaves the same offline, in a mail and on a web
server. All text is escaped by the template engine. Needs jinja2 and plotly, the ``report`` extra.
"""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.errors import UnsupportedError
from fivefold.report._files import write_text_atomically
from fivefold.report._format import (
    CATEGORY_NAMES,
    UNKNOWN,
    format_bits,
    format_bytes_or_dash,
    format_count,
    format_lab,
    format_percent,
    format_ratio,
    format_seconds,
    format_time_to_ddp,
    format_waits,
)
from fivefold.report._gnn_html import graph_view
from fivefold.report._headline import importance
from fivefold.report._lanes import timeline_panels
from fivefold.report._mixture_summary import summarise_mixtures
from fivefold.report._mixture_view import mixture_curve, mixture_view
from fivefold.report._report import configuration_differences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fivefold.report._gnn_records import GraphRun
    from fivefold.report._records import Run
    from fivefold.report._report import Report
    from fivefold.report._summary import RunSummary

_TEMPLATE = "_report.html.jinja"
_MOST_RANKS = 8
_EXPECTED_DIFFERENCES = ("sync.", "run.output")


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: str
    percent: float
    text: str


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    total: str
    segments: tuple[_Segment, ...]


def write_html(report: Report, path: Path) -> Path:
    """Write the report as one HTML file.

    Args:
        report: What to show.
        path: File to write.

    Returns:
        The path that was written.

    Raises:
        UnsupportedError: jinja2 or plotly is not installed.
        DataError: The file cannot be written.

    Examples:
        >>> import tempfile, pathlib
        >>> from fivefold.report import Report
        >>> report = Report(runs=(), summaries=(), headline="Nothing.", caveats=())
        >>> write_html(report, pathlib.Path(tempfile.mkdtemp()) / "report.html").name
        'report.html'
    """
    return write_text_atomically(path, render_html(report))


def render_html(report: Report) -> str:
    """Render the report as the text of one HTML file.

    Args:
        report: What to show.

    Returns:
        The page.

    Raises:
        UnsupportedError: jinja2 or plotly is not installed.

    Examples:
        >>> from fivefold.report import Report
        >>> page = render_html(Report(runs=(), summaries=(), headline="A < B", caveats=()))
        >>> "A &lt; B" in page
        True
    """
    environment, offline = make_environment(), need_module("plotly.offline")
    curves = importlib.import_module("fivefold.report._curves")
    rounds = importlib.import_module("fivefold.report._round_curves")
    has_curves = any(run.metrics.train or run.metrics.validation for run in report.runs)
    loss_figures = curves.loss_figures(report.runs) if has_curves else {}
    round_figures = rounds.round_figures(report.runs)
    graph = _graph_parts(report)
    experts = mixture_curve(report.runs, curves.run_colours(report.runs))
    figures = loss_figures | round_figures | experts | graph["graph_figures"]
    labels = [run.label for run in report.summaries]
    labels += [run.label for run in report.graph_summaries]
    text: str = environment.get_template(_TEMPLATE).render(
        report=report,
        title=" and ".join(labels[:3]) or "nothing",
        tiles=_tiles(report.summaries),
        table=_comparison_table(report.summaries),
        has_curves=has_curves,
        figures=figures,
        mixtures=mixture_view(summarise_mixtures(report.runs)),
        **graph,
        round_plots=[(name, *rounds.ROUND_CAPTIONS[name]) for name in round_figures],
        plotly_js=offline.get_plotlyjs() if figures else "",
        bars_total=_time_bars(report.summaries, per_step=False),
        bars_step=_time_bars(report.summaries, per_step=True),
        overlap_bars=_overlap_bars(report.summaries),
        categories=CATEGORY_NAMES,
        panels=timeline_panels(report.runs),
        link_bars=_link_bars(report.summaries),
        differences=configuration_differences(report.runs),
        expected=_EXPECTED_DIFFERENCES,
        facts=_facts(report.runs),
        commands=[(run.label, _command(run)) for run in report.runs],
        report_command=shlex.join(["fivefold", "report", *(str(run.path) for run in report.runs)]),
    )
    return text


def _graph_parts(report: Report) -> dict[str, Any]:
    """What the template of graph runs needs; nothing is shown where there are none."""
    curves = importlib.import_module("fivefold.report._gnn_curves")
    view = graph_view(report.graph_runs, report.graph_summaries)
    return {
        "graph": view if report.graph_runs else None,
        "graph_figures": curves.graph_figures(report.graph_runs),
        "graph_commands": [(run.label, _command(run)) for run in report.graph_runs],
    }


def make_environment() -> Any:
    """The template engine of all pages: it escapes all text and knows no undefined names."""
    jinja2 = need_module("jinja2")
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fivefold.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def need_module(module: str) -> Any:
    """Import what only pages need.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"the HTML report needs {module.partition('.')[0]}, which is not installed",
            hint="pip install 'fivefold[report]', or ask for the text form only with --no-html",
        ) from error


def _tiles(summaries: Sequence[RunSummary]) -> list[tuple[str, str, str]]:
    """The few figures to see first: (value, what it is, of which run)."""
    tried = [run for run in summaries if run.method != "none"]
    compared = [run for run in tried if not run.is_plain_ddp] or tried
    if not compared:
        return []
    run = max(compared, key=importance)
    candidates = [
        (run.speed_ratio_to_ddp, format_ratio, "the speed of DDP"),
        (run.fraction_of_compute_only, format_percent, "of the compute-only speed"),
        (run.overlap_fraction, format_percent, "of the communication time hidden"),
        (run.time_to_ddp_ratio, format_ratio, "sooner at DDP's final loss"),
        (run.bits_per_byte, format_bits, "bits per byte at the end"),
    ]
    return [
        (write(value), what, run.label) for value, write, what in candidates if value is not None
    ][:4]


_COLUMNS: tuple[tuple[str, str, Callable[[RunSummary], str]], ...] = (
    (
        "tokens/s",
        "Tokens of all ranks per second of training, without validation and checkpoints.",
        lambda run: format_count(run.tokens_per_s),
    ),
    (
        "against DDP",
        "That rate over the rate of the DDP run.",
        lambda run: format_ratio(run.speed_ratio_to_ddp),
    ),
    (
        "of compute-only",
        "That rate over the rate of the same step with communication off.",
        lambda run: format_percent(run.fraction_of_compute_only),
    ),
    (
        "waiting",
        "Share of the wall time in which training stood still for communication.",
        lambda run: format_percent(run.exposed_fraction),
    ),
    (
        "waited for",
        "What that was for, on rank 0.",
        lambda run: format_waits(run.waits),
    ),
    (
        "hidden",
        "Share of the time in flight that passed behind computation.",
        lambda run: format_percent(run.overlap_fraction),
    ),
    (
        "sent per step",
        "Bytes that left rank 0's network interface, per optimizer step.",
        lambda run: format_bytes_or_dash(run.sent_bytes_per_step),
    ),
    (
        "bits per byte",
        "Final validation: lower is better.",
        lambda run: format_bits(run.bits_per_byte),
    ),
    (
        "time to DDP's loss",
        "Wall time until validation was as good as DDP's final one.",
        format_time_to_ddp,
    ),
    (
        "wall time",
        "From the first to the last step, everything included.",
        lambda run: format_seconds(run.wall_s),
    ),
)


def _comparison_table(summaries: Sequence[RunSummary]) -> dict[str, Any]:
    return {
        "columns": [(name, meaning) for name, meaning, _ in _COLUMNS],
        "rows": [(run, [write(run) for _, _, write in _COLUMNS]) for run in summaries],
    }


def _time_bars(summaries: Sequence[RunSummary], *, per_step: bool) -> list[_Bar]:
    """Stacked bars of rank 0's seconds, all to the scale of the longest."""
    steps_differ = len({run.steps for run in summaries}) > 1 and not per_step
    divided = [
        (run, {name: value / (run.steps if per_step else 1) for name, value in seconds.items()})
        for run in summaries
        if (seconds := run.seconds) is not None and run.steps
    ]
    longest = max((sum(seconds.values()) for _, seconds in divided), default=0.0)
    if longest <= 0:
        return []
    return [
        _Bar(
            label=run.label,
            total=format_seconds(sum(seconds.values()))
            + (f" for {run.steps} steps" if steps_differ else ""),
            segments=tuple(
                _Segment(name, round(100 * value / longest, 3), format_seconds(value))
                for name, value in seconds.items()
                if value > 0
            ),
        )
        for run, seconds in divided
    ]


def _overlap_bars(summaries: Sequence[RunSummary]) -> list[_Bar]:
    """Per run and rank what training did while messages were in flight, each bar the whole."""
    return [
        _Bar(
            label=f"{run.label}, rank {rank.rank}",
            total=f"{format_percent(rank.fraction)} of {format_seconds(rank.in_flight_s)}",
            segments=tuple(
                _Segment(name, round(100 * value / rank.in_flight_s, 3), format_seconds(value))
                for name, value in rank.seconds.items()
                if value > 0
            ),
        )
        for run in summaries
        for rank in run.overlap[:_MOST_RANKS]
    ]


def _link_bars(summaries: Sequence[RunSummary]) -> list[_Bar]:
    """Per run the payload, what had to travel for it and what the interface counted."""
    kinds = (
        ("payload", "payload_bytes_per_step"),
        ("messages", "message_bytes_per_step"),
        ("least", "least_link_bytes_per_step"),
        ("sent", "sent_bytes_per_step"),
        ("received", "received_bytes_per_step"),
    )
    known = [
        (run, kind, value)
        for run in summaries
        for kind, field in kinds
        if (value := getattr(run, field)) is not None
        and run.payload_bytes_per_step
        # Where the method counted its messages, the least for messages without a codec is no news.
        and not (kind == "least" and run.message_bytes_per_step is not None)
    ]
    longest = max((value for _, _, value in known), default=0.0)
    if longest <= 0:
        return []
    return [
        _Bar(
            label=run.label if kind == next(k for r, k, _ in known if r is run) else "",
            total=f"{format_bytes_or_dash(value)} {kind}",
            segments=(_Segment(kind, round(100 * value / longest, 3), ""),),
        )
        for run, kind, value in known
    ]


def _command(run: Run | GraphRun) -> str:
    """The command as one would type it: a module's file is no command."""
    command = list(run.manifest.command)
    if command and command[0].endswith("fivefold/__main__.py"):
        command[:1] = ["python", "-m", "fivefold"]
    elif command and command[0].endswith("/fivefold"):
        command[0] = "fivefold"
    return shlex.join(command)


def _facts(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Machine, lab and versions: (property, one value per run, or one for all where equal)."""
    writers: tuple[tuple[str, Callable[[Run], object]], ...] = (
        ("processor", lambda run: run.manifest.machine.cpu),
        ("cores", lambda run: run.manifest.machine.cores),
        ("memory", lambda run: format_bytes_or_dash(run.manifest.machine.memory_bytes)),
        ("kernel", lambda run: run.manifest.machine.kernel),
        ("emulated cluster", lambda run: format_lab(run.manifest.lab)),
        ("ranks", lambda run: run.manifest.world_size),
        ("model parameters", lambda run: format_count(run.manifest.num_parameters)),
        ("seed", lambda run: run.manifest.seed),
        ("fivefold", lambda run: run.manifest.fivefold),
        ("torch", lambda run: run.manifest.torch),
        ("python", lambda run: run.manifest.python),
        ("started", lambda run: run.manifest.started_at),
    )
    rows = []
    for name, write in writers:
        values = [UNKNOWN if (value := write(run)) is None else str(value) for run in runs]
        rows.append((name, values[:1] if len(set(values)) == 1 else values))
    return rows
