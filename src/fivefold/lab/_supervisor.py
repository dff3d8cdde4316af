"""The supervisor: the one process from which everything of a run hangs.

Runs as ``python -m fivefold.lab._supervisor CONTROL_FD EVENT_FD``, the first process of private
namespaces (or an ordinary one that kills its ranks' process groups): when it ends, the kernel ends
all others in there. It ends when its ranks have, or when the pipe from the lab's caller closes,
which also a kill -9 of the caller does. Control pipe in: one line with the job, then ``stop`` or
``kill``. Event pipe out: JSON lines.
"""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import resource
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fivefold.errors import FivefoldError
from fivefold.lab._linux import become_host, become_subreaper, die_with_parent
from fivefold.lab._network import Aggregators, Network, build_network
from fivefold.lab._plan import Job, host_name, rank_environment

_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_FIRST_PROCESS = 1
_LONGEST_SLEEP_S = 1.0
_PUMP_END_S = 5.0
_PUMP_TURN_S = 0.2
_MAX_FILES = 65_536
_LIFELINE_CUT = 137
_COLOURS = (36, 33, 35, 32, 34, 31)


class Ending:
    """The rules by which a run ends."""

    def __init__(
        self, ranks: int, *, started_s: float, timeout_s: float | None, grace_s: float
    ) -> None:
        self.running = set(range(ranks))
        self.first_failure: int | None = None
        self.timed_out = False
        self._grace_s = grace_s
        self._timeout_at_s = math.inf if timeout_s is None else started_s + timeout_s
        self._terminate_at_s = self._kill_at_s = math.inf

    def rank_ended(self, now_s: float, *, rank: int, code: int) -> None:
        self.running.discard(rank)
        if code != 0 and self.first_failure is None:
            self.first_failure = rank
            if self._kill_at_s == self._terminate_at_s == math.inf:
                self._terminate_at_s = now_s + self._grace_s

    def stop(self, now_s: float) -> None:
        if self._kill_at_s == math.inf:
            self._terminate_at_s = now_s

    def kill(self, now_s: float) -> None:
        """End the run without waiting any longer."""
        self._terminate_at_s, self._kill_at_s = math.inf, now_s

    @property
    def next_s(self) -> float:
        """Return when :meth:`due` has to be asked next, if nothing happens before."""
        return min(self._timeout_at_s, self._terminate_at_s, self._kill_at_s)

    def due(self, now_s: float) -> signal.Signals | None:
        """Return the signal that the ranks still running get now, if any."""
        if now_s >= self._timeout_at_s:
            self._timeout_at_s = math.inf
            self.timed_out = True
            self.stop(now_s)
        if now_s >= self._terminate_at_s:
            self._terminate_at_s, self._kill_at_s = math.inf, now_s + self._grace_s
            return signal.SIGTERM
        if now_s >= self._kill_at_s:
            self._kill_at_s = now_s + self._grace_s
            return signal.SIGKILL
        return None


