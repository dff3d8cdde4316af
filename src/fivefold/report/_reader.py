"""Finds and reads the folders that runs leave behind, and reports on them.

A run that still goes on, or was killed, is read as far as it got: files that are not there yet
and a torn last line become notes that the report shows. Damage anywhere else is an error, because
a report over silently dropped lines would be wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fivefold import files
from fivefold.errors import ConfigurationError, DataError
from fivefold.report._graphs import GraphSummary, graph_headline, summarise_graph_runs
from fivefold.report._mixtures import summarise_mixtures
from fivefold.report._prediction import predicted_runs
from fivefold.report._records import (
    SCHEMA_VERSION,
    EndPoint,
    EpochPoint,
    GraphEnd,
    GraphManifest,
    GraphResult,
    GraphRun,
    GraphTrainPoint,
    GraphValidationPoint,
    LinkBytes,
    Manifest,
    Metrics,
    MixturePoint,
    PreparePoint,
    RankTrace,
    Run,
    RunResult,
    Span,
    SyncPoint,
    TauPoint,
    TrainPoint,
    ValidationPoint,
)
from fivefold.report.format import method_colours
from fivefold.report.summary import RunSummary, caveats, headline, summarise


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a report in all its forms (text, HTML, JSON).

    Attributes:
        runs: The runs, baselines first.
        summaries: Their figures, in the same order.
        headline: The finding, in a sentence or two.
        caveats: What a reader must know before believing it.
        graph_runs: The runs of graph neural networks, which have files and figures of their own.
        graph_summaries: Their figures, in the same order.
    """

    runs: tuple[Run, ...]
    summaries: tuple[RunSummary, ...]
    headline: str
    caveats: tuple[str, ...]
    graph_runs: tuple[GraphRun, ...] = ()
    graph_summaries: tuple[GraphSummary, ...] = ()

    def to_json(self) -> str:
        """Return the figures as JSON, for programs."""
        values = {
            "headline": self.headline,
            "caveats": list(self.caveats),
            # pydantic writes what JSON has no word for (nan) as null
            "runs": [json.loads(summary.model_dump_json()) for summary in self.summaries],
        }
        mixtures = [summary.record() for summary in summarise_mixtures(self.runs)]
        if mixtures:
            values["mixtures"] = mixtures
        predicted = [one.record() for one in predicted_runs(self.runs, self.summaries)]
        if predicted:
            values["predicted"] = predicted
        if self.graph_runs:
            values["graph_runs"] = [summary.record() for summary in self.graph_summaries]
        return json.dumps(values, indent=2)


def build_report(paths: Iterable[Path | str]) -> Report:
    """Read runs and compute everything that a report shows.

    Args:
        paths: Run folders, or folders that hold runs at any depth.

    Raises:
        DataError: There is no run, or a file of one is damaged or of an unknown schema.
    """
    folders = find_runs(paths)
    graphs = [folder for folder in folders if is_graph_run(folder)]
    texts = [folder for folder in folders if folder not in graphs]
    runs = sorted(_read_all(texts, read_run), key=_order)
    summaries = summarise(runs)
    graph_runs = _read_all(graphs, _read_graph_run)
    graph_summaries = summarise_graph_runs(graph_runs)
    findings = [headline(summaries)] if runs or not graphs else []
    findings += [graph_headline(graph_summaries)] if graphs else []
    return Report(
        runs=tuple(runs),
        summaries=tuple(summaries),
        headline=" ".join(findings),
        caveats=tuple(caveats(runs, summaries)),
        graph_runs=tuple(graph_runs),
        graph_summaries=tuple(graph_summaries),
    )


