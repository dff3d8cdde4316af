"""Entry point: commands that are imported when they are called, errors as two lines and a code.

``fivefold --help`` loads no torch. Errors are plain writes and no boxes, so that scripts can read
them: rich would wrap long lines and take brackets in messages for markup.
"""

from __future__ import annotations

import ast
import copy
import errno
import importlib
import importlib.util
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.logging import RichHandler
from typer.core import TyperCommand, TyperGroup

import fivefold
from fivefold.cli import leave_at_once
from fivefold.cli._options import help_text, shown_help
from fivefold.errors import FivefoldError
from fivefold.files import nearest_file

# Name of each command, the module beside this one, and the function or group in it.
_COMMANDS = {
    "demo": ("_demo", "demo_command"),
    "new": ("_new", "new_command"),
    "train": ("_train", "train_command"),
    "plan": ("_plan", "plan_command"),
    "explain": ("_explain", "explain_command"),
    "advise": ("_advise", "advise_command"),
    "simulate": ("_codesign", "simulate_command"),
    "execute": ("_lab", "execute_command"),
    "ablate": ("_codesign", "ablate_command"),
    "profile": ("_profile", "profile_command"),
    "report": ("_report", "report_command"),
    "doctor": ("_doctor", "doctor_command"),
    "lab": ("_lab", "app"),
    "elastic": ("_train", "elastic_app"),
    "gnn": ("_gnn", "app"),
    "topology": ("_topology", "app"),
    "collectives": ("_collectives", "app"),
}


class _Commands(Mapping[str, Any]):
    """The commands above; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        module, function = _COMMANDS[name]
        found = getattr(importlib.import_module(f"fivefold.cli.{module}"), function)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(
                add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
            )
            alone.command(name, help=help_text(found))(found)
            found = alone
        return _with_uppercase_arguments(typer.main.get_command(found))

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


def _with_uppercase_arguments(command: Any) -> Any:
    """Show arguments as CONFIG, as the help texts call them, and not as {config}."""
    for each in [command, *getattr(command, "commands", {}).values()]:
        for parameter in each.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = parameter.name.upper()
    return command


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are called, and not to list them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of all commands without importing any."""
        listed = copy.copy(self)
        listed.commands = {
            name: TyperCommand(name, help=_summary(*where)) for name, where in _COMMANDS.items()
        }
        TyperGroup.format_help(listed, ctx, formatter)


def _summary(module: str, name: str) -> str:
    """Read the help of a command or group from the file that it stands in."""
    spec = importlib.util.find_spec(f"fivefold.cli.{module}")
    assert spec is not None, "the table names files beside this one"
    assert spec.origin is not None, "they are files"
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return shown_help(ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Call), "a group is made by command_group"
            text = next(word.value for word in node.value.keywords if word.arg == "help")
            return str(ast.literal_eval(text))
    raise AssertionError(f"fivefold.cli.{module} has no {name}")


# Others are those of the errors' classes; those that are not ours end with FivefoldError's.
_USAGE = 2  # as click has it
_LONGEST = 2000  # of a message: values that are quoted may be files
_FULL = (errno.ENOSPC, errno.EDQUOT)

_MISSING = re.compile(r"'([^']+)' does not exist")

# typer brings its own copy of click, or uses the one that is installed: only the base tells which.
_UsageError = typer.BadParameter.__bases__[0]


def is_usage_error(error: Exception) -> bool:
    """Return whether the command line was wrong: an option, an argument or a command's name."""
    return isinstance(error, _UsageError)


