"""What commands share: groups and their help, options, how values are read, where results go.

What is wrong with an option or an argument is a wrong command line, exit code 2. Places that a
command will write to are looked at before the work and not after it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fivefold.errors import ConfigurationError
from fivefold.units import parse_bytes, parse_duration_s

if TYPE_CHECKING:
    from fivefold.network.topology import Topology
    from fivefold.reading import Reading
    from fivefold.report.page import PagePart


class ArgumentError(ConfigurationError):
    """An option or argument of the command line has a value that it does not take."""

    exit_code = 2


@contextmanager
def typed_arguments() -> Iterator[None]:
    """Report what the library refuses in here as a wrong command line."""
    try:
        yield
    except ConfigurationError as error:
        raise ArgumentError(error.message, hint=error.hint) from error


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as "16 MB"."""
    with typed_arguments():
        return parse_bytes(text)


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as "5 us"."""
    with typed_arguments():
        return parse_duration_s(text)


def numbers_of(text: str, what: str, *, example: str, least: int | None = None) -> list[int]:
    """Return the whole numbers of a text such as "4,8"."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or (least is not None and min(found) < least):
        from_there = "" if least is None else f" from {least}"
        raise ArgumentError(
            f"{what} must be whole numbers{from_there}; got {text!r}",
            hint=f"write them with commas, such as {example}",
        )
    return found


def topology_of(text: str, *, bandwidth: str | None = None, latency: str | None = None) -> Topology:
    """Return the topology of a name or a file: of links, or of a cluster as a planner takes it."""
    found, reading = read_topology_of(text, bandwidth=bandwidth, latency=latency)
    say_readings(reading)
    return found


def say_readings(*readings: Reading | None) -> None:
    """Log accounts of what others wrote, and say what in them could turn an answer over."""
    for reading in filter(None, readings):
        reading.log()
        for note in reading.decisive():
            typer.echo(f"note: not known from {reading.source}: {note}", err=True)


def read_topology_of(
    text: str, *, bandwidth: str | None = None, latency: str | None = None
) -> tuple[Topology, Reading | None]:
    """Return the same, and what of another program's file was read, assumed and left out."""
    from fivefold.network.topology.readers import file_of
    from fivefold.network.topology.text import (
        catalogue,
        describes_graph,
        topology_tables,
        topology_with_reading,
    )

    file = file_of(text)
    if file is not None:  # what is wrong in a file is no wrong command line
        if file.path.suffix == ".toml" and not describes_graph(topology_tables(file.path)):
            return _of_cluster(text), None
        return topology_with_reading(text, bandwidth=bandwidth, latency=latency)
    with typed_arguments():
        known = catalogue()
        named = {*known.machines, *known.generators, "lingjun", "taccl"}
        if text.partition(":")[0].replace("-", "_") not in named and Path(text).suffix != ".toml":
            return _of_cluster(text), None
        return topology_with_reading(text, bandwidth=bandwidth, latency=latency)


def _of_cluster(text: str) -> Topology:
    from fivefold.network.topology import parse_topology
    from fivefold.strategy import load_cluster
    from fivefold.strategy.cluster import is_named_cluster

    if Path(text).suffix != ".toml" and not is_named_cluster(text.partition(":")[0]):
        return parse_topology(text)  # which knows what is near
    return load_cluster(text).graph()


_PICTURES = (".png", ".svg", ".pdf")


def require_writable(*paths: Path | None) -> None:
    """Refuse files and folders that cannot be made where they are wanted."""
    for path in paths:
        if path is None:
            continue
        above = path if path.is_dir() else path.parent
        while not above.exists() and above != above.parent:
            above = above.parent
        if not above.is_dir():
            raise ConfigurationError(
                f"{path} cannot be written: {above} is a file", hint="name another place"
            )
        if not os.access(path if path.exists() else above, os.W_OK):
            raise ConfigurationError(
                f"{path} cannot be written: no permission to write to {above}",
                hint="name another place, or change its permissions",
            )


def require_picture(path: Path | None) -> None:
    """Refuse a picture in a format that is not drawn."""
    if path is not None and path.suffix not in _PICTURES:
        raise ArgumentError(
            f"a picture cannot be saved as {str(path)!r}", hint="use .png, .svg or .pdf"
        )


def write_json(value: Any) -> None:
    """Write a result to standard output, for programs."""
    typer.echo(json.dumps(value))


def show(finding: str, *parts: PagePart | str) -> None:
    """Write a finding to standard output, and tables and lines below it, for people."""
    from fivefold.report import print_page
    from fivefold.report.page import Page, PageSection, TextBlock

    blocks = tuple(TextBlock(text=part) if isinstance(part, str) else part for part in parts)
    section = PageSection(heading="", parts=blocks)
    print_page(Page(title=finding, finding=finding, sections=(section,)))


# An indented line is an example, which stays a line of its own.
_LINE_BREAK_INSIDE_A_PARAGRAPH = re.compile(r"(?<!\n)\n(?![\n ])")


def help_text(command: Callable[..., None]) -> str:
    """Return a command's help, from its docstring."""
    return shown_help(inspect.getdoc(command) or "")


def shown_help(docstring: str) -> str:
    """Return a docstring ready to be wrapped, in which [plan] is a table and no style."""
    return escape(_LINE_BREAK_INSIDE_A_PARAGRAPH.sub(" ", docstring.strip()))


def command_group(
    name: str,
    *,
    help: str,  # noqa: A002 - as typer calls it
    commands: Mapping[str, Callable[..., None]] = MappingProxyType({}),
) -> typer.Typer:
    """Return a group of commands whose help texts are their docstrings."""
    app = typer.Typer(
        name=name, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode="rich"
    )
    app.callback()(lambda: None)  # keeps a single command a subcommand
    for word, command in commands.items():
        app.command(word, help=help_text(command))(command)
    return app


TopologyArgument = Annotated[
    str,
    typer.Argument(
        metavar="TOPOLOGY",
        help="Such as dgx_a100:2, torus:4x4, fat_tree:8,gpus=8, lingjun:topo.csv, cluster.toml, "
        "or another program's file, as topo.xml:2,nic=400Gbit/s (NCCL's, two boxes); "
        '"fivefold topology list" names them all.',
    ),
]
BandwidthOption = Annotated[
    str | None, typer.Option(help="Bandwidth of a generator's links, such as '50 GB/s'.")
]
LatencyOption = Annotated[
    str | None, typer.Option(help="Latency of a generator's links, such as '1 us'.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Show all that was read, assumed and left out, and what is harmless."
    ),
]
JobsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="JOBS",
        help="TOML file with \\[\\[jobs]]; see the guide.",
        exists=True,
        dir_okay=False,
    ),
]
_CLUSTER_HELP = (
    "Machines and what joins them: a TOML file (fivefold profile writes one), a known GPU with its "
    "software such as h100-nemo:16, or where links are enough fat_tree:4,gpus=2."
)
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="FILE|NAME", help=_CLUSTER_HELP)]
OptionalClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE|NAME", help=_CLUSTER_HELP)
]


def output_option(what: str, *, metavar: str = "FILE") -> Any:
    """Declare --output: the one file or folder that the command makes."""
    return typer.Option("--output", "-o", metavar=metavar, help=what)


ConfigArgument = Annotated[
    Path,
    typer.Argument(help="TOML file; the guide lists the keys.", exists=True, dir_okay=False),
]
PathSeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of hashed paths.")]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="HTML page to write: pictures, charts, reasons."
    ),
]
DatasetArgument = Annotated[
    Path, typer.Argument(help="Folder of the data set.", exists=True, file_okay=False)
]
