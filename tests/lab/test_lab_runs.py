"""How runs end: exit codes, logs, time limits, signals, and what is left behind (nothing)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import fivefold
from fivefold.errors import CommunicationError, ConfigurationError, UnsupportedError
from fivefold.lab import LabSpec, run_lab
from fivefold.lab import _run as run_module
from fivefold.lab.capabilities import Capabilities, Capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

needs_bridge = [pytest.mark.lab, pytest.mark.usefixtures("bridge_works")]
_SPEC = LabSpec(hosts=2, rate="200Mbit/s")
_NOBODY = 65534


def _shell(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not what is tested: stands in for a machine that forbids namespaces.
    names = ("namespaces", "bridge", "veth", "tbf", "netem", "tun")
    items = tuple(
        Capability(name, "", works=False, reason="forbidden", fix="ask") for name in names
    )
    monkeypatch.setattr(run_module, "probe_capabilities", lambda: Capabilities(None, items))


@pytest.fixture(params=["namespaces", "loopback"])
def spec(request: pytest.FixtureRequest) -> LabSpec:
    """The same rules hold with namespaces and without."""
    if request.param == "namespaces":
        request.getfixturevalue("bridge_works")
    else:
        request.getfixturevalue("no_namespaces")
    return _SPEC


def test_output_goes_to_files_and_streams(
    spec: LabSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = 'echo "out $RANK"; echo "err $RANK" >&2; printf "no newline"'
    result = run_lab(spec, _shell(script), log_folder=tmp_path / "logs", allow_unshaped=True)
    assert result.exit_code == 0
    assert [rank.stdout() for rank in result.ranks] == ["out 0\nno newline", "out 1\nno newline"]
    assert (tmp_path / "logs/rank1.err").read_text() == "err 1\n"
    shown = capfd.readouterr()
    assert shown.out == "out 0\nno newline"
    assert sorted(shown.err.splitlines()) == [
        "[host0] err 0",
        "[host1] err 1",
        "[host1] no newline",
        "[host1] out 1",
    ]


def test_several_processes_per_host_and_the_callers_surroundings(
    spec: LabSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "kept")
    two_each = LabSpec(hosts=2, nproc_per_host=2, rate=spec.rate)
    script = 'echo "$RANK $LOCAL_RANK $NODE_RANK $WORLD_SIZE $MINE"; touch "made$RANK"'
    result = run_lab(two_each, _shell(script), allow_unshaped=True, stream=False)
    assert [rank.stdout().split() for rank in result.ranks] == [
        [str(rank), str(rank % 2), str(rank // 2), "4", "kept"] for rank in range(4)
    ]
    assert [rank.host for rank in result.ranks] == [0, 0, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"made{rank}" for rank in range(4)]
    assert (tmp_path / "made3").stat().st_uid == os.geteuid()


def test_the_first_failing_ranks_code_is_the_runs(spec: LabSpec) -> None:
    script = "if [ $RANK = 1 ]; then echo broken >&2; exit 3; fi; sleep 0.4; exit 4"
    result = run_lab(spec, _shell(script), allow_unshaped=True, stream=False, grace_s=10.0)
    assert result.exit_code == 3
    assert result.first_failed_rank == 1
    assert [rank.exit_code for rank in result.ranks] == [4, 3]  # rank 0 ended by itself
    with pytest.raises(CommunicationError, match=r"rank 1 on host1 ended with 3; .*\nbroken"):
        result.check()


def test_a_rank_killed_by_a_signal_counts_as_in_a_shell(spec: LabSpec) -> None:
    result = run_lab(spec, _shell("kill -9 $$"), allow_unshaped=True, stream=False)
    assert [rank.exit_code for rank in result.ranks] == [-9, -9]
    assert result.exit_code == 137


def test_a_hanging_rank_is_ended_after_the_grace_period(spec: LabSpec) -> None:
    script = "[ $RANK = 1 ] && exit 3; trap '' TERM; while true; do sleep 0.05; done"
    result = run_lab(spec, _shell(script), allow_unshaped=True, stream=False, grace_s=0.5)
    assert result.exit_code == 3
    assert result.ranks[0].exit_code == -signal.SIGKILL
    # One grace period before SIGTERM, which this rank ignores, and one before SIGKILL.
    assert 1.0 <= result.ranks[0].wall_s - result.ranks[1].wall_s < 2.5


def test_the_time_limit_ends_the_run(spec: LabSpec) -> None:
    result = run_lab(
        spec, ["sleep", "100"], allow_unshaped=True, stream=False, timeout_s=0.5, grace_s=5.0
    )
    assert result.timed_out
    assert result.exit_code == 124
    assert 0.5 <= result.wall_s < 2.5
    assert {rank.exit_code for rank in result.ranks} == {-signal.SIGTERM}


def test_what_a_rank_leaves_running_ends_with_the_run(spec: LabSpec) -> None:
    mark = f"98{os.getpid()}1"
    result = run_lab(spec, _shell(f"sleep {mark} & echo"), allow_unshaped=True, stream=False)
    assert result.exit_code == 0
    _wait_until(lambda: not _processes("sleep", mark))


@pytest.mark.usefixtures("no_namespaces")
def test_without_namespaces_it_says_what_is_missing_or_runs_unshaped() -> None:
    with pytest.raises(UnsupportedError) as caught:
        run_lab(_SPEC, ["true"])
    assert "cannot shape the links: namespaces: forbidden" in str(caught.value)
    assert "--allow-unshaped" in str(caught.value)
    result = run_lab(_SPEC, _shell("echo $FIVEFOLD_LAB"), allow_unshaped=True, stream=False)
    lab = json.loads(result.ranks[0].stdout())
    assert lab == result.lab
    assert lab["shaped"] is False
    assert lab["means"] is None
    assert "namespaces: forbidden" in lab["reason"]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ([], {}, "command must be a list of words"),
        ("true", {}, "command must be a list of words; got 'true'"),
        (["no-such-program"], {}, "there is no program 'no-such-program'"),
        (["true"], {"timeout_s": 0.0}, "timeout_s must be more than zero"),
        (["true"], {"grace_s": -1.0}, "grace_s must not be negative"),
        (["true"], {"timeout_s": "5"}, "timeout_s must be more than zero; got '5'"),
        (["true"], {"grace_s": None}, "grace_s must not be negative; got None"),
        (["true"], {"log_folder": "/dev/null/x"}, "the log folder /dev/null/x cannot be made"),
    ],
)
def test_bad_requests(command: list[str], options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run_lab(_SPEC, command, allow_unshaped=True, **options)
    assert message in str(caught.value)


@pytest.mark.usefixtures("no_namespaces")
def test_limits_may_be_numpys() -> None:
    limits = {"timeout_s": np.int64(60), "grace_s": np.float32(2.0)}
    result = run_lab(_SPEC, ["true"], allow_unshaped=True, stream=False, **limits)
    assert result.exit_code == 0


_CALLER = """
import sys
from fivefold.lab import LabSpec, run_lab
spec = LabSpec(hosts=2, rate="200Mbit/s", delay=sys.argv[2])
script = "trap 'echo asked; exit 7' TERM; echo up; sleep " + sys.argv[1] + " & wait"
run_lab(spec, ["sh", "-c", script], grace_s=5.0, log_folder=sys.argv[3])
"""


class Caller:
    """A process that calls run_lab, whose ranks sleep for a telling number of seconds."""

    def __init__(self, mark: str, delay: str, folder: Path) -> None:
        self.mark = mark
        self.folder = folder
        runtime = folder / "runtime"
        runtime.mkdir()
        argv = [sys.executable, "-c", _CALLER, mark, delay, str(folder)]
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_until(lambda: len(self.sleepers()) == 2)
        self.networks = {_network_of(pid) for pid in self.sleepers()}
        (self.state_folder,) = runtime.glob("fivefold-lab/run-*")
        state = json.loads((self.state_folder / "state.json").read_text())
        self.supervisor_pid = state["supervisor"]["pid"]
        (self.first_process,) = _children(self.supervisor_pid)

    def sleepers(self) -> list[int]:
        return _processes("sleep", self.mark)

    def expect_nothing_left(self) -> None:
        _wait_until(lambda: not self.sleepers())
        _wait_until(lambda: not Path(f"/proc/{self.supervisor_pid}").exists())
        _wait_until(lambda: not self.networks & _networks_in_use())


@pytest.fixture(params=["0ms", "1ms"], ids=["tbf", "relay"])
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
    request.getfixturevalue("bridge_works" if request.param == "0ms" else "relay_works")
    mark = f"97{os.getpid()}{len(str(tmp_path))}"
    started = Caller(mark, request.param, tmp_path)
    assert len(started.networks) == 2  # one network for each host, neither of them ours
    assert _network_of("self") not in started.networks
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.lab
def test_kill_9_of_the_caller_leaves_nothing(caller: Caller) -> None:
    before = _registered_networks()
    caller.process.kill()
    caller.process.wait()
    caller.expect_nothing_left()
    assert _registered_networks() == before


@pytest.mark.lab
def test_kill_9_of_the_supervisor_leaves_nothing_and_is_reported(caller: Caller) -> None:
    os.kill(caller.first_process, signal.SIGKILL)
    assert caller.process.wait(10.0) == 1  # an uncaught error of the caller, which still ran
    caller.expect_nothing_left()


@pytest.mark.lab
def test_a_caller_killed_while_the_supervisor_is_frozen_leaves_nothing(caller: Caller) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is missing, the second line of defence")
    os.kill(caller.first_process, signal.SIGSTOP)
    caller.process.kill()
    caller.process.wait()
    caller.expect_nothing_left()


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks_and_then_the_caller(
    caller: Caller, number: signal.Signals
) -> None:
    caller.process.send_signal(number)
    assert caller.process.wait(10.0) == -number
    caller.expect_nothing_left()
    assert [(caller.folder / f"rank{rank}.out").read_text() for rank in (0, 1)] == [
        "up\nasked\n"
    ] * 2
    assert not caller.state_folder.exists()


@pytest.mark.lab
@pytest.mark.usefixtures("bridge_works")
def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    script = """
        from fivefold.lab import LabSpec, run_lab
        command = ["sh", "-c", "trap '' TERM; echo up; while true; do sleep 0.05; done"]
        run_lab(LabSpec(hosts=1), command, grace_s=60.0, log_folder="logs", stream=False)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    output = tmp_path / "logs" / "rank0.out"
    _wait_until(lambda: output.exists() and output.read_text() == "up\n")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10.0) == -signal.SIGINT


