"""The work of ``fivefold simulate`` and ``fivefold ablate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from fivefold.cli._options import ArgumentError
from fivefold.codesign import CoDesignResult, CoDesigns, JobSpec, chakra_traces, msccl_programs
from fivefold.errors import InfeasibleError, UnsupportedError
from fivefold.network.topology import Topology
from fivefold.report import write_html
from fivefold.report.format import typed_command
from fivefold.report.page import Page
from fivefold.runs import write_text

_OVERLAP = 2  # iterations by which a job may end later than in its table: they are whole there


def say_shared_ranks(jobs: Sequence[JobSpec]) -> None:
    """Tell which jobs name the same ranks: their compute is planned as if it ran side by side."""
    for place, job in enumerate(jobs):
        for other in jobs[place + 1 :]:
            if both := sorted(set(job.ranks) & set(other.ranks)):
                several = len(both) > 1
                typer.echo(
                    f"note: {job.job_id} and {other.job_id} share {len(both)} "
                    f"rank{'s' if several else ''} ({both[0]}{', ...' if several else ''}): only "
                    "the network is shared in the plan, their compute runs side by side",
                    err=True,
                )


def say_overlaps(jobs: Sequence[JobSpec], found: CoDesignResult) -> None:
    """Tell how many jobs of a table still run when others get their ranks."""
    free_s: dict[int, float] = {}
    late = 0
    for job in sorted(jobs, key=lambda one: one.arrival_s):
        busy_s = max((free_s.get(rank, 0.0) for rank in job.ranks), default=0.0)
        late += busy_s > job.arrival_s + _OVERLAP * found.baseline_outcome.iteration_s[job.job_id]
        end_s = job.arrival_s + found.baseline_outcome.completion_s[job.job_id]
        free_s |= {rank: max(end_s, free_s.get(rank, 0.0)) for rank in job.ranks}
    if late:
        typer.echo(
            f"note: {late} of {len(jobs)} jobs start before those end that had their ranks in the "
            "table: the cluster is slower than the table's, and only the network is shared",
            err=True,
        )


def flags_of(text: str) -> CoDesigns:
    """Read co-designs as the command line spells them."""
    if text in {"all", "none"}:
        return CoDesigns.all() if text == "all" else CoDesigns.none()
    names = {"V": "vertical", "H": "horizontal", "II": "intra_inter", "HN": "host_net"}
    parts = [part.strip().upper() for part in text.split("+")]
    unknown = [part for part in parts if part not in names]
    if unknown:
        raise ArgumentError(
            f"there is no co-design {unknown[0]!r}", hint="write V+H+II+HN or a part of it"
        )
    return CoDesigns(**{names[part]: True for part in parts})


def write_page(page: Page, path: Path) -> None:
    """Write the page of what the command line asked for, and say where it is."""
    page = replace(page, command=typed_command(sys.argv))
    typer.echo(f"report: {write_html(page, path)}", err=True)


def record_of_plan(jobs: Sequence[JobSpec], found: CoDesignResult) -> dict[str, Any]:
    measures = {
        "completion_s": found.outcome.completion_s,
        "baseline_completion_s": found.baseline_outcome.completion_s,
        "iteration_s": found.outcome.iteration_s,
        "baseline_iteration_s": found.baseline_outcome.iteration_s,
    }
    return {
        "jobs": {
            job.job_id: {name: times_s[job.job_id] for name, times_s in measures.items()}
            for job in jobs
        },
        "worse": list(found.worse),
        "simulations": found.simulations,
        "plan": json.loads(found.plan.to_json()),
    }


def write_programs(
    folder: Path, topology: Topology, jobs: Sequence[JobSpec], found: CoDesignResult
) -> None:
    """Write the collectives of every job whose hosts do all the work; name the others."""
    for old in folder.glob("job[0-9]*.*.xml"):  # of an earlier plan
        old.unlink()
    for number, job in enumerate(jobs):
        try:
            programs = msccl_programs(topology, job, found.plan.jobs[job.job_id])
        except (InfeasibleError, UnsupportedError) as error:
            typer.echo(f"not written as MSCCL XML: {error.message}", err=True)
            continue
        for name, text in programs.items():
            write_text(folder / f"job{number}.{name}.xml", text)


def write_traces(
    folder: Path, topology: Topology, jobs: Sequence[JobSpec], found: CoDesignResult
) -> None:
    files = chakra_traces(topology, jobs, found.plan)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("trace.[0-9]*.et"):  # of a larger cluster
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    typer.echo(f"{len(files) - 1} Chakra traces: {folder}", err=True)
