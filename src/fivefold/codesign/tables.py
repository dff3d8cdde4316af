"""Job tables of schedulers: Slurm's (``sacct --parsable2``), Philly's, and CSV like theirs.

Such a table says when jobs came, how many GPUs they had and how long they ran, and not what an
iteration computes and sends: that is told. Jobs that ran get ranks for the time in which they ran,
and as many iterations as fit into it, each with its communication.
"""

from __future__ import annotations

import csv
import heapq
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, DataError, InfeasibleError, require_one_of
from fivefold.files import parse_json, read_text
from fivefold.network.topology import Topology
from fivefold.reading import Reading

_MOST_ROWS = 100_000
_UNITS = {"s": 1.0, "ms": 1e-3}
# Columns by what they mean, the better ones first; lower case, blanks and lines left out.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("jobid", "jobidraw", "id"),
    "gpus": ("numgpu", "numgpus", "gpus", "gpunum", "ngpus", "alloctres", "tresalloc", "reqtres"),
    "submit": ("submit", "submittime", "submittedtime", "submissiontime", "arrivaltime"),
    "start": ("start", "starttime"),
    "end": ("end", "endtime"),
    "elapsed": ("elapsed", "elapsedraw", "runtime", "duration"),
    "iterations": ("iterations", "numiterations"),
    "iteration": ("iterationtime",),
    "state": ("state", "status", "jobstate"),
}
_HARMLESS = {
    **dict.fromkeys(("user", "account", "uid", "group", "vc"), "whose job it is"),
    **dict.fromkeys(("jobname", "name", "modelname"), "what people call it"),
    **dict.fromkeys(("exitcode", "derivedexitcode", "comment"), "the state says how it ended"),
    **dict.fromkeys(("partition", "qos", "priority"), "how it was queued: it ran when it ran"),
}
_SACCT = (
    "sacct --parsable2 --allocations --format=JobID,Submit,Start,End,AllocTRES writes what is "
    "needed"
)
_NODES = ("nodelist", "nodes", "nnodes", "allocnodes", "hostname", "machineid")
_COMPONENT = re.compile(r"(\d+)\+\d+")  # of a job with parts of several kinds (hetjob)
# Slurm's and Philly's: in which a job has not run, runs, or ran as it was meant to.
_NEVER = {"pending", "pd", "boot_fail", "bf", "revoked", "rv"}
_STILL = {"running", "r", "suspended", "s", "completing", "cg", "configuring", "cf"}
_WELL = {"", "completed", "cd", "pass"}
_STEP = re.compile(r"\d+(_(\d+|\[.*\]))?(\+\d+)?\..+")  # of a job, an array or a mixed job
_NO_TIME = {"", "unknown", "none", "n/a", "invalid"}


@dataclass(frozen=True, kw_only=True)
class TableTold:
    """What a job table does not say.

    Args:
        compute_s: Seconds of compute of an iteration; None where a column says an iteration's time.
        gradient_bytes: What an iteration all-reduces.
        unit: Of times that are bare numbers, ``"s"`` or ``"ms"``; None where there are none.
    """

    compute_s: float | None = None
    gradient_bytes: int | None = None
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """A job of a table that ran; None for what neither the table nor its reader was told."""

    job_id: str
    gpus: int
    start_s: float
    duration_s: float
    compute_s: float | None = None
    iteration_s: float | None = None
    iterations: int | None = None


def is_job_table(path: Path) -> bool:
    """Return whether a file is a table of jobs, by its first line, and not a jobs file of ours."""
    if path.suffix == ".toml":
        return False
    start = read_text(path, what="jobs file").lstrip()[:4096]
    if start.startswith(("[", "{")) and '"jobid"' in start.replace(" ", ""):
        return True
    names = {_plain(name) for name in re.split(r"[|,\t]", start.partition("\n")[0])}
    return (
        len(names) > 2 and bool(names & set(_COLUMNS["id"])) and bool(names & set(_COLUMNS["gpus"]))
    )


def read_job_table(path: Path, told: TableTold) -> tuple[list[TableJob], Reading]:
    """Read a table of jobs.

    Args:
        path: The file.
        told: What it does not say.

    Returns:
        The jobs that ran on GPUs, by their start from the first one; and the account, in which
        every column and every row has its place.

    Raises:
        DataError: A column is missing, or a row cannot be read; names it.
        ConfigurationError: Something that the table does not say is not told.
    """
    reading = Reading(str(path))
    rows, columns = _rows(path)
    chosen = _chosen(columns, reading)
    _require(chosen, told, path)
    jobs = _jobs(path, rows, chosen, told, reading)
    if not jobs:
        raise DataError(f"{path} has no job that ran on GPUs{_whys(reading)}", hint=_SACCT)
    if told.compute_s is not None:
        reading.take("--compute", f"{told.compute_s:g} s an iteration, as told")
    reading.take("--gradients", f"{told.gradient_bytes} bytes an iteration, as told")
    if "iterations" not in chosen:
        why = "the table does not count them; an iteration computes, and waits for what it sends"
        reading.assume("iterations", "duration / time of an iteration alone", why)
    if "start" not in chosen:
        why = "the table says when jobs came and not when they started"
        reading.assume("queue", "first in, first out", why)
    first_s = min(job.start_s for job in jobs.values())
    found_jobs = sorted(jobs.values(), key=lambda job: (job.start_s, job.job_id))
    return [replace(job, start_s=job.start_s - first_s) for job in found_jobs], reading


