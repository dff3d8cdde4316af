"""A world of real processes that talk over gloo, forked from this one, and ports for servers.

Forking starts a rank in about 0.1 s where a fresh interpreter needs seconds to import torch.
The parent must not have started torch's thread pools or process groups.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_LOWEST = 10_000  # below it, services have ports of their own
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_turns = itertools.count()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on or is likely to take before its user.

    The kernel hands the ports of its own range to everyone who asks for any port, and to every
    connection, so one of those may be gone by the time that a server starts. This one is from
    below that range, and processes that ask at the same time begin at different places.

    Returns:
        The number of the port.

    Raises:
        OSError: Every port below the kernel's range is in use.
    """
    span = max(_end() - _LOWEST, 1)
    for _ in range(span):
        # Neighbours in process numbers are neighbours in time: a prime keeps them far apart.
        port = _LOWEST + (os.getpid() * 1009 + next(_turns)) % span
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    message = f"all ports from {_LOWEST} to {_LOWEST + span - 1} of 127.0.0.1 are in use"
    raise OSError(message)


def _end() -> int:
    """Return where the kernel's own range begins; Linux's default where it cannot be asked."""
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except OSError:
        return 32_768


T = TypeVar("T")


def run_processes(
    world_size: int,
    work: Callable[[int], T],
    *,
    timeout_s: float = 60.0,
    backend: str = "gloo",
) -> list[T]:
    """Run ``work(rank)`` in ``world_size`` processes joined by a process group.

    Args:
        world_size: Number of processes.
        work: Called with the rank; the result must be picklable.
        timeout_s: Bound on the whole run and on each collective, in seconds.
        backend: Backend of the group; it must be known to torch already.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: A rank raised, died or ran past the time; holds its traceback.

    Examples:
        >>> run_processes(2, lambda rank: rank * 10)
        [0, 10]
    """
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, world_size, port, work, results, timeout_s, backend)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    work: Callable[[int], Any],
    results: Any,
    timeout_s: float,
    backend: str,
) -> None:
    parent = os.getppid()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    outcome: tuple[int, bool, bytes | str]
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # Pickled here: a queue would hand tensors over as file descriptors of this process.
        outcome = (rank, True, pickle.dumps(work(rank)))
    except BaseException:  # noqa: BLE001 - handed to the parent
        outcome = (rank, False, traceback.format_exc())
    results.put(outcome)
    results.close()
    results.join_thread()
    while rank == 0 and os.getppid() == parent:
        # This rank serves the store of addresses. A peer that is still setting up a group would
        # fail if it were gone; the parent ends this process when it has all results.
        time.sleep(0.05)
    # Leaving without the interpreter's shutdown: gloo's threads may still wait for a dead peer.
    os._exit(0)


def _collect(processes: list[Any], results: Any, timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    by_rank: dict[int, Any] = {}
    while len(by_rank) < len(processes):
        try:
            rank, fine, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if not p.is_alive() and r not in by_rank]
            if dead or time.monotonic() > deadline_s:
                state = f"ranks {dead} died" if dead else f"no result within {timeout_s} s"
                raise RuntimeError(state) from None
            continue
        if not fine:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        by_rank[rank] = pickle.loads(value)  # noqa: S301 - written by our own child
    return [by_rank[rank] for rank in range(len(processes))]
