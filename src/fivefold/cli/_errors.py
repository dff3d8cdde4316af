"""What a command that failed says: two lines on standard error, and the exit code.

Plain writes and no boxes, so that scripts can read them: rich would wrap long lines and take
brackets in messages for markup.
"""

from __future__ import annotations

import errno
import re
import sys

import typer

from fivefold.errors import FivefoldError
from fivefold.files import nearest_file

# Others are those of the errors' classes; those that are not ours end with FivefoldError's.
_USAGE = 2  # as click has it
_LONGEST = 2000  # of a message: values that are quoted may be files
_FULL = (errno.ENOSPC, errno.EDQUOT)

_MISSING = re.compile(r"'([^']+)' does not exist")

# typer brings its own copy of click, or uses the one that is installed: only the base tells which.
_UsageError = typer.BadParameter.__bases__[0]


def is_usage_error(error: Exception) -> bool:
    """Whether the command line itself was wrong: an option, an argument, a command's name."""
    return isinstance(error, _UsageError)


def show_error(error: Exception) -> int:
    """Write what went wrong and what to do to standard error.

    Args:
        error: What came out of the command.

    Returns:
        The exit code.
    """
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
    words = ["fivefold"]
    for word in sys.argv[1:3]:
        if not word.isalpha():
            break
        words.append(word)
    return f"see {' '.join(words)} --help"


def _in_two_lines(error: Exception) -> FivefoldError:
    if isinstance(error, FivefoldError):
        return error
    if is_usage_error(error):
        return _of_usage(error)
    if isinstance(error, typer.Abort):
        return FivefoldError("given up: the input ended")
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return _of_file(error)
    message = f"internal error: {type(error).__name__}: {error}"
    hint = "run it as fivefold --debug ... for the traceback, and report it"
    return FivefoldError(message, hint=hint)


def _of_usage(error: Exception) -> FivefoldError:
    message: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "")  # typer's own word in front of the choices
    context = getattr(error, "ctx", None)
    command = "fivefold" if context is None else context.command_path
    hint = f"see {command} --help"
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


def _of_file(error: OSError) -> FivefoldError:
    # What is left of a file error that no command has words for.
    if error.errno in _FULL:
        hint = "free space there, then run the same command again"
    else:
        hint = "check the path and its permissions"
    where = "" if error.filename is None else f"{error.filename}: "
    return FivefoldError(f"{where}{error.strerror or error}", hint=hint)