def _jobs(
    path: Path, rows: Sequence[Mapping[str, str]], chosen: Mapping[str, str], told: TableTold,
    reading: Reading,
) -> dict[str, TableJob]:  # fmt: skip
    """Return the jobs of the rows by name, the parts of one together; each row has its place."""
    jobs: dict[str, TableJob] = {}
    seen: set[str] = set()
    states: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        name = row.get(chosen["id"], "").strip()
        label = f"row {number}" + (f" (job {name})" if name else "")
        try:
            found = _job(row, name, chosen, told)
        except ValueError as error:
            raise DataError(f"{path}, {label}: {error}", hint="mend or remove the row") from None
        if isinstance(found, str):
            reading.leave_out(label, found)
            continue
        if name in seen:
            message = f"{path}, {label}: the job stands there twice"
            raise DataError(message, hint="keep one of its rows, such as its last run")
        seen.add(name)
        states[_state(row, chosen)] += 1
        component = _COMPONENT.fullmatch(name)
        if component is not None:
            found = _together(jobs.get(component[1]), replace(found, job_id=component[1]))
        reading.take(label, f"a part of {found.job_id}" if component else "")
        jobs[found.job_id] = found
    for state, count in sorted(states.items()):
        if state not in _WELL:
            why = "they held their GPUs until they ended; what they sent is not said"
            reading.assume(f"{count} jobs that ended as {state}", "trained all the time", why)
    return jobs


def _whys(reading: Reading) -> str:
    """Return why rows were left out, and how many for each reason."""
    counts = Counter(note.why for note in reading.left_out if note.name.startswith("row "))
    return "".join(f"; {why} ({number} rows)" for why, number in counts.most_common(3))


def _together(one: TableJob | None, other: TableJob) -> TableJob:
    """Return the parts of a job, which Slurm writes in a row each, as one job."""
    if one is None:
        return other
    start_s = min(one.start_s, other.start_s)
    end_s = max(part.start_s + part.duration_s for part in (one, other))
    return replace(one, gpus=one.gpus + other.gpus, start_s=start_s, duration_s=end_s - start_s)