@dataclass
class Stream:
    """One pipe and where its contents go."""

    source: IO[bytes]
    path: Path
    sink_fd: int | None
    prefix: bytes = b""
    _pending: bytes = field(default=b"", init=False)

    def show(self, data: bytes) -> None:
        """Pass data on to the sink; whole lines only where there is a prefix."""
        if self.sink_fd is None:
            return
        if not self.prefix:
            self._write(data)
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        self._write(b"".join(self.prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Pass on a last line that has no end."""
        if self._pending:
            self.show(b"\n")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self.sink_fd is not None:
            try:
                view = view[os.write(self.sink_fd, view) :]
            except BlockingIOError:  # someone made the terminal non-blocking
                select.select((), [self.sink_fd], ())
            except OSError:  # the reader has gone: the file still gets everything
                self.sink_fd = None


class Pump:
    """A thread that empties streams until all have ended."""

    def __init__(self, streams: list[Stream]) -> None:
        self._selector = selectors.DefaultSelector()
        for stream in streams:
            file_fd = os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._selector.register(stream.source, selectors.EVENT_READ, (stream, file_fd))
        self._thread = threading.Thread(target=self._run, name="log pump", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until every pipe has ended, at most so long; return whether they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                stream, file_fd = key.data
                data = os.read(stream.source.fileno(), _CHUNK_BYTES)
                if data:
                    with suppress(OSError):  # a full disk must not stop the ranks
                        os.write(file_fd, data)
                    stream.show(data)
                else:
                    stream.end()
                    self._selector.unregister(stream.source)
                    stream.source.close()
                    os.close(file_fd)


class Supervisor:
    """One run, from the network to the last exit code."""

    def __init__(self, job: Job, *, control_fd: int, event_fd: int) -> None:
        self._job, self._spec = job, job.spec
        self._control_fd, self._event_fd = control_fd, event_fd
        self._network: Network | None = None
        self._aggregators: Aggregators | None = None
        self._ranks: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._wake_fd, write_fd = os.pipe()
        for fd in (self._wake_fd, write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler makes the wake-up happen
        self._started_s = time.monotonic()
        self._file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        _, most = self._file_limit
        wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(most, _MAX_FILES)
        # Five descriptors for each rank; the ranks themselves get the caller's limit back.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

    def run(self) -> None:
        job = self._job
        if job.port is None:
            counts_path = Path(job.log_folder) / "relay.json"
            self._network = build_network(
                self._spec, means=job.facts["means"], counts_path=counts_path
            )
            if self._spec.aggregators:
                self._aggregators = Aggregators(
                    self._spec, self._network, Path(job.log_folder), control_fd=self._control_fd
                )
        self._started_s = time.monotonic()
        streams = []
        for rank in range(self._spec.world_size):
            process = self._start_rank(rank)
            self._ranks[process.pid] = (rank, process)
            streams += self._streams_of(rank, process)
        pump = Pump(streams)
        self._emit("up")
        ending = Ending(
            self._spec.world_size,
            started_s=self._started_s,
            timeout_s=job.timeout_s,
            grace_s=job.grace_s,
        )
        while ending.running:
            self._watch(ending)
        if self._network is not None:
            self._network.end_relay()
        if self._aggregators is not None:
            self._aggregators.end()
        self._kill_leftovers()
        self._drain(pump, ending)
        self._emit("end", timed_out=ending.timed_out)

    def _start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        job, host = self._job, rank // self._spec.nproc_per_host
        env = rank_environment(rank, self._spec, job.facts, base=os.environ, port=job.port)

        def enter() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._file_limit)
            if self._network is None:
                with suppress(OSError):
                    die_with_parent(signal.SIGKILL)
            else:
                name = host_name(host)
                become_host(self._network.fds[name], name=name, folder=Path(job.run_folder))

        return subprocess.Popen(
            job.command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # No thread runs yet, so code between fork and exec is safe here.
            preexec_fn=enter,  # noqa: PLW1509 - see above
        )

    def _streams_of(self, rank: int, process: subprocess.Popen[bytes]) -> list[Stream]:
        host, local_rank = divmod(rank, self._spec.nproc_per_host)
        stem, shown = Path(self._job.log_folder) / f"rank{rank}", self._job.stream
        name = host_name(host)
        if self._spec.nproc_per_host > 1:
            name += f":{local_rank}"
        mark = f"[{name}]"
        if shown and os.isatty(2) and not os.environ.get("NO_COLOR"):
            mark = f"\x1b[{_COLOURS[host % len(_COLOURS)]}m{mark}\x1b[0m"
        prefix, stderr_fd = f"{mark} ".encode(), 2 if shown else None
        assert process.stdout is not None, "it is a pipe"
        assert process.stderr is not None, "it is a pipe"
        out = Stream(process.stdout, stem.with_suffix(".out"), stderr_fd, prefix)
        if shown and rank == 0:
            out = Stream(process.stdout, stem.with_suffix(".out"), 1)
        return [out, Stream(process.stderr, stem.with_suffix(".err"), stderr_fd, prefix)]

    def _watch(self, ending: Ending) -> None:
        wait_s = min(ending.next_s - time.monotonic(), _LONGEST_SLEEP_S)
        ready, _, _ = select.select([self._control_fd, self._wake_fd], (), (), max(wait_s, 0.0))
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        if self._control_fd in ready:
            self._obey(os.read(self._control_fd, 4096), ending)
        self._reap(ending)
        number = ending.due(time.monotonic())
        if number is not None and ending.running:
            self._emit("signal", signal=number.name, ranks=sorted(ending.running))
            self._signal_ranks(number, ending.running)

    def _obey(self, request: bytes, ending: Ending) -> None:
        if not request:  # the caller is gone: nobody waits for this run any more
            self._kill_leftovers()
            os._exit(_LIFELINE_CUT)
        if b"kill" in request:
            ending.kill(time.monotonic())
        else:
            ending.stop(time.monotonic())

    def _reap(self, ending: Ending) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._ranks:
                rank, process = self._ranks[pid]
                process.returncode = code  # reaped here, not by subprocess
                now_s = time.monotonic()
                ending.rank_ended(now_s, rank=rank, code=code)
                self._emit("exit", rank=rank, code=code, at_s=now_s - self._started_s)
            elif self._network and self._network.relay and pid == self._network.relay.pid:
                self._network.relay.returncode = code
                self._emit("relay_died", code=code)
                ending.stop(time.monotonic())

    def _signal_ranks(self, number: signal.Signals, running: set[int]) -> None:
        for pid, (rank, _) in self._ranks.items():
            if rank in running:
                with suppress(ProcessLookupError):
                    # A polite signal is the command's to hand on; a kill is for all it started.
                    (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def _drain(self, pump: Pump, ending: Ending) -> None:
        # A reader that does not read (a pager) may take its time. Without a PID namespace a
        # process that left its group may hold a pipe open for ever, so that has a limit.
        waited_s = 0.0
        while not pump.join(_PUMP_TURN_S):
            waited_s += _PUMP_TURN_S
            ready, _, _ = select.select([self._control_fd], (), (), 0)
            if ready:
                self._obey(os.read(self._control_fd, 4096), ending)
                return
            if os.getpid() != _FIRST_PROCESS and waited_s > _PUMP_END_S:
                return

    def _kill_leftovers(self) -> None:
        if os.getpid() == _FIRST_PROCESS:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everyone in this PID namespace but this process
            return
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _emit(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, **fields}) + "\n"
        with suppress(BrokenPipeError):  # the caller is gone; the control pipe says so next
            os.write(self._event_fd, line.encode())


def main(arguments: list[str]) -> None:
    """Run the job that the control pipe brings; the arguments are the two pipes."""
    control_fd, event_fd = int(arguments[0]), int(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Requests come over the control pipe. A handler, because ranks would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    for fd in (control_fd, event_fd):
        os.set_inheritable(fd, False)
    become_subreaper()
    job: Job = pickle.loads(base64.b64decode(_read_line(control_fd)))  # noqa: S301 - our caller's
    try:
        Supervisor(job, control_fd=control_fd, event_fd=event_fd).run()
    except (FivefoldError, OSError, subprocess.SubprocessError) as error:
        hint = error.hint if isinstance(error, FivefoldError) else None
        message = error.message if isinstance(error, FivefoldError) else str(error)
        report = {"event": "error", "message": message, "hint": hint}
        os.write(event_fd, (json.dumps(report) + "\n").encode())
        sys.exit(1)


def _read_line(fd: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            os._exit(_LIFELINE_CUT)
        data += chunk
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
