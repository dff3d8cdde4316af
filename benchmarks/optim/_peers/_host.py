"""One host's part of a run: starts the processes of its rank, one case after the other.

The host process imports torch and reads the text once, then forks a process per case: a case
starts in a tenth of a second, with a memory of its own, and cannot harm the next one. A case that
raises or hangs writes down its error, and the run goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo as loaded_by_optimizers
import torch.distributed as dist

from benchmarks.optim._peers import _measure, ddp, ours
from benchmarks.optim._peers._case import Case, Place
from benchmarks.optim._peers._table import find_case
from benchmarks.optim._workload import corpus

__all__ = ["read_answers", "run_host"]

_FIRST_PORT = 20_000
_PORTS_PER_JOB = 10
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# What needs no peer is imported before the forks: one version of the code for all cases. Nor does
# the first optimizer of each case load torch._dynamo then, for seconds.
_IMPORTED_ONCE = (ddp, ours, loaded_by_optimizers)
_MEASUREMENTS: dict[str, Callable[[Case, Place, Mapping[str, Any]], dict[str, Any]]] = {
    "timing": _measure.timing,
    "learning": _measure.learning,
    "memory": _measure.memory,
}

Answer = dict[str, Any]


def run_host(folder: Path, *, job_timeout_s: float = 180.0) -> None:
    """Run all jobs of ``folder/jobs.json`` and write one answer per job.

    Args:
        folder: Shared by the hosts; an answer is ``JOB-RANK.json``.
        job_timeout_s: Longest time of a job.
    """
    torch.set_num_threads(1)
    corpus()
    jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    context = multiprocessing.get_context("fork")
    for number, job in enumerate(jobs):
        path = folder / f"{number}-{os.environ['RANK']}.json"
        process = context.Process(target=_child, args=(job, number, path))
        process.start()
        process.join(job_timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        if not path.exists():
            how = "was killed at its time limit" if process.exitcode == -9 else "ended"
            _write(path, {"error": f"{how} with exit code {process.exitcode}"})
        if os.environ["RANK"] == "0":
            _tell(job, json.loads(path.read_text(encoding="utf-8")))


def read_answers(folder: Path, jobs: Sequence[Mapping[str, Any]], hosts: int) -> list[list[Answer]]:
    """The answers of all ranks, job by job.

    Args:
        folder: What ``run_host`` wrote to.
        jobs: The jobs.
        hosts: Number of ranks.
    """

    def read(number: int, rank: int) -> Answer:
        path = folder / f"{number}-{rank}.json"
        found: Answer = {"error": "the host did not come to it"}
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else found

    return [[read(number, rank) for rank in range(hosts)] for number in range(len(jobs))]


def _child(job: Mapping[str, Any], number: int, path: Path) -> None:
    # A peer's own log goes beside the answer, native code's too.
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stderr.fileno())
    try:
        place = _join(job, number)
        answer = _MEASUREMENTS[job["measurement"]](find_case(job["case"]), place, job)
    except Exception as error:  # noqa: BLE001 - a peer may raise anything; the run goes on
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        answer = {"error": f"{type(error).__name__}: {error} ({where})"}
        traceback.print_exc()
    _write(path, answer)
    os._exit(0)  # threads of a peer may be in the middle of something


def _join(job: Mapping[str, Any], number: int) -> Place:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    main_address = os.environ["MASTER_ADDR"]
    port = _FIRST_PORT + _PORTS_PER_JOB * number
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{main_address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    return Place(
        rank=rank,
        world_size=world_size,
        address=_own_address(main_address),
        main_address=main_address,
        port=port,
        stationary=job["measurement"] != "learning",
    )


def _own_address(main_address: str) -> str:
    """This host's address on the network of the main one; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((main_address, 1))
        return str(probe.getsockname()[0])


def _write(path: Path, answer: Answer) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.rename(path)


def _tell(job: Mapping[str, Any], answer: Answer) -> None:
    if "error" in answer:
        text = f"FAILED: {answer['error'][:160]}"
    elif job["measurement"] == "timing":
        step_s = answer["wall_s"] / answer["steps"]
        sent_mb = answer["link_sent_bytes"] / answer["steps"] / 1e6
        text = f"{step_s:.3f} s/step, {sent_mb:.3f} MB/step, {answer['overruns']} overruns"
    elif job["measurement"] == "memory":
        text = f"{answer['added_bytes_per_parameter']:.1f} bytes/parameter"
    else:
        steps, bits = answer["curve"][-1]
        text = f"seed {job['problem']['seed']}: {bits:.4f} bits per byte after {steps} steps"
    print(f"  {job['measurement']:8} {job['case']:44} {text}", flush=True)
