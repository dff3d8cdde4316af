"""What pages and texts show of training runs of language models, and of all runs together.

``page_server`` makes the page anew each time that a browser asks for it, while runs go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import math
import shlex
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.report._graphs import graph_sections, graph_text_sections
from fivefold.report._html import render_html
from fivefold.report._mixtures import mixture_section, mixture_table, summarise_mixtures
from fivefold.report._prediction import predicted_runs, prediction_section
from fivefold.report._reader import Report, build_report, configuration_differences
from fivefold.report._records import Run
from fivefold.report._run_charts import loss_charts, round_charts, timeline_section
from fivefold.report.columns import Column
from fivefold.report.format import (
    CATEGORY_NAMES,
    UNKNOWN,
    command_texts,
    config_texts,
    fact_table,
    figure_table,
    format_bits,
    format_bytes_or_dash,
    format_count,
    format_lab,
    format_percent,
    format_ratio,
    format_seconds,
    format_waits,
    run_notes,
    run_table,
    seconds_bar,
)
from fivefold.report.page import (
    BarChart,
    BarRow,
    DataTable,
    Folded,
    Page,
    PagePart,
    PageSection,
    SideBySide,
    TextBlock,
)
from fivefold.report.summary import RunSummary, importance

_MOST_RANKS = 8
_EXPECTED_DIFFERENCES = ("sync.", "run.output")
_CATEGORIES = tuple(CATEGORY_NAMES.items())


def report_page(report: Report) -> Page:
    """Return the page of a report: the comparison of its runs, curves, timelines, settings.

    Args:
        report: What ``build_report`` returned.
    """
    labels = [run.label for run in report.summaries]
    labels += [run.label for run in report.graph_summaries]
    sections = _sections(report) if report.runs else []
    if report.graph_runs:
        sections += graph_sections(report.graph_runs, report.graph_summaries)
    return Page(
        title=f"report of {' and '.join(labels[:3]) or 'nothing'}",
        finding=report.headline,
        tiles=tuple(_tiles(report.summaries)),
        caveats=report.caveats,
        sections=tuple(sections),
    )


def report_text(report: Report) -> Page:
    """Return the short form of a report, for a terminal.

    Args:
        report: What ``build_report`` returned.
    """
    sections: list[PageSection] = []
    if report.graph_runs:
        sections += graph_text_sections(report.graph_runs, report.graph_summaries)
    if report.summaries:
        sections += _text_sections(report)
    return Page(
        title="report", finding=report.headline, caveats=report.caveats, sections=tuple(sections)
    )


def _tiles(summaries: Sequence[RunSummary]) -> list[tuple[str, str, str]]:
    """Return the few figures to see first: value, what it is, of which run."""
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


_COLUMNS = (
    Column("tokens_per_s", "tokens/s", format_count, help=
           "Tokens of all ranks per second of training, without validation and checkpoints."),
    Column("speed_ratio_to_ddp", "against DDP", format_ratio, short="vs DDP",
           help="That rate over the rate of the DDP run."),
    Column("fraction_of_compute_only", "of compute-only", format_percent,
           help="That rate over the rate of the same step with communication off."),
    Column("exposed_fraction", "waiting", format_percent,
           help="Share of the wall time in which training stood still for communication."),
    Column("waits", "waited for", format_waits, help="What that was for, on rank 0.", words=True),
    Column("overlap_fraction", "hidden", format_percent,
           help="Share of the time in flight that passed behind computation."),
    Column("sent_bytes_per_step", "sent per step", format_bytes_or_dash, short="sent/step",
           help="Bytes that left rank 0's network interface, per optimizer step."),
    Column("bits_per_byte", "bits per byte", format_bits, short="bits/byte",
           help="Final validation: lower is better."),
    Column("bits_per_byte_at_equal_time", "at equal time", format_bits, help=
           "Validation when the first of the finished runs ended, between two points of the curve."
           ),
    Column("time_to_ddp_s", "time to DDP's loss",
           lambda value: "not reached" if value == math.inf else format_seconds(value),
           help="Wall time until validation was as good as DDP's final one.",
           short="to DDP's loss"),
    Column("wall_s", "wall time", format_seconds,
           help="From the first to the last step, everything included."),
)  # fmt: skip


def _comparison(summaries: Sequence[RunSummary], *, short: bool) -> DataTable:
    """Return a row per run; in short without words, which have a list of their own."""
    shown = [column for column in _COLUMNS if not (short and column.words)]
    return figure_table(summaries, shown, short=short)


def _text_sections(report: Report) -> list[PageSection]:
    summaries = report.summaries
    waits = [(run.label, format_waits(run.waits)) for run in summaries if run.waits]
    measured = [_overlap_row(run) for run in summaries if run.overlap]
    predicted = prediction_section(predicted_runs(report.runs, summaries))
    shown: dict[str, Sequence[PagePart]] = {
        "Where each second of rank 0 went": [_time_bars(summaries, count_steps=False)],
        "What rank 0 waited for": [DataTable.of(("", ""), waits, text_columns=(1,))],
        "Hidden of the time in flight, measured on each rank": [
            DataTable.of(("",) * 3, measured, text_columns=(2,))
        ],
        "Predicted and measured": predicted.parts if predicted else (),
        "Mixtures of experts": [mixture_table(summarise_mixtures(report.runs))],
    }
    return [
        PageSection(heading="", parts=(_comparison(summaries, short=True),)),
        *(PageSection(heading=heading, parts=tuple(parts)) for heading, parts in shown.items()),
        PageSection(heading="", parts=tuple(map(TextBlock, _setting(report)))),
    ]


def _overlap_row(run: RunSummary) -> tuple[str, str, str]:
    ranks = run.overlap[:_MOST_RANKS]
    shares = ", ".join(format_percent(rank.fraction) for rank in ranks)
    more = f", {len(run.overlap) - len(ranks)} more ranks" if run.overlap[_MOST_RANKS:] else ""
    longest_s = max(rank.in_flight_s for rank in run.overlap)
    return run.label, f"{shares}{more}", f"of up to {format_seconds(longest_s)}"


def _setting(report: Report) -> list[str]:
    labs = {format_lab(run.manifest.lab) for run in report.runs}
    machines = {run.manifest.machine.cpu for run in report.runs if run.manifest.machine.cpu}
    lines = [f"emulated cluster: {'; '.join(sorted(labs))}"]
    if machines:
        lines.append(f"machine: {'; '.join(sorted(machines))}")
    lines += sorted({f"data: {run.manifest.data.said}" for run in report.runs if run.manifest.data})
    return lines + [f"note: {text}" for text in run_notes(report.summaries)]


def _sections(report: Report) -> list[PageSection]:
    summaries, runs = report.summaries, report.runs
    found: list[PageSection | None] = [
        PageSection(
            key="comparison",
            heading="Comparison",
            how="One row per run. A distributed run spends time computing and time waiting for the "
            "network; the closer a run comes to 100 % of compute-only, the less it waits. Lower "
            "bits per byte means that the model predicts unseen text better; without communication "
            "that figure is of one rank that trained alone.",
            parts=(_comparison(summaries, short=False), *map(TextBlock, run_notes(summaries))),
        ),
        prediction_section(predicted_runs(runs, summaries)),
        _loss(runs),
        _seconds(summaries),
        PageSection(
            key="overlap",
            heading="Hidden or waited for",
            how="What each rank's training thread did while at least one message was in flight: "
            "the whole bar is that time. The figure at its end is the share that was not waited "
            "for. Measured from the recorded beginnings and ends of computation, waits and "
            "messages; no formula for how long anything should take is involved.",
            parts=(_overlap_bars(summaries),),
        ),
        PageSection(
            key="rounds", heading="Rounds", parts=(SideBySide(parts=tuple(round_charts(runs))),)
        ),
        timeline_section(runs),
        PageSection(key="link", heading="Bytes on the link", parts=(_link_bars(summaries),)),
        mixture_section(runs),
        _configuration(runs),
        PageSection(
            key="machine",
            heading="Machine, emulated cluster, data, versions",
            parts=(
                fact_table(
                    runs,
                    [
                        ("emulated cluster", lambda run: format_lab(run.manifest.lab)),
                        ("data", lambda run: run.manifest.data.said if run.manifest.data else ""),
                    ],
                ),
            ),
        ),
        _origins(runs),
    ]
    return [section for section in found if section is not None]


def _loss(runs: Sequence[Run]) -> PageSection:
    charts = loss_charts(runs)
    how = "No metrics were written yet, so there is no curve to draw."
    parts: tuple[PagePart, ...] = ()
    if charts:
        how = (
            "How well each model predicts text, in bits per byte (logarithmic axis, lower is "
            "better). Thick lines with markers are validation on text that was held out; the thin "
            "lines behind them are training batches. Click a name to hide a run, drag to zoom, "
            "double-click to return."
        )
        parts = (charts[0], SideBySide(parts=tuple(charts[1:])))
    return PageSection(key="loss", heading="Loss", how=how, parts=parts)


def _seconds(summaries: Sequence[RunSummary]) -> PageSection:
    whole = _time_bars(summaries, count_steps=True)
    if not whole.rows:
        how = "No run has recorded its time yet."
        return PageSection(key="seconds", heading="Where each second went", how=how)
    table = DataTable.of(
        ("run", *CATEGORY_NAMES.values()),
        [
            (run.label, *(f"{run.seconds[kind]:.2f}" for kind in CATEGORY_NAMES))
            for run in summaries
            if run.seconds
        ],
        caption="Seconds of rank 0 over the whole run",
    )
    return PageSection(
        key="seconds",
        heading="Where each second went",
        how="The wall time of rank 0, split by what its training thread did. Orange is time in "
        "which training stood still because it waited for other ranks; a method that hides its "
        "communication has little of it. All bars of one figure have the same scale.",
        parts=(whole, _step_bars(summaries), Folded(title="The figures as a table", part=table)),
    )


def _time_bars(summaries: Sequence[RunSummary], *, count_steps: bool) -> BarChart:
    """Return rank 0's seconds over the whole run, in stacked bars to one scale."""
    recorded = [(run, run.seconds) for run in summaries if run.seconds is not None]
    steps_differ = count_steps and len({run.steps for run, _ in recorded}) > 1
    return BarChart(
        rows=tuple(
            seconds_bar(
                run.label,
                seconds,
                CATEGORY_NAMES,
                more=f" for {run.steps} steps" if steps_differ else "",
            )
            for run, seconds in recorded
        ),
        kinds=_CATEGORIES,
    )


