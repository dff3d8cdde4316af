"""What came out, for people: bars of an ablation, and a timeline for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.codesign._ablation import AblationRow
from fivefold.codesign._compile import Outcome
from fivefold.errors import DataError, UnsupportedError


def timeline_of(outcome: Outcome) -> dict[str, Any]:
    """Return the last iteration of every job as a Chrome trace, which Perfetto opens.

    One process per job, a thread for compute and one for each kind of flow.

    Args:
        outcome: A simulation.

    Returns:
        The trace, ready for ``json.dump``.

    Raises:
        DataError: The outcome holds no simulation.

    Examples:
        >>> timeline_of(Outcome({}, {}, None))
        Traceback (most recent call last):
        fivefold.errors.DataError: this outcome holds no simulation
    """
    if outcome.result is None:
        message = "this outcome holds no simulation"
        raise DataError(message)
    events: list[dict[str, Any]] = []
    jobs = {job: place for place, job in enumerate(outcome.completion_s)}
    for job, place in jobs.items():
        events.append({"ph": "M", "pid": place, "name": "process_name", "args": {"name": job}})
        for thread, name in enumerate(("compute", "network")):
            label = {"name": name}
            events.append(
                {"ph": "M", "pid": place, "tid": thread, "name": "thread_name", "args": label}
            )
    shown: set[tuple[Any, ...]] = set()
    for span in outcome.result.timeline():
        parts = span.name if isinstance(span.name, tuple) else (span.name,)
        length_s = span.finish_s - span.start_s
        if parts[0] not in jobs or not length_s > 0:
            continue
        name = str(parts[1][0] if isinstance(parts[1], tuple) else parts[1])
        # Flows of one step go side by side: one bar stands for all that begin and end together.
        key = (parts[0], name, span.kind, span.start_s, span.finish_s)
        if key in shown:
            continue
        shown.add(key)
        events.append(
            {
                "name": name,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": length_s * 1e6,
                "pid": jobs[parts[0]],
                "tid": int(span.kind != "compute"),
                "args": {"id": str(span.name)},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw_ablation(rows: Sequence[AblationRow], path: Path | str, *, title: str = "") -> None:
    """Bars of mean completion time against B0, with intervals and B1 as a line.

    Args:
        rows: What ``ablate`` found.
        path: Picture to write.
        title: Heading.

    Raises:
        UnsupportedError: matplotlib is not installed.

    Examples:
        >>> draw_ablation.__name__
        'draw_ablation'
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra
    except ImportError as error:  # pragma: no cover - the development environment has it
        message = "matplotlib is not installed, and pictures are drawn with it"
        raise UnsupportedError(message, hint="pip install 'fivefold[network]'") from error
    shown = [row for row in rows if row.label != "B1"]
    figure = Figure(figsize=(8, 0.34 * len(shown) + 1.3), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(shown))
    values = np.array([row.to_null for row in shown])
    ends = np.array([row.to_null_interval for row in shown])
    spread = np.abs(ends.T - values)
    axes.barh(places, values, xerr=spread, color="#4c78a8", ecolor="#333333", height=0.7)
    best = next((row for row in rows if row.label == "B1"), None)
    if best is not None:
        axes.axvline(best.to_null, color="#e45756", linewidth=1.5)
        axes.text(best.to_null, -0.9, " B1", color="#e45756", va="bottom", fontsize=9)
    axes.axvline(1.0, color="#888888", linewidth=1.0, linestyle=":")
    axes.set_yticks(places, [row.label for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.05, float(ends.max()) * 1.02))
    axes.set_xlabel("mean completion time / B0 (simulated)")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
