"""Real worker processes around a lighthouse, for the tests of elastic training.

Workers are forked, so that each starts in a moment, and write what they see to a file of their
own, line by line, so that nothing is lost when one is killed.
"""

import faulthandler
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback

import torch

CONTEXT = multiprocessing.get_context("fork")
_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL}


_HANGS_S = 30.0
_AGAIN = "FIVEFOLD_SCENE_IS_PLAYED_AGAIN"


class TorchCrashError(AssertionError):
    """A worker died of a signal that nobody sent, or hung: gloo's threads, as groups come and go.

    Its heap is damaged ("free(): invalid pointer"), by day in the first scene of a process in which
    other tests have run, and not in hundreds of scenes of a fresh one.
    """


def again_after_a_crash(test):
    """Play a scene in which gloo itself crashed once more, in a fresh interpreter."""

    @functools.wraps(test)
    def played(tmp_path, **options):
        try:
            test(tmp_path, **options)
        except TorchCrashError:
            if _AGAIN in os.environ:
                raise
            name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].rpartition(" ")[0]
            scene = f"{test.__code__.co_filename}::{name}"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", scene]
            again = subprocess.run(
                command, env=os.environ | {_AGAIN: "1"}, capture_output=True, text=True,
                timeout=240, check=False,
            )  # fmt: skip
            assert again.returncode == 0, again.stdout[-5000:]

    return played


class World:
    """A lighthouse and its workers; a context manager that leaves no process behind."""

    def __init__(self, folder, *, min_workers=1, join_timeout_s=60.0, heartbeat_timeout_s=1.0):
        self.folder = folder
        self.processes = {}
        self._settings = {
            "min_workers": min_workers,
            "join_timeout_s": join_timeout_s,
            "heartbeat_timeout_s": heartbeat_timeout_s,
        }
        self.start_lighthouse("127.0.0.1:0")

    def start_lighthouse(self, bind):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        self._lighthouse = CONTEXT.Process(
            target=_lighthouse_main, args=(sender, bind, self._settings), daemon=True
        )
        self._lighthouse.start()
        assert receiver.poll(20), "the lighthouse did not start"
        self.lighthouse = receiver.recv()

    def kill_lighthouse(self):
        self._lighthouse.kill()
        self._lighthouse.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.processes.values(), self._lighthouse]:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join()

    def start(self, name, work, **options):
        """Fork a worker that runs ``work(log, lighthouse=..., name=..., **options)``."""
        process = CONTEXT.Process(
            target=_worker_main, args=(self, name, work, options), name=name, daemon=True
        )
        process.start()
        self.processes[name] = process

    def kill(self, name, number=signal.SIGKILL):
        os.kill(self.processes[name].pid, number)

    def log(self, name, kind=None):
        """What a worker wrote so far."""
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [e for e in events if kind is None or e["kind"] == kind]

    def until(self, condition, *, what, timeout_s=75.0):
        """Wait for a condition on the logs."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self._require_no_crash()  # the others' errors are what follows
            errors = [e for name in self.processes for e in self.log(name, "error")]
            late = time.monotonic() > deadline_s
            if errors or late:
                self._require_no_hang()
            assert not errors, f"{what} did not happen; errors: {errors}"
            assert not late, f"{what} did not happen"
            time.sleep(0.02)

    def _require_no_crash(self):
        crashed = {n: p.exitcode for n, p in self.processes.items() if p.exitcode in _CRASHES}
        if crashed:
            raise TorchCrashError(str(crashed))

    def _require_no_hang(self):
        paths = [self.folder / f"{name}.stacks" for name in self.processes]
        stacks = {path.stem: path.read_text() for path in paths if path.exists()}
        if any(stacks.values()):
            raise TorchCrashError(f"hung: {stacks}")

    def until_rounds(self, name, count):
        self.until(lambda: len(self.log(name, "round")) >= count, what=f"{name} round {count}")

    def join(self, *names, timeout_s=75.0):
        """Wait for workers to end well."""
        deadline_s = time.monotonic() + timeout_s
        for name in names:
            process = self.processes[name]
            process.join(max(deadline_s - time.monotonic(), 0.1))
            self._require_no_crash()
            errors = {n: self.log(n, "error") for n in self.processes}
            assert process.exitcode == 0, (name, process.exitcode, errors)


class Log:
    def __init__(self, path):
        self._file = path.open("a", buffering=1)

    def __call__(self, kind, **values):
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")


def _lighthouse_main(sender, bind, settings):
    from fivefold.optim import start_lighthouse

    server = start_lighthouse(bind, **settings)
    sender.send(f"127.0.0.1:{server.port}")
    signal.pause()


def _worker_main(world, name, work, options):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    log = Log(world.folder / f"{name}.jsonl")
    stacks = (world.folder / f"{name}.stacks").open("w")
    faulthandler.dump_traceback_later(_HANGS_S, file=stacks)  # if it still runs then
    code = 0
    try:
        work(log, lighthouse=world.lighthouse, name=name, **options)
    except BaseException as error:  # noqa: BLE001 - the test reads it
        log("error", type=type(error).__name__, message=str(error), trace=traceback.format_exc())
        code = 1
    # Without the interpreter's shutdown: gloo's threads may still wait for a dead peer.
    os._exit(code)
