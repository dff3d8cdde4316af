"""What the commands of collectives share: networks, files of algorithms, facts as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli._arguments import ArgumentError
from fivefold.cli._outputs import write_json
from fivefold.collectives.lowering import (
    Program,
    from_msccl_xml,
    from_mscclpp_json,
    lower,
    to_msccl_xml,
    to_mscclpp_json,
)
from fivefold.collectives.schedules import Schedule
from fivefold.errors import ConfigurationError
from fivefold.files import read_text
from fivefold.runs import write_text
from fivefold.units import format_duration_s

SizeOption = Annotated[str, typer.Option(help="Size of the collective, such as 16MB.")]


def read_algorithm(file: Path) -> Schedule | Program:
    """Return a schedule or a program from a file, whichever form it has.

    Raises:
        DataError: The file cannot be read.
    """
    text = read_text(file, what="algorithm")
    if text.lstrip().startswith("<"):
        return from_msccl_xml(text)
    if '"threadblocks"' in text:
        return from_mscclpp_json(text)
    if '"fivefold-program/1"' in text:
        return Program.from_json(text)
    return Schedule.from_json(text)


def read_only_schedule(file: Path) -> Schedule:
    """Return a schedule from a file.

    Raises:
        ConfigurationError: The file holds a program.
    """
    found = read_algorithm(file)
    if not isinstance(found, Schedule):
        raise ConfigurationError(
            f"{file} holds a program, which has no times", hint="draw the schedule it comes from"
        )
    return found


def require_ending(output: Path) -> None:
    """Refuse a file name that says no format, before the search and not after it.

    Raises:
        ArgumentError: The ending is not known.
    """
    if output.suffix not in {".json", ".xml"}:
        raise ArgumentError(
            f"{output} has no known ending", hint="end it with .json, .xml or .plan.json"
        )


def write_algorithm(schedule: Schedule, output: Path) -> None:
    """Write a schedule, or the program that it lowers to, as the file's ending says."""
    if output.suffix == ".xml":
        text = to_msccl_xml(lower(schedule))
    elif output.name.endswith(".plan.json"):
        text = to_mscclpp_json(lower(schedule, queue_slots=None))
    else:
        text = schedule.to_json()
    write_text(output, text)


def show_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Write names and values one below the other, or as JSON."""
    if as_json:
        write_json(facts)
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(f"{plain_name(name):{width}}  {value_text(name, value)}")


def plain_name(name: str) -> str:
    """Return a key as people read it."""
    return name.removesuffix("_s").replace("_", " ")


def value_text(name: str, value: Any) -> str:
    """Return a value as people read it."""
    if name.endswith("_s") and isinstance(value, float):
        return format_duration_s(value)
    return f"{value:.1%}" if name == "gap" else str(value)
