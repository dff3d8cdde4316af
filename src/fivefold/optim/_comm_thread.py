"""One thread that carries out communication jobs in the order in which they came.

A compressed sum has stages that depend on one another, so somebody must stand by between them; and
the ranks' collectives are matched by their order, so nobody else may use the process group
meanwhile. A job's exception reaches whoever waits for it, and all jobs after it fail at once: on a
group whose order is broken they could only time out. On CUDA a job has a stream of its own, ordered
by events: the device as a whole is never synchronised.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from fivefold.errors import CommunicationError

_PATIENCE_S = 15.0  # how long the interpreter's exit waits for what nobody waits for any more
_LETTING_GO_S = 0.02  # gloo's thread holds a collective's tensors a moment longer than it lasts


@contextlib.contextmanager
def named_errors(rank: int, what: str) -> Iterator[None]:
    """Turn the errors of backends (RuntimeErrors for peers and timeouts alike) into ours."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        message = f"rank {rank}: {what} failed: {reason}"
        hint = (
            "a peer ended or the network failed; look at the other ranks' errors, then "
            "start again from the last checkpoint"
        )
        raise CommunicationError(message, hint=hint) from error


class Job:
    """One job on its way, an all-reduce among them; made by ``CommunicationThread.submit``."""

    def __init__(
        self,
        run: Callable[[], None],
        *,
        rank: int,
        what: str,
        handover: Handover | None,
        thread_is_alive: Callable[[], bool],
        sent_bytes: int = 0,
    ) -> None:
        self.launched_at_s = time.perf_counter()
        self.completed_at_s: float | None = None
        self.sent_bytes = sent_bytes
        self._thread_is_alive = thread_is_alive
        self._run: Callable[[], None] | None = run
        self._rank = rank
        self._what = what
        self._handover = handover
        self._device = _current_device()
        self._issued = threading.Event()
        self._error: BaseException | None = None

    @property
    def issued(self) -> bool:
        """Return whether it has been carried out; on CUDA its work may still be under way."""
        return self._issued.is_set()

    def wait(self) -> bool:
        """Block until the results are there; on CUDA, until the current stream waits for them."""
        # Each collective within the job has the group's timeout, so this ends.
        while not self._issued.wait(1.0):
            if not self._thread_is_alive() and not self._issued.is_set():
                message = f"rank {self._rank}: {self._what} was given up: its thread has ended"
                raise CommunicationError(message, hint="the interpreter is ending, or was forked")
        if self._error is not None:
            raise self._error
        if self._handover is not None:
            self._handover.hold_current_streams()
        return True

    def carry_out(self, broken_by: str | None) -> str | None:
        """Run on this thread; return why no later job can succeed, or None."""
        assert self._run is not None, "a job is carried out once"
        if broken_by is None:
            try:
                if self._device is not None:  # a new thread's is the first of the machine
                    torch.cuda.set_device(self._device)
                with named_errors(self._rank, self._what):
                    if self._handover is None:
                        self._run()
                        self.completed_at_s = time.perf_counter()
                    else:
                        with self._handover.entered():
                            self._run()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                self._error = error
        else:
            message = f"rank {self._rank}: {self._what} was not started: {broken_by}"
            self._error = CommunicationError(message, hint="start again from the last checkpoint")
        self._run = None  # it holds buffers
        self._issued.set()
        return None if self._error is None else broken_by or f"{self._what} had failed before"

    def stamp(self) -> None:
        """Wait on CUDA until the issued work has ended, and note when that was."""
        if self._handover is not None and self._error is None:
            self._handover.synchronize()
            self.completed_at_s = time.perf_counter()


