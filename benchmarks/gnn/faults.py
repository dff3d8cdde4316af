"""Injects 60 faults: kills, damaged and foreign files, failing reads, full disks; none may pass.

Every fault hits a real process with real files. *Kills*: SIGKILL at a drawn moment of generating,
ingesting, sampling, packing and training, at a report of progress or by the clock; then the same
call again, whose result must equal that of a run that was never killed, bit for bit. *Reads*: a
library loaded before libc makes reads of the packed rows or records fail with EIO, end early or
come back short, under each reading engine. *Damage*: a flipped bit, a zeroed, swapped or missing
page, a truncated, foreign or stale file, anywhere in the chain. *Full disks*: a file system of a
few MB, which then grows.

After each: no row that was handed out differs from the features, nothing hangs, every error is one
of ours and says what to do, and where the run can go on it goes on to the same result.

    python -m benchmarks.gnn.faults [--seed 0] [--only kill,damage] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gnn._harness._fault_process import Ended, in_child, outcome_of_error
from benchmarks.gnn._harness._fault_stages import STAGES, copy_whole, load, prepare_inputs
from benchmarks.results_file import BenchmarkRow, write_results

RESULTS = Path(__file__).parents[1] / "results" / "gnn" / "faults.json"
SHIM = Path(__file__).parents[2] / "tests" / "gnn" / "storage" / "faulty_disk.c"
PAGE = 4096
TIMEOUT_S = 90.0
KILLS = {"generate": 5, "ingest": 5, "sample": 5, "pack": 8, "train": 5}
FULL_DISK_KB = {"generate": 8000, "ingest": 8000, "sample": 300, "pack": 6000, "train": 6000}
SAME, REFUSED, RIGHT = "went on, same result", "refused, with what to do", "rows right all the same"
BAD = ("WRONG ROWS", "HANG", "ANOTHER RESULT", "UNTYPED OR HINTLESS ERROR", "SILENTLY MISSING",
       "FAILS UNDISTURBED")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and what came of it."""

    kind: str
    what: str
    outcome: str
    message: str = ""


class StageFailsError(RuntimeError):
    """A stage fails though nobody disturbs it: then no fault can be judged."""

    def __init__(self, stage: str, ended: Ended) -> None:
        super().__init__(f"{stage} fails undisturbed")
        self.fault = Fault(
            kind="none", what=f"{stage}, undisturbed", outcome="FAILS UNDISTURBED",
            message=_text(ended) or "it hangs",
        )  # fmt: skip