def _step_bars(summaries: Sequence[RunSummary]) -> BarChart:
    return BarChart(
        rows=tuple(
            seconds_bar(
                run.label,
                {kind: value / run.steps for kind, value in run.seconds.items()},
                CATEGORY_NAMES,
            )
            for run in summaries
            if run.seconds is not None and run.steps
        ),
        caption="Per optimizer step. The same, divided by the number of steps: what one step "
        "costs on average.",
    )


def _overlap_bars(summaries: Sequence[RunSummary]) -> BarChart:
    """Return per run and rank what training did with messages in flight, each bar the whole."""
    rows = []
    for run in summaries:
        for rank in run.overlap[:_MOST_RANKS]:
            bar = seconds_bar(f"{run.label}, rank {rank.rank}", rank.seconds, CATEGORY_NAMES)
            total = f"{format_percent(rank.fraction)} of {format_seconds(rank.in_flight_s)}"
            rows.append(BarRow(label=bar.label, total=total, segments=bar.segments))
    return BarChart(rows=tuple(rows), kinds=_CATEGORIES, tight=True, full=0.0)


def _link_bars(summaries: Sequence[RunSummary]) -> BarChart:
    """Return per run the payload, what had to travel for it and what the interface counted."""
    rows = []
    for run in summaries:
        if not run.payload_bytes_per_step:
            continue
        values = {
            "payload": run.payload_bytes_per_step,
            "messages": run.message_bytes_per_step,
            # Where the method counted its messages, the least without a codec is no news.
            "least": run.least_link_bytes_per_step if run.message_bytes_per_step is None else None,
            "sent": run.sent_bytes_per_step,
            "received": run.received_bytes_per_step,
        }
        label = run.label
        for kind, value in values.items():
            if value is not None:
                total = f"{format_bytes_or_dash(value)} {kind}"
                rows.append(BarRow(label=label, total=total, segments=((kind, value, ""),)))
                label = ""
    return BarChart(
        rows=tuple(rows),
        tight=True,
        caption="Per optimizer step of rank 0. Payload is what training handed to all-reduce; "
        "messages is what rank 0 sent for it, after any codec, as the method counts it (without a "
        "codec 2(n-1)/n of the payload, the least that any all-reduce must send per "
        "rank); sent and received are what the counters of the network interface moved by, with "
        "headers, checks and everything else. Local-update methods communicate once per round "
        "instead of once per step.",
    )