class CommunicationThread:
    """Carries out jobs in the order in which they came, on a thread started by the first."""

    # With NCCL, whose collectives do not block the host, a CUDA job is issued by the caller itself:
    # were it another thread, the order of these collectives among those of the training thread
    # (FSDP's) would differ from rank to rank, and two communicators could wait for one another.

    def __init__(self, *, rank: int, issues_at_once: bool = False) -> None:
        self._rank = rank
        self._issues_at_once = issues_at_once
        self._broken_by: str | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_carry_out_all, args=(self._jobs,), name="fivefold-communication", daemon=True
        )
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Jobs refer to this object, so while the program runs no job is cut off.
        self._end = weakref.finalize(self, _end_thread, self._jobs, self._thread)
        self._end.atexit = False

    def close(self) -> None:
        """End the thread, after the jobs that it has."""
        self._end()

    def submit(
        self,
        run: Callable[[], None],
        *,
        tensors: Iterable[torch.Tensor],
        what: str,
        sent_bytes: int = 0,
    ) -> Job:
        """Queue a job."""
        if not self._thread.is_alive() and self._thread.ident is None:
            self._thread.start()
            alive = [one for one in _STARTED if one[1].is_alive()]
            _STARTED[:] = [*alive, (self._jobs, self._thread)]
        handover = Handover.of(tensors, self._streams)
        job = Job(
            run,
            rank=self._rank,
            what=what,
            handover=handover,
            thread_is_alive=self._thread.is_alive,
            sent_bytes=sent_bytes,
        )
        if handover is not None and self._issues_at_once:
            self._broken_by = job.carry_out(self._broken_by)
        self._jobs.put(job)
        return job


class Handover:
    """Events that order one job's side streams against the streams of who waits for it."""

    def __init__(self, streams: list[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._started = [_recorded(torch.cuda.current_stream(side.device)) for side in streams]
        self._ended: list[torch.cuda.Event] = []

    @classmethod
    def of(
        cls, tensors: Iterable[torch.Tensor], streams: dict[torch.device, torch.cuda.Stream]
    ) -> Handover | None:
        """Return one for work on these tensors, which begins after what is queued by now.

        Args:
            tensors: Of any devices; there is nothing to order where none is of CUDA.
            streams: A side stream of each device, made where it is missing.
        """
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        for device in devices - streams.keys():
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return cls([streams[device] for device in devices]) if devices else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block on the side streams, after what the launching streams had queued."""
        with contextlib.ExitStack() as stack:
            for side, started in zip(self._streams, self._started, strict=True):
                side.wait_event(started)
                stack.enter_context(torch.cuda.stream(side))
            try:
                yield
            finally:  # also what has failed may have queued something
                self._ended = [_recorded(side) for side in self._streams]

    def hold_current_streams(self) -> None:
        """Let the current streams wait for the job's work; the host goes on."""
        for side, ended in zip(self._streams, self._ended, strict=True):
            torch.cuda.current_stream(side.device).wait_event(ended)

    def synchronize(self) -> None:
        """Block the host until the job's work has ended."""
        for ended in self._ended:
            ended.synchronize()


def _current_device() -> int | None:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_device()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    with torch.cuda.device(stream.device):
        # Blocking: the thread that waits for it sleeps and leaves its core to the training.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
    return event


def _carry_out_all(jobs: queue.SimpleQueue[Job | None]) -> None:
    broken_by: str | None = None
    while (job := jobs.get()) is not None:
        if not job.issued:
            broken_by = job.carry_out(broken_by)
        with contextlib.suppress(RuntimeError):  # whoever waits for the results is told
            job.stamp()
        del job  # not kept alive while waiting for the next


_Jobs = queue.SimpleQueue["Job | None"]
_STARTED: list[tuple[_Jobs, threading.Thread]] = []


def _end_thread(jobs: _Jobs, thread: threading.Thread) -> None:
    """Let the thread end after its jobs; gloo has no way to cut a collective off."""
    jobs.put(None)
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join(_PATIENCE_S)


@atexit.register
def _end_all() -> None:
    """Wait for every thread, also one that is just letting go of its last job."""
    # A thread that the interpreter's exit cuts off within torch aborts the process, be it this one
    # or gloo's, which may have to free a tensor that Python no longer holds.
    for jobs, thread in _STARTED:
        _end_thread(jobs, thread)
    if _STARTED:
        time.sleep(_LETTING_GO_S)