class Campaign:
    """All faults of a run, with one set of inputs."""

    def __init__(self, root: Path, arguments: argparse.Namespace) -> None:
        self.root, self.quick = root, arguments.quick
        self.draw = random.Random(arguments.seed)  # noqa: S311 - seeded moments, no secrets
        self.inputs = root / "inputs"
        self.inputs.mkdir()
        made = in_child(lambda _tell: prepare_inputs(self.inputs), timeout_s=10 * TIMEOUT_S)
        if made.error or made.hung:
            raise SystemExit(f"the inputs could not be made: {made}")
        self._undisturbed: dict[str, tuple[str, int, float]] = {}
        self._count = 0

    def folder(self) -> Path:
        """A fresh one."""
        self._count += 1
        place = self.root / f"fault-{self._count:03d}"
        place.mkdir()
        return place

    def run(self, stage: str, folder: Path, **how: float | None) -> Ended:
        """One stage in a child."""
        return in_child(
            lambda tell: STAGES[stage](self.inputs, folder, tell),
            timeout_s=TIMEOUT_S,
            **how,  # type: ignore[arg-type]
        )

    def read(self, folder: Path) -> Ended:
        """An epoch of the loader in a child."""
        return in_child(lambda _tell: load(self.inputs, folder), timeout_s=TIMEOUT_S)

    def undisturbed(self, stage: str) -> tuple[str, int, float]:
        """Digest, reports of progress and seconds of a stage that is left alone."""
        if stage not in self._undisturbed:
            folder = self.folder()
            self.run(stage, folder)  # compiles what is not compiled yet
            shutil.rmtree(folder)
            folder = self.folder()
            ended = self.run(stage, folder)
            if ended.error or ended.hung:
                raise StageFailsError(stage, ended)
            shutil.rmtree(folder)
            found = ended.answer
            self._undisturbed[stage] = (found["result"], found["reports"], ended.seconds)
        return self._undisturbed[stage]

    # -- kills ----------------------------------------------------------------------------------

    def kills(self) -> Iterator[Fault]:
        """SIGKILL, then the same call again."""
        for stage, count in KILLS.items():
            try:
                for number in range(1 if self.quick else count):
                    yield self.kill(stage, by_clock=number % 2 == 1 or stage == "train")
            except StageFailsError as error:
                yield error.fault

    def kill(self, stage: str, *, by_clock: bool) -> Fault:
        """Kill one run of a stage until it has been hit, then let it end."""
        digest, reports, seconds = self.undisturbed(stage)
        folder, most = self.folder(), 0.95
        while True:
            share = self.draw.uniform(0.2, most)
            at = None if by_clock or not reports else max(1, round(share * reports))
            after = share * seconds if at is None else None
            ended = self.run(stage, folder, kill_after_s=after, kill_at=at)
            if ended.killed or most < 0.25:
                break
            # It was quicker than its model and has ended: begin anew, and strike sooner.
            most *= 0.8
            shutil.rmtree(folder)
            folder.mkdir()
        where = f"at {100 * share:.0f} % of its time" if at is None else f"at report {at}/{reports}"
        again = self.run(stage, folder)
        shutil.rmtree(folder)
        return self._judged("kill", f"kill -9 in {stage} {where}", again, digest)

    def _judged(self, kind: str, what: str, again: Ended, digest: str) -> Fault:
        if again.hung:
            return Fault(kind=kind, what=what, outcome="HANG")
        if again.error is not None:
            return Fault(kind=kind, what=what, outcome="ANOTHER RESULT", message=_text(again))
        same = again.answer["result"] == digest
        return Fault(kind=kind, what=what, outcome=SAME if same else "ANOTHER RESULT")

    # -- damage ---------------------------------------------------------------------------------

    def damages(self) -> Iterator[Fault]:
        """Something in the chain is not what it was."""
        for number, (what, spoil) in enumerate(DAMAGES):
            if self.quick and number % 4:
                continue
            folder = self.folder()
            copy_whole(self.inputs, folder)
            spoil(folder, self.inputs, self.draw)
            if "pack again" in what:
                ended = self.run("pack", folder)
                if ended.error is None and not ended.hung:
                    ended = self.read(folder)
            else:
                ended = self.read(folder)
            shutil.rmtree(folder)
            yield _read_outcome("damage", what, ended)

    # -- reads ----------------------------------------------------------------------------------

    def reads(self) -> Iterator[Fault]:
        """Reads fail under a library that is loaded before libc."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or not SHIM.exists():
            print("left out: failing reads need a C compiler and the checkout's tests", flush=True)
            return
        library = self.root / "faulty_disk.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        folder = self.folder()
        copy_whole(self.inputs, folder)
        cases = [
            ("rows.fvf", mode, backend)
            for backend in ("threads", "io_uring")
            for mode in ("eio", "eof", "short")
        ]
        cases.append(("records.fvf", "eio", "threads"))
        for number, (file, mode, backend) in enumerate(cases):
            if self.quick and number % 4:
                continue
            size = (folder / "store" / file).stat().st_size
            # A page of the middle, which is neither header nor table.
            offset = self.draw.randrange(size // 4, size // 2) // PAGE * PAGE
            environment = os.environ | {
                "LD_PRELOAD": str(library), "FAULT_PATH": f"store/{file}", "FAULT_MODE": mode,
                "FAULT_OFFSET": str(offset),
            }  # fmt: skip
            yield _read_outcome(
                "read",
                f"{mode} in reads of {file}, engine {backend}",
                self._outside(folder, backend, environment),
            )
        shutil.rmtree(folder)

    def _outside(self, folder: Path, backend: str, environment: dict[str, str]) -> Ended:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gnn.faults",
            "--child",
            str(self.inputs),
            str(folder),
            backend,
        ]
        started_s = time.monotonic()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Ended(hung=True)
        seconds = time.monotonic() - started_s
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            error = {"class": f"exit {done.returncode}", "ours": False,
                     "message": done.stderr[-500:], "hint": None}  # fmt: skip
            return Ended(seconds=seconds, error=error)
        found = json.loads(lines[-1])
        return Ended(seconds=seconds, answer=found.get("answer"), error=found.get("error"))

    # -- full disks -----------------------------------------------------------------------------

    def full_disks(self) -> Iterator[Fault]:
        """A file system of a few MB, which is made larger after the error."""
        for stage, kilobytes in FULL_DISK_KB.items():
            if self.quick and stage not in {"pack", "sample"}:
                continue
            try:
                digest = self.undisturbed(stage)[0]
            except StageFailsError as error:
                yield error.fault
                continue
            what = f"disk full in {stage} after {kilobytes} kB"
            place = self.folder()
            if not _mount(place, kilobytes):
                print("left out: full disks need the right to mount a tmpfs", flush=True)
                return
            try:
                full = self.run(stage, place)
                _mount(place, 2_000_000, again=True)
                if full.hung:
                    yield Fault(kind="full disk", what=what, outcome="HANG")
                elif full.error is None:
                    yield Fault(kind="full disk", what=what, outcome="SILENTLY MISSING")
                elif not full.actionable:
                    yield Fault(kind="full disk", what=what, outcome=BAD[3], message=_text(full))
                else:
                    again = self._judged("full disk", what, self.run(stage, place), digest)
                    yield Fault(
                        kind="full disk", what=what, outcome=again.outcome,
                        message=f"{_text(full)} {again.message}".strip(),
                    )  # fmt: skip
            finally:
                subprocess.run(["umount", str(place)], check=False, timeout=30)


def _mount(place: Path, kilobytes: int, *, again: bool = False) -> bool:
    options = f"size={kilobytes}k" + (",remount" if again else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=30)
    return done.returncode == 0


def _text(ended: Ended) -> str:
    if ended.error is None:
        return ""
    return f"{ended.error['class']}: {ended.error['message']}; {ended.error['hint']}"


def _read_outcome(kind: str, what: str, ended: Ended) -> Fault:
    """What became of a run that should have been refused, or be right."""
    if ended.hung:
        return Fault(kind=kind, what=what, outcome="HANG")
    if ended.error is not None:
        outcome = REFUSED if ended.actionable else "UNTYPED OR HINTLESS ERROR"
        return Fault(kind=kind, what=what, outcome=outcome, message=_text(ended))
    result = ended.answer["result"]
    if isinstance(result, dict) and result["wrong_rows"]:
        return Fault(kind=kind, what=what, outcome="WRONG ROWS", message=str(result))
    return Fault(kind=kind, what=what, outcome=RIGHT)


# -- kinds of damage ------------------------------------------------------------------------------

Spoil = Callable[[Path, Path, random.Random], None]


def flip(name: str) -> Spoil:
    """One bit, in a page of the first half."""

    def spoil(folder: Path, _inputs: Path, draw: random.Random) -> None:
        path = folder / name
        with path.open("r+b") as file:
            at = draw.randrange(path.stat().st_size // 8, path.stat().st_size // 2)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << draw.randrange(8))]))

    return spoil


def truncate(name: str, share: float) -> Spoil:
    """The rest is gone."""

    def spoil(folder: Path, _inputs: Path, _draw: random.Random) -> None:
        path = folder / name
        os.truncate(path, int(share * path.stat().st_size))

    return spoil


def zero_pages(name: str) -> Spoil:
    """Four pages of zeros, as after a lost write."""

    def spoil(folder: Path, _inputs: Path, draw: random.Random) -> None:
        path = folder / name
        pages = path.stat().st_size // PAGE
        with path.open("r+b") as file:
            file.seek(draw.randrange(max(1, pages // 4), max(2, pages // 2)) * PAGE)
            file.write(bytes(4 * PAGE))

    return spoil


def swap_pages(name: str) -> Spoil:
    """Two pages in each other's place: each is whole, and neither belongs there."""

    def spoil(folder: Path, _inputs: Path, _draw: random.Random) -> None:
        path = folder / name
        pages = path.stat().st_size // PAGE
        first, second = pages // 3, pages // 3 + 7
        with path.open("r+b") as file:
            content = {}
            for page in (first, second):
                file.seek(page * PAGE)
                content[page] = file.read(PAGE)
            for page, other in ((first, second), (second, first)):
                file.seek(page * PAGE)
                file.write(content[other])

    return spoil


