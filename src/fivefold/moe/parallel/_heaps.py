"""Symmetric heaps: memory of every rank that every rank can write to, at the same offsets.

Three kinds behind one interface. A kernel gets nothing but a table of addresses, one per rank, so
it does not know which kind it works on.

- ``VirtualHeap``: all ranks in one process and one launch, on one device. For tests, and for one
  GPU.
- ``SharedMemoryHeap``: processes on one machine, on the CPU, through files that are mapped.
- ``TorchSymmetricHeap``: GPUs of one machine that reach each other's memory, through
  ``torch.distributed._symmetric_memory``.

Setting a heap up is collective and its waits are bounded. Using it is not: who may write what, and
when, is the business of the group.
"""

from __future__ import annotations

import importlib
import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    UnsupportedError,
    require_number,
    require_whole,
)
from fivefold.files import write_atomically

_ALIGNMENT_BYTES = 256
_LOOK_EVERY_S = 0.005


class SymmetricHeap(AbstractContextManager["SymmetricHeap"]):
    """Memory of ``ranks`` ranks, as one of them sees it. Use one of its kinds."""

    def __init__(self, own: torch.Tensor, addresses: list[int], *, first_rank: int) -> None:
        self.ranks = len(addresses)
        self.first_rank = first_rank
        self.num_local, self.nbytes = own.shape
        self.own = own
        self.bases = torch.tensor(addresses, dtype=torch.int64, device=own.device)

    @property
    def device(self) -> torch.device:
        """Return where the memory is."""
        return self.own.device

    def close(self) -> None:
        """Let go of the memory; no rank may write to it any more."""
        self.own = self.own.new_empty(0)
        self.bases = self.bases.new_empty(0)

    def __exit__(self, *_: object) -> None:
        self.close()


def _rounded(nbytes: int, ranks: int, rank: int = 0) -> int:
    """Return the bytes of a rank's part; refuse sizes and ranks that are none."""
    require_whole("ranks of a heap", ranks)
    require_whole("nbytes of a heap", nbytes)
    require_whole("rank", rank, least=0, most=ranks - 1)
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class VirtualHeap(SymmetricHeap):
    """All ranks in this process: one launch does the work of all of them.

    Args:
        ranks: P.
        nbytes: Of each.
        device: Where.

    Raises:
        ConfigurationError: A size is not positive.

    Examples:
        >>> with VirtualHeap(2, nbytes=64) as heap:
        ...     int(heap.bases[1] - heap.bases[0]) == heap.nbytes
        True
    """

    def __init__(self, ranks: int, *, nbytes: int, device: str | torch.device = "cpu") -> None:
        nbytes = _rounded(nbytes, ranks)
        own = torch.zeros(ranks, nbytes, dtype=torch.uint8, device=device)
        addresses = [own.data_ptr() + rank * nbytes for rank in range(ranks)]
        super().__init__(own, addresses, first_rank=0)


class SharedMemoryHeap(SymmetricHeap):
    """Processes of one machine, on the CPU: every rank maps every rank's file.

    The files are unlinked as soon as all ranks have mapped them, so nothing stays behind. Where
    triton interprets the kernels (``TRITON_INTERPRET=1``) a group of real processes runs
    on it: for tests, not for speed.

    Args:
        folder: An empty folder that all ranks see, best in memory (``/dev/shm``).
        rank: Of this process.
        ranks: P.
        nbytes: Of each; the same on all ranks.
        tag: What else must be the same on all ranks.
        timeout_s: Longest wait for the other ranks.

    Raises:
        CommunicationError: A rank did not come in time.
        ConfigurationError: Sizes or tags differ, or the folder was used before.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     heap = SharedMemoryHeap(folder, rank=0, ranks=1, nbytes=64)
        >>> heap.own.shape, heap.num_local
        (torch.Size([1, 256]), 1)
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        ranks: int,
        nbytes: int,
        tag: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        nbytes = _rounded(nbytes, ranks, rank)
        require_number("timeout_s", timeout_s)
        self._folder = Path(folder)
        self._rank = rank
        deadline_s = time.monotonic() + timeout_s
        path = self._folder / f"rank-{rank}"
        try:
            with path.open("xb") as file:
                file.truncate(nbytes)
        except FileExistsError:
            raise ConfigurationError(
                f"rank {rank} has been here before: {path} exists",
                hint="give every run an empty folder, and every process a rank of its own",
            ) from None
        self._say("ready", json.dumps({"nbytes": nbytes, "tag": tag}))
        parts = []
        for peer in range(ranks):
            said = json.loads(self._hear("ready", peer, deadline_s, timeout_s))
            if said != {"nbytes": nbytes, "tag": tag}:
                raise ConfigurationError(
                    f"rank {peer} has {said}, rank {rank} {nbytes} bytes and tag {tag!r}",
                    hint="make the heap with the same sizes on all ranks",
                )
            file_of_peer = str(self._folder / f"rank-{peer}")
            part = torch.from_file(file_of_peer, shared=True, size=nbytes, dtype=torch.uint8)
            parts.append(part)
        self._say("mapped", "")
        for peer in range(ranks):
            self._hear("mapped", peer, deadline_s, timeout_s)
        path.unlink()
        self._parts = parts  # keeps the mappings
        addresses = [part.data_ptr() for part in parts]
        super().__init__(parts[rank][None], addresses, first_rank=rank)

    def _say(self, what: str, text: str) -> None:
        write_atomically(self._folder / f"{what}-{self._rank}", text)

    def _hear(self, what: str, peer: int, deadline_s: float, timeout_s: float) -> str:
        path = self._folder / f"{what}-{peer}"
        while True:
            try:
                return path.read_text()
            except FileNotFoundError:
                if time.monotonic() > deadline_s:
                    raise CommunicationError(
                        f"rank {self._rank} waited {timeout_s:g} s for rank {peer} to be {what} "
                        "while the shared heap was set up",
                        hint="start all ranks with the same folder; look at that rank's log",
                    ) from None
                time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Unmap all ranks' memory."""
        super().close()
        self._parts = []


