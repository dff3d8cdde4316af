"""``fivefold bench``: lists a checkout's benchmarks with their last rows, and runs one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli._arguments import ArgumentError

if TYPE_CHECKING:
    from fivefold.report import BenchmarkRow, BenchmarkTopic

# Registered with this context, so that the benchmark's own options reach it untouched.
BENCH_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench_command(
    context: typer.Context,
    topic: Annotated[
        str | None, typer.Argument(help="The benchmark, such as optim/hidden_communication.")
    ] = None,
    *,
    list_topics: Annotated[
        bool, typer.Option("--list", help="Show all benchmarks with their last rows.")
    ] = False,
) -> None:
    """Run one benchmark of this checkout; arguments after its name are the benchmark's own."""
    from fivefold.report import find_topic, find_topics  # noqa: PLC0415 - keeps --help fast

    checkout = Path.cwd()
    if list_topics:
        _print_topics(find_topics(checkout))
        return
    if topic is None:
        message = "no benchmark was named"
        raise ArgumentError(message, hint="'fivefold bench --list' shows all")
    script = find_topic(checkout, topic).script
    command = [sys.executable, str(script.relative_to(checkout)), *context.args]
    code = subprocess.run(command, cwd=checkout, check=False).returncode
    if code:
        raise typer.Exit(code if code > 0 else 1)


def _print_topics(topics: list[BenchmarkTopic]) -> None:
    if not topics:
        typer.echo("no benchmarks yet")
    for topic in topics:
        typer.echo(f"{topic.name}: {topic.purpose}")
        if topic.results is None:
            typer.echo("  no results yet")
            continue
        results = topic.results
        typer.echo(f"  {results.date}, commit {(results.commit or 'unknown')[:12]}")
        for row in results.rows:
            typer.echo(f"  {_row(row)}")


def _row(row: BenchmarkRow) -> str:
    text = f"{row.case}: {row.metric} {row.ours:.4g} {row.unit}"
    if row.spread is not None:
        text += f" ({row.spread[0]:.4g} to {row.spread[1]:.4g})"
    text += "".join(f", {name} {value:.4g}" for name, value in row.peers.items())
    if row.limit is not None:
        text += f", limit {row.limit:.4g}"
    if row.target is not None:
        text += f", target {row.target:.4g} {'met' if row.met else 'NOT met'}"
    return text
