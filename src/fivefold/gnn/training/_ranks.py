"""The processes of one training run, and the few bytes that they exchange beside gradients.

A rank's place comes from the environment that ``torchrun`` or a scheduler sets (``RANK``,
``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``). Control messages have a gloo group of their
own. This module knows nothing of models or data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError, ConfigurationError, FivefoldError

_VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(kw_only=True)
class Ranks:
    """This process among its peers.

    Args:
        rank: Number of this process.
        world_size: Number of processes.
        device: Where the model is.
        control: gloo group for small messages; None where there is one process.
        owned: Whether ``close_ranks`` ends the default group.
        where: What the run is doing, for messages.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    control: dist.ProcessGroup | None = None
    owned: bool = False
    where: str = "the start"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the shared files."""
        return self.rank == 0

    def gather(self, value: object, *, what: str) -> list[Any]:
        """Every rank's value, on every rank.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.guard(f"gathering {what}"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, values: list[float], *, what: str) -> list[float]:
        """Sum over the ranks, in float64.

        Raises:
            CommunicationError: A peer died or did not answer in time.
        """
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with self.guard(f"summing {what}"):
            dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn torch's errors about a lost or silent peer into one that says where it happened.

        Raises:
            CommunicationError: The collective failed; names rank, step and collective.
        """
        try:
            yield
        except FivefoldError:
            raise
        except RuntimeError as error:
            if self.world_size == 1:
                raise
            reason = " ".join(str(error).split())[:240]
            message = (
                f"rank {self.rank} of {self.world_size}, {self.where}: {what} failed: {reason}"
            )
            hint = "a peer died or hangs; read its log, then run the same command again to resume"
            raise CommunicationError(message, hint=hint) from error


def read_place() -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this host) from the environment; (0, 1, 0) by default.

    Raises:
        ConfigurationError: Some of the variables are missing or make no sense.
    """
    if "RANK" not in os.environ:
        return 0, 1, 0
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        message = f"RANK is set, but {', '.join(missing)} is not"
        raise ConfigurationError(message, hint="start with torchrun, or unset RANK")
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", "0"))
    except ValueError as error:
        message = f"RANK, WORLD_SIZE or LOCAL_RANK is not a number: {error}"
        raise ConfigurationError(message, hint="start with torchrun") from None
    if not 0 <= rank < size:
        message = f"RANK={rank} is outside 0..{size - 1} (WORLD_SIZE={size})"
        raise ConfigurationError(message, hint="give every process its own RANK below WORLD_SIZE")
    return rank, size, local


def open_ranks(*, device: str, timeout_s: float) -> Ranks:
    """Join the other ranks; nothing happens where there is only one.

    Args:
        device: "auto", "cpu" or "cuda"; auto takes CUDA where there is one.
        timeout_s: Longest wait on a peer.

    Raises:
        CommunicationError: The ranks did not find each other in time.
        ConfigurationError: CUDA is asked for and missing, or the environment makes no sense.
    """
    rank, size, local = read_place()
    ranks = Ranks(rank=rank, world_size=size, device=_pick_device(device, local))
    if size == 1:
        return ranks
    timeout = timedelta(seconds=timeout_s)
    with ranks.guard("forming the process group"):
        if not dist.is_initialized():
            backend = "nccl" if ranks.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
            ranks.owned = True
        ranks.control = dist.new_group(backend="gloo", timeout=timeout)
    return ranks


def close_ranks(ranks: Ranks) -> None:
    """Leave the group after a run that ended well."""
    if ranks.owned and dist.is_initialized():
        dist.destroy_process_group()


def _pick_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found:
        message = f"local rank {local_rank} has no CUDA device; this host has {found}"
        raise ConfigurationError(message, hint='set run.device = "cpu", or start fewer ranks')
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
