"""The ranks of one training run: who we are, and small collectives that fail with clear errors.

A :class:`World` is read from the environment that ``torchrun``, a scheduler or our own launcher
sets (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``). It owns a control group (gloo, on every
machine) for the few bytes that the ranks exchange beside training: agreements, validation sums,
checkpoint plans. Training traffic has groups of its own, so that a control message can never be
matched with a gradient. This module knows nothing of models or methods.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError, ConfigurationError, FivefoldError
from fivefold.train._rendezvous import attempt_store

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """Place of this process among the ranks.

    Args:
        rank: Index of this process, from 0.
        world_size: Number of processes.
        local_rank: Index of this process on its host; picks the CUDA device.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@dataclass(kw_only=True)
class World:
    """The ranks of a run and their control group.

    Args:
        identity: Place of this process.
        device: Device of the model.
        timeout_s: Longest wait on a peer, in seconds.
        control: gloo group for small messages; None where there is one rank.
        owned: Whether :func:`close_world` destroys the default group.
        where: What the run is doing, for messages; the loop keeps it at the current step.
    """

    identity: RankIdentity
    device: torch.device
    timeout_s: float
    control: dist.ProcessGroup | None = None
    owned: bool = False
    where: str = field(default="start")

    @property
    def rank(self) -> int:
        """Index of this process."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.identity.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the shared files."""
        return self.identity.rank == 0

    @property
    def timeout(self) -> timedelta:
        """Longest wait on a peer."""
        return timedelta(seconds=self.timeout_s)

    def gather(self, value: object, *, what: str) -> list[Any]:
        """Every rank's value, on every rank.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with guard(self, f"gathering {what}"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: object, *, what: str) -> Any:
        """Rank 0's value, on every rank.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self.control is None:
            return value
        box = [value]
        with guard(self, f"broadcasting {what}"):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def sum(self, values: list[float], *, what: str) -> list[float]:
        """Sum over the ranks, in float64.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with guard(self, f"all-reduce of {what}"):
            dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]


@contextlib.contextmanager
def guard(world: World, collective: str) -> Iterator[None]:
    """Turn torch's errors about a lost or silent peer into one that says where it happened.

    Raises:
        CommunicationError: The collective failed; names rank, step and collective.
    """
    try:
        yield
    except FivefoldError:
        raise
    except RuntimeError as error:
        # torch raises a plain RuntimeError for most gloo failures, so the place decides, not
        # the type: only collectives run under this guard.
        raise communication_error(world, collective, error) from error


def communication_error(world: World, collective: str, cause: BaseException) -> CommunicationError:
    """Error that names rank, step and collective, with the first line of its cause."""
    reason = " ".join(str(cause).split())[:240]
    message = (
        f"rank {world.rank} of {world.world_size}, {world.where}: {collective} failed: {reason}"
    )
    hint = (
        "a peer died, hangs or cannot be reached; read its log, then run the same command again "
        f"to resume from the newest checkpoint (run.timeout_s is {world.timeout_s:g})"
    )
    return CommunicationError(message, hint=hint)


def read_identity() -> RankIdentity:
    """Read this process's place: from an existing process group, else from the environment.

    One rank where nothing is set.

    Raises:
        ConfigurationError: ``RANK`` is set but one of the other variables is missing or not a
            number.
    """
    if dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        size = dist.get_world_size()
        return RankIdentity(rank=dist.get_rank(), world_size=size, local_rank=local)
    if "RANK" not in os.environ:
        return RankIdentity()
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE") != "1":
        message = f"RANK is set, but {', '.join(missing)} is not"
        hint = "set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start with torchrun"
        raise ConfigurationError(message, hint=hint)
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        message = f"RANK={rank} is outside 0..{size - 1} (WORLD_SIZE={size})"
        raise ConfigurationError(message, hint="give every process its own RANK below WORLD_SIZE")
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    return RankIdentity(rank=rank, world_size=size, local_rank=local)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        message = f"the environment variable {name} is {text!r}, not a number"
        raise ConfigurationError(message, hint=f"set {name} to a non-negative integer")
    return int(text)


def open_world(identity: RankIdentity, *, device: str, timeout_s: float) -> World:
    """Join the other ranks; nothing happens where there is only one.

    Args:
        identity: Place of this process, from :func:`read_identity`.
        device: "auto", "cpu" or "cuda"; auto takes CUDA where there is one.
        timeout_s: Longest wait on a peer, in seconds.

    Returns:
        The world, with a control group where there are peers.

    Raises:
        CommunicationError: The ranks did not find each other in time.
        ConfigurationError: CUDA is asked for, but there is none for this rank.
    """
    world = World(identity=identity, device=_pick_device(device, identity), timeout_s=timeout_s)
    if world.world_size == 1:
        return world
    with guard(world, "forming the process group"):
        if not dist.is_initialized():
            backend = "nccl" if world.device.type == "cuda" else "gloo"
            store = attempt_store(rank=world.rank, world_size=world.world_size, timeout_s=timeout_s)
            dist.init_process_group(
                backend,
                init_method="env://" if store is None else None,
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=world.timeout,
            )
            world.owned = True
        world.control = dist.new_group(backend="gloo", timeout=world.timeout)
    return world


def close_world(world: World) -> None:
    """Leave the group after a run that ended well.

    Not for a run that failed: destroying a group with a collective in flight waits for peers
    that may never answer. Such a process ends with ``os._exit`` after its files are flushed.
    """
    if world.owned and dist.is_initialized():
        dist.destroy_process_group()


def _pick_device(device: str, identity: RankIdentity) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if identity.local_rank >= found:
        message = f"local rank {identity.local_rank} has no CUDA device; this host has {found}"
        hint = 'start at most one rank per device, or set run.device = "cpu"'
        raise ConfigurationError(message, hint=hint)
    torch.cuda.set_device(identity.local_rank)
    return torch.device("cuda", identity.local_rank)