def _state(row: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """Return how a job ended, as one word: CANCELLED by 1000 is cancelled."""
    text = row[chosen["state"]].strip() if "state" in chosen else ""
    return re.split(r"[^a-z_]", text.lower())[0]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _rows(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    text = read_text(path, what="job table")
    if text.lstrip().startswith(("[", "{")):
        return _philly(parse_json(text, where=f"job table {path}"), path)
    head = text.lstrip().partition("\n")[0]
    delimiter = next((mark for mark in ("|", "\t") if mark in head), ",")
    try:
        reader = csv.DictReader(io.StringIO(text.strip("\n"), newline=""), delimiter=delimiter)
        columns = list(reader.fieldnames or ())
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}", hint="is it a table of jobs?") from None
    if len(set(columns)) < len(columns):
        raise DataError(f"{path} has a column twice", hint="name each column once")
    if len(rows) > _MOST_ROWS:
        raise DataError(f"{path} has {len(rows):,} rows", hint=f"give at most {_MOST_ROWS:,}")
    for number, row in enumerate(rows, start=1):
        cells = [value for key, value in row.items() if key is not None]
        extra = [cell for cell in row.get(None, ()) if cell]
        if extra or any(cell is None for cell in cells):
            message = f"{path}, row {number} has not as many cells as there are columns"
            raise DataError(message, hint="is the file whole? sacct --parsable2 writes such rows")
    return [{key: row[key] for key in columns if key} for row in rows], [c for c in columns if c]


def _philly(found: Any, path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Return the runs of Philly's ``cluster_job_log``: each attempt of a job held GPUs."""
    jobs = found if isinstance(found, list) else [found]
    rows, columns = [], ["jobid", "gpus", "submitted_time", "start_time", "end_time"]
    for number, job in enumerate(jobs, start=1):
        attempts = job.get("attempts") if isinstance(job, dict) else None
        if not isinstance(attempts, list) or "jobid" not in job:
            message = f"{path}, row {number} is no job of Philly's log"
            raise DataError(message, hint="a job has jobid and attempts")
        own = {key: value for key, value in job.items() if key not in {"attempts", *columns[:5]}}
        columns += [key for key in own if key not in columns]
        runs = [one if isinstance(one, dict) else {} for one in attempts or [{}]]
        for place, attempt in enumerate(runs, start=1):
            detail = [one for one in attempt.get("detail") or () if isinstance(one, dict)]
            is_last = place >= len(attempts)
            name = str(job["jobid"]) + ("" if is_last else f", attempt {place}")
            row = {key: value if isinstance(value, str) else "" for key, value in own.items()}
            if not is_last:  # the state is that of the last
                row |= {key: "" for key in own if _plain(key) in _COLUMNS["state"]}
            row |= {"jobid": name, "gpus": str(sum(len(one.get("gpus", ())) for one in detail))}
            row |= {"submitted_time": str(job.get("submitted_time", ""))}
            row |= {key: str(attempt.get(key, "")) for key in ("start_time", "end_time")}
            rows.append(row)
    return [dict.fromkeys(columns, "") | row for row in rows], columns


def _chosen(columns: Sequence[str], reading: Reading) -> dict[str, str]:
    """Return the column of each meaning, and give every column its place."""
    chosen: dict[str, str] = {}
    for meaning, names in _COLUMNS.items():
        known = [column for name in names for column in columns if _plain(column) == name]
        if known:
            chosen[meaning] = known[0]
            reading.take(known[0], meaning)
        for column in known[1:]:
            reading.leave_out(column, f"{known[0]} says it already")
    for column in columns:
        if column in reading.names():
            continue
        if _plain(column) in _HARMLESS:
            reading.ignore(column, _HARMLESS[_plain(column)])
        elif _plain(column) in _NODES:
            reading.leave_out(column, "nodes of the cluster that it is of: jobs are placed anew")
        else:
            reading.leave_out(column, "not looked at")
    return chosen


def _require(chosen: Mapping[str, str], told: TableTold, path: Path) -> None:
    missing = [meaning for meaning in ("id", "gpus") if meaning not in chosen]
    if "start" not in chosen and "submit" not in chosen:
        missing.append("start")
    if "elapsed" not in chosen and not {"start", "end"} <= set(chosen):
        missing.append("elapsed")
    if missing:
        raise DataError(
            f"{path} has no column that says {missing[0]}",
            hint=_SACCT,
        )
    if told.gradient_bytes is None:
        message = f"{path} does not say what an iteration of its jobs sends"
        raise ConfigurationError(message, hint="tell it for all, such as --gradients '1 GB'")
    if told.compute_s is None and "iteration" not in chosen:
        message = f"{path} does not say what an iteration of its jobs computes"
        raise ConfigurationError(message, hint="tell it for all, such as --compute '0.3 s'")


def _job(
    row: Mapping[str, str], name: str, chosen: Mapping[str, str], told: TableTold
) -> TableJob | str:
    """Return the job of a row; or why it is none, in words."""
    cells = {meaning: row[column].strip() for meaning, column in chosen.items()}
    gpus = _gpus(cells["gpus"])
    start_s = _time_s(cells.get("start", cells.get("submit", "")), told)
    if (why := _why_none(name, gpus, start_s, _state(row, chosen))) or start_s is None:
        return why
    duration_s = _duration_s(cells, start_s, told)
    if duration_s is None or duration_s <= 0:
        return "it has not ended" if duration_s is None else "it ran for no time"
    iteration_s = None
    if told.compute_s is None:
        iteration_s = _number_s(cells["iteration"], told)
    if (told.compute_s if iteration_s is None else iteration_s) == 0:
        return "its iterations take no time"
    count = cells.get("iterations", "")
    return TableJob(
        job_id=name, gpus=gpus, start_s=start_s, duration_s=duration_s, compute_s=told.compute_s,
        iteration_s=iteration_s, iterations=max(_whole(count), 1) if count else None,
    )  # fmt: skip


def _why_none(name: str, gpus: int, start_s: float | None, state: str) -> str:
    """Return why a row is no job that ran on GPUs; empty where it is one."""
    if _STEP.fullmatch(name):
        return "a step of a job"
    if not name:
        return "no job is named"
    if gpus == 0:
        return "it has no GPU"
    if start_s is None or state in _NEVER:
        return "it has not started" if state not in _NEVER - {"pending", "pd"} else "it did not run"
    return "it has not ended" if state in _STILL else ""


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        message = f"{text!r:.40} is no whole number"
        raise ValueError(message)
    return int(text)


def _gpus(text: str) -> int:
    """Return a number of GPUs: plain, or of Slurm's trackable resources."""
    if "=" not in text:
        return _whole(text or "0")
    parts = [part.partition("=") for part in text.split(",")]
    ours = [part for part in parts if part[0] == "gres/gpu" or part[0].startswith("gres/gpu:")]
    found = {name: _whole(number) for name, _, number in ours}
    kinds = sum(number for name, number in found.items() if name.startswith("gres/gpu:"))
    return found.get("gres/gpu", kinds)


def _duration_s(cells: Mapping[str, str], start_s: float, told: TableTold) -> float | None:
    """Return how long a job ran; None where it still runs."""
    if cells.get("end", "") and cells.get("start", ""):
        end_s = _time_s(cells["end"], told)
        return None if end_s is None else end_s - start_s
    text = cells.get("elapsed", "")
    if text.lower() in _NO_TIME:
        return None
    found = _clock_s(text)
    return _number_s(text, told) if found is None else found


def _clock_s(text: str) -> float | None:
    """Return a duration as Slurm writes it, [D-[HH:]]MM:SS or D-HH; None where it is none."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(".")[0].split(":")
    numbers = [*([days] if dash else []), *parts]
    if not all(re.fullmatch(r"\d+", number) for number in numbers) or len(parts) > 3:
        return None
    if not dash and len(parts) == 1:
        return None
    if dash:  # hours come first behind the days
        hours, minutes, seconds = (*map(int, parts), 0, 0)[:3]
    else:
        hours, minutes, seconds = (0, *map(int, parts))[-3:]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _time_s(text: str, told: TableTold) -> float | None:
    if text.lower() in _NO_TIME:
        return None
    if re.fullmatch(r"[-+.\deE]+", text):
        return _number_s(text, told)
    try:
        return (datetime.fromisoformat(text) - datetime(1970, 1, 1)).total_seconds()  # noqa: DTZ001 - only differences count
    except (TypeError, ValueError):
        message = f"{text!r:.40} is no time"
        raise ValueError(message) from None


def _number_s(text: str, told: TableTold) -> float:
    try:
        value = float(text)
    except ValueError:
        message = f"{text!r:.40} is no time"
        raise ValueError(message) from None
    if told.unit is None:
        message = f"the time {text} has no unit"
        raise ConfigurationError(message, hint="tell it for all times: --time-unit s, or ms")
    require_one_of(told.unit, _UNITS, f"there is no unit of times {told.unit!r}")
    if not math.isfinite(value) or value < 0:
        message = f"{text!r:.40} is no time"
        raise ValueError(message)
    return value * _UNITS[told.unit]


def place_in_time(
    topology: Topology, jobs: Sequence[TableJob], *, queued: bool = False
) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Return start and ranks of each job, its own while it runs, on as few hosts as can be.

    Args:
        topology: The cluster.
        jobs: The jobs.
        queued: Whether they wait for one another, first in, first out; else they start when they
            started.

    Raises:
        InfeasibleError: A job needs more GPUs than are free when it starts.
    """
    hosts = [list(ranks) for ranks in topology.hosts.values()]
    known = {rank for ranks in hosts for rank in ranks}
    hosts += [[rank] for rank in range(topology.num_ranks) if rank not in known]
    free = [set(ranks) for ranks in hosts]
    where = {rank: place for place, ranks in enumerate(hosts) for rank in ranks}
    running: list[tuple[float, tuple[int, ...]]] = []
    placed: dict[str, tuple[float, tuple[int, ...]]] = {}
    now_s = 0.0
    for job in sorted(jobs, key=lambda one: (one.start_s, one.job_id)):
        now_s = max(now_s, job.start_s) if queued else job.start_s
        while running and (running[0][0] <= now_s or (queued and sum(map(len, free)) < job.gpus)):
            end_s, ended = heapq.heappop(running)
            now_s = max(now_s, end_s)
            for rank in ended:
                free[where[rank]].add(rank)
        ranks = _take(free, job.gpus)
        if len(ranks) < job.gpus:
            raise InfeasibleError(
                f"job {job.job_id!r} needs {job.gpus} ranks when it starts, and {len(ranks)} of "
                f"{topology.num_ranks} are free",
                hint="plan for a larger cluster, or give fewer of the table's rows",
            )
        placed[job.job_id] = now_s, tuple(ranks)
        heapq.heappush(running, (now_s + job.duration_s, tuple(ranks)))
    return placed


def _take(free: Sequence[set[int]], number: int) -> list[int]:
    """Take free ranks on the fewest hosts, and where the fewest would be left over."""
    ranks: list[int] = []
    while (left := number - len(ranks)) and any(free):
        room = [(len(own), at) for at, own in enumerate(free) if len(own) >= left]
        at = min(room)[1] if room else max(range(len(free)), key=lambda at: (len(free[at]), -at))
        taken = sorted(free[at])[:left]
        free[at].difference_update(taken)
        ranks += taken
    return ranks
