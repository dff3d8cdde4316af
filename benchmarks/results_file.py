"""The one form of every benchmark's results: raw rows as JSON, the same as a table.

A row compares one figure with its peers, with the physical limit and with its target, where they
apply. The writer fills in when, where and with which versions it ran; the machine is described
without its name, because results are published.
"""

from __future__ import annotations

import datetime as dt
import math
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.machine import describe_machine
from fivefold.errors import ConfigurationError, DataError

_PACKAGES = ("fivefold", "torch", "numpy")
_GIT_TIMEOUT_S = 10.0
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BenchmarkRow(_Form):
    """One figure of a benchmark; None where a thing does not apply.

    Attributes:
        case: The circumstances, such as ``"200 Mbit/s, tau 8"``.
        metric: What was measured.
        unit: Its unit; ``"ratio"`` or ``"%"`` where it has none.
        ours: The median of the repetitions.
        spread: Lowest and highest repetition.
        peers: The same figure of other implementations, by name.
        limit: The physical limit, where it is known.
        target: What was aimed at.
        met: Whether the target was met; given exactly where there is a target.

    Raises:
        ValidationError: A figure is not finite, the median is outside its spread, or ``met`` and
            ``target`` are not given together.
    """

    case: str
    metric: str
    unit: str
    ours: _Finite
    spread: tuple[_Finite, _Finite] | None = None
    peers: dict[str, _Finite] = Field(default_factory=dict)
    limit: _Finite | None = None
    target: _Finite | None = None
    met: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> BenchmarkRow:
        if self.spread is not None and not self.spread[0] <= self.ours <= self.spread[1]:
            message = f"ours={self.ours} is outside its spread {list(self.spread)}"
            raise ValueError(message)
        if (self.target is None) != (self.met is None):
            message = "met is given exactly where there is a target"
            raise ValueError(message)
        return self


class BenchmarkResults(_Form):
    """One run of one benchmark: its rows and what they were measured with.

    Raises:
        ValidationError: A field is missing or two rows have the same case and metric.
    """

    topic: str
    date: str
    commit: str | None
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: tuple[BenchmarkRow, ...]

    @model_validator(mode="after")
    def _distinct(self) -> BenchmarkResults:
        seen = set()
        for row in self.rows:
            if (row.case, row.metric) in seen:
                message = f"two rows have case {row.case!r} and metric {row.metric!r}"
                raise ValueError(message)
            seen.add((row.case, row.metric))
        return self


def median_and_spread(samples: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Reduce repetitions to what a row holds.

    Args:
        samples: One figure per repetition.

    Returns:
        The median, and the lowest and highest.

    Raises:
        DataError: There is no sample, or one is not finite.
    """
    if not samples or not all(map(math.isfinite, samples)):
        raise DataError(
            f"samples must be finite and at least one; got {list(samples)!r}",
            hint="repeat the measurement, and leave out no repetition silently",
        )
    return statistics.median(samples), (min(samples), max(samples))


def write_results(
    path: Path | str,
    *,
    topic: str,
    rows: Sequence[BenchmarkRow],
    versions: Mapping[str, str] | None = None,
    command: str | None = None,
    machine: Mapping[str, str | int] | None = None,
) -> BenchmarkResults:
    """Write a benchmark's rows as JSON and, beside it, as a Markdown table.

    Args:
        path: The JSON file; its folder is made. The table gets the same name with ``.md``.
        topic: The benchmark's name, such as ``"optim/hidden_communication"``.
        rows: What was measured.
        versions: Versions of peers, beside those of Python, fivefold, torch and NumPy.
        command: How to run it again; None takes this process's command line.
        machine: Where it was measured; None is here.

    Returns:
        What was written.

    Raises:
        ConfigurationError: The path does not end in ``.json``, or two rows are the same.
        OSError: A file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ConfigurationError(f"{path} is no .json file", hint="write results/TOPIC.json")
    try:
        results = BenchmarkResults(
            topic=topic,
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            command=_command() if command is None else command,
            machine=describe_machine() if machine is None else dict(machine),
            versions=_versions() | dict(versions or {}),
            rows=tuple(rows),
        )
    except ValidationError as error:
        message = str(error.errors()[0]["msg"])
        raise ConfigurationError(message, hint="give each row a case of its own") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, results.model_dump_json(indent=2) + "\n")
    _replace(path.with_suffix(".md"), render_markdown(results))
    return results


def read_results(path: Path | str) -> BenchmarkResults:
    """Read a results file.

    Args:
        path: The JSON file.

    Returns:
        What it holds.

    Raises:
        DataError: The file is missing, or not of the form that ``write_results`` writes.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", hint="run the benchmark to write it"
        ) from error
    try:
        return BenchmarkResults.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise DataError(
            f"{path} is no results file: {key}: {first['msg']}", hint="run the benchmark again"
        ) from error


def render_markdown(results: BenchmarkResults) -> str:
    """Write results as a Markdown page with one table.

    Args:
        results: What to show.

    Returns:
        The page's text.
    """
    peers = list(dict.fromkeys(name for row in results.rows for name in row.peers))
    header = ["case", "metric", "unit", "ours", "spread", *peers, "limit", "target"]
    lines = [
        f"# {results.topic}",
        "",
        f"{results.date}, commit {results.commit or 'unknown'}: `{results.command}`",
        "",
        f"Machine: {_pairs(results.machine)}. Versions: {_pairs(results.versions)}.",
        "",
        _table_line(header),
        _table_line(["---"] * len(header)),
    ]
    for row in results.rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.4g} to {row.spread[1]:.4g}"
        target = (
            "" if row.target is None else f"{row.target:.4g} ({'met' if row.met else 'not met'})"
        )
        figures = [_figure(row.peers.get(name)) for name in peers]
        cells = [row.case, row.metric, row.unit, _figure(row.ours), spread, *figures]
        lines.append(_table_line([*cells, _figure(row.limit), target]))
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the checkout that the script lies in, ``-dirty`` where files are changed."""
    folder = Path(sys.argv[0]).resolve().parent if sys.argv[0] else Path.cwd()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(
            command,
            cwd=folder if folder.is_dir() else Path.cwd(),
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _command() -> str:
    """The command line of this process, ``python -m`` where it was started so."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    script = Path(sys.argv[0])
    if script.is_absolute() and script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    program = [str(script)] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *program, *sys.argv[1:]])


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
