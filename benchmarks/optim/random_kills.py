"""Ranks are killed at random moments and in every phase of a round; nothing may hang or be lost.

Jobs of two ranks train a tiny model with CO2 (tau 4), a checkpoint every 3 steps, payloads as they
are and as int8. One random rank of each attempt gets SIGKILL: at a moment of the clock, or at the
entry, in the middle or at the exit of a phase that was drawn (start, resume, snapshot and merge,
launch, compute with an all-reduce under way, wait, writing and publishing a checkpoint, drain).
Then the ranks start again and resume, until the job is complete. Each rank is a process that runs
the trainer's own worker, forked from one that has torch loaded; a last case goes through the whole
command, ``fivefold train --nproc 2 --max-restarts N``, and its restarts.

After every kill: the survivor ends within its timeout, the checkpoints load, none has gone, and the
replicas' anchors in them are equal. At the end of each job: parameters, optimizer and outer state
of both ranks are those of a run that was never killed, bit for bit.

    python -m benchmarks.optim.random_kills [--kills 100] [--command-kills 8] [--quick]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.errors import FivefoldError
from fivefold.optim._fragment import Fragment
from fivefold.runs import checkpoints
from fivefold.runs.checkpoints import checkpoint_folders, read_checkpoint, verify_checkpoint
from fivefold.train import TrainConfig, _loop, _outer, _step, _worker, config_to_toml
from fivefold.train.config import DataConfig, ModelConfig, OptimConfig, RunConfig, SyncConfig

RESULTS = Path(__file__).parents[1] / "results" / "optim" / "random_kills.json"
# The first optimizer of a process loads torch._dynamo, half a second in each forked rank.
importlib.import_module("torch._dynamo")

STEPS = 26
TIMEOUT_S = 8.0
# A dead peer is noticed at once or within the timeout; the rest is a busy machine's scheduling.
PATIENCE_S = TIMEOUT_S + 52.0
KILLS_PER_JOB = 10
WORLD_SIZE = 2
SHARE_BY_CLOCK = 0.3
PLACES: dict[str, tuple[Any, str]] = {
    "start": (_loop, "open_ranks"),
    "resume": (_loop, "read_own_state"),
    "snapshot and merge": (Fragment, "_merge"),
    "launch": (Fragment, "_send"),
    "compute": (_step.StepRunner, "run"),
    "wait": (Fragment, "_land"),
    "checkpoint: writing": (checkpoints, "_save"),
    "checkpoint: publishing": (checkpoints, "_publish"),
    "drain": (_outer.OuterMethod, "finalize"),
}
ONCE = {"start", "resume", "drain"}
BY_CLOCK = "any moment"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Whom to kill, and when: in a phase, or so many seconds after the start."""

    rank: int
    phase: str
    point: str = "entry"
    occurrence: int = 1
    after_s: float = 0.0


@dataclass(kw_only=True)
class Tally:
    """What happened over all kills of one case."""

    kills: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    hangs: int = 0
    diverged: int = 0
    lost_checkpoints: int = 0
    unequal_ends: int = 0
    wrong_errors: int = 0

    @property
    def total(self) -> int:
        """Number of kills."""
        return sum(self.kills.values())


# -- a rank that kills itself in a phase ----------------------------------------------------------