def configuration_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List the configuration keys in which runs differ, with each run's value."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = sorted({key for config in flat for key in config})
    rows = [(key, [config.get(key, "") for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            rows += _flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


_MANIFEST = "manifest.json"
_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_HEAD_BYTES = 1000  # in which a file says of what form it is
_FEW_RANKS = 5  # whose timelines are missing are named
_POINTS: dict[str, type[BaseModel]] = {  # by their event in metrics.jsonl
    "train": TrainPoint,
    "validation": ValidationPoint,
    "sync": SyncPoint,
    "tau": TauPoint,
    "moe": MixturePoint,
    "end": EndPoint,
}
_GRAPH_POINTS: dict[str, type[BaseModel]] = {
    "train": GraphTrainPoint,
    "epoch": EpochPoint,
    "validation": GraphValidationPoint,
    "prepare": PreparePoint,
    "end": GraphEnd,
}

_RecordT = TypeVar("_RecordT", bound=BaseModel)
_RunT = TypeVar("_RunT", Run, GraphRun)


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """Find the run folders among the given folders and below them.

    A folder that holds a ``manifest.json`` is a run; the search does not go below a run.
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
    """
    return sorted(_read_all(find_runs(paths), read_run), key=_order)


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
    """
    path = Path(path)
    notes: list[str] = []
    manifest = _read_manifest(path, Manifest)
    config_text = _read_text(path / "config.toml")
    if config_text is None:
        notes.append("config.toml is missing: configuration differences are not shown for this run")
    found = _read_points(path / "metrics.jsonl", _POINTS, notes)
    curves = found["train"] + found["validation"]
    if not curves:
        notes.append("no metrics yet: there is no curve to draw")
    notes += found.pop("resumed")
    end = (found.pop("end") or [None])[-1]
    found["mixtures"] = found.pop("moe")
    ranks = _read_ranks(path / "ranks", world_size=manifest.world_size, notes=notes)
    result = _read_versioned(path / "result.json", RunResult)
    if result is not None and result.steps < max((point.step for point in curves), default=0):
        notes.append(f"result.json is from step {result.steps}; the run went on, so it is not used")
        result = None
    notes += _ending(end, result)
    return Run(
        path=path,
        name=name or path.resolve().name,
        label=manifest.label,
        manifest=manifest,
        config=_tables(config_text or "", path / "config.toml"),
        config_text=config_text or "",
        metrics=Metrics(**{name: tuple(points) for name, points in found.items()}, end=end),
        ranks=ranks,
        result=result,
        notes=tuple(notes),
    )


def is_graph_run(folder: Path) -> bool:
    """Return whether a run's folder is one of ``fivefold gnn train``.

    A manifest that cannot be read is left to the reader of language-model runs, which says so.
    """
    try:
        manifest = files.read_json(folder / _MANIFEST)
    except DataError:
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == "gnn"


def _read_all(folders: Sequence[Path], read: Callable[..., _RunT]) -> list[_RunT]:
    """Read runs in the order given; labels that would be equal get the names appended."""
    names = _unique_names(folders)
    runs = [read(folder, name=name) for folder, name in zip(folders, names, strict=True)]
    labels = Counter(run.label for run in runs)
    return [
        replace(run, label=f"{run.label}, {run.name}") if labels[run.label] > 1 else run
        for run in runs
    ]


def _read_manifest(folder: Path, model: type[_RecordT]) -> _RecordT:
    manifest = _read_versioned(folder / _MANIFEST, model)
    if manifest is None:
        raise DataError(f"{folder} holds no {_MANIFEST}", hint="give the folder of a run")
    return manifest


def _read_graph_run(path: Path, *, name: str) -> GraphRun:
    notes: list[str] = []
    manifest = _read_manifest(path, GraphManifest)
    found = _read_points(path / "metrics.jsonl", _GRAPH_POINTS, notes)
    notes += found.pop("resumed")
    end = (found.pop("end") or [None])[-1]
    result = _read_versioned(path / "result.json", GraphResult)
    if result is not None and (end is None or end.step != result.steps):
        notes.append("result.json is from an earlier end; the run went on, so it is not used")
        result = None
    if end is None:
        notes.append("no end: the run is still going on, or it was killed")
    return GraphRun(
        path=path,
        name=name,
        label=manifest.label,
        manifest=manifest,
        config_text=_read_text(path / "config.toml") or "",
        plan_text=_read_text(path / "plan.txt") or "",
        train=tuple(found["train"]),
        epochs=tuple(found["epoch"]),
        validation=tuple(found["validation"]),
        prepare=_prepared(found["prepare"]),
        end=end,
        result=result,
        notes=tuple(notes),
    )


def _prepared(points: list[PreparePoint]) -> PreparePoint:
    """Return the work of the first time that took any, and the newest plan."""
    if not points:
        return PreparePoint()
    worked = max(points, key=lambda point: sum(point.seconds.values()))
    return PreparePoint(seconds=worked.seconds, plan=points[-1].plan)


def _read_points(
    path: Path, models: dict[str, type[BaseModel]], notes: list[str]
) -> dict[str, list[Any]]:
    """Read the lines of a log by their event, and notes on resuming; others are ignored."""
    found: dict[str, list[Any]] = {event: [] for event in models}
    resumed: list[str] = []
    for where, record in _read_lines(path, notes):
        event = record["event"]
        if event in models:
            found[event].append(_validated(record, models[event], where=where))
        if event == "resume":
            found["end"].clear()  # whatever ended before, the run went on
            resumed.append(str(record.get("step")))
    steps = ", ".join(resumed)
    return found | {"resumed": [f"resumed from a checkpoint at step {steps}"] if steps else []}


def _tables(text: str, path: Path) -> dict[str, Any]:
    try:
        return files.parse_toml(text, where=str(path))
    except ConfigurationError as error:  # the run wrote it: the file is damaged
        raise DataError(error.message, hint=error.hint) from None


def _ending(end: EndPoint | None, result: RunResult | None) -> list[str]:
    if end is not None and end.reason == "stopped":
        return [f"the run was stopped at step {end.step}, before its end"]
    if result is not None:
        return []
    if end is not None:
        return ["the run finished, but result.json is missing: fewer figures are known"]
    return ["no result: the run is still going on, or it was killed"]


def _page_of(folder: Path, names: set[str]) -> str | None:
    """Return how to get a page of what other commands wrote; None where it is not known."""
    simulated = "simulate JOBS", "the page of its plan"
    found = simulated if "decisions.jsonl" in names else None
    if names & {"mesh.json", "megatron_flags.txt", "fivefold_train.toml"}:
        found = "plan JOB", "the page of its plans"
    for name in sorted(name for name in names if name.endswith(".json")):
        if found is not None:
            break
        try:
            with (folder / name).open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            continue
        if b'"fivefold.codesign' in head:
            found = simulated
        elif b'"fivefold.schedule.' in head:
            found = "collectives synthesize", "the page of an algorithm"
    if found is None:
        return None
    command = f"'fivefold {found[0]} ... --report FILE.html'"
    return f"this command reads runs of training; {command} makes {found[1]}"


def _runs_below(path: Path) -> list[Path]:
    runs = []
    for folder, children, names in os.walk(path):
        if _MANIFEST in names:
            runs.append(Path(folder))
            children.clear()
        children.sort()
    return sorted(runs)


def _unique_names(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts[1:] or ("run",) for folder in folders]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _order(run: Run) -> tuple[int, bool, str]:
    method, order = run.manifest.method, list(method_colours())
    place = order.index(method) if method in order else len(order)
    return place, method == "ddp" and not run.is_plain_ddp, run.name


def _read_ranks(folder: Path, *, world_size: int, notes: list[str]) -> tuple[RankTrace, ...]:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    numbered = {int(match[1]): file for file in files if (match := _RANK_FILE.fullmatch(file.name))}
    missing = world_size - sum(rank < world_size for rank in numbered)
    if missing:
        absent = (rank for rank in range(world_size) if rank not in numbered)
        first = ", ".join(map(str, itertools.islice(absent, _FEW_RANKS)))
        more = missing - _FEW_RANKS
        notes.append(f"no timeline of rank {first}{f' and {more:,} more' if more > 0 else ''}")
    return tuple(_read_rank(rank, numbered[rank], notes) for rank in sorted(numbered))


def _read_rank(rank: int, path: Path, notes: list[str]) -> RankTrace:
    offset_s: float | None = None
    spans: list[Span] = []
    left_out = dropped = 0
    link_bytes: LinkBytes | None = None
    for where, record in _read_lines(path, notes):
        try:
            match record["event"]:
                case "clock":
                    offset_s = float(record["unix_s"]) - float(record["perf_s"])
                case "span" if offset_s is not None and record["end_s"] >= record["start_s"]:
                    spans.append(_span(record, offset_s))
                case "span":
                    left_out += 1
                case "rank_end":
                    counters = record.get("link_bytes")
                    link_bytes = _validated(counters, LinkBytes, where=where) if counters else None
                    dropped = int(record.get("spans_dropped", 0))
                case _:
                    continue
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise _damaged(where, f"does not fit: {error!r}") from error
    if left_out:
        notes.append(
            f"rank {rank}: {left_out} spans left out (before a clock line, or of negative length)"
        )
    if dropped:
        notes.append(
            f"rank {rank}: the timeline and what is measured from it end {dropped:,} spans early"
        )
    return RankTrace(rank, tuple(spans), link_bytes)


def _span(record: dict[str, Any], offset_s: float) -> Span:
    lane = str(record["lane"])
    given = ((key, record.get(key)) for key in ("round", "fragment", "sent_bytes"))
    return Span(
        lane="in_flight" if lane == "flight" else lane,  # the word of older runs
        name=str(record.get("name", lane)),
        start_s=offset_s + float(record["start_s"]),
        end_s=offset_s + float(record["end_s"]),
        **{key: int(value) for key, value in given if value is not None},
    )


def _read_versioned(path: Path, model: type[_RecordT]) -> _RecordT | None:
    """Read a JSON file that names its schema; None where there is none."""
    text = _read_text(path)
    if text is None:
        return None
    values = files.parse_json(text, where=str(path), finite=False)  # runs diverge
    version = values.get("schema") if isinstance(values, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema {version}; this fivefold reads schema {SCHEMA_VERSION}",
            hint="use the fivefold that wrote the run, or a newer one",
        )
    return _validated(values, model, where=str(path))


def _read_text(path: Path) -> str | None:
    """Read a text file; None where there is none."""
    return files.read_text(path) if path.exists() else None


def _damaged(path: Path | str, problem: str) -> DataError:
    """Return the error for a file that is not what it should be."""
    return DataError(
        f"{path} {problem}", hint="the file is damaged: copy the run again, or leave it out"
    )


def _validated(values: object, model: type[_RecordT], *, where: str) -> _RecordT:
    """Check values against a record."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise _damaged(where, f"does not fit: {key}: {first['msg']}") from error


def _read_lines(path: Path, notes: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read a JSON-lines file as (place, object) pairs; a torn last line becomes a note."""
    if not path.exists():
        return []
    lines = files.read_bytes(path).split(b"\n")
    records: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = files.parse_json(line, where=f"{path} line {number}", finite=False)
        except DataError as error:
            if number == len(lines):  # no newline after it: the writer was killed in the middle
                notes.append(f"{path.name}: the last line is torn and was left out")
                break
            raise _damaged(path, f"line {number} is not JSON") from error
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            raise _damaged(path, f"line {number} is not an event")
        records.append((f"{path} line {number}", record))
    return records
