"""Reads the folders that ``fivefold gnn train`` leaves behind; computes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fivefold.errors import DataError
from fivefold.files import read_json
from fivefold.report._gnn_records import (
    EpochPoint,
    GraphEnd,
    GraphManifest,
    GraphResult,
    GraphRun,
    GraphTrainPoint,
    GraphValidationPoint,
    PreparePoint,
)
from fivefold.report._run_files import read_lines, read_text, read_versioned, validated
from fivefold.report._runs import unique_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic import BaseModel

_MANIFEST = "manifest.json"
_POINTS: dict[str, type[BaseModel]] = {
    "train": GraphTrainPoint,
    "epoch": EpochPoint,
    "validation": GraphValidationPoint,
    "prepare": PreparePoint,
    "end": GraphEnd,
}


def is_graph_run(folder: Path) -> bool:
    """Whether a run's folder is one of ``fivefold gnn train``.

    A manifest that cannot be read is left to the reader of language-model runs, which says so.
    """
    try:
        manifest = read_json(folder / _MANIFEST)
    except DataError:
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == "gnn"


def read_graph_runs(folders: Sequence[Path]) -> list[GraphRun]:
    """Read runs, in the order given; labels that would be equal get the name appended.

    Raises:
        DataError: A file is damaged or of an unknown schema.
    """
    if not folders:
        return []
    names = unique_names(folders)
    runs = [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    labels = Counter(run.label for run in runs)
    return [
        replace(run, label=f"{run.label}, {run.name}") if labels[run.label] > 1 else run
        for run in runs
    ]


def _read(path: Path, name: str) -> GraphRun:
    notes: list[str] = []
    manifest = read_versioned(path / _MANIFEST, GraphManifest)
    if manifest is None:
        raise DataError(f"{path} holds no {_MANIFEST}", hint="give the folder of a run")
    found = _read_points(path / "metrics.jsonl", notes)
    ends, result = found["end"], read_versioned(path / "result.json", GraphResult)
    end = ends[-1] if ends else None
    if result is not None and (end is None or end.step != result.steps):
        notes.append("result.json is of an earlier end; the run went on and it is not used")
        result = None
    if end is None:
        notes.append("no end: the run is still going on, or it was killed")
    return GraphRun(
        path=path,
        name=name,
        label=manifest.label,
        manifest=manifest,
        config_text=read_text(path / "config.toml") or "",
        plan_text=read_text(path / "plan.txt") or "",
        train=tuple(found["train"]),
        epochs=tuple(found["epoch"]),
        validation=tuple(found["validation"]),
        prepare=_prepared(found["prepare"]),
        end=end,
        result=result,
        notes=tuple(notes),
    )


def _read_points(path: Path, notes: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {event: [] for event in _POINTS}
    resumed = []
    for where, record in read_lines(path, notes):
        event = record["event"]
        if event in _POINTS:  # a newer trainer may log more
            found[event].append(validated(record, _POINTS[event], where=where))
        if event == "resume":
            found["end"].clear()  # whatever ended before, the run went on
            resumed.append(str(record.get("step")))
    if resumed:
        notes.append(f"resumed from a checkpoint at step {', '.join(resumed)}")
    return found


def _prepared(points: list[PreparePoint]) -> PreparePoint:
    """The work of the first time that took any, and the newest plan."""
    if not points:
        return PreparePoint()
    worked = max(points, key=lambda point: sum(point.seconds.values()))
    return PreparePoint(seconds=worked.seconds, plan=points[-1].plan)