def die() -> None:
    """End as by an outsider's SIGKILL: no handler, no clean-up, no last word."""
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(function: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Wrap a function so that its planned occurrence is the last thing that the rank does."""
    calls = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != plan.occurrence:
            return function(*args, **kwargs)
        if plan.point == "entry":
            die()
        with ExitStack() as stack:
            if plan.point == "middle":
                stack.enter_context(mock.patch.object(Fragment, "_pieces", dying_pieces))
            result = function(*args, **kwargs)
        die()
        return result

    return run


def dying_pieces(fragment: Fragment, **_: object) -> Iterator[Any]:
    """Half of the parameters' pieces; then the end, with the outer state half updated."""
    pieces = [piece for group in fragment.groups for piece in group.pieces()]
    yield from pieces[: len(pieces) // 2]
    die()


def fork_rank(rank: int, *, port: int, folder: Path, plan: Plan | None) -> int:
    """Start one rank as a forked process; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
        os.environ["FIVEFOLD_OUTCOME_DIR"] = str(folder)
        if plan is not None and plan.rank == rank and plan.phase != BY_CLOCK:
            owner, name = PLACES[plan.phase]
            setattr(owner, name, deadly(getattr(owner, name), plan))
        code = _worker.main([str(folder / "config.toml")])
    finally:
        os._exit(code)


# -- one attempt ----------------------------------------------------------------------------------


def attempt(folder: Path, plan: Plan | None) -> dict[int, int]:
    """Run both ranks to their ends; exit codes by rank, without those that hung."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    pids = {r: fork_rank(r, port=port, folder=folder, plan=plan) for r in range(WORLD_SIZE)}
    codes: dict[int, int] = {}
    started_s = time.monotonic()
    deadline_s = started_s + PATIENCE_S
    clock_s = plan.after_s if plan is not None and plan.phase == BY_CLOCK else None
    while len(codes) < len(pids) and time.monotonic() < deadline_s:
        if clock_s is not None and plan is not None and time.monotonic() - started_s >= clock_s:
            clock_s = None
            if plan.rank not in codes:
                os.kill(pids[plan.rank], signal.SIGKILL)
        for rank, pid in pids.items():
            if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.002)
    for rank, pid in pids.items():
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def random_plan(draw: random.Random, duration_s: float) -> Plan:
    """Draw a rank and a moment."""
    rank = draw.randrange(WORLD_SIZE)
    if draw.random() < SHARE_BY_CLOCK:
        return Plan(rank=rank, phase=BY_CLOCK, after_s=draw.random() * duration_s)
    phase = draw.choice(list(PLACES))
    points = ["entry", "exit"] + (["middle"] if phase == "snapshot and merge" else [])
    if phase == "checkpoint: publishing":
        rank = 0  # the one that publishes
    occurrence = 1 if phase in ONCE else draw.randint(1, 4)
    return Plan(rank=rank, phase=phase, point=draw.choice(points), occurrence=occurrence)


# -- what must hold -------------------------------------------------------------------------------


def digest_of(value: Any, digest: Any = None) -> str:
    """Digest of all tensors in a nested state, bit for bit."""
    digest = digest or hashlib.sha256()
    if isinstance(value, torch.Tensor):
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest_of(value[key], digest)
    elif isinstance(value, list | tuple):
        for item in value:
            digest_of(item, digest)
    return str(digest.hexdigest())


def anchors_of(state: dict[str, Any]) -> str:
    """Digest of the outer state that replicas share."""
    fragments = state["method"]["sync"]["fragments"]
    shared = [
        buffers[name]
        for fragment in fragments.values()
        for buffers in fragment["tensors"].values()
        for name in ("anchor", "momentum")
        if name in buffers
    ]
    return digest_of(shared)


def look_at_checkpoints(root: Path, tally: Tally, *, newest_before: str) -> str:
    """Load every checkpoint on all ranks and compare the replicas; the newest one's name."""
    folders = checkpoint_folders(root)
    names = sorted(folder.name for folder in folders)
    newest = names[-1] if names else ""
    if newest < newest_before:
        tally.lost_checkpoints += 1
    for folder in folders:
        try:
            verify_checkpoint(folder)
            states = [read_checkpoint(folder, rank=rank) for rank in range(WORLD_SIZE)]
        except FivefoldError as error:
            print(f"lost: {folder.name}: {error}", flush=True)
            tally.lost_checkpoints += 1
            continue
        tally.diverged += len({anchors_of(state) for state in states}) > 1
    return max(newest, newest_before)


def final_digest(root: Path, tally: Tally) -> str:
    """Digest of both ranks' whole states at the end; counts replicas that differ."""
    path = checkpoint_folders(root)[0]
    assert int(path.name.rpartition("-")[2]) == STEPS, "the job ended before its last checkpoint"
    states = [read_checkpoint(path, rank=rank) for rank in range(WORLD_SIZE)]
    tally.diverged += len({digest_of(state["model"]) for state in states}) > 1
    return digest_of([(s["model"], s["optimizer"], s["method"], s["rng"]) for s in states])


# -- jobs -----------------------------------------------------------------------------------------


def make_config(folder: Path, text: Path, codec: str) -> TrainConfig:
    """A job of about a second."""
    return TrainConfig(
        run=RunConfig(
            output=folder / "run", device="cpu", steps=STEPS, timeout_s=TIMEOUT_S,
            checkpoint_every_steps=3, validate_every_steps=0, log_every_steps=5,
        ),
        data=DataConfig(
            path=str(text), cache=str(text.parent / "cache"), sequence_length=16,
            validation_fraction=0.25,
        ),
        model=ModelConfig(layers=1, width=16, heads=2),
        optim=OptimConfig(batch_size=2, warmup_steps=2, validation_batches=2, precision="fp32"),
        sync=SyncConfig.model_validate(
            {"method": "co2", "tau": 4, "codec": codec, "check_every_rounds": 1}
        ),
    )  # fmt: skip


def new_job(root: Path, text: Path, *, codec: str, name: str) -> Path:
    """Make a job's folder with its configuration."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config_to_toml(make_config(folder, text, codec)))
    return folder


def uninterrupted(root: Path, text: Path, *, codec: str, tally: Tally) -> tuple[str, float]:
    """Digest and duration of a job that is left alone."""
    folder = new_job(root, text, codec=codec, name=f"{codec}-whole")
    started_s = time.monotonic()
    codes = attempt(folder, None)
    if set(codes.values()) != {0} or len(codes) < WORLD_SIZE:
        raise SystemExit(f"the uninterrupted job failed: {codes}; see {folder}")
    return final_digest(folder / "run", tally), time.monotonic() - started_s


def killed_job(
    folder: Path, draw: random.Random, tally: Tally, *, most: int, expected: tuple[str, float]
) -> None:
    """Kill and restart until the job is complete or was killed often enough, then let it end."""
    digest, duration_s = expected
    output, newest, killed = folder / "run", "", 0
    tally.jobs += 1
    while True:
        plan = random_plan(draw, duration_s) if killed < most else None
        codes = attempt(folder, plan)
        if len(codes) < WORLD_SIZE:
            tally.hangs += 1
            print(f"HANG: {plan}, {folder}", flush=True)
        newest = look_at_checkpoints(output, tally, newest_before=newest)
        if plan is not None and codes.get(plan.rank) == -signal.SIGKILL:
            killed += 1
            tally.kills[plan.phase] += 1
            tally.wrong_errors += codes.get(1 - plan.rank, 1) not in {0, 1}
            continue
        if set(codes.values()) != {0}:
            tally.wrong_errors += 1
            print(f"UNEXPECTED END: {codes}, {plan}, {folder}", flush=True)
            return
        break
    if final_digest(output, tally) != digest:
        tally.unequal_ends += 1
        print(f"ANOTHER END: {folder}", flush=True)


def campaign(root: Path, text: Path, *, codec: str, kills: int, seed: int) -> Tally:
    """Kill that many ranks."""
    tally, draw = Tally(), random.Random(seed)  # noqa: S311 - seeded moments, no secrets
    expected = uninterrupted(root, text, codec=codec, tally=tally)
    while tally.total < kills:
        folder = new_job(root, text, codec=codec, name=f"{codec}-{tally.jobs}")
        most = min(KILLS_PER_JOB, kills - tally.total)
        killed_job(folder, draw, tally, most=most, expected=expected)
        print(f"{codec}: {tally.total} kills, {tally.jobs} jobs", flush=True)
    return tally


# -- the whole command ----------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, by the kernel's list."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in tasks.read_text().split()]
    return found


def workers_of(pid: int) -> list[int]:
    """The rank processes that a launcher has started."""
    workers = []
    for child in children_of(pid):
        command = Path(f"/proc/{child}/cmdline")
        if command.exists() and b"fivefold.train._worker" in command.read_bytes():
            workers.append(child)
    return workers


def command_campaign(root: Path, text: Path, *, kills: int, seed: int) -> Tally:
    """Kill workers of one ``fivefold train``, which restarts them by itself."""
    tally, draw = Tally(jobs=1), random.Random(seed)  # noqa: S311 - as above
    digest, duration_s = uninterrupted(root / "command", text, codec="int8", tally=tally)
    folder = new_job(root, text, codec="int8", name="command-job")
    command = [sys.executable, "-m", "fivefold", "train", str(folder / "config.toml")]
    command += ["--nproc", str(WORLD_SIZE), "--max-restarts", str(kills + 2)]
    with (folder / "launcher.log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        output = folder / "run"
        before: set[int] = set()
        deadline_s = time.monotonic() + kills * PATIENCE_S
        while launcher.poll() is None and time.monotonic() < deadline_s:
            workers = [pid for pid in workers_of(launcher.pid) if pid not in before]
            if tally.total < kills and len(workers) == WORLD_SIZE:
                # Starting takes most of an attempt here: importing torch.
                time.sleep(draw.random() * (duration_s + 6.0))
                before |= set(workers)
                victim = draw.choice(workers)
                if victim in workers_of(launcher.pid):
                    os.kill(victim, signal.SIGKILL)
                    tally.kills[BY_CLOCK] += 1
            time.sleep(0.05)
        if launcher.poll() is None:
            tally.hangs += 1
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    look_at_checkpoints(output, tally, newest_before="")
    if launcher.returncode == 0:
        tally.unequal_ends += final_digest(output, tally) != digest
    else:
        tally.wrong_errors += 1
        print(f"THE COMMAND FAILED: {(folder / 'launcher.log').read_text()[-2000:]}", flush=True)
    return tally


# -- results --------------------------------------------------------------------------------------


def rows_of(case: str, tally: Tally) -> list[BenchmarkRow]:
    """One row per count; all but the kills must be 0."""
    rows = [BenchmarkRow(case=case, metric="kills", unit="kills", ours=tally.total)]
    rows += [
        BenchmarkRow(case=case, metric=f"kills: {phase}", unit="kills", ours=count)
        for phase, count in sorted(tally.kills.items())
    ]
    wrong = {
        "hangs": tally.hangs,
        "diverged replicas": tally.diverged,
        "lost checkpoints": tally.lost_checkpoints,
        "ends that differ from the run never killed": tally.unequal_ends,
        "unexpected exit codes": tally.wrong_errors,
    }
    rows += [
        BenchmarkRow(case=case, metric=name, unit="cases", ours=n, target=0, met=n == 0)
        for name, n in wrong.items()
    ]
    return rows


def copy_text(folder: Path) -> Path:
    """Two dozen small files of the standard library."""
    folder.mkdir(parents=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in [path for path in files if 500 < path.stat().st_size < 9000][:24]:
        shutil.copy(path, folder / path.name)
    return folder


def main() -> None:
    """Run all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="over both codecs")
    parser.add_argument("--command-kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="6 kills, no results file")
    arguments = parser.parse_args()
    kills = 6 if arguments.quick else arguments.kills
    command_kills = 1 if arguments.quick else arguments.command_kills
    rows = []
    with tempfile.TemporaryDirectory(prefix="fivefold-kills-") as name:
        root = Path(name)
        text = copy_text(root / "text")
        cases = (("fp32", kills - kills // 2), ("int8", kills // 2))
        for number, (codec, share) in enumerate(cases):
            tally = campaign(root, text, codec=codec, kills=share, seed=arguments.seed + number)
            rows += rows_of(f"CO2, tau 4, {codec}", tally)
        if command_kills:
            tally = command_campaign(root, text, kills=command_kills, seed=arguments.seed)
            rows += rows_of("CO2, tau 4, int8, fivefold train with restarts", tally)
    for row in rows:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        print(f"{row.case:48} {row.metric:44} {row.ours:g} {row.unit}{met}", flush=True)
    if not arguments.quick:
        write_results(arguments.output, topic="optim/random_kills", rows=rows)


if __name__ == "__main__":
    main()