def foreign(*names: str) -> Spoil:
    """Files of another chain, which are whole and of the same shapes."""

    def spoil(folder: Path, inputs: Path, _draw: random.Random) -> None:
        for name in names:
            source, target = inputs / "other" / name, folder / name
            if source.is_dir():
                shutil.rmtree(target)
                shutil.copytree(source, target)
            else:
                shutil.copy(source, target)

    return spoil


def rewrite(name: str, content: bytes | None) -> Spoil:
    """Other content, or none at all."""

    def spoil(folder: Path, _inputs: Path, _draw: random.Random) -> None:
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)

    return spoil


def without_store(spoil_features: Spoil) -> Spoil:
    """Damage to what packing reads: the store is packed again."""

    def spoil(folder: Path, inputs: Path, draw: random.Random) -> None:
        shutil.rmtree(folder / "store")
        spoil_features(folder, inputs, draw)

    return spoil


DAMAGES: list[tuple[str, Spoil]] = [
    ("a flipped bit in rows.fvf", flip("store/rows.fvf")),
    ("a flipped bit in records.fvf", flip("store/records.fvf")),
    ("a flipped bit in plan.fvf", flip("store/plan.fvf")),
    ("zeroed pages in rows.fvf", zero_pages("store/rows.fvf")),
    ("two pages of rows.fvf swapped", swap_pages("store/rows.fvf")),
    ("two pages of records.fvf swapped", swap_pages("store/records.fvf")),
    ("rows.fvf truncated", truncate("store/rows.fvf", 0.6)),
    ("records.fvf truncated", truncate("store/records.fvf", 0.5)),
    ("rows.fvf empty", truncate("store/rows.fvf", 0.0)),
    ("store.json is gone", rewrite("store/store.json", None)),
    ("store.json is no JSON", rewrite("store/store.json", b'{"version": 1')),
    ("rows.fvf of another store", foreign("store/rows.fvf")),
    ("records.fvf of another store", foreign("store/records.fvf")),
    ("the store of another graph", foreign("store")),
    ("features of another graph beside the store", foreign("graph/features.fvf")),
    ("samples of another graph beside the store", foreign("samples.fvf")),
    ("a flipped bit in features.fvf; pack again", without_store(flip("graph/features.fvf"))),
]


