"""The page of an ablation: bars with intervals, and all figures."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.codesign._ablation import AblationRow
from fivefold.codesign._page_words import SIMULATED, change
from fivefold.errors import ConfigurationError
from fivefold.report.page import DataTable, Page, PageSection, RangeChart, RangeRow


def ablation_page(rows: Sequence[AblationRow], *, cluster: str, command: str = "") -> Page:
    """Return the page of an ablation: what each combination of co-designs buys.

    Args:
        rows: What ``ablate`` found.
        cluster: Name of the cluster.
        command: How to make it again.

    Returns:
        The page, for ``fivefold.report.write_html``.

    Raises:
        ConfigurationError: There is no row.

    Examples:
        >>> row = AblationRow(
        ...     label="V", to_null=0.9, to_null_interval=(0.8, 1.0), to_best=1.0,
        ...     to_best_interval=(0.9, 1.1), tail_to_null=0.95, jobs_worse=0,
        ...     jobs_worse_than_best=1, jobs=8, seeds=2,
        ... )
        >>> ablation_page([row], cluster="fat-tree").tiles[0]
        ('-10.0 %', 'mean completion time', 'V against B0, today')
    """
    if not rows:
        message = "an ablation without rows has no page"
        raise ConfigurationError(message, hint="give what ablate() returned")
    combined = [row for row in rows if row.label != "B1"]
    best = min(combined or rows, key=lambda row: row.to_null)
    alone = next((row for row in rows if row.label == "B1"), None)
    finding = (
        f"With {best.label} jobs complete in {best.to_null:.3f} of the time that today's "
        f"uncoordinated stack needs (95 % interval {_interval(best.to_null_interval)}), and in "
        f"{best.to_best:.3f} of what every layer at its best alone needs."
    )
    marks = [("B0", 1.0)] if alone is None else [("B0", 1.0), ("B1", alone.to_null)]
    bars = RangeChart(rows=_ratio_rows(rows, best=False), marks=_apart(marks))
    against = RangeChart(rows=_ratio_rows(rows, best=True), marks=(("B1", 1.0),))
    size = f"{rows[0].seeds} seed{'s' if rows[0].seeds != 1 else ''}, {rows[0].jobs} jobs"
    return Page(
        title=f"what each co-design buys on {cluster}",
        finding=finding,
        tiles=(
            (change(best.to_null), "mean completion time", f"{best.label} against B0, today"),
            (change(best.to_best), "against B1", "every layer at its best alone"),
            (change(best.tail_to_null), "95th percentile", f"{best.label} against B0"),
            (f"{best.jobs_worse} of {best.jobs}", "jobs worse off", f"{best.label} against B0"),
        ),
        caveats=(SIMULATED,),
        sections=(
            PageSection(
                heading="Mean completion time over that of today's stack (B0)",
                how=f"{size}. Below 1 is faster. Bars are means over seeds, whiskers 95 % "
                "bootstrap intervals over seeds. V: layers of a job talk; H: jobs talk; II: links "
                "inside hosts and the fabric are one network; HN: switches may sum.",
                parts=(bars,),
            ),
            PageSection(
                heading="The same over every layer at its best alone (B1)", parts=(against,)
            ),
            PageSection(heading="All figures", parts=(_ablation_table(rows),)),
        ),
        command=command,
    )


def _apart(marks: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Names of lines that would lie on one another share one."""
    if len(marks) == 2 and abs(marks[0][1] - marks[1][1]) < 0.06:
        return ((marks[0][0], marks[0][1]), ("", marks[1][1]))
    return tuple(marks)


def _ratio_rows(rows: Sequence[AblationRow], *, best: bool) -> tuple[RangeRow, ...]:
    shown = [row for row in rows if not (best and row.label == "B1")]
    values = [(r.to_best, *r.to_best_interval) if best else (r.to_null, *r.to_null_interval)
              for r in shown]  # fmt: skip
    return tuple(
        RangeRow(label=row.label, value=value, low=low, high=high, text=f"{value:.3f}")
        for row, (value, low, high) in zip(shown, values, strict=True)
    )


def _ablation_table(rows: Sequence[AblationRow]) -> DataTable:
    columns = (
        ("co-designs", ""), ("to B0", "Mean over seeds of the ratio of mean completion times"),
        ("95 % interval", "Bootstrap over seeds"), ("to B1", ""), ("95 % interval", ""),
        ("tail to B0", "Ratio of the 95th percentiles"), ("worse than B0", "Jobs that end later"),
        ("worse than B1", ""),
    )  # fmt: skip
    cells = tuple(
        (
            row.label, f"{row.to_null:.3f}", _interval(row.to_null_interval),
            f"{row.to_best:.3f}", _interval(row.to_best_interval), f"{row.tail_to_null:.3f}",
            f"{row.jobs_worse} of {row.jobs}", f"{row.jobs_worse_than_best} of {row.jobs}",
        )
        for row in rows
    )  # fmt: skip
    return DataTable(columns=columns, rows=cells)


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}"
