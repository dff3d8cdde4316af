"""The processes of a run: who we are, how they meet, and small collectives with clear errors.

A rank's place comes from the environment that ``torchrun``, a scheduler or our own launcher sets
(``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``). Beside training the ranks exchange a
few bytes: agreements, validation sums, checkpoint plans. These have a gloo group of their own, so
that a control message can never be matched with a gradient.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # hidden

from fivefold.errors import CommunicationError, ConfigurationError, FivefoldError
from fivefold.runs.ending import StopRequest

Value = TypeVar("Value")

STORE_VARIABLE = "FIVEFOLD_STORE"
"""host:port of the launcher's store; set by ``fivefold train --nproc``."""
_VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_S = 0.02
# A stop is agreed within about two periods; a message every half second costs nothing.
_PERIOD_S = 0.5
_MAX_PERIOD_STEPS = 1000
# A message is read after twice the time that such messages took lately, but a stop must come
# before a scheduler's patience ends.
_SPARE = 2.0
_LONGEST_PERIOD_S = 10.0
_MEMORY = 0.7


class Place(NamedTuple):
    """Place of this process among the ranks; ``local_rank`` counts on its host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@dataclass(kw_only=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 120.0
    control: dist.ProcessGroup | None = None
    owned: bool = False
    where: str = "start"

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which writes the shared files."""
        return self.rank == 0

    @property
    def timeout(self) -> timedelta:
        """Return the longest wait on a peer."""
        return timedelta(seconds=self.timeout_s)

    def gather(self, value: object, *, what: str) -> list[Any]:
        """Return every rank's value, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.guard(f"gathering {what}"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, values: list[float], *, what: str) -> list[float]:
        """Return the sum over the ranks, in float64."""
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with self.guard(f"all-reduce of {what}"):
            dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def together(self, action: Callable[[], Value], *, what: str) -> list[Value]:
        """Do something on every rank: all get all results, or all raise the first rank's error."""
        value: Value | None = None
        failed: FivefoldError | None = None
        try:
            value = action()
        except FivefoldError as error:
            failed = error
        outcomes = self.gather((value, failed), what=what)
        for _, other in outcomes:
            if other is not None:
                raise other
        return [result for result, _ in outcomes]

    def on_main(self, action: Callable[[], Value], *, what: str) -> Value:
        """Do something on rank 0: all get its result, or all raise its error."""
        results: list[Any] = self.together(action if self.is_main else lambda: None, what=what)
        value: Value = results[0]
        return value

    @contextlib.contextmanager
    def guard(self, collective: str) -> Iterator[None]:
        """Turn torch's errors about a lost or silent peer into one that says where it happened."""
        try:
            yield
        except FivefoldError:
            raise
        except RuntimeError as error:
            # torch raises a plain RuntimeError for most gloo failures, so the place decides, not
            # the type: only collectives run under this guard.
            if self.world_size == 1:
                raise
            reason = " ".join(str(error).split())[:240]
            message = (
                f"rank {self.rank} of {self.world_size}, {self.where}: "
                f"{collective} failed: {reason}"
            )
            hint = (
                "a peer died, hangs or cannot be reached; read its log, then run the same command "
                f"again to resume from the newest checkpoint (run.timeout_s is {self.timeout_s:g})"
            )
            raise CommunicationError(message, hint=hint) from error


def read_place() -> Place:
    """Read this process's place: from an existing process group, else from the environment.

    One rank where nothing is set.
    """
    if dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return Place(dist.get_rank(), dist.get_world_size(), local)
    if "RANK" not in os.environ:
        return Place()
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE") != "1":
        message = f"RANK is set, but {', '.join(missing)} is not"
        hint = "set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start with torchrun"
        raise ConfigurationError(message, hint=hint)
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        message = f"RANK={rank} is outside 0..{size - 1} (WORLD_SIZE={size})"
        raise ConfigurationError(message, hint="give every process its own RANK below WORLD_SIZE")
    return Place(rank, size, _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        message = f"the environment variable {name} is {text!r}, not a number"
        raise ConfigurationError(message, hint=f"set {name} to a non-negative integer")
    return int(text)


def open_ranks(place: Place | None = None, *, device: str, timeout_s: float) -> Ranks:
    """Join the other ranks; nothing happens where there is only one."""
    rank, world_size, local_rank = place or read_place()
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        device=_pick_device(device, local_rank),
        timeout_s=timeout_s,
    )
    if world_size == 1:
        return ranks
    with ranks.guard("forming the process group"):
        if not dist.is_initialized():
            backend = "nccl" if ranks.device.type == "cuda" else "gloo"
            store = _attempt_store(rank, world_size, timeout_s=timeout_s)
            dist.init_process_group(
                backend,
                init_method="env://" if store is None else None,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=ranks.timeout,
            )
            ranks.owned = True
        ranks.control = dist.new_group(backend="gloo", timeout=ranks.timeout)
    return ranks


def close_ranks(ranks: Ranks) -> None:
    """Leave the group after a run that ended well.

    Not for a run that failed: destroying a group with a collective in flight waits for peers
    that may never answer. Such a process ends with ``os._exit`` after its files are flushed.
    """
    if ranks.owned and dist.is_initialized():
        dist.destroy_process_group()


def _pick_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found:
        message = f"local rank {local_rank} has no CUDA device; this host has {found}"
        hint = 'start at most one rank per device, or set run.device = "cpu"'
        raise ConfigurationError(message, hint=hint)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


