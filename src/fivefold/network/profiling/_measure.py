"""Measures the links between running ranks with point-to-point messages.

A message is answered by one byte, and half of the time of an empty exchange is taken off: clocks of
different hosts are never compared. Pairs are measured one after the other while the rest wait.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError, ConfigurationError, require_whole
from fivefold.network.profiling.profile import Contention, Profile

DEFAULT_SIZES_BYTES = (64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20)
_LEAST_S = 1e-9
# Small messages are dominated by noise and cost next to nothing: they are sent more often.
_SMALL_BYTES, _SMALL_TIMES = 16 << 10, 6


def profile_links(
    process_group: dist.ProcessGroup | None = None,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repetitions: int = 5,
    contention: bool = True,
) -> Profile:
    """Measure alpha and beta between each pair of ranks, and rates under contention.

    Args:
        process_group: The ranks; None is the default group. Data are on the GPU where its backend
            is NCCL, else on the CPU.
        sizes_bytes: Two or more message sizes. The largest should take well over a millisecond.
        repetitions: Exchanges of each size; the median counts.
        contention: Whether to measure transfers at the same time as well.

    Returns:
        The profile, the same on all ranks.

    Raises:
        ConfigurationError: There is no process group, sizes or repetitions are not usable, or
            ranks disagree on them.
        CommunicationError: A peer was lost or did not answer in the group's time; says where.

    Examples:
        >>> from fivefold.testing import run_processes
        >>> def work(rank):
        ...     return profile_links(sizes_bytes=(64, 65536), repetitions=2).num_ranks
        >>> run_processes(2, work)
        [2, 2]
    """
    if not dist.is_initialized():
        message = "there is no process group to measure"
        raise ConfigurationError(message, hint="call torch.distributed.init_process_group first")
    given = sizes_bytes if isinstance(sizes_bytes, Iterable) else (sizes_bytes,)
    sizes = tuple(sorted({require_whole("a size in sizes_bytes", size) for size in given}))
    if len(sizes) < 2:
        raise ConfigurationError(
            f"sizes_bytes must be two or more different sizes; got {sizes}",
            hint="for example (64, 65536, 4194304)",
        )
    require_whole("repetitions", repetitions, hint="5 is usual")
    probe = _Probe(process_group, max(sizes))
    hosts = probe.agree((sizes, repetitions, contention))
    times = np.full((probe.size, probe.size, len(sizes)), np.nan)
    for pair in itertools.combinations(range(probe.size), 2):
        for ends in (pair, pair[::-1]):
            times[ends] = probe.guarded(probe.pair, *ends, (sizes, repetitions))
    crowded = _contention(probe, hosts, repetitions) if contention and probe.size > 1 else None
    return Profile(
        hosts=hosts, backend=probe.backend, sizes_bytes=sizes, times_s=times, contention=crowded
    )


def _contention(probe: _Probe, hosts: tuple[str, ...], repetitions: int) -> Contention:
    ranks = range(probe.size)

    def rate(flows: list[tuple[int, int]]) -> float:
        """Return bytes per second over all of these transfers at once."""
        return float(probe.guarded(probe.crowd, 0, 0, (flows, repetitions)))

    out = [rate([(rank, other) for other in ranks if other != rank]) for rank in ranks]
    into = [rate([(other, rank) for other in ranks if other != rank]) for rank in ranks]
    everyone = rate(list(itertools.permutations(ranks, 2))) / probe.size
    names = list(dict.fromkeys(hosts))
    by_host = {}
    if 1 < len(names) < probe.size:
        for name in names:
            others = [rank for rank in ranks if hosts[rank] != name]
            own = [rank for rank in ranks if hosts[rank] == name]
            flows = [(rank, others[place % len(others)]) for place, rank in enumerate(own)]
            by_host[name] = rate(flows)
    return Contention(
        out_bytes_per_s=np.array(out),
        in_bytes_per_s=np.array(into),
        all_bytes_per_s=everyone,
        host_out_bytes_per_s=by_host,
    )


class _Probe:
    """One rank's end of every measurement."""

    def __init__(self, group: dist.ProcessGroup | None, largest: int) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = str(dist.get_backend(group)).lower()
        cuda = "nccl" in self.backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        self.backend = "nccl" if cuda else self.backend
        self.token = self._buffer(1)
        self.largest = largest
        self.data = self._buffer(largest)

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def agree(self, arguments: Any) -> tuple[str, ...]:
        """Return the hosts of all ranks, once all have the same arguments."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (arguments, socket.gethostname()), group=self.group)
        for rank, (theirs, _) in enumerate(gathered):
            if theirs != gathered[0][0]:
                raise ConfigurationError(
                    f"rank {rank} measures with {theirs}, rank 0 with {gathered[0][0]}",
                    hint="give every rank the same sizes, repetitions and contention",
                )
        return tuple(host for _, host in gathered)

    def guarded(self, measure: Any, source: int, target: int, arguments: Any) -> Any:
        """Run a measurement and hand its result, found by one rank, to all."""
        try:
            found = [measure(source, target, *arguments)]
            dist.broadcast_object_list(found, src=self._global(source), group=self.group)
        except RuntimeError as error:
            place = f"rank {source} to rank {target}" if source != target else "under contention"
            raise CommunicationError(
                f"rank {self.rank} lost a peer while {place} was measured: {error}",
                hint="look at the other ranks' output; a longer timeout of the group may help",
            ) from error
        return found[0]

    def _send(self, data: torch.Tensor, rank: int) -> None:
        dist.send(data, dst=self._global(rank), group=self.group)

    def _receive(self, data: torch.Tensor, rank: int) -> None:
        dist.recv(data, src=self._global(rank), group=self.group)
        self._synchronise()

    def _synchronise(self) -> None:
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def pair(
        self, source: int, target: int, sizes: tuple[int, ...], repetitions: int
    ) -> list[float] | None:
        """Return the median one-way times of each size, on the sender; None elsewhere."""
        empty_s = self._exchange(source, target, 1, _SMALL_TIMES * repetitions)
        times = [
            self._exchange(
                source, target, size, repetitions * (_SMALL_TIMES if size <= _SMALL_BYTES else 1)
            )
            for size in sizes
        ]
        # The answer and, for the smallest message, half of its own exchange are not the link's.
        return [max(_LEAST_S, spent - empty_s / 2.0) for spent in times]

    def _exchange(self, source: int, target: int, size: int, repetitions: int) -> float:
        data = self.data[:size]
        spent = []
        for _ in range(repetitions + 1):  # the first warms up, and empties token buckets
            if self.rank == source:
                started_s = time.perf_counter()
                self._send(data, target)
                self._receive(self.token, target)
                spent.append(time.perf_counter() - started_s)
            elif self.rank == target:
                self._receive(data, source)
                self._send(self.token, source)
        return statistics.median(spent[1:]) if spent else 1.0

    def crowd(
        self, _source: int, _target: int, flows: list[tuple[int, int]], repetitions: int
    ) -> float:
        """Return bytes per second over all flows, from a common start to the last arrival."""
        spent = []
        into = {a: self._buffer(self.largest) for a, b in flows if b == self.rank}
        for _ in range(min(repetitions, 3) + 1):
            dist.barrier(group=self.group)
            started_s = time.perf_counter()
            works = [
                dist.irecv(buffer, src=self._global(peer), group=self.group)
                for peer, buffer in into.items()
            ]
            works += [
                dist.isend(self.data, dst=self._global(b), group=self.group)
                for a, b in flows
                if a == self.rank
            ]
            for work in works:
                if work is not None:
                    work.wait()
            self._synchronise()
            own_s = time.perf_counter() - started_s
            slowest = torch.tensor([own_s], dtype=torch.float64, device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
            spent.append(float(slowest))
        return len(flows) * self.largest / statistics.median(spent[1:])
