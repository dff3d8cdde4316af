"""Finds a checkout's benchmarks and the results they last wrote."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.report._benchmark_results import read_results

if TYPE_CHECKING:
    from pathlib import Path

    from fivefold.report._benchmark_results import BenchmarkResults


@dataclass(frozen=True, slots=True)
class BenchmarkTopic:
    """One benchmark script.

    Attributes:
        name: Its path below the benchmarks folder without the suffix.
        script: The script.
        purpose: First line of its docstring.
        results: What it last wrote, the newest where there are several; None if it never ran.

    Examples:
        >>> BenchmarkTopic("optim/a", script=None, purpose="Measures.", results=None).name
        'optim/a'
    """

    name: str
    script: Path
    purpose: str
    results: BenchmarkResults | None


def find_topics(checkout: Path) -> list[BenchmarkTopic]:
    """List the benchmarks of a checkout.

    Args:
        checkout: The folder that holds ``benchmarks/``.

    Returns:
        The topics by name; scripts whose name begins with an underscore are helpers of others.

    Raises:
        UnsupportedError: There is no ``benchmarks`` folder.
        DataError: A results file is damaged.

    Examples:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "benchmarks" / "optim").mkdir(parents=True)
        >>> _ = (folder / "benchmarks" / "optim" / "speed.py").write_text('"Measures speed."')
        >>> [(topic.name, topic.purpose) for topic in find_topics(folder)]
        [('optim/speed', 'Measures speed.')]
    """
    folder = checkout / "benchmarks"
    if not folder.is_dir():
        raise UnsupportedError(
            f"there is no benchmarks folder in {checkout}",
            hint="run this in a checkout of fivefold: the benchmarks are no part of the package",
        )
    written = [read_results(path) for path in sorted((folder / "results").rglob("*.json"))]
    topics = []
    for script in sorted(folder.rglob("*.py")):
        parts = script.relative_to(folder).parts
        if any(part.startswith("_") for part in parts):  # helpers of the scripts beside them
            continue
        name = script.relative_to(folder).with_suffix("").as_posix()
        own = [results for results in written if results.topic in (name, script.stem)]
        newest = max(own, key=lambda results: results.date, default=None)
        topics.append(BenchmarkTopic(name, script, _purpose(script), newest))
    return topics


def find_topic(checkout: Path, name: str) -> BenchmarkTopic:
    """Find one benchmark by its name, or by its last part where that is unique.

    Args:
        checkout: The folder that holds ``benchmarks/``.
        name: Such as ``"optim/hidden_communication"`` or ``"hidden_communication"``.

    Returns:
        The topic.

    Raises:
        UnsupportedError: There is no ``benchmarks`` folder.
        ConfigurationError: No benchmark, or more than one, has that name.
        DataError: A results file is damaged.

    Examples:
        >>> import tempfile, pathlib
        >>> find_topic(pathlib.Path(tempfile.mkdtemp()), "speed")
        Traceback (most recent call last):
        ...
        fivefold.errors.UnsupportedError: there is no benchmarks folder in ...
    """
    topics = find_topics(checkout)
    wanted = name.removeprefix("benchmarks/").removesuffix(".py")
    fitting = [topic for topic in topics if topic.name == wanted] or [
        topic for topic in topics if topic.script.stem == wanted
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " or ".join(topic.name for topic in fitting)
        raise ConfigurationError(f"more than one benchmark is called {name}", hint=f"write {names}")
    names_and_stems = [*(topic.name for topic in topics), *(topic.script.stem for topic in topics)]
    near = difflib.get_close_matches(wanted, names_and_stems, n=1)
    hint = f"did you mean {near[0]}?" if near else "'fivefold bench --list' shows all"
    raise ConfigurationError(f"there is no benchmark {name}", hint=hint)


def _purpose(script: Path) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    except (SyntaxError, UnicodeDecodeError):
        return "(cannot be read)"
    return (docstring or "(no description)").splitlines()[0]