# -- a clean store for every start of the ranks ---------------------------------------------------
#
# torchrun restarts ranks without a new store: a rank then finds there the addresses of the dead
# ranks before it and hangs. Nothing in the environment tells one attempt from the next on all
# hosts alike (the restart count grows only where a rank failed), so the ranks agree on a fresh name
# for the attempt and keep all keys under it. Rank 0 makes up the name. Each other rank makes up a
# token of its own, and takes the name only from an answer that holds this token: an answer to a
# dead rank cannot be taken for one to the living.


def _attempt_store(rank: int, world_size: int, *, timeout_s: float) -> Store | None:
    """Return a store with no keys of earlier starts; None where torch makes a new one itself."""
    address = os.environ.get(STORE_VARIABLE)
    if address is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    shared = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(name_attempt(shared, rank, world_size, timeout_s=timeout_s), shared)


def name_attempt(store: Store, rank: int, world_size: int, *, timeout_s: float) -> str:
    """Return the name of this start of the ranks, the same on all and never used before."""
    deadline_s = time.monotonic() + timeout_s
    own = uuid.uuid4().hex
    waiting = set(range(1, world_size)) if rank == 0 else {rank}
    while time.monotonic() < deadline_s:
        if rank == 0:
            waiting = {other for other in waiting if not _welcomed(store, other, own)}
            if not waiting:
                return own
        else:
            name = _welcome(store, rank, own)
            if name is not None:
                return name
        time.sleep(_POLL_S)
    missing = sorted(waiting) if rank == 0 else [0]
    raise RuntimeError(f"ranks {missing} did not come within {timeout_s:g} s")


def _welcomed(store: Store, other: int, name: str) -> bool:
    """Answer the newest token of a rank, on rank 0; return whether the rank has taken the name."""
    token = _read(store, f"token/{other}")
    if token is not None:
        store.set(f"answer/{other}", f"{token} {name}")
    return _read(store, f"taken/{other}") == name


def _welcome(store: Store, rank: int, token: str) -> str | None:
    """Show the token, on another rank; return the name once rank 0 has answered it."""
    store.set(f"token/{rank}", token)
    answered, _, name = (_read(store, f"answer/{rank}") or "").partition(" ")
    if answered != token:
        return None
    store.set(f"taken/{rank}", name)
    return name


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


class StopAgreement:
    """Turn a signal on any rank into one decision at one step on all ranks.

    A rank that is told to stop must not stop alone, or its peers wait for it in the next
    collective. So the ranks take the maximum of their requests: a small all-reduce on a group of
    its own is launched every few steps and read the same number of steps later. Since launch and
    reading come at the same steps everywhere, all decide alike. The number of steps follows how
    long such a message takes, behind a round's payload on a slow link or for a rank that is behind
    within its round, so that it has arrived when it is read.
    """

    def __init__(self, ranks: Ranks, stop: StopRequest) -> None:
        self._ranks = ranks
        self._stop = stop
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._message = torch.zeros(2, dtype=torch.int64)
        self._period_steps = 1
        self._launch_step = 0
        self._launch_s = 0.0
        self._latency_s = 0.0
        self._arrival: torch.futures.Future[float]
        self._waits: list[tuple[float, float]] = []
        if ranks.world_size > 1:
            with ranks.guard("setting up the agreement on stopping"):
                self._group = dist.new_group(backend="gloo", timeout=ranks.timeout)

    def start(self, step: int) -> None:
        """Launch the first agreement before the first step."""
        self._launch(step, step_s=_PERIOD_S)

    def poll(self, step: int) -> bool:
        """Say, after a step, whether all ranks stop here."""
        if self._group is None:
            return self._stop.requested
        if step < self._launch_step + self._period_steps:
            return False
        launched_s, steps = self._launch_s, step - self._launch_step
        stop, self._period_steps = self._read()
        if stop:
            return True
        self._launch(step, step_s=(time.perf_counter() - launched_s) / steps)
        return False

    def drain(self) -> None:
        """Read the last message, so that nothing is in flight when the group ends."""
        if self._work is not None:
            self._read()

    def take_waits(self) -> list[tuple[float, float]]:
        """Return begin and end of the waits since the last call, as of ``time.perf_counter``."""
        taken, self._waits = self._waits, []
        return taken

    def _launch(self, step: int, *, step_s: float) -> None:
        if self._group is None:
            return
        # The period travels with the request: ranks measure different step times, but must launch
        # and read at the same steps.
        period_s = min(max(_PERIOD_S, _SPARE * self._latency_s), _LONGEST_PERIOD_S)
        steps = math.ceil(period_s / max(step_s, period_s / _MAX_PERIOD_STEPS))
        self._message[0], self._message[1] = int(self._stop.requested), steps
        self._launch_step, self._launch_s = step, time.perf_counter()
        with self._ranks.guard("the agreement on stopping"):
            self._work = dist.all_reduce(
                self._message, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
            assert self._work is not None, "an asynchronous collective of a member returns its work"
            self._arrival = self._work.get_future().then(lambda _: time.perf_counter())

    def _read(self) -> tuple[bool, int]:
        assert self._work is not None, "start() launches the first message"
        start_s = time.perf_counter()
        with self._ranks.guard("the agreement on stopping"):
            self._work.wait()
            arrived_s = self._arrival.wait()
        self._work = None
        self._latency_s = max(arrived_s - self._launch_s, _MEMORY * self._latency_s)
        self._waits.append((start_s, time.perf_counter()))
        stop, period = self._message.tolist()
        return bool(stop), period