# -- results --------------------------------------------------------------------------------------


def rows_of(faults: list[Fault]) -> list[BenchmarkRow]:
    """Totals, which must be 0 where they are bad, and one row for each fault."""
    total = len(faults)
    counts = Counter(fault.outcome for fault in faults)
    case = f"{total} faults"
    rows = [BenchmarkRow(case=case, metric="injected", unit="faults", ours=total)]
    rows += [
        BenchmarkRow(case=case, metric=outcome, unit="faults", ours=counts[outcome])
        for outcome in (SAME, REFUSED, RIGHT)
    ]
    rows += [
        BenchmarkRow(
            case=case, metric=outcome.lower(), unit="faults", ours=counts[outcome], target=0,
            met=counts[outcome] == 0,
        )
        for outcome in BAD
    ]  # fmt: skip
    for number, fault in enumerate(faults, start=1):
        bad = fault.outcome in BAD
        rows.append(
            BenchmarkRow(
                case=f"{number}. {fault.what}", metric=fault.outcome, unit="fault", ours=1,
                target=0 if bad else 1, met=not bad,
            )
        )  # fmt: skip
    return rows


def child(inputs: str, folder: str, backend: str) -> None:
    """Load a store under whatever is preloaded; the outcome as a line of JSON."""
    try:
        found = {"answer": {"result": load(Path(inputs), Path(folder), backend=backend)}}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        found = {"error": outcome_of_error(error)}
    print(json.dumps(found), flush=True)


def main() -> None:
    """Inject, judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="kill,damage,read,full", help="kinds, comma-separated")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a quarter, no results file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    faults = []
    with tempfile.TemporaryDirectory(prefix="fivefold-faults-") as name:
        campaign = Campaign(Path(name), arguments)
        kinds = {
            "kill": campaign.kills, "damage": campaign.damages, "read": campaign.reads,
            "full": campaign.full_disks,
        }  # fmt: skip
        for kind in arguments.only.split(","):
            for fault in kinds[kind]():
                faults.append(fault)
                print(f"{len(faults):3}. {fault.what}: {fault.outcome} {fault.message}", flush=True)
    rows = rows_of(faults)
    for row in rows[: 4 + len(BAD)]:
        met = "" if row.met is None else (" met" if row.met else " NOT MET")
        print(f"{row.metric:44} {row.ours:g}{met}", flush=True)
    if not arguments.quick and arguments.only == "kill,damage,read,full":
        write_results(arguments.output, topic="gnn/faults", rows=rows)
    sys.exit(1 if any(fault.outcome in BAD for fault in faults) else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