_TALKER = """
import sys
from fivefold.lab import LabSpec, run_lab
result = run_lab(LabSpec(hosts=1), ["seq", "1", "200000"], log_folder=sys.argv[1])
sys.exit(result.exit_code)
"""


@pytest.mark.lab
@pytest.mark.usefixtures("bridge_works")
def test_a_reader_that_pauses_gets_everything(tmp_path: Path) -> None:
    expected = "".join(f"{number}\n" for number in range(1, 200_001))
    argv = [sys.executable, "-c", _TALKER, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(1.0)  # the pipe is full long before
        assert process.poll() is None
        assert process.communicate()[0] == expected
    assert process.returncode == 0
    assert (tmp_path / "rank0.out").read_text() == expected


@pytest.mark.lab
@pytest.mark.usefixtures("bridge_works")
def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _TALKER, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.stdout.close()
        assert process.wait(20.0) == 0
    assert (tmp_path / "rank0.out").read_text().endswith("\n200000\n")


@pytest.mark.lab
def test_an_ordinary_user_gets_shaped_links_without_root() -> None:
    """Delay and rate in user namespaces, and files that belong to the user."""
    prefix = _as_nobody()
    folder = Path("/tmp") / f"fivefold-test-{os.getpid()}"  # noqa: S108 - pytest's own is private to us
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    script = f"""
        import os
        from fivefold.lab import LabSpec, probe_capabilities, run_lab
        assert os.geteuid() == {_NOBODY}, os.geteuid()
        command = ["sh", "-c", "touch made$RANK; ls /sys/class/net; sleep 0.1"]
        for delay in ("0ms", "1ms"):
            spec = LabSpec(hosts=2, rate="200Mbit/s", delay=delay)
            result = run_lab(spec, command, log_folder="logs" + delay, stream=False).check()
            print(probe_capabilities().isolation, result.ranks[1].stdout().split())
    """
    try:
        done = subprocess.run(
            [*prefix, "-c", textwrap.dedent(script)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60.0,
        )
        # Delay needs the relay, and the relay a device that some machines keep for root.
        may_relay = os.geteuid() != 0 or Path("/dev/net/tun").stat().st_mode & 0o006 == 0o006
        runs = 2 if may_relay else 1
        assert done.stdout.splitlines() == ["user namespaces ['eth0', 'lo']"] * runs, done.stderr
        assert may_relay or "make /dev/net/tun available to this user" in done.stderr
        owners = {path.stat().st_uid for path in folder.rglob("*")}
        assert owners == {os.geteuid() if os.geteuid() != 0 else _NOBODY}
    finally:
        shutil.rmtree(folder)


def _as_nobody() -> list[str]:
    """A Python that runs fivefold as a user without rights."""
    if os.geteuid() != 0:
        return [sys.executable]
    lookup = [
        Path(fivefold.__file__).parent.parent,
        Path(str(importlib.metadata.distribution("fivefold").locate_file(""))),
    ]
    drop = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "env"]
    drop += ["-u", "XDG_RUNTIME_DIR", "HOME=/", f"PYTHONPATH={':'.join(map(str, lookup))}"]
    probe = "import sys, fivefold.lab as lab; sys.exit(lab.probe_capabilities().shaping == 'none')"
    reasons = []
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*drop, "PYTHONDONTWRITEBYTECODE=1", python]
        done = subprocess.run(
            [*command, "-c", probe], capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode == 0:
            return command
        reasons.append(done.stderr.strip().rpartition("\n")[2])
    return pytest.skip(f"an ordinary user can not run it here: {reasons}")


def _wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)


def _processes(*argv: str) -> list[int]:
    wanted = b"".join(word.encode() + b"\0" for word in argv)
    return [pid for pid in _pids() if _read(pid, "cmdline") == wanted]


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _networks_in_use() -> set[str]:
    found = set()
    for pid in _pids():
        try:
            found.add(_network_of(pid))
        except OSError:
            continue
    return found


def _network_of(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _registered_networks() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
