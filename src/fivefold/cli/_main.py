"""Entry point: turns errors into two lines and an exit code."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from fivefold.cli._errors import is_usage_error, show_error
from fivefold.cli._lazy import LazyGroup

_INTERRUPTED = 130

app = typer.Typer(
    name="fivefold",
    cls=LazyGroup,
    help="Communication-efficient distributed training: over slow networks, from slow disks.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer calls it with a positional bool
    if value:
        typer.echo(f"fivefold {version('fivefold')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    debug: Annotated[bool, typer.Option(help="Show tracebacks and debug logging.")] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    _ = show_version  # handled by the eager callback
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(message)s",
        datefmt="%H:%M:%S",
        handlers=[RichHandler(console=Console(stderr=True), show_path=debug, show_level=debug)],
    )


def main() -> None:
    """Run the command line; the only place that ends the process.

    Raises:
        SystemExit: Always, with 0 for success, 1 for a failure, 2 for a wrong command line, 3
            for a request that nothing satisfies and 130 after Ctrl-C.

    Examples:
        $ fivefold --version
    """
    try:
        # Not standalone: typer would print errors in a form of its own.
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = _INTERRUPTED  # where typer has not made it the same code
    except Exception as error:
        if "--debug" in sys.argv[1:] and not is_usage_error(error):
            raise
        sys.exit(show_error(error))
    if code == _INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code if isinstance(code, int) else 0)
