"""Finds run folders and reads them.

A run that still goes on, or was killed, is read as far as it got: files that are not there yet
and a torn last line become notes that the report shows. Damage anywhere else is an error, because
a report over silently dropped lines would be wrong. This module computes nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fivefold.errors import ConfigurationError, DataError
from fivefold.files import parse_toml
from fivefold.report._records import (
    CheckpointPoint,
    EndPoint,
    LinkBytes,
    Manifest,
    Metrics,
    MixturePoint,
    RankTrace,
    ResumePoint,
    Run,
    RunResult,
    Span,
    SyncPoint,
    TauPoint,
    TrainPoint,
    ValidationPoint,
)
from fivefold.report._run_files import (
    damaged,
    read_lines,
    read_text,
    read_versioned,
    validated,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MANIFEST = "manifest.json"
_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_METHOD_ORDER = (
    "none",
    "ddp",
    "local_sgd",
    "slowmo",
    "diloco",
    "co2",
    "delay_corrected",
    "overlap_local_sgd",
    "eager_diloco",
    "streaming_diloco",
)
_HEAD_BYTES = 1000  # in which a file says of what form it is
_POINTS: dict[str, type[BaseModel]] = {  # by their event in metrics.jsonl
    "train": TrainPoint,
    "validation": ValidationPoint,
    "checkpoint": CheckpointPoint,
    "resume": ResumePoint,
    "sync": SyncPoint,
    "tau": TauPoint,
    "moe": MixturePoint,
}


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """Find the run folders among the given folders and below them.

    A folder that holds a ``manifest.json`` is a run; the search does not go below a run.

    Args:
        paths: Run folders, or folders that hold runs at any depth.

    Returns:
        The run folders, each once, in the order given and by name within one folder.

    Raises:
        DataError: A path does not exist, or neither it nor anything below it is a run.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "co2").mkdir()
        >>> _ = (folder / "co2" / "manifest.json").write_text("{}")
        >>> [run.name for run in find_runs([folder])]
        ['co2']
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            problem = "is not a folder" if path.exists() else "does not exist"
            hint = _page_of(path.parent, {path.name}) or "give the folder of a run, or one above it"
            raise DataError(f"{path} {problem}", hint=hint)
        runs = _runs_below(path)
        if not runs:
            default = f"a run's folder holds {_MANIFEST}; 'fivefold train' and 'make demo' write it"
            names = {entry.name for entry in path.iterdir()}
            raise DataError(f"no run found in {path}", hint=_page_of(path, names) or default)
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Iterable[Path | str]) -> list[Run]:
    """Read all runs among the given folders and below them, baselines first.

    Args:
        paths: Run folders, or folders that hold runs.

    Returns:
        The runs, ordered by method (compute only, DDP, then the local-update family), then by
        name. Names are the folder names, made longer where two would be equal; labels that
        would be equal get the name appended.

    Raises:
        DataError: There is no run, or a file of one is damaged or of an unknown schema.

    Examples:
        >>> read_runs(["/nonexistent"])
        Traceback (most recent call last):
        ...
        fivefold.errors.DataError: /nonexistent does not exist; give the folder of a run, or ...
    """
    folders = find_runs(paths)
    runs = [
        read_run(folder, name=name)
        for folder, name in zip(folders, unique_names(folders), strict=True)
    ]
    labels = Counter(run.label for run in runs)
    distinct = [
        replace(run, label=f"{run.label}, {run.name}") if labels[run.label] > 1 else run
        for run in runs
    ]
    return sorted(distinct, key=_run_order)


def read_run(path: Path | str, *, name: str | None = None) -> Run:
    """Read one run's folder.

    Args:
        path: The folder that holds ``manifest.json``.
        name: Name of the run in the report; None takes the folder's name.

    Returns:
        The run. Its ``notes`` say what was missing or torn.

    Raises:
        DataError: The manifest is missing, a file is damaged other than by a torn last line, or
            its schema is unknown.

    Examples:
        >>> import json, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> manifest = {"schema": 1, "fivefold": "0.1.0", "method": "co2", "label": "CO2"}
        >>> _ = (folder / "manifest.json").write_text(json.dumps({**manifest, "world_size": 2}))
        >>> run = read_run(folder)
        >>> run.status, run.notes[-1]
        ('unfinished', 'no result: the run is still going on, or it was killed')
    """
    path = Path(path)
    notes: list[str] = []
    manifest = read_versioned(path / _MANIFEST, Manifest)
    if manifest is None:
        raise DataError(f"{path} holds no {_MANIFEST}", hint="give the folder of a run")
    config_text = read_text(path / "config.toml")
    if config_text is None:
        notes.append("config.toml is missing: configuration differences are not shown for this run")
    metrics = _read_metrics(path / "metrics.jsonl", notes)
    ranks = _read_ranks(path / "ranks", world_size=manifest.world_size, notes=notes)
    result = read_versioned(path / "result.json", RunResult)
    if result is not None and result.steps < _last_step(metrics):
        notes.append(f"result.json is of step {result.steps}; the run went on and it is not used")
        result = None
    notes += _ending(metrics.end, result)
    return Run(
        path=path,
        name=name or path.resolve().name,
        label=manifest.label,
        manifest=manifest,
        config=_tables(config_text or "", path / "config.toml"),
        config_text=config_text or "",
        metrics=metrics,
        ranks=ranks,
        result=result,
        notes=tuple(notes),
    )