def show_error(error: Exception) -> int:
    """Write what went wrong and what to do to standard error; return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its help
        sys.stderr.write(f"{error.ctx.get_help()}\n")  # type: ignore[attr-defined]
        return _USAGE
    said = _in_two_lines(error)
    sys.stderr.write(f"error: {_one_line(said.message)}\n")
    sys.stderr.write(f"hint: {_one_line(said.hint or _see_help())}\n")
    return _USAGE if is_usage_error(error) else said.exit_code


def _one_line(text: str) -> str:
    # Only what a terminal shows as it is: names in files may hold anything.
    line = "".join(c if c.isprintable() else " " for c in re.sub(r"\s*\n\s*", " ", text))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def _see_help() -> str:
    """Return where the command that was called is explained."""
    words = itertools.takewhile(str.isalpha, sys.argv[1:3])
    return f"see {' '.join(['fivefold', *words])} --help"


def _in_two_lines(error: Exception) -> FivefoldError:
    if isinstance(error, FivefoldError):
        return error
    if is_usage_error(error):
        return _of_usage(error)
    if isinstance(error, typer.Abort):
        return FivefoldError("given up: the input ended")
    full = isinstance(error, OSError) and error.errno in _FULL
    if isinstance(error, OSError) and (error.filename is not None or full):
        # What is left of a file error that no command has words for.
        where = "" if error.filename is None else f"{error.filename}: "
        hint = "check the path and its permissions"
        if full:
            hint = "free space there, then run the same command again"
        return FivefoldError(f"{where}{error.strerror or error}", hint=hint)
    message = f"internal error: {type(error).__name__}: {error}"
    hint = "run it as fivefold --debug ... for the traceback, and report it"
    return FivefoldError(message, hint=hint)


def _of_usage(error: Exception) -> FivefoldError:
    message: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "")  # typer's own word in front of the choices
    context = getattr(error, "ctx", None)
    hint = f"see {'fivefold' if context is None else context.command_path} --help"
    given = _given_value(error)
    if given is not None and repr(given) not in message:
        message = f"{message}; got {given!r}"
    missing = _MISSING.search(message)
    near = None if missing is None else nearest_file(missing[1])
    if near is not None:
        hint = f"did you mean {near}? {hint}"
    return FivefoldError(message[:1].lower() + message[1:], hint=hint)


def _given_value(error: Exception) -> str | None:
    """Return what stood behind the option that is wrong; None where it was none."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for place, word in enumerate(sys.argv):
        option, joined, value = word.partition("=")
        if option.startswith("-") and option in names:
            return value if joined else next(iter(sys.argv[place + 1 : place + 2]), None)
    return None


_INTERRUPTED = 130
_AGAIN_S = 0.1

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
        typer.echo(f"fivefold {fivefold.__version__}")
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
    if not debug:  # torch does so too, at the end of its import, which Ctrl-C may cut short
        logging.getLogger("torch").setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(message)s",
        datefmt="%H:%M:%S",
        handlers=[RichHandler(console=Console(stderr=True), show_path=debug, show_level=debug)],
    )


class _CtrlC:
    """Answer Ctrl-C where compiled code calls back, too: it loses exceptions, or aborts on them.

    While a module is being loaded the process ends at once: what runs may be killed at any time.
    While LLVM's objects are made or freed it waits: between a call and the note of it an exception
    would have one freed twice.
    """

    def __enter__(self) -> Self:
        self.pressed = False
        self._again: threading.Timer | None = None
        self._usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._lost = sys.unraisablehook
        if self._usual:  # not where it is ignored, as in the background of a script
            signal.signal(signal.SIGINT, self._on_signal)
            sys.unraisablehook = self._on_lost
        return self

    def __exit__(self, *_: object) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._lost

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        files = list(_files_of(frame))
        if any(file.startswith("<frozen importlib") for file in files):
            leave_at_once(number, frame)
        if any("/llvmlite/" in file for file in files):
            self._press_again()
            return
        self.pressed = True
        raise KeyboardInterrupt

    def _press_again(self) -> None:
        self._again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        self._again.start()

    def _on_lost(self, lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):  # raised again outside of the call
            self._press_again()
        elif not self.pressed:  # else it is of an object that was half made
            self._lost(lost)


def _files_of(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def main() -> None:
    """Run a command and end the process with its exit code."""
    with _CtrlC() as ctrl_c:
        try:
            # Not standalone: typer would print errors in a form of its own.
            code = app(standalone_mode=False)
        except KeyboardInterrupt:
            code = _INTERRUPTED  # where typer has not made it the same code
        except Exception as error:
            if "--debug" in sys.argv[1:] and not is_usage_error(error):
                raise
            code = _INTERRUPTED if ctrl_c.pressed else show_error(error)
    if code == _INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code if isinstance(code, int) else 0)