def _configuration(runs: Sequence[Run]) -> PageSection:
    differences = configuration_differences(runs)
    rows = [(key, *(value or UNKNOWN for value in values)) for key, values in differences]
    marked = tuple(
        number
        for number, (key, _) in enumerate(differences)
        if not key.startswith(_EXPECTED_DIFFERENCES)
    )
    table = dataclasses.replace(run_table("key", runs, rows), marked=marked)
    how = "The configuration of the one run is below."
    if differences:
        how = "Only keys in which the runs differ. Differences outside the synchronisation method "
        how += "are marked: they make a comparison less direct."
    elif len(runs) > 1:
        how = "The runs do not differ in any key."
    texts = config_texts(runs)
    parts = (table, *texts) if differences else tuple(texts)
    return PageSection(key="configuration", heading="Configuration", how=how, parts=parts)


def _origins(runs: Sequence[Run]) -> PageSection:
    words = shlex.join(["fivefold", "report", *(str(run.path) for run in runs)])
    page = TextBlock(text=words, heading="This page", verbatim=True)
    return PageSection(
        key="reproduce",
        heading="How to reproduce",
        how="The commands that started the runs. Each run's folder also holds config.toml with "
        f"every key, so that fivefold train config.toml --nproc {runs[0].manifest.world_size} runs "
        "it again (with --set run.output=FOLDER, as the folder of a finished run is not written "
        "over).",
        parts=(*command_texts(runs), page),
    )


