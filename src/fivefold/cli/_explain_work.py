"""The work of ``fivefold explain``."""

from __future__ import annotations

from pathlib import Path

from fivefold.cli._options import ArgumentError, topology_of
from fivefold.cli._plan_page import PARTS, breakdown
from fivefold.codesign import ClusterPlan, explain_jobs, explain_plan, explain_run, load_jobs
from fivefold.codesign.explain import KINDS, LAYERS, Change, Explanation
from fivefold.files import read_bytes, read_toml
from fivefold.report import print_page
from fivefold.report.page import DataTable, Page, PageSection, TextBlock
from fivefold.strategy import load_cluster, load_job
from fivefold.units import format_duration_s

_SHOWN = 12


def explanation_of(what: Path, cluster: str | None, plan: Path | None) -> Explanation:
    if what.is_dir():
        if cluster is not None or plan is not None:
            message = (
                f"--cluster and --plan are for jobs; {what} is a run, and explained as measured"
            )
            raise ArgumentError(message, hint="leave them out")
        return explain_run(what)
    if cluster is None:
        raise ArgumentError(
            f"missing option '--cluster': where does the job {what} run?",
            hint="give --cluster h100-nemo, a TOML file, or for several jobs a network",
        )
    tables = read_toml(what)
    if "jobs" not in tables:
        if plan is not None:
            message = f"--plan is for several jobs; {what} describes one"
            raise ArgumentError(message, hint="write its [plan] into the job file")
        where = load_cluster(cluster)
        return explain_plan(load_job(what, cluster=where), where)
    topology = topology_of(cluster)
    planned = None
    if plan is not None:
        text = read_bytes(plan, what="plan").decode(errors="replace")
        planned = ClusterPlan.from_json(text)
    return explain_jobs(topology, load_jobs(what, topology), plan=planned)


def show_explanation(found: Explanation) -> None:
    advice = [one for one in found.changes if one.kind in {"setting", "convergence"}]
    advice = [one for one in advice if one.saves_s > 0][:_SHOWN]
    risks = [one for one in found.changes if one.kind == "risk"]
    heading = "What to change, best first (each alone)"
    lines = [_line(found, one) for one in [*advice, *risks]]
    if not advice:
        heading = "What to change"
        lines.insert(0, "no setting is better than this one")
    lines += [f"note: {note}" for note in found.notes]
    names = PARTS | {"loading_s": "waits for data"}
    parts_s = {label: found.parts_s.get(key, 0.0) for key, label in names.items()}
    sections = (
        PageSection(
            heading="Where the time goes", parts=(breakdown(parts_s, found.seconds, "part"),)
        ),
        PageSection(heading="The best that each layer could do", parts=(_layers(found),)),
        PageSection(heading=heading, parts=tuple(TextBlock(text=line) for line in lines)),
    )
    finding = f"{found.subject}\n{_verdict(found)}"
    print_page(Page(title=found.subject, finding=finding, sections=sections))


def _verdict(found: Explanation) -> str:
    time = format_duration_s(found.seconds)
    best = found.best_of(found.limit) if found.limit != "compute" else None
    if best is None:
        share = found.parts_s.get("compute_s", 0.0) / found.seconds
        return (
            f"{time} {_article(found)}; limit: compute ({share:.0%} of it), none of the five layers"
        )
    number = LAYERS.index(found.limit) + 1
    return (
        f"{time} {_article(found)}; limit: {found.limit} (layer {number}): {best.action} "
        f"would make it {format_duration_s(best.seconds)} ({_change(found, best)})"
    )


def _article(found: Explanation) -> str:
    return {"iteration": "an iteration", "step": "a step"}.get(found.what, found.what)


def _line(found: Explanation, one: Change) -> str:
    kind = f" ({KINDS[one.kind]})" if one.kind != "setting" else ""
    return f"{_change(found, one)}  {one.action}: {format_duration_s(one.seconds)}{kind}"


def _change(found: Explanation, one: Change) -> str:
    return f"{100 * (one.seconds / found.seconds - 1):+.1f} %"


def _layers(found: Explanation) -> DataTable:
    rows = []
    for number, layer in enumerate((*LAYERS, "compute"), start=1):
        best = found.best_of(layer)
        name = f"{number} {layer}" if layer in LAYERS else f"  {layer}"
        cells = ("nothing to gain", "", "")
        if best is not None:
            action = f"{best.action} ({KINDS[best.kind]})"
            cells = (action, format_duration_s(best.seconds), _change(found, best))
        rows.append((name, *cells))
    names = ("layer", "change", found.what, "change of it")
    return DataTable.of(names, rows, text_columns=(1,))
