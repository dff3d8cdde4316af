"""Ctrl-C in a long command: one line, the shell's code for it, nothing that goes on or is half."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "fivefold"]
LONGEST_S = 120.0
RESTING_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")

# Each is interrupted when it has used the processor so many times as long as `fivefold --help`,
# which takes 0.2 s: while modules are loaded, or at work. Left alone it would go on.
CASES = [
    ("--help", 0.4),
    ("plan plan_job.toml --cluster cluster_10g_ethernet.toml -o plan.toml", 2),
    ("plan job.toml --compare h100-nemo:512 h100-nemo:1024 h100-nemo:2048 h100-nemo:4096", 5),
    ("explain job.toml --cluster cluster.toml", 4.5),
    ("simulate codesign_jobs.toml --cluster fat_tree:32,gpus=2,bandwidth=12.5GB/s -o plans", 6),
    ("ablate --cluster fat_tree:4,gpus=2 --seeds 500", 9),
    ("collectives synthesize all_to_all dgx_a100:4 --size 64MB -o found.json", 9),
    ("collectives bench all_to_all fat_tree:16,gpus=2", 7),
    ("execute jobs.toml --cluster switch:4,bandwidth=25MB/s", 4.5),
    ("train train.toml --nproc 2", 7),
    ("doctor", 4.5),
    ("gnn generate graphs/big --nodes 30000000 --dim 64", 7),
]


@pytest.fixture(scope="module")
def unit_s():
    """Seconds of the processor that the shortest command takes on this machine."""
    used_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(used_s)


@pytest.fixture
def place(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path, dirs_exist_ok=True)
    job = '[[jobs]]\nid = "{}"\nranks = [{}]\ncompute = "1 s"\ngradients = "9 MB"\n'
    (tmp_path / "jobs.toml").write_text(job.format("a", "0, 1") + job.format("b", "2, 3"))
    return tmp_path


class Shell:
    """A command in a session of its own, as in a terminal; all its processes carry a mark."""

    def __init__(self, words, folder):
        self.mark = f"FIVEFOLD_TEST_MARK={folder}"
        self.error = folder.parent / f"{folder.name}.stderr"
        with self.error.open("w") as error:
            self.process = subprocess.Popen(
                [*COMMAND, *words.split()],
                cwd=folder,
                env=dict(os.environ, FIVEFOLD_TEST_MARK=str(folder)),
                stdout=subprocess.DEVNULL,
                stderr=error,
                start_new_session=True,
            )

    def used_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def at_work(self, until_s):
        """Return what tells that it used the processor for so long, or waits for its children."""
        seen = (0.0, time.monotonic())

        def reached():
            nonlocal seen
            used_s, now_s = self.used_s(), time.monotonic()
            if used_s > seen[0]:
                seen = used_s, now_s
            return used_s >= until_s or now_s - seen[1] > RESTING_S

        return reached

    def marked(self):
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in environment.read_bytes().split(b"\0"):
                    yield int(environment.parent.name)
            except OSError:  # it has ended, or belongs to somebody else
                continue

    def interrupt_when(self, reached):
        end_s = time.monotonic() + LONGEST_S
        while not reached():
            assert self.process.poll() is None, f"it ended by itself: {self.error.read_text()}"
            assert time.monotonic() < end_s
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(LONGEST_S)
        while list(self.marked()):
            assert time.monotonic() < end_s, "a process goes on"
            time.sleep(0.05)
        return code, self.error.read_text()

    def close(self):
        for process in self.marked():
            os.kill(process, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def shell(place):
    started = []

    def start(words):
        started.append(Shell(words, place))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("words", "units"), CASES, ids=range(len(CASES)))
def test_a_command_is_interrupted(shell, place, unit_s, words, units):
    before = set(place.rglob("*"))
    command = shell(words)
    code, said = command.interrupt_when(command.at_work(units * unit_s))
    # Where compiled code meets it, or Python's own end, the signal itself ends the process, without
    # a word: a shell says 130 of both.
    assert code == -signal.SIGINT or (code == 130 and said.endswith("interrupted\n")), (code, said)
    assert "Traceback" not in said
    assert "error" not in said
    left = {path.name for path in set(place.rglob("*")) - before if path.is_file()}
    assert left <= {".lock", "labels.fvf", "features.fvf.partial"}


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_plans_made_by_several_processes_are_interrupted(shell):
    command = shell("ablate --cluster fat_tree:4,gpus=2 --seeds 500 --parallel 2")
    code, said = command.interrupt_when(lambda: "ablation: " in command.error.read_text())
    assert code == 130
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_was_interrupted_is_done_by_the_same_command(shell, place):
    words = "gnn generate graphs/one --nodes 100000 --dim 64"
    folder = place / "graphs" / "one"
    first = shell(words)
    assert first.interrupt_when(lambda: any(folder.glob("*.fvf*")))[0] != 0
    second = shell(words)
    assert second.interrupt_when(lambda: len(list(folder.glob("*.fvf*"))) > 1)[0] != 0
    for line in (words, "gnn verify graphs/one"):
        subprocess.run([*COMMAND, *line.split()], cwd=place, check=True, capture_output=True)
    assert not list(place.rglob("*.partial"))


HALF_MADE = """
import os, signal
from fivefold.cli import _main
class Half:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGINT)
        self.whole = True
    def __del__(self):
        assert self.whole
_main.app = lambda **_: Half()
_main.main()
"""


def test_nothing_is_said_about_an_object_that_was_half_made():
    command = [sys.executable, "-c", HALF_MADE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


BETWEEN_CALL_AND_NOTE = """
import os, signal
from fivefold.cli import _main
source = "def close(freed):\\n    os.kill(os.getpid(), signal.SIGINT)\\n    freed.append(1)"
exec(compile(source, "/lib/llvmlite/binding/ffi.py", "exec"))
def work(**_):
    freed = []
    close(freed)
    assert freed
    signal.pause()
_main.app = work
_main.main()
"""


def test_llvm_notes_what_it_freed():
    command = [sys.executable, "-c", BETWEEN_CALL_AND_NOTE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


STUCK = """
import os, pathlib, signal, subprocess, sys, time
if "worker" not in sys.argv:  # a launcher that waits for a worker that does not heed it
    worker = subprocess.Popen([sys.executable, __file__, "worker"], start_new_session=True)
    signal.signal(signal.SIGINT, lambda *_: None)
    worker.wait()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("up").touch()
time.sleep(600)
"""


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_job_under_advise_leaves_no_worker_behind(shell, place):
    (place / "stuck.py").write_text(STUCK)
    command = shell(f"advise -- {sys.executable} stuck.py")
    code, said = command.interrupt_when((place / "up").exists)
    assert (code, said) == (130, "interrupted\n")