class TorchSymmetricHeap(SymmetricHeap):
    """GPUs of one machine, by ``torch.distributed._symmetric_memory``: peers write over NVLink.

    This needs CUDA devices; it has not run anywhere yet.

    Args:
        nbytes: Of each rank; the same on all ranks.
        device: The CUDA device of this process.
        group: A process group that is set up; None for the default one.

    Raises:
        ConfigurationError: There is no process group, or a size is not positive.
        UnsupportedError: This machine or this torch cannot do it, says why; or a rank's memory
            cannot be reached.

    Examples:
        >>> TorchSymmetricHeap.missing(torch.device("cpu"))
        'torch symmetric memory needs a CUDA device; got cpu'
    """

    def __init__(
        self, *, nbytes: int, device: str | torch.device = "cuda", group: Any = None
    ) -> None:
        place = torch.device(device)
        if (reason := self.missing(place)) is not None:
            raise UnsupportedError(
                reason, hint="VirtualHeap has all ranks on one device, SharedMemoryHeap on the CPU"
            )
        distributed = torch.distributed
        if not distributed.is_initialized():
            message = "there is no process group"
            raise ConfigurationError(message, hint="call torch.distributed.init_process_group")
        group = distributed.group.WORLD if group is None else group
        nbytes = _rounded(nbytes, group.size())
        module = importlib.import_module("torch.distributed._symmetric_memory")
        memory = module.empty(nbytes, dtype=torch.uint8, device=place)
        memory.zero_()
        handle = module.rendezvous(memory, group)
        # All ranks' zeros are there before anyone writes.
        torch.cuda.synchronize(place)
        distributed.barrier(group)
        self._handle = handle
        super().__init__(memory[None], _addresses(handle, memory), first_rank=handle.rank)

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Return why it cannot work on a device of this process, or None where it can."""
        if device.type != "cuda":
            return f"torch symmetric memory needs a CUDA device; got {device.type}"
        if not torch.cuda.is_available():
            return "torch symmetric memory needs a CUDA device; torch finds none"
        if not torch.distributed.is_available():
            return "torch symmetric memory needs torch.distributed, which this torch lacks"
        return None

    def close(self) -> None:
        """Let go of the memory, after all ranks' launches have ended."""
        super().close()
        self._handle = None


def _addresses(handle: Any, memory: torch.Tensor) -> list[int]:
    """Return where each rank's part begins in this process.

    torch names the blocks that the memory was cut from. In newer versions a tensor need not begin
    where its block does; the distance is the same on all ranks.
    """
    bases = [int(base or 0) for base in handle.buffer_ptrs]
    far = [rank for rank, base in enumerate(bases) if not base]
    if far:
        raise UnsupportedError(
            f"the memory of rank {far[0]} cannot be reached from rank {handle.rank}",
            hint="the ranks must be on one machine, on GPUs that reach each other",
        )
    distance = int(getattr(handle, "offset", 0))
    found = [base + distance for base in bases]
    if found[handle.rank] != memory.data_ptr():
        message = "torch's symmetric memory does not lie where it says"
        raise UnsupportedError(message, hint="report this with the version of torch")
    return found
