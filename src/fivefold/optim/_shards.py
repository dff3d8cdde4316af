"""The ranks that act as one worker, where a worker is more than one rank.

References:
    ZeRO, arXiv 1910.02054; FSDP2's per-parameter sharding, ``torch.distributed.fsdp``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fivefold.errors import ConfigurationError
from fivefold.optim._comm_thread import named_errors
from fivefold.optim.transport import OWN_GROUP, as_group, broadcast_bytes, end_group

# As much is gathered at once; the room for it is S times as large.
_BUCKET_BYTES = 2**20

_APART = (
    'shard inside the worker alone (fully_shard with mesh["shard"]), so that gradients stay there, '
    'and give process_group the same part of the other workers (mesh["replicate"])'
)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that holds this rank's part, without gradient tracking."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def memory_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what is equal for tensors of the same elements in memory; None for no elements."""
    local = local_tensor(tensor)
    if not local.numel() or local.is_meta or local.layout != torch.strided:
        return None
    return local.data_ptr(), local.device, local.dtype, local.shape, local.stride()


@dataclass(frozen=True)
class RowShare:
    """Rows of every tensor that a rank owns: part ``place`` of ``count``."""

    place: int = 0
    count: int = 1

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part: its rows, of a DTensor its own shard."""
        local = local_tensor(tensor)
        return local if self.count == 1 else _rows(local, self.place, self.count)


def _rows(local: torch.Tensor, place: int, count: int) -> torch.Tensor:
    # As ``fully_shard`` cuts them, so that both kinds of worker have checkpoints of one form.
    whole = local.view(1) if local.dim() == 0 else local
    per_rank = -(-whole.shape[0] // count)
    start = min(place * per_rank, whole.shape[0])
    return whole.narrow(0, start, min(per_rank, whole.shape[0] - start))


class WorkerGroup:
    """The ranks of one worker, in a process group of their own.

    Where parameters are replicated inside the worker, the outer state ``splits``: a rank has some
    rows of each parameter, sends those alone, and after a merge the rows are gathered.
    """

    # The group is used for nothing else: collectives of one group are matched by their order, and
    # those of the model's own sharding come at other moments.

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        splits: bool,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.ranks = tuple(ranks)
        self.splits = splits
        self._device = device
        self._rank = dist.get_rank()
        with named_errors(self._rank, "the set-up of the worker's process group"):
            self._group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
                group_desc=OWN_GROUP,
            )
        self.place = self.ranks.index(self._rank)
        self.size = len(self.ranks)
        # Numbers come from the host and go back there: on a stream of its own nothing that is
        # queued on the compute stream has to end first.
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    def close(self) -> None:
        """End the process group."""
        end_group(self._group)

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """These ranks as a mesh of one dimension."""
        return DeviceMesh.from_group(self._group, self._device.type)

    @property
    def placements(self) -> tuple[Shard, ...]:
        """Return how the outer state lies on the mesh, where it is split here."""
        return (Shard(0),)

    @property
    def share(self) -> RowShare:
        """Return which rows of each local tensor this rank's outer state covers."""
        return RowShare(self.place, self.size) if self.splits else RowShare()

    def copies_of(self, tensor: torch.Tensor) -> int:
        """Return how many ranks hold what this rank's outer state covers of a tensor."""
        # With tensor parallelism beside fully_shard some parameters are split among all ranks, and
        # some (norms) among those of one dimension of the mesh.
        if self.splits:
            return 1
        parts = 1
        if isinstance(tensor, DTensor):
            sizes = zip(tensor.placements, tensor.device_mesh.mesh.shape, strict=True)
            parts = math.prod(size for each, size in sizes if not isinstance(each, Replicate))
        return self.size // parts

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by place."""
        stream = contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)
        with stream:
            mine = torch.tensor(values, dtype=torch.float64, device=self._device)
            parts = self._gather_tensor(mine, what="a sum over the shards of this worker")
            rows: list[list[float]] = torch.stack(parts).tolist()
        return rows

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over the ranks: the same bits on every rank."""
        return [math.fsum(column) for column in zip(*self.gather(values), strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite plain tensors with those of the first place; DTensors stay as they are."""
        with named_errors(self._rank, "the start of this worker's ranks"):
            for tensor in tensors:
                if not isinstance(tensor, DTensor):
                    broadcast_bytes(tensor, source=self.ranks[0], group=self._group)

    @torch.no_grad()
    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set small plain tensors to their mean over the ranks, the same bits on every rank."""
        for tensor in tensors:
            mine = tensor.detach().double().contiguous()
            parts = self._gather_tensor(mine, what="the average of this worker's buffers")
            total = parts[0]
            for part in parts[1:]:  # a reduction's order would be the processor's
                total += part
            tensor.detach().copy_(total.div_(self.size))

    @torch.no_grad()
    def share_rows(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite all rows of the tensors with their owners'."""
        kinds: dict[tuple[torch.device, torch.dtype], list[list[torch.Tensor]]] = {}
        for tensor in tensors:
            local = local_tensor(tensor)
            chunks = kinds.setdefault((local.device, local.dtype), [])
            chunks.extend(_chunks([_rows(local, place, self.size) for place in range(self.size)]))
        for chunks in kinds.values():
            for bucket in _buckets(chunks):
                self._share_bucket(bucket)

    def _share_bucket(self, bucket: Sequence[Sequence[torch.Tensor]]) -> None:
        # The first place has the most rows; the others' messages are filled up.
        sizes = [parts[0].numel() for parts in bucket]
        mine = bucket[0][0].new_zeros(sum(sizes))
        for parts, room in zip(bucket, torch.split(mine, sizes), strict=True):
            part = parts[self.place]
            room[: part.numel()].view(part.shape).copy_(part)
        found = self._gather_tensor(mine, what="the gathering of this worker's parameters")
        for place, theirs in enumerate(found):
            if place != self.place:
                for parts, room in zip(bucket, torch.split(theirs, sizes), strict=True):
                    part = parts[place]
                    part.copy_(room[: part.numel()].view(part.shape))

    def _gather_tensor(self, mine: torch.Tensor, *, what: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with named_errors(self._rank, what):
            dist.all_gather(parts, mine, group=self._group)
        return parts


def _chunks(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut each rank's part of a tensor into runs of few rows, the same of every part."""
    rows = parts[0].shape[0] if parts[0].numel() else 0
    at_once = max(_BUCKET_BYTES * rows // max(parts[0].nbytes, 1), 1)
    for first in range(0, rows, at_once):
        yield [part[first : first + at_once] for part in parts]


def _buckets(chunks: Iterable[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    bucket: list[list[torch.Tensor]] = []
    filled = 0
    for parts in chunks:
        if bucket and filled + parts[0].nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parts)
        filled += parts[0].nbytes
    if bucket:
        yield bucket


def reshard(model: torch.nn.Module) -> None:
    """Let ``fully_shard`` models go back to their sharded parameters."""
    # After a forward pass without a backward pass (evaluation), or with
    # ``reshard_after_backward=False``, a module still computes with gathered copies, which would
    # not see what is written into the shards.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def worker_group_of(
    model: torch.nn.Module,
    shard_group: dist.ProcessGroup | DeviceMesh | None,
    *,
    peers: Sequence[int] | None,
    timeout_s: float,
) -> WorkerGroup | None:
    """Find the ranks that act as one worker with this one (collective where there are some)."""
    apart = set(peers) - {dist.get_rank()} if peers else set()
    sharded = _sharded_ranks(model, peers=apart)
    given = None if shard_group is None else _given_ranks(shard_group)
    if sharded is not None and given is not None and set(sharded) != set(given):
        message = f"shard_group has ranks {given}, but parameters are sharded over {sharded}"
        raise ConfigurationError(message, hint="leave shard_group out for sharded parameters")
    ranks = given if sharded is None else sharded
    if ranks is None or len(ranks) == 1:
        return None
    others = sorted(apart.intersection(ranks))
    if others:
        message = f"ranks {others} are in shard_group and also in process_group"
        raise ConfigurationError(message, hint=_APART)
    device = local_tensor(next(iter(model.parameters()))).device
    return WorkerGroup(ranks, splits=sharded is None, device=device, timeout_s=timeout_s)


def _given_ranks(shard_group: dist.ProcessGroup | DeviceMesh) -> tuple[int, ...]:
    group = as_group(shard_group, name="shard_group", dimension="shard")
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        message = f"shard_group has ranks {ranks}, but not this rank, {dist.get_rank()}"
        raise ConfigurationError(message, hint="give each rank the group of its own worker")
    return ranks


def _sharded_ranks(model: torch.nn.Module, *, peers: set[int]) -> tuple[int, ...] | None:
    """Return the ranks that share this model's parameters."""
    found: dict[tuple[int, ...], str] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            others = sorted(peers.intersection(parameter.device_mesh.mesh.reshape(-1).tolist()))
            if others:
                message = (
                    f"the mesh of parameter {name} has ranks {others}, which process_group counts "
                    "as other workers"
                )
                raise ConfigurationError(message, hint=_APART)
            found.setdefault(_ranks_of(name, parameter), name)
    widest = max(found, key=len, default=None)
    if widest is not None and not all(set(ranks) <= set(widest) for ranks in found):
        message = f"parameters {sorted(found.values())} are sharded over different ranks"
        raise ConfigurationError(message, hint="shard the whole model over one group of ranks")
    return widest


def _ranks_of(name: str, parameter: DTensor) -> tuple[int, ...]:
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.get_coordinate() is None or any(placement.is_partial() for placement in placements):
        message = f"parameter {name} has placements {placements}"
        raise ConfigurationError(message, hint="parameters must be sharded along dimensions")
    return tuple(sorted(int(rank) for rank in mesh.mesh.reshape(-1)))
