"""Runs one command on every host of an emulated cluster: the caller's half.

Chooses how to make the links, starts the supervisor, follows its events and hands signals on. The
caller's process never enters a namespace and never changes the machine's network.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import CommunicationError, ConfigurationError, UnsupportedError
from fivefold.lab._network import read_counts
from fivefold.lab._plan import Job, address_of, host_name, lab_facts
from fivefold.lab._spec import LabSpec
from fivefold.lab._state import make_run_folder, write_state
from fivefold.lab.capabilities import find_tool, isolation_command, probe_capabilities
from fivefold.units import format_duration_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fivefold.lab.capabilities import Capability


_SIGNAL_EXIT = 128
_TIMEOUT_EXIT = 124  # as the tool `timeout` has it
_TAIL_LINES = 15
_logger = logging.getLogger(__name__)
_END_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Result of one rank."""

    rank: int
    host: int
    exit_code: int  # minus the signal's number where a signal ended it
    wall_s: float  # from the start of the ranks
    stdout_path: Path
    stderr_path: Path

    def stdout(self) -> str:
        """Return what it wrote to standard output."""
        return self.stdout_path.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        """Return what it wrote to standard error."""
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """Result of a run.

    Args:
        ranks: One entry per rank.
        first_failed_rank: The rank that failed first; None where all ended with 0.
        timed_out: Whether the time limit ended the run.
        wall_s: From the start of the ranks to the end of the last.
        log_folder: Folder of the ranks' output.
        lab: The cluster as the ranks saw it in ``FIVEFOLD_LAB``.
        aggregation: What each aggregating switch counted, as
            ``SwitchState`` names it; a switch that died is not there.
    """

    ranks: tuple[RankResult, ...]
    first_failed_rank: int | None
    timed_out: bool
    wall_s: float
    log_folder: Path
    lab: dict[str, Any]
    aggregation: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return the shell's code: 0, 124 after the time limit, else the first failing rank's."""
        if self.timed_out:
            return _TIMEOUT_EXIT
        if self.first_failed_rank is None:
            return 0
        code = self.ranks[self.first_failed_rank].exit_code
        return _SIGNAL_EXIT - code if code < 0 else code

    def check(self) -> LabResult:
        """Raise where a rank failed.

        Returns:
            This result, where all ranks ended with 0.

        Raises:
            CommunicationError: The run failed; the message ends with the failing rank's last lines.
        """
        if self.exit_code == 0:
            return self
        if self.first_failed_rank is None:
            raise CommunicationError(
                f"the lab's time limit ended the run after {self.wall_s:.1f} s"
            )
        failed = self.ranks[self.first_failed_rank]
        tail = "\n".join(failed.stderr().splitlines()[-_TAIL_LINES:])
        limit = "; the time limit ended the run" if self.timed_out else ""
        raise CommunicationError(
            f"rank {failed.rank} on host{failed.host} ended with {failed.exit_code}{limit}; "
            f"its last lines were:\n{tail}",
            hint=f"all output is in {self.log_folder}",
        )


def run_lab(
    spec: LabSpec,
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    grace_s: float = 30.0,
    log_folder: str | Path | None = None,
    allow_unshaped: bool = False,
    stream: bool = True,
) -> LabResult:
    """Run a command on every host of an emulated cluster and wait for all of them.

    Each rank gets the environment that ``torchrun`` would give it, the caller's other variables,
    working folder and files. Everything that the run makes ends with it, also when this process is
    killed. SIGINT, SIGTERM and SIGHUP become SIGTERM for the ranks; once the lab is down they are
    delivered to this process as usual.

    Args:
        spec: Hosts and links.
        command: What each rank runs, with its arguments.
        timeout_s: Longest run in seconds; None has no limit.
        grace_s: Seconds that ranks get to end by themselves, after a failure before SIGTERM, and
            after SIGTERM before SIGKILL.
        log_folder: Folder for the ranks' output (``rank0.out``, ``rank0.err``, ...); None makes a
            new one in the system's temporary folder.
        allow_unshaped: Where the machine cannot make the links, run over loopback all the same.
        stream: Show output as it comes: rank 0's standard output on standard output, all else on
            standard error with the host before each line.

    Returns:
        Exit codes, wall time and log files.

    Raises:
        ConfigurationError: The command, a time or the log folder is not usable.
        UnsupportedError: This machine cannot make such links and ``allow_unshaped`` is off.
        KeyboardInterrupt: SIGINT came; the ranks have ended.

    Examples:
        >>> spec = LabSpec(hosts=2, rate="200Mbit/s")
        >>> run_lab(spec, ["true"], allow_unshaped=True, stream=False).exit_code
        0
    """
    _check_request(command, timeout_s=timeout_s, grace_s=grace_s)
    means, reason = choose_means(spec, allow_unshaped=allow_unshaped)
    isolation = probe_capabilities().isolation
    # A cluster that asks for nothing of its links still gets hosts of its own.
    isolated = isolation is not None and (means is not None or not spec.shapes)
    hosts = [(address_of(host), host_name(host)) for host in range(spec.hosts)]
    job = Job(
        spec=spec,
        facts=lab_facts(spec, means, reason),
        command=[str(word) for word in command],
        port=None if isolated else _free_port(),
        timeout_s=timeout_s,
        grace_s=grace_s,
        log_folder=str(_make_log_folder(log_folder)),
        run_folder=str(make_run_folder(hosts)),
        stream=stream,
    )
    run = _Run(job, isolation=isolation if isolated else None)
    try:
        run.follow()
    finally:
        shutil.rmtree(job.run_folder, ignore_errors=True)
    if run.signals:
        _logger.warning("the lab is down; output is in %s", job.log_folder)
        signal.raise_signal(run.signals[0])
    return run.result()


def choose_means(spec: LabSpec, *, allow_unshaped: bool) -> tuple[str | None, str | None]:
    able = probe_capabilities()
    # Over loopback there is no switch in which something could be summed.
    allow_unshaped = allow_unshaped and not spec.aggregators
    if spec.aggregators and not able["namespaces"].works:
        return _refuse([able["namespaces"]], allow_unshaped=False)
    if not spec.shapes:
        return None, "no rate, delay or loss was asked for"
    if not able["namespaces"].works:
        return _refuse([able["namespaces"]], allow_unshaped=allow_unshaped)
    queue = ["tbf"] if spec.classes == 1 else ["htb", "u32"]
    bridge = ["namespaces", "bridge", "veth", *queue]
    candidates = {queue[0]: bridge}
    if spec.delays_or_loses:
        candidates = {f"{queue[0]}+netem": [*bridge, "netem"]}
        if spec.classes == 1 and not spec.aggregators:
            candidates["relay"] = ["namespaces", "tun"]
        elif not able["netem"].works:
            raise UnsupportedError(
                "delay, jitter and loss are made by the relay here, which has no classes and no "
                f"aggregating switch; netem: {able['netem'].reason}",
                hint="leave out delay and loss, or load the kernel module 'sch_netem'",
            )
    missing = []
    for means, needs in candidates.items():
        missing = [able[name] for name in needs if not able[name].works]
        if not missing:
            return means, None
    return _refuse(missing, allow_unshaped=allow_unshaped)


def _refuse(missing: list[Capability], *, allow_unshaped: bool) -> tuple[None, str]:
    reason = "; ".join(f"{item.name}: {item.reason}" for item in missing)
    if allow_unshaped:
        return None, reason
    hint = f"{missing[0].fix}; or allow an unshaped run over loopback with --allow-unshaped"
    raise UnsupportedError(f"this machine cannot shape the links: {reason}", hint=hint)


class _Run:
    """One run, seen from outside: what the supervisor reports."""

    def __init__(self, job: Job, *, isolation: str | None) -> None:
        self._job, self._spec = job, job.spec
        self._isolation = isolation
        self._exits: dict[int, tuple[int, float]] = {}
        self._end: dict[str, Any] | None = None
        self._first_failed: int | None = None
        self._relay_died = False
        self._supervisor_code = 0
        self._stopping = False
        self._listening: list[int] = []
        self.signals: list[signal.Signals] = []

    def follow(self) -> None:
        """Start the supervisor and stay with it until all is down."""
        control_read, control_write = os.pipe()
        event_read, event_write = os.pipe()
        with _handed_on(self._listening, received=self.signals):
            process = self._start(control_read, event_write)
            try:
                os.close(control_read)
                os.close(event_write)
                write_state(
                    Path(self._job.run_folder), self._job.command, supervisor_pid=process.pid
                )
                control = os.fdopen(control_write, "wb", closefd=False)
                with suppress(BrokenPipeError), control:  # it ended at once: none will say "end"
                    control.write(base64.b64encode(pickle.dumps(self._job)) + b"\n")
                with os.fdopen(event_read, encoding="utf-8") as events:
                    for line in events:
                        self._take(json.loads(line))
                        if not self._listening:  # before its first event it reads the job only
                            self._listening.append(control_write)
                            if self.signals:
                                os.write(control_write, b"stop\n")
            finally:
                self._listening.clear()
                os.close(control_write)  # cuts the lifeline: the supervisor ends if it has not
                try:
                    process.wait(_END_WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._supervisor_code = process.returncode

    def result(self) -> LabResult:
        if self._relay_died:
            msg = "the relay ended early, so the links were gone"
            raise UnsupportedError(msg, hint=f"output is in {self._job.log_folder}; run again")
        if self._end is None:
            raise UnsupportedError(
                f"the lab's supervisor ended early with {self._supervisor_code}",
                hint=f"output so far is in {self._job.log_folder}",
            )
        folder = Path(self._job.log_folder)
        ranks = tuple(
            RankResult(
                rank=rank,
                host=rank // self._spec.nproc_per_host,
                exit_code=code,
                wall_s=at_s,
                stdout_path=folder / f"rank{rank}.out",
                stderr_path=folder / f"rank{rank}.err",
            )
            for rank, (code, at_s) in sorted(self._exits.items())
        )
        return LabResult(
            ranks=ranks,
            first_failed_rank=self._first_failed,
            timed_out=self._end["timed_out"],
            wall_s=max(rank.wall_s for rank in ranks),
            log_folder=folder,
            lab=self._job.facts,
            aggregation=read_counts(folder, list(self._spec.aggregators)),
        )

    def _start(self, control_fd: int, event_fd: int) -> subprocess.Popen[bytes]:
        argv: list[str] = []
        if (setpriv := find_tool("setpriv")) is not None:
            # A second line of defence beside the control pipe.
            argv += [setpriv, "--pdeathsig", "KILL"]
        if self._isolation is not None:
            argv += isolation_command(self._isolation)
        argv += [sys.executable, "-P", "-m", "fivefold.lab._supervisor"]
        return subprocess.Popen(
            [*argv, str(control_fd), str(event_fd)],
            pass_fds=(control_fd, event_fd),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to this process, which hands it on
        )

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "exit":
            self._take_exit(event)
        elif kind == "signal":
            ranks = ", ".join(str(rank) for rank in event["ranks"])
            self._stopping = True
            _logger.warning("%s to rank %s", event["signal"], ranks)
        elif kind == "relay_died":
            self._relay_died = True
        elif kind == "error":
            raise UnsupportedError(
                f"the lab could not start: {event['message']}", hint=event["hint"]
            )
        elif kind == "end":
            self._end = event

    def _take_exit(self, event: dict[str, Any]) -> None:
        rank, code = event["rank"], event["code"]
        self._exits[rank] = code, event["at_s"]
        if code == 0 or self._first_failed is not None:
            return
        self._first_failed = rank
        host = host_name(rank // self._spec.nproc_per_host)
        others = self._spec.world_size - len(self._exits)
        waits = others > 0 and not self._stopping
        grace = f"; the others get {format_duration_s(self._job.grace_s)}" if waits else ""
        _logger.warning("rank %d on %s %s%s", rank, host, _describe_exit(code), grace)


@contextmanager
def _handed_on(control_fds: list[int], *, received: list[signal.Signals]) -> Iterator[None]:
    """Turn signals into requests to the supervisor, once it listens, and collect them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return

    def hand_on(number: int, _: object) -> None:
        for control_fd in control_fds:
            with suppress(OSError):
                os.write(control_fd, b"kill\n" if received else b"stop\n")
        received.append(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What is ignored stays ignored: nohup, and background jobs of a script.
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, hand_on) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _check_request(command: Sequence[str], *, timeout_s: float | None, grace_s: float) -> None:
    if isinstance(command, str) or not command:
        raise ConfigurationError(
            f"command must be a list of words; got {command!r}",
            hint="for example [sys.executable, 'train.py']",
        )
    if shutil.which(str(command[0])) is None:
        raise ConfigurationError(
            f"there is no program {str(command[0])!r}",
            hint="give its path, or a name that is found on PATH",
        )
    if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):
        raise ConfigurationError(f"timeout_s must be more than zero; got {timeout_s!r:.40}")
    if not isinstance(grace_s, Real) or not grace_s >= 0:
        raise ConfigurationError(f"grace_s must not be negative; got {grace_s!r:.40}")


def _make_log_folder(log_folder: str | Path | None) -> Path:
    if log_folder is None:
        return Path(tempfile.mkdtemp(prefix="fivefold-logs-"))
    folder = Path(log_folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the log folder {folder} cannot be made: {error.strerror}", hint="choose another"
        ) from error
    (folder / "relay.json").unlink(missing_ok=True)  # an earlier run's counts
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