_READING_S = 5  # between two readings of the runs, by the browser's own clock


def page_server(
    paths: Sequence[Path], *, host: str = "127.0.0.1", port: int = 0
) -> ThreadingHTTPServer:
    """Return a server of the report of runs, which follows them; ``serve_forever`` starts it.

    Args:
        paths: Run folders, or folders of runs, which may appear later.
        host: Address to listen on; the default can be reached from this machine alone.
        port: Port; 0 for a free one, then in ``server_port``.

    Raises:
        ConfigurationError: The address cannot be listened on.
    """
    reading = threading.Lock()  # one reading at a time, however many browsers ask

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            with reading:
                text = _page(paths)
            body = text.encode()
            with contextlib.suppress(ConnectionError):  # the browser has gone
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("Refresh", str(_READING_S))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing of single requests."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        message = f"{host}:{port} cannot be listened on: {error}"
        raise ConfigurationError(
            message, hint="choose another --port, or 0 for a free one"
        ) from None


def _page(paths: Sequence[Path]) -> str:
    """Return the page, or why there is none yet."""
    try:
        return render_html(report_page(build_report(paths)))
    except FivefoldError as error:
        words = html.escape(f"{error.message}. {error.hint or ''}")
        return f'<!doctype html><html lang="en"><title>waiting</title><p>Waiting: {words}</p>'