def _tables(text: str, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(text, where=str(path))
    except ConfigurationError as error:  # the run wrote it: the file is damaged
        raise DataError(error.message, hint=error.hint) from None


def _last_step(metrics: Metrics) -> int:
    steps = [point.step for point in metrics.train] + [point.step for point in metrics.validation]
    return max(steps, default=0)


def _ending(end: EndPoint | None, result: RunResult | None) -> list[str]:
    if end is not None and end.reason == "stopped":
        return [f"the run was stopped at step {end.step}, before its end"]
    if result is not None:
        return []
    if end is not None:
        return ["the run finished, but result.json is missing: fewer figures are known"]
    return ["no result: the run is still going on, or it was killed"]


def _page_of(folder: Path, names: set[str]) -> str | None:
    """How to get a page of what other commands wrote; None where it is not known what it is."""
    plan = "the page of its plan"
    if names & {"mesh.json", "megatron_flags.txt", "fivefold_train.toml"}:
        return _elsewhere("fivefold plan JOB ...", "the page of its plans")
    if "decisions.jsonl" in names:
        return _elsewhere("fivefold simulate JOBS ...", plan)
    for name in sorted(name for name in names if name.endswith(".json")):
        try:
            with (folder / name).open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            continue
        if b'"fivefold.codesign' in head:
            return _elsewhere("fivefold simulate JOBS ...", plan)
        if b'"fivefold.schedule.' in head:
            return _elsewhere("fivefold collectives synthesize ...", "the page of an algorithm")
    return None


def _elsewhere(command: str, page: str) -> str:
    return f"this command reads runs of training; '{command} --report FILE.html' makes {page}"


def _runs_below(path: Path) -> list[Path]:
    runs = []
    for folder, children, files in os.walk(path):
        if _MANIFEST in files:
            runs.append(Path(folder))
            children.clear()
        children.sort()
    return sorted(runs)


def unique_names(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts[1:] or ("run",) for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _run_order(run: Run) -> tuple[int, bool, str]:
    method = run.manifest.method
    known = method in _METHOD_ORDER
    place = _METHOD_ORDER.index(method) if known else len(_METHOD_ORDER)
    return place, method == "ddp" and not run.is_plain_ddp, run.name


def _read_metrics(path: Path, notes: list[str]) -> Metrics:
    found: dict[str, list[Any]] = {event: [] for event in _POINTS}
    end: EndPoint | None = None
    for where, record in read_lines(path, notes):
        event = record["event"]
        if event == "end":
            end = validated(record, EndPoint, where=where)
        elif event in _POINTS:  # a newer trainer may log more
            found[event].append(validated(record, _POINTS[event], where=where))
        if event == "resume":
            end = None  # whatever ended before, the run went on
    metrics = Metrics(
        train=tuple(found["train"]),
        validation=tuple(found["validation"]),
        checkpoints=tuple(found["checkpoint"]),
        resumes=tuple(found["resume"]),
        sync=tuple(found["sync"]),
        tau=tuple(found["tau"]),
        mixtures=tuple(found["moe"]),
        end=end,
    )
    if not metrics.train and not metrics.validation:
        notes.append("no metrics yet: there is no curve to draw")
    if metrics.resumes:
        steps = ", ".join(str(point.step) for point in metrics.resumes)
        notes.append(f"resumed from a checkpoint at step {steps}")
    return metrics


def _read_ranks(folder: Path, *, world_size: int, notes: list[str]) -> tuple[RankTrace, ...]:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    numbered = {int(match[1]): file for file in files if (match := _RANK_FILE.fullmatch(file.name))}
    missing = sorted(set(range(world_size)) - set(numbered))
    if missing:
        ranks = ", ".join(map(str, missing))
        notes.append(f"no timeline of rank {ranks}")
    return tuple(_read_rank(rank, numbered[rank], notes) for rank in sorted(numbered))


def _read_rank(rank: int, path: Path, notes: list[str]) -> RankTrace:
    offset_s: float | None = None
    spans: list[Span] = []
    left_out = dropped = 0
    link_bytes: LinkBytes | None = None
    for where, record in read_lines(path, notes):
        try:
            match record["event"]:
                case "clock":
                    offset_s = float(record["unix_s"]) - float(record["perf_s"])
                case "span" if offset_s is not None and record["end_s"] >= record["start_s"]:
                    spans.append(_span(record, offset_s))
                case "span":
                    left_out += 1
                case "rank_end":
                    link_bytes, dropped = _rank_end(record, where)
                case _:
                    continue
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise damaged(where, f"does not fit: {error!r}") from error
    if left_out:
        notes.append(
            f"rank {rank}: {left_out} spans left out (before a clock line, or of negative length)"
        )
    if dropped:
        notes.append(
            f"rank {rank}: the timeline and what is measured from it end {dropped:,} spans early"
        )
    return RankTrace(rank, tuple(spans), link_bytes)


def _rank_end(record: dict[str, Any], where: str) -> tuple[LinkBytes | None, int]:
    """The link's counters, and how many spans the rank had no room for."""
    counters = record.get("link_bytes")
    link = validated(counters, LinkBytes, where=where) if counters else None
    return link, int(record.get("spans_dropped", 0))


def _span(record: dict[str, Any], offset_s: float) -> Span:
    return Span(
        lane=str(record["lane"]),
        name=str(record.get("name", record["lane"])),
        start_s=offset_s + float(record["start_s"]),
        end_s=offset_s + float(record["end_s"]),
        round=_number(record, "round"),
        fragment=_number(record, "fragment"),
        sent_bytes=_number(record, "sent_bytes"),
    )


def _number(record: dict[str, Any], key: str) -> int | None:
    value = record.get(key)
    return None if value is None else int(value)
